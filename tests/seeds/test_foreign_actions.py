"""The guide for action models with classes derived from transformers' own, trained by the built-in worker over frames.

What is not as it is printed is listed in `tests/seeds/actions.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtune
from shardtune.errors import ConfigError
from tests.seeds.actions import overrides, registering_anew, write_guide
from tests.support.chosen import slow_except
from tests.support.foreign_action import LLAVA, save_llava, write_frames, your_package
from tests.support.tiny_run import lines

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("foreign")
    with your_package(made, LLAVA):
        save_llava(made / "model")
        write_frames(made / "frames.jsonl")
        write_guide(made)
        yield made


@pytest.fixture(autouse=True)
def _registry(folder: Path) -> Iterator[None]:
    with registering_anew(folder):
        yield


@pytest.mark.parametrize("ranks", slow_except([1, 2], 1))
def test_recipe_to_final(folder: Path, ranks: int) -> None:
    """On one rank and on two, with two micro-batches each."""
    run = shardtune.train(folder / "recipe.yaml", *overrides(folder, "one", []))
    final = json.loads((run.dir / "final/metrics.json").read_text())
    measured = "eval/action_accuracy"
    assert (final["step"], final[measured]) == (2, pytest.approx(lines(run.dir)[-1][measured], abs=1e-9))
    assert (run.dir / "final/processor_config.json").exists()
    assert run.evaluate()[measured] == pytest.approx(final[measured])
    if ranks == 1:
        return
    on_two = shardtune.train(folder / "recipe.yaml", *overrides(folder, "two", ["runner.nproc_per_node=2"]))
    for one, two in zip(lines(run.dir), lines(on_two.dir), strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-10)


def test_a_length_of_actions_that_is_not_the_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.run.ranks.run_ranks", None)  # refused before ranks are started
    given = overrides(folder, "wrong", ["actor.model.action_token_len=6", "runner.nproc_per_node=2"])
    with pytest.raises(ConfigError, match="action_token_len is 6, the actions of your_action_key have 7"):
        shardtune.train(folder / "recipe.yaml", *given)
