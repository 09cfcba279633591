"""The continuous action head trains on robot data, by two terms, and acts in closed loop."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardtune
from shardtune.config import load_recipe
from shardtune.models.find_adapter import find_adapter
from shardtune.training.worker.adapter_worker import SFTWorker

pytestmark = pytest.mark.lengthy

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vla_flow"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with fewer demonstrations."""
    folder = tmp_path_factory.mktemp("flow") / "example"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("made", "__pycache__"))
    before, sys.argv = sys.argv, ["make_data.py", "--out", str(folder / "made"), "--episodes", "60"]
    try:
        runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


@pytest.mark.slow
def test_it_learns_to_act(made: Path) -> None:
    """With fewer demonstrations and steps: nearer to what the expert does."""
    run = shardtune.train(
        made / "recipe.yaml", f"runner.logger.log_path={made}/runs", "runner.max_epochs=-1", "runner.max_steps=80",
        "actor.optim.lr=3.0e-3", "actor.global_batch_size=16", "actor.model.options={width: 32}", "eval.episodes=3",
        "eval.videos=1",
    )  # fmt: skip
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(line for line in some if "eval/loss" in line) for some in (lines, lines[::-1]))
    assert 0 <= last["eval/success_low"] <= last["eval/success"] <= last["eval/success_high"] <= 1
    assert (run.dir / "samples").is_dir()
    assert last["eval/action_l1"] < 0.8 * first["eval/action_l1"]
    trained = next(line for line in lines if "train/loss" in line)
    assert trained["train/loss"] == pytest.approx(trained["train/loss/flow"] + trained["train/loss/regression"])


def test_noise_and_times_belong_to_the_frames(made: Path) -> None:
    """However the frames of a step or of an evaluation are cut."""
    found = []
    for rows, evaluated in ((8, 64), (3, 5)):
        recipe = load_recipe(
            made / "recipe.yaml", [
                f"data.cache_dir={made}/cache", "eval.environment=null", "actor.model.precision=fp64",
                "actor.model.options={width: 16}", "actor.global_batch_size=8", f"actor.micro_batch_size={rows}",
                f"actor.eval_micro_batch_size={evaluated}",
            ],
        )  # fmt: skip
        worker = SFTWorker(recipe, report=lambda text: None)
        worker.setup()
        steps = [worker.run_training() for _ in range(2)]
        numbers = [step[name] for step in steps for name in ("train/loss", "train/grad_norm", "train/loss/flow")]
        found.append([*numbers, *worker.run_eval().values()])
        worker.release()
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_actions_behind_an_episode_weigh_nothing(made: Path) -> None:
    recipe = load_recipe(made / "recipe.yaml", [f"data.cache_dir={made}/cache"])
    adapter = find_adapter(recipe)
    assert adapter.action_chunk == 4
    content = io.BytesIO()
    Image.new("RGB", (48, 48)).save(content, "PNG")
    image = {"bytes": content.getvalue()}
    actions = np.array([[0.04, 0.0], [0.08, -0.08], [0.0, 0.0], [0.0, 0.0]], np.float32)
    row = {
        "images": {"top": image}, "instruction": "move to the red disc", "state": np.zeros(2, np.float32),
        "actions": actions, "action_is_pad": np.array([False, False, True, True]), "dataset": "demonstrations",
    }  # fmt: skip
    sample = adapter.encode(row)
    assert adapter.weights(sample) == {"flow": 4, "regression": 4}
    assert sample.fields["actions"][1].tolist() == pytest.approx([1.0, -1.0])
