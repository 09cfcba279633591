"""Closed-loop evaluation: a policy plays episodes of an environment, and what counts is how many of them succeed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from shardtune.config import Recipe
from shardtune.data.loader.order import derive_seed
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.environments.find import EnvironmentSource, acted, begun
from shardtune.evaluate.episode_video import Film, check_format, keep_film
from shardtune.models.action.environment import Environment, Observation, Policy
from shardtune.parallel.ranks import Ranks

METRICS = ("success", "success_low", "success_high", "episode_length")
Z_95 = 1.959963984540054
TABLE = "episodes.jsonl"


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """How one episode went.

    Attributes:
        episode: its number.
        seed: that it was reset with.
        instruction: what was to be done.
        success: whether it was.
        steps: actions that were taken.
        video: the file beside the table that shows it.
    """

    episode: int
    seed: int
    instruction: str
    success: bool
    steps: int
    video: str | None = None


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """What an evaluation in an environment does.

    Attributes:
        source: of the environments.
        episodes: how many are played.
        seed: from which each episode's seed follows.
        action_steps: how many actions of a chunk are taken before the policy is asked again; None: all.
        at_once: episodes that a rank plays side by side, one environment each.
        videos: of the first so many episodes.
        video_format: gif or mp4.
    """

    source: EnvironmentSource
    episodes: int
    seed: int
    action_steps: int | None
    at_once: int
    videos: int
    video_format: str

    @classmethod
    def of(cls, recipe: Recipe) -> ClosedLoop | None:
        """The one that a recipe asks for; None without `eval.environment`."""
        config = recipe.eval
        if config.environment is None:
            return None
        return cls(
            EnvironmentSource(config.environment, config.environment_options),
            config.episodes,
            config.episode_seed,
            config.action_steps,
            config.episodes_at_once,
            config.videos,
            config.video_format,
        )

    def episode_seed(self, episode: int) -> int:
        """The seed of an episode, whoever plays it: a number from 0 to 2**32 - 1."""
        return derive_seed(self.seed, "episode", episode) % 2**32

    def check(self) -> None:
        """Make one environment and begin the first episode, to find what is wrong with it while nothing is lost.

        Raises:
            ConfigError: it cannot be made, or its `reset` fails or returns what is no observation.
        """
        check_format(self.video_format)
        environment = self.source.make()
        begun(environment, self.source, 0, self.episode_seed(0))
        environment.close()


@dataclass(frozen=True, slots=True)
class Score:
    """How often a policy succeeded.

    Attributes:
        episodes: all of them, in order.
    """

    episodes: Sequence[PlayedEpisode]

    def metrics(self) -> dict[str, float]:
        """The share of episodes that succeeded, its 95 % confidence interval, and the mean number of actions."""
        number, successes = len(self.episodes), sum(episode.success for episode in self.episodes)
        low, high = wilson_interval(successes, number)
        length = sum(episode.steps for episode in self.episodes) / number
        return dict(zip(METRICS, (successes / number, low, high, length), strict=True))

    def keep(self, folder: Path) -> None:
        """Write the table of episodes."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(episode), ensure_ascii=False) for episode in self.episodes]
        (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def wilson_interval(successes: int, number: int, z: float = Z_95) -> tuple[float, float]:
    """The interval that holds the true share of successes (Wilson, 1927, JASA 22:209-212), by default with 95 %."""
    share, spread = successes / number, z * z / number
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / number + spread / (4 * number))
    return (0.0 if not successes else middle - half), (1.0 if successes == number else middle + half)


