"""HTML from elements whose text and attributes are always escaped: rows, answers and names may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shardtune.errors import printable


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


_JOINTS = re.compile(r"([/_])(?=\w)")
VOID = ("meta", "br", "input")
NOTHING_LOADED = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is executed or loaded, whatever a row or a name holds."""


def element(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """An element.

    Args:
        name: of its tag.
        children: elements, or text, which is escaped.
        attributes: `class_` is `class`, `data_x` is `data-x`. True: without a value; None and False: left out.
    """
    given = "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Html:
    """Elements and texts one after another."""
    return Html("".join(child if isinstance(child, Html) else escape(printable(child)) for child in children))


def document(title: str, style: str, body: str, *, policy: str = NOTHING_LOADED, head: Iterable[Html] = ()) -> str:
    """A page in one file.

    Args:
        title: of the window.
        style: the style sheet.
        body: elements.
        policy: what the browser may load and execute; by default nothing but the style sheet.
        head: further elements of the head.
    """
    first = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
    ]
    top = element("head", *first, *head, element("title", title), element("style", Html(style)))
    return f'<!DOCTYPE html>\n<html lang="en">\n{top}\n<body>\n{body}\n</body>\n</html>\n'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """A table in a box that scrolls by itself where it is too wide.

    Args:
        header: of the columns.
        rows: cells, text or elements.
        numbers: columns that are aligned to the right.
    """

    def cell(place: int, content: str) -> Html:
        return element("td", breakable(content), class_="number" if place in numbers else None)

    head = element("thead", element("tr", *(_heading(place, title, numbers) for place, title in enumerate(header))))
    body = [element("tr", *(cell(place, content) for place, content in enumerate(row))) for row in rows]
    whole = element("table", head, element("tbody", *body))
    return element("div", whole, class_="wide", tabindex=0, role="region", aria_label=", ".join(filter(None, header)))


def facts(pairs: Mapping[str, str]) -> Html:
    """Names and values, in as many columns as the window has room for."""
    lines = (
        element("div", element("dt", breakable(name)), element("dd", breakable(value))) for name, value in pairs.items()
    )
    return element("dl", *lines, class_="facts")


def breakable(text: str) -> Html:
    """Text whose lines may break after the parts of a path or name."""
    return text if isinstance(text, Html) else Html(_JOINTS.sub(r"\1<wbr>", joined([text])))


def _heading(place: int, title: str, numbers: Sequence[int]) -> Html:
    return element("th", title, scope="col", class_="number" if place in numbers else None)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
