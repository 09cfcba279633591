"""Files and folders of the project that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = (ROOT / "shardtune", ROOT)
"""What a path is relative to."""
READERS_OWN = {
    "file.py",
    "houses.py",
    "houses_model.py",
    "doubles.py",
    "distil.py",
    "lion.py",
    "matches.py",
    "prices.py",
    "launch.py",
    "my_script.py",
    "my_worker.py",
    "prepare.py",
    "script.py",
    "my_policy.py",
    "scripts/train.py",  # openpi's
    "scripts/compute_norm_stats.py",
    "vla-scripts/finetune.py",  # OpenVLA's
    "run_libero_eval.py",
}
"""Files that a reader writes, or that lie in another project."""
_FENCED = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")  # tests/docs/test_links.py has these
_INLINE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w.*…/-])[\w./-]+\.py\b")
_FOLDER = re.compile(r"^[\w.-]+/(?:[\w.-]+/)*$")


def named_files(text: str) -> set[str]:
    """Python files named in backticks, and in listings without a language."""
    listings = [fenced["text"] for fenced in _FENCED.finditer(text) if not fenced["language"]]
    pieces = [*_INLINE.findall(_LINK.sub("", _FENCED.sub("", text))), *listings]
    return {path for piece in pieces for path in _FILE.findall(piece)}


def named_folders(text: str) -> set[str]:
    """Folders in backticks of which the project has the first part; a run's own (`final/`) are not among them."""
    found = {piece for piece in _INLINE.findall(_FENCED.sub("", text)) if _FOLDER.match(piece)}
    found = {path for path in found if not path.startswith("runs/")}  # there after the quickstart
    return {path for path in found if any((place / path.partition("/")[0]).is_dir() for place in PLACES)}


def missing(paths: set[str]) -> list[str]:
    return sorted(path for path in paths if not any((place / path).exists() for place in PLACES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_are_there(page: Path):
    assert not missing(named_files(page.read_text(encoding="utf-8")) - READERS_OWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_folders_are_there(page: Path):
    assert not missing(named_folders(page.read_text(encoding="utf-8")))


def test_enough_is_named():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(named_files(text)) > 40
    assert len(named_folders(text)) > 8


def test_a_path_that_is_gone_is_found():
    text = "`data/no_such.py`, `training/step.py`, `tests/nowhere/`, `runs/recipe/`\n```\nmodels/gone.py  a part\n```\n"
    assert missing(named_files(text)) == ["data/no_such.py", "models/gone.py"]
    assert missing(named_folders(text)) == ["tests/nowhere/"]


def test_readers_own_files_are_named_and_not_ours():
    named = {path for page in PAGES for path in named_files(page.read_text(encoding="utf-8"))}
    assert named >= READERS_OWN
    assert len(missing(READERS_OWN)) == len(READERS_OWN)
