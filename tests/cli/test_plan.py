"""`shardtune plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from shardtune.cli.commands import app
from shardtune.cli.plan import size
from shardtune.errors import ConfigError
from tests.support.workspace import run_cli


@pytest.mark.parametrize(
    ("text", "number"), [("80G", 8e10), ("80GB", 8e10), ("80gi", 80 * 2**30), ("1.5M", 1.5e6), ("2000", 2000.0)]
)
def test_sizes_have_units(text: str, number: float) -> None:
    assert size("--gpu-memory", text) == number


@pytest.mark.parametrize("text", ["", "G", "0G", "-1G", "80X", "eighty"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        size("--gpu-memory", text)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "nothing to plan"),
        (["recipe.yaml", "--mfu", "0.5", "--rate-from", "runs/x"], "--rate-from and --mfu exclude each other"),
        (["recipe.yaml", "--gpu-tflops", "312"], "--mfu is not given"),
        (["recipe.yaml", "--gpu-memory", "80"], "80 is 80 bytes"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        app(["plan", *words], standalone_mode=False)


@pytest.mark.parametrize(
    "words", [["--tokens-per-second", "inf"], ["--tokens-per-second", "nan"], ["--mfu", "0.4", "--gpu-tflops", "inf"]]
)
def test_rates_are_finite(words: list[str]) -> None:
    outcome = run_cli("plan", "recipe.yaml", *words)
    assert (outcome.code, words[-2] in outcome.err) == (2, True), outcome.err


@pytest.mark.lengthy
def test_a_models_folder_is_planned_for_gpus_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64).save_pretrained(tmp_path)  # fmt: skip  # noqa: E501
    words = ["--gpus", "2", "--gpu-memory", "80G", "--tokens", "1K", "--length", "8", "--json", "--solve"]
    app(["plan", str(tmp_path), *words], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["device"], found["fits"], found["changes"]) == (2, "cuda", True, [])
    assert found["steps"] == 4
    assert found["notes"] == []
