"""Whether the loss and the metrics of a user's adapter are what a run takes them for: sums over rows.

Two real rows are tried before the first step, together and alone. `shardtune verify adapter` tries much more; this
finds what would make a run silently wrong for those who have not called it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardtune.batch import Batch, Metric, Sample
from shardtune.batch.seeds import seed_generators, seeded
from shardtune.errors import ModelError
from shardtune.evaluate.loss import as_metrics
from shardtune.models.adapter import Adapter, AdapterRoot

REPEATED = {"cpu": 0.0}
"""Relative: the most by which a repeated loss differs; elsewhere kernels add in any order."""
ELSEWHERE = 1e-3
GROSS = 0.05
"""Of the sum of two losses: more than the rounding of half precision changes in them together."""
# Remedies for a loss that is no sum over rows, here and in `verify/sums.py`.
MEAN = (
    "this looks like a mean: return the sum over targets (reduction='sum') and its weight, and divide by nothing, "
    "neither the rows of the batch nor its targets"
)
ALONE = (
    "let each row's share depend on that row alone: no means over the batch, no padding that counts, no state of the "
    "adapter's; a loss of all rows of a step is a WholeStepAdapter's"
)


def probe_loss(
    model: nn.Module,
    root: AdapterRoot,
    adapter: Adapter,
    samples: Sequence[Sample],
    device: torch.device,
    *,
    evaluates: bool,
) -> list[str]:
    """Compute the loss of two rows in several ways, and the metrics.

    Args:
        model: the sharded model, whose forward is the adapter's loss; every rank calls this with the same rows.
        root: of the model.
        adapter: describes the model.
        samples: two rows that may share a micro-batch.
        device: that computes.
        evaluates: whether the run has evaluation rows.

    Returns:
        Notes for the user.

    Raises:
        ModelError: the loss of both rows is not the sum of their losses, a layer is made while it is computed, or a
            metric is no pair of numbers.
    """
    probe = _Probe(model, root, adapter, samples, device)
    measures = evaluates and type(adapter).metrics is not Adapter.metrics
    try:
        notes = probe.notes()
        together, alone = probe.together(), probe.alone()
        notes += probe.odd_metrics() if measures and together is not None else ()
    except ModelError:
        raise
    except Exception:  # what fails here fails in the first step too, where the message is about that
        return []
    if together is None:
        return notes
    for term, total in together.items():
        if any(term not in losses for losses in alone):  # training refuses what its rows lack
            continue
        one, other = alone[0][term], alone[1][term]
        if not _adds_up(total, one, other):
            between = min(one, other) <= total <= max(one, other)
            raise ModelError(
                f"the term {term!r} of the loss is {one:.6g} and {other:.6g} for two rows alone, and {total:.6g} for "
                f"both together, not the sum {one + other:.6g}",
                where=f"{type(adapter).__name__}.loss",
                remedy=MEAN if between else ALONE,
            )
    return notes


class _Probe:
    """Two rows and the ways in which their loss is computed; arguments as `probe_loss` has them."""

    def __init__(
        self, model: nn.Module, root: AdapterRoot, adapter: Adapter, samples: Sequence[Sample], device: torch.device
    ) -> None:
        self._model, self._root, self._adapter = model, root, adapter
        self._samples, self._device = samples, device
        self._name = type(adapter).__name__
        self._repeats = True

    def notes(self) -> list[str]:
        """What is odd in the loss of both rows; the first call is watched for new layers and changed fields."""
        batch = self._batch([0, 1])
        before = {name: tensor.clone() for name, tensor in batch.fields.items()}
        with _new_layers(self._model) as made:
            self._first = self._losses_of(batch)
        if names := {type(module).__name__: None for module in made if _is_drawn(module)}:
            raise ModelError(
                f"a layer is made while the loss is computed ({', '.join(names)}), so that its weights are not "
                "trained, and are others in each call that makes one",
                where=f"{self._name}.loss",
                remedy="make layers in build or in the constructor of the model, and call them in forward",
            )
        changed = [name for name, tensor in batch.fields.items() if name in before and _differs(before[name], tensor)]
        notes = []
        if changed:
            notes.append(
                f"{self._name}.loss changes {', '.join(map(repr, changed))} of its batch in place: what is computed of "
                "the same batch afterwards, such as metrics, has the changed values; make a new tensor instead"
            )
        if not self._is_first(self._losses([0, 1])):
            self._repeats = False
            notes.append(
                f"{self._name}.loss of the same rows differs from call to call with the same seed: it draws from a "
                "generator of its own, or keeps state between calls, so the run cannot be repeated or continued bit "
                "for bit; batch.randn_like and the generators of torch, numpy and Python draw alike"
            )
        return notes

    def together(self) -> dict[str, float] | None:
        """The loss of both rows; None where it is drawn, so that it is no sum of two other draws."""
        drawn = not self._repeats or not self._is_first(self._losses([0, 1], seed=1))
        return None if drawn else self._first

    def alone(self) -> list[dict[str, float]]:
        """The loss of each row."""
        return [self._losses([row]) for row in (0, 1)]

    def odd_metrics(self) -> list[str]:
        """Metrics whose sums and weights do not add up."""
        together, one, other = (self._metrics(self._batch(rows)) for rows in ([0, 1], [0], [1]))
        found = []
        for name, whole in together.items():
            if name not in one or name not in other:
                continue
            parts = (one[name], other[name])
            sums, weights = [part.total for part in parts], [part.weight for part in parts]
            if _adds_up(whole.total, *sums) and _adds_up(whole.weight, *weights):
                continue
            found.append(
                f"{self._name}.metrics: {name!r} is ({whole.total:.6g}, {whole.weight:.6g}) for two rows together, "
                f"({sums[0]:.6g}, {weights[0]:.6g}) and ({sums[1]:.6g}, {weights[1]:.6g}) alone, which do not add up "
                "to it: what evaluation reports depends on how rows are cut into batches; return the sum over the "
                "batch, and what it is divided by in the end"
            )
        return found

    @torch.no_grad()
    def _metrics(self, batch: Batch) -> dict[str, Metric]:
        was_training = self._model.training
        self._model.eval()
        try:
            with seeded(0):
                return as_metrics(self._root.evaluate(batch).metrics, f"{self._name}.metrics")
        finally:
            self._model.train(was_training)

    def _is_first(self, losses: Mapping[str, float]) -> bool:
        """Whether these losses are those of the first call."""
        limit = REPEATED.get(self._device.type, ELSEWHERE)
        return all(abs(value - losses[term]) <= limit * abs(value) for term, value in self._first.items())

    def _batch(self, rows: Sequence[int], seed: int = 0) -> Batch:
        samples = [self._samples[row] for row in rows]
        weights = [self._adapter.weights(sample) for sample in samples]
        sums = {term: sum(of[term] for of in weights) for term in weights[0]}
        sums |= {term: weight * len(samples) for term, weight in self._adapter.row_terms().items()}
        with seeded(seed):
            return self._adapter.collate(samples, list(rows), sums).to(self._device)

    def _losses(self, rows: Sequence[int], *, seed: int = 0) -> dict[str, float]:
        """By term, with what `collate` and the loss draw seeded."""
        return self._losses_of(self._batch(rows, seed), seed)

    @torch.no_grad()
    def _losses_of(self, batch: Batch, seed: int = 0) -> dict[str, float]:
        was_training = self._model.training
        self._model.eval()
        try:
            with seeded(seed):
                seed_generators(seed)  # a GPU's too, which each micro-batch seeds again
                return {name: float(term.total) for name, term in self._model(batch).items()}
        finally:
            self._model.train(was_training)


@contextmanager
def _new_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules outside of a model that get a parameter meanwhile."""
    known, made = {id(module) for module in model.modules()}, list[nn.Module]()

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if id(module) not in known:
            made.append(module)

    handle = register_module_parameter_registration_hook(note)
    try:
        yield made
    finally:
        handle.remove()


def _is_drawn(module: nn.Module) -> bool:
    """Whether a module has other weights than those of a new norm, which are ones and zeros."""
    return any((weight != 0).any() and (weight != 1).any() for weight in module.parameters(recurse=False))


def _adds_up(total: float, one: float, other: float) -> bool:
    """Whether the value of two rows is the sum of theirs; of values that are not finite nothing is known."""
    return not abs(total - one - other) > GROSS * (abs(one) + abs(other))


def _differs(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.shape != after.shape or not torch.equal(before.nan_to_num(), after.nan_to_num())
