"""events.jsonl and the file `alive`: what operators see of a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shardtune.errors import LOST_PEER, Interrupted
from shardtune.launch.events import ALIVE, EVENTS, TAIL_BYTES, Alive, last_event, restart_count, write_event
from shardtune.launch.local import REPORT_DIR, RankFailed
from shardtune.launch.outcome import recorded_end, recorded_failure
from shardtune.launch.progress import PROGRESS
from tests.support.tiny_run import events


def test_a_line_has_time_step_host_ranks_and_reason(tmp_path: Path) -> None:
    write_event(tmp_path, "start", step=0, ranks=2)
    write_event(tmp_path, "stuck", step=7, ranks=2, reason="rank 1\nsleeps", stuck_ranks=[1])
    found = events(tmp_path)[1]
    assert found["time"].endswith("Z")
    assert len(found["time"]) == len("2026-11-22T19:07:43.123Z")
    assert found["host"]
    del found["time"], found["host"]
    assert found == {
        **{"event": "stuck", "step": 7, "restart": 0, "ranks": 2, "reason": "rank 1\nsleeps"},
        "stuck_ranks": [1],
    }


def test_restarts_are_counted_also_after_a_torn_line_and_a_long_one(tmp_path: Path) -> None:
    assert restart_count(tmp_path) == 0
    write_event(tmp_path, "start", step=0)
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"time": "20')
    write_event(tmp_path, "resume", step=3, reason="x" * TAIL_BYTES)
    write_event(tmp_path, "save", step=4)
    assert restart_count(tmp_path) == 1
    assert last_event(tmp_path) == "save"
    lines = (tmp_path / EVENTS).read_text().splitlines()
    assert [len(lines), lines[1]] == [4, '{"time": "20']
    assert json.loads(lines[3])["restart"] == 1


def test_where_no_run_is_nothing_is_written(tmp_path: Path) -> None:
    write_event(tmp_path / "run", "lost")
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_is_reported_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (EVENTS, ALIVE):
        (tmp_path / name).mkdir()
    write_event(tmp_path, "save", step=1)
    alive = Alive(tmp_path, lambda: 1)
    alive.begin()
    alive._write()
    alive.end()
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" cannot be written: ")[0] for line in told] == [
        str(tmp_path / name) for name in (EVENTS, ALIVE, ALIVE)
    ]


def test_alive_is_written_where_there_is_progress_and_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.launch.events.TOUCH_SECONDS", 0.01)
    steps = [1]
    alive = Alive(tmp_path, lambda: steps[0])
    alive.begin()
    assert (tmp_path / ALIVE).read_text() == "1\n"
    write_event(tmp_path, "lost")
    assert events(tmp_path)[0]["step"] == 1, "the last that is known"
    steps[0] = 2
    time.sleep(0.1)
    assert (tmp_path / ALIVE).read_text() == "1\n", "no progress"
    PROGRESS.beats += 1
    until = time.monotonic() + 10
    while (tmp_path / ALIVE).read_text() != "2\n" and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until
    alive.end()
    assert not (tmp_path / ALIVE).exists()


def test_how_training_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (Interrupted("saved"), ValueError("on purpose"), RuntimeError(LOST_PEER[0])):
        with pytest.raises(type(error)), recorded_end(tmp_path, lambda: 5, ranks=2, is_main=True):
            raise error
    with pytest.raises(ValueError, match="x"), recorded_end(tmp_path, lambda: 5, ranks=2, is_main=False):
        raise ValueError("x")
    monkeypatch.setenv(REPORT_DIR, os.devnull)
    with pytest.raises(RuntimeError), recorded_end(tmp_path, lambda: 5, ranks=2, is_main=True):
        raise RuntimeError(LOST_PEER[0])  # its launcher knows which rank was lost
    assert [(event["event"], event["step"]) for event in events(tmp_path)] == [
        *[("stop", 5), ("failed", 5), ("failed", 5)]
    ]
    assert events(tmp_path)[1]["reason"] == "ValueError: on purpose"


def test_a_launcher_records_what_rank_0_did_not(tmp_path: Path) -> None:
    write_event(tmp_path, "start", step=0)
    for _ in range(2):
        with pytest.raises(RankFailed), recorded_failure(tmp_path):
            raise RankFailed("rank 1 failed")
    assert [event["event"] for event in events(tmp_path)] == ["start", "failed"]
