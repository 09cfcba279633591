"""The pages about error messages quote messages that the package really has."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT

PAGES = sorted((ROOT / "docs" / "errors").glob("*.md"))
_QUOTED = re.compile(r"^> `(.+)`$", re.MULTILINE)
_VARIABLE = "…"
_BROKEN = re.compile(r"""["']\s*\n\s*(?:rf|f|r)?["']""")
"""The end of one part of a text and the beginning of the next, on another line."""
_BRACES = re.compile(r"\{[^{}\n]*(?:\{[^{}\n]*\}[^{}\n]*)*\}")
"""What an f-string puts into a text."""


@functools.cache
def source() -> str:
    """The package's code, with each text in one line and its variable parts as `…`."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "shardtune").rglob("*.py")))
    return _BRACES.sub(_VARIABLE, _BROKEN.sub("", text))


def exists(message: str) -> bool:
    """Whether the parts of a message between its variables follow each other in one line of the source."""
    parts = [part.strip() for part in message.split(_VARIABLE)]
    in_order = re.compile(".{0,300}".join(map(re.escape, parts)))
    return any(in_order.search(line) for line in lines_with(max(parts, key=len)))


def lines_with(text: str) -> Iterator[str]:
    """The lines of the source that contain a text."""
    place = source().find(text)
    while place >= 0:
        end = source().find("\n", place)
        yield source()[source().rfind("\n", 0, place) + 1 : end]
        place = source().find(text, end)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_messages_are_in_the_source(page: Path):
    quoted = _QUOTED.findall(page.read_text(encoding="utf-8"))
    assert quoted or page.name == "index.md"
    wrong = [message for message in quoted if not exists(message)]
    assert not wrong, f"{page.name} quotes messages that the package does not have (any more)"


def test_a_message_that_is_gone_is_found():
    assert exists("unknown key …")
    assert not exists("the row has a format that nobody knows. Its keys: …")
    assert not exists("unknown key … no row with a target is left")
