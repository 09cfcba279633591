"""The weights of a model in full precision, which are optimised and saved, and their gradients, summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardtune.errors import ModelError
from shardtune.parallel.buffers import Buffers, KeptBuffers
from shardtune.parallel.compiled_buffers import CompiledBuffers
from shardtune.parallel.full_precision import full_precision_parameters
from shardtune.parallel.gradient_sums import sum_parts, sum_whole
from shardtune.parallel.masters import Masters
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE, SUM_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.fsdp2 import initialise_root, keep_reduced_dtype
from shardtune.parallel.torch_private.operations import multiply_, norms_of
from shardtune.parallel.unit_calls import UnitCalls
from shardtune.parallel.whole_gradients import check_whole_gradients
from shardtune.parallel.whole_weights import WholeUnits, WholeWeights

_NORM_PIECE = 2**18
"""Numbers of a gradient that a CPU converts to fp64 at a time."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Weights:
    """A model's weights in full precision: updated by the optimizer, stored in checkpoints and exports.

    With FSDP2, or when the model computes in full precision, they are the model's own parameters. A single process
    that computes in half precision keeps them beside the model, with FSDP2's arithmetic: half-precision weights and
    gradients, gradients summed over micro-batches and applied in fp32. So does a rank with what it holds whole. What is
    not trained and loses nothing in half precision is held in that alone. In pure_bf16 all are the model's own, in
    bf16, and their gradients are summed in fp32 all the same.

    Args:
        root: the module that is called.
        model: the model inside it, whose names are used.
        precision: bf16 | pure_bf16 | fp16 | fp32 | fp64.
        ranks: of the run.
        reduce_each: reduce gradients over ranks after each micro-batch (less memory) and not only after the last.
        excluded_from_checkpoint: names of parameters that checkpoints leave out, because they are loaded from where
            training starts.
        partial: names of parameters that every tensor rank holds, and of whose gradient each computes a part.
        parts_of_units: whether modules inside units, of which tensor ranks have parts, are called by themselves.
        whole: how its methods get weights whole; None: as FSDP2 shards them, or not at all.

    Attributes:
        parameters: by name; of those that are sharded this rank's part.
        untrained: the model's parameters that its optimizer does not have, by name, once it has one.
        shapes: of the whole parameters, by name.
        starts: of parameters of which this rank has a range of numbers, in the order of memory: the first, by name.
        on_ranks: whether there are several ranks; otherwise `begin_micro_batch` has nothing to do.
        whole: how the model's methods get weights whole, outside of its forward.
        has_buffers: whether the model has persistent buffers, which forwards may change.
        hooked: the names of those with a hook of this object on their gradient.
        unit_calls: whether ranks gather the same units' weights since `zero_gradients`.
        compiled_buffers: those that a compiled forward must not change in place.
        replicates: whether ranks hold anything whole, parameters or buffers; otherwise `sync_replicated_gradients` has
            nothing to do.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        precision: str,
        ranks: Ranks,
        *,
        reduce_each: bool = False,
        excluded_from_checkpoint: Collection[str] = (),
        partial: Collection[str] = (),
        parts_of_units: bool = False,
        whole: WholeWeights | None = None,
    ) -> None:
        self._root = root
        self._model = model
        self._partial = partial
        self._excluded_from_checkpoint = excluded_from_checkpoint
        self._ranks = ranks
        self._reduce_each = reduce_each
        self._buffers = Buffers(model, ranks)
        self._sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._accumulates = False
        compute, master = COMPUTE_DTYPE[precision], MASTER_DTYPE[precision]
        self._master, self._sums = master, SUM_DTYPE[precision]
        self.unit_calls = UnitCalls(ranks)
        if isinstance(root, FSDPModule):
            whole = WholeUnits(root, ranks, compute, self._sharded, self.unit_calls, parts_of_units=parts_of_units)
            initialise_root(root)
        self.whole = whole or WholeWeights(root, ranks, compute)
        self.starts: dict[str, int] = {}
        self._computed = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in self._computed.items()}
        self._whole = [name for name, parameter in self._computed.items() if self._is_whole(name, parameter)]
        self.on_ranks = ranks.mesh is not None
        shared = self._uncompared = ranks.layout.tensor > 1
        self.has_buffers = bool(self._buffers.names)
        self.replicates = self.on_ranks and bool(self._whole or shared or self.has_buffers)
        self.parameters: dict[str, nn.Parameter] = dict(self._computed)
        self.untrained: dict[str, nn.Parameter] = {}
        self._masters = Masters(compute)
        self.hooked: dict[str, RemovableHandle] = {}
        full = full_precision_parameters(model, compute)
        for name in self._whole if compute != master else ():
            parameter = self._computed[name]
            if parameter.is_floating_point() and parameter.dtype != compute and parameter not in full:
                self.parameters[name] = self._masters.keep(name, parameter)
        self._sum_in_full()
        self._num_copies = {name: self._copies(name) for name in self.parameters}
        self.compiled_buffers = CompiledBuffers(model)
        self._watch_units()

    def _sum_in_full(self) -> None:
        """Let the gradients of weights that are held in half precision be summed in full precision.

        Within a backward pass autograd adds those of a weight that is used twice in half precision, as it does on the
        weights that FSDP2 gathers.
        """
        if self._master == self._sums:
            return
        for module in self._sharded:
            keep_reduced_dtype(module, self._sums)
        for name, parameter in self.parameters.items():
            if parameter.dtype != self._master:
                continue
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad_dtype = self._sums if is_sharded else None  # None: as autograd computes it
            if parameter.requires_grad and not is_sharded:
                widen = partial(_widen_gradient, self._sums)
                self.hooked[name] = parameter.register_post_accumulate_grad_hook(widen)

    def _watch_units(self) -> None:
        units = {module: name for name, module in self._model.named_modules()}
        names = {id(parameter): name for name, parameter in self._computed.items()}
        for module in self._sharded:
            self.unit_calls.watch(units.get(module, ""), module, names)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained now, by name."""
        return {name: self.parameters[name] for name, held in self._computed.items() if held.requires_grad}

    def begin_training(self) -> dict[str, nn.Parameter]:
        """The parameters for the optimizer, by name; they may be frozen and unfrozen later, and the others stay frozen.

        What is frozen later has no gradient, so nothing updates it, and keeps its name and the optimizer's state.
        """
        trained = self.trainable()
        self.untrained = {name: parameter for name, parameter in self._computed.items() if name not in trained}
        return trained

    def frozen(self) -> list[str]:
        """The names of those parameters of the optimizer that are not trained now."""
        return [name for name, held in self._computed.items() if not (held.requires_grad or name in self.untrained)]

    def freeze(self, names: Collection[str]) -> None:
        """Freeze these parameters of the optimizer, and train all its others."""
        for name, parameter in self._computed.items():
            if name not in self.untrained:
                parameter.requires_grad_(name not in names)

    def refuse_unfrozen(self) -> None:
        """Refuse to train a parameter that the optimizer does not have.

        Raises:
            ModelError: names it.
        """
        unfrozen = [name for name, parameter in self.untrained.items() if parameter.requires_grad]
        if unfrozen:
            raise ModelError(
                f"{', '.join(unfrozen[:3])}{', …' if len(unfrozen) > 3 else ''}: frozen when the model was built, so "
                "the optimizer does not have them, and requires_grad is True now: they would never be trained",
                where=unfrozen[0],
                remedy="let them be trainable when the model is built, and freeze them afterwards, by "
                "requires_grad_(False) in the worker's setup after super().setup(); then they may be unfrozen at any "
                "step",
            )

    def added(self) -> dict[str, nn.Parameter]:
        """The parameters that the model has got since this object was made, by name."""
        known = {id(parameter) for parameter in self._computed.values()}
        return {name: parameter for name, parameter in self._model.named_parameters() if id(parameter) not in known}

    def added_buffers(self) -> list[str]:
        """The names of the persistent buffers that the model has got since then."""
        return self._buffers.added()

    def refuse_added(self) -> None:
        """Refuse parameters and persistent buffers that the model has got since this object was made.

        It is called when no forward or backward pass is under way; gathered weights are freed.

        Raises:
            ModelError: names one.
        """
        self.unit_calls.second.ahead = False
        self.whole.free()
        if added := [*self.added()]:
            raise ModelError(
                f"the parameter {added[0]} was made after the model was built: the optimizer does not have it, nor do "
                "checkpoints and exports",
                where=added[0],
                remedy="make it in the constructor of its module, with the shape that it will have",
            )
        if added := self.added_buffers():
            raise ModelError(
                f"the buffer {added[0]} was made after the model was built: checkpoints and exports do not have it",
                where=added[0],
                remedy="register it in the constructor of its module as a tensor of the shape and dtype that it will "
                "have, and not as None; or leave it out of checkpoints: register_buffer(…, persistent=False)",
            )

    def gathered(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """The names of those among some tensors that are in the place of a sharded parameter while it is gathered."""
        given = {id(tensor) for tensor in tensors} - {id(parameter) for parameter in self._computed.values()}
        return [name for name, parameter in self._model.named_parameters() if id(parameter) in given]

    def names_of(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """The names of the model's parameters among tensors."""
        given = {id(tensor) for tensor in tensors}
        return [name for name, parameter in self._computed.items() if id(parameter) in given]

    def held_unsummed(self, names: Collection[str]) -> list[str]:
        """Those whose gradients are of a rank's own rows until an update or a clipping sums them over ranks."""
        return [name for name in self._whole if name in names] if self.on_ranks else []

    @torch.no_grad()
    def adopt(self, added: Mapping[str, nn.Parameter]) -> None:
        """Take over parameters and buffers that were made on each rank, after the model was sharded; all ranks call it.

        They stay whole, on every rank, with rank 0's values, and the objects that an optimizer may hold already. What
        the model no longer has is forgotten.

        Args:
            added: what `added` gives, alike on all ranks.
        """
        self._computed = dict(self._model.named_parameters())
        apart = self._masters.keep_only(self._computed)
        before = set(self._buffers.names)
        self._buffers = Buffers(self._model, self._ranks)
        fresh = [tensor for name, tensor in self._buffers.tensors().items() if name not in before]
        for tensor in (*added.values(), *fresh):
            tensor.data = tensor.data.to(self._ranks.device)
            if self.on_ranks and not isinstance(tensor, DTensor):
                self._ranks.share(tensor.data)
        self.parameters = {**self._computed, **apart}
        self._whole = [name for name, parameter in self._computed.items() if self._is_whole(name, parameter)]
        self.shapes = {name: self.shapes.get(name, parameter.shape) for name, parameter in self._computed.items()}
        self.shapes |= {name: parameter.shape for name, parameter in added.items()}
        self._num_copies = {name: self._copies(name) for name in self.parameters}
        self.has_buffers = bool(self._buffers.names)
        self.replicates = self.replicates or (self.on_ranks and bool(self._whole or self.has_buffers))

    def _own(self, left_out: Collection[str] = ()) -> dict[str, torch.Tensor]:
        everything = {**self.parameters, **self._buffers.tensors()}
        return {name: tensor for name, tensor in everything.items() if name not in left_out}

    def own_parts(self) -> dict[str, torch.Tensor]:
        """This rank's parts of parameters and persistent buffers by name, as they lie in memory."""
        return {name: local(tensor.detach()) for name, tensor in self._own().items()}

    def left_out_parts(self) -> dict[str, torch.Tensor]:
        """This rank's parts of what checkpoints leave out, as it is loaded from where training starts, by name."""
        left_out = self._excluded_from_checkpoint
        return {name: local(p.detach()) for name, p in self._computed.items() if name in left_out}

    def copy_buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the persistent buffers, for `restore_buffers`."""
        return {name: buffer.clone() for name, buffer in self._buffers.tensors().items()}

    @torch.no_grad()
    def restore_buffers(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Give the buffers the values of `copy_buffers`: what forwards have changed since counts no longer."""
        for name, buffer in self._buffers.tensors().items():
            buffer.copy_(copies[name])

    def keep_unsaved_buffers(self) -> KeptBuffers:
        """The buffers that are not persistent, as they are now."""
        return KeptBuffers(self._model)

    def buffer_marks(self) -> dict[str, torch.Tensor]:
        """A number for each buffer that forwards are not expected to change, by name, that changes with its values."""
        return self._buffers.marks()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name, as checkpoints hold them; all ranks call it."""
        return {name: self.to_checkpoint_layout(name, tensor) for name, tensor in self._own().items()}

    def checkpointed(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of the model holds: `tensors` without those that are loaded from where training starts."""
        return {
            name: self.to_checkpoint_layout(name, tensor)
            for name, tensor in self._own(self._excluded_from_checkpoint).items()
        }

    def checkpointed_bytes(self) -> int:
        """The size of that on all ranks together."""
        sizes = self._own(self._excluded_from_checkpoint)
        return sum(self.shapes.get(name, t.shape).numel() * t.element_size() for name, t in sizes.items())

    # The layout, in checkpoints, of tensors that are laid out like a parameter: itself, its gradient, a moment. FSDP2's
    # layout is that of checkpoints already.

    def to_checkpoint_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the layout of checkpoints, a DTensor of rows or whole on every rank; all ranks call it."""
        return tensor

    def from_checkpoint_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_checkpoint_layout`; all ranks call it."""
        return tensor

    def template(self, name: str) -> torch.Tensor:
        """A tensor in the checkpoint layout of a parameter; its values are irrelevant."""
        return self.parameters[name].detach()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load values into the weights from tensors in the layout of `checkpointed`; all ranks call it."""
        self.copy_masters_to_model()

    def in_rows(self) -> AbstractContextManager[None]:
        """Inside, the model's parameters have their whole shapes, and `tensors` gives them; all ranks enter it."""
        return nullcontext()

    def in_full(self) -> AbstractContextManager[None]:
        """Inside, the model's own parameters are in full precision, as `tensors` gives them."""
        return self._masters.in_place()

    def _is_whole(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether every rank holds all of a parameter."""
        return not isinstance(parameter, DTensor)

    def watch_buffers(self) -> None:
        """Note what buffers are before forwards of a user's, after which `agree_on_buffers` is called, on all ranks."""
        if self.replicates:
            self._buffers.watch()

    def agree_on_buffers(self) -> None:
        """Make buffers that a rank has changed since `watch_buffers` the same on all ranks."""
        self._buffers.agree()

    @property
    def overwritten_buffers(self) -> Sequence[str]:
        """The names of buffers that had other values on each rank when they last became those of rank 0."""
        return self._buffers.overwritten

    @contextmanager
    def noting_written(self, written: list[str]) -> Iterator[None]:
        """Inside, forwards: at the end the names of those weights are added that they have changed and that are lost.

        Forwards find weights gathered, or rounded from those in full precision, for themselves alone.
        """
        parts = set[int]()
        self._masters.note()
        set_anew = {id(parameter) for name, parameter in self._computed.items() if "base_layer" in name.split(".")}
        try:
            with self.whole.noting_written(parts, set_anew):
                yield
        finally:
            written += [name for name, parameter in self._computed.items() if id(parameter) in parts]
            written += self._masters.written()

    def watch_masters(self, on: bool) -> None:
        """Note, from now on, weights as they are after each update, or stop that."""
        self._masters.is_watched = on
        if on:
            self._masters.note()

    def unlike_masters(self) -> list[str]:
        """The names of weights that are rounded from full precision, and were changed since they were noted."""
        return self._masters.written()

    def begin_micro_batch(self, last: bool) -> None:
        """Prepare the forward of a micro-batch; after the backward of the last one gradients are reduced over ranks."""
        if self.replicates:
            self._buffers.watch()
        if isinstance(self._root, FSDPModule):
            self.unit_calls.filling.on = True
            self.unit_calls.second.ahead = False  # no pass through what was recorded follows
            reduce = last or self._reduce_each
            if not reduce and not self._accumulates:
                self._accumulates = True
                self._gather_each_once()
            self._root.set_requires_gradient_sync(reduce)

    def _gather_each_once(self) -> None:
        """Gather and free each unit: FSDP2 accumulates gradients only in units that have been gathered before.

        A unit that no forward calls would fail otherwise, in the backward pass of a micro-batch that is not the last.
        """
        for module in self._sharded:
            module.unshard()
            module.reshard()

    @torch.no_grad()
    def sync_replicated_gradients(self) -> None:
        """Synchronise replicated tensors over ranks, after the backward pass of a step's last micro-batch.

        That is: sum the gradients of replicated parameters, and agree on the buffers that forwards have changed. Once
        per step, because `.grad` accumulates.
        """
        self._buffers.agree()
        if self._ranks.mesh is None:
            return
        if self._uncompared:
            others = {name: each for name, each in self.trainable().items() if name not in self._partial}
            self._uncompared = not check_whole_gradients(others, self._ranks)
        if parts := [local(grad) for name in self._partial if (grad := self.parameters[name].grad) is not None]:
            sum_parts(parts, self._ranks)
        if whole := [self.parameters[name] for name in self._whole if self.parameters[name].requires_grad]:
            sum_whole(whole, self._sums, self._ranks)

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Copy changed weights to the model; to be called after each change of `parameters`.

        After a forward without a backward (the probe, an evaluation) FSDP2 keeps the root's weights gathered, and the
        next forward would take those instead of the changed ones.
        """
        if self.on_ranks:
            self.unit_calls.second.ahead = False  # what was recorded is of other weights
            self.whole.free()
        for computed, master in self._masters.pairs.values():
            computed.copy_(master)
        if self._masters.is_watched:
            self._masters.note()

    def note_states(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note what optimizers keep of parameters of which this rank has a part, for a user's methods."""

    def in_checkpoint_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor for the caller of a method: one that `note_states` has noted in the layout of checkpoints."""
        return tensor

    def restore_model(self) -> None:
        """Restore the model with its weights in full precision, and detach this object's hooks."""
        for hook in self.hooked.values():
            hook.remove()
        self._masters.restore(self._master)
        self.zero_gradients()

    def gradient_norm(self) -> float:
        """The Euclidean norm of the whole gradient of what the optimizer has, over all ranks, summed in fp64."""
        return math.sqrt(self._ranks.sum((), [self.gradient_square()])[0])

    @torch.no_grad()
    def gradient_square(self) -> torch.Tensor:
        """This rank's part of the square of that norm, an fp64 scalar.

        Each rank adds up the squares of its parts, each divided by the number of ranks that hold the same part, so that
        the sum over ranks counts every number once. Worked example on 2 shards x 2 tensor ranks: a matrix that both
        cut lies in 4 different parts, each counted whole; a norm's weight that is sharded and not cut lies in 2 parts,
        each on 2 ranks, so each rank counts half of its square; a scalar is on all 4, so each counts a quarter.
        """
        square = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        alike: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None or name in self.untrained:
                continue
            if (grad := local(parameter.grad)).numel():
                # On a CPU torch would convert all of what it is given.
                whole = grad.device.type != "cpu" or grad.dtype == torch.float64 or not grad.is_contiguous()
                pieces = [grad] if whole else grad.view(-1).split(_NORM_PIECE)
                alike.setdefault((self._num_copies[name], grad.device), []).extend(pieces)
        for (copies, device), grads in alike.items():
            if device.type == "cuda":  # without a copy of each gradient in fp64, which `vector_norm` makes
                norms = torch.stack(norms_of(grads, dtype=torch.float64))
            else:
                norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads])
            square += (norms.square().sum() / copies).to(square.device, non_blocking=True)
        return square

    def _copies(self, name: str) -> int:
        """How many ranks hold the same part of a parameter."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return self._ranks.world_size
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return self._ranks.world_size // math.prod(size for size, placement in sizes if not placement.is_replicate())

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        grads = [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]
        if factor != 1.0 and grads:
            multiply_(grads, factor)

    def zero_gradients(self) -> None:
        """Forget the gradients, and what ranks have done to compute them."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.on_ranks:
            self.unit_calls.clear()

    def showing_gradients(self) -> AbstractContextManager[None]:
        """Inside, a user's own loop finds gradients at the model's parameters, and what it does with them counts."""
        return self._masters.showing_gradients()

    def settle_gradients(self) -> None:
        """Take over what a user's own loop has done with gradients at the model's parameters."""
        self._masters.settle_gradients()

    def begin_backward(self) -> None:
        """Let a backward pass of a user's begin with the gradients that parameters have then: its own, or none."""

    def begin_update(self) -> None:
        """Let a step of an optimizer of a user's find the same gradients on all ranks; all ranks call it."""

    def end_update(self) -> None:
        """Note that a user's own loop has updated the weights: what it uses for the next update begins anew."""


def _widen_gradient(dtype: torch.dtype, parameter: torch.Tensor) -> None:
    """Keep a parameter's gradient in a wider dtype, to which autograd adds the later ones."""
    if parameter.grad is not None and parameter.grad.dtype != dtype:
        parameter.grad = parameter.grad.to(dtype)
