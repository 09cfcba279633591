"""What two runs differ in, where their numbers part, and what is named as the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardtune
from shardtune.cli.commands import app
from shardtune.data.quarantine import line_of
from shardtune.errors import CheckpointError
from shardtune.run.diff import rows as rows_of_runs
from shardtune.run.diff.compare import Comparison, compare
from shardtune.run.diff.numbers import relative_difference
from shardtune.run.diff.rows import RunOrder, _encoded_rows
from shardtune.run.diff.settings import effects_of
from shardtune.run.diff.show import text
from shardtune.run.stored_run import StoredRun
from tests.support.tiny_run import Tiny, make_tiny, recorded_rows, rows, write_rows

LEFT_OUT = (0, 4, 5, 11)
"""Rows of `train.jsonl` that are left out of two runs."""
FAST = {"runner__save_interval": -1, "runner__device": "cpu"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With runs that differ in one thing each, and the rows of their steps in `rows.json`."""
    made = make_tiny(tmp_path_factory.mktemp("diff"), train_rows=21, save_interval=-1)
    write_rows(made.folder / "more.jsonl", rows(9, start=50))
    changes: dict[str, dict[str, Any]] = {
        "base": {},
        "micro": {"actor__micro_batch_size": 2},
        "seed": {"runner__seed": 7, "runner__max_steps": 2},
        "decay": {"actor__optim__weight_decay": 0.5},
        "tokens": {
            "actor__global_batch_size": None,
            "actor__global_batch_tokens": 120,
            "data__eval_split": 0.2,
            "data__train_data_paths": [
                str(made.folder / "train.jsonl"),
                {"path": str(made.folder / "more.jsonl"), "weight": 1.5},
            ],
        },
    }
    changes["left out"] = {"data__quarantine": str(made.folder / "quarantine.jsonl")}
    changes["left out by tokens"] = changes["left out"] | changes["tokens"]
    seen = {}
    for name, change in changes.items():
        if name == "left out":
            encoded = _encoded_rows(StoredRun.read(made.run("base")))
            assert encoded is not None
            hashes = encoded.hashes[list(LEFT_OUT)].tolist()
            (made.folder / "quarantine.jsonl").write_text("".join(line_of({"hash": f"{one:016x}"}) for one in hashes))
        with recorded_rows() as of_steps:
            shardtune.train(made.recipe(name, **FAST, **change))
        seen[name] = of_steps
    (made.folder / "rows.json").write_text(json.dumps(seen))
    return made


