"""Recipes that `shardtune convert` writes train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import shardtune
from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.convert import convert
from tests.support.tiny_run import lines
from tests.support.workspace import make_workspace

pytestmark = pytest.mark.lengthy

SOURCES = Path(__file__).parents[1] / "config" / "foreign" / "sources"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("converted") / "here")


@pytest.mark.parametrize(
    "name", ["trl.yaml", "axolotl.yaml", "llama_factory.yaml", "torchtune.yaml", "torchtitan.toml", "halos.yaml"]
)
def test_two_steps_of_a_converted_recipe(name: str, workspace: Path):
    recipe = workspace / f"{name}.yaml"
    recipe.write_text(convert(CommandLine(SOURCES / name), to=recipe).recipe)
    losses = _two_losses(recipe, workspace, f"data.train_data_paths={workspace / 'train.jsonl'}")
    assert len(losses) == 2


def test_two_steps_of_pretraining_with_llama_factory(workspace: Path):
    folder = workspace / "corpus"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"body": "1 + 2 = 3\n" * 90, "id": n}) for n in range(8)))
    info = {"corpus": {"file_name": "rows.jsonl", "columns": {"prompt": "body"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    given = {"stage": "pt", "dataset": "corpus", "dataset_dir": str(folder), "model_name_or_path": "model"}
    (folder / "pt.yaml").write_text(
        yaml.safe_dump({**given, "finetuning_type": "full", "cutoff_len": 64, "logging_steps": 1})
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(convert(CommandLine(folder / "pt.yaml"), to=recipe).recipe)
    assert len(_two_losses(recipe, workspace)) == 2


def _two_losses(recipe: Path, workspace: Path, *overrides: str) -> list[float]:
    """The losses of two steps of a recipe, whose model is saved."""
    run = shardtune.train(
        recipe,
        *overrides,
        f"actor.model.model_path={workspace / 'model'}",
        f"data.cache_dir={workspace / 'cache'}",
        f"runner.logger.log_path={workspace / 'runs'}",
        "runner.max_steps=2",
        "runner.push_to_hub=null",
        "runner.logger.logger_backends=[jsonl]",
        "data.num_workers=0",
    )
    assert (run.dir / "final").is_dir()
    return [line["train/loss"] for line in lines(run.dir) if "train/loss" in line]
