"""What does a process cost that trains one step, where 1, 50 or 1,000 files are named?

    python bench/first_step.py [--files 50] [--many 1000] [--rows 2000] [--turns 3] [--save]

Each command trains a single step with an empty cache, in a fresh process; files are equally large. CPU seconds are
those of the process and of those that it started. `data.cache: whole` has one turn, and not the many files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Cost:
    """Wall seconds, and seconds that processors were busy."""

    wall: float
    cpu: float


def make_recipe(folder: Path, numbers: Sequence[int], rows: int) -> Path:
    """A recipe, and `parts-N` for each number of files, of so many rows."""
    questions = [{"question": f"What comes after {number}?", "answer": f"{number + 1}. " * 20} for number in range(200)]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)) + "\n")
    make_inputs(folder, data, count=None, width=64, layers=2, vocabulary=400, max_length=512)
    for number in numbers:
        parts = folder / f"parts-{number}"
        parts.mkdir(exist_ok=True)
        for part in range(number):
            lines = [
                {"prompt": f"What comes after {part * rows + row}?", "completion": f"{part * rows + row + 1}. " * 20}
                for row in range(rows)
            ]
            (parts / f"{part:03}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    recipe = {
        "runner": {"max_epochs": -1, "max_steps": 1, "logger": {"log_path": str(folder / "runs")}},
        "actor": {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "model": {"model_path": str(folder / "model"), "precision": "fp32"},
            "optim": {"lr_scheduler": "constant"},
        },
        "data": {"max_length": 512, "num_workers": 0},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return file


def cost(folder: Path, recipe: Path, files: int, cache: str) -> Cost:
    """Of a whole process that trains one step, with an empty cache."""
    name = f"{cache}-{files}-{uuid.uuid4().hex[:6]}"
    data = [f"data.train_data_paths={folder}/parts-{files}", f"data.cache={cache}", f"data.cache_dir={folder}/{name}"]
    command = ["train", str(recipe), f"runner.logger.experiment_name={name}", *data]
    began, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, "-m", "shardtune", *command], capture_output=True, text=True)
    took, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(took, busy)


def line(cache: str, files: int, costs: Sequence[Cost], one: Sequence[Cost]) -> list[str]:
    """The medians of some turns, beside those with one file."""
    cpu, wall = [each.cpu for each in costs], median(each.wall for each in costs)
    spread = f" ({min(cpu):.1f}–{max(cpu):.1f})" if len(cpu) > 1 else ""
    ratio = f"{median(cpu) / median(each.cpu for each in one):.2f}"
    return [f"`data.cache: {cache}`", f"{files:,}", f"{median(cpu):.1f}{spread}", ratio, f"{wall:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=50)
    parser.add_argument("--many", type=int, default=1000, help="files of data.cache: by_file alone")
    parser.add_argument("--rows", type=int, default=2000, help="rows of a file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    numbers, rows = (1, arguments.files, arguments.many), list[list[str]]()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        recipe = make_recipe(folder, numbers, arguments.rows)
        for cache, turns, some in (("by_file", arguments.turns, numbers), ("whole", 1, numbers[:2])):
            costs: dict[int, list[Cost]] = {number: [] for number in some}
            for _ in range(turns):
                for number in some:
                    costs[number].append(cost(folder, recipe, number, cache))
            rows += [line(cache, number, costs[number], costs[1]) for number in some]
    turns = f"medians of {arguments.turns} turns (`by_file`)"
    text = f"{machine()}; files of {arguments.rows:,} rows; whole processes, {turns}.\n\n"
    text += table(["", "files", "CPU seconds", "to 1 file", "seconds"], rows)
    print(text)
    if arguments.save:
        write_section("first_step", text)


if __name__ == "__main__":
    main()
