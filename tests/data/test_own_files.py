"""Runs and data caches below a directory are none of its rows, and no change of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardtune
from shardtune.config import DataConfig
from shardtune.data.cache_directory import cache_folder
from shardtune.data.own_files import CACHE_NOTE, CACHE_TAG, is_own
from shardtune.data.sources.fingerprint import contents, fingerprints, outline
from shardtune.data.sources.resolve import resolve_sources
from tests.support.tiny_run import make_tiny, recorded_rows, rows, write_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows, and beside them a run with answers and a data cache."""
    home = tmp_path / "home"
    for name in ("rows.jsonl", "runs/one/samples/step_4.jsonl", "cache/entries/a/rows.jsonl", "parts/more.jsonl"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(home / name, rows(1))
    (home / "runs/one/manifest.json").write_text(json.dumps({"versions": {"shardtune": "0.1.0"}}))
    cache_folder(home / "cache", "locks")
    return home


def files(spec: str, said: list[str]) -> list[str]:
    (source,) = resolve_sources(spec, DataConfig(), report=said.append)
    return [file.path.name for file in source.files]


def test_a_folder_is_known_by_its_mark(folder: Path) -> None:
    (folder / "parts/manifest.json").write_text(json.dumps({"versions": {"images": "2"}}))
    assert is_own(folder / "cache")
    assert is_own(folder / "runs/one")
    assert not is_own(folder / "parts")
    assert not is_own(folder / "no such folder")
    assert (folder / "cache" / CACHE_TAG).read_text() == CACHE_NOTE


def test_rows_of_a_directory_and_of_a_pattern_are_the_others(folder: Path) -> None:
    for spec in (str(folder), f"{folder}/**/*.jsonl"):
        said = list[str]()
        assert files(spec, said) == ["more.jsonl", "rows.jsonl"]
        assert said[0] == (
            f"data: left out of {folder}, as runs and data caches: {folder / 'cache'}, {folder / 'runs/one'}"
        )


def test_files_of_other_kinds_in_a_directory_are_named(folder: Path) -> None:
    for name in (
        "old.jsonl.bak",
        "parts/table.xlsx",
        "parts/README.md",
        "parts/one.JPG",
        "LICENSE",
        ".hidden",
        "_SUCCESS",
    ):
        (folder / name).touch()
    said = list[str]()
    assert files(str(folder), said) == ["more.jsonl", "rows.jsonl"]
    others = f"{folder / 'old.jsonl.bak'}, {folder / 'parts/table.xlsx'}"
    assert f"data: left out of {folder}, as files of another kind: {others}" in said


def test_what_is_meant_is_read(folder: Path) -> None:
    for spec in (f"{folder}/runs/*/samples/*.jsonl", f"{folder}/runs/one/samples", f"{folder}/runs/one/**/*.jsonl"):
        said = list[str]()
        assert files(spec, said) == ["step_4.jsonl"]
        assert not [line for line in said if "left out" in line]


def test_they_are_no_part_of_a_fingerprint(folder: Path, tmp_path: Path) -> None:
    def of_folder() -> list[object]:
        return [contents(folder), fingerprints([str(folder)], tmp_path / "elsewhere"), outline(folder)]

    before = of_folder()
    write_rows(folder / "runs/one/samples/step_8.jsonl", rows(2))
    (folder / "cache/further").touch()
    assert of_folder() == before
    (folder / "parts/further.jsonl").touch()
    assert of_folder() != before


@pytest.mark.parametrize("home", ["model", "rows"])
def test_a_run_in_the_folder_of_its_model_or_its_rows_is_finished(
    home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = make_tiny(tmp_path, save_interval=-1)
    (tmp_path / "rows").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "rows/train.jsonl")
    recipe = tiny.recipe(
        data__train_data_paths=str(tmp_path / "rows"),
        data__cache_dir=str(tmp_path / home / "cache"),
        runner__logger__log_path=str(tmp_path / home / "runs"),
        runner__max_steps=2,
    )
    for expected in (12, 0):
        with recorded_rows() as seen:
            shardtune.train(recipe)
        assert sum(map(len, seen)) == expected
    assert "is finished; its result is" in capsys.readouterr().err
