"""The user's message about the ends of ranks: the first error, with its rank."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import version

import pytest

from shardtune.errors import CheckpointError, ConfigError, Interrupted, lost_a_peer
from shardtune.launch import local
from shardtune.launch.local import (
    RankFailed,
    RankReport,
    RanksStuck,
    ReportedError,
    raise_outcome,
    run_ranks,
    write_report,
)
from shardtune.launch.port import free_port

PEER = RankReport(0, 2.0, False, True, "Connection closed by peer")
BUG = RankReport(1, 1.0, False, False, "Traceback: ValueError: on purpose")
STUCK = RankReport(0, 1.0, False, False, "no progress for 600 s: rank 1 is stopped", stuck=True)
MISTAKE = RankReport(1, 1.0, True, False, "the recipe is wrong")
STOP = RankReport(1, 1.0, False, False, "stopped after step 3; the same command continues", stopped=True)


def test_all_is_well(capfd: pytest.CaptureFixture[str]) -> None:
    """As many ranks as asked for have run the command, and nothing is raised."""
    run_ranks(["--version"], 2)
    assert capfd.readouterr().out.splitlines() == [f"shardtune {version('shardtune')}"] * 2


def test_a_stop_that_comes_after_the_end_changes_nothing() -> None:
    raise_outcome([0, 0], [], stop_sent=True)
    with pytest.raises(Interrupted):
        raise_outcome([0, 75], [], stop_sent=True)


@pytest.mark.parametrize(
    ("codes", "reports", "stop_sent", "error", "message"),
    [
        ([1, 1], [BUG, PEER], False, RankFailed, "rank 1 failed:\nTraceback"),
        ([1, -9], [PEER], False, RankFailed, "rank 1 was ended by SIGKILL (out of memory?)"),
        ([-11, 1], [PEER], False, RankFailed, "rank 0 was ended by SIGSEGV"),
        ([-6, 1], [PEER], False, RankFailed, "rank 0 was ended by SIGABRT (its last lines have the reason; a size"),
        ([-6, 1], [BUG], False, RankFailed, "rank 1 failed"),  # the abort follows from the error
        ([None, 1], [BUG], False, RankFailed, "rank 1 failed"),  # the other had to be killed
        ([1, 2], [MISTAKE, PEER], False, ReportedError, "the recipe is wrong"),
        ([75, 75], [STOP], True, Interrupted, "stopped after step 3"),
        ([75, 1], [PEER, STOP], False, Interrupted, "stopped after step 3"),  # one rank alone
        ([75, -15], [], True, Interrupted, "continues a training from its last checkpoint"),  # before it could listen
        ([0, -15], [], False, RankFailed, "rank 1 was ended by SIGTERM"),
        ([1, 1], [PEER], False, RankFailed, "rank 1 ended with exit code 1 and without an error"),
        ([1, 0], [PEER], False, RankFailed, "rank 1 ended with exit code 0 and without an error"),  # by os._exit
        ([1, -15], [PEER], False, RankFailed, "rank 1 was ended by SIGTERM"),
        (
            [-10, 75],
            [],
            True,
            Interrupted,
            "continues a training from its last checkpoint",
        ),  # SIGUSR1 before it could listen
        ([76, -9], [STUCK], False, RanksStuck, "no progress for 600 s"),  # what could not run had to be killed
        ([0, 3], [], False, RankFailed, "rank 1 ended with exit code 3"),
    ],
)
def test_the_cause_is_shown(
    codes: list, reports: list, stop_sent: bool, error: type[BaseException], message: str
) -> None:
    with pytest.raises(error) as raised:
        raise_outcome(codes, reports, stop_sent=stop_sent)
    assert message in str(raised.value)


def test_a_lost_peer_is_known_as_a_consequence() -> None:
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2312"
    assert lost_a_peer(RuntimeError(gloo))
    assert not lost_a_peer(RuntimeError("shapes do not match"))
    assert not lost_a_peer(CheckpointError("connection reset by peer"))


def test_without_a_launcher_there_is_no_report(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(0, ConfigError("x"), "x")
    monkeypatch.setenv("SHARDTUNE_REPORT_DIR", str(tmp_path))
    write_report(3, ConfigError("x"), "x")
    assert [file.name for file in tmp_path.iterdir()] == ["rank_3.json"]


def test_a_rank_that_cannot_report_its_error_has_printed_it() -> None:
    with pytest.raises(ReportedError, match="rank 1 has ended with the error that it has printed"):
        raise_outcome([1, 2], [], stop_sent=False)


def test_the_launcher_does_not_keep_the_port_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0 ends, the others are to be refused there, and not to wait for an answer."""
    started: list[int] = []

    def start(_arguments: object, _rank: int, _ranks: int, place: socket.socket, *_: object) -> subprocess.Popen[bytes]:
        started.append(place.getsockname()[1])
        return subprocess.Popen([sys.executable, "-c", ""])

    def watch(*_: object) -> list[int]:
        assert [free_port(port) for port in started] == started
        return [0, 0]

    monkeypatch.setattr(local, "_start", start)
    monkeypatch.setattr(local, "_watch", watch)
    run_ranks(["train"], 2)
    assert len(started) == 2
