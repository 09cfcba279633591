"""What people type who know other trainers: it works, or one message has the line to type."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

import shardtune.run.api
from shardtune.cli.commands import app
from shardtune.config import load_recipe
from shardtune.config.keys import KEYS
from shardtune.errors import printable
from shardtune.run.overridden import overridden
from tests.support.workspace import run_cli, write_rows

MODEL, TRAIN, LR = "actor.model.model_path", "data.train_data_paths", "actor.optim.lr"
COMMANDS = (
    *("", "train", "eval", "generate", "chat", "export", "launch", "models", "init", "env", "version", "convert"),
    *("diff", "report"),
    *(
        "config",
        "config explain",
        "data",
        "data audit",
        "data preview",
        "verify",
        "verify adapter",
        "verify checkpoint",
    ),
)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, ...]]:
    """The arguments of `shardtune.train`, which does nothing."""
    given: list[tuple[str | None, ...]] = []
    monkeypatch.setattr(shardtune.run.api, "train", lambda *words, **_: given.append(words))
    return given


# -- what a command line stands for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("r.yaml", ["r.yaml"]),
        ("--config r.yaml", ["r.yaml"]),
        ("--config=r.yaml", ["r.yaml"]),
        ("-c r.yaml runner.seed=1", ["r.yaml", "runner.seed=1"]),
        ("--recipe r.yaml", ["r.yaml"]),
        ("r.yaml --actor.optim.lr=1e-5", ["r.yaml", f"{LR}=1e-5"]),
        ("r.yaml --actor.optim.lr 1e-5", ["r.yaml", f"{LR}=1e-5"]),
        ("--learning_rate 1e-5 r.yaml", ["r.yaml", f"{LR}=1e-5"]),
        ("r.yaml --learning-rate=1e-5", ["r.yaml", f"{LR}=1e-5"]),
        ("r.yaml --lr 1e-5 --epochs 3", ["r.yaml", f"{LR}=1e-5", "runner.max_epochs=3"]),
        ("r.yaml --num_train_epochs 3", ["r.yaml", "runner.max_epochs=3"]),
        ("r.yaml --max_steps -1", ["r.yaml", "runner.max_steps=-1"]),
        ("r.yaml --max_length 512 --seed 7", ["r.yaml", "data.max_length=512", "runner.seed=7"]),
        ("--model Qwen/Qwen3-0.6B --data a.jsonl", [None, f"{MODEL}=Qwen/Qwen3-0.6B", f"{TRAIN}=a.jsonl"]),
        ("--model_name_or_path m --dataset_name d", [None, f"{MODEL}=m", f"{TRAIN}=d"]),
        ("--model m --data a.jsonl --data b.jsonl", [None, f"{MODEL}=m", f"{TRAIN}=[a.jsonl,b.jsonl]"]),
        ("r.yaml --data 'my rows, b=2.jsonl'", ["r.yaml", f'{TRAIN}="my rows, b=2.jsonl"']),
        ("r.yaml --data '[a.jsonl,{path: b.jsonl}]'", ["r.yaml", f"{TRAIN}=[a.jsonl,{{path: b.jsonl}}]"]),
        ("r.yaml --system_prompt 'Say \"no\".'", ["r.yaml", 'data.system_prompt="Say \\"no\\"."']),
        (
            "r.yaml --output_dir out/one",
            ["r.yaml", "runner.logger.log_path=out", "runner.logger.experiment_name=one"],
        ),
        ("r.yaml --run_name one", ["r.yaml", "runner.logger.experiment_name=one"]),
        ("r.yaml --bf16 True --use_peft --lora_r 8", [
            *("r.yaml", "actor.model.precision=bf16", "actor.model.is_lora=true", "actor.model.lora.r=8"),
        ]),
        ("--gradient_checkpointing r.yaml", ["r.yaml", "actor.model.gradient_checkpointing=true"]),
        ("r.yaml --no_gradient_checkpointing", ["r.yaml", "actor.model.gradient_checkpointing=false"]),
        ("r.yaml --gradient_checkpointing selective", ["r.yaml", "actor.model.gradient_checkpointing=selective"]),
        ("r.yaml --is_lora True --generate", ["r.yaml", "actor.model.is_lora=True", "eval.generate=true"]),
        ("r.yaml --micro_batch_size 4", ["r.yaml", "actor.micro_batch_size=4"]),
        ("r.yaml --nproc_per_node 2", ["r.yaml", "runner.nproc_per_node=2"]),
        ("r.yaml --eval_steps 50 --warmup_ratio 0.1", [
            *("r.yaml", "runner.eval_interval=50", "actor.optim.lr_warmup_steps_ratio=0.1"),
        ]),
    ],
)  # fmt: skip
def test_flags_stand_for_keys(typed: str, meant: list[str | None], trained: list[Any]) -> None:
    ended = run_cli("train", *shlex.split(typed))
    assert ended.code == 0, ended.err
    assert trained == [(meant[0], *meant[1:])]
    keys = [word.partition("=")[0] for word in meant[1:] if word is not None]
    assert not [key for key in keys if key not in KEYS]


@pytest.mark.lengthy
@pytest.mark.parametrize("command", ["sft", "finetune", "fine-tune", "fine_tune", "SFT"])
def test_commands_have_other_names(command: str, trained: list[Any]) -> None:
    assert run_cli(command, "r.yaml").code == 0
    assert trained == [("r.yaml",)]
    for name, ours in (("evaluate", "eval"), ("infer", "generate"), ("inference", "generate")):
        assert run_cli(name, "-h").out == run_cli(ours, "-h").out


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("train", "there is no recipe | --model Qwen/Qwen3-0.6B --data rows.jsonl"),
        ("train --model model", f"{TRAIN} is required"),
        ("train --data train.jsonl", "model.model_path is required"),
        ("train --model model --data gone.jsonl", "gone.jsonl"),
        ("train --model model train.jsonl", "is a file of rows | --data train.jsonl"),
        ("train recipe.yaml --dryrun", "there is no option --dryrun | did you mean --dry-run?"),
        ("train recipe.yaml -x", "there is no option -x"),
        ("train recipe.yaml --dry-run --record r --stop-after 2", "so --record and --stop-after would have no effect"),
        ("launch recipe.yaml --min-nodes 2 --max-restarts 1", "--min-nodes 2: the ranks are started on this machine"),
        ("eval recipe.yaml --checkpoint best", "recipe.yaml is no run, so it has no checkpoints"),
        ("eval models", "there is no run, recipe or model models | did you mean model?"),
        ("train recipe.yaml --learning_rate", "--learning_rate has no value | --learning_rate VALUE; optim.lr: "),
        ("train recipe.yaml --push_to_hub", "--push_to_hub OWNER/NAME; runner.push_to_hub: A repository"),
        ("train recipes.yaml", "there is no such recipe | did you mean recipe.yaml?"),
        ("inference model --lora-model-dir runs/x", "in the place of the model: shardtune generate runs/x"),
        ("train recipe.yaml --lr 1 --learning_rate 2", f"{LR} is given 2 times, as 1, 2 | --lr and --learning_rate"),
        ("train recipe.yaml --bf16=false", "--bf16 is bf16, not false"),
        ("train recipe.yaml --bf16 false", "--bf16 is bf16, not false"),
        ("train recipe.yaml --cache_dir x", "could mean several things | data.cache_dir=DIR"),
        ("train recipe.yaml --output_dir ..", "has no name of its own"),
        ("train recipe.yaml --gradient-accumulation-steps 4", "unknown key gradient_accum | global_batch_size"),
        ("train recipe.yaml --sample_packing", "unknown key sample_packing | rows are always packed"),
        ("train recipe.yaml --adapter qlora", "model.is_lora: true; for qlora also | allowed: file.py:name"),
        ("config explain sample_packing", "rows are always packed"),
        ("train recipe.yaml --per_device_train_batch_size 4", "did you mean micro_batch_size?"),
        (
            "sft --model_name_or_path m --per_device_train_batch_size 4 --packing --load_in_4bit --output_dir 'a b'",
            "flags of another trainer | --per_device_train_batch_size: did you mean micro_batch_size? "
            "| --packing: leave it out | --load_in_4bit: write model.is_lora: true and model.lora.base_dtype: nf4 "
            "| shardtune convert -o recipe.yaml -- --model_name_or_path m --per_device_train_batch_size 4 --packing "
            "--load_in_4bit --output_dir 'a b'",
        ),
        ("train recipe.yaml --learnin_rate 4", "there is no option --learnin_rate | did you mean --learning_rate?"),
        ("train model=model actor.model.model_path=x data=train.jsonl", "are two names of actor.model.model_path"),
        ("train model=lama data=train.jsonl", "has no 'lama' | did you mean llama?"),
        (
            "train recipe.yaml data.eval_data_paths.a=x.jsonl",
            "has no a | 'data.eval_data_paths={eval: eval.jsonl, a: ",
        ),
        ("trian recipe.yaml", "there is no command trian; did you mean train?"),
        ("generat runs/x", "did you mean generate?"),
        ("recipe.yaml", "shardtune train recipe.yaml"),
        ("eval", "Missing argument"),
        ("push runs/x", "Missing argument 'REPO' | shardtune push RUN REPO"),
        ("eval --learning_rate 1", "there is nothing to evaluate | --model Qwen/Qwen3-0.6B --eval_data rows.jsonl"),
        ("generate recipe.yaml hi", "the run that it made, such as runs/recipe"),
        ("xyzzy", "there is no command xyzzy | shardtune --help"),
        ("merge-lora", "shardtune export runs/lora my-model --merge"),
        ("merge-sharded-fsdp-weights x", "final/ of a run is one model already"),
        ("quantize x", "shardtune export runs/recipe my-model"),
        ("lm_eval x", "eval.harness=[hellaswag]"),
        ("merge_lora", "shardtune export runs/lora my-model --merge"),
        ("preprocess recipe.yaml", "shardtune data preview recipe.yaml"),
        ("dedup rows.jsonl", "shardtune data audit recipe.yaml"),
        ("tokenize", "shardtune train recipe.yaml --dry-run"),
        ("ls", "ls runs"),
        ("runs", "ls runs"),
        ("serve runs/x", "vllm serve runs/recipe/final"),
        ("webui", "shardtune chat runs/recipe"),
        ("dpo recipe.yaml", "other methods run on the engine"),
        ("resume", "shardtune train recipe.yaml"),
        ("data prevew", "preview"),
        ("models xyzzyq", "no architecture"),
        ("models Qwen/Qwen3-0.6B", "similar ones: qwen3"),
        ("generate", "there is no run and no model"),
        ("generate model", "give a prompt or --file | shardtune chat model"),
        ("generate nowhere hi", "there is no run or model nowhere here"),
        ("generate modle hi", "no copy of a model of this name from the Hub | did you mean model?"),
        ("generate ./nowhere hi", "there is no nowhere"),
        ("generate train.jsonl hi", "is a file, neither a run nor a model directory"),
        ("generate . hi", "is not a run directory | nor a model's | there is model"),
        ("generate t5 hi", "a model of type 't5', which is neither a causal language model"),
        ("generate model hi --checkpoint best", "is a model, which has no checkpoints"),
        ("generate model hi --max_tokns 3", "No such option: --max-tokns"),
        ("chat model hi", "chat reads its turns from the terminal | shardtune generate model --prompt 'hi'"),
        ("chat t5", "a model of type 't5'"),
        ("export runs/x", "there is no directory to write | shardtune export runs/x my-model"),
        ("export runs/x a --to b", "two directories are given: a and b"),
        ("export runs/x optim.ema_use=false", "takes no overrides of keys | --to optim.ema_use=false"),
        ("export runs/x dtype=fp32", "dtype is an option | write --dtype fp32"),
        ("export runs/x final_dtype=fp32", "takes no overrides of keys | write --dtype fp32"),
        ("launch recipe.yaml --nodes 2", "2 hosts need a command on each | --nodes 2 --print"),
        ("launch recipe.yaml --by jobset", "jobset needs files of its own | --print --by jobset"),
        ("launch recipe.yaml --by slurm", "sbatch is not found here | --print --by slurm > job.sh"),
        ("launch recipe.yaml --array 0-3", "an array of jobs is for Slurm"),
        ("launch --print", "there is no recipe to launch"),
        ("train recipe.yaml model.model_path=modle", "there is no directory modle here | did you mean model?"),
        ("convert axolotl.yaml", "there is no such file | give a configuration | or its command: trl sft"),
        ("convert recipes.yml", "there is no such file | did you mean recipe.yaml?"),
    ],
)  # fmt: skip
def test_one_message_has_the_line_to_type(typed: str, says: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(work / "bin"))
    T5Config(vocab_size=8).save_pretrained(work / "t5")
    before = sorted(work.rglob("*"))
    ended = run_cli(*shlex.split(typed))
    assert ended.code == 2, ended.out + ended.err
    assert [line[:7] for line in ended.err.splitlines() if line.startswith("error: ")] == ["error: "]
    missing = [part for part in says.split(" | ") if part not in ended.err]
    assert not missing, f"the message lacks {missing}\n{ended.err}"
    assert "\n  remedy: " in ended.err
    assert sorted(work.rglob("*")) == before


# -- help and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_is_there_and_complete(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of a description is lost as markup, by any way to help."""
    monkeypatch.setenv("COLUMNS", "200")
    words = command.split()
    told = run_cli(*words, "--help")
    assert (told.code, told.err) == (0, "")
    assert run_cli(*words, "-h").out == told.out == run_cli("help", *words).out
    shown = re.sub(r"[│\s]+", " ", told.out)
    found = typer.main.get_command(app)
    for word in words:
        found = found.commands[word]  # pyright: ignore[reportAttributeAccessIssue]
    for param in found.params:
        text = getattr(param, "help", None) or ""
        for part in re.findall(r"[^\s]+", text.replace("&lt;", "<").replace("&gt;", ">")):
            assert part in shown, f"{command}: {part!r} of {text!r} is lost"
    examples = [line.strip() for line in told.out.splitlines() if line.strip().startswith(f"shardtune {command}")]
    assert len(examples) >= 2 or command in ("env", "version", "config", "data", "verify")


