"""Metrics of a step and of an evaluation under their logged names, whatever an override returns; all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real

import torch

from shardtune.errors import ModelError
from shardtune.evaluate.loss import check_monitors
from shardtune.optim.build import set_learning_rate
from shardtune.training.step import TRAIN_METRICS
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.frozen_weights import named
from shardtune.training.worker.own_updates import OwnUpdates, watched

OWN = "shardtune."
TRAINING, EVALUATION = "run_training", "run_eval"
WHOLE_NAMES = ("epoch",)
"""Metrics without a slash in their names that get no prefix."""


def check_worker_monitors(worker: FSDPSftWorker) -> None:
    """Refuse a monitor of the recipe that is no metric of any evaluation of a worker, as far as these are known.

    Args:
        worker: after its set-up.

    Raises:
        ConfigError: names the monitor, and the metrics that there are.
    """
    known = worker.task.metric_names() if worker.evaluates else []
    check_monitors(worker.recipe.runner, None if known is None else [*known, *TRAIN_METRICS])


def training_method(worker: FSDPSftWorker) -> Callable[[], dict[str, float]]:
    """The worker's `run_training`; an override's metrics under their logged names. Every rank calls it.

    An override may do the optimizer step itself, by `self.optimizer`. The run sets the learning rate before it and
    counts the step. Names without a slash are logged below `train/`.

    Raises:
        ConfigError: the worker's `setup` has set learning rates that would have no effect.
        ModelError: it has changed which parameters the optimizer has; an override made no step, or returned something
            else than numbers by name.
    """
    _begin_step(worker)
    kind = _overriding(worker, TRAINING)
    return worker.run_training if kind is None else partial(_train, worker, kind)


def overrides_training(worker: FSDPSftWorker) -> bool:
    """Whether a worker has a `run_training` of the user's."""
    return _overriding(worker, TRAINING) is not None


def evaluation_method(worker: FSDPSftWorker) -> Callable[[], dict[str, float]]:
    """The worker's `run_eval`; an override's metrics under their logged names: without a slash below `eval/`.

    Raises:
        ModelError: an override returned something else than numbers by name.
    """
    kind = _overriding(worker, EVALUATION)
    method = worker.run_eval if kind is None else partial(_evaluate, worker, kind)
    method = method if worker.state.average is None else partial(_in_use, worker, method)
    only_evaluates = "position" not in vars(worker)
    own_setup = _overriding(worker, "setup") is not None and _overriding(worker, "setup_evaluation") is None
    return partial(_without_setup, worker, method) if only_evaluates and own_setup else method


