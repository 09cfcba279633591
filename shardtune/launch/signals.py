"""Signals that stop a run, and a watchdog for a vanished parent process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from shardtune.errors import Interrupted
from shardtune.launch.exit_codes import note_exit_code, remove_reports

LAUNCHER_PID = "SHARDTUNE_LAUNCHER_PID"
"""Id of the process that started this rank; it may have ended before this process can read its parent's id."""
PARENT_POLL_SECONDS = 0.25
ORPHAN_SECONDS = 60.0
"""How long a rank that has received a signal may take to save once its parent has ended."""
UNHANDLED_SECONDS = 10.0
"""How long the main thread may take to handle a signal while there is nothing to save."""
FORWARDED_SECONDS = 2.0
"""For so long a further SIGINT to a rank counts as the same one: its launcher has received it too, and passes it on."""
SIGNAL_SECONDS = 0.5
"""How much later than its parent a rank may receive a signal that is sent to both."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""A scheduler's and a user's ways to end a process; SIGHUP is a lost terminal, SIGUSR1 often Slurm's warning."""
NOTHING_TRAINED = "stopped before anything was trained; the same command starts again"
"""The message of a stop until it is known whether there is a checkpoint."""
NOT_REPORTED = "stopped; the same command continues a training from its last checkpoint, and starts anything else again"
"""The message of a stop of ranks that could not report theirs."""
BEFORE_FIRST_STEP = "stopped before the first step, so nothing is saved; the same command starts again"
BEFORE_FURTHER_STEP = "stopped before a further step; the same command continues from the last checkpoint"
AFTER_LAST_STEP = "stopped after the last step; all that was trained is saved, the same command continues"


