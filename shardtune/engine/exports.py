"""Streams of a module's weights that are under way on one rank, and whether they are still of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardtune.engine.frozen_weights import FrozenWeights
from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

Stream = Iterator[tuple[str, torch.Tensor]]


class Exports:
    """The streams of one module, by their numbers: the caller takes the tensors in several requests."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._spoilt: set[int] = set()

    def begin(self, number: int, stream: Stream) -> None:
        """Keep a stream under its number."""
        self._streams[number] = stream

    def end(self, number: int) -> None:
        """Let go of a stream."""
        self._streams.pop(number, None)
        self._spoilt.discard(number)

    def rest(self, number: int, name: str) -> Stream:
        """What is still to come of a stream.

        Args:
            name: of the module.

        Raises:
            ModelError: there is more, and the weights are others than at its beginning.
        """
        for pair in self._streams.get(number, iter(())):
            if number in self._spoilt:
                raise ModelError(
                    "the weights have changed since the stream began: what came and what is to come belong to "
                    "different steps",
                    where=f"{name}: engine.named_tensors()",
                    remedy="take all tensors before the next step, and begin anew",
                )
            yield pair

    def spoil(self) -> None:
        """The weights are about to change."""
        self._spoilt |= self._streams.keys()

    @contextmanager
    def watching(self, weights: Weights, ranks: Ranks) -> Iterator[None]:
        """Inside, a method may change weights; all ranks enter alike."""
        if not self._streams:
            yield
            return
        before = FrozenWeights(weights, ranks, ())
        try:
            yield
        except BaseException:
            self.spoil()
            raise
        if before.changed():
            self.spoil()
