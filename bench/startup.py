"""How long until the first step? Does it depend on the steps done before? And how long does `shardtune --help` take?

    python bench/startup.py [--late 3000] [--turns 5] [--beside CHECKOUT] [--save]

A run is stopped early and another one late; copies of both are resumed for one step, in turn, each in a fresh process.
New runs with an empty cache and with a full one are timed up to the line of their first step; so is, with `--beside`,
another checkout of the package.
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


def to_first_step(recipe: Path, name: str, cache: Path, checkout: Path | None = None) -> float:
    """Seconds from the start of a process to the line of a new run's first step."""
    words = [str(recipe), f"runner.logger.experiment_name={name}", f"data.cache_dir={cache}"]
    found = {} if checkout is None else {"PYTHONPATH": str(checkout)}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=checkout,
        env={**os.environ, **found, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                seconds = time.perf_counter() - began
                for _ in process.stdout:  # it ends by itself
                    pass
                return seconds
    raise SystemExit("".join(lines)[-3000:])


def first_steps(folder: Path, recipe: Path, turns: int, beside: Path | None) -> list[list[str]]:
    """Rows of the table: seconds to the first step of new runs, in turn."""
    checkouts = {"": None, **({f", {beside.name}": beside} if beside else {})}
    seconds: dict[str, list[float]] = {}
    for turn in range(turns):
        for label, checkout in checkouts.items():
            cache = folder / f"cache-{turn}-{bool(label)}"
            for state in ("empty", "full"):
                taken = to_first_step(recipe, f"first-{turn}-{state}-{bool(label)}", cache, checkout)
                seconds.setdefault(f"to the first step, cache {state}{label}", []).append(taken)
    alone = [sys.executable, "-c", "import torch, transformers.modeling_utils"]
    began = time.perf_counter()
    subprocess.run(alone, check=True)
    rows = [["importing torch and transformers alone", f"{time.perf_counter() - began:.2f}", ""]]
    return rows + [
        [what, f"{statistics.median(each):.2f}", f"{min(each):.2f}–{max(each):.2f}"] for what, each in seconds.items()
    ]


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
    parser.add_argument("--beside", type=Path, help="another checkout of the package, measured in turn")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        recipe = make_recipe(folder)
        new = first_steps(folder, recipe, arguments.turns, arguments.beside)
        for source, steps in (("early", EARLY), ("late", arguments.late)):
            timed(["train", str(recipe), f"runner.logger.experiment_name={source}", f"runner.max_steps={steps}"])
        early, late, helps = [], [], []
        for _ in range(arguments.turns):
            early.append(resume_once(folder, recipe, "early", EARLY))
            late.append(resume_once(folder, recipe, "late", arguments.late))
            helps.append(timed(["--help"]))
    ratios = [b / a for a, b in zip(early, late, strict=True)]
    rows = [
        *new,
        [f"resume after {EARLY} steps, one step, end", f"{statistics.median(early):.2f}", ""],
        [
            f"resume after {arguments.late:,} steps, one step, end",
            f"{statistics.median(late):.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) of the above",
        ],
        ["shardtune --help", f"{statistics.median(helps):.2f}", ""],
    ]
    text = f"{machine()}; whole processes, medians of {arguments.turns} turns.\n\n" + table(
        ["", "seconds", "range or ratio"], rows
    )
    print(text)
    if arguments.save:
        write_section("startup", text)


if __name__ == "__main__":
    main()
