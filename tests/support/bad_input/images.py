"""Mistakes in images, and in rows that hold them."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.bad_input.case import Case, Prepare, with_keys
from tests.support.vision import PARTS, save_vision_model
from tests.support.workspace import write_rows

EYES = ("actor.model.model_path=eyes", "actor.model.model_type=vision_language", "data.train_data_paths=seen.jsonl")
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
GREY = Image.new("L", (8, 8), 90)


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, form, **options)
    return sink.getvalue()


def hundred_megapixels() -> bytes:
    """A PNG of one bit per pixel."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(10_000 * 1_251), 1))
    return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")


def row(content: Any = "<image>What is it?", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "Grey."}]
    return {"messages": turns, **more}


GOOD = row(images=["good.png"])


def seen(rows: Sequence[dict[str, Any]], **files: bytes) -> Prepare:
    """A model with eyes, its rows, good.png and further files (their names with _ for a point)."""

    def prepare(work: Path) -> None:
        save_vision_model("llava", work / "eyes")
        write_rows(work / "seen.jsonl", rows)
        (work / "good.png").write_bytes(encoded(NOISE, "PNG"))
        for name, content in files.items():
            (work / name.replace("_", ".")).write_bytes(content)

    return prepare


def bad_image(name: str, file: str, content: bytes, *, says: str) -> Case:
    """An image of the second row."""
    rows = [GOOD, row(images=[file])]
    told = f"{file}: | {says} | seen.jsonl: row 2 | data.on_bad_row=skip"
    return with_keys(name, *EYES, says=told, prepare=seen(rows, **{file.replace(".", "_"): content}))


def bad_row(name: str, bad: dict[str, Any], *keys: str, says: str) -> Case:
    """A row behind a good one."""
    return with_keys(name, *EYES, *keys, says=f"{says} | seen.jsonl: row 2 | skip", prepare=seen([GOOD, bad]))


def with_template(text: str) -> Prepare:
    def prepare(work: Path) -> None:
        seen([GOOD])(work)
        (work / "own.jinja").write_text(text)

    return prepare


IMAGES: list[Case] = [
    bad_image("a torn JPEG", "a.jpg", encoded(NOISE, "JPEG")[:-500], says="it is torn: image file is truncated"),
    bad_image("a torn PNG", "a.png", encoded(NOISE, "PNG")[:-500], says="it is torn"),
    bad_image("an image of no bytes", "a.png", b"", says="it is empty"),
    bad_image("a text named PNG", "a.png", b"hello", says="it is not an image that Pillow can read"),
    bad_image("an image in CMYK", "a.jpg", encoded(Image.new("CMYK", (8, 8)), "JPEG"), says="in CMYK | convert it"),
    bad_image(
        "an image of 16 bits", "a.png", encoded(Image.fromarray(np.full((8, 8), 999, np.uint16)), "PNG"),
        says="it is 16-bit",
    ),
    bad_image(
        "an animated GIF", "a.gif",
        encoded(GREY, "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 9)]),
        says="it is animated (2 frames)",
    ),
    bad_image(
        "an animated WebP", "a.webp", encoded(NOISE, "WEBP", save_all=True, append_images=[NOISE.rotate(90)]),
        says="it is animated (2 frames)",
    ),
    bad_image("an image of 100 megapixels", "a.png", hundred_megapixels(), says="100 million pixels, more than 64"),
    bad_row("a wrong path of an image", row(images=["god.png"]), says="god.png does not exist | looked for"),
    bad_row("an image that is a number", row(images=[7]), says="an image is int"),
    bad_row(
        "a URL where none is allowed",
        row(images=["https://example.com/a.png"]),
        says="https://example.com/a.png | data.image_hosts allows no host | add example.com",
    ),
    bad_row(
        "a URL of this machine",
        row(images=["http://127.0.0.1:9/a.png"]),
        "data.image_hosts=['*']",
        says="127.0.0.1:9/a.png | an address of this machine",
    ),
    bad_row("more images than places", row(images=["good.png"] * 2), says="2 images and 1 place | <image>"),
    bad_row("more places than images", row("<image><image>", images=["good.png"]), says="1 image and 2 places"),
    bad_row("places without images", row(), says="0 images and 1 place"),
    bad_row("a video in a row", row("?", videos=["a.mp4"]), says="the row has videos | images only"),
    bad_row(
        "a video in a turn", row([{"type": "video", "video": "a.mp4"}]), says="type 'video' | takes text and images"
    ),
    bad_row("image and images", row(image="good.png", images=["good.png"]), says="both image and images"),
    with_keys(
        "more bad images than allowed",
        *EYES,
        "data.on_bad_row=skip",
        "data.max_bad_rows=1",
        says="2 rows cannot be used, data.max_bad_rows is 1 | a.png | seen.jsonl",
        prepare=seen([GOOD, *[row(images=["a.png"])] * 2], a_png=b""),
    ),
    with_keys(
        "a template without images",
        *EYES,
        "data.chat_template=own.jinja",
        says="the chat template leaves out images | '<image>' | data.chat_template: null",
        prepare=with_template(PARTS.replace("IMAGE", "")),
    ),
    with_keys(
        "an image that ends behind the longest row",
        *EYES,
        "data.max_length=16",
        says="no row is left | its last image ends at | no image is cut | data.max_length",
        prepare=seen([row("What is it?<image>", images=["good.png"])]),
    ),
    Case(
        "a torn image in a preview",
        "data preview recipe.yaml",
        EYES,
        "a.png: it is torn | seen.jsonl: row 1",
        seen([row(images=["a.png"])], a_png=encoded(NOISE, "PNG")[:-500]),
    ),
    with_keys(
        "images for a model of text",
        "data.train_data_paths=seen.jsonl",
        says="images | takes text only | seen.jsonl: row 1",
        prepare=lambda work: (work / "seen.jsonl").write_text(json.dumps(GOOD) + "\n"),
    ),
    Case(
        "an image shown to a model of text",
        "generate runs/done --prompt ? --image a.png",
        says="takes text and no images | runs/done | vision_language",
        prepare=lambda work: (work / "a.png").write_bytes(encoded(GREY, "PNG")),
    ),
]  # fmt: skip
