"""Jobs under a real Slurm, with the script that is printed; `bench/clusters.py` makes a table of the same scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.dist.slurm import Slurm, slurm, why_no_slurm
from tests.support.dist.slurm_scenarios import NODES, SCENARIOS, Outcome, train_whole
from tests.support.tiny_run import Tiny, make_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("slurm"))
    train_whole(made)
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with slurm(NODES, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_happens_to_a_job(cluster: Slurm, tiny: Tiny, scenario: Callable[[Slurm, Tiny], Outcome]) -> None:
    cluster.restore()
    print(scenario(cluster, tiny))
