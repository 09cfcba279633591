"""A few drawn recipes have the same numbers in every way that they are trained, and use all of their settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "combinations.py"


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 1003])
def test_three_drawn_recipes(first: int) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--cases", "3", "--first", str(first)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") + done.stdout.startswith("ok ") == 3
