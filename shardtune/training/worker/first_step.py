"""What a first step makes of a model, looked at before a second one builds on it."""

from __future__ import annotations

from collections.abc import Callable
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
        weights.watch_masters(True)

    def note_buffers(self) -> None:
        """Note the buffers before the forwards of several micro-batches, and before nothing else that changes them."""
        self._marks = self._weights.buffer_marks()

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
        if moved:
            report(
                f"the forwards of the first step change the buffers {named(moved)} of {name}, and the forward of a "
                "micro-batch finds what those before it have left: what is computed from them depends on how rows are "
                "cut into micro-batches. To change them once a step, let run_training of a worker do it"
            )
        if changed := self._unsaved.changed():
            report(
                f"the first step changes the buffers {named(changed)} of {name} in place, which are not persistent: no "
                "checkpoint holds them, so that a run that continues has their first values, and ranks do not agree on "
                "them. Leave persistent=False out, unless nothing depends on them later"
            )
