"""Recipes that `shardtune convert` writes train."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardtune
from shardtune.config.foreign.convert import convert
from tests.support.tiny_run import lines
from tests.support.workspace import make_workspace

pytestmark = pytest.mark.lengthy

SOURCES = Path(__file__).parents[1] / "config" / "foreign" / "sources"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("converted") / "here")


@pytest.mark.parametrize("name", ["trl.yaml", "axolotl.yaml", "llama_factory.yaml", "torchtune.yaml", "halos.yaml"])
def test_two_steps_of_a_converted_recipe(name: str, workspace: Path):
    recipe = workspace / name
    recipe.write_text(convert(SOURCES / name, to=recipe).recipe)
    run = shardtune.train(
        recipe,
        f"actor.model.model_path={workspace / 'model'}",
        f"data.train_data_paths={workspace / 'train.jsonl'}",
        f"data.cache_dir={workspace / 'cache'}",
        f"runner.logger.log_path={workspace / 'runs'}",
        "runner.max_steps=2",
        "runner.push_to_hub=null",
        "runner.logger.logger_backends=[jsonl]",
        "data.num_workers=0",
    )
    losses = [line["train/loss"] for line in lines(run.dir) if "train/loss" in line]
    assert len(losses) == 2
    assert (run.dir / "final").is_dir()
