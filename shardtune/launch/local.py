"""Launcher of several ranks on this machine, which start and end together.

torch's elastic agent gives its processes thirty seconds after SIGTERM and takes any exit code but 0 for a crash. A run
that is to stop saves first, however long that takes, and exits with 75, so the ranks are watched here; their
environment is that of torchrun.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardtune.config.rank_environment import LISTENING
from shardtune.errors import Interrupted, ShardtuneError, lost_a_peer
from shardtune.launch.cores import threads_of_rank
from shardtune.launch.exit_codes import EXIT_DIR, REPORT_DIR, REPORTS, read_exit_codes
from shardtune.launch.module_process import module_command, module_environment
from shardtune.launch.port import listening_at
from shardtune.launch.rank_logs import BEGUN, RankLog, log_file
from shardtune.launch.signals import LAUNCHER_PID, NOT_REPORTED, SIGNALS, StopSignal, listening

LAUNCH_ID = "SHARDTUNE_LAUNCH_ID"
"""The id of a launch, the same in all its restarts."""
RESTARTS = "SHARDTUNE_RESTARTS"
"""The number of restarts of this launch."""
ABORTED = (
    "its last lines have the reason; a size that differs in a collective: ranks have called different units of the "
    "model, or different collectives"
)
"""What is said of a rank that C code has ended: in gloo two collectives that are not the same one."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""How long ranks may take to notice that another one ended before they are killed."""


class RankFailed(Exception):
    """A rank ended with an error; the message is the first one's, with its rank."""

    exit_code = 1


class RankLost(RankFailed):
    """A rank ended without an error report, or its host was lost: a restart can continue from the last checkpoint.

    Attributes:
        ranks: which ones.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RanksStuck(RankLost):
    """Training made no progress for `runner.watchdog_seconds`; the message names the rank that differs."""

    exit_code = 76


class ReportedError(ShardtuneError):
    """A mistake in the user's input that a rank found."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class RankReport:
    """The error a rank ended with.

    Attributes:
        rank: which one.
        time: when, in seconds since the epoch.
        user_error: whether the user can fix it.
        consequence: whether it only follows from the end of another rank.
        message: shown to the user.
        stuck: whether the watchdog found the ranks stuck.
        stopped: whether it is no error, but a stop by a signal.
    """

    rank: int
    time: float
    user_error: bool
    consequence: bool
    message: str
    stuck: bool = False
    stopped: bool = False

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """Read a report that `write_report` wrote."""
        return cls(**json.loads(text))


def is_launched() -> bool:
    """Whether this process is a rank that `run_ranks` started."""
    return REPORT_DIR in os.environ


def restarted_launch() -> str | None:
    """The id of this rank's launch if this is a restart; None in a first start."""
    by_us = int(os.environ.get(RESTARTS, "0"))
    return launch_id() if by_us or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) else None


def launch_id() -> str | None:
    """The id that all starts of this rank share; None for a process without a launcher."""
    return os.environ.get(LAUNCH_ID) or os.environ.get("TORCHELASTIC_RUN_ID")


def write_report(rank: int, error: BaseException, message: str) -> None:
    """Write a report of an error, or of a stop, for the launcher, if there is one."""
    folder = os.environ.get(REPORT_DIR)
    if folder is None:
        return
    consequence = lost_a_peer(error)
    report = RankReport(
        rank,
        time.time(),
        user_error=isinstance(error, ShardtuneError),
        consequence=consequence,
        message=message,
        stuck=isinstance(error, RanksStuck),
        stopped=isinstance(error, Interrupted),
    )
    file = Path(folder, f"rank_{rank}.json")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(report)))
    partial.replace(file)


def report_begun() -> None:
    """Report to the launcher, if there is one, that the run directory is made."""
    if REPORT_DIR in os.environ:
        Path(os.environ[REPORT_DIR], BEGUN).touch()


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    master_port: int | None = None,
    environment: Mapping[str, str] | None = None,
    logs_in: Path | None = None,
) -> None:
    """Run `python -m shardtune <arguments>` once per rank and wait for all of them.

    Args:
        arguments: of the command.
        num_ranks: the number of ranks.
        master_port: the rendezvous port; None: a free one.
        environment: additional variables of the ranks.
        logs_in: the run directory in which the output of each rank is kept; None: it goes to the terminal alone.

    Raises:
        Interrupted: the ranks were stopped by a signal, after saving.
        ShardtuneError: a rank found a mistake in the user's input.
        RankLost: a rank was killed by a signal that the launcher did not send, or the ranks were stuck; the others have
            been ended.
        RankFailed: a rank failed otherwise; the others have been ended.
    """
    place = listening_at(master_port)
    with place, listening() as stop, tempfile.TemporaryDirectory(prefix=f"{REPORTS}s-") as folder, stop.deferred():
        ranks: list[subprocess.Popen[bytes]] = []
        logs: list[RankLog] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(arguments, rank, num_ranks, place, folder, environment or {}, logs_in is not None))
                if logs_in is not None:
                    logs.append(RankLog(ranks[rank], log_file(logs_in, rank), Path(folder, BEGUN)))
            place.close()  # rank 0 alone holds it now: if it ends, the others are refused there
            codes = _watch(ranks, stop, Path(folder))
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
            errors = {report.rank: report.message for report in _reports(Path(folder))}
            for rank, log in enumerate(logs):
                log.close(errors.get(rank, ""))
        raise_outcome(codes, _reports(Path(folder)), stop_sent=stop.requested)


