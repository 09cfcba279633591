"""NeMo Automodel: rates, batches, adapters, frozen parts, data sets and teachers, as its sources have them."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config import load_recipe
from shardtune.config.foreign.command_line import read_command_line
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted
from shardtune.optim.build import set_learning_rate
from tests.config.foreign.conftest import SMALLEST, value

STEPS, RATE = 40, 2e-5
LORA, VISION = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig"}, "NeMoAutoModelForImageTextToText"
LINES = (
    "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
)


def rates_here(found: Converted, folder: Path) -> list[float]:
    (folder / "made.yaml").write_text(found.recipe)
    optim = load_recipe(folder / "made.yaml", files_must_exist=False).actor.optim
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    optimizer.param_groups[0]["base_lr"] = optim.lr
    return [set_learning_rate(optimizer, step, STEPS, optim) for step in range(STEPS)]


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
    assert rates_here(found, tmp_path) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_last_part_of_a_stable_rate_is_theirs(of, tmp_path: Path):
    schedule = {"lr_decay_style": "WSD", "lr_warmup_steps": 0, "min_lr": 0.0, "lr_wsd_decay_style": "linear"}
    steps = {**SMALLEST["nemo"]["step_scheduler"], "max_steps": STEPS}
    found = of("nemo", lr_scheduler={**schedule, "wsd_decay_steps": 10}, step_scheduler=steps)
    expected = [rate_there(step, "WSD", 0, 0.0, 10) for step in range(STEPS)]
    assert rates_here(found, tmp_path) == pytest.approx(expected, rel=1e-12)
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
    assert value(found, "actor.model.freeze") == ["vision_tower"]
    trained = of("nemo", model=model, freeze_config={"freeze_vision_tower": False})
    assert value(trained, "actor.model.freeze") == "absent"
    adapted = of("nemo", model=model, freeze_config={"freeze_vision_tower": True}, peft=LORA)
    assert "vision_tower" in str(value(adapted, "actor.model.lora.exclude_modules"))
    assert value(adapted, "actor.model.freeze") == "absent"


def test_rows_of_any_columns(of):
    columns = {"question": "ask", "answer": "say"}
    rows = {"_target_": LINES, "path_or_dataset_id": ["a.jsonl", "b.jsonl"], "column_mapping": columns}
    plain = of("nemo", dataset={**rows, "limit_dataset_samples": 9, "answer_only_loss_mask": False})
    entry = value(plain, "data.train_data_paths")
    assert [one["columns"] for one in entry] == [{"prompt": "ask", "completion": "say"}] * 2
    assert value(plain, "data.train_on") == "all"
    assert value(plain, "data.max_length") == 131072
    chat = of("nemo", dataset={**rows, "path_or_dataset_id": "me/rows", "use_hf_chat_template": True})
    assert value(chat, "data.train_data_paths") == {"path": "me/rows", "columns": {"question": "ask", "answer": "say"}}
    joined = of("nemo", dataset={**rows, "column_mapping": {"context": "text", **columns}})
    assert joined.conversion.outcomes["dataset.column_mapping.context"].kind is Kind.MISSING
    other = of("nemo", dataset={"_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"})
    assert other.conversion.outcomes["dataset._target_"].kind is Kind.MISSING


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
    older = read_command_line(shlex.split("automodel finetune llm -c nemo.yaml"))
    assert (older.file, older.keys) == (Path("nemo.yaml"), {})
