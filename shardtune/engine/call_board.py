"""What the ranks of an engine and its caller write for each other beside a call, in the store where the ranks met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from shardtune.launch.watchdog.verdict import StandReport

CONNECT_SECONDS = 5.0
_FOLDER, _ENDED, _NOTHING = "shardtune/calls", "ended", "0"


@dataclass(frozen=True, slots=True)
class Stand:
    """How far a rank is in a call.

    Attributes:
        passed: the places at which it could have left the call (`stops.py`).
        apart: whether it generates without the other ranks.
        ended: whether it has ended the call.
    """

    passed: int
    apart: bool = False
    ended: bool = False


class CallBoard:
    """The board of one rank. Calls are numbered from 1, the same on all ranks and at the caller.

    Args:
        rank: of this process.
        num_ranks: of the engine.
        store: in which the ranks met.

    Attributes:
        num_ranks: of the engine.
    """

    def __init__(self, rank: int, num_ranks: int, store: dist.Store) -> None:
        self._rank, self.num_ranks = rank, num_ranks
        # A connection of its own: the main thread may wait for other ranks in the first one.
        self._store = dist.PrefixStore(_FOLDER, store.clone())  # pyright: ignore[reportAttributeAccessIssue] (no stub)
        self._store.set(f"stands/{rank}", "0 0 0")
        self._store.set(f"waits/{rank}", _NOTHING)
        if not rank:
            self._store.set("interrupted", _NOTHING)

    def end(self, number: int) -> None:
        """This rank has ended a call."""
        self._store.set(f"stands/{self._rank}", f"{number} {_ENDED} 0")

    def stand(self, number: int, stand: Stand) -> None:
        """This rank is so far in a call, of which it has learnt that its caller was interrupted."""
        self._store.set(f"stands/{self._rank}", f"{number} {stand.passed} {int(stand.apart)}")

    def wait(self, number: int) -> None:
        """This rank waits in a collective of a call; 0: it does not wait."""
        self._store.set(f"waits/{self._rank}", str(number))

    def stands(self, number: int) -> dict[int, Stand]:
        """How far the ranks are in a call, of those that have written it."""
        found: dict[int, Stand] = {}
        for rank, text in enumerate(self._of_all("stands")):
            of, passed, apart = text.split()
            if int(of) == number:
                found[rank] = Stand(0, ended=True) if passed == _ENDED else Stand(int(passed), apart == "1")
        return found

    def ended(self, number: int) -> list[int]:
        """The ranks that have ended a call, if all others wait in it: they wait for ever."""
        found = [rank for rank, stand in self.stands(number).items() if stand.ended]
        waits = self._of_all("waits")
        return found if all(rank in found or int(waits[rank]) == number for rank in range(self.num_ranks)) else []

    def is_interrupted(self, number: int) -> bool:
        """Whether the caller of a call was interrupted."""
        return int(self._store.get("interrupted")) == number

    def is_stuck(self, report: StandReport) -> None:
        """This rank waits in vain in a call; for a caller that reads `CallerBoard.stuck`."""
        self._store.set(f"stuck/{self._rank}", report.to_json())

    def _of_all(self, what: str) -> list[str]:
        return [value.decode() for value in self._store.multi_get([f"{what}/{r}" for r in range(self.num_ranks)])]


class CallerBoard:
    """The same board, for the caller of ranks in other processes.

    Args:
        store: a connection to the store in which the ranks met.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(_FOLDER, store)

    @classmethod
    def connect(cls, address: str, port: int) -> Self | None:
        """The board of ranks that met there; None where this process does not reach them."""
        try:
            limit = timedelta(seconds=CONNECT_SECONDS)
            return cls(dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False))
        except (RuntimeError, OSError):
            return None

    def interrupt(self, number: int) -> None:
        """Let the ranks know that the caller of a call was interrupted."""
        self._store.set("interrupted", str(number))

    def stuck(self, num_ranks: int) -> Mapping[int, StandReport]:
        """The ranks that wait in vain, and where."""
        keys = {rank: f"stuck/{rank}" for rank in range(num_ranks)}
        return {
            rank: StandReport.from_json(self._store.get(key).decode())
            for rank, key in keys.items()
            if self._store.check([key])
        }
