"""A trained policy acts: from its run, from a checkpoint, and from a copy of final/ without data and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import shardtune
from shardtune.cli.commands import app
from shardtune.config import load_recipe
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.errors import ConfigError, ModelError, ShardtuneError
from shardtune.models.action.environment import Observation
from shardtune.run.policy import policy_run
from shardtune.training.runner import SFTRunner
from tests.support.robot import NAMES, episodes, frame, save_episodes
from tests.support.tiny_openvla import save_openvla
from tests.support.vision import save_vision_model

PUSHING = Path(__file__).parents[1] / "support" / "pushing.py"
STATE = [0.3, 0.1]
SEEN: Observation = {
    "images": {"wrist": frame(0.3)},
    "instruction": "Follow the light",
    "state": np.array(STATE, np.float32),
}
BEHIND: Observation = {**SEEN, "images": {"behind": frame(0.3)}}
"""From a camera that no training row has."""
FRESH = (
    "import json, sys, shardtune\n"
    "policy = shardtune.load_policy(sys.argv[1], trust=sys.argv[3:])\n"
    "print(json.dumps(policy.predict_action_chunk(json.loads(sys.argv[2])).tolist()))"
)


def recipe(folder: Path, name: str, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "runner": {
            "max_steps": 2,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optim": {"lr": 5e-3},
            "model": {"precision": "fp32", **model},
        },
        "data": {"train_data_paths": str(folder / "light"), "num_workers": 0, "cache_dir": str(folder / "cache")},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policies")
    save_episodes(made / "light")
    shutil.copy(PUSHING, made / "pushing.py")
    return made


@pytest.fixture(scope="module")
def own(folder: Path) -> shardtune.Run:
    """A policy of one's own, whose code is beside its data."""
    return shardtune.train(recipe(folder, "own", {"adapter": f"{folder}/pushing.py:Pushing"}))


def moved(run: shardtune.Run, to: Path) -> Path:
    """A copy of final/ whose run and data are out of sight."""
    return Path(shutil.copytree(run.dir / "final", to))


@pytest.mark.lengthy
def test_actions_come_from_a_queue(own: shardtune.Run) -> None:
    policy = own.policy()
    chunk = policy.predict_action_chunk(SEEN)
    assert chunk.shape == (2, 3)
    assert chunk.dtype == np.float32
    other = {**SEEN, "state": [-0.5, 0.9]}
    first, second, third = (policy.select_action(one) for one in (SEEN, other, other))
    assert np.array_equal([first, second], chunk)
    assert np.array_equal(third, policy.predict_action_chunk(other)[0])
    policy.reset()
    assert np.array_equal(policy.select_action(SEEN), chunk[0])
    stepwise = own.policy(action_steps=1)
    assert np.array_equal(stepwise.select_action(SEEN), chunk[0])
    assert np.array_equal(stepwise.select_action(other), third)
    both = policy.predict_action_chunks([SEEN, other])
    np.testing.assert_allclose(both, [chunk, policy.predict_action_chunk(other)], rtol=1e-5, atol=1e-7)
    # The arithmetic of the policy, by hand.
    saved = json.loads((own.dir / "final" / "normalizer.json").read_text())["light"]
    from safetensors.numpy import load_file

    weights = load_file(own.dir / "final" / "model.safetensors")
    state = (np.array(STATE) - saved["state"]["mean"]) / (np.array(saved["state"]["std"]) + 1e-8)
    normal = (weights["weight"] @ state + weights["bias"]).reshape(2, 3)
    low, high = (np.array(saved["actions"][name]) for name in ("min", "max"))
    np.testing.assert_allclose(chunk, (normal + 1) / 2 * (high - low) + low, rtol=1e-5, atol=1e-6)


