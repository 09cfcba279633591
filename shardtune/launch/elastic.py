"""An elastic launch: after a rank is lost, the remaining number of ranks is started again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtune.launch.events import write_event
from shardtune.launch.local import LAUNCH_ID, RESTARTS, RankLost, RanksStuck
from shardtune.launch.outcome import recorded_failure
from shardtune.launch.signals import StopSignal

Start = Callable[[int, Mapping[str, str]], None]
"""Starts this many ranks with additional environment variables and waits for them; raises their error."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """The limits on restarts after lost ranks.

    Attributes:
        most: how often ranks may be started again.
        workers: ranks of the first start.
        fewest: ranks needed to continue.
    """

    most: int
    workers: int
    fewest: int


def run_elastic(
    start: Start,
    restarts: Restarts,
    *,
    left: Callable[[list[int], int], int],
    fits: Callable[[int], bool],
    stop: StopSignal,
    report: Callable[[str], None],
    run_dir: Path,
) -> None:
    """Start ranks; after a loss restart the remaining ones from the last checkpoint, within the limits.

    Args:
        start: starts ranks and waits for them.
        restarts: how often, and how many.
        left: of these numbers of ranks (the largest first) and the number of survivors, the one to start; 0: none.
        fits: whether a number of ranks can have the layout of the recipe.
        stop: checked between two starts.
        report: receives messages for the user.
        run_dir: where losses, restarts and failures are recorded as events.

    Raises:
        RankLost: the restarts are used up, or too few ranks are left.
    """
    workers, launch = restarts.workers, uuid.uuid4().hex
    with recorded_failure(run_dir):
        for again in range(restarts.most + 1):
            stop.check()
            try:
                start(workers, {LAUNCH_ID: launch, RESTARTS: str(again)})
                return
            except RankLost as lost:
                if not isinstance(lost, RanksStuck):  # the watchdog has recorded that
                    write_event(run_dir, "lost", ranks=workers, reason=str(lost), lost_ranks=list(lost.ranks))
                if again == restarts.most:
                    raise _exhausted(lost, restarts) from None
                stop.check()
                numbers = [number for number in range(restarts.workers, restarts.fewest - 1, -1) if fits(number)]
                before, workers = workers, left(numbers, workers - len(lost.ranks))
                if not workers:
                    few = f"of {before} workers fewer than runner.min_ranks ({restarts.fewest}) are left"
                    raise RankLost(
                        f"{lost}\n{few}; the same command goes on from the last checkpoint", lost.ranks
                    ) from None
                noun = "worker" if workers == 1 else "workers"
                what = f"restart {again + 1} of {restarts.most}, from the last checkpoint, on {workers} {noun}"
                write_event(run_dir, "restart", ranks=workers, reason=what)
                report(f"{lost}; {what}")


def _exhausted(lost: RankLost, restarts: Restarts) -> RankLost:
    if not restarts.most:
        return lost
    return type(lost)(f"{lost}\nrunner.max_restarts ({restarts.most}) is used up", lost.ranks)
