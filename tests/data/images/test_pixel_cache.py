"""Pixels kept on disk are those that the processor makes, bit by bit, and no image is read for them again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardtune.config import load_recipe
from shardtune.data.images.images import StoredImage, read_image
from shardtune.data.images.pixel_bytes import TABLE, ImageBytes
from shardtune.data.images.pixel_cache import PixelCache, PixelReader, pixel_key
from shardtune.data.images.placeholders import ImageText
from shardtune.data.loader.prefetch import computed_ahead
from shardtune.errors import ConfigError, DataError
from shardtune.models.vision.processors import image_text
from shardtune.models.vision.vision_language import VisionLanguage
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.models.vision.test_vision_on_ranks import a_recipe
from tests.support.dist.training import quiet
from tests.support.vision import FAMILIES, save_image_rows, save_vision_model

SIZES = ((40, 30), (64, 64), (33, 90), (200, 120))


def save_images(folder: Path) -> list[StoredImage]:
    draw = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    found = []
    for number, (width, height) in enumerate(SIZES):
        picture = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
        picture.save(folder / f"{number}.png")
        found.append(read_image(f"{number}.png", folder))
    return found


def files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "pixels").rglob("*") if path.is_file())


def same(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return found.keys() == other.keys() and all(
        found[key].dtype == other[key].dtype and torch.equal(found[key], other[key]) for key in other
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_pixels_are_the_processors_own(family: str, tmp_path: Path) -> None:
    """Also where the images are gone, and where those of a micro-batch come in another order."""
    images, stored = image_text(FAMILIES[family]()[1]), save_images(tmp_path / "images")
    own = images.pixels([image.read() for image in stored])
    turned = images.pixels([image.read() for image in stored[2:0:-1]])
    reader = PixelReader(images, PixelCache(tmp_path, "key"))
    first = reader.inputs(stored)
    assert first["pixel_values"].dtype == torch.uint8
    assert same(images.numbers(first), own)
    assert same(images.numbers(PixelReader(images, None).inputs(stored)), own)
    assert len(files(tmp_path)) == len(stored)
    assert sum(path.stat().st_size for path in files(tmp_path)) < own["pixel_values"].numel() + 400 * len(stored)
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    assert same(images.numbers(reader.inputs(stored)), own)
    assert same(images.numbers(reader.inputs(stored[2:0:-1])), turned)
    with pytest.raises(DataError, match="cannot be read as it was"):
        PixelReader(images, None).inputs(stored)


def test_bytes_become_numbers_in_the_precision_of_their_table() -> None:
    images = image_text(FAMILIES["qwen2_5_vl"]()[1])
    pictures = [Image.effect_noise(size, 90.0).convert("RGB") for size in SIZES]
    assert images.pixel_bytes is not None
    parts = [part for part in map(images.bytes_of, pictures) if part is not None]
    joined = images.pixel_bytes.joined(parts)
    assert joined is not None
    wide = images.numbers({**joined, TABLE: joined[TABLE].double()})
    assert torch.equal(wide["pixel_values"], images.pixels(pictures)["pixel_values"].double())
    own = images.pixels(pictures)
    assert same(images.numbers({**own, TABLE: joined[TABLE]}), own)  # numbers stay what they are


def test_torn_and_foreign_files_are_made_again(tmp_path: Path) -> None:
    images, stored = image_text(FAMILIES["smolvlm"]()[1]), save_images(tmp_path / "images")
    reader = PixelReader(images, PixelCache(tmp_path, "key"))
    own = images.numbers(reader.inputs(stored))
    good = [path.read_bytes() for path in files(tmp_path)]
    turned = bytes([*good[1][:-1], good[1][-1] ^ 1])
    for path, content in zip(files(tmp_path), (b"", turned, b"PK\3\4 something else", good[3][:-7]), strict=True):
        path.write_bytes(content)
    assert same(images.numbers(reader.inputs(stored)), own)
    assert [path.read_bytes() for path in files(tmp_path)] == good
    for path, content in zip(files(tmp_path), [*good[1:], good[0]], strict=True):  # whole, but of another image
        path.write_bytes(content)
    assert same(images.numbers(reader.inputs(stored)), own)
    assert [path.read_bytes() for path in files(tmp_path)] == good
    for path in files(tmp_path):
        path.write_bytes(b"")
    (tmp_path / "images" / "0.png").unlink()
    with pytest.raises(DataError, match="cannot be read as it was"):
        reader.inputs(stored)


def test_a_full_or_locked_cache_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    images, stored = image_text(FAMILIES["llava"]()[1]), save_images(tmp_path / "images")
    (tmp_path / "pixels").write_text("a file where a folder has to be")
    with pytest.raises(DataError, match="the data cache cannot be written") as told:
        PixelReader(images, PixelCache(tmp_path, "key")).inputs(stored)
    assert "data.cache_dir" in str(told.value.remedy)


def test_two_processes_keep_the_same_images_at_once(tmp_path: Path) -> None:
    images, stored = image_text(FAMILIES["llava"]()[1]), save_images(tmp_path / "images")
    own = images.pixels([image.read() for image in stored])
    together = multiprocessing.get_context("fork").Barrier(2)

    def work(number: int) -> dict[str, torch.Tensor]:
        cache = PixelCache(tmp_path, f"key{number // 2}")
        together.wait(20)
        return PixelReader(images, cache).inputs(stored)

    for found in computed_ahead(work, range(12), 2):
        assert same(images.numbers(found), own)
    assert len(files(tmp_path)) == 6 * len(stored)  # and nothing half-written beside them


def test_the_key_is_of_settings_and_content(tmp_path: Path) -> None:
    processor = FAMILIES["llava"]()[1]
    keys = [pixel_key(ImageText(processor).pixel_settings())]
    assert pixel_key(ImageText(FAMILIES["llava"]()[1]).pixel_settings()) == keys[0]
    for name, value in (("resample", 2), ("crop_size", {"height": 14, "width": 28}), ("image_mean", [0.5, 0.5, 0.5])):
        changed: Any = FAMILIES["llava"]()[1]
        setattr(changed.image_processor, name, value)
        keys.append(pixel_key(ImageText(changed).pixel_settings()))
    assert len(set(keys)) == 4

    stored = save_images(tmp_path)
    again = read_image(str(tmp_path / "0.png"), Path("/"))
    inside = read_image((tmp_path / "0.png").read_bytes(), tmp_path)
    assert len({image.key() for image in stored}) == 4
    assert replace(again, content=b"elsewhere").key() == stored[0].key()
    Image.new("RGB", SIZES[0]).save(tmp_path / "0.png")
    assert read_image("0.png", tmp_path).key() != stored[0].key()
    assert inside.key() != read_image((tmp_path / "0.png").read_bytes(), tmp_path).key()


def test_what_is_padded_is_no_byte() -> None:
    """Zeros that a processor puts around numbers stand for no byte of the table."""
    images = image_text(FAMILIES["smolvlm"]()[1])
    assert images.pixel_bytes is not None
    kind: Any = type(images.image_processor)

    class Padding(kind):
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            made = super()._preprocess(*args, **kwargs)
            made["pixel_values"] = torch.nn.functional.pad(made["pixel_values"], (0, 2))
            return made

    picture = Image.new("RGB", (40, 40))
    assert images.bytes_of(picture) is not None
    images.image_processor.__class__ = Padding
    assert images.bytes_of(picture) is None


def test_images_that_would_be_padded_are_left_to_the_processor(tmp_path: Path) -> None:
    """One that makes images as large as the largest of them."""
    images, stored = image_text(FAMILIES["llava"]()[1]), save_images(tmp_path / "images")
    reader, pixel_bytes = PixelReader(images, PixelCache(tmp_path, "key")), images.pixel_bytes
    reader.inputs(stored[:1])
    (path,) = files(tmp_path)
    PixelCache(tmp_path, "key").put(path.name, ImageBytes(np.zeros((1, 3, 8, 8), np.uint8), {}))
    assert pixel_bytes is not None
    found = reader.inputs(stored)
    assert found["pixel_values"].dtype == torch.float32
    assert same(found, images.pixels([image.read() for image in stored]))


def a_worker(folder: Path, **changes: Any) -> SFTWorker:
    if not (folder / "model").exists():
        save_vision_model("qwen3_vl", folder / "model")
        save_image_rows(folder, 12)
    values = a_recipe(folder / "model", folder / "rows.jsonl", data__eval_data_paths=None, **changes)
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    return worker


def losses(worker: SFTWorker, steps: int = 3) -> Sequence[float]:
    found = [worker.run_training()["train/loss"] for _ in range(steps)]
    worker.release()
    return found


@pytest.mark.lengthy
def test_training_goes_on_without_the_images(tmp_path: Path) -> None:
    """With the losses of a run that reads them, made ready in processes or here."""
    plain = losses(a_worker(tmp_path, data__num_workers=0))
    settings = {"data__keep_pixels": True, "data__cache_dir": str(tmp_path / "cache")}
    worker = a_worker(tmp_path, data__num_workers=2, **settings)
    assert isinstance(worker.adapter, VisionLanguage)
    assert losses(worker) == plain
    assert [path.name for path in (tmp_path / "cache" / "pixels").iterdir()] == [
        pixel_key(worker.adapter.images.pixel_settings())
    ]
    assert files(tmp_path / "cache")
    for path in (tmp_path / "images").iterdir():
        os.truncate(path, 1)
    for processes in (0, 2):
        assert losses(a_worker(tmp_path, data__num_workers=processes, **settings)) == plain


@pytest.mark.lengthy
def test_a_processor_whose_bytes_say_less_is_refused(tmp_path: Path) -> None:
    save_vision_model("qwen3_vl", tmp_path / "model")
    save_image_rows(tmp_path, 12)
    settings = tmp_path / "model" / "processor_config.json"
    settings.write_text(settings.read_text().replace('"do_normalize": true', '"do_normalize": false'))
    assert losses(a_worker(tmp_path, data__num_workers=0), 1)
    with pytest.raises(ConfigError, match=r"data\.keep_pixels: the images of .* cannot be kept"):
        a_worker(tmp_path, data__keep_pixels=True)


def test_a_recipe_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.keep_pixels has no effect with model_type: causal_lm"):
        load_recipe({
            "actor": {"model": {"model_path": "m"}, "micro_batch_size": 1, "global_batch_size": 1},
            "data": {"train_data_paths": "a.jsonl", "keep_pixels": True},
        })  # fmt: skip
