"""ms-swift: its flags and files, with the defaults that are its own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from shardtune.config.foreign.command_line import CommandLine, read_command_line
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted, convert
from tests.config.foreign.conftest import SOURCES, rates_here, value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(flags: str, world_size: int | None = 1) -> Converted:
    """What is made of `swift sft` with flags, and of variables in front of it."""
    words = flags if "swift " in flags else f"swift sft --model me/model --dataset me/rows {flags}"
    return convert(read_command_line(shlex.split(words)), world_size=world_size)


def outcome(found: Converted, name: str) -> tuple[Kind, str]:
    one = found.conversion.outcomes[name]
    return one.kind, one.text


def test_the_recipe_is_what_swift_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out is what is the default here."""
    monkeypatch.chdir(SOURCES)
    lines = convert(CommandLine(Path("swift.yaml")), world_size=2).conversion.lines
    assert {key: line.value for key, line in lines.items()} == {
        "runner.max_epochs": 2,
        "runner.save_interval": 50,
        "runner.keep_last": 2,
        "runner.nproc_per_node": 2,
        "runner.logger.log_path": ".",
        "runner.logger.experiment_name": "output",
        "runner.logger.log_interval": 5,
        "actor.micro_batch_size": 2,
        "actor.eval_micro_batch_size": 1,
        "actor.global_batch_size": 16,
        "actor.model.model_path": "./model",
        "actor.model.gradient_checkpointing": True,
        "actor.model.is_lora": True,
        "actor.model.lora.r": 4,
        "actor.model.lora.alpha": 8,
        "actor.model.lora.dropout": 0.05,
        "actor.model.lora.base_dtype": "bf16",
        "actor.optim.lr": 1e-4,
        "actor.optim.adam_beta2": 0.95,
        "actor.optim.weight_decay": 0.1,
        "actor.optim.lr_warmup_steps_ratio": 0.05,
        "actor.optim.lr_warmup_from_zero": True,
        "data.train_data_paths": {"path": "rows.jsonl", "max_samples": 8},
        "data.system_prompt": "You add.",
        "data.train_on": "last_assistant",
        "data.max_length": 64,
        "data.on_bad_row": "skip",
        "data.num_workers": 4,
    }


def test_what_is_not_given_has_its_defaults() -> None:
    found, whole = typed(""), typed("--tuner_type full")
    assert (value(found, "actor.optim.lr"), value(whole, "actor.optim.lr")) == (1e-4, "absent")  # 1e-5 is ours, too
    assert (value(found, "actor.model.lora.r"), value(found, "actor.model.lora.alpha")) == (8, 32)
    assert (value(found, "runner.max_epochs"), value(found, "runner.save_interval")) == (3, 500)
    assert (value(found, "data.on_too_long"), value(found, "data.max_length")) == ("drop", 131072)
    assert value(whole, "actor.model.is_lora") == "absent"
    assert any("pure_bf16" in note for note in whole.conversion.notes)
    assert not any("pure_bf16" in note for note in found.conversion.notes)


@pytest.mark.parametrize(
    ("flags", "ranks", "rows"),
    [("", 1, 16), ("", 3, 18), ("--per_device_train_batch_size 3", 2, 18), ("--per_device_train_batch_size 9", 4, 36)],
)
def test_a_step_has_about_sixteen_rows_unless_the_accumulation_is_given(flags: str, ranks: int, rows: int) -> None:
    assert value(typed(flags, ranks), "actor.global_batch_size") == rows
    given = typed(f"{flags} --gradient_accumulation_steps 2", ranks)
    each = value(given, "actor.micro_batch_size")
    assert isinstance(each, int)
    assert value(given, "actor.global_batch_size") == each * 2 * ranks


def test_processes_are_those_of_its_variables() -> None:
    command = "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model a/b --dataset c/d"
    found = typed(f"{command} --per_device_train_batch_size 4", None)
    assert (value(found, "runner.nproc_per_node"), value(found, "actor.global_batch_size")) == (2, 16)
    assert outcome(found, "CUDA_VISIBLE_DEVICES (environment)")[0] is Kind.MISSING


def test_packed_sequences_are_tokens() -> None:
    found = typed("--packing true --packing_length 100 --max_length 80 --sequence_parallel_size 2", 4)
    assert value(found, "actor.max_tokens_per_micro_batch") == 100
    assert value(found, "actor.global_batch_tokens") == 4 * 2 * 100  # 4 forward passes of 2 pairs of processes
    assert outcome(typed("--packing true"), "packing")[0] is Kind.MISSING  # as long as the model allows


def test_data_sets_have_a_part_and_a_number_of_rows() -> None:
    Path("own.jsonl").write_text("{}\n" * 10)
    found = typed("swift sft --model a/b --dataset HF::a/b:part#50 c/d own.jsonl#5 --val_dataset e/f#7")
    assert value(found, "data.train_data_paths") == [
        {"path": "a/b", "name": "part", "max_samples": 50},
        "c/d",
        {"path": "own.jsonl", "max_samples": 5},
    ]
    assert value(found, "data.eval_data_paths") == {"path": "e/f", "max_samples": 7, "split": "train"}
    assert value(found, "runner.eval_interval") == 500  # as often as it saves
    assert value(typed("--eval_steps 3"), "runner.eval_interval") == "absent"  # nothing is evaluated
    assert outcome(typed("swift sft --model a/b --dataset c/d:x/y"), "dataset")[0] is Kind.MISSING
    held = typed("swift sft --model a/b --dataset own.jsonl --split_dataset_ratio 0.1 --eval_strategy epoch")
    assert (value(held, "data.eval_split"), value(held, "runner.eval_interval")) == (0.1, "epoch")


