"""The moving average of the weights: its numbers, where it is used, and its way through checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardtune
from shardtune.checkpoint.dcp import StoredTensors
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError
from shardtune.run.run import load_run
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet
from tests.support.tiny_run import assert_same_tensors, make_tiny

DECAY = 0.75


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = StoredTensors(folder)
    return {name: found[name] for name in found.names}


@pytest.mark.lengthy
@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_the_average_is_that_of_the_steps_and_is_evaluated_exported_and_resumed(tmp_path: Path, precision: str) -> None:
    """The average of weights in bf16 is in fp32, and rounded where it is used."""
    tiny = make_tiny(tmp_path)
    kept = torch.bfloat16 if precision == "pure_bf16" else torch.float32
    keys = {"actor__optim__ema_decay": DECAY, "actor__optim__lr": 0.05, "runner__eval_interval": 8}
    keys |= {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "actor__model__precision": precision}
    run = shardtune.train(tiny.recipe("one", **keys))
    checkpoints = tiny.run("one") / "checkpoints"
    expected = {
        name: tensor.to(kept).float() for name, tensor in load_file(tiny.folder / "model" / "model.safetensors").items()
    }
    for step in range(1, 9):
        weights = stored(checkpoints / f"global_step_{step}" / "model")
        assert {tensor.dtype for tensor in weights.values()} == {kept}
        expected = {name: expected[name].lerp(tensor.float(), 1 - DECAY) for name, tensor in weights.items()}
        average = stored(checkpoints / f"global_step_{step}" / "average")
        assert all(torch.equal(average[name], tensor) for name, tensor in expected.items()), step
    final = load_file(run.dir / "final" / "model.safetensors")
    assert all(torch.equal(final[name], tensor.to(kept).to(final[name].dtype)) for name, tensor in expected.items())
    logged = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    (in_training,) = [line["eval/loss"] for line in logged if "eval/loss" in line]
    assert run.metrics["eval/loss"] == pytest.approx(in_training, rel=1e-6)  # of final/, which is the average
    at_the_end, last = (load_run(run.dir).worker("latest", *more) for more in ((), ("actor.optim.ema_use=false",)))
    assert at_the_end.run_eval()["eval/loss"] == pytest.approx(in_training, rel=1e-6)
    assert abs(last.run_eval()["eval/loss"] - in_training) > 1e-3
    # Continued from step 3, with evaluations at other steps.
    again = {**keys, "runner__eval_interval": 5, "runner__resume_dir": str(checkpoints / "global_step_3")}
    shardtune.train(tiny.recipe("again", **again))
    assert_same_tensors(checkpoints / "global_step_8", tiny.run("again") / "checkpoints" / "global_step_8")
    other = tiny.run("again") / "checkpoints" / "global_step_8" / "average"
    assert all(torch.equal(stored(other)[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_in_the_middle_of_an_evaluation_has_the_weights_of_training(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    worker = SFTWorker(load_recipe(tiny.recipe(actor__optim__ema_decay=DECAY)), report=quiet)
    worker.setup()
    worker.run_training()
    worker.save_checkpoint(tmp_path / "before", 1)
    with worker.state.in_use():
        worker.save_checkpoint(tmp_path / "during", 1)
    worker.save_checkpoint(tmp_path / "after", 1)
    assert_same_tensors(tmp_path / "before", tmp_path / "during")
    assert_same_tensors(tmp_path / "before", tmp_path / "after")
    shutil.rmtree(tmp_path / "after" / "average")
    assert worker.state.average is not None
    with pytest.raises(CheckpointError, match=r"has no averaged weights: it was written without actor.optim.ema_decay"):
        worker.state.average.load(tmp_path / "after")
    worker.load_checkpoint(tmp_path / "after")  # of a run that kept none so far
    for average, weight in zip(worker.state.average.parts, worker.weights.parameters.values(), strict=True):
        assert torch.equal(average, weight), "it begins with the weights"
    worker.release()
