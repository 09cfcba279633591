"""Terminal output of a run: a first screen, progress and a final summary; plain lines without a terminal."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.data.images.images import IMAGE_FIELDS, SIZES, SPANS
from shardtune.errors import counted, disk_error, legible, printable
from shardtune.launch.signals import drop_unwritten, outlive_output
from shardtune.models.recipe_hooks import OF_ANSWERS
from shardtune.run.live import NotebookFoot, TerminalFoot, Ticking
from shardtune.run.status import Status, decimal, duration
from shardtune.training.run_summary import RunSummary, adapters_in_brief

PLAIN_SECONDS = 10.0
"""The shortest time between two lines of progress without a terminal."""
PREVIEW_TOKENS = 400
"""The longest row that is shown whole."""
CONTEXT_TOKENS = 40
"""How much of a longer row is shown at its beginning and around trained tokens."""
TARGET_TOKENS = 800
"""The longest run of trained tokens that is shown whole; of a longer one its first three quarters and its end."""
STEP_FORMS: Mapping[str, Callable[[float], str]] = {
    "train/loss": lambda loss: f"loss {decimal(loss, 4)}",
    "train/grad_norm": lambda norm: f"grad {decimal(norm, 3)}",
    "train/learning_rate": "lr {:.2e}".format,
    "perf/tokens_per_second": "{:,.0f} tokens/s".format,
    "perf/samples_per_second": "{:,.1f} samples/s".format,
    "perf/peak_memory_gb": "{:.1f} GB".format,
}
"""The metrics in a line of progress; a step of a user's own `run_training` may lack some."""
VERDICTS: Mapping[object, str] = {True: "right", False: "wrong"}
SHOWN_PATTERNS = 8
RIGHT, UNPARSED = OF_ANSWERS
OF_OTHERS = ("perplexity",)
"""Metrics that follow from others; they are in the table at the end."""
BEFORE_TRAINING = (f"/{RIGHT}", "/loss")
"""The metrics that are shown of an evaluation before training, if it has any of them."""
LOG_LETTERS = 600
"""Of a question or an answer in a log, at most."""
AGAIN = "evaluate it again"
EXPORTED = ("a directory for other software", "a directory for transformers or vLLM")
"""What is exported, of a model that answers no prompts and of one that does."""
BUSY_SECONDS = 0.5
"""Something that takes less is not shown."""


def trained_text(sample: Sample, tokenizer: PreTrainedTokenizerBase | None, *, color: bool) -> Text:
    """A row as the model receives it, with its trained tokens in green, or between ⟦ and ⟧ without color.

    The less a token weighs, the darker it is; without color its weight stands before it where it is not 1:
    `⟦0.5× yes⟧`. Of a long row the trained tokens and what is around them are shown. An image is shown by its size and
    the number of its tokens; a row of fields by their types, shapes and ranges.
    """
    named = [field_text(name, values) for name, values in sample.fields.items() if name not in IMAGE_FIELDS]
    images = _images(sample)
    if images and SPANS not in sample.fields:
        named += [f"{len(images)} image{'s' if len(images) > 1 else ''}: {', '.join(images)}"]
    text = plain("; ".join(named))
    if tokenizer is None or not len(sample.input_ids):
        return text
    text.append("\n" if named else "")
    ids, weights = sample.input_ids, sample.loss_weights
    spans = {start: (stop, size) for (start, stop), size in zip(_spans(sample), images, strict=False)}
    hidden = _hidden(weights, spans)
    changes = (np.flatnonzero((np.diff(weights) != 0) | np.diff(hidden)) + 1).tolist()
    borders = {border for start, (stop, _) in spans.items() for border in (start, stop)}
    left_out = 0
    for start, stop in pairwise(sorted({0, len(ids), *changes, *borders})):
        if hidden[start]:
            left_out += stop - start
            continue
        if left_out:
            text.append(f" … {left_out:,} tokens … ", style="dim italic")
            left_out = 0
        if start in spans:
            text.append(f"⟨image {spans[start][1]}, {stop - start:,} tokens⟩", style="cyan")
            continue
        part, weight = printable(str(tokenizer.decode(ids[start:stop].tolist()))), float(weights[start])
        if weight > 0 and not color:
            part = f"⟦{part}⟧" if weight == 1 else f"⟦{weight:g}× {part}⟧"
        text.append(part, style=_shade(weight / max(1.0, float(weights.max()))))
    if left_out:
        text.append(f" … {left_out:,} more tokens", style="dim italic")
    return text


