"""Rows, answers and names of files may hold anything; none of it controls the terminal that it is shown on."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import typer
from rich.console import Console

from shardtune.batch import Sample
from shardtune.cli.chat import Streamer
from shardtune.cli.exit import end
from shardtune.cli.prompt_files import Question, answer_line
from shardtune.data.cache_directory import print_line
from shardtune.errors import CONTROL, DataError, printable
from shardtune.run.display import Display
from tests.support.workspace import make_tokenizer

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\u202eback\u2066\x00"


@pytest.fixture
def hostile() -> Sample:
    tokenizer = make_tokenizer()
    ids = tokenizer(HOSTILE.replace("\u202e", "").replace("\u2066", ""), add_special_tokens=False, return_tensors="np")
    tokens = ids["input_ids"][0].astype("int32")
    return Sample(tokens, (tokens * 0 + 1).astype("float32"))


def test_control_characters_are_escaped_and_all_else_is_kept() -> None:
    assert printable(HOSTILE) == r"\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\u202eback\u2066\x00"
    assert printable("\ud800 a\tb\nné 日本 🙂 \u200d") == "\\ud800 a\tb\nné 日本 🙂 \u200d"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_row_on_the_first_screen(hostile: Sample, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, width=200, soft_wrap=True)
    display = Display(console)
    display.show_row(hostile, make_tokenizer(), HOSTILE)
    display.show_row(replace(hostile, loss_weights=hostile.loss_weights * 0.5), make_tokenizer(), "[red]x")
    display.report(HOSTILE)
    shown = out.getvalue()
    assert shown.count(r"\x1b[2J\x9b31m\r\x7f") == 4
    assert "[red]x" in shown
    rest = shown.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[2m", "")  # our own styles
    assert not CONTROL.findall(rest)


def test_messages_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end(DataError(f"broken: {HOSTILE}", where=HOSTILE))
    with pytest.raises(SystemExit):
        end(ValueError(HOSTILE))
    print_line(HOSTILE)
    shown = capsys.readouterr().err
    assert shown.count(r"\x1b[2J") >= 4
    assert not CONTROL.findall(shown)


def test_a_file_that_ends_too_early_is_no_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def read() -> None:
        raise EOFError("Ran out of input")

    with pytest.raises(typer.Abort) as found:
        app([], standalone_mode=False)
    with pytest.raises(SystemExit):
        end(found.value)
    assert "EOFError: Ran out of input" in capsys.readouterr().err


def test_answers(capsys: pytest.CaptureFixture[str], hostile: Sample) -> None:
    streamer = Streamer(make_tokenizer(), ())
    streamer.on_finalized_text(HOSTILE, stream_end=True)
    line = answer_line(Question(HOSTILE, []), HOSTILE)
    assert not CONTROL.findall(capsys.readouterr().out + line)
    assert json.loads(line) == {"prompt": HOSTILE, "answer": HOSTILE}, "a program reads what was written"
