"""What each rank on this machine prints, kept in `logs/` of the run directory besides the terminal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from shardtune.launch.events import now

LOGS = "logs"
BEGUN = "begun"
"""The file in the launcher's report directory by which rank 0 reports that the run directory is made."""
BLOCK = 1 << 16
STDOUT, STDERR = 1, 2
DRAIN_SECONDS = 5.0


def log_file(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank_{rank}.log"


class RankLog:
    """Copies the output of one rank to this process's own and to the rank's file.

    The file is opened once the run directory is made: until then the output is held in memory, so that a run that is
    refused writes nothing, and an older run that is moved aside keeps its own logs. A terminal or a file that cannot be
    written any more is left out; the rank goes on.

    Args:
        process: of the rank, with pipes for both streams.
        file: to append to.
        begun: exists once the run directory is made.
    """

    def __init__(self, process: subprocess.Popen[bytes], file: Path, begun: Path) -> None:
        self._file = file
        self._begun = begun
        self._held: list[bytes] = [f"# {now()} {socket.gethostname()}: process {process.pid}\n".encode()]
        self._open: IO[bytes] | None = None
        self._lost = False
        self._lock = threading.Lock()
        assert process.stdout is not None
        assert process.stderr is not None
        pairs = ((process.stdout, STDOUT), (process.stderr, STDERR))
        self._threads = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def _copy(self, source: IO[bytes], terminal: int | None) -> None:
        with source:
            while block := os.read(source.fileno(), BLOCK):
                with self._lock:
                    self._keep(block)
                if terminal is not None:
                    try:
                        _write_all(terminal, block)
                    except OSError:  # it is closed, as after a lost connection; the file has what follows
                        terminal = None

    def _keep(self, block: bytes) -> None:
        if self._lost:
            return
        self._held.append(block)
        try:
            if self._open is None and self._begun.exists():
                self._file.parent.mkdir(exist_ok=True)
                self._open = open(self._file, "ab", buffering=0)  # noqa: SIM115 (open as long as the rank)
            if self._open is not None:
                self._open.write(b"".join(self._held))
                self._held.clear()
        except OSError as error:
            self._lost = True
            print(f"{self._file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)

    def close(self, error: str) -> None:
        """Wait for the last output of the rank, which has ended; a process that it left behind may hold its streams.

        Args:
            error: the one that the rank ended with, for the file; the launcher shows the first rank's.
        """
        for thread in self._threads:
            thread.join(DRAIN_SECONDS)
        with self._lock:
            self._keep(f"error: {error}\n".encode() if error else b"")
            if self._open is not None:
                self._open.close()
            self._lost = True


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]
