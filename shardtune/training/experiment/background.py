"""A service in a thread of its own: a slow or failing one costs training nothing.

It is started there too: in the main thread, packages of services replace the handlers of signals.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from shardtune.training.experiment.run import Experiment

LONGEST_QUEUE = 10_000
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a service to receive what is still queued."""


class Background:
    """Calls an experiment in order in a thread. What failed there is raised by the next call here.

    Args:
        name: of the service.
        start: makes the experiment.

    Raises:
        Exception: what `start` raises.
    """

    def __init__(self, name: str, start: Callable[[], Experiment]) -> None:
        self._start = start
        self._calls: queue.Queue[Callable[[Experiment], None] | None] = queue.Queue(LONGEST_QUEUE)
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = dict(metrics)
        self._put(lambda experiment: experiment.log(step, line))

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        self._put(lambda experiment: experiment.samples(step, name, answers))

    def close(self) -> None:
        """Wait until everything is logged.

        Raises:
            TimeoutError: it takes longer than `CLOSE_SECONDS`.
        """
        self._put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"{self._calls.qsize() + 1} calls were not done {CLOSE_SECONDS:.0f} s after the end")

    def _put(self, call: Callable[[Experiment], None] | None) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{LONGEST_QUEUE:,} calls are waiting for it") from None

    def _work(self) -> None:
        experiment: Experiment | None = None
        try:
            experiment = self._start()
            self._started.set()
            while (call := self._calls.get()) is not None:
                call(experiment)
            experiment.close()
        except BaseException as error:  # of any kind, SystemExit too: it belongs to the service, not to the run
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._started.set()
            if experiment is not None:
                with suppress(Exception):
                    experiment.close()
