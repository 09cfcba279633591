"""What is said of the training rows before they are trained."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from shardtune import Sample
from shardtune.config import load_recipe
from shardtune.data.cache import build
from shardtune.data.chat import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.prepare import prepare_data
from shardtune.models.find_adapter import find_adapter
from tests.support.healthy_adapters import Regressor
from tests.support.tiny_run import make_tiny, write_rows


@pytest.mark.parametrize("cache", ["whole", "by_file"])
def test_rows_that_no_epoch_has_without_shuffling(tmp_path: Path, cache: str) -> None:
    tiny, said = make_tiny(tmp_path), list[str]()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer), max_length=64)
    weights = {"half": 0.5, "more": 1.5, "twice": 2.0}
    paths = [{"path": str(tmp_path / "train.jsonl"), "name": name, "weight": one} for name, one in weights.items()]
    for shuffle in (True, False):
        said.clear()
        changes = {"data__train_data_paths": paths, "data__shuffle": shuffle, "data__cache": cache}
        recipe = load_recipe(tiny.recipe(**changes, data__eval_data_paths=None, runner__max_steps=2))
        prepare_data(recipe, lambda with_prompts: encoder, report=said.append)
        lines = [line for line in said if "the same rows in every epoch" in line]
        assert len(lines) == (0 if shuffle else 2)
    assert "half: with data.shuffle: false the weight 0.5" in lines[0]
    assert lines[0].endswith("and the others never")
    assert "more: with data.shuffle: false the weight 1.5" in lines[1]
    assert lines[1].endswith("come once more")


def test_keys_about_conversations_without_any(tmp_path: Path) -> None:
    tiny, said = make_tiny(tmp_path), list[str]()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer), max_length=64)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    texts = {"prompt": "a ", "completion": "b"}
    pairs = {"prompt": turns[:1], "completion": turns[1:]}
    given = {"data__chat_template": "chatml", "data__train_on": "last_assistant"}

    def lines(*rows: dict, **changes: Any) -> list[str]:
        said.clear()
        paths = [str(write_rows(tmp_path / f"{number}.jsonl", [row])) for number, row in enumerate(rows)]
        recipe = load_recipe(tiny.recipe(data__train_data_paths=paths, data__eval_data_paths=None, **changes))
        prepare_data(recipe, lambda with_prompts: encoder, report=said.append)
        return [line for line in said if "not used for these rows" in line]

    (line,) = lines(texts, {"text": "c"}, **given)
    assert "data.chat_template, data.train_on: last_assistant;" in line
    assert "no turns (prompt/completion, plain text)" in line
    assert lines(texts) == []
    assert lines(texts, pairs, **given) == []
    assert lines({"messages": turns}, **given) == []
    assert lines({"question": "a", "answer": "b"}, **given) == []


def test_rows_with_equal_tokens_on_both_sides_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, said = make_tiny(tmp_path), list[str]()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer), max_length=64)
    rows = [{"question": f"a{number % 20}", "answer": "b"} for number in range(40)]

    def lines(rows: list[dict], *, compared: bool = True) -> list[str]:
        said.clear()
        path = str(write_rows(tmp_path / "rows.jsonl", rows))
        changes = {"data__train_data_paths": path, "data__eval_data_paths": None, "data__eval_split": 0.3}
        prepared = prepare_data(load_recipe(tiny.recipe(**changes)), lambda with_prompts: encoder, report=said.append)
        parts = [*prepared.read().values(), *prepared.evals.values()]
        train, held_out = ([tuple(one.input_ids) for one in map(part.row, range(len(part)))] for part in parts)
        assert len(train) + len(held_out) == len(rows)
        both = sum(tokens in train for tokens in held_out)
        found = [line for line in said if "the tokens of a training row" in line]
        assert len(found) == (both > 0 and compared)
        assert all(f"data.eval_split: {both} of {len(held_out)} held out rows have" in line for line in found)
        for line in found:
            first, second = re.findall(r"rows\.jsonl:(\d+)", line)
            assert rows[int(first) - 1]["question"] == rows[int(second) - 1]["question"]
        return found

    assert lines(rows) == []
    assert lines([{**row, "id": number} for number, row in enumerate(rows)])
    assert lines([{**row, "id": number} for number, row in enumerate(rows[:20])]) == []
    monkeypatch.setattr("shardtune.data.prepare.BLOCK_TOKENS", 50)
    assert lines([{**row, "id": number} for number, row in enumerate(rows)])
    monkeypatch.setattr("shardtune.data.prepare.COMPARED_TOKENS", 50)  # of more the audit alone finds them
    assert lines([{**row, "id": number} for number, row in enumerate(rows)], compared=False) == []


class Noisy(Regressor):
    """Draws."""

    def encode(self, row: Any) -> Sample:
        sample = super().encode(row)
        return Sample(fields={**sample.fields, "x": sample.fields["x"] + torch.randn(4).numpy()})


class Global(Regressor):
    """Draws from all global generators."""

    def encode(self, row: Any) -> Sample:
        sample = super().encode(row)
        noise = torch.randn(4).numpy() + np.random.rand() + random.random()
        return Sample(fields={**sample.fields, "x": sample.fields["x"] + noise})


class Takes(Regressor):
    """Takes from its row what it reads."""

    def encode(self, row: Any) -> Sample:
        return super().encode({name: row.pop(name) for name in ("x", "y", "seen")})


class Lazy(Regressor):
    """Reads a row that a transform has put an object into."""

    def encode(self, row: Any) -> Sample:
        return super().encode({**row, "x": list(row["x"])})


def lazily(row: Any) -> Any:
    return {**row, "x": (number for number in row["x"])}


def test_a_row_that_cannot_be_copied_is_encoded(tmp_path: Path) -> None:
    """Whether an encode draws is not known of it."""
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"x": [1.0] * 4, "y": [0.0] * 2, "seen": [1.0] * 2}] * 3))
    data = {"train_data_paths": rows, "cache_dir": str(tmp_path / "cache"), "transform": f"{__file__}:lazily"}
    values = {"runner": {"max_steps": 1}, "actor": {"model": {"adapter": f"{__file__}:Lazy"}}, "data": data}
    recipe = load_recipe({**values, "data": {**data, "num_workers": 0}})
    adapter = find_adapter(recipe)
    found = prepare_data(recipe, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), report=print)
    assert len(found.train) == 3


class Inside(Regressor):
    """Changes what is inside of its row."""

    def encode(self, row: Any) -> Sample:
        row["x"].append(0.0)
        return super().encode({name: row[name] for name in ("x", "y", "seen")})


class Exact(Regressor):
    """Takes nothing but a dict."""

    def encode(self, row: Any) -> Sample:
        assert type(row) is dict
        return super().encode({name: row[name] for name in ("x", "y", "seen")})


@pytest.mark.parametrize(
    ("kind", "unread"),
    [
        ("Inside", " (not read: weight, id)"),
        ("Takes", " (not read: weight, id)"),
        ("Regressor", " (not read: weight, id)"),
        ("Exact", ""),
    ],
)
def test_keys_that_an_adapter_does_not_read_are_named(tmp_path: Path, kind: str, unread: str) -> None:
    row = {
        "x": [1.0] * (4 - (kind == "Inside")),
        "y": [0.0] * 2,
        "seen": [1.0] * 2,
        "weight": 2.0,
        "id": 0,
        "note": None,
    }
    rows = str(write_rows(tmp_path / "rows.jsonl", [row] * 3))
    data = {"train_data_paths": rows, "cache_dir": str(tmp_path / "cache"), "num_workers": 0}
    model = {"adapter": f"{__file__}:{kind}"}
    recipe, said = load_recipe({"runner": {"max_steps": 1}, "actor": {"model": model}, "data": data}), list[str]()
    adapter = find_adapter(recipe)
    for _ in range(2):  # from the file, and from the cache
        prepare_data(recipe, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), report=said.append)
    lines = [line for line in said if line.startswith("data: rows: rows of ")]
    assert lines == [f"data: rows: rows of {kind}: x [4], y [2], seen [2]{unread}, 1 file ({rows})"] * 2


TRANSFORM = """
import random
import numpy as np
import torch


