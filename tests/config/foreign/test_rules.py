"""The numbers of other trainers: rates, batches, defaults and targets, as their sources have them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import convert
from shardtune.errors import ConfigError
from tests.config.foreign.conftest import rates_here, value

STEPS, RATE = 40, 2e-4
SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "linear", "warmup_steps": 5},
    {"lr_scheduler_type": "cosine", "warmup_ratio": 0.11},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.11},
    {"lr_scheduler_type": "constant", "warmup_steps": 5},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7},
    {"lr_scheduler_type": "polynomial", "warmup_steps": 3},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5}},
    {"lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 3},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 4},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 10, "decay_type": "linear"},
        "warmup_steps": 5,
    },
    {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.1},
    },
]


CHATS, TEXTS = {"path": "org/chats", "type": "chat_template"}, {"path": "org/texts", "type": "completion:body"}
BASE = "actor.model.lora.base_dtype"
HELD_OUT = {"val_size": 0.1, "eval_strategy": "epoch"}


def rates_of(name: str, warmup: int, **options: Any) -> list[float]:
    """The rate of each step by transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=options or None)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.lengthy
@pytest.mark.parametrize("given", SCHEDULES, ids=lambda given: "-".join(map(str, given.values()))[:40])
@pytest.mark.parametrize("trainer", ["trl"])
def test_the_rates_of_all_steps_are_those_of_transformers(of, tmp_path: Path, trainer: str, given: dict[str, Any]):
    found = of(trainer, max_steps=STEPS, learning_rate=RATE, **given)
    share = given.get("warmup_ratio") or given.get("warmup_steps", 0)
    warmup = math.ceil(STEPS * share) if share < 1 else share
    theirs = rates_of(given["lr_scheduler_type"], warmup, **given.get("lr_scheduler_kwargs", {}))
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(theirs, rel=1e-12, abs=1e-18)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("given", "warmup", "options"),
    [
        ({"warmup_ratio": 0.11}, 4, {}),  # rounded down there
        ({"warmup_steps": 1}, 2, {}),
        ({}, 2, {}),  # 3% of 40 is 1, made 2
        ({"warmup_steps": 6, "cosine_min_lr_ratio": 0.2}, 6, {"min_lr_rate": 0.2}),
    ],
)
def test_the_rates_of_axolotl(of, tmp_path: Path, given: dict[str, Any], warmup: int, options: dict[str, Any]):
    found = of("axolotl", max_steps=STEPS, **{"learning_rate": RATE, **given})
    name = "cosine_with_min_lr" if options else "cosine"
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(rates_of(name, warmup, **options), rel=1e-12, abs=1e-18)


