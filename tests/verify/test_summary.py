"""The lines below the table of checks."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from shardtune.config import load_recipe
from shardtune.verify.claims.short_recipe import notes_on
from shardtune.verify.report import as_json, show, summary
from shardtune.verify.result import Report, Result
from tests.support.tiny_run import make_tiny


def test_code_that_no_shortened_run_calls_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = make_tiny(tmp_path)
    assert notes_on(load_recipe(tiny.recipe("plain"))) == []
    file = tmp_path / "mine.py"
    file.write_text("class Stop:\n    def on_step_end(self, event): ...\n")
    notes = notes_on(load_recipe(tiny.recipe("own", runner__callbacks=[f"{file}:Stop"])))
    report = Report("all", [Result("resume", "passed", "")], notes=notes)
    show(report, Console(width=80))
    line = f"the shortened runs do not call runner.callbacks ({file}:Stop)"
    assert f"note: {line}\n" in capsys.readouterr().out
    assert json.loads(as_json(report))["notes"] == [line]


def test_checks_side_by_side_took_less_than_their_sum() -> None:
    results = [Result("resume", "passed", "", seconds=60.0), Result("elastic", "passed", "", seconds=70.0)]
    assert summary(Report("all", results)) == "all: 2 passed of 2 checks in 130 s"
    assert summary(Report("all", results, seconds=75.0)) == "all: 2 passed of 2 checks in 75 s"


def test_the_lines_of_a_program_stand_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = "nothing was compared: KeyError: 'rows'\nTraceback of it\n  in a line"
    show(Report("all", [Result("parity", "failed", text, "a place", "a remedy")]), Console(width=120))
    table, below = capsys.readouterr().out.split("parity: nothing", 1)
    assert "nothing was compared: KeyError: 'rows'" in table
    assert "Traceback" not in table
    assert "Traceback of it\n  in a line\n  where:  a place" in below
