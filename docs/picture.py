"""Draws `docs/images/terminal.svg`: the terminal during a real run of the quickstart's recipe.

make quickstart                # makes the data and the model, if they are not there yet
python docs/picture.py         # trains until step 1,000, then writes the picture
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import shardtune
from shardtune.run.display import Display
from shardtune.run.status import Status

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("examples/quickstart/recipe.yaml",)
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS = 110
LAST_STEP = 1000
"""Behind the second evaluation, before the end: the bar is on the screen."""
THEME = TerminalTheme(
    (24, 27, 33),
    (212, 217, 226),
    [
        (60, 66, 78),
        (224, 108, 117),
        (130, 200, 120),
        (229, 192, 123),
        (97, 175, 239),
        (198, 120, 221),
        (86, 182, 194),
        (171, 178, 191),
    ],
)


class PictureTaken(Exception):
    """Ends the training."""


class Screen(Console):
    """The terminal of the run. What is printed for good is drawn; the frames of the live display are not."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, width=COLUMNS, force_terminal=True)
        self.drawing = Console(
            record=True,
            file=io.StringIO(),
            highlight=False,
            width=COLUMNS,
            force_terminal=True,
            color_system="truecolor",
        )

    def print(self, *objects: object, **options: Any) -> None:
        super().print(*objects, **options)
        self.drawing.print(*map(_without_root, objects))


def _without_root(printed: object) -> object:
    """A line of text without the place of this checkout."""
    return Text(printed.plain.replace(f"{ROOT}/", "")) if isinstance(printed, Text) else printed


class PicturedDisplay(Display):
    """The display of a run on a `Screen`, which is saved at `LAST_STEP`; paths begin at the working directory."""

    def __init__(self) -> None:
        self.screen = Screen()
        self.screen.drawing.print(Text(" ".join(("$ shardtune train", *COMMAND))))
        super().__init__(self.screen)

    def started(self, step: int, total_steps: int) -> None:
        super().started(step, total_steps)
        self._status = self._status or Status("training", total_steps, step)  # also where no terminal is

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        super().stepped(step, metrics)
        if step < LAST_STEP or self._status is None:
            return
        drawing = self.screen.drawing
        drawing.print(Text("\n").join([Text(), *self._status.lines(COLUMNS)]))
        self.finished()
        PICTURE.parent.mkdir(exist_ok=True)
        drawing.save_svg(str(PICTURE), title="shardtune", theme=THEME)
        raise PictureTaken


def main() -> None:
    """Train in a directory of its own and draw."""
    recipe, *overrides = COMMAND
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # One process and one rank: the launcher's display prints nothing here.
        with mock.patch("shardtune.run.train_rank.Display", PicturedDisplay):
            try:
                shardtune.train(ROOT / recipe, *overrides)
            except PictureTaken:
                sys.stderr.write(f"wrote {PICTURE.relative_to(ROOT)}\n")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
