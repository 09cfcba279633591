"""Options that leave each other without effect are refused, or it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.cli.commands import app
from shardtune.cli.generate import _sampling
from shardtune.errors import ConfigError
from shardtune.evaluate.generate import Sampling


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["replay", "runs/x", "--step", "1", "--rows", "--worst", "2"], "--rows lists the rows and computes no losses"),
        (["data", "audit", "recipe.yaml", "--near", "off", "--sample", "9"], "--near off compares none"),
        (["predict", "runs/x", "a text", "--prepared"], "--prepared is about the rows of --file"),
        (["generate", "runs/x", "a text", "--prepared"], "--prepared is about the rows of --file"),
        (
            ["generate", "runs/x", "--prompt", "a", "eval.max_new_tokens=8"],
            r"write --max-new-tokens 8; .*--prompt eval\.",
        ),
        (["generate", "runs/x", "--file", "a.jsonl", "data.wrong=8"], r"takes no overrides of keys, and data\.wrong"),
        (["generate", "runs/x", "a.b=c", "--prepared"], "--prepared is about the rows of --file"),
        (["generate", "runs/x", "--prompt", "optim.lr=3", "--prepared"], "--prepared is about the rows of --file"),
        *(
            (["verify", name, "recipe.yaml", "--ranks", "1,2"], f"{name} compares no numbers of ranks(?s:.*)node=2")
            for name in ("resume", "preempt", "export")
        ),
        (["chat", "runs/x", "optim.lr=3"], r"chat takes no overrides of keys, and optim\.lr"),
        (["chat", "runs/x", "--template-kwargs", '{"a": 1, "a": 2}'], "the key 'a' is there twice"),
        (["predict", "runs/x", "a text", "micro_batch_size=3"], "predict takes no overrides of keys"),
        (
            ["generate", "runs/x", "max_new_tokens=3"],
            r"max_new_tokens is eval\.max_new_tokens of a recipe(?s:.*)write --max-new-tokens 3; .*--prompt max_new",
        ),
        (["generate", "runs/x", "lr=3"], r"lr is optim\.lr of a recipe"),
        (["generate", "runs/x", "name=x or y", "--prepared"], "--prepared is about the rows of --file"),
        (["generate", "runs/x", "--prompt", "lr=3", "--prepared"], "--prepared is about the rows of --file"),
        *(
            (["launch", "recipe.yaml", "--print", *words.split()], f"{what} contradict each other")
            for words, what in (
                ("--nproc-per-node 2 runner.nproc_per_node=4", r"--nproc-per-node 2 and runner\.nproc_per_node=4"),
                ("--nproc-per-node 2 --nodes 2 runner.num_ranks=2", r"--nproc-per-node 2 and runner\.num_ranks=2"),
                ("--max-restarts 2 runner.max_restarts=1", r"--max-restarts 2 and runner\.max_restarts=1"),
            )
        ),
        (["verify", "adapter", "mine.py:Mine", "--list"], "--list checks nothing, so that mine.py:Mine has no effect"),
        (["verify", "adapter", "--list", "--only", "sum"], "there is no check 'sum'"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        app(words, standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["generate", "runs/x", "--model", "m", "--prompt", "a"], "generate takes one run or model, and runs/x is a"),
        (["generate", "m", "runs/x", "--prompt", "a"], "generate takes one run or model, and runs/x is a second one"),
        (["chat", "runs/x", "--model", "m"], "chat takes one run or model, and runs/x is a second one"),
        (["predict", "m", "runs/x"], "predict takes one run or model, and runs/x is a second one"),
        (
            ["eval", "runs/x", "--model", "m"],
            "runs/x is a run, whose final model .* m is a second model",
        ),
        (["eval", "runs/x", "actor.model.model_path=m"], "and m is a second model"),
    ],
)
def test_two_models_are_refused(words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        app(words, standalone_mode=False)


def test_sampling_without_a_temperature_is_greedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert _sampling("generate", 9, 0.0, 0.9, 3) == Sampling(9, 0.0, 0.9, 3)
    note = "generate: --top-p and --seed have no effect: decoding is greedy without --temperature\n"
    assert capsys.readouterr().err == note
    assert _sampling("chat", 9, 0.0, None, None) == Sampling(9)
    assert _sampling("chat", 9, 0.5, 0.9, None) == Sampling(9, 0.5, 0.9, 0)
    assert capsys.readouterr().err == ""
