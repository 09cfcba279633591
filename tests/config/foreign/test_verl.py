"""verl's configurations and commands: the keys of Hydra, and the defaults of its two trainers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config.foreign.command_line import CommandLine, read_command_line
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted, convert
from shardtune.errors import ConfigError
from tests.config.foreign.conftest import SOURCES, rates_here, value

FSDP = "torchrun --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=me/model"
ENGINE = "torchrun --nproc-per-node=8 -m verl.trainer.sft_trainer model.path=me/model data.train_files=a.parquet"


def typed(*words: str) -> Converted:
    """What is made of a command."""
    return convert(read_command_line([one for part in words for one in shlex.split(part)]))


def outcome(found: Converted, name: str) -> tuple[Kind, str]:
    one = found.conversion.outcomes[name]
    return one.kind, one.text


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Converted]:
    """Convert the whole file with other values: `changed(data__seed=3)`."""
    monkeypatch.chdir(tmp_path)

    def make(**changes: Any) -> Converted:
        tree = yaml.safe_load((SOURCES / "verl.yaml").read_text())
        for name, given in changes.items():
            *sections, key = name.split("__")
            section = tree
            for one in sections:
                section = section[one]
            section[key] = given
        (tmp_path / "source.yaml").write_text(yaml.safe_dump(tree))
        return convert(CommandLine(tmp_path / "source.yaml"))

    return make


def test_the_recipe_is_what_verl_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out is what is the default here."""
    monkeypatch.chdir(SOURCES)
    lines = convert(CommandLine(Path("verl.yaml"))).conversion.lines
    assert {key: line.value for key, line in lines.items()} == {
        "runner.max_epochs": 3,
        "runner.save_interval": "epoch",
        "runner.resume_dir": None,
        "runner.keep_last": 2,
        "runner.seed": 7,
        "runner.nproc_per_node": 4,
        "runner.logger.log_path": "checkpoints/tiny",
        "runner.logger.project_name": "tiny",
        "runner.logger.experiment_name": "test",
        "runner.logger.logger_backends": ["jsonl", "wandb"],
        "actor.micro_batch_size": 2,
        "actor.global_batch_size": 8,  # of all processes, whatever their number
        "actor.model.model_path": "./model",
        "actor.model.gradient_checkpointing": True,
        "actor.model.is_lora": True,
        "actor.model.lora.r": 8,
        "actor.model.lora.alpha": 16,
        "actor.model.lora.target_modules": ["q_proj", "v_proj"],
        "actor.optim.lr": 1e-4,
        "actor.optim.adam_beta2": 0.95,
        "actor.optim.clip_grad": 0.5,
        "actor.optim.lr_warmup_steps_ratio": 0.1,
        "actor.optim.lr_warmup_from_zero": True,
        "actor.parallel.sequence": 2,
        "data.train_data_paths": "rows.jsonl",
        "data.columns": {"question": "prompt", "answer": "completion"},
        "data.max_length": 64,
    }


def test_the_defaults_of_a_command_are_those_of_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    older, newer = typed(FSDP, "data.train_files=a.parquet"), typed(ENGINE)
    shared = {"actor.global_batch_size": 256, "data.max_length": 1024, "runner.max_epochs": 4, "runner.seed": 1}
    for found in (older, newer):
        assert {key: value(found, key) for key in shared} == shared
        assert value(found, "actor.model.gradient_checkpointing") is True
        assert value(found, "actor.optim.groups") == [{"pattern": ".", "weight_decay": 0.01}]  # norms decay, too
    assert (value(older, "actor.micro_batch_size"), value(older, "data.on_too_long")) == (4, "fail")
    assert (value(older, "actor.optim.lr_warmup_steps_ratio"), value(older, "actor.optim.adam_beta2")) == (0.1, 0.95)
    assert value(older, "runner.nproc_per_node") == 4
    assert (value(newer, "actor.micro_batch_size"), value(newer, "actor.max_tokens_per_micro_batch")) == (None, 8192)
    assert (value(newer, "actor.optim.lr"), value(newer, "actor.optim.lr_scheduler")) == (1e-3, "constant")
    assert value(newer, "actor.optim.adam_beta2") == "absent"  # 0.999, as here
    assert value(newer, "data.on_too_long") == "absent"  # rows are cut, as no_padding does


def test_the_trainer_is_recognised_by_the_keys_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the other trainer, which this one does not read, changes nothing."""
    monkeypatch.chdir(tmp_path)
    older = typed(FSDP, "data.train_files=a.parquet", "+data.pad_mode=no_padding")
    assert value(older, "data.on_too_long") == "fail"
    newer = typed(ENGINE, "+data.multiturn.enable=true")
    assert value(newer, "actor.max_tokens_per_micro_batch") == 8192


@pytest.mark.parametrize(("size", "copies"), [(-1, "absent"), (2, 4), (8, "absent"), (16, "absent")])
def test_weights_are_in_groups_of_a_size(
    size: int, copies: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert value(typed(ENGINE, f"engine.fsdp_size={size}"), "actor.parallel.data_replicate") == copies


@pytest.mark.parametrize("ratio", [0.0, 0.19])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_rate_of_each_step_is_verls(
    ratio: float, floor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By verl's formula, whose share of steps is rounded down, 3 of 20."""
    monkeypatch.chdir(tmp_path)
    keys = (
        f"optim.lr=2e-5 optim.lr_scheduler_type=cosine optim.min_lr_ratio={floor} optim.lr_warmup_steps_ratio={ratio}"
    )
    found = typed(ENGINE, keys, "trainer.total_training_steps=20")
    warmup = int(20 * ratio)

    def rate(step: int) -> float:
        if step < warmup:
            return step / warmup
        wave = math.cos(math.pi * (step - warmup) / (20 - warmup))
        return max(floor, wave * (1 - floor) / 2 + (1 + floor) / 2)

    assert rates_here(found, tmp_path, 20) == pytest.approx([2e-5 * rate(step) for step in range(20)], abs=1e-18)


