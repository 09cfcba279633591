"""How training ended, recorded as events: by rank 0, and by the launcher of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune.errors import Interrupted, lost_a_peer
from shardtune.launch.events import last_event, write_event
from shardtune.launch.heartbeat import stop_before
from shardtune.launch.local import RankFailed, ReportedError, is_launched


@contextmanager
def recorded_end(run_dir: Path, step: Callable[[], int], *, ranks: int, is_main: bool) -> Iterator[None]:
    """Record as an event, on rank 0, that the code inside was stopped or failed.

    What only follows from the end of another rank is left to the launcher, which knows that rank. Where a signal has
    stopped that rank, on another host, this one stops too.

    Args:
        run_dir: of the run.
        step: returns the optimizer steps done.
        ranks: of the run.
        is_main: whether this is rank 0.
    """
    try:
        yield
    except Interrupted as stopped:
        if is_main:
            write_event(run_dir, "stop", step=step(), ranks=ranks, reason=str(stopped))
        raise
    except BaseException as error:
        stopped = stop_before(error)
        if stopped is not None:
            if is_main:
                write_event(run_dir, "stop", step=step(), ranks=ranks, reason=str(stopped))
            raise stopped from None
        if is_main and not (is_launched() and lost_a_peer(error)):
            write_event(run_dir, "failed", step=step(), ranks=ranks, reason=f"{type(error).__name__}: {error}")
        raise


@contextmanager
def recorded_failure(run_dir: Path) -> Iterator[None]:
    """Record as an event, in their launcher, that the ranks failed, unless rank 0 has done so."""
    try:
        yield
    except (RankFailed, ReportedError) as failed:
        if last_event(run_dir) not in ("failed", "stop", "end"):
            write_event(run_dir, "failed", reason=str(failed))
        raise
