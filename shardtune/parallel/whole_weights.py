"""Weights that are used whole outside of the model's forward: in its methods, and while it generates."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin

from shardtune.parallel.direct_use import ShardedOperands
from shardtune.parallel.free_memory import free_bytes
from shardtune.parallel.generation import alone
from shardtune.parallel.parts import gather_for_parts
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.same_call import SameCall
from shardtune.parallel.torch_private.fsdp2 import (
    changed_gathered,
    gathered_parameters,
    in_backward,
    is_at_rest,
    without_hooks,
)
from shardtune.parallel.torch_private.modules import is_compiled
from shardtune.parallel.torch_private.operations import without_modes
from shardtune.parallel.torch_private.tensors import version_of
from shardtune.parallel.unit_calls import UnitCalls


class WholeWeights:
    """How methods of a model get its weights whole; of one whose ranks hold them whole anyway.

    Args:
        root: the module that is called.
        ranks: of the run.
        compute: the dtype of the computation.

    Attributes:
        stepping: whether a user's optimizer is in its step.
        is_alone: whether forwards involve no other rank now, as the model generates with gathered weights.
        gather_to_generate: whether all weights are gathered while the model generates; None: where they take at most
            half of the memory that is free.
    """

    def __init__(self, root: nn.Module, ranks: Ranks, compute: torch.dtype) -> None:
        self._root = root
        self._ranks = ranks
        self._compute = compute
        self._same_call = SameCall(ranks)
        self._generating = 0
        self.stepping = self.is_alone = False
        self.gather_to_generate: bool | None = None

    # What a way of sharding defines.

    def _are_sharded(self) -> bool:
        """Whether weights are sharded, and not gathered for a forward."""
        return False

    def _operands(self) -> AbstractContextManager[object]:
        """Inside, operations get weights whole, where they use them."""
        return nullcontext()

    def _gathered(self) -> AbstractContextManager[object]:
        """Inside, all weights are gathered, and forwards leave them so."""
        return nullcontext()

    def _count(self) -> int:
        """How many numbers the sharded weights have together; called where none is gathered."""
        return 0

    def free(self) -> None:
        """Free gathered weights; the next use gathers them again."""

    def is_part(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a copy or state of this rank's part of a weight, in a shape of its own."""
        return False

    @contextmanager
    def noting_written(self, written: set[int], set_anew: Collection[int]) -> Iterator[None]:
        """Inside, the `id`s of this rank's parts of weights that forwards change while they are gathered are added.

        Args:
            written: to which they are added.
            set_anew: the `id`s of those that forwards write with the same values, as PEFT parametrizes them anew.
        """
        yield

    # What is common.

    @contextmanager
    def method(self, name: str) -> Iterator[None]:
        """Inside, a method runs outside of the model's forward: operations get weights whole, where they use them.

        Args:
            name: of the method, which all ranks have to call.
        """
        if not self._are_sharded() or self._generating:
            yield
            return
        if not self._same_call.running:
            self.free()
        with self._same_call.method(name):
            if name == "generate":
                self._same_call.compare(name)
                with self.generating() as whole, nullcontext() if whole else self._operands():
                    yield
                return
            with self._operands():
                yield

    @contextmanager
    def generating(self) -> Iterator[bool]:
        """Inside, the model generates, on all ranks; whether its weights are gathered meanwhile, once for all tokens.

        That is as `gather_to_generate` has it, and then each rank goes on by itself. Otherwise each token gathers them
        anew, and the ranks keep step. It takes the memory of the whole model in the dtype of the computation.
        """
        whole = not self._generating and self._can_be_gathered()
        if whole:
            self.free()  # what is gathered may be from before weights were changed in place
            whole = self._same_call.agree(self._gathers())
        self._generating += 1
        try:
            if whole:
                models = [module for module in self._root.modules() if isinstance(module, GenerationMixin)]
                with self._gathered(), alone(models):
                    self.is_alone = True
                    yield True
            else:
                yield False
        finally:
            self._generating -= 1
            self.is_alone &= not whole

    def free_after_part(self, *_: object) -> None:
        """In a method, free the root's weights, which the method may change in place; `generate` only reads them."""
        if self._same_call.running and not self._generating and not torch.is_grad_enabled():
            self.free()

    def _can_be_gathered(self) -> bool:
        """Whether weights are sharded, and a forward that has them all involves no other rank."""
        layout = self._ranks.layout
        apart = layout.tensor == layout.sequence == 1 and self._ranks.expert_mesh is None
        return self._ranks.mesh is not None and apart and self._are_sharded()

    def _gathers(self) -> bool:
        if self.gather_to_generate is not None:
            return self.gather_to_generate
        here = 1 if self._ranks.device.type == "cuda" else min(self._ranks.world_size, os.cpu_count() or 1)
        return 2 * here * self._count() * self._compute.itemsize <= free_bytes(self._ranks.device)


