"""`actor.loss`, label smoothing, z-loss and `eval.metrics` in whole runs: their numbers, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune import Adapter, Batch, LossSum, Prediction, Sample, WholeStepAdapter
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.user_metrics import UserMetrics
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import slow_except
from tests.support.dist.parity import EXACT
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import flat_script, quiet, recipe, save_model, save_rows, whole

STEPS, LR, CLIP = 3, 0.5, 0.5
FUNCTIONS = """
import torch

def focal(logits, targets):
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -((1 - chosen.exp()) ** 2) * chosen

def top2(logits, targets, weights):
    found = (logits.topk(2, -1).indices == targets[:, None]).any(-1)
    return (found * weights).sum(), weights.sum()

def entropy(logits, targets, weights):
    chances = logits.softmax(-1)
    return float((torch.special.entr(chances).sum(-1) * weights).sum()), float(weights.sum())

def loss(logits, targets, weights):
    return 0.0, 1.0

def several(logits, targets, weights):
    return weights

def accuracy(outputs, targets, weights):
    return (outputs.argmax(-1) == targets).float().sum(), len(targets)

def error(outputs, targets, weights):
    return (outputs - targets).abs().sum(), targets.numel()

def squared(outputs, targets):
    return (outputs - targets).square().sum(-1)

def one(logits):
    return 1.0, 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense/`, a model; `rows.jsonl`; `mine.py`, functions."""
    made = tmp_path_factory.mktemp("hooks")
    save_model("dense", made / "dense")
    save_rows(made / "rows.jsonl", count=24)
    save_rows(made / "eval.jsonl", count=11, seed=1)
    (made / "mine.py").write_text(FUNCTIONS)
    return made


def settings(folder: Path, *, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Three steps of SGD over eight rows, in the order of the file."""
    return recipe(
        folder / "dense",
        folder / "rows.jsonl",
        **{
            "actor__micro_batch_size": 8 if ranks == 1 else 1,
            "actor__optim": {
                "name": "SGD",
                "lr": LR,
                "clip_grad": CLIP,
                "weight_decay": 0.0,
                "lr_scheduler": "constant",
            },
            "data__shuffle": False,
            "data__eval_data_paths": str(folder / "eval.jsonl"),
            "runner__max_steps": STEPS,
            **changes,
        },
    )


def objectives(folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    metrics = [f"{folder}/mine.py:top2", f"{folder}/mine.py:entropy"]
    return [
        settings(folder, ranks=ranks, actor__label_smoothing=0.1, actor__z_loss=1e-2, eval__metrics=metrics),
        settings(folder, ranks=ranks, actor__loss=f"{folder}/mine.py:focal", eval__metrics=metrics),
    ]


Numbers = tuple[list[float], dict[str, torch.Tensor], dict[str, float]]


def trained(recipes: list[dict[str, Any]]) -> list[Numbers]:
    """The losses, final weights and evaluation of each recipe, on every rank of a process group alike."""
    found: list[Numbers] = []
    for values in recipes:
        worker = SFTWorker(load_recipe(values), report=quiet)
        worker.setup()
        losses = []
        while not worker.finished:
            losses.append(worker.run_training()["train/loss"])
        weights = {name: whole(parameter) for name, parameter in worker.weights.parameters.items()}
        found.append((losses, weights, worker.run_eval()))
        worker.release()
    return found


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    return losses + 1e-2 * logits.logsumexp(-1) ** 2


def focal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    chance = logits.softmax(-1)[torch.arange(len(targets)), targets]
    return (1 - chance) ** 2 * -chance.log()


def plainly(folder: Path, token_loss: Any) -> Numbers:
    """The same by a plain loop over single rows of a model of transformers, with whole logits."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float64)
    read = flat_script().read_rows
    rows, held_out = read(folder / "rows.jsonl", tokenizer), read(folder / "eval.jsonl", tokenizer)

    def outputs(row: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = torch.as_tensor(row[0]), torch.as_tensor(row[1]).bool()
        return model(input_ids=ids[None]).logits[0, :-1][mask[1:]], ids[1:][mask[1:]]

    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = [outputs(row) for row in rows[8 * step : 8 * step + 8]]
        loss = sum(token_loss(*pair).sum() for pair in pairs) / sum(len(targets) for _, targets in pairs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        logits, targets = (torch.cat(parts) for parts in zip(*map(outputs, held_out), strict=True))
        plain = float(F.cross_entropy(logits, targets))
        metrics = {
            "eval/loss": plain,
            "eval/perplexity": math.exp(plain),
            "eval/token_accuracy": float((logits.argmax(-1) == targets).double().mean()),
            "eval/top2": float((logits.topk(2, -1).indices == targets[:, None]).any(-1).double().mean()),
            "eval/entropy": float(torch.distributions.Categorical(logits=logits).entropy().mean()),
        }
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}, metrics


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Numbers]:
    return [plainly(folder, smoothed), plainly(folder, focal)]


@pytest.mark.lengthy
@pytest.mark.parametrize("ranks", slow_except([1, 2], 2))
def test_training_is_that_of_a_plain_loop_and_evaluation_stays_plain(
    folder: Path, plain: list[Numbers], ranks: int
) -> None:
    recipes = objectives(folder, ranks=ranks)
    found = trained(recipes) if ranks == 1 else run_ranks(trained, 2, recipes)[0]
    for (losses, weights, metrics), (wanted, wanted_weights, wanted_metrics) in zip(found, plain, strict=True):
        assert losses == pytest.approx(wanted, rel=EXACT)
        for name, weight in weights.items():
            assert float((weight - wanted_weights[name]).abs().max()) < EXACT, name
        assert metrics == pytest.approx(wanted_metrics, rel=1e-9)
    assert found[0][0][0] != pytest.approx(found[1][0][0], rel=1e-3)


@pytest.mark.lengthy
def test_metrics_are_logged_and_can_be_watched(folder: Path) -> None:
    values = settings(
        folder,
        actor__model__precision="fp32",
        eval__metrics=[f"{folder}/mine.py:top2"],
        runner__val_check_interval=1,
        runner__best={"monitor": "eval/top2", "mode": "max"},
        runner__logger={"log_path": str(folder / "runs"), "experiment_name": "watched", "logger_backends": ["jsonl"]},
    )
    run = shardtune.train(values)
    logged = [json.loads(line)["eval/top2"] for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == STEPS
    best = int((run.dir / "checkpoints/best").resolve().name.rpartition("_")[2])
    assert logged[best - 1] == max(logged)
    assert run.metrics["eval/top2"] == pytest.approx(logged[-1], abs=0.02)
    assert run.generate("hello")  # without evaluation data there is nothing to measure, and nothing to complain of


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval__metrics": ["mine.py:loss"]}, r"eval.metrics: there is another metric eval/loss"),
        ({"eval__metrics": ["mine.py:top2", "copy.py:top2"]}, r"there is another metric eval/top2"),
        ({"eval__metrics": ["mine.py:one"]}, r"one takes other arguments(?s:.*)one\(outputs, targets, weights\)"),
        ({"eval__metrics": ["mine.py:none"]}, r"no function or class 'none'"),
        ({"eval__metrics": ["mine.py:top2"], "runner__best": {"monitor": "eval/top3"}}, r"eval/top3(?s:.*)eval/top2"),
        ({"eval__metrics": ["mine.py:top2"], "data__eval_data_paths": None}, r"eval.metrics.*needs evaluation data"),
        ({"actor__loss": "mine.py:focal", "actor__z_loss": 0.1}, r"z_loss \(0.1\)(?s:.*)replaces"),
        ({"actor__loss": "mine.py:focal", "actor__label_smoothing": 0.1}, r"label_smoothing \(0.1\)"),
        ({"actor__label_smoothing": 1.0}, r"actor.label_smoothing"),
        ({"actor__loss": "mine.py:top2"}, r"top2 takes other arguments(?s:.*)top2\(outputs, targets\)"),
        ({"actor__loss": "nowhere.py:focal"}, r"nowhere.py"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(folder: Path, changes: dict[str, Any], said: str) -> None:
    (folder / "copy.py").write_text(FUNCTIONS)
    changes = {
        key: [f"{folder}/{spec}" for spec in value] if key == "eval__metrics" else value
        for key, value in changes.items()
    }
    if "actor__loss" in changes:
        changes["actor__loss"] = f"{folder}/{changes['actor__loss']}"
    with pytest.raises(ConfigError, match=said):
        SFTWorker(load_recipe(settings(folder, **changes)), report=quiet).task.check()


def test_a_metric_that_gives_no_pair_is_named(folder: Path) -> None:
    metrics = UserMetrics([f"{folder}/mine.py:several"])
    piece = Prediction(torch.zeros(3, 2), torch.zeros(3), torch.ones(3))
    with pytest.raises(ConfigError, match=r"several returned a tensor of shape \[3\](?s:.*)return \(sum, weight\)"):
        metrics(iter([piece]))
    assert metrics(iter([Prediction(torch.zeros(0, 2), torch.zeros(0), torch.ones(0))])) == {}


# Adapters of one's own.


class Classifier(Adapter):
    """A linear classifier; its own loss is twice the cross-entropy, so that another one shows."""

    def build(self) -> nn.Module:
        return nn.Linear(3, 4)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={"inputs": np.array(row["inputs"], np.float32), "label": np.array(row["label"], np.int64)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = model(batch["inputs"])
        return LossSum(2 * F.cross_entropy(logits, batch["label"], reduction="sum"), float(len(logits)))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        logits, labels = model(batch["inputs"]), batch["label"]
        for start in range(0, len(labels), 2):
            part = slice(start, start + 2)
            yield Prediction(logits[part], labels[part], torch.ones(len(labels[part])))


class Regressor(Classifier):
    """Predicts two numbers."""

    def build(self) -> nn.Module:
        return nn.Linear(3, 2)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        apart = model(batch["inputs"]) - batch["inputs"][:, :2]
        return LossSum(apart.abs().sum(), float(len(apart)))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        yield Prediction(model(batch["inputs"]), batch["inputs"][:, :2], torch.ones(len(batch["label"])))

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float, float]]:
        return {"error": (0.0, 1.0)}


class Silent(Classifier):
    """Gives no predictions."""

    predictions = Adapter.predictions


class TwoTerms(Classifier):
    """A loss in two terms."""

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"a": 1.0, "b": 1.0}


class Contrastive(WholeStepAdapter, Classifier):
    """A loss of all rows."""

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"logits": model(batch["inputs"])}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        return LossSum(outputs["logits"].square().sum(), float(len(outputs["logits"])))


def adapted(folder: Path, kind: type[Adapter], **changes: Any) -> SFTWorker:
    rows = [{"inputs": [n % 3, n % 5, -n % 4], "label": n % 4} for n in range(7)]
    file = folder / "numbers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = settings(
        folder, actor__model={"adapter": f"{__file__}:{kind.__name__}", "precision": "fp64"}, actor__micro_batch_size=2,
        data__train_data_paths=str(file), data__eval_data_paths=str(file), **changes,
    )  # fmt: skip
    return SFTWorker(load_recipe(values), report=quiet)


def steps(worker: SFTWorker, number: int = STEPS) -> tuple[list[float], dict[str, float]]:
    worker.setup()
    before = {name: tensor.detach().clone() for name, tensor in worker.inner_model.named_parameters()}
    losses = [worker.run_training()["train/loss"] for _ in range(number)]
    plain = nn.Linear(3, before["bias"].numel()).double()
    plain.load_state_dict(before)
    worker.start = plain  # pyright: ignore[reportAttributeAccessIssue]
    return losses, worker.run_eval()


def test_smoothing_and_metrics_work_on_the_predictions_of_an_adapter(folder: Path) -> None:
    worker = adapted(
        folder, Classifier, actor__label_smoothing=0.1, actor__z_loss=1e-2, eval__metrics=[f"{folder}/mine.py:accuracy"]
    )
    losses, metrics = steps(worker)
    model: nn.Linear = worker.start  # pyright: ignore[reportAttributeAccessIssue]
    inputs = torch.tensor([[n % 3, n % 5, -n % 4] for n in range(7)], dtype=torch.float64)
    labels = torch.tensor([n % 4 for n in range(7)])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    wanted = []
    for _ in range(STEPS):  # seven rows are less than the eight of a step: each step has them all
        optimizer.zero_grad()
        loss = smoothed(model(inputs), labels).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        wanted.append(float(loss.detach()))
    assert losses == pytest.approx(wanted, rel=EXACT)
    with torch.no_grad():
        logits = model(inputs)
    assert metrics["eval/loss"] == pytest.approx(2 * float(F.cross_entropy(logits, labels)), rel=1e-9)
    assert metrics["eval/accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))


def test_a_loss_of_ones_own_works_on_values_that_are_no_logits(folder: Path) -> None:
    worker = adapted(folder, Regressor, actor__loss=f"{folder}/mine.py:squared")
    losses, _ = steps(worker, 1)
    inputs = torch.tensor([[n % 3, n % 5, -n % 4] for n in range(7)], dtype=torch.float64)
    model: nn.Linear = worker.start  # pyright: ignore[reportAttributeAccessIssue]
    wanted = (model(inputs) - inputs[:, :2]).square().sum(-1).mean()
    assert losses == pytest.approx([float(wanted.detach())], rel=EXACT)


def test_metrics_of_the_adapter_and_of_the_recipe_may_not_share_a_name(folder: Path) -> None:
    worker = adapted(folder, Regressor, eval__metrics=[f"{folder}/mine.py:error"])
    with pytest.raises(ConfigError, match=r"Regressor.metrics gives a metric 'error' too"):
        steps(worker, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"actor__label_smoothing": 0.1}, "label smoothing and z-loss are"), ({"actor__loss": "dft"}, "dft is")],
)
def test_smoothing_of_values_that_are_no_logits_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{said} for logits(?s:.*)not for outputs \[2, 2\] and targets \[2, 2\]"):
        steps(adapted(folder, Regressor, **changes), 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Silent, r"works on predictions, and Silent gives none(?s:.*)Silent.predictions\(model, batch\)"),
        (Contrastive, r"works on single targets(?s:.*)Contrastive.step_loss"),
        (TwoTerms, r"2 terms \(a, b\)"),
    ],
)
def test_an_adapter_that_cannot_take_them_is_named(folder: Path, kind: type[Adapter], said: str) -> None:
    keys = {"actor__loss": f"{folder}/mine.py:focal"}, {"actor__label_smoothing": 0.1}, {"actor__z_loss": 1e-3}
    for changes in keys:
        with pytest.raises(ConfigError, match=said):
            adapted(folder, kind, **changes)
    if kind is not TwoTerms:
        with pytest.raises(ConfigError, match=said):
            adapted(folder, kind, eval__metrics=[f"{folder}/mine.py:accuracy"])
