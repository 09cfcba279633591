"""What a first step makes of a model, looked at before a second one builds on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from shardtune.parallel.buffers import UnsavedBuffers
from shardtune.parallel.weights import Weights
from shardtune.training.worker.frozen_weights import named


@final
class FirstStep:
    """A first step; every rank makes one before it, and calls `check` after it.

    Args:
        model: by whose names the lines are.
        weights: of it.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model, self._weights = model, weights
        self._unsaved = UnsavedBuffers(model)
        self._marks: dict[str, torch.Tensor] = {}
        self._moved: list[str] = []
        weights.watch_masters(True)

    def note_buffers(self) -> None:
        """Note the buffers before the forwards of several micro-batches, and before nothing else that changes them."""
        self._marks = self._weights.buffer_marks()

    @contextmanager
    def watching_forwards(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, until the optimizer's first step, note which buffers change from one forward to another.

        For a user's `run_training` that updates the weights itself, whose micro-batches are known to it alone.

        Args:
            model: whose forwards with gradients are those of micro-batches.
            optimizer: of its weights.
        """
        first: dict[str, torch.Tensor] = {}

        def begin(*_: object) -> None:
            if not torch.is_grad_enabled():
                return
            now = self._weights.buffer_marks()
            for key, mark in now.items():
                if key not in self._moved and not torch.equal(mark, first.setdefault(key, mark)):
                    self._moved.append(key)

        hooks = [model.register_forward_pre_hook(begin)]
        hooks.append(optimizer.register_step_pre_hook(lambda *_: hooks[0].remove()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, report: Callable[[str], None], *, in_own_updates: bool) -> None:
        """Refuse what its forwards have made, as before each save, and name what ranks have lost.

        Args:
            report: receives a line, if buffers have become those of rank 0, were changed by one micro-batch after
                another, or were changed and are not saved.
            in_own_updates: whether a user's `run_training` goes on, which may still change weights.

        Raises:
            ModelError: the model has got parameters or persistent buffers.
        """
        weights, name = self._weights, type(self._model).__name__
        weights.watch_masters(in_own_updates)
        weights.refuse_added()
        if lost := weights.overwritten_buffers:
            report(
                f"the buffers {named(lost)} of {name} differ between ranks after the first step, and all ranks go on "
                "with those of rank 0: what forwards have made of other ranks' rows is lost. Let the forward add it up "
                "over ranks before it is written (torch.distributed.all_reduce)"
            )
        now = self._weights.buffer_marks() if self._marks else {}
        moved = [key for key, mark in self._marks.items() if key not in lost and not torch.equal(mark, now[key])]
        moved = list(dict.fromkeys([*moved, *(key for key in self._moved if key not in lost)]))
        if moved:
            where = "let run_training do it" if self._moved else "let run_training of a worker do it"
            report(
                f"the forwards of the first step change the buffers {named(moved)} of {name}, and the forward of a "
                "micro-batch finds what those before it have left: what is computed from them depends on how rows are "
                f"cut into micro-batches. To change them once a step, {where}"
            )
        if changed := self._unsaved.changed():
            report(
                f"the first step changes the buffers {named(changed)} of {name} in place, which are not persistent: no "
                "checkpoint holds them, so that a run that continues has their first values, and ranks do not agree on "
                "them. Leave persistent=False out, unless nothing depends on them later"
            )
