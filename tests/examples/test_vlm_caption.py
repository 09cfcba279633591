"""The example with pictures: its answers are right, its exchanged pictures are others, and its recipe trains."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardtune
from shardtune.config import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vlm_caption"


def load_script(name: str) -> ModuleType:
    """Import a script, which lies outside any package."""
    spec = importlib.util.spec_from_file_location(f"vlm_caption_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_data = load_script("make_data")
make_model = load_script("make_model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few rows of each file, their pictures, and the model."""
    folder = tmp_path_factory.mktemp("made")
    train, heldout = make_data.make(40, 20)
    make_data.write(folder / "train.jsonl", train, make_data.write_pictures(folder, "train", train))
    files = make_data.write_pictures(folder, "heldout", heldout)
    make_data.write(folder / "heldout.jsonl", heldout, files)
    make_data.write(folder / "exchanged.jsonl", heldout, make_data.exchanged(files))
    tokenizer = make_model.make_tokenizer(folder / "train.jsonl")
    make_model.make_processor(tokenizer).save_pretrained(folder / "model")
    make_model.make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read(file: Path) -> tuple[str, str]:
    """Colour and corner of what a picture shows, from its pixels."""
    pixels = np.asarray(Image.open(file)).astype(int)
    shown = np.abs(pixels - pixels[[0, 0, -1, -1], [0, -1, 0, -1]].max(axis=0)).sum(axis=2) > 60
    down, right = np.argwhere(shown).mean(axis=0) > make_data.HALF - 0.5
    mean = pixels[shown].mean(axis=0)
    colour = min(make_data.COLOURS, key=lambda name: float(np.abs(mean - make_data.COLOURS[name]).sum()))
    return colour, f"{'bottom' if down else 'top'} {'right' if right else 'left'}"


def test_answers_are_what_the_pictures_show(made: Path) -> None:
    checked = 0
    for row in [*rows(made / "train.jsonl"), *rows(made / "heldout.jsonl")]:
        seen = [read(made / name) for name in row["images"]]
        turns = row["messages"]
        for asked, answer in zip(turns[::2], turns[1::2], strict=True):
            question, said = asked["content"].replace("<image>", ""), answer["content"]
            if question.startswith("What colour"):
                assert said == seen["second" in question][0]
            elif question.startswith("Where"):
                assert said == seen[0][1]
            elif "picture" in question:
                assert said.split()[1] == seen[0][0]
            checked += bool(seen)
    assert checked > 40


def test_images_stand_where_they_are_named(made: Path) -> None:
    counts = {len(row["images"]) for row in rows(made / "train.jsonl")}
    assert counts == {0, 1, 2}
    for row in rows(made / "train.jsonl"):
        assert row["messages"][0]["content"].count("<image>") == len(row["images"])


def test_exchanged_rows_ask_the_same_about_other_pictures(made: Path) -> None:
    pairs = list(zip(rows(made / "heldout.jsonl"), rows(made / "exchanged.jsonl"), strict=True))
    assert all(own["messages"] == other["messages"] for own, other in pairs)
    assert all(len(own["images"]) == len(other["images"]) for own, other in pairs)
    assert not [own for own, other in pairs if set(own["images"]) & set(other["images"])]


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    assert make_data.make(30, 10, seed=4) == make_data.make(30, 10, seed=4)
    assert make_data.make(30, 10, seed=4) != make_data.make(30, 10, seed=5)
    chats = make_data.make(6, 1)[0]
    one, two = (make_data.write_pictures(tmp_path / name, "train", chats) for name in ("one", "two"))
    assert one == two
    assert all(
        (tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for names in one for f in names
    )


@pytest.mark.lengthy
def test_the_recipe_trains_and_answers_both_sets(made: Path) -> None:
    places = [f"data.train_data_paths={made}/train.jsonl", f"actor.model.model_path={made}/model"]
    places += [f"data.eval_data_paths={{heldout: {made}/heldout.jsonl, exchanged: {made}/exchanged.jsonl}}"]
    places += [f"runner.logger.log_path={made}/runs", f"data.cache_dir={made}/cache", "data.num_workers=0"]
    short = ["runner.max_epochs=-1", "runner.max_steps=8", "runner.eval_before_training=true"]
    recipe = load_recipe(FOLDER / "recipe.yaml", [*places, *short], files_must_exist=False)
    run = shardtune.train(recipe.to_dict())
    first = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[0])
    for name in ("heldout", "exchanged"):
        assert run.metrics[f"eval/{name}/loss"] < first[f"eval/{name}/loss"] - 0.5
        assert 0 <= run.metrics[f"eval/{name}/eval_accuracy"] <= 1
