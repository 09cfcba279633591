"""A lock between processes that outlives no dead holder: its holder's heartbeat keeps it, silence frees it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT_SECONDS = 1.0
STALE_SECONDS = 10.0


class HeartbeatLock:
    """A file that exists while someone works, touched every second.

    Two holders are possible only if one was silent for `stale_after` seconds and is still alive; whatever the lock
    guards must therefore stay correct, if wasteful, when done twice.

    Args:
        path: the lock file; its directory exists and is writable.
        stale_after: seconds without a heartbeat, by this process's own clock, after which the holder counts as dead.
        beat_every: seconds between heartbeats.
    """

    def __init__(self, path: Path, stale_after: float = STALE_SECONDS, beat_every: float = BEAT_SECONDS) -> None:
        self._path = path
        self._stale_after = stale_after
        self._beat_every = beat_every
        self._token = uuid.uuid4().hex

    @contextmanager
    def hold(self, done: Callable[[], bool], waiting: Callable[[str, float], None]) -> Iterator[bool]:
        """Yields True with the lock held, or False as soon as `done()` says that another holder finished the work.

        Args:
            waiting: called about every second with who holds the lock and the seconds waited so far.
        """
        if not self._acquire(done, waiting):
            yield False
            return
        stop = threading.Event()
        beat = threading.Thread(target=self._beat, args=(stop,), daemon=True, name="cache-lock-heartbeat")
        beat.start()
        try:
            yield True
        finally:
            stop.set()
            beat.join()
            self._release()

    def _acquire(self, done: Callable[[], bool], waiting: Callable[[str, float], None]) -> bool:
        began = spoken = time.monotonic()
        seen, seen_at = None, began
        while True:
            if done():
                return False
            if self._create():
                return True
            now = time.monotonic()
            beat = self._last_beat()
            if beat != seen:
                seen, seen_at = beat, now
            if beat is not None and (now - seen_at > self._stale_after or self._holder_is_dead()):
                if self._take_over():
                    return True
                seen_at = time.monotonic()
            if now - spoken >= 1.0:
                waiting(self._holder(), now - began)
                spoken = now
            time.sleep(0.05)

    def _content(self) -> str:
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": self._token})

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self._content())
        return True

    def _take_over(self) -> bool:
        """Replaces a dead holder's file; of several who try, the one whose file stays is the holder."""
        partial = self._path.with_name(f".{self._path.name}.{self._token}")
        partial.write_text(self._content())
        partial.replace(self._path)
        time.sleep(0.2)
        return self._read().get("token") == self._token

    def _read(self) -> dict:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _holder(self) -> str:
        content = self._read()
        return f"process {content.get('pid', '?')} on {content.get('host', '?')}"

    def _last_beat(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _holder_is_dead(self) -> bool:
        content = self._read()
        pid = content.get("pid")
        if content.get("host") != socket.gethostname() or not isinstance(pid, int):
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(self._beat_every):
            with suppress(OSError):
                os.utime(self._path)

    def _release(self) -> None:
        if self._read().get("token") == self._token:
            self._path.unlink(missing_ok=True)
