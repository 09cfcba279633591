"""Closed-loop evaluation: a policy plays episodes of an environment; the metric is the share that succeeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from shardtune.batch.seeds import derive_seed
from shardtune.config import Recipe
from shardtune.data.durable import write_text
from shardtune.errors import ModelError
from shardtune.evaluate.environments.find import (
    EnvironmentSource,
    checked_render,
    checked_reset,
    checked_step,
    close_all,
)
from shardtune.evaluate.episode_video import Film, check_format, keep_film
from shardtune.models.action.chunks import ActionChunks, ObservationHistory, check_finite
from shardtune.models.action.environment import Environment, Observation, Policy
from shardtune.parallel.ranks import Ranks

METRICS = ("success", "success_low", "success_high", "episode_length")
Z_95 = 1.959963984540054
TABLE = "episodes.jsonl"
WHERE = "closed-loop evaluation"


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """The outcome of one episode, as a line of the table has it.

    Attributes:
        episode: its number.
        seed: with which the environment was reset.
        instruction: the task.
        success: whether the task was done.
        steps: number of actions.
        video: file of its video, beside the table.
    """

    episode: int
    seed: int
    instruction: str
    success: bool
    steps: int
    video: str | None = None


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The settings of an evaluation in an environment.

    Attributes:
        source: of the environments.
        episodes: number of episodes.
        seed: from which each episode's seed is derived.
        action_steps: actions of a chunk that are taken before the policy is called again; None: all, or 1 with temporal
            ensembling.
        at_once: episodes that a rank plays side by side, one environment each.
        videos: number of episodes with a video, from the first on.
        video_format: gif or mp4.
        temporal_ensembling: the exponent of the weights of overlapping chunks; None: chunks do not overlap.
        observation_steps: frames that the policy sees.
    """

    source: EnvironmentSource
    episodes: int
    seed: int
    action_steps: int | None
    at_once: int
    videos: int
    video_format: str
    temporal_ensembling: float | None = None
    observation_steps: int = 1

    @classmethod
    def of(cls, recipe: Recipe) -> ClosedLoop | None:
        """The settings of a recipe; None without `eval.environment`."""
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
            config.temporal_ensembling,
        )

    def episode_seed(self, episode: int) -> int:
        """The seed of an episode, the same on any rank: a number from 0 to 2**32 - 1."""
        return derive_seed(self.seed, "episode", episode) % 2**32

    def check(self) -> Observation:
        """Make one environment and begin the first episode, so that its faults show before training starts.

        Returns:
            its first observation.

        Raises:
            ConfigError: it cannot be made, or its `reset` fails or returns no observation.
        """
        check_format(self.video_format)
        environment = self.source.make()
        observation = checked_reset(environment, self.source, 0, self.episode_seed(0))
        close_all([environment], self.source)
        return observation


@dataclass(frozen=True, slots=True)
class Score:
    """The outcomes of a policy's episodes.

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
        write_text(folder / TABLE, "\n".join(lines) + "\n", durably=False)


def wilson_interval(successes: int, number: int, z: float = Z_95) -> tuple[float, float]:
    """The confidence interval of a success rate (Wilson, 1927, JASA 22:209-212), by default of 95 %."""
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

    Episode i is the same on any number of ranks, and is played by data-parallel rank i mod ranks: of 5 episodes on 2
    ranks, rank 0 plays 0, 2 and 4 and rank 1 plays 1 and 3. All ranks call the policy equally often, since it may be a
    model that is sharded over them: a rank with no episodes left passes an old observation and ignores the actions.

    Args:
        closed_loop: the settings.
        policy: the model; called at the same time on every rank.
        ranks: among which the episodes are divided.
        folder: for the table and the videos; None: they are not written.
        poll: called before each call of the policy, by all ranks alike.

    Returns:
        The score, the same on every rank.
    """
    numbers = range(ranks.data_rank, closed_loop.episodes, ranks.num_data_ranks)
    if folder is not None and ranks.is_main:  # before the first collective, after which ranks write
        _clear(folder)
    films = folder is not None and ranks.counts
    table = _Table(closed_loop, iter(numbers), min(closed_loop.at_once, len(numbers)), folder if films else None)
    try:
        while ranks.largest(float(table.live)):
            poll()
            observations = table.observations()
            chunks = _checked(policy(observations), len(observations))
            table.act(chunks)
    finally:
        table.close()
    played = [episode for found in ranks.gather(table.played if ranks.counts else []) for episode in found]
    score = Score(sorted(played, key=lambda episode: episode.episode))
    if folder is not None and ranks.is_main:
        score.keep(folder)
    return score