def test_a_command_has_keys_as_hydra_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = typed(
        ENGINE,
        "engine=fsdp optim=megatron +data.val_files=[b.parquet,c.parquet] ++data.max_length=99 ~data.truncation",
        'trainer.logger=\'["console","file"]\' engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2',
        "data.max_token_len_per_gpu=100 data.train_max_samples=7",
    )
    assert value(found, "data.max_length") == 99
    assert [Path(str(one)).name for one in value(found, "data.eval_data_paths")] == ["b.parquet", "c.parquet"]  # type: ignore[union-attr]
    assert value(found, "data.train_data_paths") == {"path": "a.parquet", "max_samples": 7}
    assert value(found, "runner.logger.logger_backends") == ["jsonl"]
    assert value(found, "actor.max_tokens_per_micro_batch") == 200  # of both ranks that share a sequence
    assert (value(found, "actor.parallel.data_replicate"), value(found, "actor.parallel.data_shard")) == (2, 2)
    assert outcome(found, "overrides[0].engine")[0] is Kind.NOT_NEEDED
    assert outcome(found, "overrides[1].optim")[0] is Kind.MISSING


def test_a_file_of_ones_own_is_named_by_hydras_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("model: {path: me/model}\ndata: {max_length: 5}\ntrainer: {seed: 3}\n")
    command = "python -m verl.trainer.sft_trainer_ray --config-path=. --config-name own trainer.n_gpus_per_node=2"
    found = typed(command, "trainer.nnodes=2 optim.lr=1e-5")
    assert (value(found, "data.max_length"), value(found, "runner.seed")) == (5, 3)
    assert value(found, "runner.nproc_per_node") == 2  # Ray starts them
    assert outcome(found, "trainer.nnodes")[0] is Kind.MISSING


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo", "main_ppo is no supervised fine-tuning"),
        (f"{ENGINE} data.max_length", "data.max_length is no key=value"),
        (f"{ENGINE} --config-name", "--config-name has no value"),
        (f"{ENGINE} --multirun", "--multirun is no key=value"),
    ],
)
def test_other_commands_and_words_are_refused(command: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_command_line(shlex.split(command))


def test_fields_of_columns_are_taken_by_a_transform(changed: Callable[..., Converted]) -> None:
    found = changed(data__prompt_key="extra_info", data__prompt_dict_keys=["question"])
    kind, text = outcome(found, "data.prompt_dict_keys")
    assert (kind, "question: row['extra_info']['question']" in text) == (Kind.MISSING, True)
    assert value(found, "data.columns") == "absent"


def test_chats_have_columns_of_other_names(changed: Callable[..., Converted]) -> None:
    found = changed(data__multiturn={"enable": True, "messages_key": "turns", "enable_thinking_key": "thinks"})
    assert value(found, "data.columns") == {"messages": "turns"}
    assert outcome(found, "data.multiturn.enable_thinking_key")[0] is Kind.MISSING
    assert outcome(found, "data.prompt_key")[0] is Kind.NOT_NEEDED


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("data.truncation", "left", Kind.MISSING),
        ("data.custom_cls.path", "rows.py", Kind.MISSING),
        ("model.fsdp_config.model_dtype", "bf16", Kind.MISSING),
        ("model.fsdp_config.cpu_offload", True, Kind.TRANSLATED),
        ("model.external_lib", "my_models", Kind.TRANSLATED),
        ("optim.lr_scheduler", "polynomial", Kind.MISSING),
        ("trainer.resume_mode", "resume_path", Kind.MISSING),
        ("trainer.save_freq", "often", Kind.MISSING),
        ("trainer.total_training_steps", 30, Kind.TRANSLATED),
        ("trainer.default_hdfs_dir", "hdfs://x", Kind.MISSING),
    ],
)
def test_what_becomes_of_a_value(changed: Callable[..., Converted], name: str, given: object, kind: Kind) -> None:
    found = changed(**{name.replace(".", "__"): given})
    assert outcome(found, name)[0] is kind


def test_the_state_of_an_optimizer_elsewhere(changed: Callable[..., Converted]) -> None:
    small = changed(optim__optimizer="AdamW8bit", optim__optimizer_impl="bitsandbytes.optim")
    assert value(small, "actor.optim.state_dtype") == "int8"
    own = changed(
        optim__optimizer="Lion", optim__optimizer_impl="lion_pytorch", optim__override_optimizer_config={"a": 1}
    )
    assert (value(own, "actor.optim.name"), value(own, "actor.optim.args")) == ("lion_pytorch:Lion", {"a": 1})
    assert outcome(own, "optim.betas")[0] is Kind.NOT_NEEDED