@pytest.mark.parametrize("words", ["version", "--version"])
def test_the_version_is_printed(words: str) -> None:
    assert re.fullmatch(r"shardtune [\d.]+\S*\n", run_cli(words).out)


def test_a_reader_that_ends_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(typer, "echo", closed)
    ended = run_cli("version")
    assert (ended.code, ended.err) == (1, "")


@pytest.mark.own_start
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_one_message(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "shardtune", "version"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.stderr.startswith("error: what is printed cannot be written: No space left on device\n")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_models_are_searched() -> None:
    found = run_cli("models", "qwen3").out.splitlines()
    assert "qwen3: model.model_type=causal_lm, seen to train, packed" in found
    assert all("qwen3" in line for line in found)
    assert run_cli("models", "Qwen3-MoE").out.startswith("qwen3_moe: ")


def test_models_of_tasks_and_of_sounds_are_found_by_their_names() -> None:
    lines = run_cli("models", "google-t5/t5").out.splitlines()
    classes = "sequence_classifier or token_classifier, by the classes of transformers"
    assert f"t5: model.model_type=seq2seq or {classes}" in lines
    assert "similar ones: distilbert" in run_cli("models", "distilbert-base-cased").err
    assert run_cli("models", "qwen2_audio").code == 2  # it hears, and none of these tasks takes sounds
    assert run_cli("models", "whisper").out.splitlines() == [
        "whisper: model.model_type=causal_lm, seen to train, rows of one length, its decoder alone",
        "whisper: from sounds to text by an adapter of your own, as in examples/speech",
    ]


def test_model_types_of_plugins_without_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.config.model_names._registered", {})
    (tmp_path / "mine.py").write_text(
        "import shardtune\n\n\n@shardtune.register_model('of_mine')\ndef of_mine(cfg, dtype):\n    return None\n"
    )
    assert "of_mine" in run_cli("models", f"plugins=[{tmp_path}/mine.py]").out
    refused = run_cli("models", "--bad")
    assert (refused.code, refused.err.splitlines()[0]) == (2, "error: unknown key bad")


# -- recipes without a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model=Qwen/Qwen3-0.6B", "data=train.jsonl"], "Qwen3-0.6B-train"),
        ([f"{MODEL}=./model", f"{TRAIN}=[train.jsonl, eval.jsonl]"], "model-train"),
        (["model=model", "data=[{path: train.jsonl.gz, weight: 2}]"], "model-train"),
        ([f"{MODEL}=gpt2", "data='chats/*.jsonl'"], "gpt2-chats"),
        (["model=model", "data=train.jsonl", "runner.logger.experiment_name=mine"], "mine"),
    ],
)
def test_a_model_and_rows_are_a_recipe(overrides: list[str], name: str, work: Path) -> None:
    recipe = load_recipe(None, overrides, files_must_exist=False)
    assert recipe.runner.logger.experiment_name == name
    assert recipe.actor.optim.lr == load_recipe("recipe.yaml", [f"{LR}=1e-5"]).actor.optim.lr
    assert str(recipe.actor.model.model_path) in (str(work / "model"), "Qwen/Qwen3-0.6B", "gpt2")


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("data.eval_data_paths", ("a", "train.jsonl"), ("b", "eval.jsonl")),
        ("data.eval_data_paths", ("a.path", "train.jsonl"), ("a.max_samples", 2)),
        ("actor.optim.args", ("foreach", True), ("fused", False)),
        ("actor.model.config_overrides", ("attention_dropout", 0.5), ("hidden_act", "gelu")),
        ("data.columns", ("question", "problem"), ("answer", "solution")),
    ],
)
def test_two_entries_of_one_mapping_are_kept(
    key: str, first: tuple[str, object], second: tuple[str, object], work: Path
) -> None:
    typed = [f"{key}.{name}={value}" for name, value in (first, second)]
    recipe = load_recipe(None, ["model=model", "data=train.jsonl", *typed])
    shown = str(recipe.model_dump())
    for name, value in (first, second):
        assert name.rpartition(".")[2] in shown
        assert str(value) in shown


