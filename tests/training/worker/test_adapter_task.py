"""An adapter's task: the weights that training starts from, and losses that draw random numbers for each row."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from shardtune import Adapter, Batch, FSDPSftWorker, LossSum, Sample, WholeStepAdapter, init_empty_weights
from shardtune.config import load_recipe
from shardtune.errors import ModelError
from shardtune.training.worker import adapter_task
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist import training
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, whole

ROWS = 12


class Field(nn.Module):
    """A path [rows, points, 3] and times [rows] to velocities."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        times = time[:, None, None].expand(*x.shape[:2], 1)
        return self.out(torch.tanh(self.into(torch.cat([x, times], -1))))


class Drawn(Adapter):
    """Flow matching over paths of ragged length, with dropout in the loss."""

    padding: ClassVar[Mapping[str, float]] = {"path": 0.0}

    def build(self) -> nn.Module:
        return Field()

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={"path": np.asarray(row["path"], np.float32)})

    def errors(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """[rows]: the error of each row, a sum over its points."""
        path, real = batch["path"], batch.mask("path")[..., None]
        noise, time = batch.randn_like("noise", path), batch.rand_like("time", path[:, 0, 0])
        kept = batch.rand_like("dropout", path) > 0.1
        velocity = model(torch.lerp(noise, path, time[:, None, None]) * kept, time)
        return ((velocity - (path - noise)).square() * real).sum((1, 2))


class Paths(Drawn):
    """A sum over points."""

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"flow": float(len(sample.fields["path"]))}

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return {"flow": LossSum(self.errors(model, batch).sum(), float(batch.lengths["path"].sum()))}

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        return {"error": (float(self.errors(model, batch).sum()), float(len(batch.rows)))}


class ComparedPaths(Drawn, WholeStepAdapter):
    """The same errors, of which a step's loss is no sum."""

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"flow": 1.0}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"errors": self.errors(model, batch)}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> Any:
        errors = outputs["errors"]
        return {"flow": LossSum(torch.logsumexp(errors / 10, 0) * len(errors), len(errors))}


class Numbered(FSDPSftWorker):
    """A worker of one's own, whose batches hold the numbers of their rows."""

    def model_provider_func(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 3).double()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rows: Any = [{"x": x[row], "row": row} for row in range(ROWS)]
        return DataLoader(rows, batch_size=self.recipe.actor.micro_batch_size), {"num_samples": ROWS}

    def errors(self, batch: Any) -> torch.Tensor:
        noise = self.row_draws(batch["row"]).randn_like("noise", batch["x"])
        return (self.model(batch["x"] + noise) - batch["x"]).square().sum(-1)

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        return self.errors(batch).mean()

    def get_eval_model_output(self, batch: Any) -> dict[str, tuple[float, float]]:
        return {"error": (float(self.errors(batch).sum()), float(len(batch["x"])))}


