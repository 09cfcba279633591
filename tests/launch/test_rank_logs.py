"""The output of ranks in files besides the terminal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardtune.launch.rank_logs import RankLog, log_file


def run(script: str, run_dir: Path, error: str = "") -> None:
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log = RankLog(process, log_file(run_dir, 1), run_dir / "begun")
    process.wait()
    log.close(error)


def test_both_streams_go_to_both_places_and_starts_are_appended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(f"echo early; touch {tmp_path}/begun; echo late; echo wrong >&2", tmp_path, "ValueError: x")
    run("echo again", tmp_path)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("early\nlate\nagain\n", "wrong\n")
    lines = [line for line in (tmp_path / "logs/rank_1.log").read_text().splitlines() if line[0] != "#"]
    assert sorted(lines[:3]) == ["early", "late", "wrong"]
    assert lines[3:] == ["error: ValueError: x", "again"]


def test_a_run_that_is_refused_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run("echo refused >&2", tmp_path, "the recipe is wrong")
    assert capfd.readouterr().err == "refused\n"
    assert not list(tmp_path.iterdir())


def test_a_rank_goes_on_without_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("in the way")
    run(f"touch {tmp_path}/begun; for i in $(seq 30000); do echo 12345678; done", tmp_path)
    shown = capfd.readouterr()
    assert shown.out.count("12345678\n") == 30000
    assert "cannot be written" in shown.err
