"""Weights of FSDP1 that are used whole outside of the model's forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardtune.parallel.flat_operands import FlatOperands
from shardtune.parallel.fsdp1 import FlatSharding, Flattening
from shardtune.parallel.half_products import ProductsInFp32
from shardtune.parallel.torch_private.fsdp1 import free_gathered
from shardtune.parallel.torch_private.fsdp2 import in_backward
from shardtune.parallel.torch_private.modules import list_parameters
from shardtune.parallel.torch_private.operations import without_modes
from shardtune.parallel.whole_weights import WholeWeights


class WholeFlatWeights(WholeWeights):
    """The counterpart of `WholeUnits` for FSDP1.

    Args:
        sharding: of the model.
        flattened: what FSDP1 has joined.
        compute: the dtype of the computation.
    """

    def __init__(self, sharding: FlatSharding, flattened: Flattening, compute: torch.dtype) -> None:
        super().__init__(sharding.root, sharding.ranks, compute)
        self._flattened = flattened
        self._parts: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._mode: FlatOperands | None = None
        list_parameters(sharding.root)
        flattened.compare_parts(self._same_call.compare, self.free_after_part)

    def _are_sharded(self) -> bool:
        return not self._flattened.in_forward and not in_backward()

    def _operands(self) -> AbstractContextManager[object]:
        if not self._are_sharded():
            return nullcontext()
        flattened = self._flattened
        self._mode = FlatOperands(
            flattened.owners, flattened.root, self._same_call.compare, self._updating, self._parts
        )
        return self._mode

    def note(self, state: torch.Tensor) -> None:
        """Note a tensor that an optimizer keeps of this rank's part of a weight, for this method and later ones."""
        if state not in self._parts:
            self._parts[state] = True
            if self._mode is not None:
                self._mode.note(state)

    def is_part(self, tensor: torch.Tensor) -> bool:
        return tensor in self._parts

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        with without_modes(FlatOperands), self._flattened.gathered():
            yield

    @contextmanager
    def noting_written(self, written: set[int], set_anew: Collection[int]) -> Iterator[None]:
        with self._flattened.noting_written(written):
            yield

    def _count(self) -> int:
        return sum(self._flattened.shapes[name].numel() for name in self._flattened.places)

    def _updating(self) -> bool:
        """Whether an optimizer changes the weights; a closure that it calls computes gradients of whole ones."""
        return self.stepping and not torch.is_grad_enabled()

    def free(self) -> None:
        with without_modes(FlatOperands, ProductsInFp32):  # the former refuse what FSDP1 does with its parameters
            for shell in self._flattened.wrapped:
                free_gathered(shell)
