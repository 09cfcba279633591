"""The guide's worker, its three ways of being known, and its YAML: trained, evaluated and resumed, on 1 and 2 ranks.

What differs from the print stands at the top of `tests/seeds/guide.py`. The recipe has three more changes here, as keys
on the command line, none of which the guide has an opinion on: fp64 and no weight decay, so that numbers are those of a
loop of plain PyTorch to 1e-10; a constant learning rate, so that a shorter run is the beginning of a longer one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.checkpoint.atomic import read_json
from shardtune.config import load_recipe
from shardtune.config.recipe_config import as_dict_config
from shardtune.errors import ConfigError
from tests.seeds.guide import (
    ABSTRACT,
    FILE,
    LOOP,
    MODEL,
    MY_NEW_MODEL,
    PLAIN,
    PROVIDER,
    RECIPE,
    REGISTERED,
    WORKER,
    Change,
    changed,
)
from tests.support.registry import nothing_registered
from tests.support.tiny_run import assert_same_tensors, lines, make_tokenizer, train_on_ranks, write_rows

ROWS, HELD_OUT = 40, 7
STEPS, STOPPED = 10, 3
"""Five epochs of two steps, the second one of 8 rows; stopped in the middle of the second epoch."""
RATE, EXACT = 1e-3, 1e-10
IMPORTED = """\
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
"""


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with nothing_registered():
        yield


@dataclass(frozen=True)
class Reader:
    """A directory with a model, rows, and for each way of registering a worker file and a recipe."""

    folder: Path

    def recipe(self, way: str = "enum") -> Path:
        return self.folder / f"{way}.yaml"

    def keys(self, name: str, *others: str) -> list[str]:
        return [
            f"runner.logger.log_path={self.folder / 'runs'}",
            f"runner.logger.experiment_name={name}",
            "runner.logger.logger_backends=[jsonl]",
            "runner.device=cpu",
            "actor.model.precision=fp64",
            "actor.optim.lr_scheduler=constant",
            "actor.optim.weight_decay=0",
            f"actor.optim.lr={RATE}",
            *others,
        ]

    def as_mapping(self, way: str, name: str, *others: str) -> dict[str, Any]:
        """A recipe as the ranks of a test take it."""
        return load_recipe(self.recipe(way), self.keys(name, *others)).to_dict()

    def train(self, way: str, name: str, *others: str) -> Path:
        return shardtune.train(self.recipe(way), *self.keys(name, *others)).dir


def sums(number: int, start: int = 0) -> list[dict[str, str]]:
    """Questions and answers of ragged length; answers of three digits come first, and then those of one."""
    rows = []
    for n in range(start, start + number):
        one, other = n % 10 * 10 ** (n % 3), n % 7
        rows.append({"question": f"{'now ' * (n % 4 // 2)}{one}+{other}=", "answer": str(one + other)})
    return sorted(rows, key=lambda row: len(row["answer"]) % 3)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("guide")
    made: dict[str, Any] = {}
    exec(f"{IMPORTED}{MY_NEW_MODEL}", made)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = made["MyNewModelConfig"](eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    made["MyNewModel"](config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train_path", sums(ROWS))
    write_rows(folder / "eval_path", sums(HELD_OUT, start=100))
    recipe = changed(
        RECIPE,
        (
            Change("/path/to/model", str(folder / "model"), "a path"),
            Change("/path/to/train_path", str(folder / "train_path"), "a path"),
            Change("/path/to/eval_path", str(folder / "eval_path"), "a path"),
        ),
    )
    for way, change in {**REGISTERED, "plain": PLAIN}.items():
        (folder / f"{way}.py").write_text(changed(WORKER, (*FILE, change)))
        # The guide's author edits the system's own source; a user's file is named instead.
        (folder / f"{way}.yaml").write_text(f"plugins: [{way}.py]\n{recipe}")
    return Reader(folder)


@pytest.fixture(scope="module")
def whole(reader: Reader) -> Path:
    """All steps on one rank."""
    with nothing_registered():
        return reader.train("enum", "whole")


def assert_alike(one: Path, other: Path, steps: int) -> None:
    """The numbers of two runs, one of which may be longer."""
    for mine, theirs in zip(lines(one)[:steps], lines(other)[:steps], strict=True):
        both = mine.keys() & theirs.keys()  # a shorter run is evaluated at its own end
        assert "train/loss" in both
        assert {name: mine[name] for name in both} == pytest.approx({name: theirs[name] for name in both}, abs=EXACT)


@pytest.mark.lengthy
def test_one_rank_trains_evaluates_and_resumes_bitwise(reader: Reader, whole: Path) -> None:
    first, last = lines(whole)[0], lines(whole)[-1]
    assert (last["step"], last["train/loss"] < first["train/loss"]) == (STEPS, True)
    assert read_json(whole / "manifest.json")["worker"] == "FSDPMyModelSftWorker"
    assert list(read_json(whole / "manifest.json")["user_code"]) == [str(reader.folder / "enum.py")]

    reader.train("enum", "parts", f"runner.max_steps={STOPPED}")
    parts = reader.train("enum", "parts")
    stopped = lines(parts)[STOPPED - 1]  # where the shorter run had its last evaluation
    assert lines(parts) == [*lines(whole)[: STOPPED - 1], stopped, *lines(whole)[STOPPED:]]
    assert_same_tensors(*(run / f"checkpoints/global_step_{STEPS}" for run in (whole, parts)))

    final = read_json(whole / "final" / "metrics.json")
    assert shardtune.load_run(whole).evaluate() == {"eval/eval_accuracy": final["eval/eval_accuracy"]}
    assert final["eval/eval_accuracy"] in {n / HELD_OUT for n in range(HELD_OUT + 1)}
    assert type(AutoModelForCausalLM.from_pretrained(whole / "final")).__name__ == "MyNewModel"
    assert AutoTokenizer.from_pretrained(whole / "final")("3+4=")["input_ids"]


def test_the_numbers_are_those_of_plain_pytorch_in_the_loop_of_the_guide(reader: Reader, whole: Path) -> None:
    """What it says of `self.data_iter`, `self.get_train_model_output` and `get_model(self.cfg.actor.model)`."""
    recipe = load_recipe(reader.recipe("decorator"), reader.keys("loop"))
    shardtune.config.user_code.import_plugins(recipe.plugins)
    (kind,) = shardtune.config.model_names.registered("my_new_model")
    worker = kind(as_dict_config(recipe))
    made: dict[str, Any] = {"self": worker, "get_model": shardtune.get_model}
    exec(PROVIDER, made)
    assert type(made["model"]).__name__ == "MyNewModel"
    worker.setup()
    model = AutoModelForCausalLM.from_pretrained(reader.folder / "model", dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    for line in lines(whole):
        batches = []
        for _ in range(16 if line["step"] % 2 else 4):
            exec(LOOP, made)
            assert made["losses"].requires_grad
            batches.append(made["batch"])
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        losses = []
        for batch in batches:
            logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
            losses.append(F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / targets)
        torch.stack(losses).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert line["train/loss"] == pytest.approx(sum(loss.item() for loss in losses), abs=EXACT)
        assert line["train/grad_norm"] == pytest.approx(norm.item(), abs=EXACT)
        assert (worker._data_epoch, worker._data_iter_offset) in {(line["step"] // 2, line["step"] % 2 * 32)}
    with pytest.raises(ConfigError, match="data_iter is set to a list_iterator; it can only be read"):
        worker.data_iter = iter([])
    (file,) = (whole / f"checkpoints/global_step_{STEPS}/model").glob("*.safetensors")
    for name, tensor in load_file(file).items():
        assert (tensor - model.get_parameter(name)).abs().max() < EXACT, name


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks_train_evaluate_and_resume_bitwise(reader: Reader, whole: Path, short: bool) -> None:
    """Answers of rank 1 end two tokens before those of rank 0; a plain module returns an object of a plain class."""
    module = ("actor.model.model_type=my_module", "data.eval_data_paths=null", "runner.max_steps=2")
    jobs = [
        reader.as_mapping("enum", "whole-2"),
        reader.as_mapping("enum", "parts-2", f"runner.max_steps={STOPPED}"),
        reader.as_mapping("enum", "parts-2"),
        reader.as_mapping("plain", "plain-fsdp", *module),
        reader.as_mapping("plain", "plain-fsdp1", *module, "actor.training_backend=fsdp1"),
    ]
    train_on_ranks(2, [jobs[0], jobs[3]] if short else jobs)
    runs = reader.folder / "runs"
    one, other = runs / "whole-2", runs / "parts-2"
    if not short:
        assert_same_tensors(*(run / f"checkpoints/global_step_{STEPS}" for run in (one, other)))
        assert lines(other)[STOPPED:] == lines(one)[STOPPED:]
    assert_alike(whole, one, STEPS)
    plain = reader.train("plain", "plain", *module)
    for backend in ("fsdp",) if short else ("fsdp", "fsdp1"):
        assert_alike(plain, runs / f"plain-{backend}", 2)


@pytest.mark.parametrize("way", ["decorator", "function"])
def test_a_worker_is_known_by_a_decorator_and_by_a_function(
    reader: Reader, whole: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same numbers as with the Enum; a file that changes meanwhile is announced on resume."""
    run = reader.train(way, way, "runner.max_steps=1")
    file = reader.folder / f"{way}.py"
    file.write_text(f"{file.read_text()}\n\nADDED = 1\n")
    with nothing_registered():
        reader.train(way, way, "runner.max_steps=2")
    told = f"{file} has changed since this run was started"
    assert "".join(told.split()) in "".join(capfd.readouterr().err.split())  # in a column of a table
    assert json.loads((run / "manifest.json").read_text())["user_code"]
    assert_alike(whole, run, 2)


@pytest.mark.slow
def test_ranks_are_started_for_it(reader: Reader) -> None:
    run = reader.train("decorator", "started", "runner.max_steps=2", "runner.nproc_per_node=2")
    assert (lines(run)[-1]["step"], read_json(run / "manifest.json")["world_size"]) == (2, 2)


def test_what_is_abstract_and_what_is_named() -> None:
    named = set(re.findall(r"@abstractmethod\ndef (\w+)", ABSTRACT))
    assert named == shardtune.FSDPSftWorker.__abstractmethods__
    printed = yaml.safe_load(MODEL)
    recipe = load_recipe(printed, files_must_exist=False)
    assert recipe.actor.model.model_type == "my_new_model"
    assert recipe.actor.model.model_path == printed["actor"]["model"]["model_path"]
