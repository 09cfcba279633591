"""Frozen parts with dropout that a model's code has put into eval mode are named: training has them in train mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import nn

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.config import load_recipe
from shardtune.training.build.frozen_mode import mode_notes
from shardtune.training.worker.adapter_worker import SFTWorker


def layers(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Dropout(p), nn.Linear(4, 1))


class Pair(nn.Module):
    """A student, and a frozen teacher in eval mode."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.student, self.teacher = layers(p), layers(p)
        self.teacher.requires_grad_(False).eval()


class Taught(Adapter):
    def build(self) -> nn.Module:
        return Pair()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]], np.float32)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(model, Pair)
        return LossSum((model.student(batch["x"]) - model.teacher(batch["x"])).square().sum(), len(batch.rows))


def test_a_frozen_teacher_in_eval_mode_is_named_by_the_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"x": number}) + "\n" for number in range(4)))
    recipe = {
        "actor": {"model": {"adapter": f"{__file__}:Taught", "precision": "fp32"}, "global_batch_size": 4},
        "data": {"train_data_paths": str(rows), "cache_dir": str(tmp_path / "cache"), "num_workers": 0},
    }
    made = SFTWorker(load_recipe(recipe))
    made.setup()
    (note,) = (note for note in made.notes if "eval mode" in note)
    assert note.startswith("teacher is frozen and in eval mode")
    assert note.endswith("(teacher.1) acts. Call model.teacher.eval() at the beginning of the loss")


def test_what_is_left_out_of_these_notes() -> None:
    assert not mode_notes(Pair(p=0.0))
    assert not mode_notes(Pair().eval())  # as from_pretrained returns it: not a choice for the part
    assert not mode_notes(Pair().train())
    thawed = Pair()
    thawed.teacher.requires_grad_(True)
    assert not mode_notes(thawed)
