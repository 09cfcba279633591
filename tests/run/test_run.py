"""`Run.export`: where it writes, and what it refuses before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtune
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.run import Run
from tests.support.tiny_run import lines, make_tiny


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


@pytest.mark.parametrize(
    ("first", "then"), [("ema_decay=0.5", "ema_decay=null"), ("ema_decay=null", "ema_decay=0.5"), ("ema_decay=0.5", "")]
)
def test_of_an_earlier_checkpoint_the_weights_that_were_evaluated_then_are_taken(
    tmp_path: Path, first: str, then: str
) -> None:
    """The run was continued with another choice between the weights and their average."""
    tiny = make_tiny(tmp_path, save_interval=1)
    recipe = tiny.recipe("one", data__eval_data_paths=str(tmp_path / "eval.jsonl"), runner__eval_interval=1)
    changes = [f"optim.{then}" if then else "optim.ema_use=false", "runner.allow_changes=[optim]"]
    shardtune.train(recipe, "runner.max_epochs=-1", "runner.max_steps=2", f"optim.{first}", "optim.lr=1e-2")
    rest = ["runner.max_epochs=-1", "runner.max_steps=3", "optim.lr=1e-2", *([] if then else [f"optim.{first}"])]
    run = shardtune.train(recipe, *rest, *changes)
    measured = {line["step"]: line["eval/loss"] for line in lines(run.dir) if "eval/loss" in line}
    for step in (2, 3):
        assert run.evaluate(str(step))["eval/loss"] == pytest.approx(measured[step], rel=1e-6)
    if then != "ema_decay=null":
        weights = run.evaluate("2", "optim.ema_use=false")["eval/loss"]
        assert (weights == pytest.approx(measured[2], rel=1e-6)) == (first == "ema_decay=null")
    # What begins later begins with the weights of the checkpoint.
    if then == "ema_decay=0.5":
        parts = [run.worker(str(step), f"optim.ema_use={use}").weights for step, use in ((2, "false"), (3, "false"))]
        last, average = parts[1], run.worker("3").weights
        for name, tensor in average.parameters.items():
            torch.testing.assert_close(tensor, (parts[0].parameters[name] + last.parameters[name]) / 2)
