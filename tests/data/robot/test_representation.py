"""Relative and delta actions: the arithmetic, rows, statistics, a policy in closed loop, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtune
from shardtune.config import load_recipe
from shardtune.data.action_statistics import source_statistics
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.robot.representation import Representation
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import prepare_row
from shardtune.errors import ConfigError, DataError
from shardtune.models.find_adapter import find_adapter
from tests.support.commanding import CHUNK, NAMES, Commanding, episodes
from tests.support.robot import save_episodes
from tests.support.vision import save_vision_model

TASK = Path(__file__).parents[2] / "support" / "commanding.py"
MASK = {"gripper": False}


def test_the_numbers() -> None:
    actions, state = np.array([[11.0, 5.0], [13.0, 6.0], [12.0, 7.0]]), np.array([10.0, 4.0])
    relative = Representation("relative", (("1", False),))
    assert relative.convert(actions, state).tolist() == [[1, 5], [3, 6], [2, 7]]
    assert Representation("delta").convert(actions, state).tolist() == [[1, 1], [2, 1], [-1, 1]]
    earlier = [{"action": actions[0], "state": np.array([9.0, 1.0])}]
    row = {"actions": actions, "state": state, "earlier": earlier}
    assert relative.converted(row)["earlier"][0]["action"].tolist() == [1, 5]  # from where the row's own frame is
    assert Representation("delta").converted(row)["earlier"][0]["action"].tolist() == [2, 4]


@pytest.mark.parametrize("kind", ["relative", "delta"])
@pytest.mark.parametrize("given", [None, (True, False, True), (("-1", False),)])
def test_the_round_trip_is_exact(kind: str, given: Any) -> None:
    draws = np.random.default_rng(0)
    actions, state = (draws.normal(size=size).astype(np.float32) * 30 for size in ((4, 9, 3), (4, 3)))
    form = Representation(kind, given)
    converted = form.convert(actions, state)
    assert converted.dtype == np.float64
    assert (form.undo(converted, state) == actions).all()
    saved = Representation.from_json(json.loads(json.dumps(form.to_json(3))))
    assert saved is not None
    assert (saved.undo(converted, state) == actions).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    write_lerobot(made / "home", episodes(), fps=5, action_names=NAMES)
    return made


def recipe(folder: Path, name: str, **model: Any) -> dict[str, Any]:
    return {
        "runner": {
            "max_epochs": -1,
            "max_steps": 80,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 32,
            "global_batch_size": 32,
            "model": {"adapter": f"{TASK}:Placing", "precision": "fp32", **model},
            "optim": {"lr": 0.05, "weight_decay": 0.0},
        },
        "data": {"train_data_paths": str(folder / "home"), "cache_dir": str(folder / "cache"), "num_workers": 0},
        "eval": {"environment": f"{TASK}:Commanding", "episodes": 8, "episodes_at_once": 8, "videos": 0},
    }


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "kind", ["relative", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("absolute", "delta"))]
)
def test_a_policy_in_closed_loop(folder: Path, kind: str, tmp_path: Path) -> None:
    form = {} if kind == "absolute" else {"action_representation": kind, "action_representation_mask": MASK}
    run = shardtune.train(recipe(folder, kind, **form))
    success = json.loads((run.dir / "final" / "metrics.json").read_text())["eval/success"]
    if kind == "absolute":
        assert success == 0.0  # where the point is does not show
        return
    assert success == 1.0
    seen = Commanding().reset(5)
    chunk = run.policy().predict_action_chunk(seen)
    assert np.abs(chunk[:, :2] - np.asarray(seen["state"])[:2]).max() < 1.5
    home = shutil.move(folder / "home", tmp_path / "away")
    try:
        moved = shutil.copytree(run.dir / "final", tmp_path / "final")
        np.testing.assert_array_equal(shardtune.load_policy(moved).predict_action_chunk(seen), chunk)
    finally:
        shutil.move(home, folder / "home")
    with pytest.raises(DataError, match=f"is {kind}, and there is no state that actions could be relative to"):
        run.policy().select_action({**seen, "state": None})
    (tmp_path / "own.json").write_text(json.dumps({"home": {"action": {"min": [0] * 3, "max": [1] * 3}}}))
    other = find_adapter(load_recipe(recipe(folder, "other", **form, action_statistics=str(tmp_path / "own.json"))))
    with pytest.raises(ConfigError, match="the statistics are of absolute actions"):
        other.notes()
    other = find_adapter(load_recipe(recipe(folder, "other", action_statistics=str(moved / "normalizer.json"))))
    with pytest.raises(ConfigError, match=rf"the statistics are of {kind} actions, and .* is absolute"):
        other.notes()


@pytest.mark.lengthy
def test_a_directory_of_an_action_model_has_it(folder: Path, tmp_path: Path) -> None:
    """In its statistics: it acts alike without run and policy.json, and is trained on in no other representation."""
    save_vision_model("llava", tmp_path / "model")
    form = {"action_representation": "relative", "action_representation_mask": MASK, "num_action_bins": 16}
    values = recipe(folder, "tokens", adapter=None, model_type="vision_language_action", action_chunks_len=2, **form)
    values["actor"]["model"]["model_path"] = str(tmp_path / "model")
    run = shardtune.train({**values, "eval": {}}, "runner.max_steps=1")
    seen = Commanding().reset(5)
    chunk = run.policy().predict_action_chunk(seen)
    assert np.abs(chunk[:, :2] - np.asarray(seen["state"])[:2]).max() < 1.5
    copy = shutil.copytree(run.dir / "final", tmp_path / "copy")
    (copy / "policy.json").unlink()
    np.testing.assert_array_equal(shardtune.load_policy(copy).predict_action_chunk(seen), chunk)
    values["actor"]["model"] |= {"model_path": str(copy), "action_representation": "delta"}
    with pytest.raises(ConfigError, match=r"the statistics are of relative actions, and .* is delta"):
        find_adapter(load_recipe(values))


@pytest.mark.parametrize("kind", ["relative", "delta"])
def test_statistics_are_of_what_is_trained(folder: Path, data: Any, kind: str) -> None:
    """All steps of all chunks before an episode's end count, and frames are counted once."""
    frames = FrameOptions(CHUNK, representation=Representation.of(kind, MASK))
    (source,) = resolve_sources(str(folder / "home"), data, frames=frames, report=lambda text: None)
    found = source_statistics([source], cache_dir=data.cache_dir)["home"]
    steps = []
    for one in episodes():
        for frame in range(len(one.actions)):
            chunk = one.actions[frame : frame + CHUNK].astype(np.float64)
            assert one.state is not None
            before = np.concatenate([one.state[frame : frame + 1], chunk[:-1]]) if kind == "delta" else one.state[frame]
            steps.append(chunk - before * [1, 1, 0])
    whole = np.concatenate(steps).astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(found.action.q99, np.quantile(whole, 0.99, axis=0))
    np.testing.assert_allclose(found.action.mean, whole.mean(0), atol=1e-12)
    assert (found.frames, found.episodes) == (12 * 8, 12)
    assert found.representation == {"kind": kind, "mask": [True, True, False], "names": NAMES}
    absolute = resolve_sources(str(folder / "home"), data, frames=FrameOptions(CHUNK), report=lambda text: None)
    plain = source_statistics(absolute, cache_dir=data.cache_dir)["home"]
    assert plain.action.max[0] > 20 > found.action.max[0]
    _, row = next(iter(source.rows(source.files[0])))
    assert not isinstance(row, RowError)
    prepared = prepare_row(row, source)
    assert prepared is not None
    assert prepared["actions"].dtype == np.float32