def _shade(weight: float) -> str:
    """The style of a token: dim for one that is not trained, green for one of weight 1, darker in between."""
    if weight <= 0:
        return "dim"
    return "bold green" if weight == 1 else f"bold rgb(0,{80 + round(120 * weight)},0)"


def _images(sample: Sample) -> list[str]:
    """The sizes of a row's images, as `300×168`."""
    return [f"{width}×{height}" for width, height in sample.fields[SIZES].tolist()] if SIZES in sample.fields else []


def _spans(sample: Sample) -> list[tuple[int, int]]:
    """The token spans of a row's images; empty if the row has no such field."""
    return [(start, stop) for start, stop in sample.fields[SPANS].tolist()] if SPANS in sample.fields else []


def _hidden(weights: np.ndarray, spans: Mapping[int, tuple[int, str]]) -> np.ndarray:
    """Bool [tokens]: what a preview leaves out of a long row; never an image, which takes no space."""
    of_text = np.ones(len(weights), bool)
    for start, (stop, _) in spans.items():
        of_text[start:stop] = False
    if of_text.sum() <= PREVIEW_TOKENS:
        return np.zeros(len(weights), bool)
    hidden = of_text.copy()
    hidden[:CONTEXT_TOKENS] = False
    trained = np.concatenate([[False], weights > 0, [False]])
    starts, stops = np.flatnonzero(np.diff(trained.astype(np.int8))).reshape(-1, 2).T
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        hidden[max(0, start - CONTEXT_TOKENS) : stop + CONTEXT_TOKENS] = False
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if stop - start > TARGET_TOKENS:
            hidden[start + TARGET_TOKENS * 3 // 4 : stop - TARGET_TOKENS // 4] = True
    if not len(starts):
        hidden[:PREVIEW_TOKENS] = False
    return hidden & of_text


def field_text(name: str, values: np.ndarray) -> str:
    """A short description of a field: `image float32 [3, 32, 32] from -1 to 1`, `label int64 3`."""
    if values.ndim == 0:
        return f"{name} {values.dtype} {values.item():g}"
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    spread = f" from {known.min():g} to {known.max():g}" if known.size else ""
    missing = f" and {values.size - known.size:,} nan" if known.size < values.size else ""
    return f"{name} {values.dtype} {list(values.shape)}{spread}{missing}"


class LastingConsole(Console):
    """An output whose reader may end before the run does (a pipe into another program, a killed launcher).

    The disk of a file that it is redirected to may be full for a while: those lines are lost, and the run goes on.
    """

    def on_broken_pipe(self) -> None:
        outlive_output()

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if disk_error(error) is None:
                raise
            drop_unwritten()


def plain(text: str, **style: Any) -> Text:
    """Text that is shown as it is, without markup and without control characters, which rows and names may hold."""
    return Text(printable(text), **style)


class Display:
    """Prints the progress of a run; created on rank 0 only.

    Args:
        console: the output; by default standard error, where logs go.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or LastingConsole(stderr=True, highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._color = self._live and not self.console.no_color
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._status: Status | None = None
        self._ticking: Ticking | None = None
        self._total = 0
        self._spoken = -math.inf
        self._began = time.monotonic()
        self._began_at = 0

    def report(self, text: str) -> None:
        self.console.print(plain(text), soft_wrap=not self._live)  # a terminal's own wrapping cuts words

    log = report

    def first_screen(
        self, summary: RunSummary, sample: Sample | None, tokenizer: PreTrainedTokenizerBase | None, run_dir: Path
    ) -> None:
        table, trained = Table.grid(padding=(0, 2)), adapters_in_brief(summary.trained)
        share = summary.trainable / max(1, summary.parameters)
        tokens = f"{summary.tokens:,} tokens ({summary.targets:,.0f} trained), " if summary.tokens is not None else ""
        epoch = summary.files
        if summary.rows is not None and summary.steps_per_epoch is not None:
            epoch = f"{counted(summary.rows, 'row')}, {tokens}{counted(summary.steps_per_epoch, 'step')}"
        lines = [
            ("model", f"{summary.model}, {count(summary.parameters)} parameters, {share:.2%} trained"),
            *(
                ("trained" if number == 0 else "", f"{name}: {tensors:,} tensors, {count(parameters)}")
                for number, (name, tensors, parameters) in enumerate(trained[:SHOWN_PATTERNS])
            ),
            *([("", f"and {more} others: manifest.json")] if (more := len(trained) - SHOWN_PATTERNS) > 0 else []),
            ("numbers", summary.dtypes),
            ("ranks", summary.ranks),
            *([("packing", summary.attention)] if summary.attention else []),
            ("epoch", epoch),
            ("training", f"{summary.total_steps:,} step{'' if summary.total_steps == 1 else 's'}"),
        ]
        sets = ", ".join(
            f"{name} {counted(rows, 'row')}".strip() if rows is not None else name or "eval"
            for name, rows in summary.evaluation.items()
        )
        if sets:
            lines.append(("evaluation", sets))
        lines += [("note", note) for note in summary.notes]
        lines.append(("run", shown_path(run_dir)))
        for name, value in lines:
            table.add_row(plain(name, style="bold"), plain(value, overflow="fold"))  # a long path is not cut off
        self.console.print(table, soft_wrap=not self._live)
        if sample is not None:
            marks = f"; trained tokens are {'green' if self._color else 'in ⟦ ⟧'}" if len(sample.input_ids) else ""
            if ((sample.loss_weights > 0) & (sample.loss_weights != 1)).any():
                marks += ", darker where they weigh less" if self._color else ", with their weight where it is not 1"
            self.show_row(sample, tokenizer, f"the first row as the model receives it{marks}")

    def show_row(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None, title: str) -> None:
        text = trained_text(sample, tokenizer, color=self._color)
        if self._live:
            self.console.print(Panel(text, title=plain(title), title_align="left"), soft_wrap=False)
        else:
            self.console.print(plain(f"{title}:"))
            self.console.print(text)

    # Progress.

    def started(self, step: int, total_steps: int) -> None:
        self._total, self._began, self._began_at = total_steps, time.monotonic(), step
        self._show(Status("training", total_steps, step, ranks=self._ranks))

    def _show(self, status: Status, delay: float = 0.0) -> None:
        """Draw a status from now on, where the output can change what it shows."""
        if self._live and self.console.file.isatty():  # colours may be forced upon a file
            self._status, self._ticking = status, Ticking(TerminalFoot(self.console, status.lines), delay)
        elif self.console.is_jupyter:
            self._status, self._ticking = status, Ticking(NotebookFoot(status.lines, keeps=status.total > 0), delay)

    @contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Show what the run does before or after its steps."""
        self._show(Status(label, ranks=self._ranks), BUSY_SECONDS)
        try:
            yield
        finally:
            self.finished()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._status is not None:
            self._status.stepped(step, metrics)
            return
        text = "  ".join(form(metrics[name]) for name, form in STEP_FORMS.items() if name in metrics)
        now = time.monotonic()
        if (
            self._spoken == -math.inf
        ):  # what ran before the first step, such as an evaluation, is no measure of the speed of steps
            self._began, self._began_at = now, step
        if now - self._spoken < PLAIN_SECONDS and step < self._total:
            return
        self._spoken = now
        done = step - self._began_at
        left = (
            f"  {duration((now - self._began) / done * max(0, self._total - step))} to go"
            if done > 0 and step < self._total
            else ""
        )
        self.report(f"step {step:,}/{self._total:,}  {text}{left}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if step:
            self.report(f"step {step:,}: eval {'  '.join(evaluation_texts(metrics))}")
            return
        chosen = {key: value for key, value in metrics.items() if key.endswith(BEFORE_TRAINING)}
        self.report(f"before training: {'  '.join(evaluation_texts(chosen or metrics))}")

    def saved(self, step: int, path: Path) -> None:
        self.report(f"step {step:,}: saved {shown_path(path)}")

    def finished(self) -> None:
        if self._ticking is not None:
            self._ticking.end()
            self._status = self._ticking = None

    # The end.

    def summary(
        self,
        run_dir: Path,
        before: Mapping[str, float],
        after: Mapping[str, float],
        samples: Sequence[Mapping[str, object]],
        *,
        answers: bool,
        predictions: bool = False,
    ) -> None:
        """Print the results of the run and the commands that use it.

        Args:
            run_dir: of the run.
            before: evaluation metrics before training, if measured.
            after: those of `final/`.
            samples: answers to show.
            answers: whether the model can generate.
            predictions: whether it predicts for rows.
        """
        run = shown_path(run_dir)
        if after:
            self.console.print()
            title = f"{shown_path(run_dir / 'final')}, loaded and evaluated afresh"
            table = Table(title=title, title_justify="left", title_style="bold")
            table.add_column("metric")
            if before:
                table.add_column("before", justify="right")
            table.add_column("after", justify="right")
            for key, value in after.items():
                cells = [shown(key, before[key]) if key in before else ""] if before else []
                table.add_row(plain(key), *cells, shown(key, value))
            self.console.print(table)
        if samples:
            lines = [line for sample in samples for line in self._answer(sample)]
            self.console.print(Group(plain("\nanswers:", style="bold"), *lines), soft_wrap=not self._live)
        commands = self._next_in_python(run, answers) if self.console.is_jupyter else self._next(run_dir, answers)
        if predictions and not self.console.is_jupyter:
            rows = f"shardtune predict {shlex.quote(run)} --file rows.jsonl"
            commands.insert(0, (rows, "predictions for rows"))
        commands = [one for one in commands if after or one[1] != AGAIN]  # there is nothing to evaluate on
        width = max(len(command) for command, _ in commands)
        fits = width + max(len(purpose) for _, purpose in commands) + 6 <= self.console.width
        lines = [f"  {command.ljust(width)}  # {purpose}" if fits else f"  {command}" for command, purpose in commands]
        self.console.print(Group(plain("\nnext:", style="bold"), *map(plain, lines)))

    def _next(self, run_dir: Path, answers: bool) -> list[tuple[str, str]]:
        """What can be done with a run, each with its purpose."""
        word = shlex.quote(shown_path(run_dir))
        commands = [(f'shardtune generate {word} --prompt "…"', "answer a question")] * answers
        commands += [(f"shardtune chat {word}", "talk to the model")] * answers
        commands += [
            (f"shardtune eval {word}", AGAIN),
            (f"shardtune export {word} my-model", EXPORTED[answers]),
        ]
        if (run_dir / "tensorboard").exists():
            commands.append((f"tensorboard --logdir {word}", "curves of the losses"))
        return commands

    def _next_in_python(self, run: str, answers: bool) -> list[tuple[str, str]]:
        return [
            (f'run = shardtune.load_run("{run}")', "what train returns"),
            *([('run.generate("…")', "answer a question")] * answers),
            ("run.evaluate()", AGAIN),
            ('run.export("my-model")', EXPORTED[answers]),
        ]

    def _answer(self, sample: Mapping[str, object]) -> list[Text]:
        """A question, the model's answer and whether that is right; what was expected if it is not."""
        right, most = sample["correct"], max(120, 2 * self.console.width - 12) if self._live else LOG_LETTERS
        verdict = VERDICTS.get(right, "no answer found")
        lines = [
            plain(f"  {legible(str(sample['question']), most)}", style="dim"),
            plain(f"    {legible(str(sample['answer']), most) or '(nothing)'}").append(
                f"  [{verdict}]", style="green" if right else "red"
            ),
        ]
        if right is not True and sample["reference"] is not None:
            lines.append(plain(f"    expected: {legible(str(sample['reference']), most)}", style="dim"))
        return lines


def shown_path(path: Path) -> str:
    """A path as it can be typed here: relative to the working directory if it lies in there."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return str(path)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def evaluation_texts(metrics: Mapping[str, float]) -> list[str]:
    """The metrics of an evaluation for a reader: those of answers as the share of right ones."""
    texts: list[str] = []
    for key, value in metrics.items():
        name = key.removeprefix("eval/")
        prefix, _, metric = name.rpartition("/")
        if metric == RIGHT:
            texts.insert(0 if not prefix else len(texts), f"{f'{prefix} ' if prefix else ''}{100 * value:.1f} % right")
        elif metric not in OF_OTHERS and (metric != UNPARSED or value):
            texts.append(f"{name} {shown(key, value)}")
    return texts


def count(value: float) -> str:
    """1,234,567 as 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"


def shown(metric: str, value: float) -> str:
    """A metric's value: counts as whole numbers, everything else to four places or digits."""
    return f"{value:,.0f}" if metric.endswith("unparsed") else decimal(value, 4)
