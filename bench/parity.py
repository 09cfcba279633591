"""Compare shardtune with the flat script over 20 steps, at every layout and precision: `python bench/parity.py`.

Rewrites the section `numbers` of docs/benchmarks.md; ends with exit code 1 where a limit does not hold.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from tests.support.dist.parity import EXACT, LAYOUTS, ROUNDED, ROUNDED_WEIGHTS, Case, Comparison  # noqa: E402

KINDS = ("dense", "mixtral", "qwen3_moe", "mistral", "gemma")
BF16_TIMES = 1.5
HEADS = ("model", "precision", "optimizer", "ranks x rows", "loss", "gradient norm", "clipped gradient", "weights")
INTRODUCTION = f"""\
20 steps of 8 ragged rows with active clipping, AdamW or SGD, against `examples/flat_sft.py`. Largest differences;
losses and norms relative where above 1. Limits: fp64 {EXACT:g} for all four; fp32 {ROUNDED:g} for losses and norms
and, with SGD, {ROUNDED_WEIGHTS:g} for weights. (Gemma's norms compute in fp32 whatever the dtype.) bf16: mean relative
error of losses and norms against fp64, beside the flat script's own (the worst of four cuts of a step into forwards);
limit {BF16_TIMES:g} times that."""


def cases() -> list[Case]:
    """Every run, dense ones at all precisions."""
    made = [Case(*layout, kind=kind) for kind in KINDS if kind != "gemma" for layout in LAYOUTS]
    for kind in KINDS:
        made += [Case(*layout, kind=kind, precision="fp32", optimizer="SGD") for layout in LAYOUTS]
        made += [Case(*layout, kind=kind, precision="bf16") for layout in LAYOUTS]
    return made


def row(comparison: Comparison, case: Case) -> tuple[list[str], bool]:
    """A case's line of the table, and whether it keeps its limit."""
    name = [case.kind, case.precision, case.optimizer, f"{case.ranks} x {case.rows}"]
    if case.precision == "bf16":
        own, flat = comparison.bf16_error(case)
        return [*name, f"{own:.2e} (flat {flat:.2e})", "", "", ""], own <= BF16_TIMES * flat
    apart = comparison.distance(case)
    numbers = [apart.loss, apart.norm, apart.gradient, apart.weight]
    if case.precision == "fp64":
        kept = max(numbers) < EXACT
    else:
        kept = max(apart.loss, apart.norm) < ROUNDED and apart.weight < ROUNDED_WEIGHTS
    return [*name, *(f"{number:.1e}" for number in numbers)], kept


def main() -> int:
    began = time.perf_counter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder))
        comparison.run(cases())
        found = [row(comparison, case) for case in cases()]
    broken = [" ".join(line) for line, kept in found if not kept]
    text = table(HEADS, [line for line, _ in found])
    print(text)
    seconds = time.perf_counter() - began
    verdict = f"{len(found)} runs in {seconds:.0f} s, all within their limits" if not broken else "\n".join(broken)
    print(verdict)
    write_section("numbers", f"{INTRODUCTION}\n\n{text}\n\n{verdict}. {machine()}.")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
