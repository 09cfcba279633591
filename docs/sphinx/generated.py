"""Parts of pages that are made when the site is built, from the code itself."""

from __future__ import annotations

from collections.abc import Callable

from sphinx.application import Sphinx

from shardtune.cli.reference import all_commands

MADE: dict[str, Callable[[], str]] = {"<!-- all commands -->": all_commands}
"""Marks in a page, and what takes their place."""


def fill(_: Sphinx, docname: str, source: list[str]) -> None:
    """Put the made parts into a page that has a mark for them."""
    if not docname.startswith("docs/reference/"):
        return
    for mark, made in MADE.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, made())


def setup(app: Sphinx) -> dict[str, object]:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
