"""The reference pages of the site name what exists, and every public name is on one of them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from inspect import getattr_static
from pathlib import Path

import pytest

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
