"""The worked examples train on one and two ranks with the same numbers, resume, evaluate, and load from `final/`."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

import shardtune
from tests.dist.ranks import run_ranks
from tests.dist.training import Trace, run_recipe, run_recipes
from tests.tiny_run import assert_same_tensors
from tests.workspace import quietly

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "adapters"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
HUGGING_FACE = {
    "sentence_embedding": AutoModel,
    "sequence_classifier": AutoModelForSequenceClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
METRIC = {"image_classifier": "accuracy", "sequence_classifier": "accuracy", "seq2seq": "token_accuracy"}
STEPS = 12
MOST_LINES = 79


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with their rows, as the row makers leave them."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in EXAMPLES:
        shutil.copytree(FOLDER / name, folder / name, ignore=shutil.ignore_patterns("made", "__pycache__"))
        with quietly():
            runpy.run_path(str(folder / name / "make_rows.py"), run_name="__main__")
    return folder


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """An example's recipe with absolute paths; `changes` are dotted keys with `__` for the dots."""
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    values["runner"]["logger"] |= {"log_path": str(folder / "runs"), "logger_backends": ["jsonl"]}
    values["data"] |= {"cache_dir": str(folder / "cache"), "num_workers": 0}
    for key in ("train_data_paths", "eval_data_paths"):
        values["data"][key] = str(folder / values["data"][key])
    model = values["actor"]["model"]
    model["adapter"] = str(folder / model["adapter"])
    if "model_path" in model:
        model["model_path"] = str(folder / model["model_path"])
    for key, value in changes.items():
        section = values
        *path, last = key.split("__")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return values


def exact(folder: Path, micro_batch_size: int) -> dict[str, Any]:
    """A few steps in fp64, the last of them smaller than the others and its rows too few for all ranks."""
    return recipe(
        folder,
        runner__max_steps=STEPS,
        runner__max_epochs=-1,
        runner__eval_before_training=False,
        actor__micro_batch_size=micro_batch_size,
        actor__global_batch_size=12,
        actor__model__precision="fp64",
        data__train_data_paths=[{"path": str(folder / "made" / "train.jsonl"), "max_samples": 37}],
        data__eval_data_paths=None,
    )


@pytest.fixture(scope="module")
def two_ranks(made: Path) -> Mapping[str, Trace]:
    """Every example on two ranks in micro-batches of three rows."""
    jobs = [exact(made / name, 3) for name in EXAMPLES]
    return dict(zip(EXAMPLES, run_ranks(run_recipes, 2, jobs, timeout=300)[0], strict=True))


@pytest.fixture(scope="module")
def trained(made: Path) -> dict[str, shardtune.Run]:
    """Each example trained by its own recipe, half as long; made when it is first asked for."""
    return _Runs(made)


class _Runs(dict):
    def __init__(self, made: Path) -> None:
        self._made = made

    def __missing__(self, name: str) -> shardtune.Run:
        values = recipe(self._made / name, runner__max_epochs=2, actor__optim__lr_scheduler="constant")
        self[name] = shardtune.train(values)
        return self[name]


def test_there_are_five_and_each_is_short():
    assert len(EXAMPLES) == 5
    for name in EXAMPLES:
        text = (FOLDER / name / f"{name}.py").read_text()
        assert text.count("\n") <= MOST_LINES
        assert text.startswith('"""')


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_ranks_give_the_numbers_of_one_process_with_one_micro_batch(
    name: str, made: Path, two_ranks: Mapping[str, Trace]
):
    alone, together = run_recipe(exact(made / name, 12)), two_ranks[name]
    assert len(alone.losses) == STEPS
    assert alone.losses[-1] != alone.losses[0]
    assert together.losses == pytest.approx(alone.losses, abs=1e-10, rel=0)
    assert together.norms == pytest.approx(alone.norms, abs=1e-10, rel=1e-10)
    assert together.weights.keys() == alone.weights.keys()
    furthest = max(float((together.weights[key] - value).abs().max()) for key, value in alone.weights.items())
    assert furthest < 1e-10


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_loss_falls_and_the_final_model_is_measured(name: str, trained: dict[str, shardtune.Run]):
    run = trained[name]
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    before = next(line["eval/loss"] for line in lines if line["step"] == 0)
    assert run.metrics["eval/loss"] < 0.8 * before
    if name in METRIC:
        first = next(line[f"eval/{METRIC[name]}"] for line in lines if line["step"] == 0)
        assert run.metrics[f"eval/{METRIC[name]}"] > first + 0.1


@pytest.mark.parametrize("name", EXAMPLES)
def test_final_loads_and_gives_the_same_evaluation(name: str, trained: dict[str, shardtune.Run]):
    run = trained[name]
    final = json.loads((run.dir / "final" / "metrics.json").read_text())
    again = run.evaluate()
    assert {key: final[key] for key in again} == again
    if name in HUGGING_FACE:
        loaded = HUGGING_FACE[name].from_pretrained(run.dir / "final")
        saved = load_file(run.dir / "final" / "model.safetensors")
        own = loaded.state_dict()
        assert saved.keys() <= own.keys()
        assert all(torch.equal(own[key], value) for key, value in saved.items())
        assert AutoTokenizer.from_pretrained(run.dir / "final")("some words")["input_ids"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_resumed_run_ends_with_the_same_bits(name: str, made: Path):
    def train(run: str, steps: int) -> Path:
        values = recipe(
            made / name,
            runner__max_steps=steps,
            runner__max_epochs=-1,
            runner__eval_before_training=False,
            runner__logger__experiment_name=run,
            actor__optim__lr_scheduler="constant",
            data__eval_data_paths=None,
        )
        return shardtune.train(values).dir / "checkpoints" / f"global_step_{steps}"

    whole = train("whole", 6)
    train("in-parts", 3)
    assert_same_tensors(train("in-parts", 6), whole)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_kit_finds_nothing_wrong(name: str, made: Path):
    from shardtune.conformance import check_adapter

    check_adapter(made / name / "recipe.yaml")
