"""Jobs on a Ray cluster of two hosts, with the commands that are printed; `bench/clusters.py` makes a table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import shardtune
from tests.support.dist.ray_scenarios import SCENARIOS, RayCluster, ray_cluster, why_no_ray
from tests.support.dist.slurm_scenarios import Outcome
from tests.support.tiny_run import Tiny, make_tiny

pytestmark = pytest.mark.slow
Scenario = Callable[[RayCluster, Tiny], Outcome]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("ray"))
    shardtune.train(made.recipe("whole", runner__nproc_per_node=2, runner__save_interval=2, runner__device="cpu"))
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if (reason := why_no_ray()) is not None:
        pytest.skip(reason)
    with ray_cluster(2) as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_happens_to_a_job(
    cluster: RayCluster, tiny: Tiny, scenario: Callable[[RayCluster, Tiny], Outcome]
) -> None:
    print(scenario(cluster, tiny))