def test_what_cannot_be_relative_is_one_message(tmp_path: Path, data: Any) -> None:
    save_episodes(tmp_path / "light")  # states of two numbers, actions of three
    one = next(episodes(1))
    rows = [{"instruction": "go", "actions": one.actions[:2].tolist()}]
    frames = FrameOptions(2, representation=Representation("relative"))
    for spec, what in ((str(tmp_path / "light"), r"the state has the shape \[2\], an action 3"), (rows, "no state")):
        data.on_bad_row = "skip"  # no fault of one row
        with pytest.raises(DataError, match=what) as error:
            resolve_sources(spec, data, frames=frames, report=lambda text: None)
        assert error.value.where == "actor.model.action_representation"
    write_lerobot(tmp_path / "home", episodes(1), fps=5, action_names=NAMES)
    nothing = tuple((name, False) for name in NAMES)
    for given, what in (
        ((("griper", False),), "did you mean gripper"),
        (nothing, "mask is false for all dimensions: nothing would be converted"),
        ((False, False, False), "mask is false for all dimensions"),
    ):
        named = FrameOptions(2, representation=Representation("delta", given))
        with pytest.raises(ConfigError, match=what) as error:
            resolve_sources(str(tmp_path / "home"), data, frames=named, report=lambda text: None)
        assert error.value.where == "actor.model.action_representation_mask"


def test_keys_without_effect_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="action_representation_mask has no effect"):
        load_recipe(recipe(folder, "mask", action_representation_mask=MASK))
    with pytest.raises(ConfigError, match="which has no actions"):
        load_recipe(recipe(folder, "text", adapter=None, model_path="x", action_representation="delta"))
    own = recipe(folder, "rows", adapter=f"{TASK.parent}/homing.py:Steering", action_representation="delta")
    with pytest.raises(ConfigError, match="no frames of robot data"):
        find_adapter(load_recipe(own)).encoder(with_prompts=False)
