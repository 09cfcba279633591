"""Where the time of a training step goes on a CPU: `python bench/where.py --data FILE`.

Each precision and vocabulary is trained by a process of its own, with one thread, in the shape of `throughput.py`:
seconds of CPU for 1,000 tokens, over some steps, and then the shares of torch's operations in further steps, under its
profiler. Another version of the package is measured with its directory in `PYTHONPATH`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import throughput
from results import machine, table, write_section
from workload import make_inputs

WARM, TIMED, PROFILED = 10, 6, 4
GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"),
    "attention": ("scaled_dot_product",),
    "optimizer": ("_fused_adamw_", "linalg_vector_norm", "_foreach"),
    "copies and dtypes": ("aten::copy_", "aten::cat", "aten::fill_", "aten::zero_", "aten::index_select"),
    "multiplication, addition": ("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg", "aten::sum"),
    "other functions": ("aten::",),
}
"""By parts of operations' names, of which the first counts; matrix products by whole names."""
REST = "Python and autograd"


def group(name: str) -> str:
    """The group of an operation."""
    for heading, parts in GROUPS.items():
        if name in parts or (heading != "matrix products" and any(part in name for part in parts)):
            return heading
    return REST


class Turns:
    """Times some steps and profiles the next ones; then the process prints what it found and ends."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._step, self._tokens, self._began, self._seconds = 0, 0.0, 0.0, 0.0

    def step_done(self, tokens: float) -> None:
        self._step += 1
        if self._step == WARM:
            self._began = time.process_time()
        elif WARM < self._step <= WARM + TIMED:
            self._tokens += tokens
        if self._step == WARM + TIMED:
            self._seconds = time.process_time() - self._began
            self._profile.start()
        elif self._step == WARM + TIMED + PROFILED:
            self._profile.stop()
            shares: dict[str, float] = {}
            for event in self._profile.key_averages():
                shares[group(event.key)] = shares.get(group(event.key), 0.0) + event.self_cpu_time_total
            whole = sum(shares.values())
            found = {heading: share / whole for heading, share in shares.items()}
            print("\n@" + json.dumps({"seconds": 1000 * self._seconds / self._tokens, "shares": found}), flush=True)
            os._exit(0)


def measured(folder: Path, precision: str) -> tuple[float, dict[str, float]]:
    """Seconds for 1,000 tokens, and the shares of the groups."""
    command = [sys.executable, __file__, "--folder", str(folder), "--precision", precision]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not found:
        raise SystemExit(f"{precision} ended early:\n{done.stderr[-3000:]}")
    answer = json.loads(found[0][1:])
    return answer["seconds"], answer["shares"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL rows with question and answer (GSM8K)")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        throughput.run_shardtune(arguments.folder, arguments.precision, Turns())  # pyright: ignore[reportArgumentType]
        return
    if arguments.data is None:
        parser.error("--data is needed: GSM8K's train.jsonl, or any rows with question and answer")
    heads, rows = [*GROUPS, REST], []
    for vocabulary in arguments.vocabularies:
        with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
            folder, sizes = Path(name), {"width": 256, "layers": 4, "vocabulary": vocabulary}
            make_inputs(folder, arguments.data, count=arguments.rows, max_length=throughput.MAX_LENGTH, **sizes)
            for precision in arguments.precisions:
                seconds, shares = measured(folder, precision)
                rows.append(
                    [f"{vocabulary:,}", precision, f"{seconds:.3f}", *(f"{shares[head]:.0%}" for head in heads)]
                )
                print(*rows[-1], file=sys.stderr, flush=True)
    text = "Qwen2 4 x 256, one thread.\n\n" + table(["vocabulary", "", "CPU s per 1,000 tokens", *heads], rows)
    text += f"\n\n{machine()}."
    print(text)
    if arguments.save:
        write_section("where", text)


if __name__ == "__main__":
    main()
