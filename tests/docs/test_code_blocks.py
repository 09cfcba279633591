"""What the documentation tells people to type works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoTokenizer
from typer.core import TyperGroup

from shardtune.cli.commands import app
from shardtune.config import Recipe, load_recipe
from shardtune.config.schema import ACTOR_KEYS, short_key
from shardtune.verify.adapter import verify_adapter
from tests.support.chosen import slow_except
from tests.support.doc_blocks import PAGES, ROOT, Block, blocks
from tests.support.hub_server import replaced_hub
from tests.support.peft_versions import ADDS_ADAPTERS, WHY
from tests.support.vision import save_image_rows, save_vision_model
from tests.support.workspace import make_workspace, run_cli

KNOWN = {"python", "yaml", "json", "toml", "console", ""}
REQUIRED = {"actor.model.model_path": "model", "data.train_data_paths": "train.jsonl"}
EXECUTED = ("README.md", "docs/getting-started.md", "docs/export.md")
"""Pages whose commands are not only parsed: they are run, from top to bottom, in one directory each."""
WALKED = ("docs/add-a-model.md", "docs/losses.md", "docs/tasks.md", "docs/tutorials/distillation.md")
"""Pages that a reader follows from top to bottom in an empty directory: tests/docs/test_walked_pages.py."""
LONG = ("docs/engine.md", "docs/your-policy.md", "docs/vision.md")
"""Whose blocks of Python start ranks or train."""
RECIPE = """\
actor:
  global_batch_size: 8
  micro_batch_size: 4
  model: {model_path: model, precision: fp32}
  optim: {lr: 1.0e-3}
data:
  train_data_paths: train.jsonl
  eval_data_paths: eval.jsonl
  max_length: 128
  num_workers: 0
  cache_dir: cache
runner:
  max_epochs: 2
  eval_before_training: true