def _without_setup(worker: FSDPSftWorker, method: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The metrics of a worker whose class has a `setup` of its own, which is not called where it only evaluates."""
    try:
        return method()
    except AttributeError as error:
        if error.obj is worker:
            error.add_note(
                f"setup() is called before training alone, and not where {type(worker).__name__} only evaluates: "
                f"assign self.{error.name} in model_provider_func, which is called for both"
            )
        raise


def _in_use(worker: FSDPSftWorker, method: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The metrics of the weights that the recipe evaluates."""
    with worker.state.in_use():
        return method()


def _train(worker: FSDPSftWorker, kind: type) -> dict[str, float]:
    state, position = worker.state, worker.position
    before = state.step, position.skipped_steps
    if state.step == position.horizon:
        worker.report(
            f"{kind.__name__}.{TRAINING} takes less than actor.global_batch_size rows a step: the learning rate has "
            f"reached its end after {state.step} steps and stays there"
        )
    _begin_step(worker)
    forwards: AbstractContextManager[None] = nullcontext()
    if first := not state.has_stepped:
        state.begin_first_step()
        forwards = state.watching_first_forwards()
    updates = OwnUpdates(f"{kind.__name__}.{TRAINING}", state.weights, first)
    state.own_updates = updates

    def others(optimizer: torch.optim.Optimizer) -> None:
        line = updates.notice_other(optimizer, bool(worker.keeps_own_state()))
        if line and line not in state.notes_of_updates:
            state.notes_of_updates.add(line)
            worker.report(line)

    try:
        with watched(updates, worker.recipe, state.optimizer, lambda: state.in_step, others, worker.ranks), forwards:
            found = worker.run_training()
    finally:
        state.own_updates = None
    if (state.step, position.skipped_steps) == before:
        _require_update(updates, kind)
        state.step += 1
        if not state.has_stepped:
            updates.report_unused(worker.recipe, worker.report)
    if not state.has_stepped:
        state.check_first_step(worker.report)
    lost = []
    if first:
        own = [*updates.lost, *state.weights.unlike_masters()]
        lost = [name for names in worker.ranks.gather(own) for name in names]
    state.weights.watch_masters(False)
    if lost:
        when = "beside self.optimizer.step()" if updates.lost else "after the step"
        raise ModelError(
            f"{kind.__name__}.{TRAINING} changes {named(list(dict.fromkeys(lost)))} {when}, of which the model "
            "has a copy rounded from the weights in full precision: what is written into it is lost",
            where=lost[0],
            remedy="train in fp32 (actor.model.precision), or on several ranks, which hold these weights in fp32",
        )
    return _alike(_named(found, "train", f"{kind.__name__}.{TRAINING}"), worker)


def _begin_step(worker: FSDPSftWorker) -> None:
    """Set the learning rate, and refuse what a worker's own code has changed of the optimizer before the step."""
    state = worker.state
    set_learning_rate(state.optimizer, state.step, worker.position.horizon, worker.recipe.actor.optim)
    state.weights.refuse_unfrozen()


def _evaluate(worker: FSDPSftWorker, kind: type) -> dict[str, float]:
    found = worker.run_eval()
    worker.state.weights.copy_masters_to_model()  # forwards alone leave some weights gathered, where nothing is frozen
    return _alike(_named(found, "eval", f"{kind.__name__}.{EVALUATION}"), worker)


def _overriding(worker: FSDPSftWorker, name: str) -> type | None:
    """The user's class that overrides a method; None if the method is this package's own."""
    kind = next(kind for kind in type(worker).__mro__ if name in vars(kind))
    return None if kind.__module__.startswith(OWN) else kind


def _require_update(updates: OwnUpdates, kind: type) -> None:
    if updates.with_gradient or updates.skipped():
        return
    what = (
        "called self.optimizer.step() while no parameter had a gradient"
        if updates.without
        else "neither called super().run_training() nor self.optimizer.step(), so nothing was trained"
    )
    raise ModelError(
        f"{kind.__name__}.{TRAINING} {what}",
        where=f"{kind.__module__}.{kind.__name__}.{TRAINING}",
        remedy="call super().run_training() and change what it returns, with a loss of your own in "
        "get_train_model_output; or call backward() and then self.optimizer.step()",
    )


def _named(found: object, prefix: str, method: str) -> dict[str, float]:
    """Numbers by their logged names."""
    if not isinstance(found, Mapping):
        raise ModelError(
            f"{method} returned a {type(found).__name__}, not a dict of metrics",
            where=method,
            remedy='return a dict of numbers by name, such as {"loss": 0.5}, or what super() returns',
        )
    named = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, Real):
            raise ModelError(
                f"{method} returned {name!r}: a {type(value).__name__}, which is no number",
                where=method,
                remedy="return numbers, or tensors of one element",
            )
        named[name if "/" in name or name in WHOLE_NAMES else f"{prefix}/{name}"] = float(value)
    return named


def _alike(own: dict[str, float], worker: FSDPSftWorker) -> dict[str, float]:
    """The same metrics on every rank: as they are if no rank differs, otherwise means over the ranks that have them.

    With them ranks compare which units of the model they have called.
    """
    if worker.ranks.world_size == 1:
        return own
    calls = worker.state.weights.unit_calls
    every, marks = zip(*worker.ranks.gather((own, calls.mark())), strict=True)
    if len({*marks}) > 1:
        calls.refuse()
    calls.clear()
    if all(other == every[0] for other in every):
        return own
    names = dict.fromkeys(name for other in every for name in other)
    values = {name: [other[name] for other in every if name in other] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
