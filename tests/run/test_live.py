"""What a terminal shows below what is printed: on a terminal that is emulated, whatever else writes to it."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable

import pyte
import pytest
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from shardtune.cli.starting import importing, starting
from shardtune.run import live
from shardtune.run.live import NotebookFoot, TerminalFoot


class Terminal(io.StringIO):
    """A terminal of so many columns, as a stream; its line driver makes CR LF of LF."""

    def __init__(self, columns: int, rows: int = 12) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=1)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        return len(text)

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """All lines, those that have left the screen included, without blank ones at the end."""
        past = ["".join(line[at].data for at in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in (*past, *self.screen.display)).rstrip().split("\n")


@pytest.fixture
def terminal() -> Terminal:
    return Terminal(40)


def attach(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the terminal of this process; called by a test itself, as pytest sets the streams before one."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(live, "SECONDS", 0.0)  # each print draws
    monkeypatch.setattr(Console, "size", property(lambda _: ConsoleDimensions(terminal.screen.columns, 12)))


def begun(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> TerminalFoot:
    """Two lines, the first of which is longer than the terminal is wide."""
    attach(terminal, monkeypatch)
    drawn = 0

    def lines(width: int) -> list[Text]:
        nonlocal drawn
        drawn += 1
        return [Text("first " * 30), Text(f"second {drawn}")]

    made = TerminalFoot(Console(stderr=True, force_terminal=True), lines)
    made.begin()
    made.draw()
    return made


def below(terminal: Terminal) -> list[str]:
    """What is shown above the two lines and the empty one before them."""
    *printed, empty, first, second = terminal.shown()
    assert empty == ""
    assert first.startswith("first first")
    assert first.endswith("…")
    assert len(first) < terminal.screen.columns
    assert second.startswith("second ")
    return printed


def test_nothing_that_is_printed_is_lost(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    foot = begun(terminal, monkeypatch)
    assert below(terminal) == []
    print("whole")
    print("in ", end="")
    foot.draw()
    print("parts")
    sys.stderr.write("two\nlines\n")
    assert below(terminal) == ["whole", "in parts", "two", "lines"]
    print("\n".join(map(str, range(30))))  # more than the screen holds
    assert below(terminal) == ["whole", "in parts", "two", "lines", *map(str, range(30))]
    foot.end()
    print("after")
    assert terminal.shown()[-2:] == ["29", "after"], "the lines are gone"
    assert sys.stdout is terminal


def test_a_line_that_is_written_over_stays(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    foot = begun(terminal, monkeypatch)
    print("50 %", end="\r")
    foot.draw()
    foot.draw()
    assert terminal.shown()[0] == "50 %"
    print("100 %")
    assert below(terminal) == ["100 %"]


def test_what_another_process_writes_stays(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    foot = begun(terminal, monkeypatch)
    terminal.write("foreign\n")  # past the streams of this process
    foot.draw()
    terminal.write("once more\n")
    foot.draw()
    assert below(terminal) == ["foreign", "once more"]


def test_a_terminal_of_another_size(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    foot = begun(terminal, monkeypatch)
    print("a line")
    for columns in (25, 70):
        terminal.screen.resize(12, columns)
        foot.draw()
        assert below(terminal) == ["a line"]
    terminal.screen.resize(12, 40)


def test_a_stream_that_is_no_terminal_and_one_of_the_users_are_left_alone(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    foot = TerminalFoot(Console(stderr=True, force_terminal=True), lambda _: [Text("line")])
    foot.begin()
    assert sys.stdout is file
    own = io.StringIO()
    monkeypatch.setattr(sys, "stderr", own)
    foot.end()
    assert sys.stderr is own


def test_a_notebooks_output_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []

    class Handle:
        update: Callable[..., None] = staticmethod(lambda data, raw: shown.append(data["text/plain"]))

    monkeypatch.setattr(display, "display", lambda *_, **__: Handle())
    for keeps in (True, False):
        foot = NotebookFoot(lambda _: [Text("loss 1"), Text("2 GB")], keeps=keeps)
        foot.begin()
        foot.draw()
        foot.draw()
        foot.end()
    assert shown == ["loss 1\n2 GB", "loss 1\n2 GB", ""]


def test_a_word_while_torch_is_imported_goes_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    attach(terminal, monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    with starting():
        assert terminal.shown() == ["starting …"]
    assert terminal.shown() == [""]
    monkeypatch.setenv("RANK", "1")
    with starting():
        assert terminal.shown() == [""]


def test_the_import_of_torch_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with importing():
        assert gc.isenabled(), "torch is there already"
    monkeypatch.delitem(sys.modules, "torch")
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]


@pytest.mark.own_start
@pytest.mark.parametrize("triton", [True, False])
def test_the_end_searches_what_was_imported_only_for_triton(triton: bool) -> None:
    """Its bindings print a report of leaks where that is left out, after every command."""
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # is called last
        "from shardtune.cli.starting import importing\n"
        "with importing(): made = [[] for _ in range(1000)]\n"
        "assert gc.get_freeze_count() > 1000\n"
        f"sys.modules.update({dict.fromkeys(['triton._C.libtriton'] if triton else [])})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(not triton)]
