"""What a training task is: where batches come from and what the loss of one is, driven one optimizer step at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from omegaconf import DictConfig

from shardtune.batch import LossSum, Metric
from shardtune.config import Recipe
from shardtune.data.cache_directory import cache_root
from shardtune.data.loader.order import derive_seed
from shardtune.data.loader.step_loader import Step, StepLoader
from shardtune.data.sources.fingerprint import fingerprints
from shardtune.data.user_loader.batch import with_names
from shardtune.data.user_loader.errors import built
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.data.user_loader.rng import LoaderRng
from shardtune.errors import ShardtuneError
from shardtune.models.lora.attach import trainable_patterns
from shardtune.models.pretrained import has_tokenizer, recipe_tokenizer
from shardtune.optim.build import set_learning_rate
from shardtune.parallel.ranks import Ranks, leave_ranks
from shardtune.training.build.initial_weights import seeded
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import Accumulate, accumulate, optimizer_step, seed_rng
from shardtune.training.step_metrics import step_metrics
from shardtune.training.worker.data_position import TrainedOnData
from shardtune.training.worker.model_state import over_directory
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_evaluation import EvalOutput, sum_user_batches
from shardtune.training.worker.user_loss import TRAIN, BatchWeights, TrainOutput, losses_of, measured


class FSDPSftWorker(TrainedOnData, ABC):
    """A fine-tuning task on all ranks; a subclass says where batches come from and what the loss of one is.

    The life of a worker: it is made, `setup` builds the sharded model, optimizer and loaders on every rank, then
    `run_training` does one optimizer step per call. As a context manager it ends its part in the group of ranks.

    Args:
        cfg: the recipe, validated and resolved.

    Attributes:
        Options: the types of `actor.model.options`, a pydantic model; an unknown key is an error.
        cfg: the recipe as a `DictConfig`.
        options: the recipe's `actor.model.options`, an instance of `Options`.
        model: the sharded model; call it, not its `forward`.
        tokenizer: the one that the recipe names or that lies with its model; None where there is none.
        device: where batches belong.
        amp_context: the context to call the model in; half precision is the sharded model's own, so it does nothing.
        data_iter: this rank's batches, one by one, from where training stands; what is taken from it counts as seen.
        step: optimizer steps done.
        notes: what is worth saying once, before the first step.
        report: tells it to whoever looks on.
        samples: answers of the last evaluation, where the task gives any.
        samples_dir: where they are written.
    """

    def __init__(self, cfg: DictConfig | Recipe) -> None:
        super().__init__(cfg)
        self.samples: list[dict[str, Any]] = []
        self.samples_dir: Path | None = None
        self.poll: Callable[[], None] = _nothing  # the runner's: called where all ranks may stop together
        self._eval_rng: dict[int, LoaderRng] = {}  # of each loader of evaluations, by its id
        self._told: set[str] = set()
        self._files: list[dict[str, Any]] | None = None

    # The task: what a subclass gives.

    @abstractmethod
    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The batches of training (or of one evaluation set), and what is known about them.

        The dict may hold `num_samples`, and `sharded: True` where the loader yields this rank's batches alone;
        otherwise it yields the same batches on every rank, and batch i goes to rank i mod ranks.
        """

    @abstractmethod
    def get_train_model_output(self, batch: Any) -> TrainOutput:
        """The loss of one micro-batch: a mean over its targets, a list of them, (loss, metrics), or `LossSum`s."""

    @abstractmethod
    def get_eval_model_output(self, batch: Any) -> EvalOutput:
        """The number of correct samples in a batch, or a dict of (sum, weight)."""

    def loss_weights(self, batch: Any) -> Mapping[str, float] | None:
        """How much a batch weighs in each term of its loss: for a loss of several terms, or one that is no mean.

        By default None: a mean loss weighs as many targets as it averages, the labels that are not -100, or the rows
        where there are no labels.
        """
        return None

    # The life of a worker.

    def check(self) -> None:
        """Find what is wrong before any rank is started, without building what takes memory; by default nothing."""

    def setup(self) -> None:
        """Build the sharded model and its weights, the optimizer and the loaders; every rank calls it."""
        self.build_for_training()
        self._read_tokenizer()
        loader, info = self._built(_paths(self.recipe.data.train_data_paths), eval_dataset=False)
        self.loader = loader if isinstance(loader, StepLoader) else self._cut(loader, info)
        self._build_evaluations()

    def setup_evaluation(self, checkpoint: Path | None = None) -> None:
        """Build the sharded model and the evaluation loaders alone.

        Args:
            checkpoint: whose weights are taken; None: those that training would start from.
        """
        self.build_for_evaluation(checkpoint)
        self._read_tokenizer()
        self._build_evaluations()

    def release(self) -> None:
        super().release()
        vars(self).pop("eval_loaders", None)

    def reopened(self, directory: Path) -> FSDPSftWorker:
        """A worker of the same kind over the weights that `export` wrote, not set up yet; this one may be released."""
        fresh = type(self)(over_directory(self.recipe, directory).as_dict_config())
        fresh.weights_directory = directory
        return fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise other ranks may be waiting elsewhere
            leave_ranks(self.ranks)

    def _read_tokenizer(self) -> None:
        """The tokenizer that lies with the model, for methods of the task to use and to be handed on with it."""
        if self.tokenizer is None and has_tokenizer(self.recipe):
            self.tokenizer = recipe_tokenizer(self.recipe)

    def _build_evaluations(self) -> None:
        self.eval_loaders: dict[str, tuple[Any, dict[str, Any]]] = {}
        for name, paths in self.evaluation_sets().items():
            self.eval_loaders[name] = self.build_evaluation(name, paths)

    def _cut(self, loader: Any, info: Mapping[str, Any]) -> BatchLoader:
        """A loader of the task's own, cut into steps."""
        actor = self.recipe.actor
        return BatchLoader.of(
            loader,
            info,
            ranks=self.ranks,
            global_batch_size=actor.global_batch_size,
            micro_batch_size=actor.micro_batch_size,
            weigh=BatchWeights(self.loss_weights, self._measure, self.ranks),
            seed=self.recipe.runner.seed,
            report=lambda text: self.report(text),
        )

    def evaluation_sets(self) -> dict[str, list[str]]:
        """The paths of each evaluation set; the name "" is that of a single set without one."""
        spec = self.recipe.data.eval_data_paths
        if spec is None:
            return {}
        if isinstance(spec, dict):
            return {name: _paths(paths) for name, paths in spec.items()}
        return {"": _paths(spec)}

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on, once it is set up."""
        return bool(self.eval_loaders)

    def evaluation_metrics(self) -> list[str] | None:
        """The names that `run_eval` will give, where they are known before it is called; None otherwise."""
        return None

    def build_evaluation(self, name: str, paths: list[str]) -> tuple[Any, dict[str, Any]]:
        """The loader of one evaluation set."""
        return self._built(paths, eval_dataset=True)

    def _built(self, paths: list[str], *, eval_dataset: bool) -> tuple[Any, dict[str, Any]]:
        """What `build_dataloader` gives; what it draws (a split, an order) is the same in every run and every call."""
        with seeded(derive_seed(self.recipe.runner.seed, "build_dataloader")):
            return built(self.build_dataloader(paths, eval_dataset=eval_dataset))

    # Training.

    def run_training(self) -> dict[str, float]:
        """One optimizer step; returns its metrics, the same on every rank."""
        began = time.perf_counter()
        step = next(self._steps)
        waited = time.perf_counter() - began
        actor = self.recipe.actor
        rate = set_learning_rate(self.optimizer, self.step, self._horizon(), actor.optim)
        result = optimizer_step(
            self._train_losses,
            step.micro_batches,
            step.denominators,
            self.weights,
            self.optimizer,
            self.ranks,
            draws=(self.recipe.runner.seed, self.step, self.ranks.draws_rank),
            clip=actor.optim.clip_grad,
            loss_scale=self._loss_scale,
            accumulate=self._accumulate(),
        )
        self.data_state = step.after
        self._count(step, result)
        seconds = time.perf_counter() - began
        found = step_metrics(
            step,
            result,
            rate=rate,
            seconds=seconds,
            waited=waited,
            ranks=self.ranks,
            device=self.device,
            utilisation=self._utilisation,
        )
        metrics = {"epoch": self.epoch, **found}
        if self.skipped_steps:
            metrics["train/skipped_steps"] = float(self.skipped_steps)
        return metrics | self._user_metrics(step)

    def _user_metrics(self, step: Step) -> dict[str, float]:
        """What a subclass returned beside its loss, averaged over the step's targets (rows, where it has no labels)."""
        if not isinstance(self.loader, BatchLoader):
            return {}
        sums: dict[str, Metric] = {}
        for batch in step.micro_batches:
            for name, metric in batch.metrics.items():
                sums[name] = sums.get(name, Metric(0.0, 0.0)) + metric
        return {f"train/{name}": metric.mean for name, metric in self.ranks.reduce_metrics(sums).items()}

    def _accumulate(self) -> Accumulate:
        """How gradients of micro-batches add up."""
        return accumulate

    def _train_losses(self, batch: Any) -> Mapping[str, LossSum]:
        """What a subclass returns, as named sums."""
        if isinstance(self.loader, BatchLoader):
            with explaining(TRAIN, batch.fields, self.device):
                output = self.get_train_model_output(with_names(batch.fields))
            return losses_of(output, batch)
        output = self.get_train_model_output(batch)
        assert isinstance(output, Mapping)
        return output

    def _measure(self, batch: Any) -> float | None:
        """The loss of a batch as a number, without dropout; None where the task fails at it. A call of all ranks."""
        self.model.eval()
        try:
            with torch.no_grad(), explaining(TRAIN, batch, self.device):
                return measured(self.get_train_model_output(with_names(batch)))
        except (ShardtuneError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError):  # as of a mean over no target
            return None
        finally:
            self.model.train()

    # Evaluation.

    def run_eval(self) -> dict[str, float]:
        """Evaluate every set; `eval/<metric>`, with several sets `eval/<set>/<metric>`. The same on every rank."""
        self.model.eval()
        metrics: dict[str, float] = {}
        try:
            for name, (loader, info) in self.eval_loaders.items():
                prefix = f"eval/{name}/" if name else "eval/"
                # A loss that draws (noise, a time) draws the same each time, so that evaluations can be compared.
                seed_rng(self.recipe.runner.seed, 0, 0, self.ranks.draws_rank, prefix)
                metrics |= {prefix + key: value for key, value in self.evaluate_set(name, loader, info).items()}
        finally:
            self.model.train()
        return metrics

    def evaluate_set(self, name: str, loader: Iterable[Any], info: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of one evaluation set, from `get_eval_model_output` of each batch."""
        evaluated = sum_user_batches(
            self.get_eval_model_output,
            loader,
            self.ranks,
            sharded=bool(info.get("sharded")),
            num_samples=info.get("num_samples"),
            name=name or "eval",
            poll=self.poll,
            draws=self.eval_rng(loader),
            report=self.report_once,
        )
        return {key: metric.mean for key, metric in evaluated.items()}

    def report_once(self, text: str) -> None:
        """Tell something that each evaluation finds again."""
        if text not in self._told:
            self._told.add(text)
            self.report(text)

    def eval_rng(self, loader: Any) -> LoaderRng:
        """What seeds an evaluation loader of the task's own, the same each time."""
        return self._eval_rng.setdefault(id(loader), LoaderRng(loader, self.recipe.runner.seed))

    # What is told of a run.

    def data_files(self) -> list[dict[str, Any]]:
        """The files and directories that the recipe names, with hashes, as they were when this was first asked."""
        if self._files is None:
            data = self.recipe.data
            self._files = fingerprints(_paths(data.train_data_paths), cache_root(data.cache_dir))
        return self._files

    def describe_data(self) -> dict[str, Any]:
        """The data, for the manifest."""
        return {"train": self.data_files(), "rows_per_epoch": self.loader.rows_per_epoch}

    @property
    def can_generate(self) -> bool:
        """Whether the model answers prompts."""
        return False

    def summary(self) -> RunSummary:
        """What the first screen tells, once all is set up."""
        notes, parameters = list(self.notes), dict(self.inner_model().named_parameters())
        shapes = self.weights.shapes
        if self.recipe.runner.deterministic:
            notes.append("deterministic kernels: bitwise repeatable, and on CUDA slower than those left out")
        return RunSummary(
            model=type(self.inner_model()).__name__.removeprefix("FSDP"),
            parameters=sum(self.sizes().values()),
            trainable=sum(shapes[name].numel() for name in self.weights.trainable()),
            dtypes=self.dtypes,
            ranks=_ranks(self.ranks),
            attention="",
            rows=self.loader.num_samples if isinstance(self.loader, BatchLoader) else self.loader.rows_per_epoch,
            tokens=None,
            targets=0.0,
            steps_per_epoch=self.loader.num_steps(0),
            total_steps=self.total_steps(),
            evaluation={name: info.get("num_samples") for name, (_, info) in self.eval_loaders.items()},
            notes=notes,
            trained=trainable_patterns(parameters, shapes)
            if any(not p.requires_grad for p in parameters.values())
            else [],
        )


def _ranks(ranks: Ranks) -> str:
    """How many ranks there are, where, and how they are laid out."""
    layout = f" ({ranks.layout})" if ranks.world_size > 1 else ""
    return f"{ranks.world_size} on {ranks.device.type}{layout}"


def _nothing() -> None:
    """What is polled when no runner listens."""


def _paths(spec: Any) -> list[str]:
    if spec is None:
        return []
    entries = spec if isinstance(spec, list) else [spec]
    return [entry if isinstance(entry, str) else entry.path for entry in entries]
