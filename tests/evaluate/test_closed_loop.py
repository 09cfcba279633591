"""Closed-loop evaluation: the same episodes on any number of ranks, what is kept of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.closed_loop import ClosedLoop, PlayedEpisode, play, wilson_interval
from shardtune.evaluate.environments.find import EnvironmentSource
from shardtune.models.action.environment import Observation
from shardtune.run.evaluation import evaluate
from tests.parallel.test_fsdp2 import group
from tests.support.dist.ranks import run_ranks
from tests.support.homing import CHUNK, direction, rows

PARTS = Path(__file__).parents[1] / "support" / "homing.py"
HOMING = EnvironmentSource(f"{PARTS}:Homing", {})
LOOP = ClosedLoop(HOMING, episodes=7, seed=3, action_steps=None, at_once=3, videos=0, video_format="gif")


def wavering(observations: Sequence[Observation]) -> np.ndarray:
    """The way home in chunks of three; where home is far on the left, the wrong way."""
    ways = np.stack([direction(seen) for seen in observations])
    ways[ways[:, 0] < -0.5] *= -1
    return np.repeat(ways[:, None] / CHUNK, CHUNK, axis=1)


def played(closed_loop: ClosedLoop, folder: Path | None = None) -> tuple[list[PlayedEpisode], int]:
    """The episodes, and how often the policy was asked; each time is one of all ranks, or they hang."""
    calls = 0

    def policy(observations: Sequence[Observation]) -> np.ndarray:
        nonlocal calls
        calls += 1
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return wavering(observations)

    return list(play(closed_loop, policy, group(), folder=folder).episodes), calls


def test_episodes_are_the_same_whoever_plays_them() -> None:
    episodes, calls = played(LOOP)
    assert [episode.episode for episode in episodes] == list(range(7))
    assert len({episode.seed for episode in episodes}) == 7
    assert {episode.success for episode in episodes} == {True, False}
    assert len({episode.steps for episode in episodes}) > 1
    assert played(replace(LOOP, at_once=1)) == (episodes, sum(-(-episode.steps // CHUNK) for episode in episodes))
    assert played(replace(LOOP, at_once=50))[0] == episodes
    assert played(replace(LOOP, seed=4))[0] != episodes
    (first, asked), (second, asked_too) = run_ranks(played, 2, LOOP)
    assert first == second == episodes
    assert asked == asked_too < calls


def test_a_rank_without_episodes_keeps_the_others_company() -> None:
    alone = played(replace(LOOP, episodes=1))
    assert run_ranks(played, 2, replace(LOOP, episodes=1)) == [alone, alone]


def test_so_many_actions_of_a_chunk_are_taken() -> None:
    one = replace(LOOP, at_once=1, episodes=1)
    (episode,), calls = played(replace(one, action_steps=1))
    assert calls == episode.steps
    (averaged,), calls = played(replace(one, temporal_ensembling=0.5))
    assert calls == averaged.steps != episode.steps, "the mean of three predictions is not the last one"
    with pytest.raises(ConfigError, match=r"eval.action_steps is 4, and the model gives chunks of 3 actions"):
        played(replace(one, action_steps=4))


def test_actions_have_to_be_a_chunk_for_each_observation() -> None:
    with pytest.raises(ModelError, match=r"shape \[3, 2\] for 3 observations"):
        play(LOOP, lambda seen: np.zeros((len(seen), 2)), group())


def test_an_action_that_is_no_number_reaches_no_environment() -> None:
    chunks = np.zeros((3, CHUNK, 2), np.float32)
    chunks[1, 2, 1] = np.nan
    place = f"episode 1, seed {LOOP.episode_seed(1)}, before action 1"
    what = f"gave nan for dimension 1 in step 2 of a chunk, for {place}"
    with pytest.raises(ModelError, match=what):
        play(LOOP, lambda seen: chunks, group())


def test_the_interval_is_wilsons() -> None:
    """Its ends are the shares from which the observed one lies 1.96 of their own standard deviations away."""
    for successes, number in ((0, 10), (10, 10), (45, 50), (1, 1), (30, 100)):
        low, high = wilson_interval(successes, number)
        assert 0.0 <= low < high <= 1.0
        assert (low == 0.0, high == 1.0) == (successes == 0, successes == number)
        for end in {low, high} - {0.0, 1.0}:
            deviation = (end * (1 - end) / number) ** 0.5
            assert abs(successes / number - end) == pytest.approx(1.959964 * deviation, rel=1e-6)


@pytest.mark.parametrize("form", ["gif", "mp4"])
def test_the_first_episodes_are_kept_as_videos(tmp_path: Path, form: str) -> None:
    if form == "mp4":
        pytest.importorskip("av", reason="PyAV writes MP4 files")
    episodes, _ = played(replace(LOOP, videos=2, video_format=form), tmp_path)
    told = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [PlayedEpisode(**line) for line in told] == episodes
    assert [episode.video is not None for episode in episodes] == [True, True] + 5 * [False]
    for episode in episodes[:2]:
        assert episode.video is not None
        assert ("success" in episode.video) == episode.success
        if form == "mp4":
            import av

            with av.open(str(tmp_path / episode.video)) as video:
                assert sum(1 for _ in video.decode(video=0)) == episode.steps + 1 + 5  # the last one stays for a second
            continue
        with Image.open(tmp_path / episode.video) as video:
            assert video.n_frames == episode.steps + 2  # pyright: ignore[reportAttributeAccessIssue]
            assert video.size == (6, 4)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", [r"Homing.step \(episode 0, seed \d+, action 3\) failed: ZeroDivisionError: the motor is hot"]),
        ("image", [r"Homing.step \(episode 0, seed", "float32 .4, 6, 3. as the image of 'eye'", "uint8"]),
    ],
)
def test_a_fault_of_the_environment_names_method_and_seed(fault: str, words: list[str]) -> None:
    broken = replace(LOOP, at_once=1, source=EnvironmentSource(HOMING.spec, {"fault": fault}))
    with pytest.raises(ConfigError) as error:
        play(broken, lambda seen: np.zeros((len(seen), 4, 2)), group())
    for word in words:
        assert error.match(word)
    assert f"seed {broken.episode_seed(0)}," in error.value.what
    assert "eval.environment" in str(error.value.where)


def refused(**changes: Any) -> ConfigError:
    values = {"plugins": [], **recipe(Path("/nowhere"))}
    values["eval"] |= changes
    with pytest.raises(ConfigError) as error:
        ClosedLoop.of(load_recipe(values, files_must_exist=False)).check()  # pyright: ignore[reportOptionalMemberAccess]
    return error.value


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"environment": f"{PARTS}:Homming"}, "no function or class 'Homming'"),
        ({"environment": f"{PARTS}:Steering"}, "Steering is no environment"),
        ({"environment": f"{PARTS}:Unfinished"}, "the environment Unfinished lacks step"),
        ({"environment_options": {"steps": 0}}, "Homing.max_steps is 0"),
        ({"environment_options": {"speed": 2}}, "takes other options: got an unexpected keyword argument 'speed'"),
        ({"environment": "reech"}, "eval.environment: 'reech'"),
        ({"environment": "point2d", "environment_options": {"discs": 9}}, "point2d has 9 discs"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(changes: dict[str, Any], what: str) -> None:
    assert what in refused(**changes).what


def test_render_and_close_are_named_where_they_fail(tmp_path: Path) -> None:
    """An error of `close` hides no other, and the other environments are closed."""
    file = tmp_path / "faulty.py"
    file.write_text(
        "from tests.support.homing import Homing\n"
        "class Faulty(Homing):\n"
        "    def __init__(self, at, fault=''):\n"
        "        super().__init__(fault)\n"
        "        self.at = at\n"
        "    def render(self):\n"
        "        if self.at == 'render': raise OSError('no display')\n"
        "    def close(self):\n"
        "        with open(f'{__file__}.closed', 'a') as file: file.write('x')\n"
        "        if self.at == 'close': raise OSError('already closed')\n"
    )
    for options, message in (
        ({"at": "render"}, r"Faulty.render \(episode 0, seed \d+, after action 0\) failed: OSError: no display"),
        ({"at": "close"}, "Faulty.close failed: OSError: already closed"),
        ({"at": "close", "fault": "raises"}, "Faulty.step .*the motor is hot"),
    ):
        source = EnvironmentSource(f"{file}:Faulty", options)
        with pytest.raises(ConfigError, match=message):
            played(replace(LOOP, source=source, videos=1), tmp_path / "kept")
    assert Path(f"{file}.closed").read_text() == "x" * (1 + 3 + 3)


def recipe(folder: Path, **model: Any) -> dict[str, Any]:
    """Learns to steer home, evaluated by nothing but episodes."""
    return {
        "runner": {
            "max_epochs": 30,
            "val_check_interval": 60,
            "eval_before_training": True,
            "best": {"monitor": "eval/success"},
            "logger": {"log_path": str(folder / "runs"), "experiment_name": "steer", "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "model": {"adapter": f"{PARTS}:Steering", "precision": "fp32", **model},
            "optim": {"lr": 0.05, "weight_decay": 0.0},
        },
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "cache_dir": str(folder / "cache"),
            "num_workers": 0,
        },
        "eval": {"environment": HOMING.spec, "episodes": 12, "episodes_at_once": 5, "videos": 1},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> shardtune.Run:
    folder = tmp_path_factory.mktemp("steering")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(32)))
    (folder / "robot.py").write_text("from tests.support.homing import Homing\n")  # a file that nothing else names
    return shardtune.train(recipe(folder), f"eval.environment={folder}/robot.py:Homing")


def test_a_run_reports_success_and_keeps_the_best(run: shardtune.Run) -> None:
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if "eval/success" in line}
    assert sorted(measured) == [0, 60, 120]
    assert measured[0]["eval/success"] < 0.5
    last = measured[120]
    assert last["eval/success"] == 1.0
    assert last["eval/success_low"] == pytest.approx(wilson_interval(12, 12)[0])
    assert last["eval/success_high"] == 1.0
    assert 1 < last["eval/episode_length"] < 8
    assert json.loads((run.dir / "final" / "metrics.json").read_text())["eval/success"] == 1.0
    best = (run.dir / "checkpoints" / "best").resolve().name
    assert best == f"global_step_{min(step for step, line in measured.items() if line['eval/success'] == 1.0)}"
    kept = sorted(path.name for path in (run.dir / "samples" / "step_120").iterdir())
    assert kept == ["episode_000_success.gif", "episodes.jsonl"]
    assert any("robot.py" in name for name in json.loads((run.dir / "manifest.json").read_text())["user_code"])


def evaluated(directory: str) -> dict[str, float]:
    return evaluate(directory, "eval.episodes=5", "eval.action_steps=2", checkpoint="latest")


def test_ranks_evaluate_a_run_as_one_does(run: shardtune.Run) -> None:
    alone = evaluated(str(run.dir))
    assert alone["eval/success"] == 1.0
    table = (run.dir / "samples" / "latest" / "episodes.jsonl").read_text()
    assert len(table.splitlines()) == 5
    assert run_ranks(evaluated, 2, str(run.dir)) == [alone, alone]
    for folder in ("latest", "latest-2"):  # the second evaluation keeps what the first one has left
        kept = sorted(path.name for path in (run.dir / "samples" / folder).iterdir())
        assert kept == ["episode_000_success.gif", "episodes.jsonl"]
        assert (run.dir / "samples" / folder / "episodes.jsonl").read_text() == table


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"adapter": None, "model_path": "/nowhere", "model_type": "causal_lm"}, "needs a model that acts"),
        ({"adapter": f"{PARTS}:Still"}, "Still describes no model that acts"),
    ],
)
def test_a_model_that_does_not_act_plays_no_episodes(tmp_path: Path, model: dict[str, Any], what: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows(1)[0]) + "\n")
    with pytest.raises(ConfigError, match=what):
        shardtune.train(recipe(tmp_path, **model))
    assert not (tmp_path / "runs").exists()
