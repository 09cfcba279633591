"""The reference pages of the site name what exists, and every public name is on one of them."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from importlib import import_module
from inspect import getattr_static
from pathlib import Path

import pytest
from docutils import nodes
from docutils.core import publish_doctree
from sphinx.ext.napoleon import Config, GoogleDocstring

import shardtune
from shardtune.cli.reference import all_commands
from tests.support.doc_blocks import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
_MODULE = re.compile(r"^\.\. currentmodule:: (\S+)$")
_ENTRY = re.compile(r"^\.\. auto(?:class|function):: (\S+)$")
_MEMBERS = re.compile(r"^   :members: (.+)$")


def entries() -> dict[tuple[str, str], list[str]]:
    """The members listed for each (module, name)."""
    found: dict[tuple[str, str], list[str]] = {}
    for page in PAGES:
        module = name = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := _MODULE.match(line):
                module = match[1]
            elif match := _ENTRY.match(line):
                name = match[1]
                found[module, name] = []
            elif match := _MEMBERS.match(line):
                found[module, name] = match[1].split(", ")
    return found


def test_what_the_reference_lists_exists_and_is_described():
    for (module, name), members in entries().items():
        thing = getattr(import_module(module), name)
        assert thing.__doc__, name
        for member in members:
            assert getattr_static(thing, member).__doc__, f"{name}.{member}"


def site_text(docstring: str) -> list[str]:
    """What the site makes of a docstring, in reStructuredText."""
    converted = runpy.run_path(str(ROOT / "docs" / "sphinx" / "docstrings.py"))["converted"]
    settings = Config(napoleon_custom_sections=[("Attributes", "params_style")], napoleon_attr_annotations=False)
    return list(GoogleDocstring(list(converted(docstring.splitlines())), settings).lines())


def test_docstrings_of_the_reference_are_laid_out_as_they_are_written():
    for (module, name), members in entries().items():
        thing = getattr(import_module(module), name)
        for described in [thing, *(getattr_static(thing, member) for member in members)]:
            text = "\n".join(site_text(inspect.cleandoc(described.__doc__)))
            page = publish_doctree(text, settings_overrides={"report_level": 5})
            faults = [str(fault.astext()) for fault in page.findall(nodes.system_message)]
            assert not [fault for fault in faults if "Unknown interpreted text role" not in fault], (name, faults)


def test_code_and_tables_of_docstrings_are_those_of_the_site():
    written = ["As:", "", "```python", "a_ = *b", "    b", "```", "", "| a | `b` |", "|---|:-:|", "| c_ | *d |", "e_"]
    assert site_text("\n".join(written)) == [
        *("As:", "", ".. code-block:: python", "", "    a_ = *b", "        b", "", ""),
        *(".. list-table::", "    :header-rows: 1", "", "    * - a", "      - ``b``"),
        *("    * - c\\_", "      - \\*d", "e\\_"),
    ]


def test_every_public_name_is_in_the_reference():
    listed = {name for module, name in entries() if module == "shardtune"}
    assert set(shardtune.__all__) - {"nn"} == listed
    assert set(shardtune.nn.__all__) == {name for module, name in entries() if module == "shardtune.nn"}
    pieces = import_module("shardtune.nn.functional")
    assert set(pieces.__all__) == {name for module, name in entries() if module == pieces.__name__}


def test_the_reference_of_commands_is_made_from_their_help():
    page = all_commands()
    assert (ROOT / "docs" / "reference" / "commands.md").read_text().rstrip().endswith("<!-- all commands -->")
    assert "## shardtune train\n" in page
    assert "## shardtune verify adapter\n" in page
    assert "| `--dry-run` | Check everything," in page


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    words = f"-W --keep-going -q -c docs -d {tmp_path / 'doctrees'} -b html . {tmp_path / 'site'}".split()
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "docs" / "index.html").is_file()
