"""Every public method of the classes that users derive from is called when a subclass overrides it, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtune
from shardtune import FSDPSftWorker, LossSum, SFTRunner, SFTTrainer, SFTWorker
from shardtune.batch import Batch
from shardtune.config import Recipe, load_recipe
from shardtune.data.loader.protocol import Loader
from shardtune.errors import ConfigError, ModelError
from shardtune.training.worker.run_context import RunContext
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_run import Tiny, make_tiny
from tests.training.worker import test_base as own

Calls = list[tuple[Any, ...]]

# By name: what the documentation says that a method is called with. A test below sees that none is missing.
SHARED: Mapping[str, tuple[type | tuple[type, ...], ...]] = {
    "model_provider_func": (),
    "build_dataloader": (list, bool),
    "get_train_model_output": ((dict, Batch),),
    "get_eval_model_output": ((dict, Batch),),
    "loss_weights": (dict,),
    "setup": (RunContext,),
    "setup_evaluation": ((Path, type(None)), RunContext),
    "run_training": (),
    "run_eval": (),
    "save_checkpoint": (Path, int),
    "load_checkpoint": (Path,),
    "release": (),
    "reopened": (Path,),
}
DOCUMENTED: Mapping[type[FSDPSftWorker], Mapping[str, tuple[type | tuple[type, ...], ...]]] = {
    own.Task: SHARED,
    SFTWorker: {name: types for name, types in SHARED.items() if name != "loss_weights"},
    SFTTrainer: {
        **{name: types for name, types in SHARED.items() if name != "loss_weights"},
        "get_batch_metrics": (dict, str),
    },
}
OF_A_LIFE = [name for name in SHARED if name.startswith(("setup", "run_", "save_", "load_", "release", "reopened"))]
CASES = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}", marks=pytest.mark.slow if name in OF_A_LIFE else ())
    for kind, methods in DOCUMENTED.items()
    for name in methods
]


def public_methods(kind: type) -> set[str]:
    """The methods that a subclass may override: those that are not final."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name for name, method in found if name[0] != "_" and not getattr(method, "__final__", False)}


@pytest.mark.parametrize("kind", DOCUMENTED)
def test_no_public_method_is_missing_here(kind: type[FSDPSftWorker]) -> None:
    helpers = {"get_batch_logps", "clip_grad_norm_"}  # which a get_batch_metrics and a run_training of one's own call
    left_out = {"loss_weights"} if kind is not own.Task else set()  # below
    assert public_methods(kind) - helpers == set(DOCUMENTED[kind]) | left_out