class WholeUnits(WholeWeights):
    """Of a model that FSDP2 shards.

    Args:
        root: sharded, with its units.
        ranks: of the run.
        compute: the dtype of the computation.
        units: what is sharded, the root too.
        unit_calls: of the run.
        parts_of_units: whether modules inside units, of which tensor ranks have parts, are called by themselves.
    """

    def __init__(
        self,
        root: FSDPModule,
        ranks: Ranks,
        compute: torch.dtype,
        units: Sequence[FSDPModule],
        unit_calls: UnitCalls,
        *,
        parts_of_units: bool = False,
    ) -> None:
        self._sharded: FSDPModule = root
        assert isinstance(root, nn.Module)
        super().__init__(root, ranks, compute)
        self._units = units
        self._unit_calls = unit_calls
        self._parts = gather_for_parts(self._sharded, self._same_call.compare, self.free_after_part)
        if parts_of_units and ranks.layout.tensor > 1:
            self._parts.gather_inside_units()

    def _are_sharded(self) -> bool:
        return is_at_rest(self._sharded)

    def _operands(self) -> AbstractContextManager[object]:
        if not self._are_sharded():
            return nullcontext()
        used = self._unit_calls.filling.used.add
        units = self._units if self._ranks.layout.tensor > 1 else ()
        return ShardedOperands(self._sharded, self._compute, self._same_call.compare, used, units)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        with without_modes(ShardedOperands):
            try:
                for unit in self._units:
                    unit.unshard()
                self._parts.paused = True
                with without_hooks(self._sharded):
                    yield
            finally:
                self._parts.paused = False
                self.free()

    @contextmanager
    def noting_written(self, written: set[int], set_anew: Collection[int]) -> Iterator[None]:
        def note(unit: nn.Module, *_: object) -> None:
            """By value: writes through `.data` leave a version as it was."""
            if not in_backward():
                assert isinstance(unit, FSDPModule)
                written.update(map(id, changed_gathered(unit)))

        before = self._versions()
        # Before FSDP2's own hook, which frees the weights; a compiled unit would be compiled again for it.
        plain = [unit for unit in self._units if isinstance(unit, nn.Module) and not is_compiled(unit)]
        hooks = [unit.register_forward_hook(note, prepend=True) for unit in plain]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        now = self._versions()  # by version: a copy that follows a weight is equal to it at first
        written.update(part for part, version in now.items() if part not in set_anew and version != before.get(part, 0))

    def _versions(self) -> dict[int, int]:
        """How often gathered weights have been changed in place, by the `id` of this rank's part of each."""
        pairs = [pair for unit in self._units for pair in gathered_parameters(unit).values()]
        return {id(part): version_of(whole) for whole, part in pairs}

    def _count(self) -> int:
        return sum(parameter.numel() for parameter in self._root.parameters() if isinstance(parameter, DTensor))

    def free(self) -> None:
        for unit in self._units:
            unit.reshard()