@pytest.mark.lengthy
def test_the_data_set_by_whose_statistics_it_acts(folder: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide, of another robot"
    write_lerobot(wide, [replace(one, actions=one.actions * 7) for one in episodes(12)], fps=10, action_names=NAMES)
    made = recipe(folder, "of_two", {"adapter": f"{folder}/pushing.py:Pushing", "unnorm_key": "light"})
    made["data"]["train_data_paths"] = [made["data"]["train_data_paths"], str(wide)]
    run = shardtune.train(made)
    saved = json.loads((run.dir / "final" / "normalizer.json").read_text())
    ends = {name: [np.array(one["actions"][end]) for end in ("min", "max")] for name, one in saved.items()}

    def normal(name: str, **given: Any) -> np.ndarray:
        low, high = ends[name]
        return (shardtune.load_policy(**given).predict_action_chunk(SEEN) - low) / (high - low)

    expected = normal("light", target=run.dir)
    copy = moved(run, tmp_path / "copy")
    for given in ({"target": run.dir}, {"target": run.dir, "checkpoint": "latest"}, {"target": copy}):
        np.testing.assert_allclose(normal(wide.name, **given, unnorm_key=wide.name), expected, rtol=1e-5, atol=1e-6)
    line = ["act", str(copy), "--state", "0.3,0.1", "--unnorm-key"]
    answered = CliRunner().invoke(app, [*line, wide.name, "--json"], catch_exceptions=False)
    assert (
        json.loads(answered.stdout)["actions"] == run.policy(unnorm_key=wide.name).predict_action_chunk(SEEN).tolist()
    )
    with pytest.raises(ConfigError, match="no action statistics of 'dark'; there are of: light, wide") as refused:
        CliRunner().invoke(app, [*line, "dark"], catch_exceptions=False)
    assert refused.value.where == "--unnorm-key"


def test_autocast_of_the_script_does_not_change_an_action(own: shardtune.Run) -> None:
    expected = own.policy().predict_action_chunk(SEEN)
    unused = r"torch\.autocast of this process has no effect"
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match=unused):
            policy = shardtune.load_policy(own.dir)
        with pytest.warns(UserWarning, match=unused):
            assert np.array_equal(policy.select_action(SEEN), expected[0])
        with pytest.warns(UserWarning, match=unused):
            assert np.array_equal(policy.predict_action_chunks([SEEN])[0], expected)


@contextmanager
def nothing_else(folder: Path, hidden: Path) -> Iterator[None]:
    """The training data, the cache, the runs and the file of the code are away."""
    hidden.mkdir()
    names = ("light", "cache", "runs", "pushing.py")
    for name in names:
        shutil.move(folder / name, hidden / name)
    try:
        yield
    finally:
        for name in names:
            shutil.move(hidden / name, folder / name)


def test_a_copy_of_final_acts(own: shardtune.Run, folder: Path, tmp_path: Path) -> None:
    """The copy of the code beside the weights needs consent; the file trained with does not."""
    chunk = own.policy().predict_action_chunk(SEEN)
    copy = moved(own, tmp_path / "handed_on")
    with nothing_else(folder, tmp_path / "hidden"):
        with pytest.raises(ConfigError, match=r"code that you have not trained with: .*handed_on/pushing.py"):
            shardtune.load_policy(copy)
        policy = shardtune.load_policy(copy, trust=[str(copy / "pushing.py")])
        assert np.array_equal(policy.predict_action_chunk(SEEN), chunk)
    assert np.array_equal(shardtune.load_policy(copy).predict_action_chunk(SEEN), chunk)


@pytest.mark.slow
def test_a_copy_of_final_acts_in_a_fresh_process(own: shardtune.Run, folder: Path, tmp_path: Path) -> None:
    chunk = own.policy().predict_action_chunk(SEEN)
    copy = moved(own, tmp_path / "handed_on")
    words = [sys.executable, "-c", FRESH, str(copy), json.dumps({"images": {}, "state": STATE})]
    root = {**os.environ, "PYTHONPATH": str(Path(shardtune.__file__).parents[1])}
    with nothing_else(folder, tmp_path / "hidden"):
        words.append(str(copy / "pushing.py"))
        found = subprocess.run(words, check=True, capture_output=True, env=root, cwd=tmp_path)
    assert np.array_equal(np.float32(json.loads(found.stdout)), chunk)