def play(
    closed_loop: ClosedLoop,
    policy: Policy,
    ranks: Ranks,
    *,
    folder: Path | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Score:
    """Play all episodes on all ranks.

    Episode i is the same on any number of ranks, and goes to data-parallel rank i mod ranks. Every rank calls the
    policy equally often, since the policy may be a model that is sharded over them: one that has no episodes left asks
    about an old observation and leaves the answer.

    Args:
        closed_loop: what is played.
        policy: the model; called at the same time on every rank.
        ranks: that share the episodes.
        folder: where the table and the videos go; None: nowhere.
        poll: called before each call of the policy, by all ranks alike.

    Returns:
        The score, the same on every rank.
    """
    numbers = range(ranks.data_rank, closed_loop.episodes, ranks.num_data_ranks)
    if folder is not None and ranks.is_main:  # before the first reduction, behind which ranks write
        _clear(folder)
    films = folder is not None and ranks.counts
    table = _Table(closed_loop, iter(numbers), min(closed_loop.at_once, len(numbers)), folder if films else None)
    try:
        while ranks.largest(float(table.live)):
            poll()
            observations = table.observations()
            chunks = _checked(policy(observations), len(observations), closed_loop.action_steps)
            table.act(chunks)
    finally:
        table.close()
    played = [episode for found in ranks.gather(table.played if ranks.counts else []) for episode in found]
    score = Score(sorted(played, key=lambda episode: episode.episode))
    if folder is not None and ranks.is_main:
        score.keep(folder)
    return score


def _clear(folder: Path) -> None:
    """Take away what an earlier evaluation left there."""
    for file in folder.glob("episode*"):
        file.unlink()


def _checked(actions: np.ndarray, number: int, action_steps: int | None) -> np.ndarray:
    """The actions that are taken of what the policy gave, float32 [number, steps, A]."""
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 3 or len(actions) != number:
        raise ModelError(
            f"the policy gave actions of shape {list(actions.shape)} for {number} observations",
            where="closed-loop evaluation",
            remedy=f"return [{number}, steps of a chunk, dimensions]",
        )
    if action_steps is not None and action_steps > actions.shape[1]:
        raise ConfigError(
            f"eval.action_steps is {action_steps}, and the model gives chunks of {actions.shape[1]} actions",
            where="eval.action_steps",
            remedy=f"set it to {actions.shape[1]} or less",
        )
    return actions[:, :action_steps]


@dataclass(slots=True)
class _Seat:
    """One environment, and the episode that is played in it."""

    environment: Environment
    episode: int
    seed: int
    observation: Observation
    steps: int = 0
    film: Film = field(default_factory=Film)


class _Table:
    """The episodes that one rank plays side by side.

    Args:
        closed_loop: what is played.
        numbers: of this rank's episodes.
        size: environments.
        folder: where videos go; None: there are none.

    Attributes:
        played: episodes that have ended.
    """

    def __init__(self, closed_loop: ClosedLoop, numbers: Iterator[int], size: int, folder: Path | None) -> None:
        self._closed_loop = closed_loop
        self._numbers = numbers
        self._folder = folder
        self._environments: list[Environment] = []
        self._seats: list[_Seat] = []
        self._idle: Observation | None = None
        self.played: list[PlayedEpisode] = []
        try:
            for _ in range(size):
                self._environments.append(closed_loop.source.make())
                self._begin(self._environments[-1])
            if not size:  # more ranks than episodes
                self._environments.append(closed_loop.source.make())
                self._idle = begun(self._environments[0], closed_loop.source, 0, closed_loop.episode_seed(0))
        except BaseException:
            self.close()
            raise

    @property
    def live(self) -> int:
        """Episodes that are being played."""
        return len(self._seats)

    def observations(self) -> list[Observation]:
        """What the policy is asked about, at least one."""
        if self._seats:
            return [seat.observation for seat in self._seats]
        assert self._idle is not None
        return [self._idle]

    def act(self, chunks: np.ndarray) -> None:
        """Take actions [observations, steps, A], until an episode ends; where one has ended the next one begins."""
        seats, self._seats = self._seats, []
        for seat, chunk in zip(seats, chunks, strict=False):  # a rank without episodes has an answer to leave
            if any(self._step(seat, action) for action in chunk):
                self._idle = seat.observation
                self._begin(seat.environment)
            else:
                self._seats.append(seat)

    def _begin(self, environment: Environment) -> None:
        """Begin the next episode that is left."""
        number = next(self._numbers, None)
        if number is None:
            return
        seed = self._closed_loop.episode_seed(number)
        seat = _Seat(environment, number, seed, begun(environment, self._closed_loop.source, number, seed))
        self._show(seat)
        self._seats.append(seat)

    def _step(self, seat: _Seat, action: np.ndarray) -> bool:
        """Take one action; returns whether the episode has ended."""
        place = f"episode {seat.episode}, seed {seat.seed}, action {seat.steps + 1}"
        outcome = acted(seat.environment, self._closed_loop.source, action.copy(), place)
        seat.observation = outcome.observation
        seat.steps += 1
        self._show(seat)
        if not (outcome.success or outcome.done or seat.steps >= seat.environment.max_steps):
            return False
        self._end(seat, success=outcome.success)
        return True

    def _end(self, seat: _Seat, *, success: bool) -> None:
        video = None
        if self._shown(seat) and self._folder is not None:
            video = f"episode_{seat.episode:03d}_{'success' if success else 'failure'}.{self._closed_loop.video_format}"
            keep_film(seat.film, self._folder / video, seat.environment.frames_per_second, success=success)
        instruction = seat.observation["instruction"]
        self.played.append(PlayedEpisode(seat.episode, seat.seed, instruction, success, seat.steps, video))

    def _shown(self, seat: _Seat) -> bool:
        return self._folder is not None and seat.episode < self._closed_loop.videos

    def _show(self, seat: _Seat) -> None:
        if self._shown(seat):
            rendered = seat.environment.render()
            seat.film.add(next(iter(seat.observation["images"].values())) if rendered is None else rendered)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()