# -- paths ---------------------------------------------------------------------------------------------------------


def test_typed_paths_start_at_the_working_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in the recipe at the recipe; a file that lies there alone is not taken silently, nor for a Hub name."""
    inner = work / "inner"
    inner.mkdir(exist_ok=True)
    (inner / "recipe.yaml").write_text("actor: {model: {model_path: ../model}}\ndata: {train_data_paths: rows.jsonl}\n")
    write_rows(inner / "rows.jsonl", [{"text": "a"}])
    write_rows(inner / "beside.jsonl", [{"text": "a"}])
    recipe = load_recipe("inner/recipe.yaml", ["data.eval_data_paths.a=eval.jsonl", "data.eval_data_paths.b=org/set"])
    assert recipe.data.train_data_paths == str(inner / "rows.jsonl")
    assert recipe.data.eval_data_paths == {"a": str(work / "eval.jsonl"), "b": "org/set"}
    typed = load_recipe("inner/recipe.yaml", ["data=[{path: train.jsonl}]", "model=./model"])
    assert typed.actor.model.model_path == str(work / "model")
    assert typed.to_dict()["data"]["train_data_paths"][0]["path"] == str(work / "train.jsonl")
    refused = run_cli("train", "inner/recipe.yaml", "--data", "beside.jsonl", "--dry-run")
    assert refused.code == 2
    assert "remedy: type inner/beside.jsonl" in refused.err
    (work / "link").symlink_to(work / "model")
    monkeypatch.chdir(inner)
    assert load_recipe("recipe.yaml", ["model=../link"]).actor.model.model_path == str(work / "link")


# -- launch --------------------------------------------------------------------------------------------------------


def test_launch_starts_here_or_by_slurm(work: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Any]) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda words, **how: _slurm(words, **how))
    asked: list[str] = []

    def _slurm(words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words[0])
        return subprocess.CompletedProcess(words, 0, "Submitted batch job 7\n", "")

    monkeypatch.setenv("PATH", "")
    ended = run_cli("launch", "recipe.yaml", "--nproc-per-node", "2", "--max-restarts", "1", f"{LR}=1")
    assert (ended.code, asked) == (0, [])
    assert trained == [("recipe.yaml", f"{LR}=1", "runner.max_restarts=1", "runner.nproc_per_node=2")]
    assert "shardtune train recipe.yaml actor.optim.lr=1" in ended.err
    run_cli("launch", "recipe.yaml", "--by", "ray", "--nproc-per-node", "2")
    by_ray = ("runner.launcher=ray", "runner.nproc_per_node=1")
    assert trained.pop() == ("recipe.yaml", *by_ray, "runner.num_ranks=2")
    run_cli("launch", "recipe.yaml", "--by", "ray", "runner.nproc_per_node=3")
    assert trained.pop() == ("recipe.yaml", *by_ray, "runner.num_ranks=3")
    of_ray = ("runner.launcher=ray", "runner.num_ranks=4")
    run_cli("launch", "recipe.yaml", *of_ray)
    assert trained[1:] == [("recipe.yaml", *by_ray, "runner.num_ranks=4")]
    ended = run_cli("launch", "recipe.yaml", "--by", "torchrun", *of_ray)
    assert ended.code == 2
    assert "has runner.launcher: ray" in ended.err
    bin_ = work / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text("")
    (bin_ / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_))
    ended = run_cli("launch", "recipe.yaml", "--nodes", "2", "--nproc-per-node", "2", "actor.parallel.tensor=4")
    assert (ended.code, ended.err) == (0, "Submitted batch job 7\n")
    assert asked[0] == "sinfo"
    assert asked[-1] == "sbatch"
    assert len(trained) == 2
    shown = run_cli("launch", "recipe.yaml", "--print", "--by", "slurm")
    assert shown.out.startswith("#!/bin/bash")


# -- models that are no runs ---------------------------------------------------------------------------------------


def greedy(model: Any, folder: Path, prompt: str) -> str:
    """What plain transformers answers, in at most five tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=5, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.lengthy
