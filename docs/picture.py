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
from unittest import mock

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from transformers import PreTrainedTokenizerBase

import shardtune
from shardtune.batch import Sample
from shardtune.run.display import Display
from shardtune.training.run_summary import RunSummary

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("examples/quickstart/recipe.yaml", "runner.eval_before_training=false")
RUN = Path("runs/quickstart")
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

    def print(self, *objects: object, **options: object) -> None:
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

    def first_screen(
        self, summary: RunSummary, sample: Sample | None, tokenizer: PreTrainedTokenizerBase | None, run_dir: Path
    ) -> None:
        super().first_screen(summary, sample, tokenizer, RUN)

    def saved(self, step: int, path: Path) -> None:
        super().saved(step, RUN / path.parent.name / path.name)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        super().stepped(step, metrics)
        if step < LAST_STEP or self._progress is None:
            return
        drawing = self.screen.drawing
        drawing.print(self._progress.get_renderable())
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