@pytest.fixture
def edited(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A copy of `base` whose records are changed."""

    def edit(
        manifest: Callable[[dict[str, Any]], None] | None = None,
        config: Callable[[dict[str, Any]], None] | None = None,
        line: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        run = tmp_path / "edited"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tiny.run("base"), run, symlinks=True)
        if manifest:
            content = json.loads((run / "manifest.json").read_text())
            manifest(content)
            (run / "manifest.json").write_text(json.dumps(content))
        if config:
            tree = yaml.safe_load((run / "config.yaml").read_text())
            config(tree)
            (run / "config.yaml").write_text(yaml.safe_dump(tree))
        if line:
            lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
            for one in lines:
                line(one)
            (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        return run

    return edit


def causes(found: Comparison) -> list[list[str]]:
    return [[cause.name for cause in one.causes] for one in found.explanations]


def test_a_run_is_as_its_copy(tiny: Tiny, edited: Callable[..., Path]) -> None:
    found = compare(tiny.run("base"), edited())
    assert found.same_numbers
    assert not found.differences
    assert found.weights.tensors > 10
    assert [one.finding for one in found.explanations] == ["all 8 logged steps of both runs are bitwise the same"]
    assert "recipe, versions, code, data, template, model, dtypes, layout, history" in text(found)


def test_a_seed_parts_the_rows(tiny: Tiny) -> None:
    found = compare(tiny.run("base"), tiny.run("seed"))
    seen = json.loads((tiny.folder / "rows.json").read_text())
    assert sorted(seen["base"][0]) != sorted(seen["seed"][0])
    assert found.rows.step == 1
    only = set(seen["base"][0]) - set(seen["seed"][0])
    assert {int(name.removeprefix("row ")) for name in found.rows.first} <= only
    assert found.rows.more[0] == len(only)
    assert causes(found)[0] == ["runner.seed"]
    assert found.explanations[0].finding.startswith("from step 1 on the runs hold other rows")
    assert found.numbers.last == (8, 2)
    assert not found.same_numbers


def test_micro_batches_part_only_by_rounding(tiny: Tiny) -> None:
    found = compare(tiny.run("base"), tiny.run("micro"))
    assert found.rows.step is None
    assert found.rows.steps == 8
    (explanation,) = found.explanations
    assert explanation.causes[0].name == "micro_batch_size"
    assert "by no more than rounding in float32 can" in explanation.finding
    assert all(one.size == "rounding" for one in found.numbers.parted())
    assert max(one.relative for one in found.weights.differing) < 1e-3
    assert not found.same_numbers


def test_an_optimizer_parts_after_the_first_step(tiny: Tiny) -> None:
    found = compare(tiny.run("base"), tiny.run("decay"))
    assert found.numbers.parting is not None
    assert found.numbers.parting.step == 2
    assert causes(found) == [["optim.weight_decay"]]


def test_another_length_moves_the_rate(tiny: Tiny, edited: Callable[..., Path]) -> None:
    def shorter(tree: dict[str, Any]) -> None:
        tree["runner"]["max_steps"] = 6

    def rate(line: dict[str, Any]) -> None:
        line["train/learning_rate"] *= 1 - line["step"] / 100
        line["train/loss"] *= 1.01 if line["step"] > 1 else 1.0

    found = compare(tiny.run("base"), edited(config=shorter, line=rate))
    assert found.explanations[0].finding.startswith("the learning rate parts at step 1")
    assert causes(found)[0] == ["runner.max_steps"]


def test_steps_of_another_size_move_the_rate(tiny: Tiny, edited: Callable[..., Path]) -> None:
    """As an epoch has another number of them."""

    def larger(tree: dict[str, Any]) -> None:
        tree["actor"]["global_batch_size"] = 12

    def rate(line: dict[str, Any]) -> None:
        line["train/learning_rate"] *= 1 - line["step"] / 100

    found = compare(tiny.run("base"), edited(config=larger, line=rate))
    assert any(one.finding.startswith("the learning rate parts") for one in found.explanations)
    assert all(names == ["global_batch_size"] for names in causes(found))


def test_another_length_before_a_run_was_continued_moves_the_rate(tiny: Tiny) -> None:
    """The recipes are the same at the end; the checkpoints hold the one that the run began with."""
    begun = tiny.recipe("begun shorter", **FAST, runner__max_steps=3)
    shardtune.train(begun)
    del begun["runner"]["max_steps"]
    shardtune.train(begun)
    found = compare(tiny.run("base"), tiny.run("begun shorter"))
    (change,) = [one for one in found.differences if one.name == "runner.max_steps"]
    assert (change.section, change.first, change.second) == ("history", "-1", "3 up to step 3, then -1")
    assert any("learning rate parts" in one.finding for one in found.explanations)
    assert all(names == ["runner.max_steps"] for names in causes(found))
    other = tiny.recipe("begun longer", **FAST, runner__max_steps=3, actor__micro_batch_size=1)
    shardtune.train(other)
    del other["runner"]["max_steps"], other["actor"]["micro_batch_size"]
    shardtune.train(other)  # from the same step on as the run before, with another setting until then
    found = compare(tiny.run("begun shorter"), tiny.run("begun longer"))
    assert [one.name for one in found.differences if one.section == "history"] == ["micro_batch_size"]


def test_an_optimizer_is_named_for_what_outgrows_rounding(tiny: Tiny, edited: Callable[..., Path]) -> None:
    def decay(tree: dict[str, Any]) -> None:
        tree["actor"]["optim"]["weight_decay"] = 0.5

    def loss(line: dict[str, Any]) -> None:
        line["train/loss"] *= 1.1 if line["step"] > 2 else 1 + 1e-7

    found = compare(tiny.run("base"), edited(config=decay, line=loss))
    assert causes(found) == [[], ["optim.weight_decay"]]
    assert "as rounding does" not in found.explanations[0].finding
    assert found.explanations[1].finding.startswith("train/loss parts by more than rounding at step 3")
    (alone,) = compare(tiny.run("base"), edited(line=loss)).explanations
    assert alone.finding.endswith("it grows beyond that at step 3, as rounding does")


@pytest.mark.parametrize(
    ("change", "moves", "cause", "finding"),
    [
        ("weights", {"train/loss": 1.1}, "model.model_path: model.safetensors", "the loss of the first step parts"),
        ("template", {"train/tokens": 1.1}, "chat template", "the same rows are other tokens"),
        ("dtypes", {"train/loss": 1.1}, "compute", "the loss of the first step parts"),
        ("code", {"train/loss": 1.1}, "mine.py", "the loss of the first step parts"),
        ("nothing", {"train/loss": 1.1}, None, "the loss of the first step parts"),
        ("ranks", {"train/grad_norm": 1 + 1e-7}, "ranks", "train/grad_norm parts at step 1, by no more than"),
        ("layout", {"train/loss": 1.1}, "ranks", "the loss of the first step parts"),
        ("eval", {}, None, "all 8 logged steps"),
    ],
)
def test_causes_are_named(
    change: str, moves: dict[str, float], cause: str | None, finding: str, tiny: Tiny, edited: Callable[..., Path]
) -> None:
    def manifest(content: dict[str, Any]) -> None:
        if change == "weights":
            pairs = content["inputs"]["actor.model.model_path"]
            next(pair for pair in pairs if pair[0].endswith("model.safetensors"))[1] = "other"
        elif change == "template":
            content["data"]["template_hash"] = "other"
        elif change == "dtypes":
            content["dtypes"]["compute"] = "float16"
        elif change == "code":
            content["user_code"] = {"mine.py": "0123"}
        elif change in ("ranks", "layout"):
            content["world_size"] = 4

    def line(one: dict[str, Any]) -> None:
        for name, factor in moves.items():
            one[name] *= factor

    run = edited(manifest, line=line)
    if change in ("ranks", "layout"):
        (run / "events.jsonl").unlink()
    found = compare(tiny.run("base"), run)
    assert finding in found.explanations[0].finding
    names = causes(found)[0]
    assert (names[0] if names else None) == cause
    if change == "nothing":
        assert "no recorded difference can do this" in found.explanations[0].advice
    assert ("dropout" in found.explanations[0].advice) == (change == "layout")
    assert found.same_numbers == (change == "eval")


def test_the_computed_rows_are_those_of_training(tiny: Tiny) -> None:
    """For steps of rows and of tokens, with weighted sources and a held-out share, and with rows that are left out."""
    seen = json.loads((tiny.folder / "rows.json").read_text())
    for name in ("base", "tokens", "left out", "left out by tokens"):
        run = StoredRun.read(tiny.run(name))
        steps = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        encoded = _encoded_rows(run)
        assert encoded is not None
        block = next(RunOrder(run, encoded).blocks())
        found, at = [], 0
        for size in block.sizes.tolist():
            found.append(sorted(block.rows[at : at + size].tolist()))
            at += size
        epoch = len(found)
        assert epoch >= 3
        assert found == [sorted(one) for one in seen[name][: min(epoch, steps)]]
    assert len({len(one) for one in seen["tokens"]}) > 2


def test_rows_that_are_left_out_part_the_rows(
    tiny: Tiny, edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step that holds one of them is named, and a run with them is compared to its end."""
    seen = json.loads((tiny.folder / "rows.json").read_text())
    found = compare(tiny.run("base"), tiny.run("left out"))
    pairs = zip(seen["base"], seen["left out"], strict=False)
    first = next(step for step, (one, other) in enumerate(pairs, 1) if sorted(one) != sorted(other))
    assert found.rows.step == first
    assert found.rows.by == "their content"
    assert "data.quarantine" in causes(found)[0]
    names = {f"train.jsonl:{row + 1}" for row in LEFT_OUT}
    assert any(name.endswith(tuple(names)) for name in found.rows.first)
    assert not any(name.endswith(tuple(names)) for name in found.rows.second)
    monkeypatch.setattr(rows_of_runs, "BLOCK_ROWS", 7)  # steps that end where a block does
    for name in ("left out", "left out by tokens"):
        same = compare(tiny.run(name), tiny.run(name))
        assert (same.rows.steps, same.rows.step, same.rows.unknown) == (len(seen[name]), None, "")
    (tiny.folder / "other.jsonl").write_text((tiny.folder / "quarantine.jsonl").read_text().partition("\n")[0])
    settings = {"quarantine": str(tiny.folder / "other.jsonl")}
    run = edited(config=lambda tree: tree["data"].update(settings))
    manifest = json.loads((tiny.run("left out") / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "or are no longer those of the run" in compare(tiny.run("base"), run).rows.unknown


def test_one_order_is_not_taken_for_the_steps_before_another_seed(tiny: Tiny) -> None:
    """Nor for those before other rows were left out; where no checkpoint knows, the recipe's consent says so."""
    changed = tiny.recipe("later seed", **FAST, runner__max_steps=2)
    shardtune.train(changed)
    changed["runner"] |= {"max_steps": 4, "seed": 7, "allow_changes": ["runner.seed"]}
    shardtune.train(changed)
    found = compare(tiny.run("base"), tiny.run("later seed"))
    assert "it was continued after step 2 with another runner.seed, so one order" in found.rows.unknown
    assert (found.rows.steps, found.rows.step) == (0, None)
    shutil.rmtree(tiny.run("later seed") / "checkpoints" / "global_step_2")
    found = compare(tiny.run("base"), tiny.run("later seed"))
    assert "it was continued with runner.seed in runner.allow_changes, and the value before" in found.rows.unknown


def test_a_step_that_was_passed_over_moves_the_rows(tiny: Tiny, edited: Callable[..., Path]) -> None:
    run = edited()
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{**one, "step": one["step"] - (one["step"] > 3)} for one in lines if one["step"] != 3]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    found = compare(tiny.run("base"), run)
    assert found.rows.step == 3
    assert not found.rows.unknown
    seen = json.loads((tiny.folder / "rows.json").read_text())["base"]
    blocks = RunOrder(StoredRun.read(run), None).blocks()
    steps = np.concatenate([block.sizes for block, _ in zip(blocks, range(3), strict=False)])
    assert len(seen[3]) == steps[2]


def test_data_that_are_gone_are_said(tiny: Tiny, edited: Callable[..., Path]) -> None:
    run = edited(lambda content: content["data"].update(train_fingerprint="other"))
    found = compare(tiny.run("base"), run)
    assert "no longer in the cache" in found.rows.unknown
    assert found.rows.steps == 0
    content = json.loads((run / "manifest.json").read_text())
    del content["data"]["sources"]
    (run / "manifest.json").write_text(json.dumps(content))
    found = compare(tiny.run("base"), run)
    assert "earlier version" in found.rows.unknown
    assert "not compared" in text(found)


def test_weights_are_compared_bit_by_bit(tiny: Tiny, edited: Callable[..., Path]) -> None:
    run = edited()
    file = run / "final/model.safetensors"
    tensors = load_file(file)
    name = "model.norm.weight"
    tensors[name][3] += 0.25
    save_file(tensors, file)
    found = compare(tiny.run("base"), run)
    assert [one.name for one in found.weights.differing] == [name]
    assert 0.1 < found.weights.differing[0].relative < 0.3
    assert found.explanations[0].finding == "every logged number of training is the same, but final/ is not"
    shutil.rmtree(run / "final")
    found = compare(tiny.run("base"), run)
    assert "no trained model" in found.weights.unknown
    assert not found.same_numbers, "weights that were not compared may differ"


def test_secrets_stay_references(tiny: Tiny, edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def config(tree: dict[str, Any]) -> None:
        tree["runner"]["logger"]["project_name"] = "${oc.env:MY_PROJECT}"

    monkeypatch.setenv("MY_PROJECT", "geheimnisvoll")
    found = compare(tiny.run("base"), edited(config=config))
    (difference,) = found.differences
    assert (difference.second, difference.effects) == ("${oc.env:MY_PROJECT}", ())
    assert "geheimnisvoll" not in text(found) + json.dumps(found.to_json())


def test_the_command(tiny: Tiny, edited: Callable[..., Path]) -> None:
    run = CliRunner().invoke
    base, micro = str(tiny.run("base")), str(tiny.run("micro"))
    told = run(app, ["diff", base, micro])
    assert told.exit_code == 0
    assert "micro_batch_size  3  2  (the last digits)" in told.output
    assert run(app, ["diff", base, micro, "--exit-code"]).exit_code == 1
    assert run(app, ["diff", base, str(edited()), "--exit-code"]).exit_code == 0
    found = json.loads(run(app, ["diff", base, micro, "--json"]).output)
    assert found["same_numbers"] is False
    assert found["explanations"][0]["causes"][0] == "recipe: micro_batch_size"
    with pytest.raises(CheckpointError, match="is not a run directory"):
        compare(tiny.folder, tiny.run("base"))


def test_small_parts() -> None:
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(None, 1.0) == float("inf")
    assert relative_difference(1.0, -1.0) == 2.0
    assert effects_of("runner.logger.log_interval") == ()
    assert effects_of("runner.a_new_key") == ("rows", "tokens", "loss", "update")
    assert effects_of("actor.model.lora.r") == ("loss",)
