"""Makes the project's docstrings, which are Markdown in the style of Google, readable as reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sphinx.application import Sphinx

_CODE = re.compile(r"(`[^`\n]+`)")
_STARS = re.compile(r"(?<![\w\\])(\*{1,2})(?=\w)")
_ENDING = re.compile(r"(?<=\w)``(?=[a-z])")
"""The end of code that letters follow, as in `LossSum`s."""
_REFERENCE = re.compile(r"(?<=\w)_(?=\W|$)")
_FENCE = re.compile(r"( *)```(\w*)$")
_ROW = re.compile(r"( *)\|(.*)\|$")
_RULE = re.compile(r" *\|[-|: ]+\|$")


def escaped(line: str) -> str:
    """A line in which only code in backticks is marked up."""
    parts = _CODE.split(line)
    plain = [_REFERENCE.sub(r"\\_", _STARS.sub(r"\\\1", part)) for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]] + [""]  # ``code``
    return _ENDING.sub(r"``\\", "".join(text for pair in zip(plain, code, strict=True) for text in pair))


def converted(lines: Iterable[str]) -> Iterator[str]:
    """The lines with fenced code, tables and marked words of Markdown as those of reStructuredText."""
    margin, in_code, in_table = "", False, False
    for line in lines:
        fence, row = _FENCE.match(line), _ROW.match(line)
        if fence is not None:
            in_code, margin = not in_code, fence[1]
            yield from [f"{margin}.. code-block:: {fence[2] or 'text'}", ""] if in_code else [""]
        elif in_code:
            yield f"{margin}    {line.removeprefix(margin)}" if line.strip() else ""
        elif row is not None:
            if not in_table:
                yield from [f"{row[1]}.. list-table::", f"{row[1]}    :header-rows: 1", ""]
            if not _RULE.match(line):
                yield from _cells(row[1], row[2])
        else:
            yield escaped(line)
        in_table = row is not None and not in_code


def _cells(margin: str, row: str) -> Iterator[str]:
    first, *others = [escaped(cell.strip()) for cell in row.split("|")]
    yield f"{margin}    * - {first}"
    yield from (f"{margin}      - {cell}" for cell in others)


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Called by autodoc with the lines of a docstring, before napoleon."""
    lines[:] = list(converted(lines))


def setup(app: Sphinx) -> dict[str, object]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
