"""Several runs one after another in the same processes of torchrun, as a script of the user's makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import shardtune
from shardtune.config import user_code
from tests.support.doc_blocks import ROOT
from tests.support.tiny_run import lines, make_tiny

SCRIPT = """
import sys
from pathlib import Path

import shardtune
from shardtune.errors import ShardtuneError
from tests.support.tiny_run import Tiny, rows

tiny, told = Tiny(Path(sys.argv[1]), -1), []
for name, changes in {changes!r}:
    recipe = tiny.recipe(name, runner__max_steps=2, runner__device="cpu", **changes)
    try:
        run = shardtune.train(recipe)
        told.append(round(run.evaluate(eval_data=rows(7, start=100))["eval/loss"], 4))
    except ShardtuneError as error:
        told.append("nowhere" if "nowhere" in str(error) else str(error))
sys.stdout.write(f"told {{told}}\\n")  # one write: ranks share the stream
"""
RUNS = (
    ("sharded", {}),
    ("copies", {"actor__training_backend": "ddp", "actor__optim": {"lr": 3e-3}}),
    ("wrong", {"actor__model__model_path": "nowhere"}),
    ("flat", {"actor__training_backend": "fsdp1"}),
    ("sharded", {}),
)


def test_each_run_of_several_is_as_by_itself(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, save_interval=-1)
    script = tmp_path / "several.py"
    script.write_text(SCRIPT.format(changes=RUNS))
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
            str(script),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    told = [line for line in outcome.stdout.splitlines() if line.startswith("told")]
    assert len(told) == 2
    assert told[0] == told[1]
    assert told[0].count("nowhere") == 1
    for name, changes in (RUNS[0], RUNS[1], RUNS[3]):
        alone = tiny.recipe(f"{name}-alone", runner__max_steps=2, runner__device="cpu")
        alone["actor"]["optim"] = changes.get("actor__optim", alone["actor"]["optim"])
        expected = lines(shardtune.train(alone).dir)
        found = lines(tiny.run(name))
        assert [line["train/loss"] for line in found] == pytest.approx([e["train/loss"] for e in expected], rel=1e-5)


def test_a_run_names_the_plugins_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_code, "_plugins", defaultdict(set))
    tiny, told = make_tiny(tmp_path, save_interval=-1), list[bool]()
    (tmp_path / "patches.py").write_text("")
    for name, plugins in (("with", [str(tmp_path / "patches.py")]), ("without", [])):
        shardtune.train({**tiny.recipe(name, runner__max_steps=1), "plugins": plugins})
        told.append("plugins of earlier runs of this process" in " ".join(capsys.readouterr().err.split()))
    assert told == [False, True]
