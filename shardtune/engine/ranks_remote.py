"""Ranks in other processes: what is the same for those of this machine and those on Ray."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from shardtune.engine.call_board import CallerBoard
from shardtune.engine.call_watch import RETURNED, SILENT, explain
from shardtune.engine.rank_process import Failure, Outcome, Request
from shardtune.engine.ranks import Team, stuck_error
from shardtune.engine.torch_settings import TorchSettings
from shardtune.launch.watchdog.verdict import StandReport

INTERRUPT_SECONDS = 30.0
"""How long the ranks of an interrupted call may take to come to a place at which all leave it."""
QUIET_SECONDS = 2.0
"""After so much of it a message says what is waited for."""
logger = logging.getLogger(__name__)


class RemoteRanks(Team):
    """Ranks in other processes, which go on with a call while its caller is interrupted.

    Attributes:
        in_order: whether the ranks have their requests, and no answer is half read: the rest can still be waited for.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.in_order = False

    @property
    @abstractmethod
    def _address(self) -> tuple[str, int]:
        """The address and the port at which the ranks met."""

    @abstractmethod
    def _wait(self, seconds: float | None) -> list[Outcome] | None:
        """The outcomes of the requests that were sent, in rank order; None if they are not there in time."""

    def _request(self, requests: Sequence[Request]) -> list[Any]:
        settings = TorchSettings.here()
        dressed = {id(request): replace(request, settings=settings) for request in requests}
        return super()._request([dressed[id(request)] for request in requests])  # equal ones stay one object

    @cached_property
    def _board(self) -> CallerBoard | None:
        return CallerBoard.connect(*self._address) if self.num_ranks > 1 else None

    def interrupt(self, request: Request) -> None:
        """Let the ranks leave the call of an interrupted caller together, or end them.

        If they went on, they would change weights behind its back.
        """
        left = False
        with suppress(KeyboardInterrupt):  # once more: end them now
            left = self.in_order and request.action == "call" and self._leave_together(str(request.arguments[0]))
        if not left:
            super().interrupt(request)

    def _leave_together(self, name: str) -> bool:
        """Whether all ranks have left the call at the same place, or have ended it."""
        if self._board is None:
            return False
        self._board.interrupt(self.calls)
        outcomes = self._wait(QUIET_SECONDS)
        if outcomes is None:
            logger.warning(
                "%s was interrupted: its ranks leave it before their next forward, backward pass or step of an "
                "optimizer, or are ended in %.0f s, or at once by another interrupt",
                name,
                INTERRUPT_SECONDS - QUIET_SECONDS,
            )
            outcomes = self._wait(INTERRUPT_SECONDS - QUIET_SECONDS)
        return outcomes is not None and not self.dead and len({outcome.left for outcome in outcomes}) == 1

    def _end_stuck(self, found: Mapping[int, Outcome], silent: list[int]) -> list[Outcome] | None:
        """End ranks of which some wait for others that do not come; returns the outcomes, or None if none does.

        Args:
            found: by rank.
            silent: the other ranks.
        """
        stands = stands_of(found)
        if not stands:
            return None
        others = {rank: RETURNED for rank in found if rank not in stands} or dict.fromkeys(silent, SILENT)
        error = stuck_error(explain(stands, others, self.num_ranks))
        self.dead = error.what.splitlines()[0]
        self.close()
        return [Outcome(failure=Failure(rank, error, str(error), False)) for rank in range(self.num_ranks)]


def stands_of(found: Mapping[int, Outcome]) -> dict[int, StandReport]:
    """The reports of the ranks that wait in vain."""
    failures = {rank: outcome.failure for rank, outcome in found.items()}
    return {rank: failure.stands for rank, failure in failures.items() if failure and failure.stands}


def stuck_outcome(report: StandReport) -> Outcome:
    """The outcome of a call from which a rank's main thread does not return."""
    return Outcome(failure=Failure(report.rank, None, "", False, report))
