"""Runs over rows with images: continued bitwise with loader processes, from memory, and with images that vanish."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import shardtune
from shardtune.data.images.rows import IMAGE_TAG
from shardtune.errors import DataError, Interrupted
from shardtune.run.replay.replay import replay
from tests.support.tiny_run import assert_same_tensors, recorded_rows, signal_after
from tests.support.vision import save_image_rows, save_vision_model

pytestmark = pytest.mark.lengthy

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, rows.jsonl and images/."""
    folder = tmp_path_factory.mktemp("images")
    save_vision_model("llava", folder / "model")
    save_image_rows(folder, 12)
    return folder


def recipe(place: Path, name: str, **changes: Any) -> dict[str, Any]:
    data = {"train_data_paths": str(place / "rows.jsonl"), "cache_dir": str(place / "cache"), "num_workers": 2}
    return {
        "runner": {
            "max_steps": STEPS,
            "max_epochs": STEPS,
            "save_interval": -1,
            "logger": {"log_path": str(place / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "model": {
                "model_path": str(place / "model"), "model_type": "vision_language", "precision": "fp32",
            },
            "optim": {"lr": 1e-3},
        },
        "data": {**data, **changes},
    }  # fmt: skip


def last(place: Path, name: str) -> Path:
    return place / "runs" / name / "checkpoints" / f"global_step_{STEPS}"


def test_stopped_and_continued_with_loader_processes(place: Path) -> None:
    """Bitwise, whether or not there were processes before; a step that is replayed has its rows and its loss.

    Images are augmented, each by its place in the run."""
    changed = {"augmentation": {"random_resized_crop": {"scale": [0.5, 0.9]}, "color_jitter": {"hue": 0.2}}}
    with recorded_rows() as whole:
        shardtune.train(recipe(place, "whole", **changed))
    # In a notebook and a sweep nothing of a run goes on.
    assert not [one for one in multiprocessing.active_children() if isinstance(one, ForkProcess)]
    with signal_after(2), recorded_rows() as before, pytest.raises(Interrupted, match="after step 2"):
        shardtune.train(recipe(place, "stopped", num_workers=0, **changed))
    with recorded_rows() as after:
        shardtune.train(recipe(place, "stopped", **changed))
    assert before[:2] + after == whole
    assert_same_tensors(last(place, "whole"), last(place, "stopped"))
    found = replay(place / "runs" / "stopped", 3)
    assert [line.number for line in found.rows] == whole[2]
    assert found.measured is not None
    assert found.measured.metrics["train/loss"] == pytest.approx(found.recorded["train/loss"], rel=1e-5)
    total = sum(line.losses["ce"] for line in found.rows) / sum(line.weights["ce"] for line in found.rows)
    assert total == pytest.approx(found.recorded["train/loss"], rel=1e-5)


@pytest.mark.slow
def test_stopped_at_any_step(place: Path) -> None:
    shardtune.train(recipe(place, "all"))
    for step in range(1, STEPS):
        with signal_after(step), pytest.raises(Interrupted, match=f"after step {step}"):
            shardtune.train(recipe(place, f"stopped{step}"))
        shardtune.train(recipe(place, f"stopped{step}"))
        assert_same_tensors(last(place, "all"), last(place, f"stopped{step}"))


def pictures(count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {"question": f"{IMAGE_TAG}What?", "answer": "abc"[number % 3],
         "images": [Image.fromarray(draw.integers(0, 255, (30 + number, 40, 3), np.uint8))]}
        for number in range(count)
    ]  # fmt: skip


def as_arrays(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "images": [np.asarray(image) for image in row["images"]]} for row in rows]


def as_dataset(rows: Sequence[dict[str, Any]]) -> datasets.Dataset:
    features = datasets.Features({
        "question": datasets.Value("string"), "answer": datasets.Value("string"),
        "images": datasets.List(datasets.Image()),
    })  # fmt: skip
    return datasets.Dataset.from_list(list(rows), features=features)


def test_rows_in_memory(place: Path) -> None:
    """Images of Pillow's, arrays, and a column of images: the same run."""
    rows = pictures(8)
    for name, data in (("pillow", rows), ("arrays", as_arrays(rows)), ("dataset", as_dataset(rows))):
        run = shardtune.train(recipe(place, name, train_data_paths=None), train_data=data)
        assert run.metrics["step"] == STEPS
        assert_same_tensors(last(place, "pillow"), last(place, name))


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_image_that_vanishes_is_named(place: Path, workers: int) -> None:
    name = f"vanished{workers}"
    with signal_after(2), pytest.raises(Interrupted):
        shardtune.train(recipe(place, name))
    image = place / "images" / "7_0.png"
    content = image.read_bytes()
    image.write_bytes(content[:-40])
    try:
        with pytest.raises(DataError, match="cannot be read as it was") as told:
            shardtune.train(recipe(place, name, num_workers=workers))
    finally:
        image.write_bytes(content)
    assert told.value.where == str(image)
    shardtune.train(recipe(place, name, num_workers=workers))
    assert last(place, name).is_dir()
