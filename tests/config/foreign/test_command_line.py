"""Command lines of other trainers: the words as their parsers read them, and the recipe that they become."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from shardtune.config import load_recipe
from shardtune.config.foreign.command_line import CommandLine, read_command_line
from shardtune.config.foreign.convert import convert
from shardtune.config.foreign.launch import started
from shardtune.errors import ConfigError
from tests.support.workspace import run_cli

FLAGS = "--model_name_or_path me/model --dataset_name me/rows"


@pytest.mark.parametrize(
    ("typed", "file", "values", "processes"),
    [
        ("a.yaml", "a.yaml", {}, None),
        ("trl sft --config a.yaml --learning-rate 2e-5", "a.yaml", {"learning_rate": 2e-5}, None),
        ("a.yaml --packing --no_bf16", "a.yaml", {"packing": True, "bf16": False}, None),
        ("--bf16=false --run_name 'a: b' --no_such 1", None, {"bf16": False, "run_name": "a: b", "no_such": 1}, None),
        ("--lora_target_modules q_proj v_proj", None, {"lora_target_modules": ["q_proj", "v_proj"]}, None),
        ("--optim_args '{\"a\": 1}' --seed -1", None, {"optim_args": {"a": 1}, "seed": -1}, None),
        ("accelerate launch --num_processes 4 --bf16 sft.py --seed 1", None, {"seed": 1}, 4),
        ("python sft.py --seed 1", None, {"seed": 1}, None),
        ("torchrun --nproc-per-node=2 sft.py", None, {}, 2),
        ("llamafactory-cli train a.yaml", "a.yaml", {}, None),
        ("torchrun --nproc_per_node 4 --nnodes 2 sft.py", None, {}, 8),
        ("torchrun --nproc_per_node 4 --nnodes 2:2 -t 3 sft.py --seed 1", None, {"seed": 1}, 8),
        ("torchrun --nproc_per_node 4 --nnodes 1:4 sft.py", None, {}, None),
        ("torchrun --nproc_per_node gpu sft.py", None, {}, None),
        ("torchrun --nproc_per_node auto --nnodes 2 sft.py", None, {}, None),
        ("torchrun --standalone sft.py", None, {}, 1),
        ("python -u -m torch.distributed.run --nproc_per_node 2 sft.py --seed 1", None, {"seed": 1}, 2),
        ("accelerate launch --num_processes 8 --num_machines 2 sft.py", None, {}, 8),
        ("accelerate launch --multi_gpu --num_processes 4 -m axolotl.cli.train a.yaml", "a.yaml", {}, 4),
        ("accelerate-launch --num_machines 2 sft.py", None, {}, None),
        ("deepspeed --num_gpus 4 --num_nodes 2 sft.py --deepspeed z.json", None, {"deepspeed": "z.json"}, 8),
        ("deepspeed --num_gpus=4 sft.py", None, {}, 4),
        ("deepspeed -H hosts --num_gpus 4 sft.py", None, {}, None),
        ("deepspeed -i localhost:0,1,3 sft.py", None, {}, 3),
        ("deepspeed --include worker-0@worker-1:0,2 sft.py", None, {}, None),
        ("env A=1 B_2= torchrun --nproc_per_node 2 sft.py --seed 1", None, {"seed": 1}, 2),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config a.yaml", "a.yaml", {}, 2),
        ("tune run full_finetune_single_device --config=a.yaml", "a.yaml", {}, 1),
        ("tune run knowledge_distillation_single_device --config=a.yaml", "a.yaml", {}, 1),
        ("deepspeed --exclude localhost:0 --num_gpus 4 sft.py", None, {}, None),
    ],
)
def test_words_are_read(typed: str, file: str | None, values: dict[str, object], processes: int | None) -> None:
    for words in (shlex.split(typed), [typed]):  # also as one line
        found = read_command_line(words)
        assert (found.file, found.values, _processes(found)) == (file and Path(file), values, processes)


def _processes(found: CommandLine) -> int | None:
    return None if found.launch is None else started(found.launch).processes


@pytest.mark.parametrize("command", ["dpo", "kto", "grpo", "rloo", "reward"])
@pytest.mark.parametrize("typed", ["trl {}", "accelerate launch --num_processes 2 -m trl.scripts.{}"])
def test_commands_of_trl_that_do_not_fine_tune_are_refused(typed: str, command: str) -> None:
    ended = run_cli("convert", *shlex.split(typed.format(command)), *shlex.split(FLAGS))
    assert ended.code == 2
    assert f"trl {command} is no supervised fine-tuning" in ended.err
    assert "as trl sft does" in ended.err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--seed 1 --seed 2", "--seed is given twice"),
        ("a.yaml b.yaml", "one"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo", r"swift rlhf is no supervised(.|\n)*swift sft or swift pt"),
        ("'swift infer --model a'", "swift infer is no supervised"),
        ("'trl sft --seed \"1'", "cannot be read as a line of a shell: No closing quotation"),
        ("megatron sft --model a --micro_batch_size 1", r"ms-swift(.|\n)*megatron sft"),
        ("llamafactory-cli export a.yaml", r"export trains nothing(.|\n)*shardtune export RUN FOLDER --merge"),
        ("USE_V1=1 llamafactory-cli sft a.yaml", "v1 trainer"),
        ("torchrun launch.py loss=sft ++lr=1e-6", r"HALOs(.|\n)*shardtune train loss=sft \+\+lr=1e-6"),
        ("torchrun --nnodes 1 --nnodes=2 sft.py", "--nnodes is given twice"),
        ("tune run lora_dpo_single_device --config a.yaml", "no supervised fine-tuning"),
        ("tune run", "the recipe of tune run is missing"),
        ("tune run full_finetune_distributed a.yaml", "it has no --config"),
        ("tune run full_finetune_distributed --config", "it has no --config"),
        ("tune run full_finetune_distributed --config llama3/8B_full", "tune cp llama3/8B_full"),
        ("tune run full_finetune_distributed --config a.yaml ~lr", "~lr is no key=value"),
    ],
)
def test_contradictions_are_refused(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_command_line(shlex.split(typed))


def test_variables_and_keys_of_a_command_are_read() -> None:
    words = "tune run full_finetune_distributed --config a.yaml optimizer.lr=1e-5 epochs=2"
    found = read_command_line(shlex.split(f"CUDA_VISIBLE_DEVICES=0,1 A='b c=d' {words}"))
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b c=d"}
    assert found.keys == {"optimizer.lr": 1e-5, "epochs": 2}


def test_the_variables_of_llama_factory_are_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(
        "model_name_or_path: me/model\nstage: sft\nper_device_train_batch_size: 1\ncutoff_len: 9\n"
    )
    words = "USE_MCA=1 FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 NODE_RANK=1 X=y llamafactory-cli train a.yaml"
    made = convert(read_command_line(shlex.split(words)))
    lines = made.conversion.lines
    assert (lines["actor.global_batch_size"].value, lines["runner.nproc_per_node"].value) == (8, 4)
    for line in (
        "NNODES (environment): 2  ->  8 processes",
        "FORCE_TORCHRUN (environment): 1  ->  runner.nproc_per_node starts",
        "USE_MCA (environment): 1  ->  it trains by Megatron",
        "NODE_RANK (environment): 1  ->  how hosts find",
        "X (environment): y  ->  set it in front of shardtune train",
    ):
        assert line in made.report
    alone = convert(read_command_line(shlex.split("NNODES=2 llamafactory-cli train a.yaml")))
    assert "NNODES (environment): 2  ->  give --world-size N" in alone.report


def test_flags_of_torchtitan_are_keys_of_its_file() -> None:
    typed = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file a.toml --training.steps 9"
    found = read_command_line(shlex.split(f"{typed} --compile.enable --checkpoint.no_enable"))
    assert (found.file, found.values, _processes(found)) == (Path("a.toml"), {}, 8)
    assert found.keys == {"training.steps": 9, "compile.enable": True, "checkpoint.enable": False}


def test_a_command_of_torchtune_becomes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tune.yaml").write_text(
        "optimizer: {_component_: torch.optim.AdamW, lr: 1e-3}\nepochs: 1\nbatch_size: 2\n"
        "gradient_accumulation_steps: 2\nmodel: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}\n"
        "dataset: {_component_: torchtune.datasets.chat_dataset, source: me/rows}\n"
    )
    words = "WANDB_PROJECT=x tune run --nproc_per_node 2 full_finetune_distributed --config tune.yaml optimizer.lr=2e-5"
    ended = run_cli("convert", "-o", "recipe.yaml", *shlex.split(words), "epochs=3")
    assert ended.code == 0, ended.err
    made = load_recipe("recipe.yaml", in_memory=("actor.model.model_path",), files_must_exist=False)
    assert (made.actor.optim.lr, made.runner.max_epochs, made.actor.global_batch_size) == (2e-5, 3, 8)
    assert "WANDB_PROJECT (environment): x  ->  set it in front of shardtune train, too" in ended.out
    ended = run_cli("convert", *shlex.split(words), "epochs.more=3")
    assert (ended.code, "epochs.more=3 sets a key below one that is no section" in ended.err) == (2, True)


def test_a_command_becomes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"trl sft {FLAGS} --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --use_peft"
    ended = run_cli("convert", "-o", "recipe.yaml", *shlex.split(words), "--world-size", "2", "--learnin_rate", "1")
    assert ended.code == 0, ended.err
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    assert recipe["global_batch_size"] == 4 * 2 * 2
    assert recipe["model"]["model_path"] == "me/model"
    assert recipe["model"]["is_lora"] is True
    assert recipe["data"]["train_data_paths"] == "me/rows"
    assert recipe["runner"]["nproc_per_node"] == 2
    assert ended.out.startswith("the command line (TRL): 6 keys: 5 translated, 1 unknown")


@pytest.mark.parametrize(("typed", "meant"), [("--fromm trl", "--from"), ("--world_sise=2", "--world-size")])
def test_a_misspelt_option_of_the_command_is_refused(typed: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: me/model\ndataset_name: me/rows\n")
    ended = run_cli("convert", str(file), *shlex.split(typed))
    assert ended.code == 2
    assert f"did you mean {meant}?" in ended.err


def test_flags_change_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trl.yaml").write_text("model_name_or_path: me/model\ndataset_name: me/rows\nlearning_rate: 1e-4\nseed: 5\n")
    ended = run_cli("convert", "trl.yaml", "--learning_rate", "3e-5")
    assert ended.code == 0, ended.err
    recipe = yaml.safe_load(ended.out)
    assert (recipe["optim"]["lr"], recipe["runner"]["seed"]) == (3e-5, 5)
