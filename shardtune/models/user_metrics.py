"""Losses per target and evaluation metrics that a user's functions compute from predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, SupportsFloat

import torch

from shardtune.batch import LossSum, Metric
from shardtune.config.user_code import check_call, load_function, named_errors
from shardtune.errors import ConfigError, ModelError
from shardtune.models.loss import CrossEntropy, TokenLoss, accumulation_dtype

METRICS = "eval.metrics"


class Prediction(NamedTuple):
    """A model's predictions for some targets, before any loss.

    Attributes:
        outputs: [targets, ...], logits or values.
        targets: [targets, ...].
        weights: [targets], the weight of each.
    """

    outputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


Measure = Callable[[Iterator[Prediction]], Mapping[str, Metric]]
"""Predictions to (sum, weight) by name."""
Pair = Metric | tuple[SupportsFloat, SupportsFloat]
"""(sum, weight)."""
UserMetric = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]
"""Outputs, targets and weights of a `Prediction` to (sum, weight)."""


def checked(predictions: Iterable[Prediction]) -> Iterator[Prediction]:
    """The pieces that an adapter's `predictions` yields, each checked.

    Raises:
        ModelError: a piece is no `Prediction`, or its parts differ in their number of targets.
    """
    if isinstance(predictions, Prediction) or not isinstance(predictions, Iterable):
        raise _no_prediction(f"predictions returned {_of_kind(predictions)}, not pieces one after the other")
    for piece in predictions:
        if not isinstance(piece, tuple) or len(piece) != 3:
            raise _no_prediction(f"predictions gave {_of_kind(piece)}, not a Prediction")
        parts = dict(zip(Prediction._fields, piece, strict=True))
        if not all(isinstance(part, torch.Tensor) and part.ndim for part in parts.values()):
            found = ", ".join(f"{name} {_of_kind(part)}" for name, part in parts.items())
            raise _no_prediction(f"a prediction has parts that are no tensors of a target each: {found}")
        if len({len(part) for part in parts.values()}) > 1:
            raise _no_prediction(f"a prediction has {', '.join(f'{len(part)} {name}' for name, part in parts.items())}")
        yield Prediction(*piece)


def _no_prediction(what: str) -> ModelError:
    return ModelError(
        what,
        where="Adapter.predictions",
        remedy="yield Prediction(outputs, targets, weights): tensors, each with an entry for every target",
    )


def _of_kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def predicted_loss(predictions: Iterable[Prediction], token_loss: TokenLoss) -> LossSum:
    """The weighted sum of a loss per target; half-precision outputs are converted to fp32."""
    total, weight = torch.zeros(()), 0.0
    for outputs, targets, weights in predictions:
        acc = accumulation_dtype(outputs.dtype)
        if isinstance(token_loss, CrossEntropy):
            _check_classes(token_loss, outputs, targets)
        losses = token_loss(outputs.to(acc), targets) if len(outputs) else outputs.flatten(1).sum(1)
        total = total.to(outputs.device, acc) + (losses * weights.to(acc)).sum()
        weight += float(weights.sum(dtype=torch.float64))
    return LossSum(total, weight)


def _check_classes(loss: CrossEntropy, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    if outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point():
        return
    keys = "actor.loss: dft" if loss.by_probability else "actor.label_smoothing, actor.z_loss"
    raise ConfigError(
        f"{'dft is' if loss.by_probability else 'label smoothing and z-loss are'} for logits [n, classes] and "
        f"whole-number targets [n], not for outputs {list(outputs.shape)} and targets {list(targets.shape)} of "
        f"{targets.dtype}",
        where=keys,
        remedy=f"leave {keys} out, or name a loss of your own in actor.loss",
    )


class UserMetrics:
    """The functions of `eval.metrics`, called on predictions piece by piece.

    Args:
        specs: `file.py:function` of each.

    Raises:
        ConfigError: a function cannot be used, or two have the same name.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        self._functions: dict[str, tuple[str, UserMetric]] = {}
        for spec in specs:
            name = spec.rpartition(":")[2]
            function = load_function(spec, METRICS)
            check_call(function, 3, f"{name}(outputs, targets, weights)", f"{METRICS}: {spec}")
            self.check_names([*self._functions], (name,))
            self._functions[name] = (spec, function)

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def check_names(self, taken: Iterable[str], names: Iterable[str] | None = None) -> None:
        """Refuse a metric that has the name of another.

        Args:
            taken: names of other metrics.
            names: names to check; None: those of all functions.
        """
        for name in sorted(set(taken) & set(self._functions if names is None else names)):
            raise ConfigError(
                f"{METRICS}: there is another metric eval/{name}",
                where=METRICS,
                remedy="give the function another name",
            )

    def __call__(self, predictions: Iterator[Prediction]) -> dict[str, Metric]:
        """(sum, weight) of each function over all predictions."""
        sums: dict[str, Metric] = {}
        for piece in predictions:
            if not len(piece.outputs):
                continue
            for name, (spec, function) in self._functions.items():
                with named_errors(spec, METRICS):
                    returned = function(*piece)
                sums[name] = sums.get(name, Metric(0.0, 0.0)) + _pair(returned, spec)
        return sums


def _pair(returned: Pair, spec: str) -> Metric:
    if isinstance(returned, Metric):
        return returned
    try:
        total, weight = returned
        return Metric(float(total), float(weight))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{spec.rpartition(':')[2]} returned {_describe(returned)}, not a pair of numbers, the second 0 or more",
            where=f"{METRICS}: {spec}",
            remedy="return (sum, weight): the sum over these targets, and what all sums together are divided by",
        ) from error


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