def test_the_rates_of_torchtune(of, tmp_path: Path):
    schedule = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 9,
    }
    optimizer = {"_component_": "torch.optim.AdamW", "lr": RATE}
    found = of("torchtune", max_steps_per_epoch=STEPS, epochs=1, lr_scheduler=schedule, optimizer=optimizer)
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(rates_of("cosine", 9), rel=1e-12, abs=1e-18)
    without = of("torchtune", max_steps_per_epoch=STEPS, optimizer=optimizer)
    assert rates_here(without, tmp_path, STEPS) == [RATE] * STEPS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, ""),
        ({"decay_type": "cosine", "min_lr_factor": 0.1}, ""),
        ({"decay_ratio": 0.25, "min_lr_factor": 0.1}, ""),
        ({"decay_ratio": 0.99, "decay_type": "cosine"}, ""),
        ({"decay_type": "sqrt"}, "lr_scheduler.decay_type"),
        ({"decay_ratio": 0.25, "decay_type": "cosine"}, "lr_scheduler.decay_type"),
        ({"total_steps": 9}, "lr_scheduler.total_steps"),
    ],
)
def test_the_rates_of_torchtitan(of, tmp_path: Path, given: dict[str, Any], says: str):
    training = {"dataset": "c4", "steps": STEPS}
    found = of("torchtitan", training=training, optimizer={"lr": RATE}, lr_scheduler={"warmup_steps": 5, **given})
    left = [name for name, one in found.conversion.outcomes.items() if one.kind is Kind.MISSING and "lr_" in name]
    assert left == ([says] if says else [])
    if says:
        return
    fall = min(round(given.get("decay_ratio", 1) * STEPS), STEPS - 5)
    low, theirs = given.get("min_lr_factor", 0.0), []
    for step in range(STEPS):
        done = max(0, step - (STEPS - fall)) / fall
        part = 0.5 * (1 + math.cos(math.pi * done)) if given.get("decay_type") == "cosine" else 1 - done
        theirs.append(RATE * ((step + 1) / 5 if step < 5 else low + (1 - low) * part))
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("kind", ["inverse_sqrt", "reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_there_is_not_is_said(of, kind: str):
    outcome = of("trl", lr_scheduler_type=kind).conversion.outcomes["lr_scheduler_type"]
    assert (outcome.kind, "constant, linear, cosine and wsd" in outcome.text) == (Kind.MISSING, True)


DEFAULTS: dict[str, dict[str, object]] = {
    "trl": {
        "actor.optim.lr": 2e-5,
        "actor.optim.weight_decay": 0.0,
        "actor.optim.lr_scheduler": "linear",
        "actor.global_batch_size": 8,
        "runner.max_epochs": 3,
        "runner.save_interval": 500,
        "data.max_length": 1024,
        "data.train_on": "all",
        "actor.model.gradient_checkpointing": True,
    },
    "axolotl": {
        "actor.optim.weight_decay": 0.0,
        "actor.global_batch_size": 1,
        "actor.optim.lr_warmup_steps_ratio": 0.03,
        "runner.save_interval": "epoch",
        "data.max_length": 512,
        "data.on_too_long": "drop",
    },
    "llama-factory": {
        "actor.optim.lr": 5e-5,
        "actor.optim.weight_decay": 0.0,
        "actor.model.is_lora": True,
        "actor.model.lora.r": 8,
        "actor.model.lora.alpha": 16,
        "actor.model.gradient_checkpointing": True,
    },
    "torchtune": {
        "actor.optim.clip_grad": None,
        "actor.optim.lr_scheduler": "constant",
        "actor.optim.groups": [{"pattern": ".", "weight_decay": 0.01}],
        "data.max_length": 131072,
        "runner.save_interval": "epoch",
    },
    "torchtitan": {
        "actor.optim.adam_beta2": 0.95,
        "actor.optim.weight_decay": 0.1,
        "actor.optim.groups": [{"pattern": ".", "weight_decay": 0.1}],
        "actor.optim.lr_scheduler": "linear",
        "actor.optim.lr_warmup_steps": 20,
        "actor.max_tokens_per_micro_batch": 8 * 2048,
        "actor.global_batch_tokens": 8 * 2048,
        "actor.model.from_scratch": True,
        "actor.model.gradient_checkpointing": "selective",
        "data.on_too_long": "split",
        "runner.logger.log_interval": 10,
    },
}


@pytest.mark.parametrize("trainer", DEFAULTS)
def test_defaults_that_differ_are_written_with_whose_they_are(of, trainer: str):
    found = of(trainer)
    assert {key: value(found, key) for key in DEFAULTS[trainer]} == DEFAULTS[trainer]
    comments = [found.conversion.lines[key].comment for key in DEFAULTS[trainer]]
    assert all(comment for comment in comments)
    assert sum("default" in comment for comment in comments) >= 2


OFFLOAD, RESHARD = "actor.fsdp_config.cpu_offload", "actor.fsdp_config.reshard_after_forward"


@pytest.mark.parametrize(
    ("trainer", "given", "key", "expected"),
    [
        ("trl", {"assistant_only_loss": True}, "data.train_on", "assistant"),
        ("trl", {"completion_only_loss": False}, "data.train_on", "all"),
        ("trl", {"max_grad_norm": 0}, "actor.optim.clip_grad", None),
        ("trl", {"bf16": False}, "actor.model.precision", "fp32"),
        ("trl", {"fp16": True}, "actor.model.precision", "fp16"),
        ("trl", {"learning_rate": "2e-5"}, "actor.optim.lr", 2e-5),
        ("trl", {"num_train_epochs": 2.0}, "runner.max_epochs", 2),
        ("trl", {"optim": "paged_adamw_8bit"}, "actor.optim.state_dtype", "int8"),
        ("trl", {"optim": "sgd", "optim_args": "momentum=0.9"}, "actor.optim.args", {"momentum": 0.9}),
        ("trl", {"eval_strategy": "epoch"}, "runner.eval_interval", "epoch"),
        ("trl", {"save_steps": 0.25, "max_steps": 40}, "runner.save_interval", 10),
        ("trl", {"eval_strategy": "epoch"}, "data.eval_data_paths", {"path": "org/rows", "split": "test"}),
        ("trl", {"dataset_config": "main"}, "data.train_data_paths", "org/rows:main"),
        ("trl", {"use_peft": True, "load_in_4bit": True}, "actor.model.lora.base_dtype", "nf4"),
        ("trl", {"use_peft": True}, "actor.model.lora.dropout", 0.05),
        ("trl", {"use_peft": True}, "actor.model.lora.target_modules", ["q_proj", "v_proj"]),
        (
            "axolotl",
            {"adapter": "lora", "peft_layers_to_transform": [0, 1]},
            "actor.model.lora.layers_to_transform",
            [0, 1],
        ),
        ("axolotl", {"adapter": "lora", "lora_rank_pattern": {"q": 4}}, "actor.model.lora.rank_pattern", {"q": 4}),
        ("trl", {"output_dir": "out/first"}, "runner.logger.log_path", "out"),
        (
            "trl",
            {"report_to": ["wandb", "tensorboard"]},
            "runner.logger.logger_backends",
            ["jsonl", "wandb", "tensorboard"],
        ),
        ("trl", {"fsdp": "full_shard offload"}, "actor.fsdp_config.cpu_offload", True),
        ("trl", {"fsdp_config": {"fsdp_reshard_after_forward": "NO_SHARD"}}, RESHARD, False),
        ("trl", {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}, OFFLOAD, True),
        ("axolotl", {"model_config": {"rope_theta": 5}}, "actor.model.config_overrides", {"rope_theta": 5}),
        ("axolotl", {"train_on_inputs": True}, "data.train_on", "all"),
        ("axolotl", {"excess_length_strategy": "raise"}, "data.on_too_long", "fail"),
        ("axolotl", {"excess_length_strategy": "drop", "datasets": [TEXTS]}, "data.on_too_long", "split"),
        ("axolotl", {"datasets": [CHATS, TEXTS]}, "data.on_too_long", "drop"),
        ("axolotl", {"adapter": "lora", "load_in_8bit": True}, BASE, "bf16"),
        ("axolotl", {"adapter": "lora", "load_in_8bit": True, "fp16": True}, BASE, "absent"),
        ("llama-factory", {"quantization_bit": 8, "fp16": True}, BASE, "absent"),
        ("trl", {"use_peft": True, "load_in_8bit": True, "fp16": True}, BASE, "absent"),
        ("trl", {"packing": True, "packing_strategy": "bfd_split"}, "data.on_too_long", "split"),
        ("trl", {"packing": True, "packing_strategy": "wrapped"}, "data.on_too_long", "split"),
        ("trl", {"packing": True}, "data.on_too_long", "absent"),
        (
            "trl",
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_mean_token_accuracy",
                "eval_strategy": "epoch",
            },
            "runner.best.monitor",
            "eval/token_accuracy",
        ),
        (
            "llama-factory",
            {"early_stopping_steps": 2, "metric_for_best_model": "eval_accuracy", **HELD_OUT},
            "runner.early_stop.monitor",
            "eval/accuracy",
        ),
        (
            "llama-factory",
            {"early_stopping_steps": 2, "metric_for_best_model": "bleu", "greater_is_better": True, **HELD_OUT},
            "runner.early_stop.mode",
            "max",
        ),
        (
            "axolotl",
            {"early_stopping_patience": 2, "metric_for_best_model": "eval_accuracy", "val_set_size": 0.1},
            "runner.early_stop.monitor",
            "eval/accuracy",
        ),
        (
            "axolotl",
            {"load_best_model_at_end": True, "metric_for_best_model": "loss", "val_set_size": 0.1},
            "runner.best.monitor",
            "eval/loss",
        ),
        ("axolotl", {"load_best_model_at_end": True}, "runner.best.monitor", "absent"),
        ("axolotl", {"val_set_size": 0.1}, "runner.eval_interval", "epoch"),  # as there, where there are rows for it
        ("axolotl", {"batch_size": 12, "micro_batch_size": 3}, "actor.global_batch_size", 12),
        ("axolotl", {"wandb_project": "p"}, "runner.logger.project_name", "p"),
        ("axolotl", {"chat_template": "chatml"}, "data.chat_template", "chatml"),
        ("axolotl", {"processor_type": "AutoProcessor"}, "actor.model.model_type", "vision_language"),
        ("axolotl", {"evals_per_epoch": 4}, "runner.eval_interval", "absent"),
        ("axolotl", {"fsdp_config": {"offload_params": True}}, "actor.fsdp_config.cpu_offload", True),
        ("llama-factory", {"mask_history": True}, "data.train_on", "last_assistant"),
        ("llama-factory", {"train_on_prompt": True}, "data.train_on", "all"),
        ("llama-factory", {"finetuning_type": "full"}, "actor.model.is_lora", "absent"),
        ("llama-factory", {"finetuning_type": "full", "pure_bf16": True}, "actor.model.precision", "pure_bf16"),
        ("llama-factory", {"pure_bf16": True}, "actor.model.precision", "absent"),
        ("llama-factory", {"quantization_bit": 4}, "actor.model.lora.base_dtype", "nf4"),
        ("llama-factory", {"pissa_init": True}, "actor.model.lora.init", "pissa_niter_16"),
        ("llama-factory", {"packing": True, "cutoff_len": 100}, "actor.global_batch_tokens", 800),
        ("torchtitan", {"training": {"dataset": "c4"}}, "data.train_data_paths", {"path": "allenai/c4", "name": "en"}),
        ("torchtitan", {"training": {"dataset": "c4", "max_norm": 0.5}}, "actor.optim.clip_grad", 0.5),
        ("torchtitan", {"compile": {"enable": True}}, "actor.model.gradient_checkpointing", True),
        ("torchtitan", {"model": {"converters": ["quantize.linear.float8"]}}, "actor.model.fp8.scaling", "tensorwise"),
        ("torchtitan", {"quantize": {"linear": {"float8": {"emulate": True}}}}, "actor.model.fp8.scaling", "absent"),
        ("torchtitan", {"parallelism": {"fsdp_reshard_after_forward": "never"}}, RESHARD, False),
        ("torchtitan", {"checkpoint": {"initial_load_in_hf": True}}, "actor.model.from_scratch", True),
        (
            "torchtitan",
            {"checkpoint": {"enable": True, "initial_load_in_hf": True, "initial_load_path": "org/it"}},
            "actor.model.model_path",
            "org/it",
        ),
        (
            "torchtitan",
            {"validation": {"enable": True, "freq": 7}},
            "data.eval_data_paths",
            {"path": "allenai/c4", "name": "en", "split": "validation"},
        ),
        ("torchtune", {"clip_grad_norm": 2.0}, "actor.optim.clip_grad", 2.0),
        ("torchtune", {"epochs": 2, "max_steps_per_epoch": 30}, "runner.max_steps", 60),
        ("torchtune", {"batch_size": 3, "gradient_accumulation_steps": 4}, "actor.global_batch_size", 12),
    ],
)
def test_values_mean_the_same(of, trainer: str, given: dict[str, Any], key: str, expected: object):
    found = of(trainer, **given)
    assert value(found, key) == expected
    assert "does not load" not in found.report


@pytest.mark.parametrize(
    ("row", "expected"),
    [({"prompt": "a", "completion": "b"}, "assistant"), ({"messages": []}, "all"), ({"text": "a"}, "all")],
)
def test_what_trl_trains_depends_on_the_rows_where_they_are_at_hand(of, tmp_path: Path, row: object, expected: str):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert value(of("trl", dataset_name="rows.jsonl"), "data.train_on") == expected


def test_data_sets_of_axolotl_become_entries(of):
    sets = [
        {"path": "org/chat", "type": "chat_template", "field_messages": "conversations", "split": "train[:50]",
         "message_property_mappings": {"role": "from", "content": "value"}},
        {"path": "org/code", "type": "alpaca", "shards": 2, "split": "train[10%:]"},
        {"path": "json", "data_files": ["a.jsonl"], "type": {"field_instruction": "q", "field_output": "a"}},
    ]  # fmt: skip
    found = of("axolotl", datasets=sets)
    assert value(found, "data.train_data_paths") == [
        {"path": "org/chat", "max_samples": 50},
        "org/code",
        {"path": "a.jsonl", "columns": {"instruction": "q", "output": "a"}},
    ]
    outcomes = found.conversion.outcomes
    missing = {name for name, one in outcomes.items() if one.kind is Kind.MISSING}
    assert missing == {"datasets[1].type", "datasets[1].shards", "datasets[1].split"}
    assert outcomes["datasets[1].path"].text == "data.train_data_paths: org/code"
    assert outcomes["datasets[0].field_messages"].text.endswith("the format of the rows is recognised")
    assert "'instruction': 'q'" in outcomes["datasets[2].type.field_instruction"].text
    assert of("axolotl", val_set_size=0.0).conversion.outcomes["val_set_size"].text == "no rows are held out"


@pytest.mark.parametrize(
    ("trainer", "given", "name"),
    [
        ("trl", {"num_train_epochs": 0.5}, "num_train_epochs"),
        ("trl", {"load_in_8bit": True, "use_peft": True}, "load_in_8bit"),
        ("trl", {"optim": "lion_8bit"}, "optim"),
        ("trl", {"loss_type": "sigmoid"}, "loss_type"),
        ("trl", {"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ("trl", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy"),
        ("axolotl", {"load_in_8bit": True, "adapter": "lora", "fp16": True}, "load_in_8bit"),
        ("llama-factory", {"quantization_bit": 8, "fp16": True}, "quantization_bit"),
        ("trl", {"dtype": "bfloat16"}, "dtype"),
        ("trl", {"dtype": "float16", "use_peft": True}, "dtype"),
        ("llama-factory", {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size"),
        ("axolotl", {"evals_per_epoch": 4, "val_set_size": 0.1}, "evals_per_epoch"),
        ("axolotl", {"val_set_size": 100}, "val_set_size"),
        ("axolotl", {"special_tokens": {"eos_token": "<e>"}}, "special_tokens.eos_token"),
        ("llama-factory", {"template": "alpaca"}, "template"),
        ("llama-factory", {"use_galore": True}, "use_galore"),
        ("torchtune", {"optimizer_in_bwd": True}, "optimizer_in_bwd"),
    ],
)
def test_what_has_no_counterpart_has_a_remedy(of, trainer: str, given: dict[str, Any], name: str):
    found = of(trainer, **given)
    outcome = found.conversion.outcomes[name]
    assert outcome.kind is Kind.MISSING
    assert len(outcome.text) > 15
    assert "does not load" not in found.report


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("cosine", {"num_cycles": 3}, "lr_scheduler_kwargs.num_cycles"),
        ("cosine", '{"num_cycles": 3}', "lr_scheduler_kwargs"),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "num_cycles": 1.5}, "lr_scheduler_kwargs.num_cycles"),
        ("linear", "num_cycles: 3", "lr_scheduler_kwargs"),
    ],
)
def test_arguments_of_a_schedule_that_are_not_read_are_named(of, kind: str, options: object, name: str):
    found = of("llama-factory", lr_scheduler_type=kind, lr_scheduler_kwargs=options)
    assert found.conversion.outcomes[name].kind is Kind.MISSING