def test_a_model_directory_answers_as_plain_transformers(work: Path) -> None:
    """The base as it is, and with an adapter that PEFT saved, by each way to name it."""
    base = AutoModelForCausalLM.from_pretrained(work / "model")
    wanted = greedy(base, work / "model", "Two?")
    for words in (["model", "Two?"], ["--model", "./model", "--prompt", "Two?"], [f"{work}/model", "-p", "Two?"]):
        told = run_cli("generate", *words, "--max_new_tokens", "5")
        assert (told.code, told.out) == (0, f"{printable(wanted)}\n"), told.err
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(work / "model")
    adapted.save_pretrained(str(work / "adapter"))
    wanted = greedy(adapted, work / "model", "Two?")
    told = run_cli("infer", "adapter", "Two?", "--max-tokens", "5")
    assert (told.code, told.out) == (0, f"{printable(wanted)}\n"), told.err


def test_a_model_without_a_template_continues_text(work: Path) -> None:
    shutil.copytree(work / "model", work / "base")
    (work / "base/chat_template.jinja").unlink()
    for words in (["generate", "base", "Two?"], ["chat", "base"]):
        refused = run_cli(*words)
        assert refused.code == 2
        assert "shardtune generate --raw" in refused.err
    assert run_cli("generate", "base", "Two?", "--raw", "--max-tokens", "2").code == 0


