"""How long until the first step, where 1 file or 50 files have to be tokenised first?

    python bench/first_step.py [--files 50] [--rows 2000] [--save]

Each command trains a single step with an empty cache, in a fresh process; files are equally large.
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
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_recipe(folder: Path, files: int, rows: int) -> Path:
    """A recipe, and `parts-1` and `parts-N` with so many files of so many rows."""
    questions = [{"question": f"What comes after {number}?", "answer": f"{number + 1}. " * 20} for number in range(200)]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)) + "\n")
    make_inputs(folder, data, count=None, width=64, layers=2, vocabulary=400, max_length=512)
    for number in (1, files):
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


def seconds(folder: Path, recipe: Path, files: int, cache: str) -> float:
    """Of a whole process that trains one step, with an empty cache."""
    name = f"{cache}-{files}"
    data = [f"data.train_data_paths={folder}/parts-{files}", f"data.cache={cache}", f"data.cache_dir={folder}/{name}"]
    command = ["train", str(recipe), f"runner.logger.experiment_name={name}", *data]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "shardtune", *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2000, help="rows of a file")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        recipe = make_recipe(folder, arguments.files, arguments.rows)
        rows = []
        for cache in ("by_file", "whole"):
            one, all_files = (seconds(folder, recipe, files, cache) for files in (1, arguments.files))
            rows.append([f"`data.cache: {cache}`", f"{one:.1f}", f"{all_files:.1f}", f"{all_files / one:.2f}"])
    text = f"{machine()}; files of {arguments.rows:,} rows; whole processes, a turn each.\n\n" + table(
        ["", "seconds, 1 file", f"seconds, {arguments.files} files", "ratio"], rows
    )
    print(text)
    if arguments.save:
        write_section("first_step", text)


if __name__ == "__main__":
    main()