def test_arguments_of_a_schedule_may_be_json_text(of):
    found = of(
        "trl", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr_rate": 0.1}', learning_rate=1e-4
    )
    assert value(found, "actor.optim.min_lr") == pytest.approx(1e-5)
    found = of("trl", lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0})
    assert value(found, "actor.optim.min_lr") == "absent"


@pytest.mark.parametrize(
    ("trainer", "given", "precision", "says", "times"),
    [
        ("llama-factory", {"pure_bf16": True, "finetuning_type": "full"}, "pure_bf16", "state_dtype: bf16", 1),
        ("llama-factory", {"pure_bf16": True, "finetuning_type": "full"}, "pure_bf16", "model's own dtype", 0),
        (
            "llama-factory",
            {"pure_bf16": True, "finetuning_type": "full", "bf16": True},
            "pure_bf16",
            "bf16: true  ->  pure_bf16 is set",
            1,
        ),
        ("llama-factory", {"pure_bf16": True}, "absent", "weights of an adapter stay in fp32", 1),
        ("trl", {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "absent", "precision: pure_bf16", 1),
        ("trl", {"model_init_kwargs": {"torch_dtype": "bfloat16"}, "dtype": "bfloat16"}, "absent", "pure_bf16 and", 1),
        ("trl", {"dtype": "float16", "use_peft": True}, "absent", "pure_bf16", 0),
        ("axolotl", {"bf16": "full", "torch_dtype": "bfloat16"}, "absent", "precision: pure_bf16", 1),
        ("axolotl", {"bf16": "full", "adapter": "lora"}, "absent", "pure_bf16", 0),
        ("torchtune", {"dtype": "bf16"}, "absent", "precision: pure_bf16", 1),
    ],
)
def test_weights_in_bf16_are_said_once_and_where_all_are_trained(
    of, trainer: str, given: dict[str, Any], precision: str, says: str, times: int
):
    found = of(trainer, **given)
    assert value(found, "actor.model.precision") == precision
    assert " ".join(found.report.split()).replace("model.precision: bf16", "").count(" ".join(says.split())) == times
    assert "unknown" not in found.report


def test_the_attention_and_the_dtype_of_halos_are_said(tmp_path: Path):
    keys = "exp_name: x\nn_epochs: 1\ndatasets: [org/rows]\nmodel:\n  name_or_path: org/model\n"
    for given, attention, in_bf16 in (
        ("  attn_implementation: eager\n  policy_dtype: bfloat16\n  peft: {lora_r: 64}", "eager", True),
        ("  attn_implementation: sdpa\n  policy_dtype: float32", "eager", False),
        ("  attn_implementation: sdpa\n  policy_dtype: bfloat16\n  use_peft: true", "sdpa", False),
    ):
        (tmp_path / "halos.yaml").write_text(keys + given)
        found = convert(CommandLine(tmp_path / "halos.yaml"))
        assert value(found, "actor.model.attn_implementation") == attention
        assert ("pure_bf16" in found.report) == in_bf16
        assert "as here" not in found.report
    for loss in ("name: dpo", "dataloader: PairedPreferenceDataLoader"):
        (tmp_path / "halos.yaml").write_text(f"{keys}loss: {{{loss}}}\n")
        with pytest.raises(ConfigError, match="is no supervised fine-tuning"):
            convert(CommandLine(tmp_path / "halos.yaml"))


@pytest.mark.parametrize(
    ("trainer", "sizes"),
    [
        ("axolotl", {"micro_batch_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 2}),
        ("axolotl", {"micro_batch_size": 2, "sequence_parallel_degree": 4}),
        ("torchtune", {"batch_size": 2, "tensor_parallel_dim": 4}),
        (
            "llama-factory",
            {
                "per_device_train_batch_size": 2,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 1,
            },
        ),
    ],
)
def test_processes_that_divide_a_model_have_the_same_rows(of, trainer: str, sizes: dict[str, int]):
    assert value(of(trainer, 8, **sizes), "actor.global_batch_size") == 4


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "torchao.optim.AdamW8bit"])
def test_rate_and_decay_without_a_value_are_those_of_the_class(of, name: str):
    found = of("torchtune", optimizer={"_component_": name}, model={"_component_": "m.lora_llama3_8b"})
    assert value(found, "actor.optim.lr") == 1e-3
    assert value(found, "actor.optim.weight_decay") in (0.01, "absent")  # ours too


def test_what_changes_a_model_or_its_rows_is_named(of):
    model = {"_component_": "torchtune.models.llama3.llama3", "attn_dropout": 0.1}
    assert of("torchtune", model=model).conversion.outcomes["model.attn_dropout"].kind is Kind.MISSING
    for trainer in ("trl", "axolotl", "llama-factory"):
        outcomes = of(trainer, dataloader_drop_last=True).conversion.outcomes
        assert outcomes["dataloader_drop_last"].kind is Kind.MISSING
    assert value(of("llama-factory", use_swanlab=True), "runner.logger.logger_backends") == ["jsonl", "swanlab"]
    assert value(of("trl", max_grad_norm=math.inf), "actor.optim.clip_grad") is None


def test_the_parts_that_llama_factory_freezes_are_frozen(of, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"architectures": ["QwenVL"], "vision_config": {}}))
    full = {"model_name_or_path": "model", "finetuning_type": "full"}
    assert value(of("llama-factory", **full), "actor.model.freeze") == ["vision_tower", "projector"]
    found = of("llama-factory", **full, freeze_vision_tower=False, freeze_language_model=True)
    assert value(found, "actor.model.freeze") == ["projector", "language_model"]
    assert found.conversion.outcomes["freeze_vision_tower"].text == "the part is trained, as it is here"
    pattern = value(of("llama-factory", model_name_or_path="model"), "actor.model.lora.exclude_modules")
    left_out = {
        "model.visual.blocks.0.attn.qkv": True,
        "visual.merger.mlp.0": True,
        "model.multi_modal_projector.linear_1": True,
        "model.language_model.layers.0.self_attn.q_proj": False,
    }
    assert {name: re.fullmatch(str(pattern), name) is not None for name in left_out} == left_out
    found = of("llama-factory", model_name_or_path="org/else")
    assert any("freezes vision tower and projector unless" in note for note in found.conversion.notes)


