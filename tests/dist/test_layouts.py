"""Every layout gives the numbers of one process of plain PyTorch; `bench/layouts.py` is the long form."""

from __future__ import annotations

import pytest

from tests.dist.layouts import EXPERTS, LAYOUTS, Apart, LayoutRuns
from tests.dist.parity import EXACT


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Apart]:
    runs = LayoutRuns(tmp_path_factory.mktemp("layouts"))
    return dict(zip(map(str, LAYOUTS), runs.compare("dense", LAYOUTS), strict=True))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Apart]:
    runs = LayoutRuns(tmp_path_factory.mktemp("experts"))
    return dict(zip(map(str, EXPERTS), runs.compare("qwen3_moe", EXPERTS), strict=True))


@pytest.mark.parametrize("name", list(map(str, LAYOUTS)))
def test_a_layout_is_exact(dense: dict[str, Apart], name: str) -> None:
    assert dense[name].largest < EXACT, dense[name]
    assert dense[name].same_counts


@pytest.mark.parametrize("name", list(map(str, EXPERTS)))
def test_a_layout_of_experts_is_exact(experts: dict[str, Apart], name: str) -> None:
    assert experts[name].largest < EXACT, experts[name]
    assert experts[name].same_counts
