"""Loss curves of FP8 beside bf16 and fp32: `.venv-fast-parts/bin/python bench/fp8.py`.

It needs `make quickstart test-fast-parts`. Trains the quickstart's model on its data, the same rows in the same order
each time, and rewrites the section `fp8` of docs/benchmarks.md. Without a GPU that multiplies FP8 its roundings are
emulated; steps are small by default, as some CPUs multiply bf16 a hundred times slower than fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def first_lines(source: Path, target: Path, lines: int) -> None:
    """Write the first lines of a file into another."""
    with source.open(encoding="utf-8") as rows:
        target.write_text("".join(islice(rows, lines)), encoding="utf-8")


def trained(
    base: Path, folder: Path, name: str, steps: int, rows: int, model: dict[str, Any]
) -> tuple[list[float], float]:
    """The training loss of each step, and the loss on held-out rows at the end.

    Args:
        base: the model to begin with.
        folder: has train.jsonl and heldout.jsonl; the run is written into it.
        name: of the run.
        steps: number of them.
        rows: of a step.
        model: the keys of `actor.model` in which runs differ.
    """
    import shardtune

    recipe: dict[str, Any] = {
        "runner": {
            "max_steps": steps,
            "max_epochs": -1,
            "eval_interval": steps,
            "save_interval": -1,
            "logger": {"log_path": str(folder), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "global_batch_size": rows,
            "micro_batch_size": rows,
            "model": {"model_path": str(base), **model},
            "optim": {"lr": 3e-3, "adam_beta2": 0.98, "lr_scheduler": "cosine", "lr_warmup_steps_ratio": 0.05},
        },
        "data": {
            "train_data_paths": str(folder / "train.jsonl"),
            "eval_data_paths": str(folder / "heldout.jsonl"),
            "max_length": 128,
            "cache_dir": str(folder / "cache"),
        },
    }
    run = shardtune.train(recipe)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses, next(line["eval/loss"] for line in reversed(lines) if "eval/loss" in line)


def beside_bf16(found: Mapping[str, tuple[list[float], float]]) -> str:
    """How far the held-out loss of each is from that of bf16."""
    others = {name: held_out / found["bf16"][1] - 1 for name, (_, held_out) in found.items() if name != "bf16"}
    return ", ".join(f"{name} {share:+.1%}" for name, share in others.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--made", type=Path, default=ROOT / "examples" / "quickstart" / "made", help="its inputs")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step, some 60 tokens each")
    parser.add_argument("--held-out", type=int, default=100, help="rows on which the loss at the end is computed")
    parser.add_argument("--windows", type=int, default=4, help="parts of the run over which losses are averaged")
    arguments = parser.parse_args()
    import torch

    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    kinds: dict[str, dict[str, Any]] = {"fp32": {"precision": "fp32"}, "bf16": {"precision": "bf16"}}
    for scaling in SCALINGS:
        kinds[scaling] = {"precision": "bf16", "fp8": {"scaling": scaling, "emulate": not capable}}
    found: dict[str, tuple[list[float], float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first_lines(arguments.made / "train.jsonl", folder / "train.jsonl", arguments.steps * arguments.rows)
        first_lines(arguments.made / "heldout.jsonl", folder / "heldout.jsonl", arguments.held_out)
        for name, model in kinds.items():
            base = arguments.made / "model"
            found[name] = trained(base, folder, name, arguments.steps, arguments.rows, model)
    size = arguments.steps // arguments.windows
    rows = []
    for name, (losses, held_out) in found.items():
        windows = [mean(losses[start : start + size]) for start in range(0, size * arguments.windows, size)]
        distance = max(abs(a - b) / b for a, b in zip(losses, found["bf16"][0], strict=True))
        rows.append([name, *(f"{one:.4f}" for one in windows), f"{held_out:.4f}", f"{distance:.2%}"])
    heads = [f"steps {1 + start}-{start + size}" for start in range(0, size * arguments.windows, size)]
    how = "on a GPU" if capable else "by torchao's emulation"
    text = (
        f"{machine()}. FP8 {how}, the quickstart's model, {arguments.steps} steps of {arguments.rows} "
        f"rows. Mean training loss, loss on {arguments.held_out} held-out rows, and the largest relative distance of a "
        "step's training loss from that of bf16.\n\n"
        + table(["numbers", *heads, "held out", "from bf16, at most"], rows)
        + f"\n\nHeld-out losses beside that of bf16: {beside_bf16(found)}. One run of each: how far chance moves "
        "them was not measured."
    )
    write_section("fp8", text)
    print(text)


if __name__ == "__main__":
    main()
