"""The recipe book: every recipe is valid, has its place in the table, and is planned on each kind of machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from shardtune.config import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(file for file in (ROOT / "recipes").glob("*.yaml") if file.stem != "machines")
STORED: Mapping[str, Mapping[str, Any]] = yaml.safe_load((ROOT / "recipes" / "machines.yaml").read_text())
"""What is planned."""


@pytest.fixture(scope="module")
def book() -> Iterator[ModuleType]:
    """The script, which imports what lies beside it."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "bench"))
    yield importlib.import_module("recipe_book")
    sys.path[:] = before


@pytest.mark.lengthy
def test_every_recipe_is_valid_as_it_is_and_as_it_is_changed(book: ModuleType) -> None:
    """No file of it exists here: neither the model nor the rows."""
    assert [file.stem for file in RECIPES if file.stem.endswith("-full")]
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for file in RECIPES:
        recipe = load_recipe(str(file), files_must_exist=False)
        assert recipe.actor.model.model_path == book.PUBLISHED[book.model_of(file)].name
        assert recipe.actor.model.is_lora is (book.method_of(file) == "lora")
        assert recipe.runner.logger.experiment_name == file.stem
        assert f"(../recipes/{file.name})" in page
        for on in book.MACHINES[1:]:
            load_recipe(str(file), book.steps_of(file, on)[-1], files_must_exist=False)
    models = {book.model_of(file) for file in RECIPES}
    assert models <= set(book.PUBLISHED)


def test_steps_rates_and_lengths_are_those_of_the_page(book: ModuleType) -> None:
    """Its sentences about all recipes, with what they except."""
    page = " ".join((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split())
    assert "they are 2e-5 below 4 billion parameters and for OpenVLA, 1e-5 above and for embeddings and Whisper" in page
    for file in RECIPES:
        recipe = load_recipe(str(file), files_must_exist=False)
        robot, embedding, speech = (part in file.stem for part in ("openvla", "embedding", "whisper"))
        small = book.PUBLISHED[book.model_of(file)].parameters < 4  # billions
        full = 2e-5 if robot or (small and not embedding and not speech) else 1e-5
        rate = full if file.stem.endswith("-full") else 5e-4 if robot else 2e-4
        assert recipe.actor.optim.lr == rate, file.stem
        assert recipe.actor.global_batch_size == (1024 if embedding else 64), file.stem
        assert recipe.data.max_length == (512 if embedding or robot else 4096), file.stem


def test_the_table_is_what_was_planned(book: ModuleType) -> None:
    assert set(STORED) <= {file.name for file in RECIPES}
    for name, planned in STORED.items():
        file = ROOT / "recipes" / name
        for on in book.MACHINES:
            found = planned[str(on)]
            words = found["changes"]
            assert words is None or words in book.steps_of(file, on)
            assert (words is not None) is (found["gb"] <= on.memory / 1e9)
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |" in page for row in book.cells(STORED))


def test_the_cheapest_changes_that_fit_are_found(book: ModuleType) -> None:
    steps = [(), ("a",), ("a", "b"), ("a", "b", "c")]
    sizes = {(): 90.0, ("a",): 50.0, ("a", "b"): 30.0, ("a", "b", "c"): 20.0}
    for least in (0.0, 0.6, 1.0):
        for memory, words in ((100, ()), (90, ()), (60, ("a",)), (49, ("a", "b")), (20, ("a", "b", "c")), (19, None)):
            found = book.chosen(
                steps, memory, lambda changes: sizes[changes], lambda changes, by=least: by * sizes[changes]
            )
            assert found.changes == words
            assert found.needed == (20.0 if words is None else sizes[words])


@pytest.mark.slow
def test_a_recipe_is_planned_on_each_machine(book: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its model two layers and a hundredth of the vocabulary, for time."""
    (file,) = (file for file in RECIPES if file.stem == "qwen3-0.6b-lora")
    model = book.PUBLISHED["qwen3-0.6b"]

    def short() -> Any:
        config = model.config()
        config.num_hidden_layers, config.layer_types, config.vocab_size = 2, config.layer_types[:2], 1519
        return config

    monkeypatch.setitem(book.PUBLISHED, "qwen3-0.6b", replace(model, config=short))
    found = book.found_for(file, None, tmp_path)
    assert found == book.found_for(file, found, tmp_path)
    assert all(each["changes"] == [] for each in found.values())


@pytest.mark.lengthy
def test_a_memory_that_is_unknown_ends_the_planning(
    book: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for one that does not fit."""
    from shardtune.run.plan import plan as planning

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no shapes of this kernel")

    monkeypatch.setattr(planning, "simulate", fails)
    (file,) = (file for file in RECIPES if file.stem == "qwen3-0.6b-lora")
    with pytest.raises(SystemExit, match="no shapes of this kernel"):
        book.found_for(file, None, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_every_plan_is_that_of_the_table(name: str, book: ModuleType, tmp_path: Path) -> None:
    assert book.found_for(ROOT / "recipes" / name, STORED[name], tmp_path) == STORED[name]
