"""Lines at the foot of a terminal or of a notebook's output that change while a run goes on."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.text import Text

Lines = Callable[[int], Sequence[Text]]
"""The lines for a width in columns; called by a thread of its own."""
SECONDS = 0.25
"""Between two drawings."""
_DOWN, _SAVE, _RESTORE, _ERASE_LINE, _ERASE_BELOW = "\x1bD", "\x1b7", "\x1b8", "\x1b[K", "\x1b[J"
NOTEBOOK_COLUMNS = 100


class Foot(Protocol):
    """Where changing lines are drawn."""

    def draw(self) -> None:
        """Draw the current lines in place of the last ones."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Ticking:
    """Draws a foot now and then, in a thread of its own, so that nothing that is measured waits for it.

    Args:
        foot: which one.
        delay: seconds before the first drawing.
    """

    def __init__(self, foot: Foot, delay: float = 0.0) -> None:
        self._foot = foot
        self._delay = delay
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardtune-display", daemon=True)
        foot.begin()
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._done.wait(self._delay):
                return
            self._foot.draw()
            while not self._done.wait(SECONDS):
                self._foot.draw()
        except OSError:  # the terminal is gone
            return

    def end(self) -> None:
        """Draw no more; what was drawn on a terminal is erased."""
        self._done.set()
        self._thread.join()
        self._foot.end()


class TerminalFoot:
    """The last lines of a terminal.

    The cursor rests above them, on the line where output goes on. So nothing that is printed is lost, by whatever code
    or process: it stands above the lines, which are drawn again below it, and a terminal of another size moves them as
    any text behind the cursor.

    Args:
        console: the terminal.
        lines: what is drawn.
    """

    def __init__(self, console: Console, lines: Lines) -> None:
        self._console = console
        self._lines = lines
        colors = cast(Any, console.color_system)
        self._drawing = Console(
            file=io.StringIO(), force_terminal=True, color_system=colors, no_color=console.no_color, highlight=False
        )
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._drawn = 0.0
        self._rows = 0
        self._sent_back = False
        self._output: TextIO | None = None
        self._streams: dict[str, TextIO] = {}

    def begin(self) -> None:
        self._output = cast(TextIO, self._console.file)
        for name in ("stdout", "stderr"):
            stream = vars(sys)[name]
            if stream is not None and stream.isatty():
                self._streams[name] = stream
                setattr(sys, name, _Stream(stream, self))

    def end(self) -> None:
        with self._lock:
            self._erase()
            self._output = None
        for name, stream in self._streams.items():
            if isinstance(vars(sys)[name], _Stream):  # a user's own in place of it keeps what it has
                setattr(sys, name, stream)
        self._streams = {}

    def draw(self) -> None:
        width, height = self._console.size
        lines = self._lines(width - 1)
        if height < len(lines) + 2:
            return
        rows = "".join(f"\r\n{self._shown(line, width - 1)}{_ERASE_LINE}" for line in lines)
        with self._lock:
            self._write(f"{self._room(len(lines))}{rows}{_ERASE_BELOW}{_RESTORE}")
            self._rows, self._drawn = len(lines), time.monotonic()

    def _room(self, rows: int) -> str:
        """Make room below the cursor's line and save the cursor's place.

        What is behind the cursor is of the last drawing, if another process has ended the line, unless this process has
        sent the cursor back.
        """
        return f"{_DOWN * rows}\x1b[{rows}A{_SAVE}{'' if self._sent_back else _ERASE_LINE}"

    def _shown(self, line: Text, width: int) -> str:
        line.truncate(width, overflow="ellipsis")
        with self._drawing.capture() as captured:
            self._drawing.print(line, end="", no_wrap=True, width=width)
        return captured.get()

    def _erase(self) -> None:
        if self._rows:
            self._write(f"{self._room(1)}\r\n{_ERASE_BELOW}{_RESTORE}")
            self._rows = 0

    def _write(self, text: str) -> None:
        if self._output is not None:
            self._output.write(text)
            self._output.flush()

    def print_above(self, stream: TextIO, text: str) -> int:
        """Write what code of this process prints, in place of the lines, which are drawn again below it."""
        if os.getpid() != self._process:  # a forked process, in which nobody would release the lock
            return stream.write(text)
        if not text:
            return 0
        with self._lock:
            self._erase()
            written = stream.write(text)
            stream.flush()
            self._sent_back = text.endswith("\r")
            if self._output is not None and time.monotonic() - self._drawn > SECONDS / 5:
                self.draw()
        return written


class _Stream:
    """A stream of a terminal whose text goes above the lines."""

    def __init__(self, stream: TextIO, foot: TerminalFoot) -> None:
        self._stream = stream
        self._foot = foot

    def write(self, text: str) -> int:
        return self._foot.print_above(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class NotebookFoot:
    """An output of a notebook's cell that changes.

    Args:
        lines: what is drawn.
        keeps: whether the last of them stay.
    """

    def __init__(self, lines: Lines, *, keeps: bool) -> None:
        self._lines = lines
        self._keeps = keeps
        self._handle: Any = None
        self._shown = ""

    def begin(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self) -> None:
        self._update("\n".join(line.plain for line in self._lines(NOTEBOOK_COLUMNS)))

    def end(self) -> None:
        if self._keeps:
            self.draw()
        else:
            self._update("")

    def _update(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._handle.update({"text/plain": text}, raw=True)
