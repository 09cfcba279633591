"""The reaching example: its scripts make what its recipe names, and its model trains, acts, and acts the same after it
was exported."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import shardtune
from shardtune.errors import ConfigError
from shardtune.evaluate.environments.find import EnvironmentSource
from shardtune.run.evaluation import evaluate
from tests.support.workspace import quietly

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vla_reach"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few demonstrations and the model, as the scripts write them."""
    try:
        EnvironmentSource("reach", {}).make().close()
    except ConfigError as error:
        pytest.skip(error.what)
    folder = tmp_path_factory.mktemp("vla")
    with pytest.MonkeyPatch.context() as patch, quietly():
        for script, out in (("make_data.py", folder), ("make_model.py", folder / "model")):
            episodes = ["--episodes", "12"] if script == "make_data.py" else []
            patch.setattr(sys, "argv", [script, "--out", str(out), *episodes])
            runpy.run_path(str(FOLDER / script), run_name="__main__")
    return folder


def overrides(folder: Path) -> list[str]:
    return [
        f"actor.model.model_path={folder}/model",
        f"data.train_data_paths={folder}/demonstrations",
        f"data.eval_data_paths={folder}/heldout",
        f"data.cache_dir={folder}/cache",
        f"runner.logger.log_path={folder}/runs",
        "eval.episodes=3",
        "eval.environment_options.max_steps=6",
    ]


@pytest.mark.lengthy
def test_the_model_trains_and_acts_the_same_after_export(made: Path) -> None:
    recipe = FOLDER / "recipe.yaml"
    run = shardtune.train(recipe, *overrides(made), "runner.max_steps=3", "runner.eval_before_training=false")
    metrics = run.metrics
    assert metrics["eval/episode_length"] == 6.0
    assert metrics["eval/success_low"] <= metrics["eval/success"] <= metrics["eval/success_high"]
    assert (run.dir / "samples" / "step_3" / "episode_000_failure.gif").exists()
    found = run.evaluate()
    first = (run.dir / "samples" / "final" / "episodes.jsonl").read_text()
    exported = run.export(made / "exported", dtype="fp32")
    again = evaluate(recipe, *overrides(made), f"actor.model.model_path={exported}")
    assert again == pytest.approx(found)
    assert (made / "runs" / "vla-reach-episodes" / "episodes.jsonl").read_text() == first
    assert all(json.loads(line)["instruction"].startswith("touch the ") for line in first.splitlines())
