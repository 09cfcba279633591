"""Every layout gives the numbers of one process of plain PyTorch; `bench/layouts.py` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.layouts import EXPERTS, LAYOUTS, LaidOut, LayoutRuns
from tests.dist.parity import EXACT


# One test each for all of a model's layouts: they share a start of ranks.
@pytest.mark.parametrize(("kind", "layouts"), [("dense", LAYOUTS), ("qwen3_moe", EXPERTS)], ids=["dense", "experts"])
def test_layouts_are_exact(tmp_path: Path, kind: str, layouts: tuple[LaidOut, ...]) -> None:
    found = dict(zip(map(str, layouts), LayoutRuns(tmp_path).compare(kind, layouts), strict=True))
    wrong = {name: apart for name, apart in found.items() if apart.largest > EXACT or not apart.same_counts}
    assert not wrong
