"""Compare every layout of 1, 2 and 4 ranks with one process of plain PyTorch: `python bench/layouts.py`.

Rewrites the section `layouts` of docs/benchmarks.md; ends with exit code 1 where a limit does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from tests.support.dist.layouts import COMPILED, EXPERTS, LAYOUTS, RINGS, STEPS, Apart, LaidOut, LayoutRuns  # noqa: E402

LIMITS = {"fp64": 1e-10, "fp32": 1e-5}
HEADS = ("model", "precision", "layout", "ranks", "loss", "norm", "clipped gradient", "weights", "logits", "evaluation")
INTRODUCTION = f"""\
{STEPS} steps of 8 ragged rows with active clipping (fp64: AdamW, fp32: SGD) against `examples/flat_sft.py` in one
process. Largest differences: losses and norms relative where above 1, logits relative to the largest, the evaluation's
loss absolute; in every case as many predictions are right. Limits: fp64 {LIMITS["fp64"]:g}, fp32 {LIMITS["fp32"]:g}.
Compiled layers are compared in fp32 alone: these models' norms round to fp32 in any precision, and a compiler fuses
that rounding away (3e-7 in the losses of an fp64 run)."""


def line(kind: str, precision: str, layout: LaidOut, found: Apart) -> list[str]:
    apart = found.training
    numbers = (apart.loss, apart.norm, apart.gradient, apart.weight, found.logits, found.evaluation)
    return [kind, precision, layout.name, str(layout.ranks), *(f"{number:.1e}" for number in numbers)]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    began = time.perf_counter()
    torch.set_num_threads(1)
    lines, broken = [], []
    for precision, optimizer in (("fp64", "AdamW"), ("fp32", "SGD")):
        with tempfile.TemporaryDirectory() as folder:
            runs = LayoutRuns(Path(folder), precision, optimizer)
            for kind, layouts in (
                ("dense", (*LAYOUTS, COMPILED) if precision == "fp32" else LAYOUTS),
                ("mistral", LAYOUTS),
                ("three_heads", RINGS),
                ("mixtral", EXPERTS),
                ("qwen3_moe", EXPERTS),
            ):
                for layout, found in zip(layouts, runs.compare(kind, layouts), strict=True):
                    lines.append(line(kind, precision, layout, found))
                    print(*lines[-1], flush=True)
                    if found.largest > LIMITS[precision] or not found.same_counts:
                        broken.append(" ".join(lines[-1]))
    seconds = time.perf_counter() - began
    verdict = f"{len(lines)} runs in {seconds:.0f} s, all within their limits" if not broken else "\n".join(broken)
    print(verdict)
    write_section("layouts", f"{INTRODUCTION}\n\n{table(HEADS, lines)}\n\n{verdict}. {machine()}.")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
