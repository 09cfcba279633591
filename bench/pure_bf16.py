"""Fine-tuning with weights in fp32, and in bf16 rounded at random or to the nearest: how far does each get?

A small model learns the first part of GSM8K in fp32; each way then fine-tunes it on the rest, at a rate of fine-tuning.

python bench/pure_bf16.py --data gsm8k_train.jsonl [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MAX_LENGTH = 1024
NEAREST = """
from shardtune.optim import low_bit

low_bit.noise = lambda numbers, key: numbers.new_full(numbers.shape, 0x7FFF7FFF)  # half of a step, always
"""
WAYS: Mapping[str, tuple[str, ...]] = {
    "bf16": (),
    "pure_bf16": ("model.precision=pure_bf16",),
    "pure_bf16, states in bf16": ("model.precision=pure_bf16", "optim.state_dtype=bf16"),
    "pure_bf16, states in int8": ("model.precision=pure_bf16", "optim.state_dtype=int8"),
    "weights in bf16, rounded to the nearest": ("model.precision=pure_bf16", "plugins=[nearest.py]"),
}
"""Changes to the recipe of a fine-tuning in bf16."""


def train(
    folder: Path, name: str, recipe: Mapping[str, object], overrides: Sequence[str] = ()
) -> list[dict[str, float]]:
    """The metrics of a run, with the evaluation before its first step."""
    file = folder / f"{name.replace(' ', '-').replace(',', '')}.yaml"
    logger = {"log_path": str(folder / "runs"), "experiment_name": file.stem, "logger_backends": ["jsonl"]}
    shared = {"save_interval": -1, "eval_before_training": True, "logger": logger}
    file.write_text(json.dumps({**recipe, "runner": shared}))
    command = [sys.executable, "-m", "shardtune", "train", str(file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return [json.loads(line) for line in (folder / "runs" / file.stem / "metrics.jsonl").read_text().splitlines()]


def recipe_of(folder: Path, model: Path, rows: str, rate: float, precision: str) -> dict[str, object]:
    """One epoch of some rows."""
    return {
        "micro_batch_size": 16,
        "global_batch_size": 32,
        "model": {"model_path": str(model), "precision": precision},
        "optim": {"lr": rate, "lr_scheduler": "constant", "weight_decay": 0.0},
        "data": {
            "train_data_paths": str(folder / f"{rows}.jsonl"),
            "eval_data_paths": str(folder / "held-out.jsonl"),
            "max_length": MAX_LENGTH,
            "cache_dir": str(folder / "cache"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--rate", type=float, default=2e-5, help="of the fine-tuning")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        sizes = {"width": arguments.width, "layers": arguments.layers, "vocabulary": arguments.vocabulary}
        make_inputs(folder, arguments.data, count=arguments.rows, max_length=MAX_LENGTH, **sizes)
        lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
        cuts = (len(lines) // 2, len(lines) - len(lines) // 10)
        for part, rows in zip(
            ("first", "second", "held-out"), (slice(cuts[0]), slice(*cuts), slice(cuts[1], None)), strict=True
        ):
            (folder / f"{part}.jsonl").write_text("".join(lines[rows]))
        (folder / "nearest.py").write_text(NEAREST)
        train(folder, "begun", recipe_of(folder, folder / "model", "first", 1e-3, "fp32"))
        begun = folder / "runs" / "begun" / "final"
        tuning = recipe_of(folder, begun, "second", arguments.rate, "bf16")
        found = {way: train(folder, way, tuning, changes) for way, changes in WAYS.items()}
    report(found, arguments)


def report(found: Mapping[str, Sequence[Mapping[str, float]]], arguments: argparse.Namespace) -> None:
    losses = {way: [line["eval/loss"] for line in lines if "eval/loss" in line] for way, lines in found.items()}
    fell = {way: each[0] - each[-1] for way, each in losses.items()}
    full = fell["bf16"]
    rows = [
        [way, f"{each[0]:.4f}", f"{each[-1]:.4f}", f"{fell[way]:.4f}", f"{fell[way] / full:.0%}"]
        for way, each in losses.items()
    ]
    steps = max(line["step"] for line in found["bf16"])
    text = (
        f"{machine()}; Qwen2 {arguments.layers} x {arguments.width}, vocabulary {arguments.vocabulary:,}, AdamW, "
        f"learning rate {arguments.rate:g}, {steps:.0f} steps of 32 rows after a first training in fp32 on others; the "
        "loss on held-out rows.\n\n"
        f"{table(['weights', 'before', 'after', 'fell by', 'of bf16 with masters'], rows)}"
    )
    print(text)
    if arguments.save:
        write_section("pure-bf16", text)
    if any(fell[way] < 0.9 * full for way in WAYS if way.startswith("pure")):
        raise SystemExit("rounded at random, a loss fell by less than nine tenths of what it does with masters in fp32")


if __name__ == "__main__":
    main()
