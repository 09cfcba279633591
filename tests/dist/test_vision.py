"""Vision-language models on one and two ranks give the numbers of plain transformers, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config import load_recipe
from shardtune.sft_worker import SFTWorker
from tests.dist.ranks import run_ranks
from tests.dist.training import quiet, recipe, run_recipe
from tests.models import flat_vision
from tests.models.vision import save_image_rows, save_vision_model

STEPS, ROWS_PER_STEP, LR = 10, 4, 0.05
EXACT = 1e-10
ROUNDED = 5e-6
"""Of Gemma, whose norms are computed in fp32 whatever the precision."""


def a_recipe(directory: Path, rows: Path, **changes: Any) -> dict[str, Any]:
    return recipe(
        directory,
        rows,
        **{
            "runner__max_steps": STEPS,
            "actor__model__model_type": "vision_language",
            "actor__micro_batch_size": 1,
            "actor__global_batch_size": ROWS_PER_STEP,
            "actor__optim": {
                "name": "SGD", "lr": LR, "args": {"momentum": 0.9}, "weight_decay": 0.0, "clip_grad": None,
                "lr_scheduler": "constant",
            },
            "data__eval_data_paths": str(rows),
            **changes,
        },
    )  # fmt: skip


def order(values: dict[str, Any]) -> list[list[int]]:
    """The rows of each step."""
    worker = SFTWorker(load_recipe(values), say=quiet)
    worker.setup()
    states, steps = worker.loader.steps(worker.data_state), []
    steps = [next(states).rows.tolist() for _ in range(STEPS)]
    worker.release()
    return steps


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm", "gemma3"])
def test_one_and_two_ranks_give_the_numbers_of_plain_transformers(family: str, tmp_path: Path) -> None:
    """Rows of no, one and two images: in most steps some micro-batch of one row has none while another's has."""
    directory = save_vision_model(family, tmp_path / "model")
    file, rows = save_image_rows(tmp_path)
    values = a_recipe(directory, file)
    dtype = torch.float64
    oracle = flat_vision.train(directory, rows, order(values), lr=LR, dtype=dtype)
    exact = ROUNDED if family == "gemma3" else EXACT
    one = run_recipe(values)
    two = run_ranks(run_recipe, 2, values)
    for got in (one, *two):
        assert got.losses == pytest.approx(oracle.losses, rel=exact)
        assert got.norms == pytest.approx(oracle.norms, rel=exact)
        for name, tensor in got.weights.items():
            torch.testing.assert_close(tensor, oracle.weights[name], rtol=exact, atol=exact)
    for got in two:
        assert got.evaluation == pytest.approx(one.evaluation, rel=exact)
        assert torch.allclose(got.logits, one.logits, rtol=exact, atol=exact)
