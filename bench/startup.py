"""Does the time to a resumed run's first step depend on the steps done? And how long does `shardtune --help` take?

    python bench/startup.py [--late 3000] [--turns 5] [--save]

A run is stopped early and another one late; copies of both are resumed for one step, in turn, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
EARLY = 10


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "shardtune", *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return time.perf_counter() - began


def make_recipe(folder: Path) -> Path:
    rows = [{"question": f"What comes after {number}?", "answer": f"{number + 1}"} for number in range(600)]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    make_inputs(folder, data, count=None, width=64, layers=2, vocabulary=400, max_length=128)
    recipe = {
        "runner": {"max_epochs": -1, "max_steps": 1, "logger": {"log_path": str(folder / "runs")}},
        "actor": {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "model": {"model_path": str(folder / "model"), "precision": "fp32"},
            "optim": {"lr_scheduler": "constant"},
        },
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"), "max_length": 128},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return file


def resume_once(folder: Path, recipe: Path, source: str, steps: int) -> float:
    """Seconds of a fresh process that resumes a copy of a run and does one more step."""
    shutil.copytree(folder / "runs" / source, folder / "runs" / "copy", symlinks=True)
    seconds = timed(["train", str(recipe), "runner.logger.experiment_name=copy", f"runner.max_steps={steps + 1}"])
    shutil.rmtree(folder / "runs" / "copy")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", type=int, default=3000, help="steps of the late run")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        recipe = make_recipe(folder)
        for source, steps in (("early", EARLY), ("late", arguments.late)):
            timed(["train", str(recipe), f"runner.logger.experiment_name={source}", f"runner.max_steps={steps}"])
        early, late, helps = [], [], []
        for _ in range(arguments.turns):
            early.append(resume_once(folder, recipe, "early", EARLY))
            late.append(resume_once(folder, recipe, "late", arguments.late))
            helps.append(timed(["--help"]))
    ratios = [b / a for a, b in zip(early, late, strict=True)]
    rows = [
        [f"resume after {EARLY} steps, one step, end", f"{statistics.median(early):.2f}", ""],
        [
            f"resume after {arguments.late:,} steps, one step, end",
            f"{statistics.median(late):.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) of the above",
        ],
        ["shardtune --help", f"{statistics.median(helps):.2f}", ""],
    ]
    text = f"{machine()}; whole processes, medians of {arguments.turns} turns.\n\n" + table(
        ["", "seconds", "ratio"], rows
    )
    print(text)
    if arguments.save:
        write_section("startup", text)


if __name__ == "__main__":
    main()
