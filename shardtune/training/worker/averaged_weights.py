"""The exponential moving average of the trained weights: kept beside them in parts, and put in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardtune.checkpoint.training_state import load_average
from shardtune.optim.quantized_state import full_dtype
from shardtune.parallel.weights import Weights, local


class AveragedWeights:
    """The average of the trained weights over optimizer steps, laid out on ranks as the weights are.

    It begins as the weights are now. After each step it becomes `decay * average + (1 - decay) * weights`. Worked
    example: with decay 0.9, a weight that is 1.0 at first and 2.0 after the first step has the average 1.1.
    The average of weights in half precision is in fp32; in their place it is rounded.

    Args:
        weights: of the model.
        decay: in [0, 1).
    """

    def __init__(self, weights: Weights, decay: float) -> None:
        self._weights = weights
        self._decay = decay
        trained = weights.trainable()
        self._averages = {
            name: torch.empty_like(weight.detach(), dtype=full_dtype(weight)).copy_(weight.detach())
            for name, weight in trained.items()
        }
        self._in_model = False
        self._own: dict[int, torch.Tensor] = {}
        self._pairs = [(local(self._averages[name]), local(trained[name].detach())) for name in trained]

    @property
    def parts(self) -> list[torch.Tensor]:
        """This rank's parts."""
        return [average for average, _ in self._pairs]

    @torch.no_grad()
    def update(self, *_: object) -> None:
        """Take a step's weights into the average; a hook of the optimizer's step."""
        for average, weight in self._pairs:
            average.lerp_(weight.to(average.dtype), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; every rank enters it. Afterwards it has its own, bit for bit."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the model has its own weights, also in the middle of `in_place`; every rank enters it."""
        in_model = self._in_model
        if in_model:
            self.swap()
        try:
            yield
        finally:
            if in_model:
                self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average; every rank calls it.

        The average of weights in half precision stays as it is, and the weights are kept beside it meanwhile.
        """
        for number, (average, weight) in enumerate(self._pairs):
            own = weight.clone()
            if average.dtype == weight.dtype:
                weight.copy_(average)
                average.copy_(own)
            elif self._in_model:
                weight.copy_(self._own.pop(number))
            else:
                weight.copy_(average)
                self._own[number] = own
        self._in_model = not self._in_model
        self._weights.copy_masters_to_model()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew, with the weights as they are."""
        for average, weight in self._pairs:
            average.copy_(weight)

    # Checkpoints.

    def checkpointed(self) -> dict[str, torch.Tensor]:
        """By name, in the layout of checkpoints; all ranks call it."""
        return {name: self._weights.to_checkpoint_layout(name, tensor) for name, tensor in self._averages.items()}

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """Read the average from a checkpoint, on any number of ranks; all ranks call it.

        Raises:
            CheckpointError: the checkpoint has none.
        """
        tensors = self.checkpointed()
        load_average(checkpoint, tensors)
        for name, tensor in tensors.items():
            found = self._weights.from_checkpoint_layout(name, tensor)
            if found is not self._averages[name]:
                local(self._averages[name]).copy_(local(found))

    def bytes(self) -> int:
        """The size on all ranks together."""
        return sum(self._weights.shapes[name].numel() * each.element_size() for name, each in self._averages.items())