def test_code_that_comes_with_a_model_needs_consent(work: Path) -> None:
    (work / "own").mkdir()
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "own_config.Own"}}
    (work / "own/config.json").write_text(json.dumps(settings))
    code = f"open({str(work / 'ran')!r}, 'w').close()\nfrom transformers import PreTrainedConfig\n"
    (work / "own/own_config.py").write_text(f"{code}class Own(PreTrainedConfig):\n    model_type = 'mine'\n")
    refused = run_cli("generate", "own", "Two?")
    assert refused.code == 2
    assert f"to execute it, name it: --trust {work / 'own'}" in refused.err
    assert not (work / "ran").exists()
    consented = run_cli("generate", "own", "Two?", "--trust", "own")
    assert "neither a causal language model nor one of images" in consented.err
    assert (work / "ran").exists()


def test_an_adapter_of_peft_is_evaluated_with_its_base(work: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(work / "model")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(work / "model")
    adapted.save_pretrained(str(work / "saved"))
    merged = work / "merged"
    shutil.copytree(work / "model", merged)
    adapted.merge_and_unload().save_pretrained(str(merged))
    rows = ["data.eval_data_paths=eval.jsonl", "--fp32", f"data.cache_dir={work.parent}/cache"]
    losses = []
    for words in (["merged"], ["saved"], ["--model", "saved"]):
        told = run_cli("eval", *words, *rows)
        assert told.code == 0, told.err
        assert (f"with the adapter {work / 'saved'}" in told.err) == ("saved" in words)
        losses.append(json.loads(told.out)["eval/loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    of_base = json.loads(run_cli("eval", "model", *rows).out)["eval/loss"]
    assert abs(of_base - losses[0]) > 1e-3


@pytest.mark.lengthy
@pytest.mark.parametrize("words", [["model"], ["--model", "model"]])
def test_a_model_is_evaluated_on_every_set(words: list[str], work: Path) -> None:
    sets = ["data.eval_data_paths.a=eval.jsonl", "--data.eval_data_paths.b", "train.jsonl", "--fp32"]
    told = run_cli("evaluate", *words, *sets, f"data.cache_dir={work.parent}/cache")
    assert told.code == 0, told.err
    assert {"eval/a/loss", "eval/b/loss"} <= json.loads(told.out).keys()


# -- evaluation of a run by other rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained_with", "typed", "split", "paths"),
    [
        ("data.eval_split=0.2", "eval.num_samples=3", 0.2, None),
        ("data.eval_split=0.2", "data.eval_data_paths=eval.jsonl", 0.0, "eval.jsonl"),
        ("data.eval_split=0.2", "data.eval_split=0.4", 0.4, None),
        ("data.eval_data_paths=train.jsonl", "data.eval_split=0.4", 0.4, None),
        ("data.eval_data_paths=train.jsonl", "eval.num_samples=3", 0.0, "train.jsonl"),
        ("data.eval_split=0", "eval.generate=true", 0.0, None),
        ("data.eval_split=0.2", "data.eval_data_paths.a=eval.jsonl", 0.0, {"a": "eval.jsonl"}),
        ("data.eval_data_paths=train.jsonl", "data.eval_data_paths.a=eval.jsonl", 0.0, {"a": "eval.jsonl"}),
        (
            *("data.eval_data_paths={b: train.jsonl}", "data.eval_data_paths.a=eval.jsonl"),
            *(0.0, {"b": "train.jsonl", "a": "eval.jsonl"}),
        ),
    ],
)
def test_eval_takes_the_rows_that_are_typed(
    trained_with: str, typed: str, split: float, paths: str | dict[str, str] | None, work: Path
) -> None:
    recipe = load_recipe(None, ["model=model", "data=train.jsonl", trained_with])
    again = overridden(recipe, [typed])
    assert again.data.eval_split == split
    names = paths if isinstance(paths, dict) else {"": paths}
    whole = {name: None if path is None else str(work / path) for name, path in names.items()}
    assert again.data.eval_data_paths == (whole if isinstance(paths, dict) else whole[""])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_what_a_disk_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "runs/demo/file")

    monkeypatch.setattr(typer, "echo", refused)
    told = run_cli("version")
    assert (told.code, told.err.count("error:")) == (2, 1)
    assert os.strerror(number) in told.err
    assert "where:  runs/demo/file" in told.err
    assert "remedy:" in told.err
    monkeypatch.setenv("SHARDTUNE_REPORT_DIR", str(tmp_path / "full"))  # of a rank that cannot report it
    monkeypatch.setenv("RANK", "1")
    again = run_cli("version")
    assert (again.code, again.err) == (2, told.err.replace("error:", "rank 1: error:"))