def test_a_checkpoint_needs_no_data(own: shardtune.Run, folder: Path) -> None:
    chunk = own.policy().predict_action_chunk(SEEN)
    (folder / "light").rename(folder / "elsewhere")
    try:
        assert np.array_equal(shardtune.load_run(own.dir).policy("latest").predict_action_chunk(SEEN), chunk)
        assert np.array_equal(shardtune.load_policy(own.dir, checkpoint="2").predict_action_chunk(SEEN), chunk)
    finally:
        (folder / "elsewhere").rename(folder / "light")


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("own", "normalizer", "statistics of states and actions"),
        ("tokens", "action_policy", "statistics or settings of actions"),
    ],
)
def test_statistics_of_other_data_are_said_and_those_before_kept(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    what: str,
) -> None:
    data = save_episodes(tmp_path / "light", 8)
    model = {"adapter": f"{folder}/pushing.py:Pushing"}
    if kind == "tokens":
        save_vision_model("llava", tmp_path / "base")
        model = {"model_type": "vision_language_action", "model_path": str(tmp_path / "base"), "num_action_bins": 16}
    values = recipe(folder, f"grown_{kind}", model)
    values["data"]["train_data_paths"] = str(data)
    before = (shardtune.train(values, "runner.max_steps=1").dir / f"{name}.json").read_text()
    run = shardtune.train(values, "runner.max_epochs=-1")
    assert not list(run.dir.glob(f"{name}_*")), "the same data have the same statistics"
    chunk = run.policy("2").predict_action_chunk(SEEN)
    further = ("runner.max_steps=3", "runner.max_epochs=-1", "runner.allow_changes=[data.train_data_paths]")
    for number in (6, 5):  # the first start ends before its first save
        shutil.rmtree(data)
        save_episodes(data, number)
        with monkeypatch.context() as patched:
            if number == 6:
                patched.setattr(SFTRunner, "run", lambda self: 1 / 0)
            capfd.readouterr()
            with nullcontext() if number == 5 else pytest.raises(ZeroDivisionError):
                shardtune.train(values, *further)
    said = "".join(capfd.readouterr())
    assert f"the training data have other {what} than up to step 2" in said
    assert (run.dir / f"{name}_until_step_2.json").read_text() == before != (run.dir / f"{name}.json").read_text()
    shutil.rmtree(data)
    policy = run.policy("2")
    assert np.array_equal(policy.predict_action_chunk(SEEN), chunk), "by the statistics of its own steps"
    newest = run.dir / f"{name}.json"
    with run.worker("2", f"actor.model.action_statistics={newest}") as worker:
        assert worker.recipe.actor.model.action_statistics == str(newest), "an override decides"
    if kind == "tokens":
        with pytest.raises(ConfigError, match="shows behind, the model was trained with wrist"):
            policy.predict_action_chunk(BEHIND)


