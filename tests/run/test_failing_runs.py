"""Runs that fail late lose nothing, and runs that train nothing do not pass for runs."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardtune
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import STATE_FILE
from shardtune.errors import CheckpointError, ConfigError, ModelError
from tests.support.tiny_run import Tiny, lines, make_tiny

pytestmark = pytest.mark.lengthy

METRIC = "def half(outputs, targets, weights):\n    {}\n"
ADAPTER = """
import numpy as np
from torch import nn
from shardtune import Adapter, LossSum, Sample


class Empty(Adapter):
    def build(self):
        return nn.Linear(1, 1)

    def encode(self, row):
        return Sample(fields={"x": np.ones(1, np.float32)})

    def loss(self, model, batch):
        return LossSum(model(batch["x"]).sum() * float("nan"), len(batch["x"]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_checkpoint_whose_smallest_file_cannot_be_written_is_one_message(tiny: Tiny) -> None:
    """As with a limit of file sizes: the tensors' files are not even begun."""
    recipe = tiny.recipe("limited", runner__save_interval=1, runner__max_steps=3)
    shardtune.train(recipe | {"runner": {**recipe["runner"], "max_steps": 2}})
    longer = recipe | {"runner": {**recipe["runner"], "allow_changes": ["runner.max_steps"]}}
    write = Path.write_text

    def refused(path: Path, text: str, *args: Any, **keys: Any) -> int:
        if path.name == STATE_FILE:
            raise OSError(errno.EFBIG, "File too large", str(path))
        return write(path, text, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", refused)
        with pytest.raises(CheckpointError, match=r"(?s)checkpoint cannot be written: File too large.*make room"):
            shardtune.train(longer)
    assert CheckpointStore(tiny.run("limited") / "checkpoints").latest() == (
        tiny.run("limited") / "checkpoints" / "global_step_2"
    )
    assert [line["step"] for line in lines(shardtune.train(longer).dir)] == [1, 2, 3]


def test_an_evaluation_that_fails_after_the_last_step_loses_no_training(tiny: Tiny) -> None:
    metric = tiny.folder / "metric.py"
    metric.write_text(METRIC.format("return 3.0"))
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "eval__metrics": [f"{metric}:half"],
        "runner__save_interval": -1,
    }
    recipe = tiny.recipe("late", **keys)
    with pytest.raises(ConfigError, match="half"):
        shardtune.train(recipe)
    trained = sorted(path.name for path in (tiny.run("late") / "checkpoints").glob("global_step_*"))
    assert len(trained) == 1, "the last step is there"
    metric.write_text(METRIC.format("return 1.0, 2.0"))
    run = shardtune.train(recipe)
    assert run.metrics["eval/half"] == 0.5
    steps = [line["step"] for line in lines(run.dir)]
    assert steps == list(range(1, int(trained[0].rpartition("_")[2]) + 1)), "each step is logged once"


def test_a_run_that_trains_nothing_is_an_error_that_names_the_rows(tiny: Tiny, tmp_path: Path) -> None:
    adapter = tmp_path / "empty.py"
    adapter.write_text(ADAPTER)
    keys = {"actor__model__adapter": f"{adapter}:Empty", "actor__model__from_scratch": True}
    with pytest.raises(ModelError, match="nothing was trained: all") as failed:
        shardtune.train(tiny.recipe("nothing", **keys))
    assert "train.jsonl:" in str(failed.value)
    assert not (tiny.run("nothing") / "final").exists()


STEADY = {"actor__optim__lr_scheduler": "constant", "actor__optim__clip_grad": None}


def test_weights_that_fp16_cannot_hold_end_training_at_the_last_good_checkpoint(tiny: Tiny) -> None:
    keys = {"actor__model__precision": "fp16", **STEADY}
    shardtune.train(tiny.recipe("beyond", **keys, runner__max_steps=2))
    shutil.rmtree(tiny.run("beyond") / "final")
    changed = {"actor__optim__lr": 1e6, "runner__allow_changes": ["actor.optim"], "runner__max_steps": 4}
    with pytest.raises(ModelError, match=r"not finite after step 3: model.embed_tokens.weight holds") as over:
        shardtune.train(tiny.recipe("beyond", **keys, **changed))
    assert "beyond the range of float16" in str(over.value)
    assert f"continues from {tiny.run('beyond') / 'checkpoints' / 'global_step_2'}" in str(over.value)
    assert not (tiny.run("beyond") / "final").exists()
    back = {**changed, "actor__optim__lr": 1e-3}
    assert shardtune.train(tiny.recipe("beyond", **keys, **back)).metrics["step"] == 4


def test_a_model_that_is_finite_for_no_row_is_not_written(tiny: Tiny) -> None:
    keys = {**STEADY, "actor__optim__lr": 1e20, "runner__max_steps": 3, "runner__max_epochs": 1}
    with pytest.raises(ModelError, match="after step 1 the loss or its gradient is finite for no row"):
        shardtune.train(tiny.recipe("broken", **keys))
    assert not (tiny.run("broken") / "final").exists()


def test_nothing_is_written_that_its_dtype_cannot_hold(tiny: Tiny, tmp_path: Path) -> None:
    """In fp32 all is finite; the factors of an adapter are so in fp16 too, and their product is not."""
    keys = {**STEADY, "actor__optim__lr": 1e6, "runner__max_steps": 1, "runner__final_dtype": "fp16"}
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight holds values up to"):
        shardtune.train(tiny.recipe("wide", **keys))
    assert not (tiny.run("wide") / "final").exists()
    keys |= {"actor__optim__lr": 5e4, "actor__model__is_lora": True}
    run = shardtune.train(tiny.recipe("factors", **keys))
    with pytest.raises(CheckpointError, match=r"q_proj.weight holds values up to .*, beyond the range of float16"):
        run.export(tmp_path / "merged", merge=True, dtype="fp16")
    assert not (tmp_path / "merged").exists()


def test_a_base_model_with_nan_is_named_at_the_start_and_its_dtype_stays(tmp_path: Path) -> None:
    own = make_tiny(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    weights = {name: tensor.double() for name, tensor in load_file(file).items()}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    save_file(weights, file, {"format": "pt"})
    run = shardtune.train(own.recipe("wide", runner__max_steps=1))
    assert {tensor.dtype for tensor in load_file(run.dir / "final" / "model.safetensors").values()} == {torch.float64}
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][3, 2] = torch.nan
    save_file(weights, file, {"format": "pt"})
    for is_lora in (False, True):
        with pytest.raises(ModelError, match=r"not finite: model.layers.0.mlp.up_proj.(base_layer.)?weight holds NaN"):
            shardtune.train(own.recipe("nan", actor__model__is_lora=is_lora))
    assert not own.run("nan").exists()