def test_columns_are_named_the_other_way_round() -> None:
    Path("own.jsonl").write_text(json.dumps({"query": "1+1", "response": "2"}) + "\n")
    seen = typed("swift sft --model a/b --dataset own.jsonl")
    assert value(seen, "data.columns") == {"question": "query", "answer": "response"}
    columns = json.dumps({"problem": "query", "text2": "response", "pictures": "images"})
    given = typed(f"--columns '{columns}'")
    assert value(given, "data.columns") == {"question": "problem", "answer": "text2", "images": "pictures"}


@pytest.mark.parametrize(
    ("flags", "key", "written"),
    [
        ("--loss_scale all", "data.train_on", "all"),
        ("--loss_scale ignore_empty_think", "data.train_on", "absent"),
        ("--torch_dtype float16", "actor.model.precision", "fp16"),
        ("--torch_dtype float32", "actor.model.precision", "fp16"),  # as it computes then
        ("--torch_dtype float32 --fp16 false", "actor.model.precision", "absent"),
        ("--attn_impl flash_attn", "actor.model.attn_implementation", "flash_attention_2"),
        ("--deepspeed zero3_offload", "actor.fsdp_config.cpu_offload", True),
        ("--target_regex '.*q_proj'", "actor.model.lora.target_modules", ".*q_proj"),
        ("--init_weights pissa", "actor.model.lora.init", "pissa"),
        ("--adapters out/one", "actor.model.lora.load_from", "out/one"),
        ("--quant_bits 4 --quant_method bnb", "actor.model.lora.base_dtype", "nf4"),
        ("--new_special_tokens '<a>' '<b>'", "actor.tokenizer.new_tokens", ["<a>", "<b>"]),
        ("--task_type seq_cls --num_labels 2", "actor.model.model_type", "sequence_classifier"),
        ("--enable_dft_loss true", "actor.loss", "dft"),
        ("--early_stop_interval 3", "runner.early_stop.patience", 3),
        ("--max_epochs 5", "runner.max_epochs", 5),
        ("--optimizer muon", "actor.optim.name", "Muon"),
        ("--freeze_llm true --tuner_type full", "actor.model.freeze", ["language_model"]),
        ("--strict true", "data.on_bad_row", "absent"),
        ("--save_total_limit -1", "runner.keep_last", "absent"),
        ("--eval_strategy steps --split_dataset_ratio 0", "runner.eval_interval", "absent"),
    ],
)
def test_what_is_made_of_a_flag(flags: str, key: str, written: object) -> None:
    assert value(typed(flags), key) == written


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--loss_scale last_round+hermes", "loss_scale"),
        ("--truncation_strategy left", "truncation_strategy"),
        ("--tuner_type llamapro", "tuner_type"),
        ("--tuner_type lora_llm", "tuner_type"),
        ("--init_weights loftq", "init_weights"),
        ("--task_type embedding", "task_type"),
        ("--new_special_tokens tokens.txt", "new_special_tokens"),
        ("--system prompt.txt", "system"),
        ("--optimizer galore", "optimizer"),
        ("--interleave_prob 0.5 0.5", "interleave_prob"),
        ("--router_aux_loss_coef 0.1", "router_aux_loss_coef"),
    ],
)
def test_what_there_is_not_is_named(flags: str, name: str) -> None:
    assert outcome(typed(flags), name)[0] is Kind.MISSING


def test_names_of_its_example_data_set_are_for_that_one_alone() -> None:
    names = "--model_name Bot --model_author me"
    assert outcome(typed(names), "model_name")[0] is Kind.NOT_NEEDED
    of_self = typed(f"swift sft --model a/b --dataset swift/self-cognition#500 {names}")
    assert outcome(of_self, "model_name")[0] is Kind.MISSING


def test_a_system_prompt_may_be_a_file(folder: Path) -> None:
    (folder / "prompt.txt").write_text("Be brief.")
    assert value(typed("--system prompt.txt"), "data.system_prompt") == "Be brief."
    assert value(typed(r"--system 'a\nb'"), "data.system_prompt") == "a\nb"


def test_pretraining_trains_every_token() -> None:
    found = typed("swift pt --model a/b --dataset c/d")
    assert value(found, "data.train_on") == "all"


def test_the_parts_of_a_model_with_images_are_left_as_they_are(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["A"], "vision_config": {}}))
    full = typed("swift sft --model ./model --dataset c/d --tuner_type full --freeze_aligner false")
    assert value(full, "actor.model.freeze") == ["vision_tower"]
    adapted = typed("swift sft --model ./model --dataset c/d")
    assert "vision_tower" in str(value(adapted, "actor.model.lora.exclude_modules"))


def test_the_rate_of_each_step_is_that_of_transformers(folder: Path) -> None:
    import torch
    from torch.optim import SGD
    from transformers import get_scheduler

    flags = "--max_steps 20 --warmup_ratio 0.13 --learning_rate 3e-5 --lr_scheduler_type cosine_with_min_lr"
    found = typed(f"{flags} --lr_scheduler_kwargs '{{\"min_lr\": 1e-6}}'")
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    options = {"num_warmup_steps": 3, "num_training_steps": 20, "scheduler_specific_kwargs": {"min_lr": 1e-6}}
    schedule = get_scheduler("cosine_with_min_lr", optimizer, **options)
    theirs = []
    for _ in range(20):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates_here(found, folder, 20) == pytest.approx(theirs)
