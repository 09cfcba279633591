"""A model on one rank whose losses and gradients checks measure, and short runs of training to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from shardtune.batch import Batch, LossSum, Sample
from shardtune.batch.seeds import derive_seed, seed_generators, seeded
from shardtune.config import Recipe
from shardtune.data.cache.by_file import rows_to_show
from shardtune.data.loader.step_loader import DataState, Step, StepLoader
from shardtune.data.prepare import WeighedRows
from shardtune.models.adapter import Adapter, AdapterRoot, named
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.torch_private.modules import DropoutBase
from shardtune.parallel.weights import local
from shardtune.training.step import ROW_DRAWS, Accumulate, accumulate, objective
from shardtune.training.whole_step_loss import WholeStep
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.held_draws import HeldDraws
from shardtune.verify.result import Failed

Tensors = Mapping[str, torch.Tensor]
CLOSE = 1e-6
"""The relative difference allowed between two ways to the same number in fp64: far above rounding, below any fault."""


FIRST_KEY = derive_seed(0, 0, ROW_DRAWS)
"""The key of the rows' random numbers in step 0 of seed 0."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Losses and gradients of some micro-batches together.

    Attributes:
        totals: the sum of each term.
        weights: the weight of each term that the loss reports.
        gradients: by parameter, of the totals over the weights of their rows; those that have one.
    """

    totals: Mapping[str, float]
    weights: Mapping[str, float]
    gradients: Tensors


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A run of training.

    Attributes:
        losses: of each step.
        norms: of each step's gradient.
        tensors: copies of the parameters and buffers after it.
    """

    losses: Sequence[float]
    norms: Sequence[float]
    tensors: Tensors


def set_up(recipe: Recipe) -> SFTWorker:
    """The worker that trains on the rows of a case, ready for its first step."""
    worker = SFTWorker(recipe, report=silent)
    worker.setup()
    return worker


def run(worker: SFTWorker, steps: int) -> Trajectory:
    """Train a number of steps, in the mode (training or evaluation) that the model is in."""
    losses, norms = [], []
    for _ in range(steps):
        measured = worker.run_training()
        losses.append(measured["train/loss"])
        norms.append(measured["train/grad_norm"])
    return Trajectory(losses, norms, copies(worker.weights.tensors()))


def accumulation(worker: SFTWorker) -> Accumulate:
    """How the gradients of a worker's micro-batches add up."""
    adapter = worker.adapter
    return WholeStep(adapter, worker.ranks).accumulate if isinstance(adapter, WholeStepAdapter) else accumulate


