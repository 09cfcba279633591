"""Memory of a rank as `shardtune plan` computes it and as a run of two steps takes it: `python bench/plan.py`.

Each case is a command of its own, `shardtune train`, whose line after the second step is read. Rewrites the section
`plan` of docs/benchmarks.md; exit code 1 where a case differs by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402
from workload import make_inputs  # noqa: E402

LIMIT = 0.1
LINE = re.compile(r"memory of rank 0 after 2 steps: ([\d.,]+) GB .*?; ([\d.,]+) GB planned", re.DOTALL)
LORA = ("model.is_lora=true", "model.lora.r=16")
ROWS = {"LoRA": 4}
"""Of a micro-batch where they are not 2: what Python imports meanwhile, some 40 MB, is to be little beside the rest."""
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "dense, fp32": (1, ("model.precision=fp32",)),
    "dense, bf16": (1, ("model.precision=bf16",)),
    "checkpointed, fp32": (1, ("model.precision=fp32", "model.gradient_checkpointing=true")),
    "checkpointed, bf16": (1, ("model.precision=bf16", "model.gradient_checkpointing=true")),
    "LoRA, fp32": (1, ("model.precision=fp32", *LORA)),
    "LoRA, bf16": (1, ("model.precision=bf16", *LORA)),
    "dense, fp32, 2 ranks": (2, ("model.precision=fp32",)),
    "dense, bf16, 2 ranks": (2, ("model.precision=bf16",)),
    "checkpointed, bf16, 2 ranks": (2, ("model.precision=bf16", "model.gradient_checkpointing=true")),
    "LoRA, fp32, 2 ranks": (2, ("model.precision=fp32", *LORA)),
    "tensor, fp32, 2 ranks": (2, ("model.precision=fp32", "parallel.tensor=2")),
    "tensor, bf16, 2 ranks": (2, ("model.precision=bf16", "parallel.tensor=2")),
    "sequence, fp32, 2 ranks": (2, ("model.precision=fp32", "parallel.sequence=2")),
    "DDP, bf16, 2 ranks": (2, ("model.precision=bf16", "training_backend=ddp")),
    "pure_bf16, 2 ranks": (2, ("model.precision=pure_bf16",)),
    "states in int8, 2 ranks": (2, ("model.precision=bf16", "optim.state_dtype=int8")),
    "averaged weights, 2 ranks": (2, ("model.precision=bf16", "optim.ema_decay=0.9")),
    "Muon, 2 ranks": (2, ("model.precision=bf16", "optim.name=Muon")),
    "reduced each time, 2 ranks": (2, ("model.precision=bf16", "fsdp_config.reduce=every")),
}


def inputs(folder: Path, width: int, layers: int, vocabulary: int, length: int) -> None:
    """A model, and rows of about the same length."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away"]
    rows = [
        {"question": f"count to {n}", "answer": " ".join(words[(n * k) % len(words)] for k in range(1, length))}
        for n in range(64)
    ]
    data = folder / "raw.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_inputs(folder, data, count=None, width=width, layers=layers, vocabulary=vocabulary, max_length=length)


def slug(name: str) -> str:
    """The name of a file for a case."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def measure(folder: Path, name: str, ranks: int, changes: tuple[str, ...], length: int) -> tuple[float, float]:
    """Measured and planned GB of a case."""
    rows = next((number for part, number in ROWS.items() if part in name), 2)
    words = [
        f"model.model_path={folder / 'model'}",
        f"data.train_data_paths={folder / 'rows.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={length}",
        f"runner.logger.log_path={folder / 'runs'}",
        f"runner.logger.experiment_name={slug(name)}",
        f"runner.nproc_per_node={ranks}",
        "runner.max_steps=2",
        f"micro_batch_size={rows}",
        f"global_batch_size={2 * rows * ranks}",
        *changes,
    ]
    command = [sys.executable, "-m", "shardtune", "train", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = LINE.search(done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{name}: no line on memory\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return float(found[1].replace(",", "")), float(found[2].replace(",", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="cases whose name contains this; the page stays as it is")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="keep everything here, and do not measure a case again")
    args = parser.parse_args()
    lines, off = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "rows.jsonl").exists():
            inputs(folder, args.width, args.layers, args.vocabulary, args.length)
        for name, (ranks, changes) in CASES.items():
            if args.only and args.only not in name:
                continue
            began, kept = time.perf_counter(), folder / f"{slug(name)}.json"
            if not kept.exists():
                kept.write_text(json.dumps(measure(folder, name, ranks, changes, args.length)))
            measured, planned = json.loads(kept.read_text())
            ratio = planned / measured
            off += [f"{name} {ratio:.3f}"] if abs(ratio - 1) > LIMIT else []
            lines.append([name, f"{measured:.2f}", f"{planned:.2f}", f"{ratio:.3f}"])
            print(*lines[-1], f"({time.perf_counter() - began:.0f} s)", flush=True)
    verdict = f"All within {LIMIT:.0%}" if not off else "OFF: " + "; ".join(off)
    print(verdict)
    if args.only:
        return 1 if off else 0
    heads = ("case", "measured, GB", "planned, GB", "planned / measured")
    text = (
        f"A Qwen2 of width {args.width} with {args.layers} layers and a vocabulary of {args.vocabulary:,}; "
        f"micro-batches of 2 rows (LoRA 4) of {args.length} tokens, two to a step. Measured is rank 0's "
        "resident peak from its first step to its second, beyond what was resident before the model was built, without "
        "mapped files: some 25 MB of libraries' code run for the first time meanwhile. A rank on a CPU returns freed "
        "tensors of 128 KB and more to the system, if its model has 17M parameters or more: by glibc's default those "
        "of up to 32 MB stay resident, in these cases up to 90 % more than torch asks for. It "
        "costs 1.5 % of the CPU time of a step here (plain PyTorch, one thread, 10 pairs of steps in turn).\n\n"
    )
    write_section("plan", f"{text}{table(heads, lines)}\n\n{verdict}. {machine()}.")
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
