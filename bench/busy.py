"""How fast is a training whose machine does something else too?

    python bench/busy.py [--spins default 0 1000 10000] [--others 0 1 2] [--turns 3] [--steps 30] [--save]

`shardtune train` with a thread on each core, alone and beside programs that keep a core busy each, with different
numbers of turns that torch's threads wait for each other before they sleep (`GOMP_SPINCOUNT`; `default`: that of
OpenMP itself, 300,000). All settings take turns; medians of the steps after the first three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

ROOT = Path(__file__).resolve().parent.parent
OWN = "1000"
"""What shardtune sets beside other programs."""
SKIPPED = 3
LONGEST = 60.0
"""Seconds of a run, after which the steps done so far count."""


def make_recipe(folder: Path, width: int, steps: int) -> Path:
    """A small model on short rows, as a first trial on a laptop has them."""
    questions = [{"question": f"What comes after {number}?", "answer": f"{number + 1}. " * 20} for number in range(400)]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)) + "\n")
    make_inputs(folder, data, count=None, width=width, layers=4, vocabulary=2000, max_length=512)
    recipe = {
        "runner": {"max_epochs": -1, "max_steps": steps, "logger": {"log_path": str(folder / "runs")}},
        "actor": {
            "global_batch_size": 8,
            "model": {"model_path": str(folder / "model"), "precision": "fp32"},
            "optim": {"lr_scheduler": "constant"},
        },
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return file


def rate(recipe: Path, spins: str, others: int, number: int) -> float:
    """Tokens a second, the median of the steps."""
    name = f"spins-{spins}-others-{others}-{number}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    # libgomp's own number, so that shardtune sets no other.
    environment["GOMP_SPINCOUNT"] = "300000" if spins == "default" else spins
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    command = [sys.executable, "-m", "shardtune", "train", str(recipe), f"runner.logger.experiment_name={name}"]
    folder = recipe.parent / "runs" / name
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        for each in busy:
            each.kill()
            each.wait()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["perf/tokens_per_second"] for line in lines if "perf/tokens_per_second" in line]
    if not found:
        raise SystemExit(f"{name}: no step within {LONGEST:.0f} s")
    return median(found[SKIPPED:] or found[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", default=["default", "0", OWN, "10000"])
    parser.add_argument("--others", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="write the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), arguments.width, arguments.steps)
        for number in range(arguments.turns):
            for others in arguments.others:
                for spins in arguments.spins:
                    rates[spins, others].append(rate(recipe, spins, others, number))
                    print(spins, others, f"{rates[spins, others][-1]:,.0f} tokens/s", flush=True)
    first = {others: rates[arguments.spins[0], others] for others in arguments.others}

    def cell(spins: str, others: int) -> str:
        found = rates[spins, others]
        ratio = median(mine / other for mine, other in zip(found, first[others], strict=True))
        return f"{median(found):,.0f} ({ratio:.2f})"

    words = [f"beside {others} busy program{'s' * (others != 1)}" if others else "alone" for others in arguments.others]
    rows = [
        [spins + " (set beside others)" * (spins == OWN), *(cell(spins, others) for others in arguments.others)]
        for spins in arguments.spins
    ]
    text = (
        f"{machine()}; Qwen2 4 x {arguments.width}, fp32, a thread on each core; tokens a second (times those of "
        f"the first line in the same turn), medians of {arguments.turns} turns.\n\n"
    )
    text += table(["GOMP_SPINCOUNT", *words], rows)
    print(text)
    if arguments.save:
        write_section("busy", text)


if __name__ == "__main__":
    main()
