"""CHANGELOG.md lists what users can do now, newest version first."""

from __future__ import annotations

import re
import tomllib

from tests.support.doc_blocks import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^## (\d+)\.(\d+)\.(\d+), (unreleased|\d{4}-\d{2}-\d{2})$")
VERSION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SUBJECT = re.compile(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^- (.*?)(?=^- |^#|\Z)", re.MULTILINE | re.DOTALL)
LONGEST = 400
"""Characters of an entry."""


def entries(text: str) -> list[str]:
    """The list items, continued lines joined."""
    return [re.sub(r"\s+", " ", item).strip() for item in ENTRY.findall(text)]


def test_headings_are_versions_newest_first():
    assert TEXT.startswith("# Changes\n")
    headings = [line for line in TEXT.splitlines() if line.startswith("## ")]
    found = [HEADING.match(line) for line in headings]
    assert all(found), headings
    versions = [tuple(map(int, match.groups()[:3])) for match in found if match]
    assert versions == sorted(set(versions), reverse=True)
    assert sum("unreleased" in line for line in headings) <= 1
    assert "unreleased" not in "".join(headings[1:])


def test_the_newest_version_is_the_projects():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = next(line for line in TEXT.splitlines() if line.startswith("## "))
    assert newest.startswith(f"## {version},")


def test_each_entry_is_below_a_subject():
    for version, text in VERSION.findall(TEXT):
        above = entries(text[: text.find("### ")] if "### " in text else text)
        assert not above, f"{version}: move this below the heading of its subject: {above[0]}"


def test_subjects_differ_and_have_entries():
    for version, text in VERSION.findall(TEXT):
        subjects = SUBJECT.findall(text)
        names = [name for name, _ in subjects]
        assert len(names) == len(set(names)), f"{version}: {names}"
        assert not [name for name, below in subjects if not entries(below)], version


def test_entries_are_short_sentences():
    assert len(entries(TEXT)) >= 5
    for entry in entries(TEXT):
        assert entry.endswith("."), f"an entry is a sentence: {entry}"
        assert len(entry) <= LONGEST, f"{len(entry)} characters, more than {LONGEST}: {entry}"
        assert not re.search(r"#\d+\b", entry), f"no numbers of issues: {entry}"
