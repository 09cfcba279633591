"""Images in every form that rows name them in, bad ones by their fault, and images that change behind their rows."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardtune.data.encoder import RowError
from shardtune.data.images import web
from shardtune.data.images.images import ENDS, ImageKind, encode_picture, from_fields, read_image, to_fields
from shardtune.data.sources.memory_rows import spool_rows
from shardtune.errors import DataError

HOSTS = ["127.0.0.1"]
PIXELS = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)
ORIENTATION = 0x0112


def test_no_format_is_read_that_starts_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    with pytest.raises(RowError, match="not an image that Pillow can read as JPEG, PNG"):
        read_image(eps, Path())


def encoded(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, form, **options)
    return sink.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """images/a b.png"""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a b.png").write_bytes(PNG)
    return tmp_path


class Server(BaseHTTPRequestHandler):
    """Gives /a.png; /flaky.png at the second time; nothing else."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        first = self.asked.count(self.path) == 1
        code = 200 if self.path == "/a.png" else 503 if self.path != "/flaky.png" or first else 200
        self.send_response(404 if self.path == "/gone.png" else code)
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, format: str, *args: Any) -> None:
        """Silently."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this machine, whose address counts as one of the Internet."""
    Server.asked = []
    monkeypatch.setattr(web, "is_public", lambda address: True)
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()
    thread.join()


def pixels(value: Any, folder: Path) -> np.ndarray:
    return np.asarray(read_image(value, folder, HOSTS).read())


TEXT = base64.b64encode(PNG).decode()
FORMS: dict[str, Callable[[Path], Any]] = {
    "a relative path": lambda place: "images/a b.png",
    "an absolute path": lambda place: str(place / "images" / "a b.png"),
    "a Path": lambda place: Path("images/a b.png"),
    "a file URL": lambda place: (place / "images" / "a b.png").as_uri(),
    "a path in a dictionary": lambda place: {"bytes": None, "path": "images/a b.png"},
    "bytes": lambda place: PNG,
    "a bytearray": lambda place: bytearray(PNG),
    "bytes as an array": lambda place: np.frombuffer(PNG, np.uint8),
    "bytes in a dictionary": lambda place: {"bytes": PNG, "path": "elsewhere.png"},
    "base64": lambda place: TEXT,
    "base64 in lines": lambda place: re.sub("(.{76})", r"\1\n", TEXT),
    "base64 of a JPEG": lambda place: base64.b64encode(encoded(Image.fromarray(PIXELS), "JPEG")).decode(),
    "base64 in a dictionary": lambda place: {"base64": TEXT},
    "a data URL": lambda place: f"data:image/png;base64,{TEXT}",
    "a data URL in a dictionary": lambda place: {"url": f"data:image/png;base64,{TEXT}"},
    "an image of Pillow's": lambda place: Image.fromarray(PIXELS),
    "an array": lambda place: PIXELS,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, place: Path) -> None:
    found = pixels(FORMS[form](place), place)
    if "JPEG" in form:
        assert found.shape == PIXELS.shape
    else:
        assert np.array_equal(found, PIXELS)


def test_urls(server: str, place: Path) -> None:
    assert np.array_equal(pixels(f"{server}/a.png", place), PIXELS)
    assert np.array_equal(pixels({"url": f"{server}/flaky.png"}, place), PIXELS)
    assert Server.asked.count("/flaky.png") == 2
    with pytest.raises(RowError, match=r"gone.png cannot be fetched: HTTP 404"):
        read_image(f"{server}/gone.png", place, HOSTS)
    assert Server.asked.count("/gone.png") == 1
    with pytest.raises(RowError, match=r"broken.png cannot be fetched: HTTP 503"):
        read_image(f"{server}/broken.png", place, HOSTS)
    assert Server.asked.count("/broken.png") == 3
    with pytest.raises(RowError, match="cannot be fetched"):
        read_image("http://127.0.0.1:9/a.png", place, HOSTS)


