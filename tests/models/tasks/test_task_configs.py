"""What a task makes of the settings of a model's config: names of outputs, overrides, losses of routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, NllbMoeConfig, SwitchTransformersConfig, T5Config

from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.tasks.task import TextTask
from tests.support.tiny_tasks import SIZES, rows, save_encoder, save_tokenizer, write


def task_of(folder: Path, task: str, data: list[dict[str, Any]], model: Path, **settings: Any) -> TextTask:
    values = {
        "model": {"model_type": task, "model_path": str(model), **settings},
        "data": {"train_data_paths": write(folder / "rows.jsonl", data), "cache_dir": str(folder / "cache")},
    }
    found = find_adapter(load_recipe(values))
    assert isinstance(found, TextTask)
    return found


def numbered(folder: Path, count: int) -> Path:
    """A trained classifier whose outputs have numbers for names, LABEL_0 and so on."""
    encoder = save_encoder(folder / "encoder")
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=count)
    model.save_pretrained(folder / "numbered")
    save_tokenizer(folder / "numbered")
    return folder / "numbered"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([f"LABEL_{number}" for number in range(12)], "LABEL_{}"),  # by alphabet LABEL_10 would come before LABEL_2
        (["LABEL_11", "LABEL_3"], "LABEL_{}"),
        ([*range(11)], "LABEL_{}"),  # no row has the last class
        ([*range(12)], "{}"),
        ([f"class {chr(97 + number)}" for number in range(12)], None),
    ],
)
def test_labels_are_those_of_the_outputs_of_a_trained_head(tmp_path: Path, labels: list[object], expected: str | None):
    data = [{"text": "a cat", "label": label} for label in labels]
    task = task_of(tmp_path, "sequence_classifier", data, numbered(tmp_path, 12))
    names = labels if expected is None else [expected.format(number) for number in range(12)]
    assert task.config.id2label == dict(enumerate(names))
    for row, label in zip(data, labels, strict=True):
        place = int(str(label).removeprefix("LABEL_")) if expected else labels.index(label)
        assert task.encode(row).fields["labels"] == place


def test_other_labels_than_the_outputs_of_a_trained_head_are_refused(tmp_path: Path):
    data = [{"text": "a cat", "label": label} for label in (1, 12)]
    with pytest.raises(ConfigError, match="has a head of 12 outputs, this sequence_classifier has 2"):
        task_of(tmp_path, "sequence_classifier", data, numbered(tmp_path, 12)).build()


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (
            {"id2label": {0: "good", 1: "fine", 2: "bad"}},
            r"id2label is \{'0': 'good'.* sets \{'0': 'bad'",
            "model.options",
        ),
        ({"problem_type": "regression"}, "problem_type is 'regression', .* sets 'single_label_cl", "model.model_type"),
        ({"pad_token_id": 7}, "pad_token_id is 7, and this sequence_classifier sets 0", "a tokenizer with this"),
    ],
)
def test_an_override_of_what_the_task_sets_is_refused(
    tmp_path: Path, overrides: dict[str, object], message: str, remedy: str
):
    data = rows("sequence_classifier", 12)
    task = task_of(
        tmp_path, "sequence_classifier", data, save_encoder(tmp_path / "encoder"), config_overrides=overrides
    )
    with pytest.raises(ConfigError, match=message) as refused:
        task.build()
    assert remedy in (refused.value.remedy or "")


def test_overrides_that_say_what_the_task_sets_are_used(tmp_path: Path):
    names = dict(enumerate("abcdefghijkl"))
    overrides: dict[str, object] = {"id2label": names, "problem_type": "single_label_classification"}
    data = [{"text": "a cat", "label": name} for name in names.values()]
    task = task_of(
        tmp_path, "sequence_classifier", data, save_encoder(tmp_path / "encoder"), config_overrides=overrides
    )
    assert task.config.id2label == names
    backwards = {str(number): name for number, name in enumerate("lkjihgfedcba")}  # of a trained head without names
    trained = numbered(tmp_path, 12)
    named = task_of(tmp_path, "sequence_classifier", data, trained, config_overrides={"id2label": backwards})
    with pytest.raises(ConfigError, match="label2id"):
        task_of(tmp_path, "sequence_classifier", data, trained, config_overrides={"label2id": {"c": 0}}).build()
    assert named.config.id2label == dict(enumerate("lkjihgfedcba"))
    assert named.encode(data[0]).fields["labels"] == 11


def test_a_balance_loss_that_a_task_does_not_have_is_said(tmp_path: Path):
    save_tokenizer(tmp_path, pair=False)
    for is_on in (True, False):
        SwitchTransformersConfig(
            num_experts=2, router_aux_loss_coef=0.1, output_router_logits=is_on, eos_token_id=3, **SIZES
        ).save_pretrained(tmp_path)
        notes = task_of(tmp_path, "seq2seq", rows("seq2seq", 2), tmp_path).notes()
        assert any("the loss of this seq2seq has no balance loss" in note for note in notes) is is_on


@pytest.mark.parametrize("writes", [True, False])
def test_a_library_for_answers_is_missed_where_answers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
):
    save_tokenizer(tmp_path, pair=False)
    T5Config(eos_token_id=3, **SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr("shardtune.models.tasks.task.installed", lambda *_: False)
    data = {"train_data_paths": write(tmp_path / "rows.jsonl", rows("seq2seq", 2))}
    recipe = {
        "model": {"model_type": "seq2seq", "model_path": str(tmp_path)},
        "data": {**data, "eval_data_paths": data["train_data_paths"], "cache_dir": str(tmp_path / "cache")},
        "eval": {"generate": writes},
    }
    notes = find_adapter(load_recipe(recipe)).notes()
    assert any("rouge_score is not installed" in note for note in notes) is writes


def test_a_capacity_of_experts_that_rows_share_is_said(tmp_path: Path):
    save_tokenizer(tmp_path, pair=False)
    for share, is_said in ((1.0, True), (0.0, False)):
        NllbMoeConfig(moe_eval_capacity_token_fraction=share, eos_token_id=3, **SIZES).save_pretrained(tmp_path)
        notes = task_of(tmp_path, "seq2seq", rows("seq2seq", 2), tmp_path).notes()
        told = "with actor.model.config_overrides: {moe_eval_capacity_token_fraction: 0.0, expert_capacity: N}"
        assert any(told in note for note in notes) is is_said
