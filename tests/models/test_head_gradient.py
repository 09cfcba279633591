"""The gradient of a large head's weight by blocks, where ranks have parts of the head or gather it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.models import head_gradient, loss
from tests.support.dist.parity import distance
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, recipe, run_recipe, save_model, save_rows


def run_in_blocks(values: dict[str, Any]) -> Trace:
    """With a head that counts as large; 7 of its rows are summed at a time."""
    before = loss.HELD_BYTES, head_gradient.BLOCK_BYTES
    loss.HELD_BYTES, head_gradient.BLOCK_BYTES = 0, 7 * 32 * 8
    try:
        return run_recipe(values)
    finally:
        loss.HELD_BYTES, head_gradient.BLOCK_BYTES = before


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"actor__parallel": {"tensor": 2}}], ids=["sharded", "tensor"])
def test_ranks_compute_the_gradient_of_a_large_head_as_one_process_does(layout: Any, tmp_path: Path) -> None:
    model = save_model("dense", tmp_path / "model", tie_word_embeddings=False)
    # SGD, as AdamW divides gradients that are nothing but rounding by their own size.
    optim = {"name": "SGD", "lr": 0.1, "clip_grad": 0.5, "lr_scheduler": "constant"}
    settings: dict[str, Any] = {"runner__max_steps": 4, "actor__micro_batch_size": 2}
    settings |= {"actor__label_smoothing": 0.1, "actor__optim": optim}
    rows = save_rows(tmp_path / "rows.jsonl")
    alone = run_recipe(recipe(model, rows, **settings))
    for trace in (
        run_in_blocks(recipe(model, rows, **settings)),
        *run_ranks(run_in_blocks, 2, recipe(model, rows, **settings, **layout)),
    ):
        found = distance(trace, alone)
        assert max(found.loss, found.norm, found.gradient, found.weight) < 1e-10
