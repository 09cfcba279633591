"""The loss and the gradient of one step, without its update: in whole, by row, by token and by group of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardtune.batch import TOKENS, LossSum
from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.data.loader.protocol import DataState, MicroBatch, Step
from shardtune.data.loader.step_loader import StepLoader
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.models.causal_lm import CausalLM
from shardtune.models.source_losses import KeptLosses, RowTargets
from shardtune.parallel.weights import local
from shardtune.training.step import ROW_DRAWS, optimizer_step
from shardtune.training.train_output import read_train_output
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker

NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")
CLOSE = 1e-4
"""The relative difference between a step's loss and the sum of its rows' that is not worth a line: rounding in fp32."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A step, computed again.

    Attributes:
        metrics: by their logged names, as far as the step determines them.
        problem: why training would pass the step over; "" where it would not.
        groups: the norm of the gradient by group of parameters, in the model's order.
        row_losses: by row of the data set, the sum of each term.
        targets: by row, the loss of each of its tokens; of language models.
        batch_losses: of each micro-batch, the mean of each term.
        notes: what a reader of these numbers should know.
    """

    metrics: dict[str, float]
    problem: str
    groups: dict[str, float]
    row_losses: Mapping[int, dict[str, float]] = field(default_factory=dict)
    targets: Mapping[int, RowTargets] = field(default_factory=dict)
    batch_losses: Sequence[dict[str, float]] = ()
    notes: Sequence[str] = ()


class _Look(torch.optim.Optimizer):
    """In the place of a step's optimizer: reads the gradients and changes nothing."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__(list(parameters.values()), {})
        self.named = parameters
        self.groups: dict[str, float] = {}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.groups = group_norms(self.named)


def group_of(name: str) -> str:
    """The group of a parameter: up to the number of its layer, or else the module that it belongs to.

    `model.layers.3.mlp.up_proj.weight` is in `model.layers.3`, `model.embed_tokens.weight` in `model.embed_tokens`.
    """
    found = NUMBERED.match(name)
    return found[1] if found else name.rpartition(".")[0] or name


