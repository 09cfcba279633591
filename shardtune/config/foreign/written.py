"""A conversion as text: the recipe with comments, and the report of what became of each key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import yaml

from shardtune.config.foreign.conversion import Conversion, Kind, Line, Outcome, short
from shardtune.config.keys import KEYS
from shardtune.config.schema import short_key, short_keys
from shardtune.config.secrets import without_secrets

WIDTH = 118
HEADINGS = (Kind.TRANSLATED, Kind.DEFAULT, Kind.NOT_NEEDED, Kind.MISSING, Kind.UNKNOWN)
REQUIRED = ("actor.model.model_path", "data.train_data_paths")


def recipe_text(c: Conversion, source: str) -> str:
    """The recipe in YAML: each line with its origin, and at the end what has no counterpart."""
    head = f"# {source}, a configuration of {c.trainer}, as a recipe of shardtune (shardtune convert)."
    return "\n".join([head, *map(short_keys, _sections(c)), *map(without_secrets, _remarks(c))]) + "\n"


def report_text(c: Conversion, source: str) -> str:
    """Every key of the source under what became of it; a token, which a recipe has no key for, is not shown."""
    lines = [f"{source} ({c.trainer}): {_counts(c)}"]
    for kind in HEADINGS:
        found = [outcome for outcome in c.outcomes.values() if outcome.kind is kind]
        if found:
            lines += ["", f"{kind.value}:", *(f"  {line}" for outcome in found for line in _wrapped(outcome))]
    if c.notes:
        lines += ["", "differences that remain:"]
        for note in map(short_keys, c.notes):
            lines += textwrap.wrap(note, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    absent = [key for key in REQUIRED if key not in c.lines]
    if absent:
        lines += ["", f"still to be given: {', '.join(map(short_key, absent))}"]
    return without_secrets("\n".join(lines))


def _counts(c: Conversion) -> str:
    kinds = [outcome.kind for outcome in c.outcomes.values()]
    words = {
        Kind.TRANSLATED: "translated",
        Kind.DEFAULT: "the default here",
        Kind.NOT_NEEDED: "not needed",
        Kind.MISSING: "without counterpart",
        Kind.UNKNOWN: "unknown",
    }
    counts = [f"{kinds.count(kind)} {word}" for kind, word in words.items() if kind in kinds]
    return f"{len(kinds)} keys: {', '.join(counts)}"


def _wrapped(outcome: Outcome) -> list[str]:
    text = f"{outcome.name}: {short(outcome.value)}  ->  {short_keys(outcome.text)}"
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def _sections(c: Conversion) -> Iterator[str]:
    """The lines in the order of the schema, a heading for each section that has any."""
    ordered = [key for key in KEYS if key in c.lines]
    begun: list[str] = []
    for key in ordered:
        *parents, name = short_key(key).split(".")
        for depth, parent in enumerate(parents):
            if begun[: depth + 1] != parents[: depth + 1]:
                if depth == 0:
                    yield ""
                yield f"{'  ' * depth}{parent}:"
                begun = parents[: depth + 1]
        if begun and not parents:
            yield ""
        begun = parents
        yield from _line("  " * len(parents), name, c.lines[key])
    for key in REQUIRED:
        if key not in c.lines:
            yield f"\n# {key} is required: name it here, or on the command line."


def _line(indent: str, name: str, line: Line) -> Iterator[str]:
    text = f"{indent}{name}: {_as_yaml(line.value)}"
    comment = " ".join(line.comment.split())
    if len(text) + len(comment) + 4 <= WIDTH:
        yield f"{text}  # {comment}"
        return
    for part in textwrap.wrap(comment, WIDTH - len(indent) - 2):
        yield f"{indent}# {part}"
    yield text


def _as_yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def _remarks(c: Conversion) -> Iterator[str]:
    left = [one for one in c.outcomes.values() if one.kind in (Kind.MISSING, Kind.UNKNOWN)]
    if left:
        yield "\n# Without a counterpart, or unknown:"
        for outcome in left:
            yield from (f"# {line}" for line in _wrapped(outcome))
    if c.notes:
        yield "\n# Differences that remain:"
        for note in map(short_keys, c.notes):
            yield from textwrap.wrap(note, WIDTH, initial_indent="# - ", subsequent_indent="#   ")