"""
COMMAND = typer.main.get_command(app)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's directory: recipe.yaml, train.jsonl, eval.jsonl, and a tiny model in model/."""
    folder = make_workspace(tmp_path / "sandbox")
    (folder / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Each of many exports would start a process to load itself again, the kit three; these have tests of their own.
    monkeypatch.setattr("shardtune.verify.adapter.verify_adapter", partial(verify_adapter, processes=False))
    monkeypatch.setattr("shardtune.run.run.check_reload", lambda *_: "loaded afresh, gives the same logits")
    return folder


def train_on_pictures(folder: Path) -> None:
    """A reader's `runs/pictures`: a tiny vision-language model, and a picture `a.png`."""
    model = save_vision_model("llava", folder / "vision")
    file, _ = save_image_rows(folder, 4)
    Path(folder / "images" / "1_0.png").rename(folder / "a.png")
    rows = file.read_text().replace("images/1_0.png", "a.png")
    file.write_text(rows)
    keys = [f"actor.model.model_path={model}", "actor.model.model_type=vision_language", "data.eval_data_paths=null"]
    keys += [f"data.train_data_paths={file}", "runner.max_steps=1", "runner.logger.experiment_name=pictures"]
    outcome = run_cli("train", "recipe.yaml", "runner.eval_before_training=false", *keys)
    assert outcome.code == 0, outcome.err


def named(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in blocks(*languages)]


def test_every_block_has_a_language_that_is_checked():
    found = {
        block.language: str(block) for block in blocks(*KNOWN, "bash", "sh", "py", "text", "yml", "shell", "jinja")
    }
    assert set(found) <= KNOWN, f"use console for commands, python, yaml or json: {found}"
    assert {"python", "yaml", "console"} <= set(found)
    assert all(list(ROOT.glob(pattern)) for pattern in PAGES)


def test_excuses_are_few():
    excused = [str(block) for block in blocks(*KNOWN) if block.excuse]
    assert len(excused) <= 10, f"run what can be run: {excused}"


# -- Python ----------------------------------------------------------------------------------------------------------


def python() -> list[Any]:
    """The blocks that no other test runs."""
    params = [param for param in named("python") if param.values[0].page not in WALKED]
    return [
        pytest.param(*param.values, id=param.id, marks=pytest.mark.slow) if param.values[0].page in LONG else param
        for param in params
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize("block", python())
def test_python_blocks_run(block: Block, sandbox: Path):
    if block.excuse:
        pytest.skip(block.excuse)
    if ".add_adapter(" in block.text and not ADDS_ADAPTERS:
        pytest.skip(WHY)
    names: dict[str, Any] = {
        "__name__": "documentation",
        "recipe": load_recipe("recipe.yaml"),
        "tokenizer": AutoTokenizer.from_pretrained("model"),
    }
    if "runs/pictures" in block.text:
        train_on_pictures(sandbox)
    if "runs/recipe" in block.text:
        assert run_cli("train", "recipe.yaml", "runner.max_steps=2").code == 0
    exec(compile(block.text, str(block), "exec"), names)


# -- YAML and JSON -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", named("yaml"))
def test_yaml_blocks_are_recipes(block: Block, tmp_path: Path):
    if block.excuse:
        pytest.skip(block.excuse)
    content = yaml.safe_load(block.text)
    assert set(content) <= {*Recipe.model_fields, *ACTOR_KEYS}, f"{block} is no recipe: excuse it"
    missing = [key for key in REQUIRED if not _has(content, key) and not _has(content, short_key(key))]
    # What a fragment watches needs rows to be measured on.
    given = _has(content, "data.eval_data_paths") or _has(content, "data.eval_split")
    if not given and "eval/" in block.text:
        missing.append("data.eval_data_paths")
    recipe = load_recipe(
        content, ["++runner.logger.experiment_name=documentation"], in_memory=missing, files_must_exist=False
    )
    assert recipe.to_dict()["runner"]["logger"]["experiment_name"] == "documentation"


def _has(content: Mapping[str, Any], key: str) -> bool:
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


@pytest.mark.parametrize("block", named("json"))
def test_json_blocks_are_json(block: Block):
    for line in block.text.splitlines():
        json.loads(line)


# -- Commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", named("console"))
def test_commands_parse(block: Block):
    if block.excuse:
        pytest.skip(block.excuse)
    assert block.commands, f"{block}: begin commands with '$ '"
    for command in block.commands:
        _parse(shlex.split(command))


def _parse(words: list[str]) -> None:
    """Refuse a command that does not exist, or that its program would refuse."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "python":
        assert (ROOT / arguments[0]).is_file(), words
    elif program == "torchrun":
        place = arguments.index("-m")
        assert arguments[place + 1] == "shardtune"
        _parse(arguments[place + 1 :])
    elif program == "sbatch":
        assert arguments[-1] == "job.sh", f"{words}: the script that the command above prints"
    else:
        assert program == "shardtune", f"{words}: excuse what cannot be checked"
        _parse_shardtune(arguments)


def _parse_shardtune(arguments: list[str]) -> None:
    command: Any = COMMAND
    name, rest = "shardtune", list(arguments)
    while isinstance(command, TyperGroup):
        name, *rest = rest
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(name, rest)
    overrides = [word for word in arguments if re.match(r"[\w.]+=", word)]
    if "--array" in arguments:
        overrides = [word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in overrides]
    load_recipe(
        {
            "actor": {"model": {"model_path": "model"}},
            "data": {"train_data_paths": "a", "eval_data_paths": "b"},
            "eval": {"generate": False, "environment": None},  # one of a run's, or that of the command
        },
        [
            "++runner.logger.experiment_name=documentation",
            *(word for word in overrides if not re.match(r"exp_name=|.*experiment_name=", word)),
        ],
        files_must_exist=False,
    )


@pytest.mark.lengthy
@pytest.mark.parametrize("page", slow_except(EXECUTED, "README.md", "docs/getting-started.md"))
def test_commands_run_in_their_order(page: str, sandbox: Path, monkeypatch: pytest.MonkeyPatch):
    """From top to bottom; those of several ranks (tested elsewhere) and the project's own make targets are left out."""
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 (closed with the process)
    ran = []
    if page == "docs/export.md":
        assert run_cli("train", "recipe.yaml").code == 0
    for block in blocks("console"):
        if block.page != page or block.excuse:
            continue
        for command in block.commands:
            words = shlex.split(command)
            if not words[0].endswith("shardtune") or "nproc_per_node" in command:
                continue
            with replaced_hub() if words[1] == "push" else nullcontext():
                outcome = run_cli(*words[1:])
            assert outcome.code == 0, f"{block}: {command}\n{outcome.err}"
            ran.append(command)
    assert len(ran) >= 2
