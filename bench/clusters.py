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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from results import machine, table, write_section  # noqa: E402

from tests.support.dist import ray_scenarios, slurm_scenarios  # noqa: E402
from tests.support.dist.ray_scenarios import ray_cluster, why_no_ray  # noqa: E402
from tests.support.dist.slurm import slurm, why_no_slurm  # noqa: E402
from tests.support.tiny_run import Tiny, make_tiny  # noqa: E402

SLURM = {scenario.__name__: scenario for scenario in slurm_scenarios.SCENARIOS}
RAY = {scenario.__name__: scenario for scenario in ray_scenarios.SCENARIOS}


class Outcomes:
    """The rows of the table, and the scenarios that failed."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.failed: list[str] = []

    def add(self, name: str, scenario, cluster, tiny: Tiny) -> None:
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
    chosen = [[name for name in options.only if name in part] for part in (SLURM, RAY)]
    for names, reason in zip(chosen, (why_no_slurm(), why_no_ray()), strict=True):
        if names and reason is not None:
            raise SystemExit(reason)
    outcomes, versions = Outcomes(), []
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, tempfile.TemporaryDirectory() as inputs:
        tiny = make_tiny(Path(inputs))
        slurm_scenarios.train_whole(tiny)
        if chosen[0]:
            with slurm(slurm_scenarios.NODES, Path(folder)) as cluster:
                versions.append(cluster.run("sinfo", "--version").strip())
                for name in chosen[0]:
                    outcomes.add(name, SLURM[name], cluster, tiny)
                    cluster.restore()
        if chosen[1]:
            with ray_cluster(2) as cluster:
                versions.append(cluster.run("--version").strip().replace(", version", ""))
                for name in chosen[1]:
                    outcomes.add(name, RAY[name], cluster, tiny)
    text = ", ".join([machine(), *versions]) + "\n\n" + table(["event", "measured", "in the end"], outcomes.rows)
    print(text)
    if outcomes.failed:
        raise SystemExit(f"failed: {', '.join(outcomes.failed)}")
    if options.save:
        write_section("clusters", text)


if __name__ == "__main__":
    main()
