"""A rank holds its share of a checkpoint while loading it, and one tensor; `bench/loading.py` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dist.loading import LAYOUTS, checkpoint_bytes, peaks, save_checkpoint


@pytest.mark.parametrize(("name", "ranks", "keys"), LAYOUTS[:1], ids=[LAYOUTS[0][0]])
@pytest.mark.lengthy
def test_a_rank_takes_its_share_alone(tmp_path: Path, name: str, ranks: int, keys: dict) -> None:
    model = save_checkpoint(tmp_path, layers=6, width=768)
    assert checkpoint_bytes(model) > 1.5e8
    # Its half, the largest tensor, and what allocators and connections take besides.
    assert max(peaks(model, ranks, keys)) < 0.65 * checkpoint_bytes(model)
