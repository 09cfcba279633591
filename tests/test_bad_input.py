"""Everything a user can get wrong, through the real command: exit code 2, one message that helps, nothing written.

Each case says what must stand in the message: the fault with its value, the place, the way on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workspace import END, Outcome, make_model, make_tokenizer, make_workspace, rows, run_cli, write_rows

Prepare = Callable[[Path], None]
TRAIN = ("train", "recipe.yaml")
CONTINUE = (*TRAIN, "runner.logger.experiment_name=done", "runner.max_steps=4")


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: of the test.
        says: what stands in the message.
        argv: the command, run inside the user's directory.
        prepare: makes the mistake.
    """

    name: str
    says: tuple[str, ...]
    argv: tuple[str, ...] = TRAIN
    prepare: Prepare = lambda work: None


def with_keys(name: str, *overrides: str, says: tuple[str, ...], prepare: Prepare = lambda work: None) -> Case:
    return Case(name, says, (*TRAIN, *overrides), prepare)


def in_recipe(name: str, old: str, new: str, *says: str) -> Case:
    """A mistake in the recipe file: `new` in place of `old`."""

    def write(work: Path) -> None:
        text = (work / "recipe.yaml").read_text()
        assert old in text
        (work / "recipe.yaml").write_text(text.replace(old, new))

    return Case(name, says, prepare=write)


def train_rows(name: str, content: list[dict], *says: str, keys: tuple[str, ...] = ()) -> Case:
    """A mistake in the training rows."""
    return Case(name, says, (*TRAIN, *keys), lambda work: write_rows(work / "train.jsonl", content))


def write(file: str, content: str | bytes) -> Prepare:
    """Puts a file into the user's directory."""

    def prepare(work: Path) -> None:
        path = work / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def remove(file: str) -> Prepare:
    return lambda work: (work / file).unlink()


