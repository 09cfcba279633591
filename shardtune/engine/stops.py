"""Lets the ranks of a call that its caller has interrupted leave it at the same place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardtune.engine.call_board import CallBoard, Stand
from shardtune.parallel.torch_private.processes import collectives_issued

POLL_SECONDS = 0.25
AGREE_SECONDS = 0.02


class CallInterrupted(KeyboardInterrupt):
    """Raised in a method whose caller was interrupted.

    Attributes:
        place: where: places of the call that were passed before, and collectives that this process has called. Equal on
            all ranks, if they run the same code.
    """

    def __init__(self, place: tuple[int, int]) -> None:
        super().__init__("the caller was interrupted")
        self.place = place


class Stops:
    """The places at which this rank may leave a call: before a forward, a backward pass, an optimizer's step.

    Ranks stand at different places when their caller is interrupted, and some wait in a collective for the others. Each
    counts the places that it has passed. A thread of each writes the count down, as soon as it learns of the interrupt,
    and all leave at the place after the largest: those behind go on until then. So all have run the same code, none
    waits for another, and their parts of the weights belong together.

    A rank that generates with gathered weights involves no others and changes nothing, and the tokens differ in number.
    So they do not count; if all ranks do so, each leaves before its next token.

    Args:
        board: of this rank; None: there are no others.
        remote: whether the caller is in another process; otherwise an interrupt reaches the method itself.

    Attributes:
        remote: whether an interrupt of the caller makes this rank leave a call.
    """

    def __init__(self, board: CallBoard | None, *, remote: bool) -> None:
        self._board = board
        self.remote = remote and board is not None
        self._lock = threading.Lock()
        self._number = self._passed = 0
        self._running = threading.Event()
        self._apart = self._interrupted = self._raised = False
        self._stands: dict[int, Stand] = {}
        if board is not None and remote:
            threading.Thread(target=self._watch, args=(board,), name="shardtune-interrupts", daemon=True).start()

    @contextmanager
    def during(self, number: int) -> Iterator[None]:
        """A call."""
        with self._lock:
            self._number, self._passed = number, 0
            self._apart = self._interrupted = self._raised = False
            self._stands = {}
        self._running.set()
        try:
            yield
        finally:
            with self._lock:
                self._running.clear()
        if self._board is not None and not self._interrupted:
            self._board.end(number)

    def reach(self, *, apart: bool) -> None:
        """Reach a place.

        Args:
            apart: this rank generates without the others.

        Raises:
            CallInterrupted: it is the place at which all ranks leave the call.
        """
        with self._lock:
            begins, self._apart = apart and not self._apart, apart
            if not self._interrupted or self._raised or not self._running.is_set():
                self._passed += begins or not apart
                return
        self._leave_or_pass(counts=begins or not apart)

    def end_apart(self) -> None:
        """The rank has generated what it was to.

        Raises:
            CallInterrupted: as `reach`.
        """
        with self._lock:
            ends, self._apart = self._apart, False
            if not ends or not self._interrupted or self._raised:
                return
        self._leave_or_pass(counts=False)

    def _leave_or_pass(self, *, counts: bool) -> None:
        furthest = self._furthest()
        # Before a token, or after the last one: all have to be at theirs.
        if not furthest.ended and self._passed == furthest.passed and (counts or furthest.apart):
            self._raised = True  # a method that catches it goes on
            raise CallInterrupted((self._passed, collectives_issued()))
        self._passed += counts

    def _furthest(self) -> Stand:
        """How far the rank is that is furthest; apart if all that are so far are apart."""
        assert self._board is not None
        while len(self._stands) < self._board.num_ranks:
            time.sleep(AGREE_SECONDS * bool(self._stands))
            self._stands = self._board.stands(self._number)
        most = max(stand.passed for stand in self._stands.values())
        apart = all(stand.apart for stand in self._stands.values() if stand.passed == most)
        return Stand(most, apart, any(stand.ended for stand in self._stands.values()))

    def _watch(self, board: CallBoard) -> None:
        with suppress(RuntimeError):  # rank 0 has ended, and the store with it
            while self._running.wait():
                number = self._number
                if not self._interrupted and board.is_interrupted(number):
                    self._take_note(board, number)
                time.sleep(POLL_SECONDS)

    def _take_note(self, board: CallBoard, number: int) -> None:
        with self._lock:
            if self._number != number or not self._running.is_set():
                return
            self._interrupted, stand = True, Stand(self._passed, self._apart)
        board.stand(number, stand)
