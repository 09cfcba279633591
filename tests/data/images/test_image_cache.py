"""Rows with images in the cache: what they depend on, what is read again, and which rows are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig

from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.images import chat_encoder
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import DATA, from_fields
from shardtune.data.images.placeholders import ImageText
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from shardtune.models.vision.processors import load_processor
from tests.data.conftest import Data
from tests.support.vision import FAMILIES, PARTS, template

TEMPLATE = PARTS.replace("IMAGE", "<image>")


def quiet(text: str) -> None:
    """Says nothing."""


def write_rows(folder: Path, *colours: int) -> Path:
    """Questions about images of 40 x 30."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, colour in enumerate(colours):
        Image.new("RGB", (40, 30), (colour,) * 3).save(folder / f"{number}.png")
    rows = [{"question": "<image>What?", "answer": "Grey.", "image": f"{n}.png"} for n in range(len(colours))]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def build(spec: Any, cache: Path, **options: Any) -> TokenDataset:
    maker = ImageChatEncoder(ImageText(FAMILIES["llava"]()[1]), TEMPLATE)
    sources = resolve_sources(spec, Data(cache), name_format=maker.title, report=quiet)
    return build_dataset(sources, maker, cache_dir=cache, report=quiet, **options)


def grey(rows: TokenDataset) -> list[int]:
    return [int(np.asarray(from_fields(rows.row(n).fields)[0].read())[0, 0, 0]) for n in range(len(rows))]


def test_paths_begin_at_the_folder_of_their_file(tmp_path: Path) -> None:
    """Two files of the same content, each beside its own images."""
    first, second = write_rows(tmp_path / "a", 10, 20), write_rows(tmp_path / "b", 30, 40)
    assert first.read_bytes() == second.read_bytes()
    assert grey(build([str(first), str(second)], tmp_path / "cache")) == [10, 20, 30, 40]


def test_keys_that_no_format_of_images_reads_are_named(tmp_path: Path) -> None:
    """As for rows of text; with a format of the recipe's the keys of other formats too."""
    file = write_rows(tmp_path / "a", 10)
    (row,) = map(json.loads, file.read_text().splitlines())
    file.write_text(json.dumps({**row, "id": 7, "caption": "A square.", "text": "Grey."}) + "\n")
    title, said = ImageChatEncoder(ImageText(FAMILIES["llava"]()[1]), TEMPLATE).title, list[str]()
    for spec in (str(file), {"path": str(file), "format": "question_answer"}):
        resolve_sources(spec, Data(tmp_path / "cache"), name_format=title, report=said.append)
    assert all("question/answer with images, 1 file" in line for line in said)
    assert all(line.endswith("; not read: id, caption, text") for line in said)
    assert len(said) == 2


def test_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time no image is opened, whichever process asks and from wherever."""
    file = write_rows(tmp_path / "a", 10, 20)
    rows = build(str(file), tmp_path / "cache")
    monkeypatch.setattr(chat_encoder, "read_image", None)
    monkeypatch.chdir(tmp_path)
    again = build("a/rows.jsonl", tmp_path / "cache")
    assert rows.fingerprint == again.fingerprint
    assert again.row(1).fields[DATA].tobytes() == str(tmp_path / "a" / "1.png").encode()


@pytest.mark.lengthy
@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_is_of_settings_and_not_of_places(family: str, tmp_path: Path) -> None:
    model, processor = FAMILIES[family]()
    keys = []
    for name in ("here", "there"):
        processor.save_pretrained(tmp_path / name)
        model.config.save_pretrained(tmp_path / name)
        loaded = load_processor(str(tmp_path / name), AutoConfig.from_pretrained(tmp_path / name))
        keys.append(ImageChatEncoder(ImageText(loaded), template(processor.tokenizer)).cache_key())
    assert keys[0] == keys[1]
    assert keys[0] == ImageChatEncoder(ImageText(processor), template(processor.tokenizer)).cache_key()


@pytest.mark.lengthy
def test_the_key_tells_settings_and_templates_apart(tmp_path: Path) -> None:
    def key(template: str = TEMPLATE, **options: Any) -> str:
        processor = FAMILIES["llava"]()[1]
        for name, value in options.items():
            if name == "patch_size":
                processor.patch_size = value
            else:
                setattr(processor.image_processor, name, value)
        return ImageChatEncoder(ImageText(processor), template, folder=tmp_path).cache_key()

    keys = [
        key(),
        key(image_mean=[0.5, 0.5, 0.5]),
        key(crop_size={"height": 56, "width": 56}),
        key(patch_size=7),
        key(TEMPLATE.replace("assistant", "model")),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_bad_images_are_named_or_skipped(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a", 10, 20, 30)
    (tmp_path / "a" / "1.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"1\.png: it is not an image that Pillow can read") as told:
        build(str(file), tmp_path / "cache")
    assert told.value.where == f"{file}: row 2"
    rows = build(str(file), tmp_path / "cache", on_bad_row="skip")
    assert grey(rows) == [10, 30]
    assert f"row 2 (image {tmp_path / 'a' / '1.png'}: it is not an image" in " ".join(rows.report.lines())


def test_a_format_that_the_recipe_names(tmp_path: Path) -> None:
    """Of a row that could be two, one with images as parts and one with a list of them."""
    file = write_rows(tmp_path / "a", 10, 20)
    part = {"role": "user", "content": [{"type": "image", "path": "0.png"}]}
    rows = [
        {"messages": [part, {"role": "assistant", "content": "A."}], "text": "no"},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A."}], "image": "1.png"},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A."}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = build({"path": str(file), "format": "messages"}, tmp_path / "cache")
    assert [len(from_fields(made.row(n).fields)) for n in range(3)] == [1, 1, 0]
    rows = [{"messages": "of another kind", "question": "?", "answer": "A.", "image": "1.png"}]
    file.write_text(json.dumps(rows[0]))
    made = build({"path": str(file), "format": "question_answer"}, tmp_path / "cache")
    assert grey(made) == [20]
