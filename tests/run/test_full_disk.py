"""A disk that is full at any write of a run: one message, nothing that was good is lost, and it goes on with room.

`bench/full_disk.py` does it with the real command, at each write below the run's folder, C and Rust included.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import shardtune
from shardtune.checkpoint.checksums import directory_faults
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ShardtuneError
from shardtune.run import directory, final
from shardtune.run.directory import check_unlocked
from tests.support.chosen import slow_except
from tests.support.full_disk import Disk, filling
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny

STEPS = 2
PARTS = 16
"""The writes are tried in so many parts, each of which takes every sixteenth."""
KEYS = {
    "runner__max_steps": STEPS,
    "runner__keep_last": 1,
    "runner__eval_interval": 1,
    "runner__best__monitor": "eval/loss",
    "runner__logger__logger_backends": ["jsonl", "timings"],
    "eval__generate": True,
    "eval__num_samples": 2,
    "eval__max_new_tokens": 3,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Its whole run, and an empty disk."""
    tiny = make_tiny(tmp_path_factory.mktemp("inputs"), dropout=0.2, train_rows=13)
    trained(tiny, tiny.folder / "whole", Disk(tiny.folder))
    return tiny


def trained(tiny: Tiny, place: Path, disk: Disk) -> str:
    """Train on a disk, with the cache on it as well; returns what was printed."""
    keys = {"runner__logger__log_path": str(place), "data__cache_dir": str(place / "cache")}
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told), filling(disk):
        shardtune.train(tiny.recipe(**KEYS, **keys, data__eval_data_paths=str(tiny.folder / "eval.jsonl")))
    return told.getvalue()


def said(tiny: Tiny, place: Path, disk: Disk) -> str:
    """The message of the run that ends, or else all that was printed: it went on without a file."""
    try:
        return trained(tiny, place, disk)
    except ShardtuneError as error:
        return str(error) if error.where and error.remedy else f"no place or no remedy: {error.what}"


def check_kept(run: Path) -> None:
    """Checkpoints are complete or absent, so is `final/`, and the lines of metrics up to the last one are there."""
    store = CheckpointStore(run / "checkpoints")
    assert store.faults() == {}
    latest = store.latest()
    if latest is not None:
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True)]
        assert steps[: int(latest.name.rpartition("_")[2]) - 1] == list(range(1, int(latest.name.rpartition("_")[2])))
    if (run / "final").exists():
        assert directory_faults(run / "final", content=True) == {}


@pytest.mark.lengthy
@pytest.mark.parametrize("part", slow_except(range(PARTS), 3))
def test_a_disk_that_is_full_at_a_write(tiny: Tiny, tmp_path: Path, part: int) -> None:
    whole, counted = tiny.folder / "whole/run", Disk(tmp_path)
    trained(tiny, tmp_path, counted)
    assert counted.writes > 60
    for number in range(1 + part, counted.writes + 1, PARTS):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        disk = Disk(tmp_path, full_at=number, late=bool(number // PARTS % 2))
        told = said(tiny, tmp_path, disk)
        assert any(reason in told for reason in ("No space left", "File too large")), f"write {number}: {told}"
        check_kept(tmp_path / "run")
        trained(tiny, tmp_path, Disk(tmp_path))
        for folder in (f"checkpoints/global_step_{STEPS}", "final"):
            assert_same_tensors(whole / folder, tmp_path / "run" / folder)
        assert lines(tmp_path / "run") == lines(whole), f"write {number}"


def test_a_run_that_cannot_be_begun_leaves_its_directory_free(tiny: Tiny, tmp_path: Path) -> None:
    """In one process, as in a notebook."""
    recipe = tiny.recipe("begun", runner__logger__log_path=str(tmp_path))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "write_json", refused)
        with pytest.raises(ShardtuneError, match="cannot be written: No space"):
            shardtune.train(recipe)
    check_unlocked(tmp_path / "begun")


def test_metrics_of_final_that_cannot_be_completed_are_no_damage(tiny: Tiny, tmp_path: Path) -> None:
    keys = {**KEYS, "runner__logger__log_path": str(tmp_path), "eval__generate": False}
    recipe = tiny.recipe("run", **keys, data__eval_data_paths=str(tiny.folder / "eval.jsonl"))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checksums.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final, "add_checksums", refused)
        with pytest.raises(ShardtuneError, match="cannot be written: No space"):
            shardtune.train(recipe)
    assert directory_faults(tmp_path / "run/final", content=True) == {}
    shardtune.train(recipe)
    assert list((tmp_path / "run").glob("final.kept-*")) == []
    assert "metrics.json" in (tmp_path / "run/final/checksums.json").read_text()


@pytest.mark.lengthy
def test_output_into_a_file_on_a_full_disk_ends_no_training(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    keys = {"runner__max_steps": 1, "runner__logger__log_path": str(tmp_path)}
    recipe.write_text(yaml.safe_dump(tiny.recipe("run", **keys)))
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "shardtune", "train", str(recipe)]
        assert subprocess.run(words, stdout=full, stderr=full).returncode == 0
    assert directory_faults(tmp_path / "run/final", content=True) == {}