def _start(
    arguments: Sequence[str],
    rank: int,
    num_ranks: int,
    place: socket.socket,
    folder: str,
    further: Mapping[str, str],
    piped: bool,
) -> subprocess.Popen[bytes]:
    environment = {
        "OMP_NUM_THREADS": str(threads_of_rank(num_ranks)),
        **module_environment(),
        **further,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.getsockname()[1]),
        REPORT_DIR: folder,
        EXIT_DIR: folder,
        LAUNCHER_PID: str(os.getpid()),
    }
    if not rank:
        environment[LISTENING] = str(place.fileno())
    if piped:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # what was printed is kept, however the rank ends
    stream = subprocess.PIPE if piped else None
    # A process group of their own: Ctrl-C reaches this process alone, which passes it on once.
    return subprocess.Popen(
        module_command("shardtune", *arguments),
        env=environment,
        start_new_session=True,
        stdout=stream,
        stderr=stream,
        pass_fds=() if rank else (place.fileno(),),
    )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], stop: StopSignal, folder: Path) -> list[int | None]:
    """Wait until all have ended, or until shortly after the first failure.

    Args:
        ranks: their processes.
        stop: passed on to them.
        folder: of their reports.

    Returns:
        The exit codes of the ranks that were not killed.
    """
    until, forwarded = math.inf, False
    while True:
        if stop.requested and not forwarded:
            forwarded = True
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
                rank.send_signal(signal.SIGCONT)  # a suspended rank would not notice
        codes = [rank.poll() for rank in ranks]
        if until == math.inf and (any(codes) or _left_early(codes, folder)):
            until = time.monotonic() + GRACE_SECONDS
        if None not in codes or time.monotonic() > until:
            return codes
        time.sleep(POLL_SECONDS)


def _left_early(codes: Sequence[int | None], folder: Path) -> bool:
    """Whether a rank has ended with code 0 before its work was done, as by os._exit."""
    noted = read_exit_codes(folder)
    return any(code == 0 and rank not in noted for rank, code in enumerate(codes))


def _reports(folder: Path) -> list[RankReport]:
    found = [RankReport.from_json(file.read_text()) for file in folder.glob("rank_*.json")]
    return sorted(found, key=lambda report: report.time)


def raise_outcome(
    codes: Sequence[int | None],
    reports: Sequence[RankReport],
    *,
    stop_sent: bool,
    gone: Mapping[int, str] | None = None,
) -> None:
    """Raise, from exit codes and reports, the error to show: the original one, not its consequences.

    Args:
        codes: of each rank; None for one that had to be killed.
        reports: in order of time.
        stop_sent: whether the ranks were sent SIGTERM.
        gone: for each rank that stopped responding, the reason.
    """
    causes = [report for report in reports if not report.consequence and not report.stopped]
    mistake = next((report for report in causes if report.user_error), None)
    if mistake is not None:
        raise ReportedError(mistake.message, mistake.rank)
    stuck = next((report for report in reports if report.stuck), None)
    if stuck is not None:
        raise RanksStuck(stuck.message, [])
    # An abort may be a consequence of another rank's error; SIGTERM before the handler was installed is a normal stop.
    followed = {-signal.SIGABRT} if causes else set()
    stopped = {Interrupted.exit_code, *(-number for number in SIGNALS)} if stop_sent else {Interrupted.exit_code}
    killed = [
        rank for rank, code in enumerate(codes) if code is not None and code < 0 and code not in followed | stopped
    ]
    if killed or gone:
        lost = gone or {killed[0]: f"was ended by {_signal(codes[killed[0]])}"}
        rank, what = next(iter(lost.items()))
        raise RankLost(f"rank {rank} {what}; the other ranks have been ended", sorted({*killed, *(gone or {})}))
    if causes:
        raise RankFailed(f"rank {causes[0].rank} failed:\n{causes[0].message}")
    if stopped & set(codes):
        told = sorted((report.rank, report.message) for report in reports if report.stopped)
        raise Interrupted(told[0][1] if told else NOT_REPORTED, together=True)
    # What is left are ranks that ended without a word, by os._exit or in C, and those that noticed the end of others.
    noticed = {report.rank for report in reports}
    ended = [rank for rank, code in enumerate(codes) if code is not None and rank not in noticed]
    if ended and (reports or any(codes) or None in codes):
        rank = next((rank for rank in ended if codes[rank]), ended[0])
        printed = next((rank for rank in ended if codes[rank] == ShardtuneError.exit_code), None)
        if printed is not None:
            raise ReportedError(
                f"rank {printed} has ended with the error that it has printed, and could not report it: there may be "
                f"no room in {tempfile.gettempdir()}",
                printed,
            )
        raise RankFailed(
            f"rank {rank} ended with exit code {codes[rank]} and without an error, before its work was done (os._exit?)"
            "; the other ranks have been ended"
        )
    if reports:
        raise RankFailed(f"rank {reports[0].rank} failed:\n{reports[0].message}")


def _signal(code: int | None) -> str:
    """The name of the signal of a negative exit code, and what it may mean."""
    name = signal.Signals(-(code or 0)).name
    means = {"SIGKILL": " (out of memory?)", "SIGABRT": f" ({ABORTED})"}
    return name + means.get(name, "")
