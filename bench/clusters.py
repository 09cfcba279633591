"""Jobs of Slurm on a cluster of this machine: time limits, dead nodes, preemption, arrays.

    python bench/clusters.py [--only time_limit …] [--save]

Slurm (Debian: slurm-wlm) and root are needed: each node lives in a network namespace. The job script is the one that
`shardtune launch --print --by slurm` prints. Each run is compared with one that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from results import machine, table, write_section  # noqa: E402

from tests.support.dist.slurm import slurm, why_no_slurm  # noqa: E402
from tests.support.dist.slurm_scenarios import NODES, SCENARIOS, train_whole  # noqa: E402
from tests.support.tiny_run import make_tiny  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {scenario.__name__: scenario for scenario in SCENARIOS}
    parser.add_argument("--only", nargs="+", choices=sorted(known), help="these scenarios")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the cluster is ended
    reason = why_no_slurm()
    if reason is not None:
        raise SystemExit(reason)
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, tempfile.TemporaryDirectory() as inputs:
        tiny = make_tiny(Path(inputs))
        train_whole(tiny)
        with slurm(NODES, Path(folder)) as cluster:
            version = cluster.run("sinfo", "--version").strip()
            for name in options.only or known:
                try:
                    found = known[name](cluster, tiny)
                except AssertionError as error:
                    failed.append(name)
                    print(f"{name}: {error}", flush=True)
                    cluster.restore()
                    continue
                rows.append([found.event, found.times, found.end])
                print(*rows[-1], sep=" | ", flush=True)
    text = f"{machine()}, {version}\n\n" + table(["event", "measured", "in the end"], rows)
    print(text)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    if options.save:
        write_section("clusters", text)


if __name__ == "__main__":
    main()
