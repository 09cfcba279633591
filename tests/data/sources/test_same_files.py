"""A file that is read twice, for training and evaluation or for training alone, is named."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shardtune.config import DataConfig, load_recipe
from shardtune.data.cache_directory import file_digest
from shardtune.data.chat import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.prepare import prepare_data
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.same_files import notes_on_same_files
from shardtune.data.sources.source import ROBOT_KINDS, Source, SourceFile
from tests.support.tiny_run import make_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"a": "a", "copy": "a", "b": "b", "c": "cc"}.items():
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    (tmp_path / "link.jsonl").symlink_to("b.jsonl")
    return tmp_path


def notes(folder: Path, train: list[object], evals: list[object]) -> list[str]:
    def sources(names: list[object]) -> list[Source]:
        paths = [f"{folder}/{name}.jsonl" if isinstance(name, str) else name for name in names]
        return resolve_sources(paths, DataConfig(), report=lambda _: None) if paths else []

    found = notes_on_same_files(sources(train), sources(evals), partial(file_digest, root=folder / "cache"))
    return [note.replace(f"{folder}/", "") for note in found]


def test_evaluation_rows_that_are_training_rows(folder: Path) -> None:
    end = "are training rows too: the score says nothing about new rows"
    assert notes(folder, ["a", "b"], ["c"]) == []
    assert notes(folder, ["a", "b"], ["c", "b"]) == [f"eval rows of b.jsonl {end}"]
    assert notes(folder, ["a", "b", "c"], ["link", "copy", "c", "a"]) == [
        f"eval rows of link.jsonl, copy.jsonl, c.jsonl and 1 more {end}"
    ]


def test_a_training_file_that_occurs_twice(folder: Path) -> None:
    for twice in ("a", "copy"):
        (note,) = notes(folder, ["a", "b", twice], ["c"])
        assert note.startswith(f"rows of {twice}.jsonl are among the training rows twice")
    other: object = {"path": f"{folder}/a.jsonl", "columns": {"text": "text"}}
    assert notes(folder, ["a", other], []) == []


def test_parts_of_a_recording_are_not_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_text("a")

    def part(name: str) -> Source:
        return Source("a", (SourceFile(tmp_path / "a.hdf5", ROBOT_KINDS[-1], "a", part=name),))

    assert list(notes_on_same_files([part("train")], [part("valid")], lambda _: "")) == []
    assert len(list(notes_on_same_files([part("train")], [part("train")], lambda _: ""))) == 1


def test_a_recipe_whose_evaluation_is_its_training(tmp_path: Path) -> None:
    tiny, said = make_tiny(tmp_path), list[str]()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer), max_length=64)
    train = str(tmp_path / "train.jsonl")
    for changes in ({"data__eval_data_paths": train}, {"data__eval_data_paths": None, "data__eval_split": 0.3}):
        said.clear()
        prepare_data(load_recipe(tiny.recipe(**changes)), lambda with_prompts: encoder, report=said.append)
        assert len([line for line in said if "training rows too" in line]) == ("data__eval_split" not in changes)
