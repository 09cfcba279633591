"""Augmentation of training images: what changes, what the draws depend on, and whom it reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import shardtune
from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.batch import PackedBatch
from shardtune.batch.seeds import derive_seed
from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.images.augmentation import KEY, Augmentation
from shardtune.data.images.image_changes import OwnChanges
from shardtune.data.images.images import ENDS, from_fields
from shardtune.data.loader.step_loader import DataState, StepLoader
from shardtune.errors import ConfigError, ModelError, ShardtuneError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.vision.vision_language import VisionLanguage
from shardtune.parallel.ranks import Ranks
from shardtune.run.dry_run import preview
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.cached_rows import CachedRowsTask
from tests.support.vision import save_image_rows, save_vision_model

HEIGHT, WIDTH = 10, 14
ALL = {
    "random_resized_crop": {"scale": [0.5, 0.9], "ratio": [0.8, 1.25]},
    "random_affine": {"degrees": 10, "translate": [0.1, 0.1], "scale": [0.9, 1.1], "shear": 3},
    "color_jitter": {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.1},
}


class Looking(Adapter):
    """A linear layer over two cameras, of which one shows two frames."""

    image_fields = ("top", "wrist")

    def build(self) -> nn.Module:
        return nn.Linear(3, 1)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        draws = np.random.default_rng(row["number"])
        top = draws.integers(0, 256, (2, 3, HEIGHT, WIDTH), np.uint8)
        return Sample(fields={"top": top, "wrist": draws.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        dtype = next(model.parameters()).dtype
        found = model((batch["top"].to(dtype).mean((1, 3, 4)) - batch["wrist"].to(dtype).mean((1, 2))) / 255)
        return LossSum(found.square().sum(), len(found))


class Blind(Looking):
    image_fields = ()


class Normalising(Looking):
    """Normalises before the cache."""

    def encode(self, row: Mapping[str, Any]) -> Sample:
        fields = super().encode(row).fields
        return Sample(fields={name: image.astype(np.float32) / 255 for name, image in fields.items()})


class Misspelt(Looking):
    image_fields = ("tpo",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("augmented")
    (made / "rows.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(12)))
    return made


def recipe(folder: Path, name: str, adapter: str = "Looking", **data: Any) -> dict[str, Any]:
    logger = {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]}
    rows = {"train_data_paths": str(folder / "rows.jsonl"), "eval_data_paths": str(folder / "rows.jsonl")}
    return {
        "runner": {"max_steps": 4, "max_epochs": -1, "save_interval": 2, "device": "cpu", "logger": logger},
        "micro_batch_size": 2,
        "global_batch_size": 5,
        "optim": {"lr": 0.01, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        "model": {"adapter": f"{__file__}:{adapter}", "precision": "fp32"},
        "data": {**rows, "cache_dir": str(folder / "cache"), "num_workers": 0, "augmentation": ALL, **data},
    }


def augmentation(**config: Any) -> Augmentation:
    data = {"train_data_paths": "x", "augmentation": config or ALL}
    loaded = load_recipe({"model": {"model_type": "act"}, "data": data}, files_must_exist=False)
    found = Augmentation.of(loaded.data.augmentation)
    assert found is not None
    return found


def images(number: int = 1) -> np.ndarray:
    small = torch.randint(0, 256, (number, 3, 4, 5), generator=torch.Generator().manual_seed(1)).float()
    whole = nn.functional.interpolate(small, (HEIGHT, WIDTH), mode="bilinear")
    return whole.round().to(torch.uint8).numpy()


def test_the_changes() -> None:
    own, image = OwnChanges(), torch.from_numpy(images())
    square = image[..., :HEIGHT]
    assert torch.equal(own.crop(image, 0, 0, HEIGHT, WIDTH), image)
    left = own.crop(torch.arange(WIDTH, dtype=torch.uint8).expand(1, 3, HEIGHT, WIDTH) * 10, 0, 0, HEIGHT, WIDTH // 2)
    assert left.max() == 60
    assert left.shape == image.shape
    assert torch.equal(own.affine(square, 90.0, (0.0, 0.0), 1.0, 0.0), square.rot90(-1, (-2, -1)))  # clockwise
    shifted = own.affine(image, 0.0, (3.0, -2.0), 1.0, 0.0)  # right and up
    assert torch.equal(shifted[..., :-2, 3:], image[..., 2:, :-3])
    assert not shifted[..., :3].any()
    grey = own.saturation(image, 0.0)
    assert torch.equal(grey[:, 0], grey[:, 1])
    assert len(own.contrast(image, 0.0).unique()) == 1
    assert torch.equal(own.brightness(image, 0.5), image // 2)
    red = torch.tensor([200, 10, 10], dtype=torch.uint8).view(1, 3, 1, 1)
    assert own.hue(red, 1 / 3).flatten().tolist() == [10, 200, 10]
    assert (own.hue(image, 0.0).int() - image.int()).abs().max() <= 1


def test_draws_belong_to_row_and_camera() -> None:
    """They depend on nothing else; frames of one camera are changed alike, and cameras apart unless they are a pair."""
    augment, image = augmentation(), images()[0]
    row = augment.row(5, 7)
    np.testing.assert_array_equal(row(image, "top"), augmentation().row(5, 7)(image, "top"))
    for other in (augment.row(5, 8), augment.row(6, 7)):
        assert (other(image, "top") != row(image, "top")).mean() > 0.5
    assert (row(image, "wrist") != row(image, "top")).mean() > 0.5
    frames = row(np.stack([image, images(2)[1], image]), "top")
    np.testing.assert_array_equal(frames[0], row(image, "top"))
    np.testing.assert_array_equal(frames[2], frames[0])
    np.testing.assert_array_equal(row(image.transpose(1, 2, 0), "top").transpose(2, 0, 1), frames[0])
    pair = augmentation(**ALL, same_for_cameras=True).row(5, 7)
    np.testing.assert_array_equal(pair(image, "left"), pair(image, "right"))


def test_ranges_are_torchvisions() -> None:
    """Of many draws: shares of the area, whole pixels, factors that are uniform, and orders of the colours."""
    from shardtune.data.images import augmentation as module

    config = load_recipe(
        {"model": {"model_type": "act"}, "data": {"train_data_paths": "x", "augmentation": ALL}}, files_must_exist=False
    ).data.augmentation
    parts, moves, orders, bright = [], [], set(), []
    for row in range(600):
        draws = module._Draws(1, row, "top")
        parts.append(module._part(draws, config.random_resized_crop, (240, 320)))
        moves.append(module._affine(draws, config.random_affine, (240, 320)))
        colours = module._colours(draws, config.color_jitter)
        orders.add(tuple(name for name, _ in colours))
        bright.append(dict(colours)["brightness"])
    tops, lefts, heights, widths = np.array(parts).T
    shares, ratios = heights * widths / (240 * 320), widths / 320 / (heights / 240)
    assert 0.49 < shares.min() < 0.55 < 0.85 < shares.max() < 0.91
    assert 0.79 < ratios.min() < 0.85 < 1.2 < ratios.max() < 1.26
    assert (tops + heights <= 240).all()
    assert (lefts + widths <= 320).all()
    degrees, shifts = np.array([one[0] for one in moves]), np.array([one[1] for one in moves])
    assert -10 <= degrees.min() < -9.5 < 9.5 < degrees.max() <= 10
    assert (shifts == shifts.round()).all()
    assert (np.abs(shifts).max(0) <= [32, 24]).all()
    assert (np.abs(shifts).max(0) >= [30, 22]).all()
    assert len(orders) == 24
    assert abs(np.mean(bright) - 1) < 0.03
    assert np.std(bright) == pytest.approx(0.6 / 12**0.5, rel=0.06)


def worker(folder: Path, **data: Any) -> SFTWorker:
    made = SFTWorker(load_recipe(recipe(folder, "loader", **data)), report=lambda text: None)
    made.setup()
    return made


def test_ranks_and_processes_see_the_same(folder: Path) -> None:
    """And a loader that begins later; other epochs and evaluation see other images, the cache has those of the rows."""
    made = worker(folder)
    task = made.task
    assert isinstance(task, CachedRowsTask)
    assert any("images of training are augmented, by torch" in note for note in made.summary().notes)

    def seen(ranks: int, start: DataState, steps: int, **attributes: Any) -> dict[tuple[int, int], bytes]:
        found = {}
        for rank in range(ranks):
            one = Ranks(rank, ranks, made.device, layout=Layout(shard=ranks))
            loader = task.training_loader(one)
            vars(loader).update(attributes)
            for step in islice(loader.steps(start), steps):
                for batch in step.micro_batches:
                    for place, row in enumerate(batch.rows):
                        key = (step.state.epoch, row)
                        content = batch["top"][place].numpy().tobytes() + batch["wrist"][place].numpy().tobytes()
                        if row >= 0:
                            assert found.setdefault(key, content) == content
        return found

    alone = seen(1, DataState(), 6)
    assert {epoch for epoch, _ in alone} == {0, 1}
    assert seen(2, DataState(), 6) == alone
    assert seen(1, DataState(), 6, _num_processes=2) == alone
    after = seen(1, DataState(0, 10), 4)
    assert after == {key: alone[key] for key in after}
    assert all(alone[0, row] != alone[1, row] for row in range(12))
    rows = made.prepared.train
    assert rows is not None
    for batch in task.evaluation_set("", Ranks(0, 1, made.device)):
        for place, row in enumerate(batch.rows):
            np.testing.assert_array_equal(batch["top"][place].numpy(), rows.row(row).fields["top"])
    made.release()
    off = SFTWorker(load_recipe(recipe(folder, "loader", augmentation={})), report=lambda text: None)
    assert off.prepared.files() == made.prepared.files()  # encoded once for both


@pytest.mark.slow
def test_two_ranks_train_as_one(folder: Path) -> None:
    """In fp64, with other micro-batches and loader processes."""
    losses = []
    for ranks in (1, 2):
        values = recipe(folder, f"ranks{ranks}", num_workers=ranks)
        values["model"]["precision"] = "fp64"
        run = shardtune.train(values, f"runner.nproc_per_node={ranks}", f"micro_batch_size={3 - ranks}")
        lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-12)


@pytest.mark.lengthy
def test_a_vision_language_model_sees_changed_images(tmp_path: Path) -> None:
    save_vision_model("llava", tmp_path / "model")
    save_image_rows(tmp_path, 4)
    values = {
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "runner": {"logger": {"log_path": str(tmp_path / "runs")}},
        "model": {"model_path": str(tmp_path / "model"), "model_type": "vision_language", "precision": "fp32"},
        "data": {
            "train_data_paths": str(tmp_path / "rows.jsonl"),
            "cache_dir": str(tmp_path / "c"),
            "augmentation": ALL,
        },
    }
    made = SFTWorker(load_recipe(values), report=lambda text: None)
    made.setup()
    rows, state = made.prepared.train, DataState(1, 2)
    assert rows is not None
    assert isinstance(made.adapter, VisionLanguage)
    row = int(np.flatnonzero(rows.field_counts(ENDS))[0])
    assert isinstance(made.loader, StepLoader)
    batch, plain = (made.loader.alone(row, place) for place in (state, None))
    assert isinstance(batch, PackedBatch)
    assert isinstance(plain, PackedBatch)
    draws = augmentation().row(derive_seed(made.recipe.runner.seed, KEY, 1, 2), row)
    images = [
        Image.fromarray(draws(np.asarray(one.read()), str(place)))
        for place, one in enumerate(from_fields(rows.row(row).fields))
    ]
    expected = made.adapter.images.pixels(images)["pixel_values"]
    assert torch.equal(made.adapter.further_inputs(batch)["pixel_values"], expected)
    assert not torch.equal(made.adapter.further_inputs(plain)["pixel_values"], expected)
    made.release()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model.adapter": f"{__file__}:Blind"}, "the adapter Blind names no images"),
        ({"model.adapter": None, "model.model_path": "x"}, "causal_lm, which takes no images"),
        ({"data.keep_pixels": True}, "stores processed images"),
        ({"data.augmentation": {"same_for_cameras": True}}, "no change of images has a range"),
        ({"data.augmentation": {"color_jitter": {"hue": 0.6}}}, "not from 0 to 0.5"),
        ({"data.augmentation": {"random_resized_crop": {"scale": [0.9, 1.1]}}}, "from 0.01 to 1"),
        ({"model.adapter": f"{__file__}:Normalising"}, r"'top' is float32 \[2, 3, 10, 14\], no images that could be"),
        ({"model.adapter": f"{__file__}:Misspelt"}, "image_fields names 'tpo', which is no field"),
    ],
)
def test_what_cannot_be_augmented_is_refused(folder: Path, changes: dict[str, Any], what: str) -> None:
    """Before anything starts: by the recipe, by the adapter, or by its first row."""
    values = recipe(folder, "refused")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values[section][name] = value

    def begun() -> None:
        loaded = load_recipe(values, files_must_exist=False)
        find_adapter(loaded)
        SFTWorker(loaded, report=lambda text: None).task.check()

    with pytest.raises(ShardtuneError, match=what) as error:
        begun()
    assert isinstance(error.value, ConfigError | ModelError)


def test_as_torchvision() -> None:
    """Bit by bit, where torchvision is installed."""
    pytest.importorskip("torchvision")
    from shardtune.data.images.image_changes import TorchvisionChanges

    own, other, image = OwnChanges(), TorchvisionChanges(), torch.from_numpy(images(3))
    for call in (
        partial(OwnChanges.crop, images=image, top=1, left=2, height=7, width=9),
        partial(OwnChanges.affine, images=image, degrees=17.0, shift=(2.0, -1.0), scale=0.9, shear=4.0),
    ):
        assert torch.equal(call(own), getattr(other, call.func.__name__)(**call.keywords))
    for name, value in (("brightness", 1.3), ("contrast", 0.6), ("saturation", 1.4), ("hue", -0.2)):
        assert torch.equal(getattr(own, name)(image, value), getattr(other, name)(image, value))


@pytest.mark.lengthy
def test_a_picture_of_rows(folder: Path, tmp_path: Path) -> None:
    """`shardtune data preview --images`: both cameras of two rows, each as it is and in four epochs."""
    preview(recipe(folder, "shown"), rows=2, images=tmp_path / "shown.png")
    with Image.open(tmp_path / "shown.png") as sheet:
        assert sheet.size == (5 * (160 * WIDTH // HEIGHT + 4), 4 * 164)
    with pytest.raises(ConfigError, match="the recipe changes no images"):
        preview(recipe(folder, "shown", augmentation={}), images=tmp_path / "none.png")