def command(*words: str) -> str:
    found = CliRunner().invoke(app, ["act", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_command(own: shardtune.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = own.policy().predict_action_chunk(SEEN)
    Image.fromarray(frame(0.3)).save(tmp_path / "wrist.png")
    words = [str(own.dir), "--image", f"wrist={tmp_path}/wrist.png", "--instruction", "Follow the light"]
    assert np.float32(json.loads(command(*words, "--state", "0.3,0.1", "--json"))["actions"]).tolist() == chunk.tolist()
    lines = command(str(own.dir / "final"), "--state", "[0.3, 0.1]").splitlines()
    np.testing.assert_allclose([[float(word) for word in line.split()] for line in lines], chunk, rtol=1e-5)
    for wrong, what in (
        (["--state", "0.3;0.1"], "'0.3;0.1' is no list of numbers"),
        (["--image", "a.png", "--image", "b.png"], "not known of which camera"),
        (["--image", f"wrist={tmp_path}/none.png"], "camera wrist: the image .*none.png does not exist"),
        (["--state", "NaN,1"], r"the state is \[nan, 1.0\], not a vector of finite numbers"),
        ([], r"values of shape \[\] do not have the 2 dimensions"),
    ):
        with pytest.raises(ShardtuneError, match=what):
            command(str(own.dir), *wrong)
    policy = own.policy()
    monkeypatch.setattr(policy, "_predict", lambda seen: seen[0]["images"]["top"])
    with pytest.raises(ModelError, match=r"reads 'top' \(test_policy.py:\d+\), the observation has the cameras wrist"):
        policy.select_action(SEEN)
    monkeypatch.setattr(policy, "_predict", lambda seen: np.full((len(seen), 2, 3), np.inf))
    with pytest.raises(ModelError, match="gave inf for dimension 0 in step 0 of a chunk"):
        policy.select_action(SEEN)


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["llava", pytest.param("openvla", marks=pytest.mark.slow)])
def test_built_in_models_act_alike(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "openvla":
        save_openvla(folder / kind)
    else:
        save_vision_model(kind, folder / kind)
    appended = {} if kind == "openvla" else {"num_action_bins": 16, "action_tokens": "appended"}
    model = {"model_type": "vision_language_action", "model_path": str(folder / kind), "action_chunks_len": 2}
    run = shardtune.train(recipe(folder, kind, {**model, **appended}))
    chunk = run.policy().predict_action_chunk(SEEN)
    assert chunk.shape == (2, 3)
    copy = moved(run, tmp_path / "copy")
    assert np.array_equal(shardtune.load_policy(copy).predict_action_chunk(SEEN), chunk)
    (copy / "policy.json").unlink()  # as save_pretrained, or OpenVLA, writes it
    first = shardtune.load_policy(copy).select_action(SEEN)
    if kind == "llava":
        assert np.array_equal(first, chunk[0])
        policy = shardtune.load_policy(copy)
        assert policy.cameras == ("wrist",)
        with pytest.raises(ConfigError, match="the observation shows top, the model was trained with wrist"):
            policy.select_action({**SEEN, "images": {"top": frame(0.1)}})
        Image.fromarray(frame(0.3)).save(tmp_path / "a.png")
        shown = [f"--image=wrist={tmp_path}/a.png", "--instruction=Follow the light"]
        for words, what, option in (
            ([f"--image=top={tmp_path}/a.png"], "the images are of top, the model was trained with wrist", "--image"),
            ([*shown, shown[0]], "two images of the camera wrist", "--image"),
            (shown[:1], "the observation has no instruction", "--instruction"),
            ([f"--image=wrist={tmp_path}/none.png"], "does not exist", "--image"),
            ([*shown, "--state=1,2"], "the model does not read the state", "--state"),
        ):
            with pytest.raises(ConfigError, match=what) as error:
                command(str(copy), *words)
            assert error.value.where == option


@pytest.mark.lengthy
def test_a_low_rank_adapter_acts_without_its_data(folder: Path, tmp_path: Path) -> None:
    save_vision_model("llava", folder / "base")
    model = {"model_type": "vision_language_action", "model_path": str(folder / "base"), "num_action_bins": 16}
    lora = {"is_lora": True, "lora": {"r": 2}, "action_chunks_len": 2}
    run = shardtune.train(recipe(folder, "lora", {**model, **lora}))
    chunk = run.policy().predict_action_chunk(SEEN)
    merged = run.export(tmp_path / "merged", merge=True, check=False)
    copy = moved(run, tmp_path / "copy")
    (folder / "light").rename(folder / "elsewhere")
    try:
        for directory in (copy, merged):
            policy = shardtune.load_policy(directory)
            assert np.array_equal(policy.predict_action_chunk(SEEN), chunk)
            with pytest.raises(ConfigError, match="shows behind, the model was trained with wrist"):
                policy.predict_action_chunk(BEHIND)
    finally:
        (folder / "elsewhere").rename(folder / "light")


def test_what_does_not_act_is_refused(own: shardtune.Run, tmp_path: Path) -> None:
    policy = own.policy()
    for observation, what in (
        ({"images": {}, "pose": [1.0]}, "the observation has images, pose"),
        ({"state": STATE}, "the observation has state"),
        ({"images": {"top": "none.png"}}, "camera top: the image .*none.png does not exist"),
        ({"images": {}, "state": "left"}, "the state is 'left'"),
        ({"images": {}, "state": [[0.0]]}, "the state is"),
    ):
        with pytest.raises(ConfigError, match=what):
            policy.select_action(observation)
    for target, what in ((tmp_path / "none", "there is no"), (tmp_path, "holds no run and no policy")):
        with pytest.raises(ConfigError, match=what):
            shardtune.load_policy(target)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="a model of type 'llama', which does not act"):
        shardtune.load_policy(tmp_path)
    with pytest.raises(ConfigError, match="is a model, which has no checkpoints"):
        policy_run(tmp_path, "3")


def test_no_secret_of_the_environment_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.models.find_adapter import find_adapter
    from shardtune.training.worker.policy_files import POLICY_FILE, policy_files

    monkeypatch.setenv("SECRET", "xyz")
    code = (folder / "pushing.py").read_text() + '\n\nclass Asking(Pushing):\n    reads = ("model.action_prompt",)\n'
    (folder / "asking.py").write_text(code)
    model = {"adapter": f"{folder}/asking.py:Asking", "action_prompt": "{instruction} ${oc.env:SECRET}"}
    values = recipe(folder, "secret", model)
    made = load_recipe(values)
    saved: Any = policy_files(made, find_adapter(made))[POLICY_FILE]
    assert made.actor.model.action_prompt == "{instruction} xyz"
    assert saved["actor"]["model"]["action_prompt"] == "{instruction} ${oc.env:SECRET}"
    assert "train_data_paths" not in saved["data"]
