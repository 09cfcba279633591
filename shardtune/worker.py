"""What a training task is: a model, its data and its loss, driven one optimizer step at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import LossSum, Metric
from shardtune.checkpoint.sharded import PendingSave
from shardtune.checkpoint.training import (
    load_training,
    load_weights_only,
    model_bytes,
    save_training,
    training_bytes,
)
from shardtune.config import Recipe, load_recipe
from shardtune.construction import freeze, load_initial_weights
from shardtune.data.loader import DataState, Step, StepLoader
from shardtune.data.user_loader import BatchLoader
from shardtune.errors import ModelError
from shardtune.evaluate import sum_user_batches
from shardtune.measure import step_metrics
from shardtune.models.causal_lm import declared_units
from shardtune.models.registry import get_model
from shardtune.optim import build_optimizer, check_optimizer, set_learning_rate
from shardtune.parallel.materialise import materialise
from shardtune.parallel.mesh import Ranks, join_ranks, num_ranks
from shardtune.parallel.shard import MASTER_DTYPE, Weights, shard
from shardtune.perf import Utilisation
from shardtune.step import LossScale, StepResult, optimizer_step

MAX_SKIPPED = 10
"""Steps in a row that may be skipped for a gradient that is not finite."""

TrainOutput = torch.Tensor | Sequence[torch.Tensor] | LossSum | Mapping[str, LossSum] | tuple[Any, Mapping[str, Any]]
EvalOutput = int | float | torch.Tensor | Mapping[str, Metric | tuple[float, float]]


class FSDPSftWorker(ABC):
    """A fine-tuning task on all ranks; a subclass says where batches come from and what the loss of one is.

    The life of a worker: it is made, `setup` builds the sharded model, optimizer and loaders on every rank, then
    `run_training` does one optimizer step per call.

    Args:
        cfg: the recipe, validated and resolved.

    Attributes:
        cfg: the recipe as a `DictConfig`.
        model: the sharded model; call it, not its `forward`.
        tokenizer: where the task has one.
        device: where batches belong.
        amp_context: the context to call the model in; half precision is the sharded model's own, so it does nothing.
        data_iter: yields steps of training.
        step: optimizer steps done.
    """

    entry_points: Sequence[str] = ()

    def __init__(self, cfg: DictConfig | Recipe) -> None:
        self.recipe: Recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        self.cfg: DictConfig = self.recipe.as_dict_config()
        check_optimizer(self.recipe.actor.optim, num_ranks(self.recipe.runner.nproc_per_node))
        self.ranks: Ranks = join_ranks(self.recipe.runner.device)
        self.device: torch.device = self.ranks.device
        self.amp_context: AbstractContextManager[None] = nullcontext()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.step = 0
        self.data_state = DataState()
        self.skipped_steps = 0
        self.problem = ""  # why the last skipped step was
        self.poll: Callable[[], None] = _nothing  # the runner's: called where all ranks may stop together
        self._loss_scale = LossScale() if self.recipe.actor.model.precision == "fp16" else None
        self._groups: list[dist.ProcessGroup | None] = []

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

    def model_provider_func(self) -> nn.Module:
        """The model, its parameters on the meta device (or real, for a model in memory)."""
        return get_model(self.recipe.actor.model)

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered as one."""
        return declared_units(model, self.recipe.actor.fsdp_config.wrap)

    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model inside `self.model`, whose names checkpoints use."""
        assert isinstance(self.model, PreTrainedModel)
        return self.model

    # The life of a worker.

    def setup(self) -> None:
        """Build the sharded model and its weights, the optimizer and the loaders; every rank calls it."""
        self._build_model()
        load_initial_weights(self.hf_model(), self.model, self.recipe, self.ranks, self.device)
        self._hold_weights()
        actor = self.recipe.actor
        self.optimizer = build_optimizer(self.weights.trainable(), actor.optim)
        self._utilisation = Utilisation.known(
            self.hf_model(), self.device, actor.model.precision, self.ranks.world_size
        )
        self.model.train()
        self.prove()
        self._build_loaders()
        self._build_evaluations()

    def setup_evaluation(self, checkpoint: Path | None = None) -> None:
        """Build the sharded model and the evaluation loaders alone.

        Args:
            checkpoint: whose weights are taken; None: those that training would start from.
        """
        self._build_model()
        if checkpoint is None:
            load_initial_weights(self.hf_model(), self.model, self.recipe, self.ranks, self.device)
        else:
            dtype = MASTER_DTYPE[self.recipe.actor.model.precision]
            materialise(self.model, dtype=dtype, device=self.device)
        self._hold_weights()
        if checkpoint is not None:
            self.step = int(self.load_model(checkpoint)["step"])
        self.model.eval()
        self.prove()
        self._build_evaluations()

    def release(self) -> None:
        """Let go of model, optimizer and loaders; the worker is of no more use.

        A model that its caller holds too is whole again: in full precision, and as it was but for what it has learned.
        """
        if "weights" in vars(self):
            self.weights.give_back()
            self.hand_back()
        for name in {"model", "weights", "optimizer", "loader", "_data_iter", "eval_loaders"} & vars(self).keys():
            delattr(self, name)

    def hand_back(self) -> None:  # noqa: B027 (a hook that may stay empty)
        """Undo what the task changed in the model besides its weights; by default nothing."""

    def prove(self) -> None:  # noqa: B027 (a hook that may stay empty)
        """Prove what the task relies on, once the weights are there; by default nothing."""

    def _build_model(self) -> None:
        actor = self.recipe.actor
        self.model: nn.Module = self.model_provider_func()
        inner = self.hf_model()
        freeze(inner, actor.model.freeze)
        shard(
            self.model,
            self.shard_units(inner),
            self.ranks,
            actor.model.precision,
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            entry_points=self.entry_points,
        )

    def _hold_weights(self) -> None:
        actor = self.recipe.actor
        self.weights = Weights(
            self.model,
            self.hf_model(),
            actor.model.precision,
            self.ranks,
            reduce_each=actor.fsdp_config.reduce == "every",
        )

    def _build_loaders(self) -> None:
        data = self.recipe.data
        loader, info = self.build_dataloader(_paths(data.train_data_paths), eval_dataset=False)
        self.loader = loader if isinstance(loader, StepLoader) else self._wrap_loader(loader, info)
        self._data_iter: Iterator[Step] | None = None

    def _build_evaluations(self) -> None:
        self.eval_loaders: dict[str, tuple[Any, dict[str, Any]]] = {}
        for name, paths in self.evaluation_sets().items():
            self.eval_loaders[name] = self.build_evaluation(name, paths)

    def _wrap_loader(self, loader: Any, info: Mapping[str, Any]) -> BatchLoader:
        actor = self.recipe.actor
        return BatchLoader.of(
            loader,
            info,
            global_batch_size=actor.global_batch_size,
            micro_batch_size=actor.micro_batch_size,
            ranks=self.ranks,
            shifted="ForCausalLM" in type(self.hf_model()).__name__,
            seed=self.recipe.runner.seed,
        )

    def evaluation_sets(self) -> dict[str, list[str]]:
        """The paths of each evaluation set; the name "" is that of a single set without one."""
        spec = self.recipe.data.eval_data_paths
        if spec is None:
            return {}
        if isinstance(spec, dict):
            return {name: _paths(paths) for name, paths in spec.items()}
        return {"": _paths(spec)}

    def evaluation_metrics(self) -> list[str] | None:
        """The names that `run_eval` will give, where they are known before it is called; None otherwise."""
        return None

    def build_evaluation(self, name: str, paths: list[str]) -> tuple[Any, dict[str, Any]]:
        """The loader of one evaluation set."""
        return self.build_dataloader(paths, eval_dataset=True)

    # What a user's method may read.

    @property
    def data_iter(self) -> Iterator[Step]:
        if self._data_iter is None:
            self._data_iter = self.loader.steps(self.data_state)
        return self._data_iter

    @property
    def _data_epoch(self) -> int:
        return self.data_state.epoch

    @property
    def _data_iter_offset(self) -> int:
        return self.data_state.rows_consumed

    # Training.

    def total_steps(self) -> int:
        """The horizon: optimizer steps until `max_epochs` or `max_steps`, whichever comes first."""
        runner = self.recipe.runner
        steps = runner.max_steps if runner.max_steps > 0 else None
        if runner.max_epochs > 0:
            epochs = 0
            for epoch in range(runner.max_epochs):
                epochs += self.loader.num_steps(epoch)
                if steps is not None and epochs >= steps:
                    return steps
            return epochs
        assert steps is not None
        return steps

    @property
    def epoch(self) -> float:
        """How far training is, in epochs."""
        return self.data_state.epoch + self.data_state.rows_consumed / max(1, self.loader.rows_per_epoch)

    @property
    def finished(self) -> bool:
        """Whether `max_epochs` or `max_steps` is reached."""
        runner = self.recipe.runner
        return (runner.max_epochs > 0 and self.data_state.epoch >= runner.max_epochs) or (
            runner.max_steps > 0 and self.step >= runner.max_steps
        )

    def run_training(self) -> dict[str, float]:
        """One optimizer step; returns its metrics, the same on every rank."""
        began = time.perf_counter()
        step = next(self.data_iter)
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
            draws=(self.recipe.runner.seed, self.step, self.ranks.rank),
            clip=actor.optim.clip_grad,
            loss_scale=self._loss_scale,
        )
        self.data_state = step.after
        self._count(step, result)
        seconds = time.perf_counter() - began
        measured = step_metrics(
            step,
            result,
            rate=rate,
            seconds=seconds,
            waited=waited,
            ranks=self.ranks,
            device=self.device,
            utilisation=self._utilisation,
        )
        metrics = {"epoch": self.epoch, **measured}
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

    def _horizon(self) -> int:
        if self._total_steps is None:
            self._total_steps = self.total_steps()
        return self._total_steps

    _total_steps: int | None = None
    _skipped_in_a_row = 0

    def _count(self, step: Step, result: StepResult) -> None:
        """A skipped step moves the data on and nothing else."""
        if result.updated:
            self.step += 1
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.problem = result.problem
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise ModelError(
                f"{MAX_SKIPPED} steps in a row were passed over, the last as {result.problem}; it held the rows "
                f"{step.rows[:8].tolist()}{' …' if len(step.rows) > 8 else ''}",
                where=f"after step {self.step}",
                remedy="lower actor.optim.lr, or look at these rows with shardtune data preview",
            )

    def _train_losses(self, batch: Any) -> Mapping[str, LossSum]:
        """What a subclass returns, as named sums."""
        if isinstance(self.loader, BatchLoader):
            return self.loader.losses(self.get_train_model_output(batch.fields), batch)
        output = self.get_train_model_output(batch)
        assert isinstance(output, Mapping)
        return output

    # Evaluation.

    def run_eval(self) -> dict[str, float]:
        """Evaluate every set; `eval/<metric>`, with several sets `eval/<set>/<metric>`. The same on every rank."""
        self.model.eval()
        metrics: dict[str, float] = {}
        try:
            for name, (loader, info) in self.eval_loaders.items():
                prefix = f"eval/{name}/" if name else "eval/"
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
        )
        return {key: metric.mean for key, metric in evaluated.items()}

    # Checkpoints.

    def data_files(self) -> list[dict[str, Any]]:
        """What the training rows come from; a resumed run must have the same."""
        return []

    def save_checkpoint(self, path: str | Path, step: int, *, background: bool = False) -> list[PendingSave]:
        """Write model, optimizer and state into a folder; every rank calls it.

        Args:
            path: the folder.
            step: optimizer steps done.
            background: return once the tensors are copied; the caller waits for what is returned.
        """
        state = {
            "step": step,
            "data": asdict(self.data_state),
            "data_files": self.data_files(),
            "skipped_steps": self.skipped_steps,
            "loss_scale": asdict(self._loss_scale) if self._loss_scale else None,
            "world_size": self.ranks.world_size,
        }
        return save_training(
            Path(path),
            self.weights,
            self.optimizer,
            state,
            writes_state=self.ranks.is_main,
            background=self._saving_groups() if background else None,
        )

    def _saving_groups(self) -> list[dist.ProcessGroup | None]:
        """Connections for saving in the background, one set for the model and one for the optimizer."""
        if not self._groups:
            self._groups = [self.ranks.new_group(), self.ranks.new_group()]
        return self._groups

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from a folder that `save_checkpoint` wrote, on any number of ranks; returns its step."""
        state = load_training(Path(path), self.weights, self.optimizer)
        self.step = int(state["step"])
        self.data_state = DataState(**state["data"])
        self.skipped_steps = int(state["skipped_steps"])
        if self._loss_scale is not None and state["loss_scale"]:
            self._loss_scale = LossScale(**state["loss_scale"])
        self._data_iter = None
        return self.step

    def load_model(self, path: str | Path) -> dict[str, Any]:
        """Take the model's weights from a checkpoint, and nothing else; returns the checkpoint's state."""
        return load_weights_only(Path(path), self.weights)

    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint on all ranks together, before it is written."""
        return training_bytes(self.weights, self.optimizer)

    def model_bytes(self) -> int:
        """The size of the model's weights on all ranks together."""
        return model_bytes(self.weights)


def _nothing() -> None:
    """What is polled when no runner listens."""


def _paths(spec: Any) -> list[str]:
    if spec is None:
        return []
    entries = spec if isinstance(spec, list) else [spec]
    return [entry if isinstance(entry, str) else entry.path for entry in entries]
