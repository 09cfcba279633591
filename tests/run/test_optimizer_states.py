"""Runs whose optimizer states are in bf16 or int8: the same numbers on several layouts, stopped and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtune
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, recipe, run_recipes, save_model, save_rows
from tests.support.tiny_run import assert_same_tensors, lines, make_tiny, tensors, train_on_ranks

pytestmark = pytest.mark.lengthy

PARALLEL = "actor__parallel__"


def apart(one: Trace, other: Trace) -> float:
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_round_alike(tmp_path: Path, ranks: int) -> None:
    """In fp64, with gradients equal but for the last digits; where `tensor` cuts rows, int8 has other blocks."""
    model, rows = save_model("dense", tmp_path / "model"), save_rows(tmp_path / "rows.jsonl")

    def asked(state_dtype: str, **changes: Any) -> dict[str, Any]:
        keys = {"runner__max_steps": 3, "actor__micro_batch_size": 2, "actor__optim__state_dtype": state_dtype}
        return recipe(model, rows, **{**keys, **changes})

    layouts = [asked("bf16"), asked("int8"), asked("fp32")]
    others = [
        *layouts[:2],
        asked("bf16", **{f"{PARALLEL}tensor": 2}),
        asked("int8", **{f"{PARALLEL}tensor": 2}),
        asked("int8", actor__training_backend="ddp"),
    ]
    bf16, int8, fp32 = run_recipes(layouts)
    found = run_ranks(run_recipes, ranks, others, timeout=600)[0]
    assert apart(bf16, fp32) > 1e-4
    assert apart(int8, fp32) > 1e-4
    for trace, alone in zip(found, [bf16, int8, bf16, None, int8], strict=True):
        if alone is not None:
            assert apart(trace, alone) < 1e-6
    assert found[3].losses == pytest.approx(fp32.losses, rel=0.05)


@pytest.mark.parametrize(
    ("state_dtype", "kept"),
    [
        pytest.param("bf16", {torch.bfloat16, torch.float32}, marks=pytest.mark.slow),
        pytest.param("int8", {torch.uint8, torch.float32, torch.float64}, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_bitwise_and_on_other_ranks(
    tmp_path: Path, state_dtype: str, kept: set[torch.dtype]
) -> None:
    tiny = make_tiny(tmp_path)
    keys = {"actor__optim__state_dtype": state_dtype, "actor__model__precision": "fp64"}
    shardtune.train(tiny.recipe("one", **keys))
    checkpoints = tiny.run("one") / "checkpoints"
    assert {tensor.dtype for tensor in tensors(checkpoints / "global_step_8" / "optimizer").values()} == kept
    again = tiny.recipe("again", runner__resume_dir=str(checkpoints / "global_step_3"), **keys)
    shardtune.train(again)
    assert_same_tensors(checkpoints / "global_step_8", tiny.run("again") / "checkpoints" / "global_step_8")
    two = {"runner__nproc_per_node": 2, **keys}
    on_two = [
        tiny.recipe("one_then_two", runner__resume_dir=str(checkpoints / "global_step_3"), **keys),
        tiny.recipe("two", **two),
        tiny.recipe("two_again", runner__resume_dir=str(tiny.run("two") / "checkpoints" / "global_step_5"), **keys),
    ]
    train_on_ranks(2, on_two, timeout=400)
    last = Path("checkpoints") / "global_step_8"
    assert_same_tensors(tiny.run("two") / last, tiny.run("two_again") / last)
    for name in ("one_then_two", "two"):
        for line in lines(tiny.run(name)):
            expected = lines(tiny.run("one"))[line["step"] - 1]
            assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-7)


def test_another_optimizer_begins_its_states_anew_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = make_tiny(tmp_path, save_interval=-1)
    shardtune.train(tiny.recipe(runner__max_steps=2))
    changed = {"actor__optim__name": "RMSprop", "runner__allow_changes": ["optim.name"]}
    shardtune.train(tiny.recipe(runner__max_steps=3, **changed))
    assert "the optimizer begins anew: the checkpoint has the state of AdamW" in capsys.readouterr().err
    names = {name.rpartition("::")[2] for name in tensors(tiny.run() / "checkpoints/global_step_3/optimizer")}
    assert names == {"step", "square_avg"}
    shardtune.train(tiny.recipe(runner__max_steps=4, **changed))
    assert "begins anew" not in capsys.readouterr().err