def test_rows_that_are_cut_or_trained_otherwise_are_said(of):
    (note,) = [one for one in of("axolotl", datasets=[CHATS, TEXTS]).conversion.notes if "type: completion" in one]
    assert note.endswith("for all rows: drop, or split, which cuts conversations too")
    for trainer, given, says, count in (
        ("axolotl", {"train_on_inputs": True}, "every turn", 1),
        ("axolotl", {"train_on_inputs": True, "datasets": [TEXTS]}, "every turn", 0),
        ("llama-factory", {}, "the question alone", 1),
        ("llama-factory", {"stage": "pt"}, "the question alone", 0),
    ):
        assert sum(says in one for one in of(trainer, **given).conversion.notes) == count


def test_processes_that_share_a_batch_are_named(of):
    outcomes = of("trl", accelerator_config={"split_batches": True, "even_batches": True}).conversion.outcomes
    assert outcomes["accelerator_config.split_batches"].kind is Kind.MISSING
    assert outcomes["accelerator_config.even_batches"].kind is Kind.NOT_NEEDED


def test_the_scheduler_of_deepspeed_is_named(of):
    found = of("trl", deepspeed={"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "Lamb"}})
    assert any("its scheduler (WarmupLR) replaces the one of TRL" in note for note in found.conversion.notes)
    assert any("its optimizer (Lamb)" in note for note in found.conversion.notes)


def test_arguments_of_from_pretrained_have_the_keys_that_say_the_same(of):
    found = of("trl", model_init_kwargs={"attn_implementation": "sdpa", "dtype": "bfloat16", "revision": "main"})
    assert value(found, "actor.model.attn_implementation") == "sdpa"
    assert "actor.model.precision" in found.conversion.outcomes["model_init_kwargs.dtype"].text
    assert "config_overrides" in found.conversion.outcomes["model_init_kwargs.revision"].text


@pytest.mark.parametrize(
    ("degrees", "world", "rows", "lines"),
    [
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 8, 2, {"tensor": 2, "sequence": 2}),
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}, None, 8, {"data_replicate": 2}),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, 2, 2, {}),
        ({"expert_parallel_degree": 4}, 4, 4, {"expert": 4}),
    ],
)
def test_the_degrees_of_torchtitan_are_a_layout_and_count_its_rows(
    of, degrees: dict[str, int], world: int | None, rows: int, lines: dict[str, int]
):
    training = {"dataset": "c4", "local_batch_size": 3, "seq_len": 100}
    found = of("torchtitan", world, training=training, parallelism=degrees)
    assert value(found, "actor.global_batch_tokens") == 3 * rows * 100
    assert {key: value(found, f"actor.parallel.{key}") for key in lines} == lines
    is_ddp = degrees.get("data_parallel_shard_degree") == 1
    assert value(found, "actor.training_backend") == ("ddp" if is_ddp else "absent")
    whole = of("torchtitan", world, training={**training, "global_batch_size": 5}, parallelism=degrees)
    assert value(whole, "actor.global_batch_tokens") == 500


