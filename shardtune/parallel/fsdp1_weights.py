"""The weights of a model that FSDP1 shards: ranges of numbers in training, rows in checkpoints and exports.

Worked example: a unit has A with shape [4, 3] and b with shape [8], on two ranks. FSDP1 joins them to twenty numbers,
A's twelve before b's eight, and cuts these into two pieces of ten:

    rank 0: A[0,0] A[0,1] A[0,2] A[1,0] ... A[2,2] A[3,0]
    rank 1: A[3,1] A[3,2] b[0] ... b[7]

So of A, in the order of memory, rank 0 has the range (0, 10) and rank 1 has (10, 12), which cuts a row in two; of b
they have (0, 0), none at all, and (0, 8). Checkpoints hold rows, dealt as FSDP2 does: of A rank 0 has rows 0 and 1,
the range (0, 6), and rank 1 has rows 2 and 3, (6, 12); of b they have (0, 4) and (4, 8). To write a checkpoint, row 2
and A[3,0] move from rank 0 to rank 1, and b[0] to b[3] from rank 1 to rank 0. In general a rank sends to another the
overlap of its own range before with the other's range after. Ranges of a parameter follow one another in the order of
ranks, so one collective for each parameter moves them. (FSDP1 also pads parameters, to aligned addresses and to equal
pieces; ranges are measured after it has cut, so padding is in none of them.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardtune.errors import ModelError
from shardtune.parallel.flat_operands import FlatOperands
from shardtune.parallel.flat_whole_weights import WholeFlatWeights
from shardtune.parallel.fsdp1 import FlatSharding, Flattening, Place, put, rank_in, row_ranges, rows
from shardtune.parallel.precision import COMPUTE_DTYPE, IN_FULL
from shardtune.parallel.torch_private.fsdp1 import (
    FlatParameter,
    drop_unreduced_gradient,
    flat_parameter,
    reduce_left_gradient,
    reduces_gradients,
    sum_gradients,
)
from shardtune.parallel.torch_private.operations import without_modes
from shardtune.parallel.weights import Weights

Ranges = Sequence[tuple[int, int]]
"""Per rank that shards a copy of the model: the range of a parameter's elements, in memory order."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter that is cut.

    Attributes:
        places: in the model.
        shape: of the whole.
        numbers: what FSDP1 gives each rank.
        rows: what each rank has in rows.
    """

    places: Sequence[Place]
    shape: torch.Size
    numbers: Ranges
    rows: Ranges


class FlatWeights(Weights):
    """The counterpart of `Weights` for FSDP1: `parameters` are FSDP1's, a range of elements on each rank.

    Three things differ from FSDP1's behaviour and agree with FSDP2's. FSDP1 divides gradients by the number of
    ranks; here the factor is one. Inside `no_sync` it accumulates the gradients of micro-batches in the compute dtype;
    here they are kept separately and accumulated in full precision until the last micro-batch. A parameter that no
    rank has used gets zeros as its gradient; here it gets none.

    Args:
        sharding: of a model in rows that have their values; they are converted here.
        model: the model inside the root, whose names are used.
        reduce_each: reduce gradients over ranks after each micro-batch.
        excluded_from_checkpoint: names of parameters that checkpoints leave out.
        masters: whether what ranks hold whole computes in half precision, with masters beside the model.
    """

    def __init__(
        self,
        sharding: FlatSharding,
        model: nn.Module,
        *,
        reduce_each: bool = False,
        excluded_from_checkpoint: Collection[str] = (),
        masters: bool = True,
    ) -> None:
        mesh = sharding.ranks.shard_mesh
        assert mesh is not None
        self._mesh = mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        self._quiet = ExitStack()
        self._held: dict[FullyShardedDataParallel, torch.Tensor] = {}
        self._swapped: dict[str, nn.Parameter] = {}
        self._refuses_reads = False
        self._flattened = Flattening(sharding, {parameter: name for name, parameter in model.named_parameters()})
        self._root_shell = self._flattened.wrapped[-1]
        self._pieces = self._measure(self._flattened.places, self._flattened.shapes)
        self._operands = WholeFlatWeights(sharding, self._flattened, COMPUTE_DTYPE[sharding.precision])
        self._states = WeakIdKeyDictionary()
        super().__init__(
            sharding.root,
            model,
            sharding.precision if masters else IN_FULL[sharding.precision],
            sharding.ranks,
            reduce_each=reduce_each,
            excluded_from_checkpoint=excluded_from_checkpoint,
            whole=self._operands,
        )
        self.replicates = self.on_ranks
        self.shapes |= self._flattened.shapes
        self.starts |= {name: piece.numbers[rank_in(self._mesh)][0] for name, piece in self._pieces.items()}
        with self._root_shell.no_sync():  # runs FSDP1's lazy initialisation, as a first forward does
            pass
        for shell in self._flattened.wrapped:
            sum_gradients(shell)
            if (flat := _trained(shell)) is not None:
                flat.register_post_accumulate_grad_hook(partial(self._add_held, shell))

    def _watch_units(self) -> None:
        self._flattened.note_calls({module: name for name, module in self._model.named_modules()}, self.unit_calls)

    def _measure(self, places: Mapping[str, list[Place]], shapes: Mapping[str, torch.Size]) -> dict[str, _Piece]:
        """The ranges of all ranks; they follow one another in the order of ranks, so lengths are exchanged alone."""
        mine = [module.get_parameter(key).numel() for (module, key), *_ in places.values()]
        counts: list[list[int]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(counts, mine, group=self._group)
        pieces = {}
        for number, name in enumerate(places):
            row = math.prod(shapes[name][1:])
            numbers = list(pairwise([0, *accumulate(count[number] for count in counts)]))
            by_row = [(first * row, last * row) for first, last in row_ranges(shapes[name], self._mesh)]
            pieces[name] = _Piece(places[name], shapes[name], numbers, by_row)
        return pieces

    def adopt(self, added: Mapping[str, nn.Parameter]) -> None:
        names = dict(self._model.named_parameters())
        if lost := [name for name in self._pieces if name in added or name not in names]:
            raise ModelError(
                f"FSDP1 has joined {lost[0]} with other parameters, so another one cannot take its place",
                where="on_weights_materialized",
                remedy='replace it in __init__, or use executor="fsdp2"',
            )
        super().adopt(added)

    def _is_whole(self, name: str, parameter: torch.Tensor) -> bool:
        return name not in self._pieces

    def _copies(self, name: str) -> int:
        return self._ranks.layout.replicate if name in self._pieces else super()._copies(name)

    # Gradients.

    def gradient_square(self) -> torch.Tensor:
        with without_modes(FlatOperands):  # in a user's method gradients are this rank's parts, as here
            return super().gradient_square()

    def scale_gradients(self, factor: float) -> None:
        with without_modes(FlatOperands):
            super().scale_gradients(factor)

    def begin_micro_batch(self, last: bool) -> None:
        super().begin_micro_batch(last)
        if not self._refuses_reads:
            self._refuses_reads = True
            self._refuse_reads()
        self._flattened.begin_micro_batch()
        self._quiet.close()
        self._hold()
        if not (last or self._reduce_each):
            self._quiet.enter_context(self._root_shell.no_sync())

    def _refuse_reads(self) -> None:
        """Let a backward pass refuse a loss that has read a part of a parameter, in the model's forward.

        Modules read views of what FSDP1 has joined, so a parameter itself has no gradient of its own in a graph.
        """
        for name in self._pieces:
            if (parameter := self.parameters[name]).requires_grad:
                parameter.register_hook(partial(_refuse_read, name))

    @torch.no_grad()
    def _hold(self) -> None:
        """Move the unreduced gradients of a micro-batch into sums in full precision."""
        for shell in self._flattened.wrapped:
            flat = _trained(shell)
            if flat is None or flat.grad is None or flat.grad.numel() == flat.numel():
                continue
            grad = flat.grad.to(self._master)
            self._held[shell] = self._held[shell].add_(grad) if shell in self._held else grad
            drop_unreduced_gradient(flat)

    def _add_held(self, shell: FullyShardedDataParallel, flat: torch.Tensor) -> None:
        """Before FSDP1 reduces a gradient: add those of earlier micro-batches."""
        held = self._held.pop(shell, None) if reduces_gradients(shell) else None
        if held is not None:
            assert flat.grad is not None
            flat.grad.data = held.add_(flat.grad)

    @torch.no_grad()
    def sync_replicated_gradients(self) -> None:
        with without_modes(FlatOperands):
            self._sync_gradients()

    def _sync_gradients(self) -> None:
        for shell in self._flattened.wrapped:
            if _trained(shell) is not None and reduces_gradients(shell):
                reduce_left_gradient(shell)
        self._quiet.close()
        names = [name for name in self._pieces if self.parameters[name].requires_grad]
        for name in self._pieces.keys() - names:  # frozen since: FSDP1 computes gradients of all that it has joined
            self.parameters[name].grad = None
        self._check_reduced()
        used = {name for shell in self._flattened.shells for name in shell.used}
        flags = torch.tensor([name in used for name in names], dtype=torch.uint8, device=self._ranks.device)
        if names:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        for name, by_any in zip(names, flags.tolist(), strict=True):
            parameter = self.parameters[name]
            if not by_any:
                parameter.grad = None
            elif parameter.grad is None:  # none of its numbers are here; the optimizer's state of it has no size
                parameter.grad = torch.zeros_like(parameter)
        super().sync_replicated_gradients()

    def _check_reduced(self) -> None:
        """FSDP1 reduces a unit's gradient in a backward pass through that unit, and only there."""
        if not self._held:
            return
        shell = self._flattened.shells[self._flattened.wrapped.index(next(iter(self._held)))]
        raise ModelError(
            "the last micro-batch of a step left out a part of the model that an earlier one used "
            f"({next(iter(shell.watched))}), so FSDP1 has not summed its gradient over ranks",
            where="actor.training_backend: fsdp1",
            remedy="set actor.fsdp_config.reduce: every, or actor.training_backend: fsdp",
        )

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._held.clear()
        for shell in self._flattened.shells:
            shell.used.clear()

    def begin_backward(self) -> None:
        # FSDP1 adds to the gradient of the pass before, in the memory that parameters' gradients are views of.
        for shell in self._flattened.wrapped:
            if (flat := _trained(shell)) is not None:
                flat.grad = None
        for shell in self._flattened.shells:
            shell.used.clear()

    def held_unsummed(self, names: Collection[str]) -> list[str]:
        return [*names]

    @torch.no_grad()
    def begin_update(self) -> None:
        # A forward takes those gradients away of which a rank has no numbers, and earlier backward passes gave them.
        names = [name for name, piece in self._pieces.items() if any(first == end for first, end in piece.numbers)]
        if not names:
            return
        with without_modes(FlatOperands):
            parameters = [self.parameters[name] for name in names]
            used = [parameter.grad is not None and parameter.numel() > 0 for parameter in parameters]
            flags = torch.tensor(used, dtype=torch.uint8, device=self._ranks.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            for parameter, by_any in zip(parameters, flags.tolist(), strict=True):
                if not parameter.numel():
                    parameter.grad = torch.zeros_like(parameter) if by_any else None

    def end_update(self) -> None:
        for shell in self._flattened.shells:
            shell.begin = self._begin_update

    def _begin_update(self) -> None:
        """In the first backward pass after an update: gradients that are still there count, others were set to None."""
        for shell in self._flattened.shells:
            shell.begin = None
            shell.used = {name for name in shell.watched if self.parameters[name].grad is not None}

    def restore_model(self) -> None:
        super().restore_model()
        self._flattened.undo()

    # Rows.

    def added(self) -> dict[str, nn.Parameter]:
        in_rows = {id(parameter) for parameter in self._swapped.values()}
        return {name: parameter for name, parameter in super().added().items() if id(parameter) not in in_rows}

    def note_states(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        with without_modes(FlatOperands):
            for optimizer in optimizers:
                for name in self._pieces:
                    parameter = self.parameters[name]
                    for state in optimizer.state.get(parameter, {}).values():
                        if isinstance(state, torch.Tensor) and state.ndim and state.shape == parameter.shape:
                            self._states[state] = name
                            self._operands.note(state)

    def in_checkpoint_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        with without_modes(FlatOperands):
            name = self._states.get(tensor)
            return tensor if name is None else self.to_checkpoint_layout(name, tensor)

    def to_checkpoint_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        piece = self._pieces.get(name)
        if piece is None or tensor.shape != self.parameters[name].shape:
            return tensor
        if name in self._swapped and tensor is self.parameters[name]:
            return self._swapped[name]
        local = self._move(tensor, piece.numbers, piece.rows)
        return rows(local.view(-1, *piece.shape[1:]), self._mesh, piece.shape, requires_grad=False)

    def from_checkpoint_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        piece = self._pieces.get(name)
        if piece is None or not isinstance(tensor, DTensor) or tensor.shape != piece.shape:
            return tensor
        return self._move(tensor.to_local(), piece.rows, piece.numbers)

    def template(self, name: str) -> torch.Tensor:
        piece, parameter = self._pieces.get(name), self.parameters[name].detach()
        if piece is None:
            return parameter
        first, last = row_ranges(piece.shape, self._mesh)[rank_in(self._mesh)]
        return rows(parameter.new_empty(last - first, *piece.shape[1:]), self._mesh, piece.shape, False).detach()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._pieces:
                self.parameters[name].copy_(self.from_checkpoint_layout(name, tensor))
        super().take(tensors)

    @contextmanager
    def in_rows(self) -> Iterator[None]:
        swapped = {name: self.to_checkpoint_layout(name, self.parameters[name]) for name in self._pieces}
        before = {name: self.parameters[name] for name in self._pieces}
        for name, parameter in swapped.items():
            assert isinstance(parameter, nn.Parameter)
            parameter.requires_grad_(before[name].requires_grad)
            put(self._pieces[name].places, parameter)
            self._swapped[name] = parameter
        try:
            yield
        finally:
            self._swapped.clear()
            for name, parameter in before.items():
                put(self._pieces[name].places, parameter)

    def _move(self, local: torch.Tensor, before: Ranges, after: Ranges) -> torch.Tensor:
        """From this rank's range of numbers to its range after: [numbers], bit by bit; a collective."""
        rank, size = rank_in(self._mesh), local.element_size()
        given = [count * size for count in _overlaps(before[rank], after)]
        taken = [count * size for count in _overlaps(after[rank], before)]
        source = local.detach().contiguous().view(-1).view(torch.uint8)
        target = torch.empty(sum(taken), dtype=torch.uint8, device=local.device)
        dist.all_to_all_single(target, source, taken, given, group=self._group)
        return target.view(local.dtype)


def _refuse_read(name: str, _: torch.Tensor) -> NoReturn:
    raise ModelError(
        f"the loss reads the parameter {name} itself, of which each rank has a part",
        where="actor.training_backend: fsdp1",
        remedy="call the module that has it as a whole (model.layer(x)), or compute this in its forward and return it",
    )


def _overlaps(mine: tuple[int, int], others: Ranges) -> list[int]:
    return [max(0, min(mine[1], last) - max(mine[0], first)) for first, last in others]


def _trained(shell: FullyShardedDataParallel) -> FlatParameter | None:
    """What a module of FSDP1 has joined, if it is trained."""
    flat = flat_parameter(shell)
    return flat if flat is not None and flat.requires_grad else None