def chat(*turns: tuple[str, object]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# -- the recipe ----------------------------------------------------------------------------------------------------

KEYS = [
    in_recipe("unknown section", "runner:", "optimizer: {}\nrunner:", "unknown key optimizer", "recipe.yaml:1", "actor.optim"),
    in_recipe("unknown key of runner", "max_steps: 2", "max_step: 2", "runner.max_step", "recipe.yaml:2", "did you mean runner.max_steps"),
    in_recipe("unknown key deep", "lr: 1.0e-3", "learning_rate: 1.0e-3", "actor.optim.learning_rate", "recipe.yaml:14", "did you mean actor.optim.lr"),
    in_recipe("misplaced key", "micro_batch_size: 4", "lr: 1.0e-3\n  micro_batch_size: 4", "actor.lr", "recipe.yaml:8", "did you mean actor.optim.lr"),
    in_recipe("misplaced section", "max_length: 128", "max_epochs: 3", "data.max_epochs", "did you mean runner.max_epochs"),
    in_recipe("unknown key of an entry", "train_data_paths: train.jsonl", "train_data_paths: [{path: train.jsonl, wieght: 2}]", "data.train_data_paths[0].wieght", "recipe.yaml:16", "weight"),
    with_keys("unknown key in an override", "eval.temprature=1", says=("eval.temprature", "override eval.temprature=1", "did you mean eval.temperature")),
    with_keys("unknown setting of the model", "actor.model.config_overrides={hiden_size: 8}", says=("config_overrides.hiden_size", "hidden_size")),
    in_recipe("wrong type, text for a number", "lr: 1.0e-3", "lr: fast", "actor.optim.lr: 'fast'", "recipe.yaml:14", "a number > 0"),
    in_recipe("wrong type, fraction of a row", "micro_batch_size: 4", "micro_batch_size: 2.5", "actor.micro_batch_size: 2.5", "recipe.yaml:8", "whole number"),
    in_recipe("wrong type, yes for true", "max_length: 128", "shuffle: 'yes'", "data.shuffle: 'yes'", "recipe.yaml:18", "true or false"),
    in_recipe("wrong type, a number for a path", "train_data_paths: train.jsonl", "train_data_paths: 7", "data.train_data_paths: 7", "recipe.yaml:16", "a path or Hub name"),
    in_recipe("broken YAML", "  max_steps: 2", "  max_steps: [2", "not valid YAML", "recipe.yaml:", "quotes"),
    Case("no recipe of that name", ("there is no such recipe", "recipee.yaml", "recipe.yaml"), ("train", "recipee.yaml")),
    Case("a directory for a recipe", ("this is a directory", "model", "YAML"), ("train", "model")),
    Case("an empty recipe", ("the recipe is empty", "recipe.yaml", "actor:"), prepare=write("recipe.yaml", "# soon\n")),
    Case("no recipe at all", ("there is no recipe", "name a YAML file"), ("train", "actor.optim.lr=1e-3")),
]

SIZES = [
    with_keys("no rows in a forward", "actor.micro_batch_size=0", says=("actor.micro_batch_size: 0", "override", ">= 1")),
    with_keys("rows of one token", "data.max_length=1", says=("data.max_length: 1", "override", ">= 2")),
    with_keys("warm-up longer than training", "actor.optim.lr_warmup_steps_ratio=1.5", says=("1.5", "<= 1")),
    with_keys("rows longer than a forward", "actor.max_tokens_per_micro_batch=64", says=("data.max_length (128 tokens)", "64", "override", "raise")),
    with_keys("steps by rows and by tokens", "actor.global_batch_tokens=512", "actor.global_batch_size=8", says=("global_batch_size (8", "512", "exclude", "keep one")),
    with_keys("final rate above the first", "actor.optim.min_lr=1", says=("min_lr (1)", "0.001", "lower it")),
    with_keys("training without end", "runner.max_epochs=-1", "runner.max_steps=-1", says=("-1", "would not end", "limit one")),
    with_keys("two sets to evaluate on", "data.eval_split=0.1", says=("data.eval_split (0.1)", "keep one")),
    with_keys("early stop without evaluations", "runner.early_stop.enabled=true", says=("runner.early_stop.enabled", "val_check_interval")),
    with_keys("answers without evaluation data", "data.eval_data_paths=null", "eval.generate=true", says=("eval.generate", "evaluation data", "data.eval_split")),
    with_keys("a width that heads do not divide", "actor.model.from_scratch=true", "actor.model.config_overrides={hidden_size: 33}", says=("hidden size (33)", "attention heads (4)", "config_overrides")),
    with_keys("rows longer than the model", "data.max_length=2000", says=("max_position_embeddings", "256", "train.jsonl: row 3", "lower data.max_length"), prepare=lambda work: write_rows(work / "train.jsonl", [*rows(2), chat(("user", "?"), ("assistant", "long " * 80))])),
    with_keys("more shards than ranks", "actor.parallel.data_shard=3", says=("actor.parallel.data_shard", "3", "1 rank", "-1")),
]  # fmt: skip

FEATURES = [
    with_keys("an adapter of low rank", "actor.model.is_lora=true", says=("actor.model.is_lora", "True", "not supported", "leave it false")),
    with_keys("settings of such an adapter", "actor.model.lora.r=8", says=("actor.model.lora.r", "8", "leave it out")),
    with_keys("vision", "actor.model.model_type=vision_language", says=("vision_language", "causal_lm")),
    with_keys("an adapter class", "actor.model.adapter=mine.py:Mine", says=("actor.model.adapter", "mine.py"), prepare=write("mine.py", "class Mine: ...\n")),
    with_keys("options that nobody reads", "actor.model.options={horizon: 8}", says=("actor.model.options", "horizon")),
    with_keys("tensor parallel", "actor.parallel.tensor=2", says=("actor.parallel.tensor", "2", "data_shard")),
    with_keys("Ray", "runner.launcher=ray", says=("runner.launcher", "ray", "nproc_per_node")),
    with_keys("a profile", "runner.profile_steps=[1,2]", says=("runner.profile_steps", "[1, 2]", "not supported")),
]  # fmt: skip

# -- the data ------------------------------------------------------------------------------------------------------

FIVE_THOUSAND = "".join(json.dumps(row) + "\n" for row in rows(4999)) + '{"messages": [\n' + json.dumps(rows(1)[0]) + "\n"
KEEPS_USERS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATA = [
    with_keys("a missing file", "data.train_data_paths=trian.jsonl", says=("trian.jsonl", "does not exist", "did you mean", "train.jsonl")),
    with_keys("a missing evaluation file", "data.eval_data_paths={math: nowhere/a.jsonl}", says=("nowhere/a.jsonl", "does not exist", "directory")),
    with_keys("a pattern without a match", "data.train_data_paths='parts/*.jsonl'", says=("nothing matches", "parts/*.jsonl", "check the pattern")),
    with_keys("a directory without data", "data.train_data_paths=empty", says=("holds no data file", "empty", ".jsonl"), prepare=lambda work: (work / "empty").mkdir()),
    with_keys("a kind of file nobody knows", "data.train_data_paths=./notes.docx", says=("notes.docx", "not known", ".parquet"), prepare=write("notes.docx", "?")),
    Case("an empty file", ("empty", "train.jsonl"), prepare=write("train.jsonl", "")),
    Case("a file of blank lines", ("no rows", "train.jsonl"), prepare=write("train.jsonl", "\n\n")),
    Case("broken JSON at row 5,000", ("broken JSON", '{"messages": [', "train.jsonl: row 5,000", "data.on_bad_row=skip"), prepare=write("train.jsonl", FIVE_THOUSAND)),
    Case("broken JSON at the first row", ("broken JSON", "train.jsonl: row 1", "data.on_bad_row=skip"), prepare=write("train.jsonl", "{'a': 1}\n")),
    with_keys("text named Parquet", "data.train_data_paths=rows.parquet", says=("cannot be read as parquet", "rows.parquet"), prepare=write("rows.parquet", "hello")),
    train_rows("rows without an answer", [*rows(3), chat(("user", "and?"))], "no assistant turn", "train.jsonl: row 4", "data.on_bad_row=skip"),
    train_rows("an empty answer", [*rows(1), chat(("user", "and?"), ("assistant", " "))], "message 2", "answer is empty", "row 2", "skip"),
    train_rows("an unknown role", [chat(("user", "?"), ("narrator", "he said"))], "'narrator'", "known are system", "row 1"),
    train_rows("a turn without a role", [*rows(1), {"messages": [{"content": "?"}]}], "message 1: no role", "content", "row 2", "skip"),
    train_rows("an image", [chat(("user", [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]), ("assistant", "!"))], "'image'", "text only", "row 1"),
    train_rows("a column of images", [{**rows(1)[0], "images": ["a.png"]}], "images", "text only", "row 1"),
    train_rows("rows of no known format", [{"subject": "a", "body": "b"}], "subject, body", "instruction", "data.columns", "row 1"),
    train_rows("too many bad rows", [*rows(2), *[chat(("user", "?"))] * 5], "5 rows cannot be used", "data.max_bad_rows is 3", "row 3", "train.jsonl", "raise data.max_bad_rows", keys=("data.on_bad_row=skip", "data.max_bad_rows=3")),
    with_keys("rows that are too long", "data.on_too_long=fail", "data.max_length=20", says=("data.max_length is 20", "row 1", "raise data.max_length")),
    with_keys("all rows cut before the answer", "data.max_length=8", says=("no row is left", "train.jsonl", "data.max_length")),
    with_keys("columns that are not there", "data.columns={question: problem}", says=("'problem'", "data.columns", "row 1")),
    with_keys("a transform that is not there", "data.transform=mine.py:change", says=("'change'", "mine.py", "data.transform"), prepare=write("mine.py", "def other(row): return row\n")),
    with_keys("a transform that cannot be called", "data.transform=mine.py:change", says=("'change'", "mine.py", "data.transform"), prepare=write("mine.py", "change = 3\n")),
    with_keys("a transform that raises", "data.transform=mine.py:change", says=("KeyError: 'text'", "data.transform", "row 1"), prepare=write("mine.py", "def change(row): return {'text': row['text']}\n")),
    with_keys("a transform that does not import", "data.transform=mine.py:change", says=("ZeroDivisionError", "mine.py"), prepare=write("mine.py", "1 / 0\n")),
]  # fmt: skip


def save_tokenizer(**options: str | None) -> Prepare:
    def prepare(work: Path) -> None:
        make_tokenizer(**options).save_pretrained(work / "model")
        if options.get("template", "") is None:
            (work / "model" / "chat_template.jinja").unlink(missing_ok=True)

    return prepare


def plain_text_without_end(work: Path) -> None:
    save_tokenizer(eos=None)(work)
    write_rows(work / "train.jsonl", [{"text": "once upon a time"}])


def without_end_or_template(work: Path) -> None:
    save_tokenizer(eos=None, template=None)(work)
    file = work / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace(END, "<|other|>"))


