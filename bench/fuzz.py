"""Hostile rows, recipes, overrides, images and cache entries, drawn from a seed: each ends in a result or one message.

    python bench/fuzz.py [--cases 10000] [--first 0] [--save]

The cases are those of `tests/support/fuzz.py`, which `make test-slow` runs too. A fault is a traceback, a case of more
than 20 seconds, or a message with a character that controls the terminal; it is printed with its kind and number.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from results import machine, table, write_section  # noqa: E402

from tests.support.fuzz import run_cases  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_cases(Path(folder), given.cases, given.first)
    rows = [
        (
            kind,
            f"{tally.results + tally.errors + len(tally.faults):,}",
            f"{tally.results:,}",
            f"{tally.errors:,}",
            len(tally.faults),
            f"{tally.slowest:.2f}",
        )
        for kind, tally in found.items()
    ]
    text = f"{machine()}.\n\n" + table(("input", "cases", "results", "one message", "faults", "slowest, s"), rows)
    print(text)
    for tally in found.values():
        for fault in tally.faults[:5]:
            print(f"\n{fault}")
    if given.save:
        write_section("fuzz", text)
    sys.exit(any(tally.faults for tally in found.values()))


if __name__ == "__main__":
    main()
