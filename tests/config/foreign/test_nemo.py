"""NeMo Automodel: rates, batches, adapters, frozen parts, data sets and teachers, as its sources have them."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.foreign.command_line import read_command_line
from shardtune.config.foreign.conversion import Kind
from shardtune.errors import ConfigError
from tests.config.foreign.conftest import SMALLEST, rates_here, value

STEPS, RATE = 40, 2e-5
LORA, VISION = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig"}, "NeMoAutoModelForImageTextToText"
LINES = (
    "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
)


def rate_there(step: int, style: str, warmup: int, least: float, falls: int = 0) -> float:
    """The rate of a step as its scheduler has it, from zero on."""
    if warmup > 0 and step <= warmup:
        return RATE * step / warmup
    if style == "constant":
        return RATE
    share = (step - warmup) / (STEPS - warmup)
    if style == "WSD":
        share = max(0.0, (step - (STEPS - falls)) / falls)
    return least + (RATE - least) * (0.5 * (1 + math.cos(math.pi * share)) if style == "cosine" else 1 - share)


@pytest.mark.parametrize(
    ("style", "warmup", "least"), [("cosine", 0, 1e-6), ("cosine", 5, 0.0), ("linear", 3, 1e-6), ("constant", 7, 0.0)]
)
def test_the_rate_of_each_step_is_theirs(of, tmp_path: Path, style: str, warmup: int, least: float):
    schedule = {"lr_decay_style": style, "lr_warmup_steps": warmup, "init_lr": 0.0, "min_lr": least}
    found = of("nemo", lr_scheduler=schedule)
    expected = [rate_there(step, style, warmup, least) for step in range(STEPS)]
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_last_part_of_a_stable_rate_is_theirs(of, tmp_path: Path):
    schedule = {"lr_decay_style": "WSD", "lr_warmup_steps": 0, "min_lr": 0.0, "lr_wsd_decay_style": "linear"}
    steps = {**SMALLEST["nemo"]["step_scheduler"], "max_steps": STEPS}
    found = of("nemo", lr_scheduler={**schedule, "wsd_decay_steps": 10}, step_scheduler=steps)
    expected = [rate_there(step, "WSD", 0, 0.0, 10) for step in range(STEPS)]
    assert rates_here(found, tmp_path, STEPS) == pytest.approx(expected, rel=1e-12)
    other = of("nemo", lr_scheduler={**schedule, "wsd_decay_steps": 10, "lr_wsd_decay_style": "cosine"})
    kinds = {name: one.kind for name, one in other.conversion.outcomes.items()}
    assert kinds["lr_scheduler.lr_wsd_decay_style"] is kinds["lr_scheduler.wsd_decay_steps"] is Kind.MISSING


def test_defaults_of_the_schedule_are_written_or_said(of):
    none = of("nemo")
    assert value(none, "actor.optim.lr_scheduler") == "constant"
    steps = {**SMALLEST["nemo"]["step_scheduler"], "max_steps": 60}
    found = of("nemo", lr_scheduler={"lr_decay_style": "cosine"}, step_scheduler=steps)
    assert value(found, "actor.optim.lr_warmup_steps") == 6
    assert value(found, "actor.optim.min_lr") == pytest.approx(2e-7)
    assert "begins at a rate of 2e-06" in found.report
    unknown = of("nemo", lr_scheduler={"lr_decay_style": "inverse-square-root", "start_wd": 0.1, "end_wd": 0.2})
    left = {name for name, one in unknown.conversion.outcomes.items() if one.kind is Kind.MISSING}
    assert left == {"lr_scheduler.lr_decay_style", "lr_scheduler.start_wd", "lr_scheduler.end_wd"}
    assert value(unknown, "actor.optim.lr_warmup_steps_ratio") == 0.1


def test_the_rows_of_a_step_are_theirs_on_any_number_of_ranks(of):
    found = of("nemo", world_size=8, step_scheduler={"global_batch_size": 64, "local_batch_size": 2})
    assert value(found, "actor.global_batch_size") == 64
    assert value(found, "actor.micro_batch_size") == 2
    assert value(found, "runner.max_epochs") == 10
    packed = of("nemo", packed_sequence={"packed_sequence_size": 512})
    assert value(packed, "actor.global_batch_tokens") == 8 * 512
    assert value(packed, "actor.max_tokens_per_micro_batch") == 512
    assert value(packed, "data.max_length") == 512
    assert value(packed, "runner.save_interval") == 100
    never = of("nemo", checkpoint={"enabled": False})
    assert value(never, "runner.save_interval") == "absent"  # -1, the default here


@pytest.mark.parametrize(
    ("peft", "targets", "excluded"),
    [
        ({}, ".*_proj", "absent"),
        ({"target_modules": ["*q_proj", "*.v_proj"]}, ["q_proj", "v_proj"], "absent"),
        ({"target_modules": "*.layers.0.*_proj"}, r".*\.layers\.0\..*_proj", "absent"),
        ({"match_all_linear": True}, "all-linear", "absent"),
        ({"exclude_modules": ["*vision_tower*"]}, "all-linear", ".*vision_tower.*"),
        ({"target_modules": ["q_proj", "*.layers.0.*"]}, r"(.*\.)?q_proj|.*\.layers\.0\..*", "absent"),
        ({"target_modules": ["*proj"]}, ".*proj", "absent"),
    ],
)
def test_modules_with_an_adapter(of, peft: dict[str, Any], targets: object, excluded: object):
    found = of("nemo", peft={**LORA, **peft})
    shown = value(found, "actor.model.lora.target_modules")
    assert (shown if shown != "absent" else "all-linear", value(found, "actor.model.lora.exclude_modules")) == (
        targets, excluded,
    )  # fmt: skip
    assert (value(found, "actor.model.lora.r"), value(found, "actor.model.is_lora")) == (8, True)
    assert value(found, "actor.optim.groups") == "absent"


def test_four_bits_are_of_the_frozen_base_alone(of):
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert value(of("nemo", peft=LORA, quantization=four), "actor.model.lora.base_dtype") == "nf4"
    full = of("nemo", quantization=four)
    assert full.conversion.outcomes["quantization.load_in_4bit"].kind is Kind.NOT_NEEDED
    assert value(full, "actor.optim.groups") == [{"pattern": ".", "weight_decay": 0.01}]


def test_the_vision_tower_is_frozen_unless_it_is_not(of):
    model = {**SMALLEST["nemo"]["model"], "_target_": f"nemo_automodel.{VISION}.from_pretrained"}
    found = of("nemo", model=model, recipe="FinetuneRecipeForVLM", freeze_config={"freeze_language_model": False})
    assert value(found, "actor.model.model_type") == "vision_language"
    (pattern,) = value(found, "actor.model.freeze")
    names = ("model.visual.merger.mlp.0.weight", "model.Vision_tower.layers.0.bias", "model.language_model.norm.weight")
    assert [bool(re.search(pattern, name)) for name in names] == [True, True, False]
    trained = of("nemo", model=model, freeze_config={"freeze_vision_tower": False})
    assert value(trained, "actor.model.freeze") == "absent"
    lora = {**LORA, "exclude_modules": ["lm_head", "*connector*"]}
    adapted = of("nemo", model=model, freeze_config={"freeze_vision_tower": True}, peft=lora)
    excluded = value(adapted, "actor.model.lora.exclude_modules")
    modules = ("lm_head", "model.connector.up", "model.visual.blocks.0.qkv", "model.layers.0.q_proj")
    assert [bool(re.fullmatch(str(excluded), name)) for name in modules] == [True, True, True, False]
    assert value(adapted, "actor.model.freeze") == "absent"
    text = of("nemo", freeze_config={"freeze_vision_tower": True})
    assert text.conversion.outcomes["freeze_config.freeze_vision_tower"].kind is Kind.NOT_NEEDED


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"step_scheduler": {"max_step": 100}}, {"step_scheduler.max_step": Kind.UNKNOWN}),
        ({"lr_scheduler": {"warmup_steps": 9}}, {"lr_scheduler.warmup_steps": Kind.UNKNOWN}),
        ({"peft": {**LORA, "rank": 4}}, {"peft.rank": Kind.UNKNOWN}),
        ({"peft": {"_target_": "mine.Adapter"}}, {"peft._target_": Kind.MISSING}),
        ({"loss_fn": {"_target_": "mine.CrossEntropy"}}, {"loss_fn._target_": Kind.MISSING}),
        ({"dataset": {"_target_": "mine.ChatDataset"}}, {"dataset._target_": Kind.MISSING}),
        ({"dataloader": {"collate_fn": "mine.collate"}}, {"dataloader.collate_fn": Kind.MISSING}),
        ({"dataloader": {"batch_size": 4}}, {"dataloader.batch_size": Kind.MISSING}),
        (
            {"packed_sequence": {"packed_sequence_size": 64, "max_packs": 2}},
            {"packed_sequence.max_packs": Kind.MISSING},
        ),
        ({"model": {"backend": {"fake_balanced_gate": True}}}, {"model.backend.fake_balanced_gate": Kind.MISSING}),
        ({"tokenizer": {"add_eos_token": True}}, {"tokenizer.add_eos_token": Kind.MISSING}),
        (
            {"peft": LORA, "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
            {"quantization.bnb_4bit_quant_type": Kind.MISSING},
        ),
        (
            {"dataset": {**SMALLEST["nemo"]["dataset"], "split": "train[:9]", "shuffle_seed": 1}},
            {"dataset.shuffle_seed": Kind.MISSING},
        ),
    ],
)
def test_keys_that_change_numbers_are_not_said_to_change_none(of, changes: dict[str, Any], kinds: dict[str, Kind]):
    found = of("nemo", **changes)
    assert {name: found.conversion.outcomes[name].kind for name in kinds} == kinds
    assert set(found.conversion.outcomes) == set(found.conversion.given)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "torch.optim.AdamW"},
        {"dataset": [SMALLEST["nemo"]["dataset"]]},
        {"fp8": True},
        {"step_scheduler": {"num_epochs": 2.5}},
        {"step_scheduler": {"ckpt_every_steps": 0}},
        {"lr_scheduler": {"lr_warmup_steps": 0.1}},
        {"optimizer.lr": 3},
    ],
)
def test_what_is_no_section_or_number_is_one_message(of, changes: dict[str, Any]):
    with pytest.raises(ConfigError):
        of("nemo", **changes)


def test_epochs_and_intervals_that_are_null(of):
    steps = {"global_batch_size": 8, "num_epochs": None, "max_steps": 90, "ckpt_every_steps": None}
    held_out = {**SMALLEST["nemo"]["dataset"], "split": "validation"}
    found = of("nemo", step_scheduler=steps, validation_dataset=held_out)
    assert value(found, "runner.max_epochs") == -1
    assert value(found, "runner.save_interval") == value(found, "runner.eval_interval") == "epoch"
    saved = of("nemo", step_scheduler={"ckpt_every_steps": 7}, validation_dataset=held_out)
    assert value(saved, "runner.eval_interval") == 7


def test_the_computation_is_that_of_its_sharding(of):
    model = {**SMALLEST["nemo"]["model"], "torch_dtype": "torch.float32"}
    assert value(of("nemo", world_size=8, model=model), "actor.model.precision") == "bf16"
    assert value(of("nemo", world_size=1, model=model), "actor.model.precision") == "fp32"
    whole = {"strategy": "fsdp2", "mp_policy": {"param_dtype": "float32"}}
    assert value(of("nemo", world_size=8, distributed=whole), "actor.model.precision") == "fp32"
    recomputed = of("nemo", distributed={"activation_checkpointing": "full"})
    assert value(recomputed, "actor.model.gradient_checkpointing") is True


def test_optimizers_with_groups_and_of_other_packages(of):
    adamw = {"_target_": "torch.optim.AdamW", "lr": 1e-4, "weight_decay": 0.1}
    groups = [{"pattern": "router", "lr_mult": 0.1}, {"pattern": "bias", "wd_mult": 0.0}]
    found = of("nemo", optimizer={**adamw, "param_group_overrides": groups}, lr_scheduler={})
    assert value(found, "actor.optim.groups") == [
        {"pattern": ".", "weight_decay": 0.1},
        {"pattern": "bias", "lr": 1e-4, "weight_decay": 0.0},
        {"pattern": "router", "lr": pytest.approx(1e-5), "weight_decay": 0.1},
    ]
    other = of("nemo", optimizer={"_target_": "mine.optim.AdamW", "lr": 1e-4, "momentum": 0.9, "rank": [1, 2]})
    assert value(other, "actor.optim.name") == "mine.optim:AdamW"
    assert value(other, "actor.optim.args") == {"momentum": 0.9, "rank": [1, 2]}
    plain = of("torchtune", optimizer={"_component_": "torch.optim.NAdam", "lr": 1e-4, "momentum_decay": 0.1})
    assert (value(plain, "actor.optim.name"), value(plain, "actor.optim.args")) == ("NAdam", {"momentum_decay": 0.1})


def test_rows_that_are_longer_than_a_packed_sequence_are_left_out(of):
    packed = of("nemo", packed_sequence={"packed_sequence_size": 64})
    assert value(packed, "data.on_too_long") == "drop"
    cut = {**SMALLEST["nemo"]["dataset"], "seq_length": 32, "truncation": True}
    assert value(of("nemo", packed_sequence={"packed_sequence_size": 64}, dataset=cut), "data.on_too_long") == "absent"
    images = {"_target_": "nemo_automodel.components.datasets.vlm.datasets.make_meta_dataset", "max_length": 48}
    assert value(of("nemo", dataset=images), "data.max_length") == 48


def test_rows_of_any_columns(of):
    columns = {"question": "ask", "answer": "say"}
    rows = {"_target_": LINES, "path_or_dataset_id": ["a.jsonl", "b.jsonl"], "column_mapping": columns}
    plain = of("nemo", dataset={**rows, "limit_dataset_samples": 9, "answer_only_loss_mask": False})
    entry = value(plain, "data.train_data_paths")
    assert [one["columns"] for one in entry] == [{"prompt": "ask", "completion": "say"}] * 2
    assert value(plain, "data.train_on") == "all"
    assert value(plain, "data.max_length") == 131072
    assert "the end token is trained" in " ".join(plain.report.split())
    part = of("nemo", dataset={**rows, "split": "train[:5]"})
    assert part.conversion.outcomes["dataset.split"].kind is Kind.NOT_NEEDED
    assert all("max_samples" not in one for one in value(part, "data.train_data_paths"))
    several = of("nemo", dataset={**rows, "path_or_dataset_id": "me/rows", "split": ["train", "test"]})
    assert several.conversion.outcomes["dataset.split"].kind is Kind.MISSING
    assert "does not load" not in several.report
    chat = of("nemo", dataset={**rows, "path_or_dataset_id": "me/rows", "use_hf_chat_template": True})
    assert value(chat, "data.train_data_paths") == {"path": "me/rows", "columns": {"question": "ask", "answer": "say"}}
    joined = of("nemo", dataset={**rows, "column_mapping": {"context": "text", **columns}})
    assert joined.conversion.outcomes["dataset.column_mapping.context"].kind is Kind.MISSING
    other = of("nemo", dataset={"_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"})
    assert other.conversion.outcomes["dataset._target_"].kind is Kind.MISSING


def test_that_the_opening_of_an_answer_is_trained_there_is_said(of):
    assert any("opens an answer" in note for note in of("nemo").conversion.notes)
    rows = {"_target_": LINES, "path_or_dataset_id": "a.jsonl", "column_mapping": {"question": "q", "answer": "a"}}
    assert not any("opens an answer" in note for note in of("nemo", dataset=rows).conversion.notes)


def test_evaluation_sets_keep_their_names(of):
    chats = SMALLEST["nemo"]["dataset"]
    found = of("nemo", validation_dataset_math={**chats, "path_or_dataset_id": "me/math"}, validation_dataset=chats)
    assert value(found, "data.eval_data_paths") == {
        "math": {"path": "me/math", "split": "train"},
        "default": {"path": "org/rows", "split": "train"},
    }


def test_a_teacher_is_distilled(of):
    teacher = {"pretrained_model_name_or_path": "org/large", "torch_dtype": "bf16"}
    found = of(
        "nemo",
        recipe="KnowledgeDistillationRecipeForNextTokenPrediction",
        teacher_model=teacher,
        kd_ratio=0.25,
        kd_loss_fn={"_target_": "nemo_automodel.components.loss.kd_loss.KDLoss", "temperature": 2.0},
    )
    made = {key: line.value for key, line in found.conversion.lines.items() if "teacher" in key or key == "actor.loss"}
    assert made == {
        "actor.loss": "distill",
        "actor.teacher.model_path": "org/large",
        "actor.teacher.ce_share": 0.75,
        "actor.teacher.temperature": 2.0,
    }
    assert "does not load" not in found.report


def test_the_command_of_automodel_is_read():
    words = "A=1 automodel nemo.yaml --nproc-per-node 8 --optimizer.lr 1e-5 --peft.use_dora --seed=7"
    found = read_command_line(shlex.split(words))
    assert (found.file, found.environment) == (Path("nemo.yaml"), {"A": "1"})
    assert found.keys == {"optimizer.lr": 1e-5, "peft.use_dora": True, "seed": 7}
    assert found.launch is not None
    assert found.launch.options == {"nproc_per_node": "8"}
    first = read_command_line(shlex.split("automodel --nproc-per-node 2 nemo.yaml --seed 1"))
    assert (first.file, first.keys) == (Path("nemo.yaml"), {"seed": 1})
    for wrong in (
        "--optimizer.lr 1 --optimizer.lr 2",
        "--nproc_per_node 2 --nproc-per-node 3",
        "--seed 1 more",
        "--a.b 1 --a null",
        "--",
        "-c",
    ):
        with pytest.raises(ConfigError):
            read_command_line(shlex.split(f"automodel nemo.yaml {wrong}"))
    older = read_command_line(shlex.split("automodel finetune llm -c nemo.yaml"))
    assert (older.file, older.keys) == (Path("nemo.yaml"), {})
