"""Makes the project's docstrings, which are Markdown in the style of Google, readable as reStructuredText."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_CODE = re.compile(r"(`[^`\n]+`)")
_STARS = re.compile(r"(?<![\w\\])(\*{1,2})(?=\w)")
_ENDING = re.compile(r"(?<=\w)``(?=[a-z])")
"""The end of code that letters follow, as in `LossSum`s."""
_REFERENCE = re.compile(r"(?<=\w)_(?=\W|$)")


def escaped(line: str) -> str:
    """A line in which only code in backticks is marked up."""
    parts = _CODE.split(line)
    plain = [_REFERENCE.sub(r"\\_", _STARS.sub(r"\\\1", part)) for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]] + [""]  # ``code``
    return _ENDING.sub(r"``\\", "".join(text for pair in zip(plain, code, strict=True) for text in pair))


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Called by autodoc with the lines of a docstring, before napoleon."""
    lines[:] = [escaped(line) for line in lines]


def setup(app: Sphinx) -> dict[str, object]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
