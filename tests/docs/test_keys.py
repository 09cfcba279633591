"""Every recipe key that a page names exists."""

from __future__ import annotations

import re

import pytest

from shardtune.config.halos import NAMES
from shardtune.config.keys import ALIASES, KEYS, OTHER_NAMES
from shardtune.config.schema import ACTOR_KEYS, FORMER_KEYS, Recipe, present_key
from tests.support.doc_blocks import ROOT

PAGES = ("docs/coming-from.md", "docs/add-a-model.md")
_SECTIONS = "|".join([*Recipe.model_fields, *(name for name in ACTOR_KEYS if KEYS[f"actor.{name}"].section)])
_KEY = re.compile(rf"`((?:{_SECTIONS})\.[\w.]+)(?:[=:][^`]*)?`")
FREE = ("actor.model.options", "actor.model.config_overrides")


def exists(key: str) -> bool:
    """Whether the schema has the key, a section or something below a free mapping."""
    key = present_key(key)
    if key.startswith(FREE):
        return True
    kind = Recipe
    for part in key.split("."):
        fields = getattr(kind, "model_fields", {})
        if part not in fields:
            return False
        kind = fields[part].annotation
    return True


def ours(text: str) -> list[str]:
    """The keys in prose and in the last column of tables: those that are ours."""
    own = "\n".join(re.sub(r"^\|.*?\|(?=.*\|)", "", line) for line in text.splitlines())
    return [key for key in _KEY.findall(own) if key not in (*ALIASES, *NAMES)]


@pytest.mark.parametrize("page", PAGES)
def test_the_keys_are_in_the_schema(page: str):
    found = ours((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 15
    assert not sorted({key for key in found if not exists(key)})


def test_the_check_would_find_a_wrong_key():
    assert ours("| `lr` | `actor.optim.rate: 1` |") == ["actor.optim.rate"]
    assert not exists("actor.optim.rate")
    assert exists("actor.optim")
    assert exists("actor.model.options.width")
    assert ours("| `lr` | `optim.rate: 1` |") == ["optim.rate"]
    assert exists("optim.lr")


def rows(text: str) -> list[tuple[list[str], list[str]]]:
    """The names in backticks in the first and in the last column of each row of a table."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w.]+)", line[0]), re.findall(r"`([\w.]+)", line[-1])) for line in lines]


def test_names_that_the_command_line_understands_are_all_listed():
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = page[page.index("<!-- aliases -->") : page.index("<!-- /aliases -->")]
    assert {first[0]: present_key(last[0]) for first, last in rows(table)} == ALIASES


def test_the_tables_agree_with_what_errors_suggest():
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    listed = [(name, last) for first, last in rows(page) for name in first if last and name in OTHER_NAMES]
    assert len(listed) > 20
    assert not [(name, last) for name, last in listed if OTHER_NAMES[name] not in map(present_key, last)]


def test_pages_and_examples_have_the_present_names():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.yaml")]
    former = [name for name in FORMER_KEYS if not name.endswith("num_workers")]
    leaves = re.compile(rf"\b({'|'.join(name.rpartition('.')[2] for name in former)})\b|runner\.num_workers")
    skipped = ("configuration.md", "benchmarks.md")
    found = [
        (page.name, line)
        for page in pages
        if page.name not in skipped
        for line in page.read_text(encoding="utf-8").splitlines()
        if leaves.search(line) and "`runner.save_interval`, `runner.resume_dir`" not in line  # RLinf's names
    ]
    assert not found
