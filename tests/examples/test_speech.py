"""The example with speech: its loss is Whisper's own, errors are counted, and final/ is a Whisper."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoFeatureExtractor, WhisperForConditionalGeneration

import shardtune
from shardtune.config import load_recipe
from shardtune.models.find_adapter import find_adapter
from tests.support.workspace import quietly

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "speech"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setattr(sys, "argv", ["make_data.py", "--out", str(folder), "--rows", "8"])
        runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")
    return folder


def recipe(made: Path, *overrides: str) -> Any:
    return load_recipe(
        FOLDER / "recipe.yaml",
        [
            f"model.model_path={made}/whisper", f"model.options.audio_folder={made}", f"data.cache_dir={made}/cache",
            f"data.train_data_paths={made}/train.jsonl", f"data.eval_data_paths={made}/heldout.jsonl",
            f"runner.logger.log_path={made}/runs", "data.num_workers=0", *overrides,
        ],
    )  # fmt: skip


def test_the_loss_is_that_of_whisper(made: Path):
    adapter: Any = find_adapter(recipe(made))
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    batch = adapter.collate([adapter.encode(row) for row in rows[:3]], range(3), {})
    model = WhisperForConditionalGeneration.from_pretrained(made / "whisper")
    found = adapter.loss(model, batch)
    own = model(input_features=batch["heard"], labels=batch["labels"]).loss  # a mean over all tokens
    assert float(found.total.detach()) / found.weight == pytest.approx(float(own.detach()), rel=1e-6)
    heard = sys.modules[type(adapter).__module__].distance
    assert [heard(["a", "b", "c"], text.split()) for text in ("a b c", "a c", "b b c d", "")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_final_is_a_whisper(made: Path):
    run = shardtune.train(recipe(made, "runner.max_steps=2", "runner.eval_before_training=false").to_dict())
    assert run.metrics["eval/word_error_rate"] >= 0
    assert torch.isfinite(WhisperForConditionalGeneration.from_pretrained(run.dir / "final").proj_out.weight).all()
    assert AutoFeatureExtractor.from_pretrained(run.dir / "final").feature_size == 40
