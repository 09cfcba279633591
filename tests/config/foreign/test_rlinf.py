"""RLinf's recipes: what is the same stays, what is another key is translated, and the rest is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted, convert
from tests.config.foreign.conftest import SOURCES, value

Changed = Callable[..., Converted]


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Changed:
    """Convert the whole file with other values: `changed(data__seed=3)`; None leaves a key out."""
    monkeypatch.chdir(tmp_path)

    def make(**changes: Any) -> Converted:
        tree = yaml.safe_load((SOURCES / "rlinf.yaml").read_text())
        for name, given in changes.items():
            *sections, key = name.split("__")
            section = tree
            for one in sections:
                section = section[one]
            section[key] = given
        (tmp_path / "source.yaml").write_text(yaml.safe_dump(tree))
        return convert(CommandLine(tmp_path / "source.yaml"))

    return make


def outcome(found: Converted, name: str) -> tuple[Kind, str]:
    one = found.conversion.outcomes[name]
    return one.kind, one.text


def test_the_recipe_is_what_rlinf_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out is what is the default here."""
    monkeypatch.chdir(SOURCES)
    lines = convert(CommandLine(Path("rlinf.yaml")), world_size=4).conversion.lines
    assert {key: line.value for key, line in lines.items()} == {
        "runner.logger.experiment_name": "tiny",
        "runner.logger.project_name": "tiny",
        "runner.logger.logger_backends": ["tensorboard"],
        "runner.max_epochs": -1,
        "runner.max_steps": 20,
        "runner.save_interval": 10,
        "runner.seed": 7,
        "runner.nproc_per_node": 4,
        "data.train_data_paths": {"path": "rows.jsonl", "max_samples": 8},
        "data.columns": {"question": "prompt", "answer": "completion"},
        "data.max_length": 64,
        "actor.global_batch_size": 8,
        "actor.model.model_path": "./model",
        "actor.model.gradient_checkpointing": True,
        "actor.model.is_lora": True,
        "actor.model.lora.r": 8,
        "actor.model.lora.alpha": 8,
        "actor.model.lora.init": "gaussian",
        "actor.optim.lr": 5e-6,
        "actor.optim.adam_beta2": 0.95,
        "actor.optim.weight_decay": 0.0,
        "actor.optim.lr_warmup_steps": 2,
        "actor.fsdp_config.reshard_after_forward": False,
    }


def test_data_paths_may_be_entries(changed: Changed) -> None:
    entries = [
        {"dataset_path": "a", "weight": 20.0, "robot_type": "libero"},
        {"dataset_path": "b", "max_samples": 5},
    ]
    found = changed(data__train_data_paths=entries, data__val_data_paths=["c.jsonl", "d.jsonl"])
    assert value(found, "data.train_data_paths") == [{"path": "a", "weight": 20.0}, {"path": "b", "max_samples": 5}]
    assert value(found, "data.eval_data_paths") == ["c.jsonl", "d.jsonl"]
    assert (value(found, "runner.eval_interval"), value(found, "actor.eval_micro_batch_size")) == (10, 4)
    assert outcome(found, "data.train_data_paths[0].robot_type")[0] is Kind.MISSING
    assert outcome(found, "data.max_samples")[0] is Kind.MISSING  # of two files together


def test_of_several_columns_of_images_a_row_is_to_be_made(changed: Changed) -> None:
    one = changed(data__image_keys=["front"], actor__model__model_type="qwen2.5_vl")
    assert value(one, "data.columns") == {"question": "prompt", "answer": "completion", "image": "front"}
    assert value(one, "actor.model.model_type") == "vision_language"
    two = changed(data__image_keys=["front", "wrist"], actor__model__model_type="openpi")
    assert "image" not in str(value(two, "data.columns"))
    assert outcome(two, "data.image_keys")[0] is outcome(two, "actor.model.model_type")[0] is Kind.MISSING


@pytest.mark.parametrize(
    ("weights", "computed", "precision", "noted"),
    [
        ("fp32", "bf16", "absent", False),  # the default here
        ("bf16", "bf16", "absent", True),
        ("fp32", "fp32", "fp32", False),
        ("fp16", None, "fp16", False),
    ],
)
def test_the_precision_is_that_of_the_computation(
    changed: Changed, weights: str, computed: str | None, precision: str, *, noted: bool
) -> None:
    found = changed(
        actor__model__precision=weights,
        actor__fsdp_config__mixed_precision={"param_dtype": computed} if computed else {},
    )
    assert value(found, "actor.model.precision") == precision
    assert any("pure_bf16" in note for note in found.conversion.notes) is noted


def test_what_rlinf_alone_has_is_named(changed: Changed) -> None:
    found = changed(
        defaults=["model/pi0@actor.model", {"override hydra/job_logging": "stdout"}],
        data__choice_key="choices",
        data__seed=8,
        actor__training_backend="megatron",
        actor__optim__total_training_steps=100,
        actor__fsdp_config__fsdp_size=4,
        actor__fsdp_config__sharding_strategy="no_shard",
        actor__model__sample_reweight={"enabled": True, "success_weight": 2.0},
        actor__model__is_lora=False,
        actor__optim__learning_rat=1,
        actor__optim__lr_scheduler="openpi_cosine",
        actor__optim__lr_warmup_steps=-1,
    )
    kinds = {name: one.kind for name, one in found.conversion.outcomes.items()}
    missing = {name for name, kind in kinds.items() if kind is Kind.MISSING}
    assert missing == {
        "defaults[0]",
        "data.choice_key",
        "data.seed",
        "actor.training_backend",
        "actor.optim.total_training_steps",
        "actor.optim.lr_scheduler",
        "actor.fsdp_config.fsdp_size",
        "actor.model.sample_reweight.enabled",
        "actor.model.sample_reweight.success_weight",
    }
    assert [name for name, kind in kinds.items() if kind is Kind.UNKNOWN] == ["actor.optim.learning_rat"]
    assert kinds["actor.model.lora_rank"] is Kind.NOT_NEEDED
    assert value(found, "actor.fsdp_config.reshard_after_forward") is False
    assert "ddp" in found.conversion.lines["actor.fsdp_config.reshard_after_forward"].comment
    assert value(found, "runner.seed") == 7
    assert value(found, "actor.optim.lr_warmup_steps") == "absent"
