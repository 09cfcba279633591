"""One epoch of GSM8K on one rank and on two, in fp32: does the loss fall, and are the two curves one?

python bench/gsm8k.py --data gsm8k_train.jsonl [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MAX_LENGTH = 1024


def train(folder: Path, ranks: int, overrides: list[str]) -> tuple[list[dict[str, float]], str]:
    """The metrics of a run with so many ranks, and what it said."""
    name = f"ranks-{ranks}"
    recipe = {
        "runner": {"logger": {"log_path": str(folder / "runs"), "experiment_name": name}, "nproc_per_node": ranks},
        "actor": {
            "micro_batch_size": 16,
            "global_batch_size": 32,
            "model": {"model_path": str(folder / "model"), "precision": "fp32"},
            "optim": {"lr": 1.0e-3, "lr_warmup_steps_ratio": 0.05},
        },
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "max_length": MAX_LENGTH,
            "cache_dir": str(folder / "cache"),
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "shardtune", "train", str(file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    said = done.stderr.replace(f"{folder}/", "")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    parser.add_argument("overrides", nargs="*", help="key=value over the recipe")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        make_inputs(
            folder,
            arguments.data,
            count=arguments.rows,
            width=arguments.width,
            layers=arguments.layers,
            vocabulary=arguments.vocabulary,
            max_length=MAX_LENGTH,
        )
        one, said = train(folder, 1, arguments.overrides)
        two, _ = train(folder, 2, arguments.overrides)
    report(one, two, said, arguments)


def report(one: list[dict[str, float]], two: list[dict[str, float]], said: str, arguments: argparse.Namespace) -> None:
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert [line["train/tokens"] for line in one] == [line["train/tokens"] for line in two]
    differences = [abs(a["train/loss"] - b["train/loss"]) for a, b in zip(one, two, strict=True)]
    rows = [
        [line["step"], f"{line['train/loss']:.5f}", f"{other['train/loss']:.5f}", f"{difference:.1e}"]
        for line, other, difference in zip(one, two, differences, strict=True)
        if line["step"] == 1 or line["step"] % 40 == 0 or line is one[-1]
    ]
    first, last = one[0]["train/loss"], one[-1]["train/loss"]
    reported = "\n".join(f"    {line.rstrip()}" for line in said.splitlines() if line.startswith(("data:", "epoch")))
    text = (
        f"{machine()}; Qwen2 {arguments.layers} x {arguments.width}, vocabulary {arguments.vocabulary:,}, fp32, AdamW, "
        f"32 rows a step.\n\n{table(['step', 'loss, 1 rank', 'loss, 2 ranks', 'difference'], rows)}\n\n"
        f"The loss falls by {1 - last / first:.0%}; the curves differ by at most {max(differences):.1e}. "
        f"What the run said of its rows:\n\n{reported}"
    )
    print(text)
    if arguments.save:
        write_section("gsm8k", text)
    if last > first * 2 / 3 or max(differences) > 1e-4:
        raise SystemExit("the loss did not fall by a third, or the curves differ by more than 1e-4")


if __name__ == "__main__":
    main()