class StopSignal:
    """Records the signals that stop a run, and stops this process at a safe point.

    While there is nothing to save (start-up, tokenising, writing `final/`) the signal raises `Interrupted` at once in
    the main thread. Inside `deferred` it is only recorded: training polls it where all ranks can stop together. A
    SIGINT after an earlier signal always raises `KeyboardInterrupt` at once.

    Attributes:
        requested: whether a signal was received.
        own_process: whether the process serves this run alone, so that it may be ended.
        message: of `Interrupted` while there is nothing to save.
    """

    def __init__(self, *, own_process: bool = False) -> None:
        self.requested = False
        self.message = NOTHING_TRAINED
        self.own_process = own_process
        self._requested_at = 0.0
        self._seen = False  # before its handler has run
        self._deferred = False
        self._failed = False  # inside `deferred`, and the error is on its way
        self._listens = False
        self._failure: BaseException | None = None
        self._wakeup = -1

    def arrived(self) -> bool:
        """Whether a signal has reached the process, even if its main thread cannot run the handler yet."""
        with suppress(BlockingIOError):
            while not self._seen and self._wakeup >= 0:
                self._seen = any(number in SIGNALS for number in os.read(self._wakeup, 64))
        return self.requested or self._seen  # only the handler sets `requested`, by which it knows a second SIGINT

    def request(self) -> None:
        """Stop as on a signal; for other threads."""
        self.requested = True

    def fail(self, error: BaseException) -> None:
        """Raise an error in the main thread; for other threads. It interrupts waiting, but no computation in C."""
        self._failure = error
        if self._listens:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    @property
    def deferring(self) -> bool:
        """Whether signals are only recorded now, because there is something to save."""
        return self._deferred

    def check(self) -> None:
        """Raise `Interrupted` if a signal was received: the handler's exception may have been caught by other code."""
        if self.requested:
            raise Interrupted(self.message)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record signals inside: stopping at once would lose work.

        After an error inside they are recorded on: a stop, which a launcher sends to the other ranks when one has
        failed, does not take the error's place.
        """
        self.check()
        self._deferred, self._failed = True, False
        try:
            yield
        except Exception:
            self._failed = True
            raise
        finally:
            self._deferred = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        outlive_output()
        now = time.monotonic()
        again = self.requested and not (is_supervised() and now - self._requested_at < FORWARDED_SECONDS)
        if not self.requested:
            self.requested, self._requested_at = True, now
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._deferred and not self._failed:
            self.check()


_current: StopSignal | None = None


def message_of_stop() -> str:
    """The message of a stop at this moment, also of one that begins with another rank."""
    return NOT_REPORTED if _current is None else _current.message


@contextmanager
def listening(*, own_process: bool = False) -> Iterator[StopSignal]:
    """Handle the signals that end a process as stop requests inside; the previous handlers are restored afterwards.

    A nested `listening` yields the outer one's `StopSignal`. Only the main thread receives signals. A SIGHUP that is
    ignored (nohup) stays ignored, and SIGUSR1 and SIGUSR2 are left to a program that handles them itself.

    Args:
        own_process: whether the process serves this run alone.
    """
    global _current
    if _current is not None and threading.current_thread() is threading.main_thread():
        yield _current
        return
    stop = StopSignal(own_process=own_process)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {
        number: handler
        for number, handler in handlers.items()
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
        or handler == signal.SIG_DFL
        or (handler == signal.SIG_IGN and number != signal.SIGHUP)
    }
    _current = stop
    try:
        with _wakeup(stop):
            for number in before:
                signal.signal(number, stop._on_signal)
            stop._listens = True
            yield stop
    finally:
        _current, stop._listens = None, False
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignore the signals that end a process from here on, except one whose handler is not of Python."""
    for number in SIGNALS:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals that end a process inside: it is ending, and its message is being printed."""
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}
    ignore()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _wakeup(stop: StopSignal) -> Iterator[None]:
    """Let `stop.arrived` see signals at once; not where the program's event loop uses this facility."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    try:
        held = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if held == -1:
            stop._wakeup = read
        else:
            signal.set_wakeup_fd(held)
        yield
    finally:
        if stop._wakeup >= 0:
            stop._wakeup = -1
            signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def outlive_output() -> None:
    """Send what is printed to nowhere once its reader is gone (a terminal, a parent's pipe): saving goes on."""
    poll = select.poll()
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(ValueError, OSError):  # it may be closed
            if stream is not None:
                poll.register(stream.fileno(), 0)
    for descriptor, _ in poll.poll(0):  # errors and hang-ups alone
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def drop_unwritten() -> None:
    """Forget what was printed and could not be written, as into a file on a full disk; what follows is tried again."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(ValueError, OSError):  # it is closed, or no file
            if stream is not None:
                _flush_nowhere(stream)


def _flush_nowhere(stream: TextIO) -> None:
    number = stream.fileno()
    kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
        stream.flush()
    finally:
        os.dup2(kept, number)
        os.close(kept)
        os.close(nowhere)


_watching = False


def is_supervised() -> bool:
    """Whether a launcher has started this process and waits for it: this package's, torchrun or accelerate."""
    return LAUNCHER_PID in os.environ or "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def end_with_parent() -> None:
    """End this process once its parent has ended: nothing stops it any more or reads its exit code.

    An orphan would train and save beside the restarted run, so it ends without saving. Only a rank that has received a
    stop signal itself, as where a scheduler signals all processes of a job, saves first, within `ORPHAN_SECONDS`; it
    holds the lock on the run directory until then.
    """
    global _watching
    if _watching:
        return
    _watching = True
    parent = int(os.environ.get(LAUNCHER_PID, os.getppid()))

    def watch() -> None:
        unhandled = 0.0
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
            unhandled = unhandled + PARENT_POLL_SECONDS if _has_nothing_to_save() else 0.0
            if unhandled > UNHANDLED_SECONDS:  # the main thread waits in C, as for a rank that never comes
                note_exit_code(Interrupted.exit_code)
                os._exit(Interrupted.exit_code)
        outlive_output()
        remove_reports()
        if _is_stopping(SIGNAL_SECONDS):
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="shardtune-parent-watch", daemon=True).start()


def _has_nothing_to_save() -> bool:
    """Whether a stop signal has reached this process while there is nothing to save."""
    return _current is not None and not _current.deferring and _current.arrived()


def _is_stopping(seconds: float) -> bool:
    """Whether a run that has something to save has received a stop signal, or does within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if _current is not None and _current.deferring and _current.arrived():
            return True
        time.sleep(PARENT_POLL_SECONDS / 5)
    return False