@torch.no_grad()
def group_norms(parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The Euclidean norm of the gradient of each group of parameters, summed in fp64."""
    squares: dict[str, float] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64))
            squares[group_of(name)] = squares.get(group_of(name), 0.0) + norm**2
    return {name: square**0.5 for name, square in squares.items()}


def measure(worker: FSDPSftWorker, step: Step[MicroBatch]) -> Measured:
    """Compute a step without updating anything.

    Args:
        worker: at the step before, on one rank.
        step: as its loader made it.
    """
    state, seed = worker.state, worker.recipe.runner.seed
    draws, accumulate = (seed, state.step, worker.ranks.draws_rank), worker.task.accumulate
    buffers = state.weights.copy_buffers()
    forward = _Forward(worker.get_train_model_output, keeps=worker.task.losses_add_up)
    look = _Look(state.weights.trainable())
    with _kept_targets(worker) as targets:
        result = optimizer_step(
            forward, step.micro_batches, step.denominators, state.weights, look, worker.ranks, draws=draws, clip=None,
            loss_scale=state.loss_scale, accumulate=accumulate,
        )  # fmt: skip
    state.weights.restore_buffers(buffers)
    if not look.groups and any(step.denominators.values()):  # not finite, of which the groups show where
        state.weights.zero_gradients()
        accumulate(forward.method, step.micro_batches, step.denominators, state.weights, draws=draws, scale=1.0)
        look.step()
        state.weights.zero_gradients()
        state.weights.restore_buffers(buffers)
    metrics = {"train/loss": result.loss}
    if len(result.losses) > 1:
        metrics |= {f"train/loss/{name}": value for name, value in result.losses.items()}
    metrics |= {
        "train/grad_norm": result.gradient_norm,
        f"train/{step.unit}": float(step.num_tokens),
        "train/supervised_tokens": float(step.num_targets),
    }
    metrics |= {worker.task.metric_name(name): metric.mean for name, metric in result.metrics.items()}
    rows, notes = _row_losses(worker, step, targets, result.losses)
    return Measured(metrics, result.problem, look.groups, rows, targets, forward.means, notes)


class _Forward:
    """A worker's train method, with the losses of each micro-batch kept.

    Args:
        train_output: the method.
        keeps: False for a loss of whole steps, of which a forward gives outputs.
    """

    def __init__(self, train_output: Callable[[Any], object], *, keeps: bool) -> None:
        self._train_output = train_output
        self._keeps = keeps
        self.means: list[dict[str, float]] = []

    def method(self, batch: MicroBatch) -> object:
        """The method's output of a micro-batch."""
        return self._train_output(with_names(batch.fields) if isinstance(batch, UserBatch) else batch)

    def __call__(self, batch: MicroBatch) -> object:
        output = self.method(batch)
        if self._keeps:
            sums = losses_of(output, batch)
            self.means.append(
                {name: float(one.total.detach()) / one.weight for name, one in sums.items() if one.weight}
            )
        return output


def losses_of(output: object, batch: MicroBatch) -> dict[str, LossSum]:
    """The sums by term of a train method's output."""
    return output if type(output) is dict else read_train_output(output, batch)[0]


@contextmanager
def _kept_targets(worker: FSDPSftWorker) -> Iterator[dict[int, RowTargets]]:
    """Inside, the loss of each token that a language model's training forward computes is kept, by row."""
    adapter = worker.adapter if isinstance(worker, SFTWorker) else None
    if not isinstance(adapter, CausalLM):
        yield {}
        return
    others = adapter.source_losses
    kept = KeptLosses(others)
    adapter.source_losses = kept
    try:
        yield kept.rows
    finally:
        adapter.source_losses = others


def _row_losses(
    worker: FSDPSftWorker, step: Step[MicroBatch], targets: Mapping[int, RowTargets], losses: Mapping[str, float]
) -> tuple[dict[int, dict[str, float]], list[str]]:
    """By row of the data set the sum of each term, and notes."""
    loader, rows = worker.loader, step.rows.tolist()
    if not isinstance(loader, StepLoader):
        return {}, []
    if not worker.task.losses_add_up:
        return {}, ["the loss compares all rows of a step with each other, so none has a loss of its own"]
    if TOKENS in losses and targets.keys() >= set(rows):
        found = {row: {TOKENS: float(targets[row].losses.sum())} for row in rows}
        notes = [f"the term {name} is not one of single rows" for name in losses if name != TOKENS]
        if not _differs(found, rows, {TOKENS: losses[TOKENS]}, step.denominators):
            return found, notes
    found = {row: _alone(worker, loader, row, step.state) for row in dict.fromkeys(rows)}
    notes = ["the loss of a row is computed from that row alone, without dropout"]
    for name, (together, apart) in _differs(found, rows, losses, step.denominators).items():
        notes.append(
            f"of {name}, rows one by one give {apart:.6g} and the step {together:.6g}: something in the model depends "
            "on the rows beside a row (a batch norm), or is drawn at random (dropout)"
        )
    return found, notes


def _differs(
    found: Mapping[int, Mapping[str, float]],
    rows: Sequence[int],
    losses: Mapping[str, float],
    denominators: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """By term the loss of the step and that of its rows, where they are not the same."""
    wrong = {}
    for name, together in losses.items():
        apart = sum(found[row].get(name, 0.0) for row in rows) / (denominators[name] or 1.0)
        if abs(together - apart) > CLOSE * max(abs(together), abs(apart), 1e-8):  # False where one is NaN
            wrong[name] = (together, apart)
    return wrong


def _alone(worker: FSDPSftWorker, loader: StepLoader, row: int, state: DataState) -> dict[str, float]:
    """The sum of each term of one row, in evaluation mode; what a loss draws for the row is what it was in the step."""
    seed, done = worker.recipe.runner.seed, worker.state.step
    batch = replace(loader.alone(row, state), key=derive_seed(seed, done, ROW_DRAWS))
    worker.model.eval()
    seed_generators(derive_seed(seed, done, 0, 0, "train"))
    try:
        losses = losses_of(worker.get_train_model_output(batch), batch)
    finally:
        worker.model.train()
    return {name: float(loss.total.detach()) for name, loss in losses.items()}