@dataclass
class Found:
    """What two steps and three evaluations gave."""

    steps: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def recipe(folder: Path, kind: str, micro_batch: int = 4) -> dict[str, Any]:
    named = "worker" if kind == "Numbered" else "adapter"
    model: dict[str, Any] = {"precision": "fp64"}
    return {
        "runner": {"max_steps": 2, "max_epochs": -1, "device": "cpu", "logger": {"log_path": str(folder / "runs")}},
        "actor": {
            "micro_batch_size": micro_batch,
            "global_batch_size": 8,
            "model": model | ({"adapter": f"{__file__}:{kind}"} if named == "adapter" else {}),
            "optim": {"lr": 0.1, "name": "SGD", "lr_scheduler": "constant"},
        }
        | ({"worker": f"{__file__}:{kind}"} if named == "worker" else {}),
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "eval_data_paths": str(folder / "rows.jsonl"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }


def measured(folder: str, jobs: list[tuple[str, int]]) -> list[Found]:
    """Two steps, with evaluations before, between and after them."""
    told = []
    for kind, micro_batch in jobs:
        values = load_recipe(recipe(Path(folder), kind, micro_batch))
        worker: Any = Numbered(values) if kind == "Numbered" else SFTWorker(values, report=quiet)
        worker.setup()
        found = Found()
        for step in range(3):
            # At the weights of the beginning, two evaluations have the same draws.
            found.evaluations += [value for _ in range(2 - min(step, 1)) for value in worker.run_eval().values()]
            if step < 2:
                metrics = worker.run_training()
                found.steps += [metrics["train/loss"], metrics["train/grad_norm"]]
        found.weights = {name: whole(parameter) for name, parameter in worker.weights.parameters.items()}
        told.append(found)
        worker.release()
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, draw = tmp_path_factory.mktemp("paths"), np.random.default_rng(0)
    rows = [{"path": draw.normal(size=(int(draw.integers(2, 7)), 3)).tolist()} for _ in range(ROWS)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_a_loss_that_draws_for_its_rows_is_the_same_on_any_layout(folder: Path) -> None:
    kinds = ("Paths", "ComparedPaths", "Numbered")
    (whole_steps, *others) = [measured(str(folder), [(kind, size) for kind in kinds]) for size in (4, 1, 2)]
    others += run_ranks(measured, 2, str(folder), [(kind, 2) for kind in kinds])
    for number, kind in enumerate(kinds):
        expected = whole_steps[number]
        assert expected.steps[0] != pytest.approx(expected.steps[2], rel=1e-3), f"{kind}: each step draws anew"
        half = len(expected.evaluations) // 4
        assert expected.evaluations[:half] == expected.evaluations[half : 2 * half], kind
        for found in (other[number] for other in others):
            if kind == "Numbered":  # the user's own loader orders the rows by its batches, which are as large as these
                assert found.evaluations[:half] == pytest.approx(expected.evaluations[:half], rel=1e-12), kind
            assert found.steps == pytest.approx(expected.steps, rel=1e-10), kind
            assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-10), kind
            for name, weight in expected.weights.items():
                torch.testing.assert_close(found.weights[name], weight, rtol=1e-10, atol=1e-12)


class Global(Paths):
    """Draws from the global generators of torch, numpy and Python, in evaluation too."""

    def errors(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        noise = torch.from_numpy(np.random.standard_normal(batch["path"].shape)).to(batch["path"])
        path = batch["path"] * random.random() + torch.rand_like(batch["path"]) * noise
        return (model(path, path[:, 0, 0]) - path).square().sum((1, 2))


def globally_drawn(folder: str, before: int) -> tuple[list[float], list[dict[str, float]]]:
    """Losses of three steps, with an evaluation before each, in a process that has drawn before."""
    worker = SFTWorker(load_recipe(recipe(Path(folder), "Global", 2)), report=quiet)
    worker.setup()
    losses, evaluations = list[float](), list[dict[str, float]]()
    for number in range(3):
        np.random.seed(before + number)
        random.seed(before + number)
        if not number:
            evaluations.append(worker.run_eval())
        state, python = np.random.get_state()[1], random.getstate()
        evaluations.append(worker.run_eval())
        assert np.array_equal(np.random.get_state()[1], state)  # what runs between steps draws as it would without it
        assert random.getstate() == python
        losses.append(worker.run_training()["train/loss"])
    worker.release()
    return losses, evaluations


def test_draws_of_the_global_generators_follow_from_seed_and_step(folder: Path) -> None:
    losses, evaluations = globally_drawn(str(folder), 0)
    assert len(set(losses)) == 3
    assert evaluations[0] == evaluations[1] != evaluations[2]
    assert globally_drawn(str(folder), 50) == (losses, evaluations)
    first, second = run_ranks(globally_drawn, 2, str(folder), 0)
    assert first == second == run_ranks(globally_drawn, 2, str(folder), 50)[0]


class Hiding(Paths):
    """Hides parts of paths as drawn where micro-batches are made, and drops others in its loss."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        batch = super().collate(samples, rows, weights)
        kept = torch.rand_like(batch["path"]) * np.random.rand() * random.random()
        return replace(batch, fields={"path": batch["path"] * kept})

    def errors(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().errors(model, replace(batch, fields={"path": F.dropout(batch["path"], 0.3)}))


class HidingAhead(Hiding):
    """In processes."""

    prepares_in_processes = True  # pyright: ignore[reportAssignmentType]


def hidden(folder: str, kind: str, processes: int, stop: bool) -> list[float]:
    """Losses of three steps and an evaluation; with `stop` the worker is left after a step, and another one goes on."""
    values = recipe(Path(folder), kind, 2)
    values["data"]["num_workers"] = processes
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    found = [worker.run_training()["train/loss"]]
    if stop:
        saved = Path(folder) / f"hidden-{kind}-{processes}-{worker.ranks.world_size}"
        worker.save_checkpoint(saved, 1)
        worker.release()
        worker = SFTWorker(load_recipe(values), report=quiet)
        worker.setup()
        worker.load_checkpoint(saved)
        torch.rand(3)
    found += [worker.run_training()["train/loss"] for _ in range(2)]
    found += list(worker.run_eval().values())
    worker.release()
    return found


def test_draws_where_micro_batches_are_made_follow_from_their_place(folder: Path) -> None:
    expected = hidden(str(folder), "Hiding", 0, False)
    assert len(set(expected)) == len(expected)
    assert hidden(str(folder), "Hiding", 0, True) == expected
    assert hidden(str(folder), "HidingAhead", 2, True) == expected
    first, second = run_ranks(hidden, 2, str(folder), "Hiding", 0, False)
    assert first == second == run_ranks(hidden, 2, str(folder), "Hiding", 0, True)[0]


class Uneven(Paths):
    """Nothing pads its rows."""

    padding: ClassVar[Mapping[str, float]] = {}


def test_rows_that_cannot_be_stacked_are_refused_before_training(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"'path' has rows of different shapes: \[\d, 3\] in .*rows.jsonl:1, \[\d, 3\] in"
    ):
        SFTWorker(load_recipe(recipe(folder, "Uneven", 4)), report=quiet)
    SFTWorker(load_recipe(recipe(folder, "Uneven", 1)), report=quiet)
    one_each = recipe(folder, "Uneven", 4)
    one_each["actor"] |= {"global_batch_size": 1, "eval_micro_batch_size": 1}
    SFTWorker(load_recipe(one_each), report=quiet)


class Scaled(BertForSequenceClassification):
    """A model with a parameter that is in no file, and that `_init_weights` does not know."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.full((3,), 1.0), persistent=False)
        self.post_init()


class Stars(Adapter):
    """A classifier of transformers, whose weights `build` reads itself."""

    class Options(BaseModel):
        directory: str
        zeros: bool = False
        scaled: bool = False
        filled: bool = False

    def build(self) -> nn.Module:
        kind = Scaled if self.options.scaled else BertForSequenceClassification
        model = kind.from_pretrained(self.options.directory)
        if self.options.filled:
            model.scale.data.fill_(3.0)
            model.shift.fill_(0.0)
        if self.options.zeros:
            nn.init.zeros_(model.classifier.weight)
        return model

    def encode(self, row: Mapping[str, Any]) -> Sample:
        ids = np.arange(3, 3 + len(row["path"]))[:2]
        return Sample(fields={"ids": ids, "stars": np.array(len(row["path"]) % 3)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = model(input_ids=batch["ids"]).logits
        return LossSum(F.cross_entropy(logits, batch["stars"], reduction="sum"), len(logits))


class Lost(Numbered):
    """Reads weights where they cannot be kept."""

    def model_provider_func(self) -> nn.Module:
        with init_empty_weights():
            return BertForSequenceClassification.from_pretrained(self.options.directory)

    class Options(BaseModel):
        directory: str


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> BertForSequenceClassification:
    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=12, num_labels=3, **sizes))
    for name in ("one", "two"):
        model.save_pretrained(folder / name)
    return model


def starting(folder: str, options: dict[str, Any], **model: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The initial weights of `Stars`, and the notes."""
    values = recipe(Path(folder), "Stars")
    values["actor"]["model"] |= {"options": options, **model}
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    found = {name: whole(parameter) for name, parameter in worker.inner_model.named_parameters()}
    worker.release()
    return found, worker.notes


def test_training_starts_from_what_build_reads_and_makes(
    folder: Path, pretrained: BertForSequenceClassification
) -> None:
    options = {"directory": str(folder / "one"), "zeros": True}
    for found, notes in (starting(str(folder), options), *run_ranks(starting, 2, str(folder), options)):
        for name, parameter in pretrained.named_parameters():
            wanted = torch.zeros_like(parameter) if name == "classifier.weight" else parameter.detach()
            assert torch.equal(found[name], wanted.double()), name
        assert any("from_pretrained reads from" in note and str(folder / "one") in note for note in notes)


def refusal(folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as told:
        starting(folder, options)
    return str(told.value)


def test_tensors_that_nothing_gives_values_are_refused_by_name(
    folder: Path, pretrained: BertForSequenceClassification
) -> None:
    options = {"directory": str(folder / "one"), "scaled": True}
    for told in (refusal(str(folder), options), *run_ranks(refusal, 2, str(folder), options)):
        assert "of Scaled have no values: scale" in told or "of Scaled have no values: shift" in told
        assert "initialise them in the class's _init_weights(module)" in told
    found, _ = starting(str(folder), options | {"filled": True})
    assert found["scale"].tolist() == [3.0] * 3


def test_weights_that_build_reads_and_training_would_not_start_from_are_refused(
    folder: Path, pretrained: BertForSequenceClassification
) -> None:
    one, two = str(folder / "one"), str(folder / "two")
    assert (
        starting(str(folder), {"directory": one}, model_path=one)[0].keys()
        == dict(pretrained.named_parameters()).keys()
    )
    with pytest.raises(ModelError, match=r"the weights in .*two, and the initial weights are those in .*one"):
        starting(str(folder), {"directory": two}, model_path=one)
    with pytest.raises(ModelError, match=r"the weights in .*one, and the recipe is to begin from scratch"):
        starting(str(folder), {"directory": one}, model_path=one, from_scratch=True)
    values = recipe(folder, "Numbered")
    values["actor"]["model"]["options"] = {"directory": one}
    values["actor"]["worker"] = f"{__file__}:Lost"
    with pytest.raises(ModelError, match=r"the weights that from_pretrained reads from .*one are lost"):
        Lost(load_recipe(values)).setup()


@pytest.mark.parametrize(("work", "said"), [(1e3, True), (1e11, False)])
def test_a_long_comparison_of_rows_is_announced(
    work: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it can take minutes before the first step."""
    monkeypatch.setattr(adapter_task, "LONG_WORK", work)
    training.save_rows(rows := tmp_path / "rows.jsonl")
    values = training.recipe(training.save_model("dense", tmp_path / "model"), rows)
    reports: list[str] = []
    worker = SFTWorker(load_recipe(values), report=reports.append)
    worker.setup()
    worker.release()
    assert any("comparing rows that share a forward" in report for report in reports) == said
