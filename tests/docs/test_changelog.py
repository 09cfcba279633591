"""CHANGELOG.md lists what users can do now, newest version first."""

from __future__ import annotations

import re
import tomllib

from tests.support.doc_blocks import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^## (\d+)\.(\d+)\.(\d+), (unreleased|\d{4}-\d{2}-\d{2})$")


def entries() -> list[str]:
    """The list items, continued lines joined."""
    return [re.sub(r"\s+", " ", item) for item in re.findall(r"^- (.*?)(?=^- |^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)]


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


def test_entries_speak_to_users():
    assert len(entries()) >= 5
    for entry in entries():
        assert re.match(r"(You|Your) ", entry), f"say what users can do: {entry}"
        assert entry.rstrip().endswith("."), entry
        assert not re.search(r"#\d+\b", entry), f"no numbers of issues: {entry}"
