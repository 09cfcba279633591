"""Words that have no place in the project, and paths that exist on one machine only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|lorem ipsum|coming soon|placeholder)\b")
PRAISE = re.compile(
    r"\b(blazing(ly)?|seamless(ly)?|effortless(ly)?|cutting.edge|state.of.the.art|revolutionary|game.chang\w+|world.class)\b",
    re.IGNORECASE,
)
OTHERS = re.compile(r"\b(issue|ticket|pull request) #?\d+\b", re.IGNORECASE)
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".ipynb", ".cfg", ""}
FOLDERS = ("shardtune", "docs", "examples", "bench", "tests", ".ci")


def files() -> list[Path]:
    """What a checkout holds, made files and this one aside."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    top = list(ROOT.glob("*"))
    made = {"work", "runs", "__pycache__", ".ipynb_checkpoints"}
    return sorted(
        path
        for path in [*inside, *top]
        if path.is_file()
        and path.suffix in SUFFIXES
        and not made & set(path.relative_to(ROOT).parts)
        and path != Path(__file__)
    )


def offences(pattern: re.Pattern[str], chosen: list[Path]) -> list[str]:
    found = []
    for path in chosen:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    return found


def test_nothing_is_left_unfinished():
    sources = [path for path in files() if path.suffix in (".py", ".ipynb", ".md")]
    assert len(sources) > 60
    assert not offences(UNFINISHED, sources)


def test_the_documentation_does_not_praise():
    assert not offences(PRAISE, [path for path in files() if path.suffix == ".md"])


def test_no_numbers_of_issues():
    assert not offences(OTHERS, files())


def test_no_paths_of_one_machine():
    here = re.compile(rf"{re.escape(str(ROOT))}(?![\w-])|/(home|Users)/\w+/")
    assert not offences(here, files())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (UNFINISHED, "# TODO: later"),
        (PRAISE, "Blazingly fast"),
        (OTHERS, "see issue 12"),
        (UNFINISHED, "raise NotImplementedError"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str):
    assert pattern.search(text)
