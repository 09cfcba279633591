"""An adapter's own processor encodes its rows and is saved with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig

import shardtune
from shardtune.models.vision.processors import load_processor
from tests.support.vision import save_vision_model

ADAPTER = '''
from functools import cached_property

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import nn

import shardtune
from shardtune import Adapter, LossSum, Sample


class Brightness(Adapter):
    """How bright a picture is, from the pixels that a processor of transformers makes."""

    @cached_property
    def processor(self):
        return shardtune.nn.AutoProcessor.from_pretrained(self.recipe.actor.tokenizer.tokenizer_model)

    def build(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 1), nn.Flatten(0))

    def encode(self, row):
        pixels = self.processor.image_processor(Image.open(row["file"]), return_tensors="np")["pixel_values"][0]
        return Sample(fields={"pixels": pixels, "bright": np.float32(row["bright"])})

    def loss(self, model, batch):
        return LossSum(F.mse_loss(model(batch["pixels"]), batch["bright"], reduction="sum"), len(batch["bright"]))
'''


@pytest.mark.lengthy
def test_the_processor_is_saved_beside_the_weights(tmp_path: Path):
    folder = save_vision_model("llava", tmp_path / "model")
    (tmp_path / "bright.py").write_text(ADAPTER)
    rows = []
    for number in range(4):
        Image.new("RGB", (28, 28), (60 * number,) * 3).save(tmp_path / f"{number}.png")
        rows.append(json.dumps({"file": str(tmp_path / f"{number}.png"), "bright": number / 4}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    run = shardtune.train(
        {
            "actor": {
                "model": {"adapter": str(tmp_path / "bright.py") + ":Brightness", "precision": "fp32"},
                "tokenizer": {"tokenizer_model": str(folder)},
                "global_batch_size": 2,
            },
            "data": {"train_data_paths": str(tmp_path / "rows.jsonl"), "num_workers": 0, "cache_dir": str(tmp_path)},
            "runner": {"max_steps": 1, "logger": {"log_path": str(tmp_path), "experiment_name": "bright"}},
        }
    )
    config = AutoConfig.from_pretrained(folder)
    saved, given = (load_processor(str(path), config) for path in (run.dir / "final", folder))
    assert saved.image_processor.to_dict() == given.image_processor.to_dict()
    assert (run.dir / "final" / "model.safetensors").is_file()
