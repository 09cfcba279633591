"""Hostile input, drawn from a seed: rows, recipes, overrides, images and descriptions of cache entries.

A case passes where it ends in time, with a result or with one `ShardtuneError` that a terminal can show.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from shardtune.config import load_recipe
from shardtune.config.keys import KEYS
from shardtune.config.schema import DataConfig
from shardtune.data.cache.cache import build_dataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import RowError
from shardtune.data.images.images import read_image
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import CONTROL, DataError, ShardtuneError
from tests.support.workspace import CHATML, RECIPE, make_tokenizer

SECONDS = 20.0
"""After which a case counts as a hang."""
TEXTS: list[Any] = [
    "",
    " ",
    "\ud800",
    "\x1b[2J",
    "\0",
    "{{",
    "<image>",
    "<|im_end|>",
    "a" * 5000,
    "é日🙂",
    "null",
    "[1]",
    "{",
]
NUMBERS: list[Any] = [0, -1, 0.5, 1e39, 1e400, -1e400, float("nan"), 2**31, 2**63 - 1, 2**64, 10**400, True]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "loss_weight": 1.0}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be kind."},
    {"instruction": "Add", "input": "2 and 3", "output": "5", "history": [["a", "b"]]},
    {"prompt": "2 + 3 =", "completion": " 5"},
    {"question": "2 + 3?", "answer": "5", "reasoning_content": "2, 3, 5"},
    {"text": "A long story."},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}, {"role": "assistant", "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}, {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"}], "tools": [{"name": "add", "parameters": {}}]},
]  # fmt: skip


TEMPLATE = CHATML.replace("message['content']", "message['content'] + (message.tool_calls or '') | string")
TEMPLATE = "{{ tools | tojson if tools else '' }}" + TEMPLATE
WORDS = [
    "~nosuchuser/x",
    "x" * 300,
    "${x}",
    "${oc.env:X}",
    "${oc.env:HOME}",
    "true",
    "null",
    1,
    2,
    0.5,
    "a.py:b",
    "[a]",
]
YAMLS = [b"\n[a, b]: 1\n", b"{" * 3000, b"\n<<: 5\n", b"\n? {a: b}\n: c\n", b"\nx: &a {b: *a}\n", b"\na: !!set {b}\n"]


def deep(draw: random.Random) -> Any:
    """Nested beyond what any parser's stack takes, or nearly."""
    value: Any = "x"
    for _ in range(draw.choice([40, 60, 400])):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def leaf(draw: random.Random) -> Any:
    return draw.choice([*TEXTS, *NUMBERS, None, [], {}, [[]], {"": None}, deep(draw)])