def recording(kind: type[FSDPSftWorker], name: str, calls: Calls) -> type[FSDPSftWorker]:
    """A subclass that overrides one method and notes what it is called with."""
    original = getattr(kind, name)

    def override(self: FSDPSftWorker, *arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(original).bind(self, *arguments, **named)
        bound.apply_defaults()
        calls.append(tuple(bound.arguments.values())[1:])
        return original(self, *arguments, **named)

    return type("Overriding", (kind,), {name: override})


def require_documented(kind: type[FSDPSftWorker], name: str, calls: Calls) -> None:
    assert calls, f"{name} was not called"
    for arguments in calls:
        types = DOCUMENTED[kind][name]
        for argument, wanted in zip(arguments, types, strict=False):
            assert isinstance(argument, wanted), f"{name} was called with a {type(argument).__name__}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("overridden"), save_interval=-1)


def recipe_of(kind: type[FSDPSftWorker], tiny: Tiny, folder: Path) -> Recipe:
    if kind is own.Task:
        return own.recipe(str(folder), max_steps=2)
    runner = {"runner__max_steps": 2, "runner__max_epochs": -1, "runner__logger": {"log_path": str(folder)}}
    return load_recipe(tiny.recipe(**runner, data__eval_split=0.3))


def drive(kind: type[FSDPSftWorker], recipe: Recipe) -> None:
    """The life of a run: trained, evaluated, saved, continued, exported, and the result evaluated."""
    runner = SFTRunner(recipe, kind(recipe))
    runner.run()
    saved = runner.store.latest()
    assert saved is not None
    worker = kind(recipe)
    again = SFTRunner(recipe, worker, run_dir=runner.run_dir, resume_from=saved)
    again.prepare()
    exported = runner.run_dir / "exported"
    worker.export(exported, "auto")
    fresh = worker.reopened(exported)
    worker.release()
    fresh.setup_evaluation(context=RunContext(weights_directory=exported))
    assert fresh.run_eval()


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", DOCUMENTED)
def test_overridden_methods_of_a_workers_life_are_called(
    kind: type[FSDPSftWorker], tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them; those of models, rows and losses, some of which take the place of others, are tried alone."""
    calls: dict[str, Calls] = {name: [] for name in OF_A_LIFE}
    overriding = kind
    for name, of_method in calls.items():
        overriding = recording(overriding, name, of_method)
    drive(overriding, recipe_of(kind, tiny, tmp_path))
    for name, of_method in calls.items():
        require_documented(kind, name, of_method)


@pytest.mark.lengthy
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_overridden_method_is_called(
    kind: type[FSDPSftWorker], name: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Calls = []
    drive(recording(kind, name, calls), recipe_of(kind, tiny, tmp_path))
    require_documented(kind, name, calls)


def test_the_modes_of_a_batchs_metrics(tiny: Tiny, tmp_path: Path) -> None:
    calls: Calls = []
    drive(recording(SFTTrainer, "get_batch_metrics", calls), recipe_of(SFTTrainer, tiny, tmp_path))
    assert {mode for _, mode in calls} == {"train", "eval"}


# -- What an override returns is what trains --------------------------------------------------------------------------


class Doubled(SFTWorker):
    """Twice the loss: the same weights, other totals."""

    def get_train_model_output(self, batch: Batch) -> Any:
        losses = super().get_train_model_output(batch)
        assert isinstance(losses, dict)
        return {name: LossSum(2 * loss.total, loss.weight) for name, loss in losses.items()}


class Mean(SFTWorker):
    """A mean loss with a metric, from logits of its own."""

    def get_train_model_output(self, batch: Batch) -> Any:
        losses = super().get_train_model_output(batch)
        assert isinstance(losses, dict)
        (loss,) = losses.values()
        return loss.total / (loss.weight or 1.0), {"rows": (batch.num_rows, 1.0), "one": 1.0}


class Counted(SFTWorker):
    """Evaluation by a number of correct rows."""

    def get_eval_model_output(self, batch: Batch) -> Any:
        super().get_eval_model_output(batch)
        return batch.num_rows


def losses(values: Mapping[str, Any], names: tuple[str, ...]) -> list[list[dict[str, float]]]:
    """The metrics of three steps and an evaluation of each kind of worker."""
    found = []
    for name in names:
        worker = globals()[name](load_recipe(dict(values)), report=lambda text: None)
        worker.setup()
        found.append([*(worker.run_training() for _ in range(3)), worker.run_eval()])
        worker.release()
    return found


KINDS = ("SFTWorker", "Doubled", "Mean", "Counted")


def test_what_an_override_returns_is_trained(tiny: Tiny) -> None:
    """On one rank and on two, with several micro-batches each, in fp64."""
    values = tiny.recipe(actor__model__precision="fp64", actor__micro_batch_size=2, data__eval_split=0.3)
    values["actor"]["optim"] = {"name": "SGD", "lr": 1e-2, "clip_grad": None, "lr_scheduler": "constant"}
    for plain, doubled, mean, counted in [losses(values, KINDS), *run_ranks(losses, 2, values, KINDS)]:
        assert doubled[0]["train/loss"] == pytest.approx(2 * plain[0]["train/loss"], rel=1e-12)
        assert doubled[0]["train/grad_norm"] == pytest.approx(2 * plain[0]["train/grad_norm"], rel=1e-12)
        assert doubled[2]["train/loss"] < 2 * plain[2]["train/loss"]  # twice the gradient went into the weights
        for ours, theirs in zip(mean[:3], plain[:3], strict=True):
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-12)
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-12)
            assert ours["train/one"] == pytest.approx(1.0)
            assert ours["train/rows"] > 1
        assert counted[3] == pytest.approx({"eval/loss": 0.0, "eval/eval_accuracy": 1.0})


class Other(SFTWorker):
    """Its own batches for training: token ids and labels side by side."""

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        loader, info = super().build_dataloader(data_paths, eval_dataset)
        if eval_dataset:
            return loader, info
        assert isinstance(loader, Loader)
        return Halved(loader), info


class Halved:
    """A loader around another: it announces half as many steps."""

    def __init__(self, loader: Loader[Batch]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property
    def rows_per_epoch(self) -> int:
        return self._loader.rows_per_epoch

    @property
    def num_samples(self) -> int:
        return self._loader.num_samples

    def num_steps(self, epoch: int) -> int:
        return self._loader.num_steps(epoch) // 2


def test_a_loader_may_be_wrapped(tiny: Tiny) -> None:
    values = tiny.recipe(runner__max_steps=-1, runner__max_epochs=2)
    plain, halved = (kind(load_recipe(values), report=lambda text: None) for kind in (SFTWorker, Other))
    for worker in (plain, halved):
        worker.setup()
    assert halved.position.horizon == 2 * (plain.position.horizon // 4)
    assert halved.run_training()["train/loss"] == plain.run_training()["train/loss"]


# -- What nothing would call is refused -------------------------------------------------------------------------------


def _evaluates_alone(self: SFTWorker) -> dict[str, float]:
    return {"eval/own": 1.0}


def _evaluates_with(self: SFTWorker) -> dict[str, float]:
    batch: Any = next(iter(self.eval_loaders[""][0]))
    return {"eval/own": float(self.get_eval_model_output(batch) == {})}


def _trains(self: SFTTrainer, batch: Any) -> Any:
    return self.model(input_ids=batch["target_combined_input_ids"]).logits.mean()


def test_a_method_whose_overridden_caller_does_not_call_it_is_refused(tiny: Tiny) -> None:
    own: Callable[..., dict[str, float]] = lambda self, batch: {}  # noqa: E731
    base = type("Base", (SFTWorker,), {"run_eval": _evaluates_alone})
    with pytest.raises(ConfigError, match=r"Mine\.get_eval_model_output would never be called: run_eval"):
        type("Mine", (base,), {"get_eval_model_output": own})(load_recipe(tiny.recipe()), report=print)
    type("Fine", (SFTWorker,), {"run_eval": _evaluates_with, "get_eval_model_output": own})(
        load_recipe(tiny.recipe()), report=print
    )
    methods = {"get_train_model_output": _trains, "get_eval_model_output": own, "get_batch_metrics": own}
    with pytest.raises(ConfigError, match=r"Mine\.get_batch_metrics would never be called: get_train_model_output and"):
        type("Mine", (SFTTrainer,), methods)(load_recipe(tiny.recipe()), report=print)


def contrast(folder: Path, **actor: int) -> dict[str, Any]:
    """A recipe of a loss of whole steps, over eight rows."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"x": [{n}.0, 1.0]}}\n' for n in range(8)))
    return {
        "actor": {
            "model": {"adapter": f"{__file__}:Contrast", "precision": "fp64"},
            "global_batch_size": 4,
            "micro_batch_size": 2,
            **actor,
        },
        "data": {
            "train_data_paths": str(rows),
            "eval_data_paths": str(rows),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
        "runner": {"device": "cpu"},
    }


def _evaluated(values: dict[str, Any]) -> dict[str, float]:
    worker = SFTWorker(load_recipe(values), report=lambda text: None)
    worker.setup_evaluation()
    return worker.run_eval()


@pytest.mark.lengthy
def test_the_evaluation_of_whole_steps_does_not_depend_on_the_size_of_steps(tmp_path: Path) -> None:
    first, *others = (_evaluated(contrast(tmp_path, **sizes)) for sizes in SIZES)
    for other in [*others, *run_ranks(_evaluated, 2, contrast(tmp_path, global_batch_size=8))]:
        assert other == {"eval/loss": pytest.approx(first["eval/loss"], rel=1e-12)}


SIZES = ({"global_batch_size": 4}, {"global_batch_size": 2}, {"global_batch_size": 8, "micro_batch_size": 3})


def test_an_evaluation_method_that_a_loss_of_whole_steps_does_not_call_is_refused(tmp_path: Path) -> None:
    values = contrast(tmp_path)
    own_evaluation: Callable[..., int] = lambda self, batch: 0  # noqa: E731
    kind = type("Mine", (SFTWorker,), {"get_eval_model_output": own_evaluation})
    with pytest.raises(ConfigError, match="get_eval_model_output would never be called"):
        kind(load_recipe(values), report=lambda text: None)


class Contrast(shardtune.WholeStepAdapter):
    """Rows drawn apart."""

    def build(self) -> nn.Module:
        return nn.Linear(2, 2)

    def encode(self, row: Mapping[str, Any]) -> shardtune.Sample:
        return shardtune.Sample(fields={"x": torch.tensor(row["x"]).numpy()})

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"y": model(batch["x"])}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        centred = outputs["y"] - outputs["y"].mean(0)  # so that the loss of a row depends on the others
        return LossSum(centred.square().sum(), float(len(outputs["y"])))


def test_weights_that_the_built_in_loader_does_not_ask_for_are_refused(tiny: Tiny) -> None:
    weigh: Callable[..., dict[str, float]] = lambda self, batch: {"ce": 1.0}  # noqa: E731
    worker = type("Mine", (SFTWorker,), {"loss_weights": weigh})(load_recipe(tiny.recipe()), report=lambda text: None)
    with pytest.raises(ConfigError, match=r"Mine\.loss_weights would never be called"):
        worker.setup()


def test_a_model_that_is_no_root_is_refused(tiny: Tiny) -> None:
    provide: Callable[..., nn.Module] = lambda self: nn.Linear(2, 2)  # noqa: E731
    kind = type("Mine", (SFTWorker,), {"model_provider_func": provide})
    with pytest.raises(ModelError, match="model_provider_func returned a Linear, not an adapter's root"):
        kind(load_recipe(tiny.recipe()), report=lambda text: None).setup()