def noisy(row):
    noise = torch.randn(4).numpy() + np.random.rand() + random.random()
    return {**row, "x": (np.asarray(row["x"]) + noise).tolist()}
"""


@pytest.mark.parametrize("by", ["encode", "transform"])
def test_what_is_drawn_for_a_row_is_drawn_again_without_the_cache(tmp_path: Path, by: str) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"x": [1.0] * 4, "y": [0.0] * 2, "seen": [1.0] * 2}] * 3))
    (tmp_path / "noisy.py").write_text(TRANSFORM)
    data: dict[str, object] = {"train_data_paths": rows, "num_workers": 0}
    if by == "transform":
        data["transform"] = f"{tmp_path / 'noisy.py'}:noisy"
    model = {"adapter": f"{__file__}:{'Global' if by == 'encode' else 'Regressor'}"}
    found = []
    for number in range(2):
        data["cache_dir"] = str(tmp_path / f"cache{number}")
        recipe = load_recipe({"runner": {"max_steps": 1}, "actor": {"model": model}, "data": data})
        adapter = find_adapter(recipe)
        np.random.seed(number)
        made = prepare_data(
            recipe, lambda with_prompts, of=adapter: of.encoder(with_prompts=with_prompts), report=lambda _: None
        )
        assert made.train is not None
        found.append([made.train.row(row).fields["x"].tolist() for row in range(3)])
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3


@pytest.mark.parametrize("transform", [True, False])
def test_a_row_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: bool) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"x": [1.0] * 4, "y": [0.0] * 2, "seen": [1.0] * 2}] * 3))
    (tmp_path / "noisy.py").write_text(TRANSFORM)
    data: dict[str, object] = {"train_data_paths": rows, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    if transform:
        data["transform"] = f"{tmp_path / 'noisy.py'}:noisy"
    recipe = load_recipe({"actor": {"model": {"adapter": f"{__file__}:Regressor"}}, "data": data})
    adapter = find_adapter(recipe)
    digested: list[object] = []
    digest = build._row_digest
    monkeypatch.setattr(build, "_row_digest", lambda row: digested.append(row) or digest(row))
    made = prepare_data(recipe, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), report=lambda _: None)
    assert made.train is not None
    assert len(digested) == len(made.train) == 3


@pytest.mark.parametrize(("kind", "noted"), [("Noisy", 1), ("Takes", 0), ("Regressor", 0)])
@pytest.mark.parametrize("cache", ["whole", "by_file"])
def test_an_encode_that_draws(tmp_path: Path, kind: str, noted: int, cache: str) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"x": [1.0] * 4, "y": [0.0] * 2, "seen": [1.0] * 2}] * 3))
    values = {
        "runner": {"max_steps": 1},
        "actor": {"model": {"adapter": f"{__file__}:{kind}"}},
        "data": {"train_data_paths": rows, "cache_dir": str(tmp_path / "cache"), "num_workers": 0, "cache": cache},
    }
    recipe, said = load_recipe(values), list[str]()
    adapter = find_adapter(recipe)
    prepare_data(recipe, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), report=said.append)
    lines = [line for line in said if "gives another x each time" in line]
    assert len(lines) == noted
    without = "is refused" if cache == "whole" else "has other rows"
    assert not noted or "every epoch has the same draw." in lines[0]
    assert not noted or f"with those of others a run that continues without this cache {without}." in lines[0]