def changed(draw: random.Random, value: Any) -> Any:
    """The value with something in it replaced, left out, repeated or wrapped."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        what = draw.random()
        if what < 0.6:
            return {**value, key: changed(draw, value[key])}
        if what < 0.75:
            return {name: item for name, item in value.items() if name != key}
        return {**value, draw.choice([*TEXTS, *(key[:-1], f"{key}s")]): value[key]}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        new = draw.choice([[changed(draw, value[place])], [], [value[place]] * 3])
        return [*value[:place], *new, *value[place + 1 :]]
    return draw.choice([leaf(draw), [value], {"content": value}])


def spoiled(draw: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut, repeated, or put in."""
    some = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(some) + 1)
        what = draw.randrange(5)
        if what == 0 and place < len(some):
            some[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            del some[place : place + draw.choice([1, 4, 100])]
        elif what == 2:
            some[place:place] = draw.choice(
                [b"\xff", b"\0", b"[" * 3000, b"9" * 5000, b"\xed\xa0\x80", b'"', b"\n", b"{"]
            )
        elif what == 3:
            some[place:place] = some[max(0, place - 50) : place]
        else:
            some[place : place + 4] = draw.randbytes(4)
    return bytes(some)


# -- one case of each kind -------------------------------------------------------------------------------------------


def as_file(draw: random.Random, rows: list[Any], folder: Path) -> Path:
    """The rows in a file of some kind; of some kinds the text is spoiled too."""
    kind = draw.choice(["jsonl", "jsonl", "jsonl", "json", "csv", "parquet", "jsonl.gz", "jsonl.bz2", "json.xz"])
    file = folder / f"rows.{kind}"
    if kind == "parquet":
        try:
            table = pa.Table.from_pylist([row for row in rows if isinstance(row, dict)])
            pq.write_table(table, file)
        except Exception:  # not everything has a form in Arrow
            file = folder / "rows.jsonl"
    if kind == "csv":
        text = io.StringIO()
        cells = [[str(value) for value in row.values()] for row in rows if isinstance(row, dict)]
        csv.writer(text).writerows([["question", "answer"], *cells])
        file.write_bytes(text.getvalue().encode(errors="replace"))
    elif file.suffix != ".parquet":
        lines = [json.dumps(row, default=str).encode() for row in rows]
        content = b"\n".join(lines) if "jsonl" in kind or file.suffix == ".jsonl" else b"[" + b",".join(lines) + b"]"
        packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(file.suffix)
        file.write_bytes(packed(content) if packed else content)
    if draw.random() < 0.4:
        file.write_bytes(spoiled(draw, file.read_bytes()))
    return file


class Fuzzer:
    """Cases of all kinds, with what they share.

    Args:
        folder: for the files of cases.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.encoder = ChatEncoder(make_tokenizer(), TEMPLATE, max_length=256, with_prompts=True, thinking="keep")
        self.recipe = yaml.safe_load(RECIPE)
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8))
        self.pictures = [
            _encoded(picture, form) for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "EPS")
        ]
        self.kinds: dict[str, Callable[[random.Random], object]] = {
            "rows": self.rows,
            "recipes": self.recipes,
            "overrides": self.overrides,
            "images": self.images,
            "image references": self.references,
            "cache entries": self.entries,
        }

    def rows(self, draw: random.Random) -> object:
        rows: list[Any] = [draw.choice(ROWS) for _ in range(draw.randrange(1, 8))]
        for _ in range(draw.choice([1, 1, 2])):
            place = draw.randrange(len(rows))
            rows[place] = changed(draw, rows[place])
            if draw.random() < 0.3:
                rows[place] = changed(draw, rows[place])
        return self._built(as_file(draw, rows, self.folder), draw.choice(["fail", "skip"]))

    def _built(self, file: Path, on_bad_row: str) -> object:
        data = DataConfig.model_validate({"on_bad_row": on_bad_row, "cache_dir": str(self.folder / "cache")})
        sources = resolve_sources(str(file), data, report=lambda text: None)
        dataset = build_dataset(
            sources, self.encoder, cache_dir=data.cache_dir, on_bad_row=data.on_bad_row, report=lambda text: None
        )
        return [dataset.row(index) for index in range(len(dataset))]

    def recipes(self, draw: random.Random) -> object:
        tree = self.recipe
        for _ in range(draw.choice([1, 2, 4])):
            tree = changed(draw, tree)
        try:
            text = yaml.safe_dump(tree, allow_unicode=True, default_flow_style=draw.random() < 0.2)
        except RecursionError:  # of the writer
            text = "runner: " + "{a: " * 400 + "}" * 400
        text = text.encode(errors="replace")
        if draw.random() < 0.5:
            text = spoiled(draw, text)
        if draw.random() < 0.1:
            text += draw.choice(YAMLS)
        file = self.folder / "recipe.yaml"
        file.write_bytes(text)
        return load_recipe(file, files_must_exist=draw.random() < 0.5).to_yaml()

    def overrides(self, draw: random.Random) -> object:
        words = []
        for _ in range(draw.choice([1, 1, 2])):
            key = draw.choice(list(KEYS))
            value = draw.choice([leaf(draw), deep(draw), draw.choice(WORDS), draw.choice(WORDS)])
            text = draw.choice([str, json.dumps])(value)
            words.append(f"{draw.choice(['', '', '+', '++'])}{key}={text}")
            if draw.random() < 0.2:
                words[-1] = spoiled(draw, words[-1].encode(errors="replace")).decode(errors="replace")
        return load_recipe(self.recipe, words, files_must_exist=draw.random() < 0.5).to_yaml()

    def images(self, draw: random.Random) -> object:
        content = draw.choice(self.pictures)
        content = spoiled(draw, content) if draw.random() < 0.9 else draw.randbytes(200)
        return self._read(content)

    def references(self, draw: random.Random) -> object:
        known = {"bytes": b"x", "path": "a.png", "url": "http://127.0.0.1/a.png", "base64": "iVBORw0KGgo", "image": "x"}
        known |= {"video": "a.mp4", "seconds": 1.5}
        value = draw.choice([known, "data:image/png;base64,AAAA", "file:///a\0b", "http://[::1", "~nosuchuser/a.png"])
        return self._read(changed(draw, value))

    def _read(self, value: object) -> object:
        try:
            return read_image(value, self.folder, ["*"]).read()
        except RowError as error:
            raise DataError(error.reason) from error

    def entries(self, draw: random.Random) -> object:
        file = self.folder / "kept.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self._built(file, "fail")
        entries = sorted((self.folder / "cache" / "entries").glob("*/*/entry.json"))
        entry = draw.choice(entries)
        entry.write_bytes(draw.choice([spoiled(draw, entry.read_bytes()), b"", draw.randbytes(50), b"[" * 3000, b"{}"]))
        try:
            return self._built(file, "fail")
        finally:
            for entry in entries:
                entry.unlink(missing_ok=True)


def _encoded(picture: Image.Image, form: str) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, form)
    return sink.getvalue()


# -- many cases ------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the cases of one kind: how many had a result, how many one error; and the faults."""

    results: int = 0
    errors: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)


class Hang(BaseException):
    """A case did not end in time."""


@contextmanager
def in_time() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(fuzzer: Fuzzer, kind: str, number: int, tally: Tally) -> None:
    """Run one case, which its kind and number determine."""
    began = time.monotonic()
    try:
        with in_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzzer.kinds[kind](random.Random(f"{kind} {number}"))
        tally.results += 1
    except ShardtuneError as error:
        tally.errors += 1
        tally.messages[error.what[:40]] += 1
        if CONTROL.search(str(error)) or not error.what:
            tally.faults.append(f"{kind} {number}: {str(error)[:300]!r}")
    except (Exception, Hang) as error:
        trace = "".join(traceback.format_exception(error, limit=-4))
        tally.faults.append(f"{kind} {number}: {type(error).__name__}\n{trace[-1500:]}")
    seconds = time.monotonic() - began
    tally.seconds += seconds
    tally.slowest = max(tally.slowest, seconds)


def run_cases(folder: Path, cases: int, first: int = 0) -> dict[str, Tally]:
    """So many cases, of each kind in turn."""
    fuzzer = Fuzzer(folder)
    found = {kind: Tally() for kind in fuzzer.kinds}
    for number in range(first, first + cases):
        kind = list(found)[number % len(found)]
        run_case(fuzzer, kind, number // len(found), found[kind])
    return found
