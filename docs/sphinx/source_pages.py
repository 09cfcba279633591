"""A page with highlighted code for each source file of the project that a page links to.

Links from Markdown to files such as `../tests/run/test_resume.py` open the file beside the code; on the site they open
a page under `source/`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.environment import BuildEnvironment

LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".txt": "text", ".sh": "bash", "": "text"}
"""Suffixes of files that get a page; any other file that is linked to is a download."""
Linked = dict[str, set[str]]
"""Documents, and the files that each links to."""


def linked(env: BuildEnvironment) -> Linked:
    """What the documents read so far link to; kept between builds."""
    if "linked_sources" not in vars(env):
        vars(env)["linked_sources"] = {}
    return vars(env)["linked_sources"]


def link_to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Turn downloads of source files into links to their pages."""
    docname = app.env.docname
    for node in list(doctree.findall(addnodes.download_reference)):
        file = Path(app.env.relfn2path(node["reftarget"], docname)[1]).resolve()
        if file.suffix not in LANGUAGES or not file.is_relative_to(app.srcdir):
            continue
        path = file.relative_to(app.srcdir).as_posix()
        linked(app.env).setdefault(docname, set()).add(path)
        address = posixpath.relpath(f"source/{path}.html", posixpath.dirname(docname))
        node.replace_self(nodes.reference("", "", *node.children, refuri=address, internal=True))


def forget(_: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Drop what a document linked to, before it is read again."""
    linked(env).pop(docname, None)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The page of each file that is linked to."""
    assert isinstance(app.builder, StandaloneHTMLBuilder)
    for path in sorted(set().union(*linked(app.env).values())):
        file = Path(app.srcdir) / path
        code = file.read_text(encoding="utf-8")
        shown = app.builder.highlighter.highlight_block(code, LANGUAGES[file.suffix], linenos=False)
        yield f"source/{path}", {"title": path, "body": f"<h1><code>{path}</code></h1>{shown}"}, "page.html"


def setup(app: Sphinx) -> dict[str, object]:
    """Called by Sphinx."""
    app.connect("doctree-read", link_to_pages, priority=100)  # before downloads are collected
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