def _clear(folder: Path) -> None:
    """Remove the files of an earlier evaluation."""
    for file in folder.glob("episode*"):
        file.unlink()


def _checked(actions: np.ndarray, number: int) -> np.ndarray:
    """The policy's chunks, float32 [number, C, A]."""
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 3 or len(actions) != number:
        raise ModelError(
            f"the policy gave actions of shape {list(actions.shape)} for {number} observations",
            where=WHERE,
            remedy=f"return [{number}, steps of a chunk, dimensions]",
        )
    return actions


@dataclass(slots=True)
class _Seat:
    """One environment, and the episode played in it."""

    environment: Environment
    episode: int
    seed: int
    observation: Observation
    chunks: ActionChunks
    history: ObservationHistory
    steps: int = 0
    film: Film = field(default_factory=Film)


class _Table:
    """The episodes that one rank plays side by side.

    Args:
        closed_loop: the settings.
        numbers: of this rank's episodes.
        size: number of environments.
        folder: for the videos; None: there are none.

    Attributes:
        played: episodes that have ended.
    """

    def __init__(self, closed_loop: ClosedLoop, numbers: Iterator[int], size: int, folder: Path | None) -> None:
        self._closed_loop = closed_loop
        self._numbers = numbers
        self._folder = folder
        self._environments: list[Environment] = []
        self._seats: list[_Seat] = []
        self._idle: list[Observation] = []  # for the calls of the policy after this rank's last episode
        self.played: list[PlayedEpisode] = []
        try:
            for _ in range(size):
                self._environments.append(closed_loop.source.make())
                self._begin(self._environments[-1])
            if not size:  # more ranks than episodes
                self._environments.append(closed_loop.source.make())
                seen = checked_reset(self._environments[0], closed_loop.source, 0, closed_loop.episode_seed(0))
                self._idle = [ObservationHistory(closed_loop.observation_steps).see(seen)]
        except BaseException:
            self.close()
            raise

    @property
    def live(self) -> int:
        """Episodes that are being played."""
        return len(self._seats)

    def observations(self) -> list[Observation]:
        """The input of the policy's next call: one observation of each live episode, or an old one."""
        return [seat.observation for seat in self._seats] or self._idle

    def act(self, chunks: np.ndarray) -> None:
        """Take actions of chunks [observations, C, A]; an episode that ends is followed by the next one."""
        seats, self._seats = self._seats, []
        for seat, chunk in zip(seats, chunks, strict=False):  # without episodes there is one chunk, which is ignored
            place = f", for episode {seat.episode}, seed {seat.seed}, before action {seat.steps + 1}"
            check_finite(chunk, place, WHERE)
            seat.chunks.add(chunk)
            ended = False
            while not ended and not seat.chunks.empty:
                ended = self._step(seat, seat.chunks.take())
            if ended:
                self._idle = [seat.observation]
                self._begin(seat.environment)
            else:
                self._seats.append(seat)

    def _begin(self, environment: Environment) -> None:
        """Begin the next episode, if one is left."""
        number = next(self._numbers, None)
        if number is None:
            return
        seed = self._closed_loop.episode_seed(number)
        observation = checked_reset(environment, self._closed_loop.source, number, seed)
        chunks = ActionChunks(self._closed_loop.action_steps, self._closed_loop.temporal_ensembling)
        history = ObservationHistory(self._closed_loop.observation_steps)
        seat = _Seat(environment, number, seed, history.see(observation), chunks, history)
        self._show(seat)
        self._seats.append(seat)

    def _step(self, seat: _Seat, action: np.ndarray) -> bool:
        """Take one action; returns whether the episode has ended."""
        place = f"episode {seat.episode}, seed {seat.seed}, action {seat.steps + 1}"
        outcome = checked_step(seat.environment, self._closed_loop.source, action, place)
        seat.observation = seat.history.see(outcome.observation)
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
            place = f"episode {seat.episode}, seed {seat.seed}, after action {seat.steps}"
            rendered = checked_render(seat.environment, self._closed_loop.source, place)
            seat.film.add(next(iter(seat.observation["images"].values())) if rendered is None else rendered)

    def close(self) -> None:
        close_all(self._environments, self._closed_loop.source)