def system_rows(work: Path) -> None:
    write_rows(work / "train.jsonl", [chat(("system", "Be brief."), ("user", "?"), ("assistant", "!"))])
    (work / "mine.jinja").write_text(KEEPS_USERS)


TEMPLATES = [
    with_keys("a template that drops a role", "data.chat_template=mine.jinja", says=("leaves out system turns", "message 1", "row 1"), prepare=system_rows),
    with_keys("a template that drops the answer", "data.chat_template=mine.jinja", says=("leaves out the assistant's answer", "template"), prepare=write("mine.jinja", "{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}")),
    with_keys("a template of broken Jinja", "data.chat_template=mine.jinja", says=("Jinja", "mine.jinja", "line 1"), prepare=write("mine.jinja", "{% for m in messages %}{{ m.content }")),
    with_keys("a template without an end of turn", "data.chat_template=mine.jinja", says=("no token that ends a turn", "template", "eos_token"), prepare=write("mine.jinja", "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")),
    with_keys("a template that is not there", "data.chat_template=missing.jinja", says=("data.chat_template", "missing.jinja", "check the name")),
    Case("a tokenizer without a template", ("no chat template", "data.chat_template", "chatml"), prepare=save_tokenizer(template=None)),
    Case("a tokenizer without an end, for text", ("no end-of-sequence token", "row 1", "eos_token"), prepare=plain_text_without_end),
    with_keys("a tokenizer without an end, for chatml", "data.chat_template=chatml", says=("end-of-sequence", "chatml", "eos_token"), prepare=without_end_or_template),
]  # fmt: skip

