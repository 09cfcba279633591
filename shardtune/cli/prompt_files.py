"""Prompts from files, and the lines that are written of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.cli.json_text import json_text
from shardtune.data.encoder import Row, RowError
from shardtune.data.images.rows import listed_images, with_places
from shardtune.data.row_files import kind_of, read_rows
from shardtune.data.row_formats import ARGUMENTS, read_arguments
from shardtune.data.row_prompts import PROMPT_KEYS, read_row_prompt
from shardtune.data.sources.data_path import OUT_OF_PIPE, PIPE
from shardtune.data.sources.inference_rows import PREPARED, InferenceRows, dropped_note
from shardtune.errors import DataError

JSON_LINES = "jsonl"
ROWS = f"give rows that have one of {', '.join(PROMPT_KEYS)}: text, or messages with role and content"
MEDIA = ("images", "image", "tools", ARGUMENTS)
WRITTEN = ("row", "prompt", "answer")
"""Keys of each line of answers; a row's own keys of these names are written with `given_` before them."""


@dataclass(frozen=True, slots=True)
class Question:
    """A row of a file of prompts.

    Attributes:
        prompt: a user's turn, or a whole conversation that ends with one.
        images: of its column `images` or `image`.
        tools: of its column `tools`.
        template_kwargs: of its column `chat_template_kwargs`.
        reference: the row's own answer, a text or turns; None without.
        raw: the prompt is a text that is continued without the chat template.
        kept: its number in the file, and what it has besides.
    """

    prompt: str | list[dict[str, object]]
    images: Sequence[object]
    tools: object = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    reference: str | list[dict[str, object]] | None = None
    raw: bool = False
    kept: Mapping[str, object] = field(default_factory=dict)


def read_prompts(file: Path, rows: InferenceRows) -> tuple[list[Question], list[str]]:
    """The prompts of a file of rows, each as training shows it before the row's answer, and notes on them.

    Args:
        file: of rows as those of training, in any format of these; of a name that none has, JSON lines.
        rows: how training read them.

    Raises:
        DataError: the file or a row cannot be used; names its place.
    """
    if not file.is_file():
        what, remedy = (PIPE, OUT_OF_PIPE) if file.exists() and not file.is_dir() else ("is not a file", ROWS)
        raise DataError(f"{file} {what}", where="--file", remedy=remedy)
    questions: list[Question] = []
    dropped = 0
    for number, given in read_rows(file, kind_of(file) or JSON_LINES):
        where = place_of(file, number)
        if isinstance(given, RowError):
            raise DataError(given.reason, where=where, remedy="mend the row, or take it out")
        row = rows.read(given, where)
        if row is None:
            dropped += 1
        else:
            questions.append(_question(row, where, number))
    if not questions:
        remedy = f"{dropped_note(dropped)}; with {PREPARED} it is not applied" if dropped else ROWS
        raise DataError(f"{file} has no rows", where="--file", remedy=remedy)
    return questions, [*([dropped_note(dropped)] if dropped else []), *_notes_on(questions)]


def place_of(file: Path, number: int) -> str:
    """The place of a row for a message: a line of JSON lines, otherwise its number from 1."""
    return f"{file}:{number}" if kind_of(file) in (None, JSON_LINES) else f"{file}: row {number:,}"


def _question(row: Row, where: str, number: int) -> Question:
    try:
        found = read_row_prompt(row)
        images = listed_images(row)
        prompt = found.prompt
        if not isinstance(prompt, str):
            prompt = with_places(prompt, images)
        given = read_arguments(row.get(ARGUMENTS))
    except RowError as error:
        raise DataError(error.reason, where=where, remedy=ROWS) from error
    others = {key: value for key, value in row.items() if key not in (*found.keys, *MEDIA)}
    kept = {f"given_{key}" if key in WRITTEN else key: value for key, value in others.items()}
    return Question(prompt, images, row.get("tools"), given, found.answer, found.plain, {"row": number, **kept})


def _notes_on(questions: Sequence[Question]) -> list[str]:
    """What is done with rows that hold their answer, and with those whose prompt is continued as it is."""
    answered = sum(question.reference is not None for question in questions)
    raw = sum(question.raw for question in questions)
    notes = []
    if answered:
        its = "row has its answer" if answered == 1 else "rows have their answer"
        notes.append(f'{answered:,} {its}: it is left out of the prompt and written as "reference"')
    if raw:
        its = "row has prompt and completion" if raw == 1 else "rows have prompt and completion"
        notes.append(f"{raw:,} {its} as text: the prompt is continued without the chat template, as in training")
    return notes


def answer_line(question: Question, answer: str) -> str:
    """A question with its answer as a line of JSON, in which characters that control a terminal are escaped."""
    given = {"images": question.images, "tools": question.tools, ARGUMENTS: question.template_kwargs}
    given = {key: value for key, value in given.items() if value}
    if question.reference is not None:
        given["reference"] = question.reference
    row = {**question.kept, "prompt": question.prompt, **given, "answer": answer}
    return json_text(row)
