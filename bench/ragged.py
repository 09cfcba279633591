"""Memory and kernels of a process over a thousand steps of ragged rows on a CPU: `python bench/ragged.py --data FILE`.

oneDNN, which computes products in half precision, compiles a kernel for each size it meets and keeps the last 1,024 of
them, so rows of ever new lengths cost time and memory until that number is reached. Each precision is trained with
micro-batches filled up to a few sizes (`actor.fill_micro_batches`) and not filled, in a process of its own, one after
the other. Counted are the kernels that oneDNN reports to have made.

    python bench/ragged.py --data gsm8k_train.jsonl [--steps 1000] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import throughput
from results import machine, table, write_section
from workload import make_inputs

MADE = "create:cache_miss"
SETTINGS = {"filled": {"fill_micro_batches": True}, "not filled": {"fill_micro_batches": False}, "as it is": {}}
MARKS = (1, 10, 30, 100, 300, 1000)


class Turns:
    """Prints the resident memory after each step; ends the process after the last."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def step_done(self, tokens: float) -> None:
        resident = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
        assert resident is not None
        print("\n@" + json.dumps({"tokens": tokens, "gb": int(resident[1]) * 1024 / 1e9}), flush=True)
        self._left -= 1
        if not self._left:
            os._exit(0)


def train(folder: Path, precision: str, setting: str, steps: int) -> None:
    """Train in this process; what a step used is printed."""
    plain = throughput.recipe

    def changed(folder: Path, precision: str) -> dict[str, object]:
        made = plain(folder, precision)
        made["actor"] |= SETTINGS[setting]
        return made

    throughput.recipe = changed
    throughput.run_shardtune(folder, precision, Turns(steps))  # pyright: ignore[reportArgumentType]


def measured(folder: Path, precision: str, setting: str, steps: int, threads: int) -> list[tuple[float, int]]:
    """After each step, the resident memory in GB and the kernels made so far."""
    command = [sys.executable, __file__, "--folder", str(folder), "--precision", precision, "--setting", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "ONEDNN_VERBOSE": "profile_create"}
    found: list[tuple[float, int]] = []
    made = 0
    with subprocess.Popen(
        [*command, "--steps", str(steps)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            made += MADE in line
            if line.startswith("@"):
                found.append((json.loads(line[1:])["gb"], made))
    if len(found) < steps:
        raise SystemExit(f"{precision}, {setting}: ended after {len(found)} of {steps} steps")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL rows with question and answer (GSM8K)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=7000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--settings", nargs="+", default=["filled", "not filled"], choices=list(SETTINGS))
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        train(arguments.folder, arguments.precision, arguments.setting, arguments.steps)
        return
    if arguments.data is None:
        parser.error("--data is needed: GSM8K's train.jsonl, or any rows with question and answer")
    marks = [mark for mark in MARKS if mark < arguments.steps] + [arguments.steps]
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        sizes = {"width": arguments.width, "layers": arguments.layers, "vocabulary": arguments.vocabulary}
        make_inputs(folder, arguments.data, count=arguments.rows, max_length=throughput.MAX_LENGTH, **sizes)
        for precision in arguments.precisions:
            for setting in arguments.settings:
                found = measured(folder, precision, setting, arguments.steps, arguments.threads)
                cells = [f"{found[mark - 1][0]:.2f} ({found[mark - 1][1]:,})" for mark in marks]
                rows.append([precision, setting, *cells])
                print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["", "", f"GB (kernels made) after step {marks[0]}", *(f"{mark:,}" for mark in marks[1:])]
    text = (
        f"Qwen2 {arguments.layers} x {arguments.width}, vocabulary {arguments.vocabulary:,}; "
        f"{throughput.ROWS_PER_STEP} rows a step, about 1,600 tokens; {arguments.threads} threads; resident "
        f"memory of the process.\n\n{table(heads, rows)}\n\n{machine()}."
    )
    print(text)
    if arguments.save:
        write_section("ragged", text)


if __name__ == "__main__":
    main()
