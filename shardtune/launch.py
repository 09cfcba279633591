"""Several ranks on this machine: started, watched and ended together.

torch's elastic agent gives its processes thirty seconds after SIGTERM and takes any exit code but 0 for a crash. A run that
is asked to stop saves first, however long that takes, and exits with 75, so the ranks are watched here; inside them
everything is as under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.errors import Interrupted, ParallelError, ShardtuneError

REPORT_DIR = "SHARDTUNE_REPORT_DIR"
"""Where a rank leaves the error it ends with, for its launcher to show."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""How long ranks may take to notice that another one failed before they are killed."""


class RankFailed(Exception):
    """A rank ended with an error; the message is the first one's, with its rank."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """The error a rank ended with.

    Attributes:
        rank: which one.
        time: when, in seconds since the epoch.
        user_error: whether it is the user's to mend.
        message: what is shown.
    """

    rank: int
    time: float
    user_error: bool
    message: str


def write_report(rank: int, error: BaseException, traceback_text: str) -> None:
    """Leave an error for the launcher, where there is one."""
    folder = os.environ.get(REPORT_DIR)
    if folder is None:
        return
    mine = isinstance(error, ShardtuneError)
    report = {
        "rank": rank,
        "time": time.time(),
        "user_error": mine,
        "message": str(error) if mine else traceback_text,
    }
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(report))


def free_port(wanted: int | None) -> int:
    """A port that is free now, or the wanted one; an error where that is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ParallelError(
                f"port {wanted} cannot be used: {error.strerror}",
                where=f"runner.master_port = {wanted}",
                remedy="choose another, or leave runner.master_port out: a free one is found",
            ) from error
        return int(probe.getsockname()[1])


def run_ranks(arguments: Sequence[str], num_ranks: int, *, master_port: int | None = None) -> None:
    """Run `python -m shardtune <arguments>` once per rank and wait for all of them.

    Raises:
        Interrupted: the ranks were stopped by a signal, after saving.
        ShardtuneError: a rank found a mistake in the user's input.
        RankFailed: a rank failed otherwise; the others have been ended.
    """
    port = free_port(master_port)
    with tempfile.TemporaryDirectory(prefix="shardtune-ranks-") as folder:
        ranks = [_start(arguments, rank, num_ranks, port, folder) for rank in range(num_ranks)]
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def forward(number: int, frame: object) -> None:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)

        for number in previous:
            signal.signal(number, forward)
        try:
            first = _watch(ranks)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        _raise_outcome([rank.returncode for rank in ranks], first, _reports(Path(folder)))


def _start(arguments: Sequence[str], rank: int, num_ranks: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),  # all cores for each rank would make every rank slower
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        REPORT_DIR: folder,
    }
    # A process group of their own: Ctrl-C reaches this process alone, which passes it on once.
    return subprocess.Popen([sys.executable, "-m", "shardtune", *arguments], env=environment, start_new_session=True)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended; returns the first rank that failed. The others then have a few seconds to end themselves."""
    failed_at: float | None = None
    first: int | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        if first is None:
            first = next(
                (rank for rank, code in enumerate(codes) if code not in (None, 0, Interrupted.exit_code)), None
            )
            if first is not None:
                failed_at = time.monotonic()
        if all(code is not None for code in codes):
            return first
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return first
        time.sleep(POLL_SECONDS)


def _reports(folder: Path) -> list[RankReport]:
    found = [RankReport(**json.loads(file.read_text())) for file in folder.glob("rank_*.json")]
    return sorted(found, key=lambda report: report.time)


def _raise_outcome(codes: Sequence[int], first: int | None, reports: Sequence[RankReport]) -> None:
    """Turn exit codes and reports into the one error that the user sees."""
    if first is None:
        if any(code == Interrupted.exit_code for code in codes):
            raise Interrupted("stopped after saving; the same command continues")
        return
    if codes[first] < 0:  # ended by a signal: what the others report is only the consequence
        name = signal.Signals(-codes[first]).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        raise RankFailed(f"rank {first} was ended by {name}{hint}; the other ranks have been ended")
    if not reports:
        raise RankFailed(f"rank {first} ended with exit code {codes[first]}; the other ranks have been ended")
    report = next((report for report in reports if report.user_error), reports[0])
    if report.user_error:
        raise ReportedError(report.message, report.rank)
    raise RankFailed(f"rank {report.rank} failed:\n{report.message}")


class ReportedError(ShardtuneError):
    """A mistake in the user's input that a rank found."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
