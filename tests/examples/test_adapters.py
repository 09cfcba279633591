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
from safetensors.torch import load_file, load_model
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

import shardtune
from shardtune.config import load_recipe
from shardtune.models.find_adapter import find_adapter
from shardtune.verify.adapter import verify_adapter
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, quiet, run_recipe, run_recipes
from tests.support.tiny_run import assert_same_tensors
from tests.support.workspace import quietly

pytestmark = pytest.mark.lengthy

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "adapters"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
HUGGING_FACE = {
    "sentence_embedding": AutoModel,
    "sequence_classifier": AutoModelForSequenceClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
METRIC = {"image_classifier": "accuracy", "sequence_classifier": "accuracy", "seq2seq": "token_accuracy"}
STEPS = 4
MOST_LINES = 79
WHOLE = ("image_classifier", "sequence_classifier")
"""A plain module and a model of transformers, which `make test` trains by their own recipes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with their rows, as the row makers leave them."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in EXAMPLES:
        shutil.copytree(FOLDER / name, folder / name, ignore=shutil.ignore_patterns("made", "__pycache__"))
        with quietly():
            runpy.run_path(str(folder / name / "make_rows.py"), run_name="__main__")
    return folder


def recipe(folder: Path, *overrides: str) -> dict[str, Any]:
    """An example's recipe with absolute paths, and with its runs and its cache beside it."""
    places = [f"runner.logger.log_path={folder}/runs", f"data.cache_dir={folder}/cache", "data.num_workers=0"]
    return load_recipe(folder / "recipe.yaml", [*places, *overrides]).to_dict()


STEPS_ALONE = (
    "runner.max_epochs=-1",
    "runner.eval_before_training=false",
    "actor.optim.lr_scheduler=constant",
    "data.eval_data_paths=null",
    "eval.metrics=[]",
)


def exact(folder: Path, micro_batch_size: int) -> dict[str, Any]:
    """A few steps in fp64; the third, the last of an epoch, has one row, for which the second rank has a filler."""
    return recipe(
        folder,
        *STEPS_ALONE,
        f"runner.max_steps={STEPS}",
        f"actor.micro_batch_size={micro_batch_size}",
        "actor.global_batch_size=12",
        "actor.model.precision=fp64",
        f"data.train_data_paths=[{{path: {folder}/made/train.jsonl, max_samples: 25}}]",
    )


@pytest.fixture(scope="module")
def two_ranks(made: Path) -> Mapping[str, Trace]:
    """Every example on two ranks in micro-batches of three rows."""
    jobs = [exact(made / name, 3) for name in EXAMPLES]
    return dict(zip(EXAMPLES, run_ranks(run_recipes, 2, jobs, timeout=300)[0], strict=True))


@pytest.fixture(scope="module")
def trained(made: Path) -> dict[str, shardtune.Run]:
    """Each example trained by its own recipe; made when it is first asked for."""
    return _Runs(made)


class _Runs(dict):
    def __init__(self, made: Path) -> None:
        self._made = made

    def __missing__(self, name: str) -> shardtune.Run:
        self[name] = shardtune.train(recipe(self._made / name))
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


@pytest.mark.parametrize("name", slow_except(EXAMPLES, *WHOLE))
def test_the_loss_falls_and_the_final_model_is_measured(name: str, trained: dict[str, shardtune.Run]):
    run = trained[name]
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    before = next(line["eval/loss"] for line in lines if line["step"] == 0)
    assert run.metrics["eval/loss"] < 0.8 * before
    if name in METRIC:
        first = next(line[f"eval/{METRIC[name]}"] for line in lines if line["step"] == 0)
        assert run.metrics[f"eval/{METRIC[name]}"] > first + 0.1


@pytest.mark.parametrize("name", slow_except(EXAMPLES, *WHOLE))
def test_final_loads_and_gives_the_same_evaluation(name: str, trained: dict[str, shardtune.Run]):
    run = trained[name]
    final = json.loads((run.dir / "final" / "metrics.json").read_text())
    again = run.evaluate()
    assert {key: final[key] for key in again} == again
    if name not in HUGGING_FACE:
        module = find_adapter(run.recipe).build()
        assert load_model(module, run.dir / "final" / "model.safetensors") == (set(), [])
    else:
        loaded = HUGGING_FACE[name].from_pretrained(run.dir / "final")
        saved = load_file(run.dir / "final" / "model.safetensors")
        own = loaded.state_dict()
        assert saved.keys() <= own.keys()
        assert all(torch.equal(own[key], value) for key, value in saved.items())
        assert AutoTokenizer.from_pretrained(run.dir / "final")("some words")["input_ids"]


@pytest.mark.parametrize("name", slow_except(EXAMPLES, "image_classifier"))
def test_a_resumed_run_ends_with_the_same_bits(name: str, made: Path):
    def train(run: str, steps: int) -> Path:
        overrides = (f"runner.max_steps={steps}", f"runner.logger.experiment_name={run}")
        return shardtune.train(recipe(made / name, *STEPS_ALONE, *overrides)).dir / f"checkpoints/global_step_{steps}"

    whole = train("whole", 6)
    train("in-parts", 3)
    assert_same_tensors(train("in-parts", 6), whole)


# The others are checked by `make test-slow` and bench/adapters.py.
@pytest.mark.parametrize("name", slow_except(EXAMPLES, "time_series"))
def test_the_kit_finds_nothing_wrong(name: str, made: Path):
    """Two ranks and a fresh process, which take the kit the longest, are what the tests above are about."""
    report = verify_adapter(made / name / "recipe.yaml", processes=False, report=quiet)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert sum(result.outcome == "passed" for result in report.results) >= 10
