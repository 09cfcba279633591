"""`shardtune init` writes a model that trains, resumes and passes its own test at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.full_disk import Disk, filling
from tests.support.workspace import run_cli

WRITTEN = ["recipe.yaml", "rows.jsonl", "talk_model.py", "test_talk_model.py"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_it_writes_a_model_whose_test_passes(empty: Path):
    outcome = run_cli("init", "talk_model")
    assert outcome.code == 0, outcome.err
    folder = empty / "talk_model"
    assert names(folder) == WRITTEN
    assert re.search(r"cd talk_model\n +pytest", outcome.out)
    assert "shardtune verify adapter" in outcome.out
    texts = "".join((folder / name).read_text() for name in WRITTEN)
    assert "class TalkModel(Adapter)" in texts
    assert "adapter: talk_model.py:TalkModel" in texts
    assert not re.search("my_model|MyModel", texts)
    # As its author would: plain pytest, in that directory, which knows nothing of this project.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b3 passed", ran.stdout)


def test_what_it_writes_is_in_good_style(empty: Path):
    assert run_cli("init", "talk_model", "--dir", "here").code == 0
    assert names(empty / "here") == WRITTEN
    rules = "--select=E,F,W,I,B,UP,SIM,C4"
    for arguments in (["check", rules, "--line-length=120"], ["format", "--check", "--line-length=120"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache", "here"],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_commands_that_it_names_work(empty: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty / "cache"))
    assert run_cli("init", "talk_model").code == 0
    monkeypatch.chdir("talk_model")
    outcome = run_cli("train", "recipe.yaml", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert re.search(r"a loss of \d\.\d+ over a weight of 16 of the first step", outcome.out + outcome.err)
    assert names(empty / "talk_model") == sorted([*WRITTEN, "__pycache__"] if Path("__pycache__").exists() else WRITTEN)


@pytest.mark.parametrize("taken", WRITTEN)
def test_it_overwrites_nothing(empty: Path, taken: str):
    folder = empty / "talk_model"
    folder.mkdir()
    (folder / taken).write_text("mine")
    outcome = run_cli("init", "talk_model")
    assert outcome.code == 2
    assert f"{taken} already exists" in outcome.err
    assert names(folder) == [taken]
    assert (folder / taken).read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("my-model", "'my-model' cannot be the name of a Python file and a class", "as in my_model"),
        ("2fast", "cannot be the name", "as in my_model"),
        ("class", "cannot be the name", "as in my_model"),
        ("_", "cannot be the name", "as in my_model"),
        ("a/b", "cannot be the name", "as in a_b"),
        ("torch", "torch is the name of an installed package", "my_torch"),
        ("random", "random is the name of an installed package", "my_random"),
    ],
)
def test_names_that_will_not_do(empty: Path, name: str, message: str, remedy: str):
    outcome = run_cli("init", name)
    assert outcome.code == 2
    assert message in outcome.err
    assert remedy in outcome.err
    assert not names(empty)


@pytest.mark.parametrize(("name", "kind"), [("net", "Net"), ("my_2nd_net", "My2ndNet"), ("UNet", "UNet")])
def test_the_class_is_named_after_the_file(empty: Path, name: str, kind: str):
    assert run_cli("init", name).code == 0
    assert f"class {kind}(Adapter)" in (empty / name / f"{name}.py").read_text()


def test_a_directory_that_cannot_be_written(empty: Path):
    (empty / "file").write_text("")
    outcome = run_cli("init", "talk_model", "--dir", "file/below")
    assert outcome.code == 2
    assert "cannot be written" in outcome.err


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_disk_that_is_full_leaves_no_part(empty: Path, number: int):
    with filling(Disk(empty.resolve(), full_at=number)):
        outcome = run_cli("init", "talk_model")
    assert outcome.code == 2
    assert "No space left" in outcome.err
    assert list((empty / "talk_model").glob("*")) == []
    assert run_cli("init", "talk_model").code == 0
