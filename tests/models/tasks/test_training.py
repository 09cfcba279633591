"""Tasks by name train like a plain loop, are measured over whole sets, and load by transformers' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet
from tests.support.plain_tasks import LABELS, Plain
from tests.support.tiny_tasks import rows, save_encoder, save_t5, write

pytestmark = pytest.mark.lengthy

TASKS = ("sequence_classifier", "regression", "token_classifier", "embedding", "reranker", "seq2seq")
OPTIONS: Mapping[str, dict[str, Any]] = {"embedding": {"matryoshka": [4]}}
STEPS, SIZE, EVALUATED = 3, 8, 21


def values(folder: Path, task: str, micro_batch_size: int, **model: Any) -> dict[str, Any]:
    return {
        "runner": {"max_steps": STEPS, "device": "cpu"},
        "micro_batch_size": micro_batch_size,
        "global_batch_size": SIZE,
        "optim": {"name": "SGD", "lr": 0.05, "weight_decay": 0.0, "clip_grad": None, "lr_scheduler": "constant",
                  "lr_warmup_steps": 0},
        "model": {
            "model_type": task, "model_path": str(folder / ("t5" if task == "seq2seq" else "encoder")),
            "precision": "fp64", "options": OPTIONS.get(task, {}), **model,
        },
        "data": {
            "train_data_paths": str(folder / f"{task}.jsonl"), "eval_data_paths": str(folder / f"{task}-eval.jsonl"),
            "max_length": 32, "shuffle": False, "num_workers": 0, "cache_dir": str(folder / "cache"),
        },
        "eval": {"generate": task == "seq2seq", "max_new_tokens": 6},
    }  # fmt: skip


@dataclass
class Trained:
    """The numbers of a run.

    Attributes:
        losses: of each step.
        evaluation: metrics at the end.
        final: where the model was written.
    """

    losses: list[float]
    evaluation: dict[str, float]
    final: Path


def train(recipe: dict[str, Any], final: Path, initial: Path | None = None) -> Trained:
    """Train a recipe to its end and write the model; on every rank alike."""
    worker = SFTWorker(load_recipe(recipe), report=quiet)
    worker.setup()
    if initial is not None:
        initial.mkdir(exist_ok=True)
        worker.export(initial, "fp64")
    losses = []
    while not worker.finished:
        losses.append(worker.run_training()["train/loss"])
    evaluation = worker.run_eval()
    final.mkdir(exist_ok=True)
    worker.export(final, "fp64")
    worker.release()
    return Trained(losses, evaluation, final)


class Lazy(dict[str, Trained]):
    """The runs by task, each made when it is first asked for, which may be in a test without gradients."""

    def __init__(self, make: Callable[[str], Trained]) -> None:
        self._make = make

    def __missing__(self, task: str) -> Trained:
        with torch.enable_grad():
            self[task] = self._make(task)
        return self[task]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    save_encoder(made / "encoder")
    save_t5(made / "t5")
    for task in TASKS:
        write(made / f"{task}.jsonl", rows(task, STEPS * SIZE))
        write(made / f"{task}-eval.jsonl", rows(task, EVALUATED, seed=1))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Mapping[str, Trained]:
    """Each task on one rank, a step in two micro-batches."""
    return Lazy(lambda task: train(values(folder, task, SIZE // 2), folder / f"{task}-one", folder / f"{task}-initial"))


@pytest.fixture(scope="module")
def together(folder: Path) -> Mapping[str, Trained]:
    """On two ranks, each with two micro-batches of a step."""
    return Lazy(lambda task: run_ranks(train, 2, values(folder, task, SIZE // 4), folder / f"{task}-two")[0])


def slow_except(*quick: str) -> list[Any]:
    """The tasks; most are checked by `make test-slow` alone."""
    return [task if task in quick else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]


@pytest.mark.parametrize("task", slow_except("sequence_classifier", "embedding"))
def test_the_numbers_are_those_of_a_plain_loop(task: str, folder: Path, alone: Mapping[str, Trained]):
    require_plain(task, alone[task], folder)


@pytest.mark.parametrize("task", slow_except())  # of a whole step: test_whole_step_loss.py
def test_two_ranks_give_the_same_numbers(
    task: str, folder: Path, alone: Mapping[str, Trained], together: Mapping[str, Trained]
):
    assert together[task].evaluation == pytest.approx(alone[task].evaluation, abs=1e-10)
    require_plain(task, together[task], folder)


def require_plain(task: str, trained: Trained, folder: Path) -> None:
    plain = Plain(task, folder / f"{task}-initial")
    losses = plain.train(rows(task, STEPS * SIZE), STEPS, SIZE)
    assert losses[0] != pytest.approx(losses[-1], abs=1e-3)
    assert trained.losses == pytest.approx(losses, abs=1e-10, rel=0)
    final = Plain(task, trained.final)  # as a user loads it
    assert final.model.config.architectures == [type(final.model).__name__]
    expected = plain.model.state_dict()
    assert all((value - expected[name]).abs().max() < 1e-10 for name, value in final.model.state_dict().items())


def measured(task: str, alone: Mapping[str, Trained], name: str) -> tuple[Plain, list[dict[str, Any]], float]:
    return Plain(task, alone[task].final), rows(task, EVALUATED, seed=1), alone[task].evaluation[f"eval/{name}"]


@torch.no_grad()
def test_f1_is_of_the_whole_set(alone: Mapping[str, Trained]):
    plain, evaluated, found = measured("sequence_classifier", alone, "f1_macro")
    guesses = [int(plain.read([row["text"]]).logits.argmax()) for row in evaluated]
    targets = [LABELS.index(row["label"]) for row in evaluated]
    from sklearn.metrics import f1_score  # here, as what it imports takes a second

    assert found == pytest.approx(float(f1_score(targets, guesses, average="macro")))
    assert alone["sequence_classifier"].evaluation["eval/accuracy"] == pytest.approx(
        np.mean(np.equal(targets, guesses))
    )
    assert plain.model.config.id2label == dict(enumerate(LABELS))


@pytest.mark.slow
@torch.no_grad()
def test_a_correlation_is_of_the_whole_set(alone: Mapping[str, Trained]):
    plain, evaluated, found = measured("regression", alone, "spearman")
    guesses = [float(plain.read([row["sentence1"]], [row["sentence2"]]).logits) for row in evaluated]
    from scipy.stats import spearmanr  # here, as what it imports takes a second

    assert found == pytest.approx(np.asarray(spearmanr([row["score"] for row in evaluated], guesses)[0]))


@torch.no_grad()
def test_recall_is_among_all_documents_of_the_set(alone: Mapping[str, Trained]):
    plain, evaluated, found = measured("embedding", alone, "mrr/size_4")
    documents = sorted({text for row in evaluated for text in (row["positive"], *row["negatives"])})
    scores = plain.vectors([row["query"] for row in evaluated], 4) @ plain.vectors(documents, 4).T
    own = torch.tensor([documents.index(row["positive"]) for row in evaluated])
    ranks = 1 + (scores > scores.gather(1, own[:, None])).sum(1)
    assert found == pytest.approx(float((1 / ranks.double()).mean()), abs=1e-6)
    assert alone["embedding"].evaluation["eval/recall_at_5/size_4"] == pytest.approx(
        float((ranks <= 5).double().mean())
    )


@pytest.mark.slow
@torch.no_grad()
def test_reciprocal_ranks_are_of_each_query(alone: Mapping[str, Trained]):
    plain, evaluated, found = measured("reranker", alone, "mrr")
    ranks = []
    for row in evaluated:
        documents = [row["positive"], *row["negatives"]]
        scores = plain.read([row["query"]] * len(documents), documents).logits[:, 0]
        ranks.append(1 + int((scores > scores[0]).sum()))
    assert found == pytest.approx(np.mean(1 / np.array(ranks)))


@pytest.mark.slow
@torch.no_grad()
def test_answers_are_compared_by_rouge(alone: Mapping[str, Trained]):
    plain, evaluated, found = measured("seq2seq", alone, "rouge1")
    scores = []
    for row in evaluated:
        made = plain.tokenizer(row["source"], return_tensors="pt")
        answer = plain.tokenizer.decode(plain.model.generate(**made, max_new_tokens=6)[0], skip_special_tokens=True)
        given, wanted = answer.split(), row["target"].split()
        both = sum(min(given.count(word), wanted.count(word)) for word in set(given))
        scores.append(2 * both / (len(given) + len(wanted)) if both else 0.0)
    assert found == pytest.approx(np.mean(scores))


def first_step(recipe: dict[str, Any]) -> tuple[float, dict[str, tuple[torch.dtype, int]]]:
    """The loss of a step; the dtype and the numbers on this rank of the layers that T5 needs in fp32."""
    worker = SFTWorker(load_recipe(recipe), report=quiet)
    worker.setup()
    loss = worker.run_training()["train/loss"]
    parts = {name: part for name, part in worker.weights.own_parts().items() if name.endswith("wo.weight")}
    worker.release()
    return loss, {name: (part.dtype, part.numel()) for name, part in parts.items()}


@pytest.fixture(scope="module")
def far(folder: Path) -> str:
    """A T5 whose results between layers are beyond the range of fp16, as those of large ones are."""
    made = folder / "far"
    model = T5ForConditionalGeneration.from_pretrained(save_t5(made))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("wo.weight"):
                weight.copy_(3e4 * torch.randn(weight.shape).clamp(-2, 2))
            elif name.endswith("wi.weight"):
                weight.mul_(10)
    model.save_pretrained(made)
    return str(made)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="full"),
        pytest.param({"is_lora": True, "lora": {"r": 4, "base_dtype": "nf4"}}, id="nf4"),
        pytest.param({"is_lora": True, "lora": {"r": 4}}, id="lora", marks=pytest.mark.slow),
    ],
)
def test_fp16_computes_in_fp32_what_is_beyond_its_range(model: dict[str, Any], folder: Path, far: str):
    """transformers keeps `wo` in fp32 for that (`_keep_in_fp32_modules`); T5 clamps the rest to the range."""
    model = {"model_path": far, **model}
    expected, _ = first_step(values(folder, "seq2seq", SIZE // 2, **model, precision="fp32"))
    found, alone = first_step(values(folder, "seq2seq", SIZE // 2, **model, precision="fp16"))
    assert found == pytest.approx(expected, rel=1e-3)
    for loss, parts in run_ranks(first_step, 2, values(folder, "seq2seq", SIZE // 4, **model, precision="fp16")):
        assert loss == pytest.approx(expected, rel=1e-3)
        assert parts == {name: (torch.float32, size // 2) for name, (_, size) in alone.items()}  # sharded as all others
