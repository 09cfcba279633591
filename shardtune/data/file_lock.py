"""A lock between processes that ends with its holder: at once on one machine, after a timeout on another."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BEAT_SECONDS = 1.0
STALE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TAKE_OVER_SECONDS = 0.2


class FileLock:
    """A file that exists while a process holds the lock; its content names the holder.

    Between processes of one machine `flock` decides, which the kernel releases with the holder's death. Not every
    network file system passes it on to other machines, so the holder also touches the file every second: one on another
    machine counts as dead when its file has not changed for a while. Where `flock` does not exclude anybody (tried when
    the lock is acquired: it may fail, always refuse, or be granted to all), that holds on one machine too. Two holders
    are possible only on such file systems, if one makes no heartbeat for `stale_after` seconds and is still alive.

    Args:
        path: the lock file; its directory exists and is writable.
        stale_after: seconds without a heartbeat, by this process's own clock, after which a holder on another machine
            counts as dead.
        beat_every: seconds between heartbeats.

    Attributes:
        holder_alive: whether the last `acquire` found a heartbeat of another holder.
        is_gone: whether its folder has been removed or renamed while it was held; noticed by a heartbeat.
    """

    def __init__(self, path: Path, stale_after: float = STALE_SECONDS, beat_every: float = BEAT_SECONDS) -> None:
        self._path = path
        self._stale_after = stale_after
        self._beat_every = beat_every
        self._token = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._beat_thread: threading.Thread | None = None
        self._seen: tuple[int | None, float] = None, 0.0  # the last heartbeat of another, and when it was first seen
        self._excludes = True
        self.holder_alive = False
        self.is_gone = False

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self, until: Callable[[str, float], bool]) -> bool:
        """Wait for the lock.

        Args:
            until: called between attempts with the holder and the seconds waited so far; True ends the wait.

        Returns:
            Whether the lock is held.

        Raises:
            OSError: the file cannot be written.
        """
        began = time.monotonic()
        self._seen, self.holder_alive, self.is_gone = (None, began), False, False
        self._excludes = _flock_excludes(self._path.parent)
        while not self._try():
            if until(self.holder(), time.monotonic() - began):
                return False
            time.sleep(_POLL_SECONDS)
        self._stop.clear()
        self._beat_thread = threading.Thread(target=self._beat, daemon=True, name="lock-heartbeat")
        self._beat_thread.start()
        return True

    def release(self) -> None:
        """Release the lock, if it is held, and remove its file."""
        if self._descriptor is None:
            return
        if self._beat_thread is not None:
            self._stop.set()
            self._beat_thread.join()
        if self._content().get("token") == self._token:  # the directory may have moved, and the path be another's
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # a file system without it
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # explicitly: processes forked meanwhile have the file open
        os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> str:
        """The process that the file names, for a message."""
        content = self._content()
        return (
            f"process {content['pid']} on {content['host']}" if {"pid", "host"} <= content.keys() else "another process"
        )

    def in_use(self) -> bool:
        """Whether another process holds the lock; changes nothing, and waits for a heartbeat from another machine."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without it
            return self._is_touched()
        finally:
            os.close(descriptor)
        return self._content().get("host") != socket.gethostname() and self._is_touched()

    def _is_touched(self) -> bool:
        try:
            before = self._path.stat().st_mtime_ns
            time.sleep(2 * self._beat_every)
            return self._path.stat().st_mtime_ns != before
        except OSError:
            return False

    def _try(self) -> bool:
        try:
            descriptor, is_new = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644), True
        except FileExistsError:
            try:
                descriptor, is_new = os.open(self._path, os.O_RDWR), False
            except FileNotFoundError:  # released in between
                return False
        try:
            if self._claim(descriptor, is_new):
                self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return self.held

    def _claim(self, descriptor: int, is_new: bool) -> bool:
        granted = _flock(descriptor) if self._excludes else None
        if granted is False:
            self.holder_alive = True
            return False
        if not self._is_at_path(descriptor) or (not is_new and self._beats(exact=granted is not None)):
            return False
        self._sign(descriptor)
        if is_new:
            return True
        time.sleep(_TAKE_OVER_SECONDS)  # if several machines take over, the last one to write its name is the holder
        return self._content().get("token") == self._token

    def _is_at_path(self, descriptor: int) -> bool:
        """Whether the open file has not been released, which removes it, since it was opened."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        return False

    def _beats(self, *, exact: bool) -> bool:
        """Whether the file may belong to a live process whose `flock` is not visible here.

        Args:
            exact: `flock` works, so a holder named on this machine is dead, as it would have the lock; likewise a
                process that created the file and has not written its name yet.
        """
        status = self._path.stat()
        if exact and (not status.st_size or self._content().get("host") == socket.gethostname()):
            return False
        beat, now = status.st_mtime_ns, time.monotonic()
        if beat != self._seen[0]:
            self.holder_alive |= self._seen[0] is not None
            self._seen = beat, now
        return now - self._seen[1] <= self._stale_after

    def _sign(self, descriptor: int) -> None:
        content = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)

    def _content(self) -> dict[str, object]:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_every):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                self.is_gone = not self._path.parent.is_dir()
            except OSError:  # the file system does not answer now; the next one may reach it
                continue


def _flock(descriptor: int) -> bool:
    """Whether this process has the file's `flock` now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _flock_excludes(folder: Path) -> bool:
    """Whether the file system's `flock` works: granted once, and refused to a second opener of the same file."""
    probe = folder / f".lock-probe-{uuid.uuid4().hex[:8]}"
    first = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    try:
        second = os.open(probe, os.O_RDWR)
        try:
            return _flock(first) and not _flock(second)
        finally:
            os.close(second)
    finally:
        os.close(first)
        probe.unlink(missing_ok=True)
