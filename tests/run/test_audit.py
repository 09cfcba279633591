"""`shardtune data audit` on a recipe: text, JSON and page; and limits that refuse training."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shardtune
from shardtune.data.audit.audit import Options
from shardtune.data.audit.findings import KINDS, Findings
from shardtune.errors import ConfigError, DataError
from shardtune.run.audit import as_text, audit_recipe
from shardtune.run.audit_page import as_page
from tests.support.tiny_run import Tiny, make_tiny, rows, write_rows

WORKER = """
import shardtune

class Mine(shardtune.FSDPSftWorker):
    def build_dataloader(self, data_paths, eval_dataset=False): ...
    def get_train_model_output(self, batch): ...
    def get_eval_model_output(self, batch): ...
"""
FORM = {
    "": "version sets contamination padding limits notes",
    "sets": "total sources findings lengths near",
    "total": "rows_read rows tokens trained_tokens trained_share weights kinds",
    "lengths": "shortest median mean p95 p99 longest edges counts",
    "near": "rows is_complete",
    "finding": "count share examples",
    "example": "row text trained note other shared",
    "contamination": "exact near total compared",
    "padding": "rows_per_micro_batch rows tokens padding saved",
    "limits": "key limit found failed",
}
"""The names of the JSON form: programs read them, so none is removed."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("tiny"), save_interval=-1)
    odd = [{"prompt": "<script>alert(1)</script> \x1b[31m & ", "completion": "</title> \u202e \U0001f600 " * 2}] * 2
    write_rows(made.folder / "odd.jsonl", [*rows(12), *odd, {"prompt": "p" * 30, "completion": "x" * 90}])
    return made


@pytest.fixture(scope="module")
def found(tiny: Tiny) -> Findings:
    recipe = tiny.recipe(
        data__train_data_paths=[str(tiny.folder / "odd.jsonl"), str(tiny.folder / "train.jsonl")],
        data__eval_data_paths={"math": str(tiny.folder / "train.jsonl")},
        data__audit={"max_duplicates": 0.4, "max_contamination": 0.5, "max_truncated": 0.2},
    )
    return audit_recipe(recipe, options=Options(examples=3), report=print)


@pytest.mark.lengthy
def test_the_names_of_the_json_form_stay(found: Findings) -> None:
    content = json.loads(found.model_dump_json())
    train, math = content["sets"]["train"], content["contamination"]["eval/math"]
    places = {
        "": content, "sets": train, "total": train["total"], "lengths": train["lengths"], "near": train["near"],
        "finding": train["findings"]["duplicates"], "example": train["findings"]["duplicates"]["examples"][0],
        "contamination": math, "padding": content["padding"], "limits": content["limits"][0],
    }  # fmt: skip
    assert {name: set(place) for name, place in places.items()} == {name: set(FORM[name].split()) for name in FORM}
    assert content["version"] == 1
    assert list(content["sets"]) == ["train", "eval/math"]
    assert list(train["sources"]) == ["odd", "train"]
    assert set(train["findings"]) == set(KINDS)
    assert Findings.model_validate(content) == found


@pytest.mark.lengthy
def test_limits_are_listed_with_what_was_found(found: Findings) -> None:
    results = {one.key.rpartition(".")[2]: one for one in found.limits}
    assert {name: one.failed for name, one in results.items()} == {
        "max_duplicates": False,
        "max_contamination": True,
        "max_truncated": False,
    }
    assert results["max_contamination"].found == 1
    text = as_text(found)
    assert "✗ beyond data.audit.max_contamination: 0.5, found 1" in text
    assert "✓ within data.audit.max_truncated: 0.2, found 0.02778" in text


def test_the_text_has_every_number(found: Findings) -> None:
    text = as_text(found)
    train = found.sets["train"]
    assert f"training rows: 36 rows, {train.total.tokens:,} tokens, {train.total.trained_share:.1%} trained" in text
    assert re.search(r"odd .*\n.*train .*\n.*all ", text)
    assert "13 rows (36.11%) exact duplicates of an earlier row" in text
    assert "evaluation rows math that are in training: 21 (100.00%)" in text
    assert "1 row (2.78%) cut at data.max_length" in text
    assert "padding avoided: " in text
    near = train.near
    assert near is not None
    assert f"  {near.rows} rows were compared by n-grams; the others are exact copies, too short" in text
    assert f"\N{RIGHTWARDS ARROW} {'x' * 40}" in text


class Page(HTMLParser):
    """The tags and the text of a page; fails for one that is not closed."""

    EMPTY = ("meta", "br")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_without_references(found: Findings) -> None:
    content = as_page(found, "my<recipe>.yaml")
    page = Page(content)
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe", "a", "object", "form"}
    assert not [value for _, attrs in page.seen for name, value in attrs.items() if name in ("src", "href", "style")]
    assert not re.search(r"https?:|url\(|@import", content)
    assert "prefers-color-scheme: dark" in content
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.seen
    for part in (
        "Data of my<recipe>.yaml",
        "<script>alert(1)</script>",
        "exact duplicates",
        "Padding avoided",
        "13 rows",
    ):
        assert part in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", content)
    assert sum(tag == "rect" for tag, _ in page.seen) == sum(len(one.lengths.counts) for one in found.sets.values())


def test_training_is_refused_before_anything_is_written(tiny: Tiny) -> None:
    recipe = tiny.recipe("refused", data__train_data_paths=str(tiny.folder / "odd.jsonl"))
    with pytest.raises(
        DataError, match=r"(?s)duplicates of the data is 0\.06667 \(1 row\).*odd\.jsonl:14 .*:13"
    ) as told:
        shardtune.train(recipe, "data.audit.max_duplicates=0.05")
    assert told.value.where == "data.audit.max_duplicates"
    with pytest.raises(DataError, match=r"max_truncated: 0\.05"):
        shardtune.train(recipe, "data.audit.max_truncated=0.05")
    assert not tiny.run("refused").exists()


def test_a_loader_of_a_users_own_is_refused_with_what_cannot_be_audited(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKER)
    recipe = tiny.recipe("own", actor__worker=f"{tmp_path / 'mine.py'}:Mine")
    with pytest.raises(ConfigError, match="Mine, whose build_dataloader makes its own batches"):
        audit_recipe(recipe, report=print)
    with pytest.raises(ConfigError, match=r"data\.audit is for the built-in worker"):
        shardtune.train(recipe, "data.audit.max_dropped=0.1")


def test_limits_may_change_when_a_run_continues(tiny: Tiny) -> None:
    from shardtune.config import load_recipe
    from shardtune.run.resume_check import check_changes

    one, other = (load_recipe(tiny.recipe(data__audit={"max_dropped": value})) for value in (0.1, 0.2))
    assert check_changes(one, other, tiny.folder) == ()
