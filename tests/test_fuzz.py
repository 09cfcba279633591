"""Hostile input ends in a result or in one message: no traceback, no hang, no character that controls a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fuzz import Tally, run_cases


def check(found: dict[str, Tally], cases: int) -> None:
    faults = [fault for tally in found.values() for fault in tally.faults]
    assert not faults, f"{len(faults)} faults of {cases:,} cases, the first:\n" + "\n".join(faults[:3])
    assert sum(tally.results + tally.errors for tally in found.values()) == cases
    assert min(len(tally.messages) for kind, tally in found.items() if kind != "cache entries") > 5


@pytest.mark.lengthy
def test_some_hundred_cases(tmp_path: Path) -> None:
    check(run_cases(tmp_path, 300), 300)


@pytest.mark.slow
def test_ten_thousand_cases(tmp_path: Path) -> None:
    check(run_cases(tmp_path, 10_000, first=300), 10_000)
