"""Resume at every step of a run of two epochs, on one rank and on two, and from one number of ranks to the other.

    python bench/resume.py [--save]

On the same number of ranks, with dropout: weights, optimizer, log and rows bitwise those of a run that was left alone.
On another number, without dropout, in fp64: the same rows, losses and norms within 1e-10.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from results import machine, table, write_section  # noqa: E402

from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, train_on_ranks  # noqa: E402

STEPS = 8
FP64 = {"actor__model__precision": "fp64"}


def resumed(tiny: Tiny, name: str, source: str, step: int, **keys: str) -> dict:
    checkpoint = tiny.run(source) / f"checkpoints/global_step_{step}"
    return tiny.recipe(name, runner__resume_dir=str(checkpoint), **keys)


def same_number(tiny: Tiny, ranks: int) -> int:
    """Resume at every step on as many ranks; returns how often."""
    jobs = [tiny.recipe(f"whole{ranks}")]
    jobs += [resumed(tiny, f"from{step}on{ranks}", f"whole{ranks}", step) for step in range(1, STEPS)]
    rows = train_on_ranks(ranks, jobs, timeout=600)
    whole = tiny.run(f"whole{ranks}")
    for step in range(1, STEPS):
        run = tiny.run(f"from{step}on{ranks}")
        assert rows[step][: STEPS - step] == rows[0][step:STEPS], f"other rows after step {step}"
        assert_same_tensors(whole / f"checkpoints/global_step_{STEPS}", run / f"checkpoints/global_step_{STEPS}")
        assert lines(run) == lines(whole)[step:], f"another log after step {step}"
    return STEPS - 1


def other_number(tiny: Tiny, before: int, after: int) -> float:
    """Resume at every step on another number of ranks; returns the largest relative difference of losses and norms."""
    whole = f"fp64on{before}"
    first = train_on_ranks(before, [tiny.recipe(whole, **FP64)])[0]
    names = [f"fp64from{step}of{before}on{after}" for step in range(1, STEPS)]
    jobs = [resumed(tiny, name, whole, step, **FP64) for step, name in enumerate(names, start=1)]
    rows = train_on_ranks(after, jobs, timeout=600)
    worst = 0.0
    for step, name in enumerate(names, start=1):
        assert rows[step - 1][: STEPS - step] == first[step:STEPS], f"other rows after step {step}"
        for line, expected in zip(lines(tiny.run(name)), lines(tiny.run(whole))[step:], strict=True):
            for key in ("train/loss", "train/grad_norm"):
                worst = max(worst, abs(line[key] / expected[key] - 1.0))
    assert worst < 1e-10, f"losses or norms differ by {worst:.2g}"
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dropout").mkdir()
        tiny = make_tiny(Path(folder) / "dropout", dropout=0.2)
        for ranks in (1, 2):
            times = same_number(tiny, ranks)
            rows.append([f"{ranks} -> {ranks}", times, "bitwise: weights, optimizer, log, rows, draws"])
            print(*rows[-1], flush=True)
        (Path(folder) / "exact").mkdir()
        exact = make_tiny(Path(folder) / "exact")
        for before, after in ((1, 2), (2, 1)):
            worst = other_number(exact, before, after)
            rows.append(
                [f"{before} -> {after}", STEPS - 1, f"the same rows; losses and norms within {worst:.1g} (fp64)"]
            )
            print(*rows[-1], flush=True)
    text = f"{machine()}\n\n" + table(["ranks", "resumed at steps", "found"], rows)
    print(text)
    if options.save:
        write_section("resume", text)


if __name__ == "__main__":
    main()