def test_a_file_is_kept_by_its_place_and_all_else_by_its_bytes(server: str, place: Path) -> None:
    stored = read_image("images/a b.png", place)
    assert (stored.kind, stored.content) == (ImageKind.FILE, str(place / "images" / "a b.png").encode())
    assert read_image(f"{server}/a.png", place, HOSTS).content == PNG
    assert read_image(TEXT, place).kind == ImageKind.ENCODED


def test_fields_keep_images(place: Path) -> None:
    images = [read_image(value, place) for value in ("images/a b.png", PNG, encode_picture(PIXELS[:5]))]
    assert from_fields(to_fields(images, 1)) == images
    assert from_fields(to_fields([], 0)) == []
    assert to_fields([], 0)[ENDS].shape == (0,)


# -- what is seen of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_rotation(form: str, orientation: int, place: Path) -> None:
    """As EXIF data asks; the size that is known beforehand is that of the image as it is shown."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    grey = np.full((16, 32, 3), 40, np.uint8)
    grey[:, 16:] = 200
    more = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]} if form == "MPO" else {}
    stored = read_image(encoded(Image.fromarray(grey), form, exif=exif, **more), place)
    seen = np.asarray(stored.read())
    assert stored.size == ((16, 32) if orientation == 6 else (32, 16))
    lit = {1: seen[:, -4:], 3: seen[:, :4], 6: seen[-4:]}[orientation]
    assert lit.min() > 150


@pytest.mark.parametrize(
    ("picture", "colour"),
    [
        (Image.new("RGBA", (4, 4), (9, 8, 7, 0)), (9, 8, 7)),
        (Image.new("L", (4, 4), 9), (9, 9, 9)),
        (Image.new("LA", (4, 4), (9, 3)), (9, 9, 9)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("RGB", (4, 4), (9, 8, 7)).quantize(4), (9, 8, 7)),
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_colours(picture: Image.Image, colour: tuple[int, ...], place: Path) -> None:
    """What is transparent keeps the colour below; from a file and from memory alike."""
    for value in (encoded(picture), picture):
        assert read_image(value, place).read().getpixel((1, 1)) == colour


def test_a_transparent_palette_is_read_without_a_warning(place: Path) -> None:
    content = encoded(Image.new("RGB", (4, 4), (9, 8, 7)).quantize(4), transparency=bytes([0, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(content, place).read().getpixel((1, 1)) == (9, 8, 7)


# -- bad ones ------------------------------------------------------------------------------------------------------


def deep(form: str) -> bytes:
    """A coloured image of 4 x 4 pixels with 16 bits for a colour, which Pillow opens as one of 8."""
    if form == "PPM":
        return b"P6 4 4 65535\n" + bytes(range(96))
    return png(4, 4, depth=16, colours=2, line=24)


def png(width: int, height: int, *, depth: int, colours: int, line: int) -> bytes:
    """A whole PNG; `colours` as its head has it, `line` is the bytes of a line of pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = zlib.compress(bytes(height * (1 + line)), 1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def large_png(width: int, height: int) -> bytes:
    """A whole PNG of one bit per pixel."""
    return png(width, height, depth=1, colours=0, line=width // 8)


LARGE = Image.effect_noise((200, 200), 50).convert("RGB")
GIF = encoded(Image.new("L", (4, 4)), "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 200)])
WEBP = encoded(LARGE, "WEBP", save_all=True, append_images=[LARGE.rotate(90)])
BAD = {
    "torn.jpg": (encoded(LARGE, "JPEG")[:-2000], "torn: image file is truncated"),
    "torn.png": (encoded(LARGE)[:-2000], "torn: "),
    "torn.webp": (encoded(LARGE, "WEBP")[:-500], "torn|no image"),
    "cut.png": (encoded(LARGE)[:20], "torn|no image"),
    "empty.png": (b"", "it is empty"),
    "words.png": (b"hello, this is text", "not an image that Pillow can read"),
    "cmyk.jpg": (encoded(Image.new("CMYK", (4, 4)), "JPEG"), "it is in CMYK"),
    "deep.png": (encoded(Image.fromarray(np.full((4, 4), 4000, np.uint16))), "it is 16-bit"),
    "deep_colours.png": (deep("PNG"), "it is 16-bit"),
    "deep_colours.ppm": (deep("PPM"), "it is 16-bit"),
    "float.tiff": (encoded(Image.new("F", (4, 4)), "TIFF"), "of floating numbers"),
    "moving.gif": (GIF, r"it is animated \(2 frames\)"),
    "moving.webp": (WEBP, r"it is animated \(2 frames\)"),
    "huge.png": (large_png(10_000, 10_000), "it has 100 million pixels, more than 64"),
    "bomb.png": (large_png(80_000, 4), None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images(name: str, place: Path) -> None:
    content, says = BAD[name]
    (place / name).write_bytes(content)
    if says is None:
        assert read_image(name, place).size == (80_000, 4)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RowError, match=f"^image {re.escape(str(place / name))}: .*({says})"):
            read_image(name, place)
        with pytest.raises(RowError, match=f"^image of [0-9,]+ bytes: .*({says})"):
            read_image(content, place)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("images", "the image images does not exist"),
        ("x" * 300, "the image x{60}… is no path"),
        ("heic/" * 1000, r"the image (heic/){12}… is no path"),
        (" ", "an image is an empty text"),
        ("iVBORw0KGgo???", "no valid base64"),
        ("data:image/png;base64,a", "no valid base64"),
        (3.5, "an image is float"),
        (np.zeros((4, 4, 3), np.float32), r"array of float32 \[4, 4, 3\]"),
        (np.zeros((3, 4, 5), np.uint8), r"array of uint8 \[3, 4, 5\]"),
        (np.zeros((0, 4, 3), np.uint8), "4 x 0"),
        (Image.new("CMYK", (4, 4)), "in CMYK"),
        (Image.new("I", (4, 4)), "16-bit"),
        ({}, "none of bytes"),
    ],
    ids=[
        "missing",
        "long",
        "longer",
        "blank",
        "cut base64",
        "cut data URL",
        "number",
        "floats",
        "channels",
        "empty",
        "CMYK",
        "16-bit",
        "dict",
    ],
)
def test_what_is_no_image(value: Any, says: str, place: Path) -> None:
    with pytest.raises(RowError, match=says):
        read_image(value, place)


# -- images that change --------------------------------------------------------------------------------------------


def test_images_that_are_no_longer_what_they_were(place: Path) -> None:
    file = place / "images" / "a b.png"
    stored = read_image("images/a b.png", place)
    (again,) = from_fields(to_fields([stored], 1))
    file.write_bytes(PNG)
    assert np.array_equal(np.asarray(again.read()), PIXELS)
    changes: list[tuple[bytes | None, str]] = [
        (encoded(Image.fromarray(255 - PIXELS)), "its file has changed"),  # of the same size
        (PNG[:-30], "its file has changed"),
        (b"", "its file has changed"),
        (None, "No such file"),
    ]
    for content, says in changes:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(DataError, match="an image of 30 x 20 cannot be read as it was") as told:
            again.read()
        assert says in told.value.what
        assert told.value.where == str(file)
        assert "data.cache_dir" in str(told.value.remedy)


# -- rows in memory ------------------------------------------------------------------------------------------------


def test_rows_in_memory_keep_their_images(place: Path) -> None:
    row = {
        "images": [Image.fromarray(PIXELS), PIXELS, PNG, {"bytes": PNG, "path": None}, place / "images" / "a b.png"],
        "messages": [{"content": [{"type": "image", "image": Image.fromarray(PIXELS)}]}],
    }
    file = spool_rows([row], place / "cache")
    assert file == spool_rows([row], place / "cache")
    back = json.loads(file.read_text())
    for value in (*back["images"], back["messages"][0]["content"][0]["image"]):
        assert np.array_equal(pixels(value, place), PIXELS)


@pytest.mark.parametrize("value", [PIXELS.astype(np.float64), Image.new("CMYK", (4, 4)), {1, 2}])
def test_rows_in_memory_that_cannot_be_kept(value: Any, place: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)cannot be kept as JSON: .*the rows in memory: row 2"):
        spool_rows([{"text": "a"}, {"images": [value]}], place / "cache")
