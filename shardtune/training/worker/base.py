"""A training task on all ranks, driven one optimizer step at a time; the class that users derive from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from omegaconf import DictConfig
from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from shardtune.batch.row_draws import RowDraws
from shardtune.batch.seeds import derive_seed, generators_kept, seed_generators, seeded
from shardtune.checkpoint.dcp import PendingSave
from shardtune.checkpoint.hf_save import Processor
from shardtune.config import Recipe, load_recipe
from shardtune.config.model_names import registered_function, registered_processor
from shardtune.config.rank_layout import Layout
from shardtune.config.recipe_config import as_dict_config
from shardtune.data.loader.protocol import DataState, Loader, MicroBatch, Step
from shardtune.data.loader.step_loader import StepLoader
from shardtune.data.user_loader.errors import built
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.errors import ConfigError, ModelError
from shardtune.launch.cores import limit_threads
from shardtune.models.get_model import get_model, get_model_config_and_processor
from shardtune.models.new_tokens import add_new_tokens
from shardtune.models.options import NoOptions, read_options
from shardtune.models.pretrained import has_tokenizer, recipe_tokenizer
from shardtune.optim.build import check_optimizer, set_learning_rate, watch_rates
from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.ranks import Ranks, join_ranks, leave_ranks, num_ranks
from shardtune.parallel.weights import Weights
from shardtune.training.anomalies import Kind, beyond_fp16
from shardtune.training.bad_rows import BadPart, BadRows
from shardtune.training.first_gradients import with_report
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import ROW_DRAWS, optimizer_step, step_metrics
from shardtune.training.train_output import TrainOutput
from shardtune.training.worker.build_dataloader import call_build_dataloader
from shardtune.training.worker.data_position import DataPosition
from shardtune.training.worker.exported_recipe import over_directory
from shardtune.training.worker.model_export import ModelExport, TextParts
from shardtune.training.worker.model_state import ModelState
from shardtune.training.worker.run_context import RunContext, silent
from shardtune.training.worker.summary import summarise
from shardtune.training.worker.task import DataPaths, Evaluation, Task, UserMethods
from shardtune.training.worker.user_batches import UserBatches
from shardtune.training.worker.user_errors import of_step
from shardtune.training.worker.user_evaluation import EvalOutput
from shardtune.training.worker.user_task import UserTask, training_paths
from shardtune.training.worker.worker_class import check_worker_class, check_worker_names

LONG_STEP = 10.0
"""Seconds of a step from which on looking for its bad rows is announced."""


class FSDPSftWorker(ABC):
    """A fine-tuning task on all ranks; a subclass provides batches and the loss of one.

    Life cycle: after construction, `setup` builds the sharded model, optimizer and loaders on every rank, then
    `run_training` does one optimizer step per call. As a context manager it leaves the process group at its end.

    A subclass overrides `build_dataloader`, `get_train_model_output`, `get_eval_model_output`, and optionally
    `model_provider_func`, `loss_weights`, `setup`, `setup_evaluation`, `run_training`, `run_eval`, `save_checkpoint`,
    `load_checkpoint` and `release`. A class that overrides anything else is refused when it is defined.

    Args:
        cfg: the recipe, validated and resolved.

    Attributes:
        Options: the types of `actor.model.options`, a pydantic model; an unknown key is an error.
        cfg: the recipe as a `DictConfig`, made when it is first read.
        options: the recipe's `actor.model.options`, an instance of `Options`.
        model: the sharded model; call it, not its `forward`.
        tokenizer: of the processor, or the one that the recipe names or that is stored with its model; None without
            one.
        processor: what prepares images or other inputs, saved in `final/`: as the worker assigns it, or from the
            function that is registered for it (`register_model(…, gives="config_and_processor")`).
        device: for batches.
        amp_context: the context to call the model in; half precision is the sharded model's own, so it does nothing.
        report: prints a line for the user, on rank 0 alone.
        samples: answers of the last evaluation, if the task generates any.
        step_seconds: seconds of this rank in the parts of the last step: waiting for data, forward and backward, and
            the update of the weights.
        context: passed by the run at set-up.
        task: model, rows and evaluation, in one of three forms.
        state: the model with its weights and its optimizer.
        position: the position of training in its data.
    """

    Options: ClassVar[type[BaseModel] | None] = NoOptions

    model: nn.Module
    state: ModelState
    position: DataPosition

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_worker_class(cls)

    def __init__(self, cfg: DictConfig | Recipe) -> None:
        check_worker_names(type(self), FSDPSftWorker)
        self.recipe: Recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        vars(self).pop("cfg", None)  # of a subclass that assigned what it was given, before defaults were filled in
        runner = self.recipe.runner
        self.options: Any = self._read_options()
        check_optimizer(self.recipe.actor.optim, Layout.of(self.recipe.actor, num_ranks(runner)))
        limit_threads()
        self.ranks: Ranks = join_ranks(runner.device, self.recipe.actor, runner.collective_timeout)
        self.device: torch.device = self.ranks.device
        self.amp_context: AbstractContextManager[None] = nullcontext()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.processor: Processor | None = None
        self.chat_template: str | None = None
        self.end_of_turn_ids: tuple[int, ...] = ()
        self.saved_files: Mapping[str, object] = {}
        self.notes: list[str] = []
        self.samples: list[Mapping[str, object]] = []
        self.step_seconds: Mapping[str, float] = {}
        self.eval_loaders: dict[str, tuple[Iterable[object], Mapping[str, object]]] = {}
        self.report: Callable[[str], None] = print if self.ranks.is_main else silent
        self.context = RunContext()
        self._start = DataState()  # assigned before set-up
        self.task: Task = self._make_task()

    @cached_property
    def cfg(self) -> DictConfig:  # 10 ms, and many workers never read it
        return as_dict_config(self.recipe)

    def _read_options(self) -> Any:
        """`actor.model.options`, as the class declares them; as they are where a registered function reads them."""
        model, kind = self.recipe.actor.model, type(self).Options
        if kind is NoOptions and registered_function(model.model_type) is not None:
            return model.options
        return None if kind is None else read_options(kind, self.recipe)

    def _make_task(self) -> Task:
        return UserTask(self.recipe, self._methods(), type(self).__name__)

    def _methods(self) -> UserMethods:
        return UserMethods(
            model_provider_func=self.model_provider_func,
            get_train_model_output=self.get_train_model_output,
            get_eval_model_output=self.get_eval_model_output,
        )

    # Methods that a subclass must implement.

    @abstractmethod
    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The batches of training (or of one evaluation set), and facts about them.

        The dict may hold `num_samples`, and `sharded: True` where the loader yields this rank's batches alone;
        otherwise it yields the same batches on every rank, and batch i goes to rank i mod ranks.
        """

    @abstractmethod
    def get_train_model_output(self, batch: Any) -> TrainOutput:
        """The loss of one micro-batch: a mean over its targets, a list of them, (loss, metrics), or `LossSum`s."""

    @abstractmethod
    def get_eval_model_output(self, batch: Any) -> EvalOutput:
        """The number of correct samples in a batch, or a dict of (sum, weight)."""

    # Methods that a subclass may override.

    def model_provider_func(self) -> nn.Module:
        """The model, its parameters on the meta device, or real: then training starts from them."""
        return get_model(self.cfg.actor.model)

    def loss_weights(self, batch: Any) -> Mapping[str, float] | None:
        """The weight of a batch in each term of its loss: for a loss of several terms, or one that is not a mean.

        By default None: a mean loss weighs as many targets as it averages, the labels that are not -100, or the rows
        where there are no labels.
        """
        return None

    def setup(self, context: RunContext | None = None) -> None:
        """Build the sharded model and its weights, the optimizer and the loaders; every rank calls it.

        Args:
            context: of the run that drives the worker; None: `self.context`, which a run assigns before.
        """
        self._build(self.context if context is None else context, training=True)
        loader, info = self._loader(training_paths(self.recipe), eval_dataset=False)
        # In this order: a protocol is recognised by its values, which would count all files of `data.cache: by_file`.
        if isinstance(loader, (StepLoader, Loader)):
            self._refuse_loss_weights()
            self.loader: Loader[MicroBatch] = loader
        else:
            self.loader = self._cut(loader, info)
        beyond = beyond_fp16(self.recipe.actor.model.precision)
        self.position = DataPosition(self.loader, self.recipe.runner, self.task.name_rows, beyond)
        self.position.move_to(self._start)
        self._build_evaluations()
        self.state.weights.copy_masters_to_model()  # an override's own lines see sharded weights, not gathered ones

    def setup_evaluation(
        self,
        checkpoint: Path | None = None,
        context: RunContext = RunContext(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Build the sharded model and the evaluation loaders alone.

        Args:
            checkpoint: whose weights are loaded; None: the initial ones.
            context: of the run that the worker belongs to.
        """
        self._build(context, training=False, checkpoint=checkpoint)
        self._build_evaluations()

    def run_training(self) -> dict[str, float]:
        """One optimizer step; returns its metrics, the same on every rank."""
        began = time.perf_counter()
        state, position, runner, actor = self.state, self.position, self.recipe.runner, self.recipe.actor
        step = next(position.steps)
        waited = time.perf_counter() - began
        rate = set_learning_rate(state.optimizer, state.step, position.horizon, actor.optim)
        if not state.has_stepped:
            state.begin_first_step()
            if len(step.micro_batches) > 1:
                state.begin_first_forwards()
        state.in_step = True
        try:
            result = optimizer_step(
                self._forward,
                step.micro_batches,
                step.denominators,
                state.weights,
                state.optimizer,
                self.ranks,
                draws=(runner.seed, state.step, self.ranks.draws_rank),
                clip=actor.optim.clip_grad,
                loss_scale=state.loss_scale,
                accumulate=self._accumulate,
                judge=None if position.anomalies.spikes is None else position.anomalies.spikes.judge,
            )
        except RuntimeError as error:
            if (readable := of_step(error, str(self.ranks.layout))) is None:
                raise
            raise readable from error
        state.in_step = False
        if not state.has_stepped:
            state.check_first_step(self.report)
        if result.gradient_at:
            computed = result.gradient_at - began - waited
            updated = time.perf_counter() - result.gradient_at
            self.step_seconds = {"data": waited, "forward_backward": computed, "optimizer": updated}
        bad = () if result.anomaly is None else self._bad_rows(step, result.anomaly, time.perf_counter() - began)
        position.advance(step, result, state.step, bad)
        state.step += result.updated
        found = step_metrics(
            step,
            result,
            rate=rate,
            seconds=time.perf_counter() - began,
            waited=waited,
            ranks=self.ranks,
            utilisation=state.utilisation,
        )
        metrics = {"epoch": position.epoch, **found}
        if state.loss_scale is not None:
            metrics["train/loss_scale"] = result.scale or state.loss_scale.value
        if position.skipped_steps:
            metrics["train/skipped_steps"] = float(position.skipped_steps)
        if position.anomalies.counts:
            metrics |= position.anomalies.metrics()
        return metrics | {self.task.metric_name(name): metric.mean for name, metric in result.metrics.items()}

    def clip_grad_norm_(self, max_norm: float | None = None) -> float:
        """Scale the gradient of a `run_training` that updates the weights itself to a norm of at most `max_norm`.

        The norm is that of all ranks in every layout, where torch's function may count this rank's part alone.

        Args:
            max_norm: by default `actor.optim.clip_grad`; where that is null, nothing is scaled.

        Returns:
            The norm before that.

        Raises:
            ModelError: it is not called within such a `run_training`, or twice for one update, or `max_norm` is not
                above 0.
        """
        if (updates := self.state.own_updates) is None:
            raise ModelError(
                "clip_grad_norm_ is called outside of run_training",
                where=f"{type(self).__name__}.clip_grad_norm_",
                remedy="call it in a run_training of your own, between backward() and self.optimizer.step()",
            )
        return updates.clip(self.recipe.actor.optim.clip_grad if max_norm is None else max_norm)

    def _begin_plain_steps(self) -> None:
        self._accumulate = self.task.accumulate

    def _bad_rows(self, step: Step[MicroBatch], kind: Kind, seconds: float) -> list[BadPart]:
        """The rows at fault for an anomaly; none where the weights are.

        Of a loss or gradient that is not finite those that are not; of a spike those with the highest losses.

        Args:
            seconds: that the step took; computing its parts, and rows of some of them alone, may take twice as long.
        """
        if not self.task.losses_add_up or (kind == "nonfinite" and self.state.finite.find()):
            return []
        loader, draws = self.loader, (self.recipe.runner.seed, self.state.step, self.ranks.draws_rank)
        # Where the numbers of a row depend on those beside it, a row alone shows nothing.
        alone = None
        if isinstance(loader, StepLoader) and loader.takes_apart and not statistical_norms(self.state.inner):
            alone = loader.alone
        scale = self.state.loss_scale.least if self.state.loss_scale else 1.0
        rows = BadRows(self._forward, self.state.weights, self.ranks, draws=draws, alone=alone, scale=scale)
        if seconds > LONG_STEP:
            what = "a loss or gradient that is not finite" if kind == "nonfinite" else "a spike"
            self.report(
                f"after step {self.state.step}: {what}: computing parts of the step and single rows to find those at "
                f"fault, which may take twice the {seconds:.0f} s of the step"
            )
        return rows.find(step) if kind == "nonfinite" else rows.highest(step)

    @generators_kept()
    def run_eval(self) -> dict[str, float]:
        """Evaluate every set; `eval/<metric>`, with several sets `eval/<set>/<metric>`. The same on every rank."""
        context, metrics, named = self.context, {}, {}
        episodes = context.episodes_dir
        if episodes is None and context.samples_dir is not None:
            episodes = context.samples_dir / f"step_{self.step}"
        before_training = "position" in vars(self) and not self.step
        evaluation = Evaluation(
            self.model,
            self.ranks,
            self.step,
            context.poll,
            self.report,
            context.samples_dir,
            episodes,
            before_training=before_training,
        )
        self.model.eval()
        try:
            for name, (loader, info) in self.eval_loaders.items():
                prefix = f"eval/{name}/" if name else "eval/"
                # Random draws of a loss (noise, a time) are the same each time, so that evaluations can be compared.
                seed_generators(derive_seed(self.recipe.runner.seed, 0, 0, self.ranks.draws_rank, prefix))
                found = self.task.evaluate_set(name, loader, info, evaluation)
                metrics |= {prefix + key: value for key, value in found.metrics.items()}
                named |= found.named
                self.samples = list(found.samples)
            played = {**self.task.evaluate_episodes(evaluation), **self.task.evaluate_harness(evaluation)}
        finally:
            self.model.train()
        weights = self.state.weights
        weights.copy_masters_to_model()  # as in `setup`: forwards alone leave some weights gathered
        weights.unit_calls.compare()
        if "position" in vars(self):
            weights.refuse_added()
        return metrics | named | {f"eval/{name}": value for name, value in played.items()}

    def save_checkpoint(self, path: str | Path, step: int, *, background: bool = False) -> list[PendingSave]:
        """Write model, optimizer and state into a folder; every rank calls it.

        Args:
            path: the folder.
            step: optimizer steps done.
            background: return once the tensors are copied; the caller waits for what is returned.
        """
        own = {**self.state.checkpoint_state(self.report, self.keeps_own_state()), **self.position.checkpoint_state()}
        state = {**own, "data_files": self.task.data_files(), "step": step}
        return self.state.save(Path(path), state, background=background)

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from a folder that `save_checkpoint` wrote, on any number of ranks; returns its step."""
        self.position.restore(self.state.load(Path(path), keeps=self.keeps_own_state()))
        if (other := self.state.moments_of(Path(path))) is not None:
            self.report(f"the optimizer begins anew: the checkpoint has the state of {other}")
        if self.state.begins_average(Path(path)):
            self.report("the average of the weights begins with those of the checkpoint, which has none")
        return self.state.step

    @final
    def keeps_own_state(self) -> str:
        """The name of a user's class whose checkpoints may hold more than these methods write; "" if none does."""
        kind = type(self)
        saves = kind.save_checkpoint is not FSDPSftWorker.save_checkpoint
        return kind.__name__ if saves and kind.load_checkpoint is not FSDPSftWorker.load_checkpoint else ""

    def release(self) -> None:
        """Free model and optimizer; the worker cannot be used afterwards.

        A model that the caller passed in has the trained weights, in full precision; on several ranks it stays sharded.
        """
        if "state" in vars(self):
            self.state.weights.restore_model()
            self.task.restore_model(self.state.inner)
        if "position" in vars(self):
            self.position.close()
        self.eval_loaders = {}
        for name in {"model", "state", "loader", "position", "_forward", "_accumulate"} & vars(self).keys():
            delattr(self, name)

    # Building.

    def _build(self, context: RunContext, *, training: bool, checkpoint: Path | None = None) -> None:
        """The model and the tokenizer."""
        self.context = context
        if not self.ranks.is_main:
            self.report = silent
        elif context.report is not None:
            self.report = context.report
        self._read_registered_processor()
        self.state = ModelState(
            self.recipe,
            self.ranks,
            self.task,
            self.model_provider_func,
            self.tokenizer,
            directory=context.weights_directory,
            checkpoint=checkpoint,
            training=training,
        )
        self.model = self.state.model
        if training and not type(self).__module__.startswith("shardtune."):
            watch_rates(self.state.optimizer)
        own = not type(self).__module__.startswith("shardtune.") or self.task.has_users_loss
        self._accumulate = with_report(
            self.task.accumulate,
            self.ranks,
            self.report,
            self._begin_plain_steps,
            may_be_idle=self.task.may_be_idle,
            users=own and not self.recipe.actor.model.compile,
            recomputes=bool(self.recipe.actor.model.gradient_checkpointing),
        )
        self._forward = self.get_train_model_output
        self.notes += [
            *context.notes,
            *self.state.notes,
            *self.task.probe_assumptions(self.model, self.device, self.report),
        ]
        if training and context.tries_loss:
            self.notes += self.task.probe_loss(self.model, self.device)
        if training:
            self.notes += self.task.build_teacher(self.model, self.ranks, self.report)
        if self.tokenizer is None:
            self._read_tokenizer()

    def _read_registered_processor(self) -> None:
        """The processor, or the tokenizer alone, of the function that is registered for the model."""
        if self.processor is not None or registered_processor(self.recipe.actor.model.model_type) is None:
            return
        found = get_model_config_and_processor(self.cfg.actor)[1]
        if isinstance(found, PreTrainedTokenizerBase):
            self.tokenizer = self.tokenizer or found
        else:
            self.processor = found

    def _read_tokenizer(self) -> None:
        """The tokenizer: of the processor, otherwise of the recipe."""
        held = vars(self.processor).get("tokenizer") if isinstance(self.processor, ProcessorMixin) else None
        if isinstance(held, PreTrainedTokenizerBase):
            self.tokenizer = held
            add_new_tokens(held, self.recipe.actor.added_tokens)
        elif has_tokenizer(self.recipe):
            self.tokenizer = recipe_tokenizer(self.recipe)

    def _loader(self, paths: DataPaths, *, eval_dataset: bool) -> tuple[Any, dict[str, Any]]:
        """Call `build_dataloader`; its random draws (a split, an order) are the same in every run and every call."""
        with seeded(derive_seed(self.recipe.runner.seed, "build_dataloader")):
            return built(call_build_dataloader(self.build_dataloader, paths, eval_dataset=eval_dataset))

    def _build_evaluations(self) -> None:
        self.task.prepare_harness(self.ranks)
        sets = self.task.evaluation_sets()
        self.eval_loaders = {paths.name: self._loader(paths, eval_dataset=True) for paths in sets}

    def _refuse_loss_weights(self) -> None:
        """Refuse a `loss_weights` that would never be called: the built-in loader computes the weights of its rows."""
        kind = next(kind for kind in type(self).__mro__ if "loss_weights" in vars(kind))
        if not kind.__module__.startswith("shardtune."):
            raise ConfigError(
                f"{kind.__name__}.loss_weights would never be called: the rows that the recipe names have weights of "
                "their own",
                where="actor.worker",
                remedy="leave the method out and give the adapter a weights(row), or return a loader of your own from "
                "build_dataloader",
            )

    def _cut(self, loader: object, info: Mapping[str, object]) -> BatchLoader:
        """A user-defined loader, split into steps."""
        found = UserBatches(self.recipe, self.ranks, self.model, self.get_train_model_output)
        self._forward = found.loss
        return found.loader(loader, info, self.loss_weights, self.report)

    # What a subclass or a run reads.

    @final
    def row_draws(self, rows: Sequence[int] | torch.Tensor) -> RowDraws:
        """Random numbers for a loss that draws noise or times, which depend on seed, step and row alone.

        With them a step's numbers do not depend on how its rows lie in batches and on ranks. In evaluation the step
        does not enter, so each row always has the same.

        Args:
            rows: the number of each row of the batch in the data, which the data set has to give with the row.
        """
        seed, numbers = self.recipe.runner.seed, rows.tolist() if isinstance(rows, torch.Tensor) else list(rows)
        if not self.model.training:
            return RowDraws(derive_seed(seed, ROW_DRAWS), numbers)
        return RowDraws(derive_seed(seed, self.step, ROW_DRAWS), self.task.drawn_numbers(numbers))

    @property
    @final
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step if "state" in vars(self) else 0

    @property
    @final
    def weights(self) -> Weights:
        """The weights of the model on all ranks."""
        return self.state.weights

    @property
    @final
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of a worker that trains."""
        return self.state.optimizer

    @property
    @final
    def inner_model(self) -> nn.Module:
        """The model inside `model`, by whose names checkpoints are written."""
        return self.state.inner

    @property
    @final
    def data_state(self) -> DataState:
        """Epoch and rows consumed."""
        return self.position.state if "position" in vars(self) else self._start

    @property
    @final
    def data_iter(self) -> Iterator[object]:
        """This rank's batches, one by one, from the current position; batches taken from it count as consumed.

        A checkpoint between two batches of a step (`global_batch_size` rows) continues with the second of them, on as
        many ranks. `super().run_training()` takes the next whole step, and passes over what is left of one.
        """
        return self.position.batches

    @data_iter.setter
    @final
    def data_iter(self, batches: object) -> None:
        raise ConfigError(
            f"data_iter is set to a {type(batches).__name__}; it can only be read",
            where="data_iter",
            remedy="take batches with next(self.data_iter), which goes on with the next epoch by itself; return others "
            "from build_dataloader; to go to another position, assign _data_epoch and _data_iter_offset",
        )

    @property
    @final
    def _data_epoch(self) -> int:
        """The epoch; assign it, as a `load_checkpoint` may, to continue from there."""
        return self.data_state.epoch

    @_data_epoch.setter
    @final
    def _data_epoch(self, epoch: int) -> None:
        self._move_to(DataState(epoch, self._data_iter_offset))

    @property
    @final
    def _data_iter_offset(self) -> int:
        """Rows of the epoch that are consumed; assign it to continue from there."""
        return self.data_state.rows_consumed

    @_data_iter_offset.setter
    @final
    def _data_iter_offset(self, rows: int) -> None:
        self._move_to(DataState(self._data_epoch, rows))

    def _move_to(self, state: DataState) -> None:
        for name, value in (("_data_epoch", state.epoch), ("_data_iter_offset", state.rows_consumed)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"{name} is set to {value!r}, which is no position in the data",
                    where=name,
                    remedy="assign a whole number from 0 on, as it was read from there",
                )
        if "position" in vars(self):
            self.position.move_to(state)
        else:
            self._start = state

    @property
    @final
    def finished(self) -> bool:
        """Whether `max_epochs` or `max_steps` is reached."""
        return self.position.finished(self.state.step)

    @property
    @final
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on; available after set-up."""
        return bool(self.eval_loaders) or self.task.plays_episodes or self.task.runs_harness

    @final
    def summary(self) -> RunSummary:
        """The first screen's summary; available after set-up."""
        found = summarise(self.recipe, self.ranks, self.state, self.position, self.loader, self.eval_loaders)
        return self.task.describe(replace(found, notes=[*self.notes, *found.notes]))

    @final
    def export(self, directory: Path, dtype: str, *, merge: bool = False) -> None:
        """Write the model as a directory that its own `from_pretrained` loads; see `ModelExport.write`."""
        with self.state.in_use():
            self._model_export().write(directory, dtype, merge=merge)

    @final
    def check_export(self, dtype: str) -> None:
        """Try on this rank, before training, to save what belongs to the model besides its weights."""
        self._model_export().check(dtype)

    def _model_export(self) -> ModelExport:
        text = TextParts(self.tokenizer, self.processor, self.chat_template, self.end_of_turn_ids, self.saved_files)
        return ModelExport(self.recipe, self.ranks, self.state, text)

    def reopened(self, directory: Path) -> FSDPSftWorker:
        """A new worker of the same class, not set up, for the weights that `export` wrote; this one may be released."""
        return type(self)(as_dict_config(over_directory(self.recipe, directory)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise other ranks may be blocked in a collective
            leave_ranks(self.ranks)
