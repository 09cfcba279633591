"""The ranks of one or several engines, and requests to them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from shardtune.engine.rank_process import Failure, Host, Outcome, Request
from shardtune.errors import ParallelError, ShardtuneError

GRACE_SECONDS = 20.0
"""How long the other ranks may take after one has failed, before they count as stuck and are killed."""


class RemoteTraceback(Exception):
    """The traceback of an exception on a rank."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def stuck_error(message: str) -> ParallelError:
    """The error for a call that waits in a collective to which not all ranks come."""
    return ParallelError(
        message,
        where="a call on all ranks",
        remedy="let every rank make the same calls that involve others, as many times, in the same order; "
        "shardtune.init(watchdog_seconds=…) sets the time",
    )


class RankError(RuntimeError):
    """An exception on a rank that cannot be unpickled here; the message has its traceback."""


class Team(ABC):
    """Ranks that work together.

    Attributes:
        num_ranks: the number of ranks.
        awake: engines whose modules are in memory, and whether they take turns with others.
        dead: why the ranks can no longer be used; empty while they can.
        calls: how many calls of methods there were.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.engines: dict[str, bool] = {}
        self.awake: set[str] = set()
        self.dead = ""
        self.calls = 0
        self._one_thread = threading.RLock()

    def request(self, requests: Sequence[Request]) -> list[Any]:
        """Send each rank its request; returns the values in rank order. Threads of the caller take turns.

        Raises:
            ParallelError: the ranks are gone.
            Exception: the first failure of a rank, with its traceback as the cause.
        """
        with self._one_thread:
            return self._request(requests)

    def _request(self, requests: Sequence[Request]) -> list[Any]:
        if self.dead:
            raise ParallelError(
                f"the ranks of this engine are gone: {self.dead}",
                where=requests[0].action,
                remedy="make the engine anew, and engine.load() what was saved last; what was trained since is lost",
            )
        self.calls += requests[0].action == "call"
        try:
            outcomes = self._send(requests)
        except KeyboardInterrupt:
            self.interrupt(requests[0])
            raise
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            raise_failure(failures)
        if len({outcome.units for outcome in outcomes}) > 1:
            self.request_all(Request(requests[0].engine, "refuse_other_units"))
        return [outcome.value for outcome in outcomes]

    def request_all(self, request: Request) -> list[Any]:
        """Send the same request to every rank."""
        return self.request([request] * self.num_ranks)

    def interrupt(self, request: Request) -> None:
        """End the ranks of a call that the caller has left: they stand at different places."""
        name = request.arguments[0] if request.action == "call" else request.action
        self.dead = self.dead or f"{name} was interrupted, at different places on different ranks"
        self.close()

    @abstractmethod
    def _send(self, requests: Sequence[Request]) -> list[Outcome]: ...

    def close(self) -> None:
        """End the ranks."""
        self.dead = self.dead or "it was closed"


class InProcess(Team):
    """A single rank in this process."""

    def __init__(self, host: Host) -> None:
        super().__init__(1)
        self._host = host

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        return [Outcome(self._host.do(requests[0]))]

    def interrupt(self, request: Request) -> None:
        """The exception has ended the method itself."""

    def abandon(self, engine: str) -> None:
        """Release the module of an engine that was not closed, and to which nothing refers any more."""
        self.engines.pop(engine, None)
        self.awake.discard(engine)
        self._host.do(Request(engine, "end"))

    def close(self) -> None:
        """The process is the caller's; only the engines in it end."""


def raise_failure(failures: Sequence[Failure]) -> None:
    """Raise the original failure rather than its consequences."""
    first = next((failure for failure in failures if not failure.consequence), failures[0])
    if first.error is None:
        raise RankError(f"rank {first.rank} failed:\n{first.text}")
    if not isinstance(first.error, ShardtuneError):
        first.error.add_note(f"(on rank {first.rank})")
    raise first.error from RemoteTraceback(f"on rank {first.rank}:\n{first.text}")
