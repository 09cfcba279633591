"""Every layout gives the numbers of one process of plain PyTorch; `bench/layouts.py` is the long form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.dist.layouts import (
    ADAPTED,
    ADAPTED_EXPERTS,
    EXPERTS,
    LAYOUTS,
    RING,
    RINGS,
    LaidOut,
    LayoutRuns,
    parallel,
)
from tests.support.dist.parity import EXACT

pytestmark = pytest.mark.lengthy

SOME = ("FSDP 2 x TP 2-4", "FSDP 2 x SP 2-4", "offload-2")
"""Copies of all or of sharded weights: tests/optim/test_sharded.py, tests/parallel/test_tensor_parallel.py; adapters on
tensor ranks: tests/run/test_lora_runs.py."""
SOME_EXPERTS = ("FSDP 2 x EP 2-4", "LoRA, EP 2-2")
OF_HEADS = (LaidOut("heads do not divide", 2, parallel(sequence=2)), *RINGS[2:4])
WITH_TENSOR = LaidOut("ring 2 x TP 2", 4, parallel(sequence=2, tensor=2) | RING)
CASES = [
    pytest.param("three_heads", OF_HEADS, id="ring, three heads"),
    pytest.param("one_head", RINGS, id="ring, one head", marks=pytest.mark.slow),
    pytest.param("two_heads", RINGS, id="ring, two heads", marks=pytest.mark.slow),
    pytest.param("mistral", (*RINGS, WITH_TENSOR), id="ring, windows", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", (RINGS[0], RINGS[5]), id="ring, experts", marks=pytest.mark.slow),
    pytest.param("dense", [layout for layout in (*LAYOUTS, *ADAPTED) if str(layout) in SOME], id="dense"),
    pytest.param(
        "qwen3_moe", [each for each in (*EXPERTS, *ADAPTED_EXPERTS) if str(each) in SOME_EXPERTS], id="experts"
    ),
    pytest.param("dense", (*LAYOUTS, *ADAPTED), id="dense, all", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", (*EXPERTS, *ADAPTED_EXPERTS), id="experts, all", marks=pytest.mark.slow),
]


# One test each for several layouts of a model: they share a start of ranks.
@pytest.mark.parametrize(("kind", "layouts"), CASES)
def test_layouts_are_exact(tmp_path: Path, kind: str, layouts: Sequence[LaidOut]) -> None:
    """Two steps: eight rows, then one row, for which all ranks but one have fillers."""
    assert len(layouts) >= 2
    found = dict(zip(map(str, layouts), LayoutRuns(tmp_path, steps=2, rows=9).compare(kind, layouts), strict=True))
    wrong = {name: apart for name, apart in found.items() if apart.largest > EXACT or not apart.same_counts}
    assert not wrong