def test_losses_and_collators_of_torchtune(of):
    smooth = of(
        "torchtune", loss={"_component_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1, "weight": [1, 2]}
    )
    assert value(smooth, "actor.label_smoothing") == 0.1
    assert smooth.conversion.outcomes["loss.weight"].kind is Kind.MISSING
    own = of("torchtune", loss={"_component_": "mine.ShiftedCELoss"}, collate_fn="mine.collate")
    assert {own.conversion.outcomes[name].kind for name in ("loss._component_", "collate_fn")} == {Kind.MISSING}
    plain = of("torchtune", loss={"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"})
    assert plain.conversion.outcomes["loss._component_"].kind is Kind.NOT_NEEDED


def test_parts_that_torchtune_does_not_train_are_said(of):
    builder = "torchtune.models.llama3_2_vision.llama3_2_vision_11b"
    found = of("torchtune", model={"_component_": builder, "encoder_trainable": False})
    assert "actor.model.freeze" in found.conversion.outcomes["model.encoder_trainable"].text
    assert any("decoder_trainable" in note for note in found.conversion.notes)


def test_a_pattern_of_modules_stays_one(of):
    pattern = r".*layers\.[0-3]\..*(q|v)_proj"
    found = of("axolotl", adapter="lora", lora_target_modules=pattern)
    assert value(found, "actor.model.lora.target_modules") == pattern
    alone = of("trl", use_peft=True, lora_target_modules=[pattern])
    assert value(alone, "actor.model.lora.target_modules") == pattern
    assert "does not load" not in found.report + alone.report


def test_projects_of_axolotl_by_each_logger(of):
    found = of("axolotl", use_mlflow=True, mlflow_experiment_name="tuning", mlflow_tracking_uri="http://host")
    assert value(found, "runner.logger.project_name") == "tuning"
    assert found.conversion.outcomes["mlflow_tracking_uri"].kind is Kind.MISSING
    two = of("axolotl", use_mlflow=True, mlflow_experiment_name="tuning", wandb_project="other")
    assert value(two, "runner.logger.project_name") == "other"
    assert two.conversion.outcomes["mlflow_experiment_name"].kind is Kind.MISSING


@pytest.mark.parametrize("name", ["processor_kwargs", "model_kwargs", "overrides_of_model_kwargs", "bnb_config_kwargs"])
def test_arguments_of_axolotl_that_change_a_model_are_named(of, name: str):
    assert of("axolotl", **{name: {"min_pixels": 4}}).conversion.outcomes[f"{name}.min_pixels"].kind is Kind.MISSING