# -- the model -----------------------------------------------------------------------------------------------------


def tokenizer_with_more(work: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.save_pretrained(work / "model")


def torn(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def bad_header(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(bytes(content))


def absurd_header(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 62) + file.read_bytes()[8:])


def change_config(**values: object) -> Prepare:
    def prepare(work: Path) -> None:
        file = work / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return prepare


MODEL = [
    with_keys("a model that is not there", "actor.model.model_path=./modle", says=("actor.model.model_path", "modle", "check the name")),
    with_keys("a directory that is no model", "actor.model.model_path=./papers", says=("papers", "actor.model.model_path", "config.json"), prepare=write("papers/a.txt", "?")),
    with_keys("a file for a model", "actor.model.model_path=./train.jsonl", says=("train.jsonl", "actor.model.model_path", "directory")),
    with_keys("a name the Hub cannot be asked for", "actor.model.model_path=org/never-heard-of", says=("org/never-heard-of", "actor.model.model_path", "directory")),
    Case("a model without weights", ("no weights", "model", "from_scratch"), prepare=remove("model/model.safetensors")),
    Case("a model without a tokenizer", ("no tokenizer", "model", "tokenizer_model"), prepare=lambda work: [(work / "model" / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")] and None),
    Case("a torn tokenizer", ("tokenizer", "model", "tokenizer_model"), prepare=write("model/tokenizer.json", '{"version": "1.0", "trunc')),
    Case("a tokenizer larger than the embedding", ("token ids up to 260", "259 rows", "resize_token_embeddings"), prepare=tokenizer_with_more),
    Case("torn weights", ("bytes of data", "model.safetensors", "torn"), prepare=torn),
    Case("a corrupted header", ("damaged safetensors header", "model.safetensors", "download"), prepare=bad_header),
    Case("a header longer than the file", ("no safetensors header", "model.safetensors", "download"), prepare=absurd_header),
    Case("weights of other shapes", ("the model expects [64, 32]", "model.safetensors", "config.json"), prepare=change_config(intermediate_size=64)),
    Case("weights of fewer layers", ("are not among the weights", "model.layers.2", "config.json"), prepare=change_config(num_hidden_layers=3)),
    Case("quantised weights", ("quantised", "quantization_config", "unquantised"), prepare=change_config(quantization_config={"quant_method": "gptq", "bits": 4})),
    Case("an architecture nobody knows", ("model", "gpt9", "config.json"), prepare=change_config(model_type="gpt9")),
    Case("a model that writes no text", ("'vit'", "causal language model", "config.json"), prepare=change_config(model_type="vit")),
    Case("a torn config.json", ("config.json", "model", "actor.model.model_path"), prepare=write("model/config.json", '{"model_type": "lla')),
    with_keys("a model type nobody registered", "actor.model.model_type=my_model", says=("my_model", "causal_lm", "plugins")),
    with_keys("an attention nobody knows", "actor.model.attn_implementation=quick", says=("quick", "attn_implementation")),
    with_keys("nothing to freeze", "actor.model.freeze=[visual]", says=("'visual'", "actor.model.freeze", "names look like")),
    with_keys("everything frozen", "actor.model.freeze=['.']", says=("nothing to train", "actor.model.freeze", "freeze less")),
    with_keys("units that the model has not", "actor.fsdp_config.wrap=[Block]", says=("Block", "actor.fsdp_config.wrap", "LlamaDecoderLayer")),
    with_keys("an optimizer nobody knows", "actor.optim.name=AdamX", says=("AdamX", "actor.optim.name", "AdamW")),
    with_keys("an optimizer that cannot be used", "actor.optim.name=LBFGS", says=("LBFGS", "several times", "AdamW")),
    with_keys("an argument the optimizer has not", "actor.optim.args={momentum: 0.9}", says=("actor.optim.args.momentum", "AdamW", "betas")),
    with_keys("an argument of the wrong kind", "actor.optim.name=SGD", "actor.optim.args={momentum: -1}", says=("momentum", "-1", "actor.optim")),
    with_keys("a group of no parameter", "actor.optim.groups=[{pattern: vision, lr: 1e-4}]", says=("'vision'", "actor.optim.groups", "names look like")),
]  # fmt: skip

# -- the run -------------------------------------------------------------------------------------------------------


def other_model(work: Path) -> None:
    make_model(259, hidden_size=16).save_pretrained(work / "other")
    make_tokenizer().save_pretrained(work / "other")


def torn_checkpoint(work: Path) -> None:
    file = next((work / "runs/done/checkpoints/global_step_2/model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-64])


def other_data(work: Path) -> None:
    write_rows(work / "train.jsonl", rows(24, first=7))


RUN = [
    with_keys("a metric nobody emits", "runner.best.monitor=eval/acuracy", says=("eval/acuracy", "runner.best.monitor", "eval/token_accuracy")),
    with_keys("a metric of a set that is not there", "runner.early_stop={enabled: true, monitor: eval/math/loss}", "runner.val_check_interval=1", says=("eval/math/loss", "runner.early_stop.monitor", "eval/loss")),
    with_keys("an accuracy without answers", "runner.best.monitor=eval/eval_accuracy", says=("eval/eval_accuracy", "eval/loss", "eval.generate")),
    with_keys("a pattern without a group", "eval.generate=true", "eval.answer_pattern='####'", says=("'####'", "eval.answer_pattern", "at least one group")),
    with_keys("a pattern that does not compile", "eval.generate=true", "eval.answer_pattern='(a'", says=("'(a'", "eval.answer_pattern", "does not compile")),
    with_keys("a matching function that is not there", "eval.generate=true", "eval.match=mine.py:same", says=("'same'", "mine.py", "eval.match", "equal"), prepare=write("mine.py", "def equal(a, b): return a == b\n")),
    with_keys("a matching function without a file", "eval.generate=true", "eval.match=mine.py:same", says=("eval.match", "mine.py", "check the name")),
    with_keys("a plugin that is not there", "plugins=[mine.py]", says=("plugins", "mine.py", "check the name")),
    with_keys("a plugin that does not import", "plugins=[mine.py]", says=("mine.py", "ImportError", "line 2", "plugins"), prepare=write("mine.py", "\nfrom math import sine\n")),
    with_keys("a plugin with a slip", "plugins=[mine.py]", says=("mine.py", "SyntaxError", "plugins"), prepare=write("mine.py", "def f(:\n")),
    with_keys("a module nobody installed", "plugins=[never_heard_of]", says=("never_heard_of", "plugins", "importable module")),
    with_keys("a CUDA device that is not there", "runner.device=cuda", says=("cuda", "runner.device", "auto")),
    with_keys("more ranks than GPUs", "runner.device=cuda", "runner.nproc_per_node=8", says=("cuda", "runner.device", "auto")),
    Case("an older run in the directory", ("already holds a run", "done", "resume_dir=auto"), (*CONTINUE, "runner.resume_dir=null")),
    Case("a changed key", ("actor.optim.lr: 0.001 -> 0.1", "runs/done", "allow_changes=[actor.optim.lr]"), (*CONTINUE, "actor.optim.lr=0.1")),
    Case("a changed seed and length", ("runner.seed: 42 -> 1", "data.max_length: 128 -> 64", "overwrite"), (*CONTINUE, "runner.seed=1", "data.max_length=64")),
    Case("changed rows", ("train.jsonl", "other content", "runs/done", "allow_changes=[data.train_data_paths]"), CONTINUE, other_data),
    Case("a changed file of rows", ("data.train_data_paths", "more.jsonl", "allow_changes"), (*CONTINUE, "data.train_data_paths=more.jsonl"), lambda work: write_rows(work / "more.jsonl", rows(30))),
    Case("the checkpoint of another model", ("shape", "runs/done", "model"), (*TRAIN, "actor.model.model_path=other", "runner.allow_changes=[actor.model]", "runner.resume_dir=runs/done", "runner.max_steps=4"), other_model),
    Case("a checkpoint that is not there", ("global_step_7", "runs/done/checkpoints", "no such folder", "remedy"), (*TRAIN, "runner.resume_dir=runs/done/checkpoints/global_step_7")),
    Case("a run that is not there", ("runs/dnoe", "remedy"), (*TRAIN, "runner.resume_dir=runs/dnoe")),
    Case("a torn checkpoint", ("global_step_2", "torn", ".safetensors", "another checkpoint"), (*CONTINUE, "runner.resume_dir=runs/done/checkpoints/global_step_2"), torn_checkpoint),
    Case("runs below a file", ("cannot be written", "train.jsonl is not a directory", "runner.logger.log_path"), (*TRAIN, "runner.logger.log_path=train.jsonl/runs")),
    with_keys("a cache below a file", "data.cache_dir=train.jsonl/cache", says=("cache cannot be written", "train.jsonl/cache", "data.cache_dir")),
]  # fmt: skip

# -- the other commands --------------------------------------------------------------------------------------------

COMMANDS = [
    Case("an unknown command", ("trian", "train"), ("trian", "recipe.yaml")),
    Case("an unknown option", ("--dryrun", "--dry-run"), (*TRAIN, "--dryrun")),
    Case("a word that is no override", ("'actor.optim.lr'", "key=value"), (*TRAIN, "actor.optim.lr", "1e-3")),
    Case("evaluate what is no run", ("model", "not a run directory", "shardtune train"), ("eval", "model")),
    Case("evaluate what is not there", ("no such recipe", "nothing", "remedy"), ("eval", "nothing")),
    Case("evaluate without data", ("nothing to evaluate on", "data.eval_data_paths"), ("eval", "recipe.yaml", "data.eval_data_paths=null")),
    Case("evaluate a run on data that is gone", ("eval.jsonl", "does not exist", "data"), ("eval", "runs/done"), remove("eval.jsonl")),
    Case("evaluate a checkpoint that is not there", ("no checkpoint of step 9", "complete checkpoints: 1, 2", "latest"), ("eval", "runs/done", "--checkpoint", "9")),
    Case("answer from a checkpoint that is not there", ("no best checkpoint", "complete checkpoints: 1, 2", "latest"), ("generate", "runs/done", "--prompt", "?", "--checkpoint", "best")),
    Case("answer from what is no run", ("runs", "not a run directory", "shardtune train"), ("generate", "runs", "--prompt", "?")),
    Case("answer nothing", ("--prompt", "--file"), ("generate", "runs/done")),
    Case("answer a file that is not there", ("prompts.jsonl", "--file", "remedy"), ("generate", "runs/done", "--file", "prompts.jsonl")),
    Case("answer broken JSON", ("not JSON", "prompts.jsonl:2", "remedy"), ("generate", "runs/done", "--file", "prompts.jsonl"), write("prompts.jsonl", '{"prompt": "?"}\nhello\n')),
    Case("answer a row without a prompt", ("no prompt", "prompts.jsonl:1", "question"), ("generate", "runs/done", "--file", "prompts.jsonl"), write("prompts.jsonl", '{"answer": "?"}\n')),
    Case("answer a prompt that is no text", ("prompt", "prompts.jsonl:1", "text"), ("generate", "runs/done", "--file", "prompts.jsonl"), write("prompts.jsonl", '{"prompt": 7}\n')),
    Case("a probability above 1", ("--top-p", "1.5"), ("generate", "runs/done", "--prompt", "?", "--top-p", "1.5")),
    Case("export into a full directory", ("not empty", "model", "--to"), ("export", "runs/done", "--to", "model")),
    Case("export below a file", ("train.jsonl", "--to", "remedy"), ("export", "runs/done", "--to", "train.jsonl/out")),
    Case("export in a dtype nobody knows", ("fp8", "bf16"), ("export", "runs/done", "--to", "out", "--dtype", "fp8")),
    Case("export a run without a final model", ("has no final/", "done", "--checkpoint latest"), ("export", "runs/done", "--to", "out"), lambda work: shutil.rmtree(work / "runs/done/final")),
    Case("export torn weights", ("torn", "model.safetensors", "final"), ("export", "runs/done", "--to", "out"), lambda work: (work / "runs/done/final/model.safetensors").write_bytes((work / "runs/done/final/model.safetensors").read_bytes()[:-9]) and None),
    Case("look at rows that are not there", ("--start", "24 rows", "30"), ("data", "preview", "recipe.yaml", "--start", "30")),
    Case("look at data without a recipe", ("there is no recipe", "name a YAML file"), ("data", "preview")),
]  # fmt: skip

CASES = [*KEYS, *SIZES, *FEATURES, *DATA, *TEMPLATES, *MODEL, *RUN, *COMMANDS]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory with a finished run, runs/done, that kept two checkpoints."""
    work = make_workspace(tmp_path_factory.mktemp("user") / "work")
    with inside(work):
        done = run_cli(*TRAIN, "runner.logger.experiment_name=done", "runner.save_interval=1")
    assert done.code == 0, done.err
    return work


@pytest.fixture
def work(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to spoil, which is the working directory of the test."""
    copy = tmp_path / "work"
    shutil.copytree(original, copy, symlinks=True)
    shutil.copytree(original.parent / "cache", tmp_path / "cache")
    for name in ("config.yaml", "manifest.json"):
        file = copy / "runs/done" / name
        file.write_text(file.read_text().replace(str(original.parent), str(tmp_path)))
    with inside(copy):
        yield copy


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder with a hash of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def check(case: Case, work: Path, outcome: Outcome, before: dict[str, str]) -> None:
    shown = f"{case.name}: exit code {outcome.code}\n{outcome.out}{outcome.err}"
    assert outcome.code == 2, shown
    assert "Traceback" not in outcome.err + outcome.out, shown
    heads = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(heads) == 1, shown
    missing = [words for words in case.says if words not in outcome.err.partition("error: ")[2]]
    assert not missing, f"the message lacks {missing}\n{shown}"
    after = tree(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, f"changed: {sorted(changed)}\n{shown}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_mistake_is_told(case: Case, work: Path) -> None:
    case.prepare(work)
    before = tree(work)
    check(case, work, run_cli(*case.argv), before)
