"""Jobs on clusters of this machine: time limits, dead nodes, preemption and arrays of Slurm; jobs of Ray.

    python bench/clusters.py [--only time_limit …] [--save]

Slurm (Debian: slurm-wlm), ray[default] and root are needed: each node lives in a network namespace. The job script and
the commands are those that `shardtune launch --print` prints. Each run is compared with one that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from results import machine, table, write_section  # noqa: E402

from tests.support.dist import ray_scenarios, slurm_scenarios  # noqa: E402
from tests.support.dist.ray_scenarios import RayCluster, ray_cluster, why_no_ray  # noqa: E402
from tests.support.dist.slurm import Slurm, slurm, why_no_slurm  # noqa: E402
from tests.support.dist.slurm_scenarios import Outcome  # noqa: E402
from tests.support.tiny_run import Tiny, make_tiny  # noqa: E402

SLURM = {scenario.__name__: scenario for scenario in slurm_scenarios.SCENARIOS}
RAY = {scenario.__name__: scenario for scenario in ray_scenarios.SCENARIOS}


@contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm(slurm_scenarios.NODES, Path(folder)) as cluster,
    ):
        yield cluster


@dataclass
class Outcomes:
    """The rows of the table, the scenarios that failed, and the versions of the clusters."""

    rows: list[list[str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def add(self, chosen: Mapping[str, Callable[..., Outcome]], cluster: Slurm | RayCluster, tiny: Tiny) -> None:
        self.versions.append(cluster.version())
        for name, scenario in chosen.items():
            cluster.restore()
            try:
                found = scenario(cluster, tiny)
            except AssertionError:
                self.failed.append(name)
                print(f"{name}: {traceback.format_exc()}", flush=True)
            else:
                self.rows.append([found.event, found.times, found.end])
                print(*self.rows[-1], sep=" | ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SLURM, *RAY], default=[*SLURM, *RAY], help="these scenarios")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the clusters are ended
    parts = ((SLURM, why_no_slurm, slurm_cluster), (RAY, why_no_ray, partial(ray_cluster, 2)))
    chosen = [({name: part[name] for name in options.only if name in part}, why, make) for part, why, make in parts]
    for scenarios, why_not, _ in chosen:
        if scenarios and (reason := why_not()) is not None:
            raise SystemExit(reason)
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as inputs:
        tiny = make_tiny(Path(inputs))
        slurm_scenarios.train_whole(tiny)
        for scenarios, _, make in chosen:
            if scenarios:
                with make() as cluster:
                    outcomes.add(scenarios, cluster, tiny)
    text = (
        ", ".join([machine(), *outcomes.versions]) + "\n\n" + table(["event", "measured", "in the end"], outcomes.rows)
    )
    print(text)
    if outcomes.failed:
        raise SystemExit(f"failed: {', '.join(outcomes.failed)}")
    if options.save:
        write_section("clusters", text)


if __name__ == "__main__":
    main()