def first_steps(worker: SFTWorker, number: int) -> list[Step]:
    """The first steps of a run, as its loader makes them."""
    assert isinstance(worker.loader, StepLoader)
    state, steps = DataState(), []
    for _ in range(number):
        steps.append(worker.loader.step(state))
        state = steps[-1].after
    return steps


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Trial:
    """A model in evaluation mode on one rank, and the rows of its case.

    In evaluation mode there is no dropout and norms do not update their statistics, so the loss of a micro-batch
    depends on its rows alone, and any two ways to compute it can be compared.

    Args:
        worker: set up for training.

    Attributes:
        holds_draws: whether what torch's generators draw is held constant, as the loss is random without that.
    """

    def __init__(self, worker: SFTWorker) -> None:
        worker.model.eval()
        self.holds_draws = False
        assert worker.prepared.train is not None
        self.worker = worker
        self.adapter: Adapter = worker.adapter
        rows = rows_to_show(worker.prepared.train)
        self._rows = WeighedRows(rows, self.adapter.row_terms())
        self.num_rows = len(rows)

    @property
    def root(self) -> AdapterRoot:
        return self.worker.root

    def train(self) -> None:
        """Put the model in training mode, except for dropout and batch norms."""
        self.worker.model.train()
        norms = statistical_norms(self.worker.inner_model).values()
        draws = (module for module in self.root.modules() if isinstance(module, DropoutBase))
        for module in (*norms, *draws):
            module.eval()

    def unit_calls(self, batch: Batch) -> list[str]:
        """The names of the units that a forward calls, in order, with repetitions."""
        names = {module: name for name, module in self.worker.inner_model.named_modules()}
        units = self.adapter.shard_units(self.worker.inner_model)[0]
        called: list[str] = []
        hooks = [unit.register_forward_pre_hook(partial(_note, called, names[unit])) for unit in units]
        try:
            with torch.no_grad():
                seed_generators(derive_seed(0, 0, 0, 0, "verify"))
                self.root(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return called

    def filler(self) -> Batch:
        """The micro-batch of a rank without rows."""
        sample = self.adapter.filler(self.samples[0])
        return self._collated([sample], (-1,), dict.fromkeys(self.terms, 0.0))

    @cached_property
    def samples(self) -> list[Sample]:
        """The encoded rows."""
        return [self._rows.row(index) for index in range(self.num_rows)]

    @property
    def terms(self) -> list[str]:
        """The names of the loss terms."""
        return list(self._rows.term_weights)

    def weigh(self, sample: Sample) -> dict[str, float]:
        """A sample's weight in each term."""
        return {**self.worker.prepared.encoder.weights(sample), **self.adapter.row_terms()}

    def indexed_weights(self, rows: Sequence[int]) -> dict[str, float]:
        """The weight of rows in each term, by the row index."""
        places = np.asarray(rows, np.int64)
        return {term: float(values[places].sum()) for term, values in self._rows.term_weights.items()}

    def batch(self, rows: Sequence[int], seed: int = 0) -> Batch:
        """The micro-batch of some rows; `seed` is that of what `collate` draws."""
        samples = [self.samples[row] for row in rows]
        return self._collated(samples, list(rows), self.indexed_weights(rows), seed)

    def _collated(
        self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float], seed: int = 0
    ) -> Batch:
        with seeded(derive_seed(seed, rows[0], "verify")), self.draws():
            return self.adapter.collate(samples, rows, weights)

    def loaded(self, rows: Sequence[int]) -> Batch:
        """The micro-batch of rows, or of none, as the loader makes it in a step of all rows."""
        adapter, companion = self.adapter, self.adapter.companion()
        samples = [self.samples[row] for row in rows] or [adapter.filler(self.samples[0])]
        if companion is not None and len(companion.joined(self.samples)) == len(self.samples):
            samples = companion.joined(samples)
        numbers = [*rows, *[-1] * (len(samples) - len(rows))]
        return self._collated(samples, numbers, self.indexed_weights(rows))

    def batch_of(self, samples: Sequence[Sample]) -> Batch:
        """The micro-batch of samples that are not rows of the case."""
        weights = dict.fromkeys(self.terms, 0.0)
        for sample in samples:
            for term, weight in self.weigh(sample).items():
                weights[term] = weights.get(term, 0.0) + float(weight)
        return self._collated(list(samples), list(range(len(samples))), weights)

    def forwards(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows grouped by forward pass: all together if the adapter allows it, otherwise one by one."""
        return [list(rows)] if self.adapter.rows_share_forwards else [[row] for row in rows]

    def losses(self, batch: Batch, seed: int = 0) -> dict[str, LossSum]:
        """The terms of a micro-batch's loss, with their graph; for a whole-step loss the micro-batch is the step."""
        seed_generators(derive_seed(seed, 0, 0, 0, "verify"))
        batch = replace(batch, key=FIRST_KEY)
        with self.draws():
            if isinstance(self.adapter, WholeStepAdapter):
                return named(self.adapter.step_loss(self.root(batch)))
            return dict(self.root(batch))

    def draws(self) -> AbstractContextManager[object]:
        """In which losses are computed."""
        return HeldDraws() if self.holds_draws else nullcontext()

    def measure(self, batches: Sequence[Batch]) -> Measured:
        """Losses and gradients of micro-batches together, as in one step."""
        with self.draws():
            return self._measure(batches)

    def _measure(self, batches: Sequence[Batch]) -> Measured:
        weights = self.worker.weights
        weights.zero_gradients()
        denominators = {term: sum(batch.weights.get(term, 0.0) for batch in batches) for term in self.terms}
        if isinstance(self.adapter, WholeStepAdapter):
            every = accumulation(self.worker)
            totals = every(self.root, batches, denominators, weights, draws=(0, 0, 0), scale=1.0)
            sums = {term: float(total) for term, total in totals.losses.items()}
            return Measured(sums, denominators, self._gradients())
        sums, reported = dict.fromkeys(self.terms, 0.0), dict.fromkeys(self.terms, 0.0)
        for batch in batches:
            losses = self.losses(batch)
            self._check_terms(losses)
            objective(losses, denominators, 1.0).backward()
            for term, loss in losses.items():
                sums[term] += float(loss.total.detach())
                reported[term] += float(loss.weight)
        return Measured(sums, reported, self._gradients())

    @torch.no_grad()
    def row_losses(self) -> list[dict[str, str]]:
        """The terms of each row's loss, exact, as `float.hex`."""
        found = []
        for row in range(self.num_rows):
            losses = self.losses(self.batch([row]))
            found.append({term: float(loss.total.item()).hex() for term, loss in losses.items()})
        return found

    def _check_terms(self, losses: Mapping[str, LossSum]) -> None:
        if set(losses) != set(self.terms):
            raise Failed(
                f"the loss has the terms {sorted(losses)}, weights has {sorted(self.terms)}",
                where=f"{type(self.adapter).__name__}.loss, .weights",
                remedy="return the same terms from both; one that no row of a micro-batch has is the sum over none of "
                "them, with weight 0",
            )

    def _gradients(self) -> dict[str, torch.Tensor]:
        parameters = self.worker.weights.parameters
        found = {name: local(p.grad).clone() for name, p in parameters.items() if p.grad is not None}
        self.worker.weights.zero_gradients()
        return found

    def step_rows(self, number: int) -> list[np.ndarray]:
        """The rows of each of the run's first steps."""
        return [step.rows for step in first_steps(self.worker, number)]

    @cached_property
    def nondeterminism(self) -> str | None:
        """Why two forwards of the same rows cannot be compared; None where they can, if need be with `holds_draws`."""
        found = self._randomness()
        if found is None or self.holds_draws:
            return found
        self.holds_draws = True
        found = self._randomness()
        self.holds_draws = found is None
        return found

    def _randomness(self) -> str | None:
        rows = self.forwards(range(self.num_rows))[0]
        with torch.no_grad():
            first, again, other = (
                {term: loss.total.item() for term, loss in self.losses(self.batch(rows, seed), seed).items()}
                for seed in (0, 0, 1)
            )
        if not same(first, again):
            return f"the same rows give {shown(first)} and then {shown(again)} with the same seed (see repeat)"
        if not same(first, other):
            return (
                f"the loss is random ({shown(first)} and {shown(other)} with two seeds), so two ways to compute it "
                "cannot be compared; to compare them, draw by batch.randn_like and batch.rand_like"
            )
        return None


def _note(called: list[str], name: str, _module: nn.Module, _args: object) -> None:
    called.append(name)


def same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Equal bit for bit (NaN equals NaN)."""
    return one.keys() == other.keys() and all(
        value == other[name] or (value != value and other[name] != other[name]) for name, value in one.items()
    )


def shown(values: Mapping[str, float]) -> str:
    """Loss terms for a message."""
    numbers = [f"{value:.6g}" if len(values) == 1 else f"{name} {value:.6g}" for name, value in values.items()]
    return ", ".join(numbers)


def apart(one: float, other: float) -> float:
    """The relative difference of two numbers; infinite where one is not finite."""
    if not (np.isfinite(one) and np.isfinite(other)):
        return float("inf")
    return abs(one - other) / max(abs(one), abs(other), 1e-3)


def distance(one: Tensors, other: Tensors) -> tuple[float, str]:
    """The distance of two sets of gradients or weights, relative to the larger one, and the name that differs most."""
    names = sorted({*one, *other})
    zero = torch.zeros((), dtype=torch.float64)

    def get(tensors: Tensors, name: str) -> torch.Tensor:
        return tensors[name].detach().double() if name in tensors else zero

    parts = {name: float((get(one, name) - get(other, name)).square().sum()) for name in names}
    size = max(sum(float(get(tensors, name).square().sum()) for name in names) for tensors in (one, other))
    worst = max(parts, key=lambda name: parts[name] if parts[name] == parts[name] else float("inf"), default="")
    total = sum(parts.values())
    return (float("inf") if total != total else (total / max(size, 1e-12)) ** 0.5), worst


def silent(text: str) -> None:
    """A report function that discards its messages: the checks have their own results."""
