"""Updates of the weights by a user's `run_training` itself, with what ranks need for them and what steps check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtune.config.schema import Recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.parallel.clipping import check_max_norm, clip_factor
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.user_scaler import unscaling_on_all_ranks
from shardtune.parallel.weights import Weights


@dataclass(slots=True)
class OwnUpdates:
    """Calls of an optimizer's `step` within one call of `run_training`.

    Attributes:
        method: with its class, for messages.
        weights: that are updated.
        first: whether they are of the first step, whose weights are watched.
        with_gradient: calls that found a gradient.
        without: the others.
        clipped: whether `clip` was called.
        lost: names of weights that were written before an update, which makes them anew from full precision.
        unscaled: of each time that a `GradScaler` unscaled gradients: 1 where one was not finite, so no update follows.
    """

    method: str
    weights: Weights
    first: bool
    with_gradient: int = 0
    without: int = 0
    clipped: bool = False
    lost: list[str] = field(default_factory=list)
    unscaled: list[torch.Tensor] = field(default_factory=list)
    _summed: bool = field(default=False, init=False)

    def clip(self, max_norm: float | None) -> float:
        """Scale the gradient to a norm of at most `max_norm` over all ranks; returns the norm before.

        Raises:
            ModelError: it was called before, for the same update; or `max_norm` is no positive number.
        """
        if max_norm is not None:
            check_max_norm(max_norm, self.method)
        if self._summed:
            raise ModelError(
                "clip_grad_norm_ is called a second time before self.optimizer.step()",
                where=self.method,
                remedy="call it once for an update, after its last backward pass",
            )
        self.weights.settle_gradients()
        self._sum()
        self.clipped, norm = True, self.weights.gradient_norm()
        if max_norm is not None:
            self.weights.scale_gradients(clip_factor(max_norm, norm))
        return norm

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a call of `step`, before it, and make its gradients those of all ranks."""
        self.weights.settle_gradients()
        if self.first:
            self.lost += self.weights.unlike_masters()
        if _has_gradient(optimizer):
            self.with_gradient += 1
        else:
            self.without += 1
        if self._summed:
            self.weights.begin_update()  # a forward after `clip` may have taken gradients away
        else:
            self._sum()
        self._summed = False

    def notice_other(self, optimizer: torch.optim.Optimizer, kept: bool) -> str:
        """What a line says of the step of an optimizer that the worker has made itself, before it; "" for nothing.

        Args:
            optimizer: over other tensors, or over weights of the model too.
            kept: whether the worker's own methods may keep its state.

        Raises:
            ModelError: its gradients are of this rank's rows alone.
        """
        names = self.weights.names_of(_parameters(optimizer))
        if not names:
            return ""
        self.weights.settle_gradients()
        what = f"{self.method} steps an optimizer of its own ({type(optimizer).__name__})"
        if not self._summed and self.weights.held_unsummed(names):
            raise ModelError(
                f"{what} before the gradients are summed over ranks",
                where=self.method,
                remedy="call self.clip_grad_norm_() before it, or set rates of their own for its parameters in "
                "optim.groups",
            )
        if not _has_gradient(optimizer) and any(parameter.numel() for parameter in _parameters(optimizer)):
            return (
                f"{what} while none of its parameters has a gradient, which changes nothing: after "
                "self.optimizer.step() and super().run_training() there are none"
            )
        if kept:
            return ""
        return (
            f"{what}: no checkpoint has its state, so a run that continues begins it anew. Set rates of their own "
            "for its parameters in optim.groups, or keep its state by save_checkpoint and load_checkpoint"
        )

    def unscale(self, found: torch.Tensor) -> None:
        """Note that a `GradScaler` has unscaled gradients; where it skipped the update before, another one begins."""
        if self.unscaled and self.unscaled[-1].item():
            self._summed = False
        self.unscaled.append(found)

    def skipped(self) -> bool:
        """Whether a `GradScaler` has skipped an update."""
        return any(found.item() for found in self.unscaled)

    def _sum(self) -> None:
        if self.weights.replicates:
            self.weights.sync_replicated_gradients()
        if self.weights.on_ranks:
            self.weights.unit_calls.agree()
        self._summed = True

    def report_unused(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        """Name the settings of the recipe that these updates do without."""
        clip = recipe.actor.optim.clip_grad
        if clip is not None and not self.clipped:
            report(
                f"{self.method} updates the weights without FSDPSftWorker.clip_grad_norm_(): actor.optim.clip_grad: "
                f"{clip:g} is not applied"
            )
        if recipe.actor.model.precision == "fp16" and not self.unscaled:
            report(f"{self.method} updates the weights itself: the loss of fp16 is not scaled")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


@contextmanager
def watched(
    updates: OwnUpdates,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    built_in: Callable[[], bool],
    others: Callable[[torch.optim.Optimizer], None],
    ranks: Ranks,
) -> Iterator[None]:
    """Inside, the optimizer's own calls of `step` are counted, completed and checked as `optimizer_step` does.

    Args:
        updates: which count them.
        recipe: whose settings they must be able to use.
        optimizer: over the weights.
        built_in: whether `optimizer_step` is what calls it.
        others: called before the step of any other optimizer, which the worker has made itself.
        ranks: of the run.
    """
    weights, compiled = updates.weights, updates.weights.compiled_buffers
    weights.watch_buffers()
    if weights.on_ranks:
        weights.unit_calls.begin_pass()
    versions = compiled.versions()
    in_step = False  # an optimizer may step others within

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal in_step
        in_step = True
        if not built_in():
            _refuse_unused(recipe, updates.method)
            weights.refuse_unfrozen()
            compiled.refuse_changed(versions)
            updates.count(optimizer)

    def after(*_: object) -> None:
        nonlocal versions, in_step
        in_step = False
        if not built_in():
            weights.copy_masters_to_model()
            weights.end_update()
            weights.watch_buffers()
            if weights.on_ranks:
                weights.unit_calls.begin_pass()
            versions = compiled.versions()

    def before_any(stepped: torch.optim.Optimizer, *_: object) -> None:
        if stepped is not optimizer and not in_step:
            others(stepped)

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    hooks.append(register_optimizer_step_pre_hook(before_any))
    try:
        with weights.showing_gradients(), unscaling_on_all_ranks(ranks, updates.unscale):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    weights.agree_on_buffers()


def _refuse_unused(recipe: Recipe, method: str) -> None:
    """Refuse settings of the recipe that only steps of this package's own can use."""
    runner = recipe.runner
    for key in ("on_nonfinite", "on_spike"):
        if (value := getattr(runner, key)) != type(runner).model_fields[key].default:
            raise ConfigError(
                f"runner.{key}: {value} has no effect: {method} updates the weights itself",
                where=method,
                remedy="call super().run_training() there, with a loss of your own in get_train_model_output, or "
                f"leave runner.{key} out",
            )
