"""`Run.export`: where it writes, and what it refuses before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtune
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.run import Run
from tests.support.tiny_run import make_tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return shardtune.train(make_tiny(tmp_path_factory.mktemp("run")).recipe("one", runner__max_steps=1))


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_is_written_where_a_link_leads(run: Run, tmp_path: Path, exists: bool) -> None:
    (tmp_path / "link").symlink_to("disk/model")
    if exists:
        (tmp_path / "disk/model").mkdir(parents=True)
    assert run.export(tmp_path / "link", check=False) == tmp_path / "disk/model"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link/model.safetensors").is_file()
    assert (tmp_path / "link/README.md").read_text().count("# link\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent.name != "model") == ["disk", "link", "model"]


@pytest.mark.parametrize(
    ("leads_to", "says"),
    [("link", "leads nowhere"), ("full", "full, which .*link leads to, is not empty"), ("full/file", "is a file")],
)
def test_what_an_export_cannot_replace_is_refused_at_once(tmp_path: Path, leads_to: str, says: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "link").symlink_to(tmp_path / leads_to)
    with pytest.raises(CheckpointError, match=says):
        Run(tmp_path / "no run").export(tmp_path / "link")


@pytest.mark.parametrize("dtype", ["bf17", torch.bfloat16])
def test_an_export_in_an_unknown_dtype_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="is not a dtype for export"):
        Run(tmp_path / "no run").export(tmp_path / "out", dtype=dtype)


def test_rows_are_no_checkpoint(tmp_path: Path) -> None:
    rows: Any = [{"text": "a"}]
    with pytest.raises(ConfigError, match=r"a list(?s:.*)run\.evaluate\(eval_data=rows\)"):
        Run(tmp_path / "no run").evaluate(rows)


def test_an_export_takes_no_place_that_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path)
    with pytest.raises(CheckpointError, match=r"mounted(?s:.*)--to"):
        Run(tmp_path / "no run").export(tmp_path)
