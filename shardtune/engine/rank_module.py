"""A module that lives on one rank: built, called, moved, saved and exported there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin

from shardtune.config.rank_layout import Layout
from shardtune.engine.attributes import Attributes
from shardtune.engine.checkpoint import is_saved_state, load_state, save_state, trained_names
from shardtune.engine.cuda_alias import PrintedDevice
from shardtune.engine.exports import Exports
from shardtune.engine.frozen_weights import FrozenWeights
from shardtune.engine.full_state import full_state, is_weight_directory, load_directory, save_directory
from shardtune.engine.generation import let_generate
from shardtune.engine.gradients import Gradients
from shardtune.engine.initial_weights import load_first_weights
from shardtune.engine.late_tensors import LateTensors, refusing_copies
from shardtune.engine.module_layout import gathered_units, sequence_forward, share_matrices
from shardtune.engine.nn import (
    BaseTrainModule,
    RankContext,
    crosses_borders,
    in_call,
    naming_own_processor,
    set_rank_context,
    unwrapped,
)
from shardtune.engine.offload import Memory, optimizers_of
from shardtune.engine.pickling import detached
from shardtune.engine.push import Facts, Form, Names, Receiver, copy_parts, facts_of, forms_of, names_between, stream
from shardtune.engine.split_arguments import Part
from shardtune.engine.stops import Stops
from shardtune.parallel.parts import parts_of
from shardtune.parallel.precision import COMPUTE_DTYPE, IN_FULL, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard import shard_model
from shardtune.parallel.torch_private.fsdp2 import forget_iteration, is_at_rest
from shardtune.parallel.torch_private.operations import tree_map_only
from shardtune.parallel.torch_private.tensors import quieten_redistribution
from shardtune.parallel.unfit_parameters import check_trained
from shardtune.parallel.weights import Weights
from shardtune.training.build.model import share_values

logger = logging.getLogger(__name__)

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
EXPORT_BYTES = 32 << 20
"""Tensors of an export that are sent together."""


@dataclass(frozen=True, slots=True)
class Order:
    """The specification of a module to build.

    Attributes:
        module: on the meta device or real; a train module, or one inside a model of PEFT.
        layout: of the engine.
        precision: of the computation: bf16 | fp16 | fp32 | fp64.
        seed: of randomly initialised weights.
        gather_to_generate: of `TrainEngine`.
    """

    module: nn.Module
    layout: Layout
    precision: str
    seed: int
    gather_to_generate: bool | None = None


def precision_of(module: nn.Module) -> str:
    """The precision of most of a module's parameters."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel()
    return next((PRECISIONS[dtype] for dtype, _ in counts.most_common() if dtype in PRECISIONS), "fp32")


def trains(kind: type[BaseTrainModule]) -> bool:
    """Whether a class defines `on_weights_materialized`; otherwise its module is frozen."""
    return kind.on_weights_materialized is not BaseTrainModule.on_weights_materialized


class RankModule:
    """A module on one rank; every method is called on all ranks alike.

    Args:
        order: the specification.
        ranks: of the engine.
        stops: at which a call can be left.
    """

    def __init__(self, order: Order, ranks: Ranks, stops: Stops) -> None:
        self._module, self._prefix = unwrapped(order.module)
        self._ranks, self._stops = ranks, stops
        self._memory = Memory(self._module, ranks.device)
        self._reported: set[str] = set()
        self._unsummed: set[str] = set()
        self._exports = Exports()
        self._receiver: Receiver | None = None
        kind = type(self._module)
        trained = trains(kind)
        if not trained:
            self._module.requires_grad_(False)
        share_values(self._module, ranks)
        sequence = sequence_forward(self._module, ranks)
        model_parallel = share_matrices(self._module, ranks)
        units = gathered_units(self._module)
        precision, layout = order.precision, order.layout
        master = MASTER_DTYPE[precision]
        if trained and ranks.mesh is not None:  # on one rank PyTorch and the user's optimizer do what they can
            check_trained(self._module, precision, on_ranks=True)
        attributes = {name: dict(own) for name, p in self._module.named_parameters() if (own := vars(p))}
        hold = shard_model(self._module, units, ranks, precision)
        self.notes = load_first_weights(self._module, self._prefix, ranks, master, order.seed)
        if sequence is not None and sequence.rings:
            self.notes.append("sequences are shared by ring attention")
        # A user's optimizer holds the module's own parameters: none of them has a separate master copy.
        self._weights = (
            hold(self._module, partial=model_parallel.partial, masters=False)
            if layout.flat and ranks.mesh is not None
            else Weights(
                self._module,
                self._module,
                IN_FULL[precision],
                ranks,
                partial=model_parallel.partial,
                parts_of_units=True,
            )
        )
        for name, own in attributes.items():  # as of a class that marks those without weight decay
            vars(self._weights.parameters[name]).update(own)
        if layout.tensor > 1:
            quieten_redistribution()
        self._compute = COMPUTE_DTYPE[precision]
        self._weights.whole.gather_to_generate = order.gather_to_generate
        if isinstance(self._module, GenerationMixin):  # other methods are called by the engine
            let_generate(self._module, self._generating)
        self._gradients = Gradients(self._weights, ranks, model_parallel.partial, self._reach)
        self._sequence = sequence
        set_rank_context(
            self._module, RankContext(ranks, self._weights, 1.0 / (layout.num_data_ranks * layout.sequence))
        )
        if sequence is not None:
            sequence.probe_assumptions(ranks.device, next(d for d, name in PRECISIONS.items() if name == precision))
            self._weights.copy_masters_to_model()
        self._module.train(trained)
        self._reach_before_forwards(units)
        self._attributes = Attributes(self._module, ranks, self._weights.whole.is_part)
        self._late = LateTensors(self._module, self._weights, self.name, ranks)
        self._late.note_hooks()
        with self._as_printed(), self._weights.whole.method("on_weights_materialized"):
            self._module.on_weights_materialized()
        self._late.check_hooks()
        self.notes += self._late.adopt(ranks)
        self._late.check_optimizers("on_weights_materialized")
        self._trained = trained_names(self._module, self._weights)  # grows: what is frozen later is saved all the same
        self._weights.copy_masters_to_model()
        self._frozen = FrozenWeights(self._weights, ranks, self._trained)

    def _reach(self, *_: object) -> None:
        """Reach a place at which the ranks may leave a call."""
        self._stops.reach(apart=self._weights.whole.is_alone)

    def _reach_before_forwards(self, units: Collection[nn.Module]) -> None:
        """Let forwards of the module, and of parts outside of one, be such places."""
        module = self._module
        if not self._stops.remote:
            return

        def before_part(*_: object) -> None:
            assert isinstance(module, FSDPModule)
            if is_at_rest(module):
                self._reach()

        parts = {*parts_of(module, units), *units} - {module} if isinstance(module, FSDPModule) else ()
        for part in parts:
            part.register_forward_pre_hook(before_part, prepend=True)
        module.register_forward_pre_hook(self._reach, prepend=True)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with self._weights.whole.method("generate"):
            yield
        self._stops.end_apart()

    @contextmanager
    def _as_printed(self) -> Iterator[None]:
        """Inside, "cuda" is the engine's device."""
        device = self._ranks.device
        with (
            naming_own_processor(),
            refusing_copies(),
            torch.cuda.device(device) if device.type == "cuda" else PrintedDevice(device),
        ):
            yield

    @property
    def name(self) -> str:
        """The name of the user's class."""
        return type(self._module).__name__.removeprefix("FSDP")

    def call(self, name: str, part: Part, copy: bool) -> object:
        """Run a method on this rank's part of a call; a rank without samples has no result."""
        self.wake()
        share = None if part.num_tokens is None or self._sequence is None else self._sequence.share(part.num_tokens)
        self._weights.unit_calls.clear()
        self._weights.note_states(optimizers_of(self._module).values())
        try:
            with ExitStack() as stack:
                stack.enter_context(self._exports.watching(self._weights, self._ranks))
                stack.enter_context(self._as_printed())
                stack.enter_context(self._gradients.counted(part.share, part.shared))
                stack.enter_context(self._gradients.stepping())
                stack.enter_context(self._weights.whole.method(name))
                stack.enter_context(in_call(self._module, part.share, part.idle, share))
                if share is not None and self._sequence is not None:
                    stack.enter_context(self._sequence.sharing(share))
                if self._module.training:
                    self._weights.begin_micro_batch(last=True)
                self._weights.watch_buffers()
                self._late.note_hooks()
                kwargs = dict(part.kwargs)
                if "weights" in kwargs:  # a tensor, or one for each micro-batch
                    kwargs["weights"] = tree_map_only(torch.Tensor, self._on_device, kwargs["weights"])
                method = self._module if name == "forward" else getattr(self._module, name)
                value = detached(method(*part.args, **kwargs), self._weights.in_checkpoint_layout, copy=copy)
            if share is not None and self._gradients.passed and not crosses_borders(self._module):
                self._report_borders(name, part)
            if self._ranks.mesh is not None and (unsummed := self._gradients.unsummed()):
                self._report_unsummed(name, unsummed[0])
        finally:
            self._weights.copy_masters_to_model()  # changes of the weights take effect in the next forward
        self._late.check_none(name)
        self._late.check_hooks()
        self._late.check_optimizers(name)
        return None if part.idle else value

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._ranks.device)

    def _report_borders(self, name: str, part: Part) -> None:
        """Report, once for a method, that the targets behind the borders between ranks are not trained."""
        if name in self._reported or not self._ranks.is_main:
            return
        self._reported.add(name)
        borders = self._ranks.layout.sequence - 1
        logger.warning(
            "%s.%s: the %d tokens of each sequence are divided among %d ranks, and the targets after the %s between "
            "them are not trained unless the method fetches them: labels = self.next_tokens(input_ids), in place of "
            "input_ids[:, 1:], with the logits of all tokens",
            self.name,
            name,
            part.num_tokens,
            self._ranks.layout.sequence,
            "border" if borders == 1 else f"{borders} borders",
        )

    def _report_unsummed(self, name: str, tensor: torch.Tensor) -> None:
        """Report, once for a method, that ranks have parts of the gradient of an argument that all have whole."""
        if name in self._unsummed or not self._ranks.is_main:
            return
        self._unsummed.add(name)
        logger.warning(
            "%s.%s: .grad of the argument %s, which is not divided among ranks, is of this rank's samples alone, and "
            "other ranks have the rest; after the last backward(): torch.distributed.all_reduce(argument.grad)",
            self.name,
            name,
            list(tensor.shape),
        )

    def called_units(self) -> int:
        """`Outcome.units` of the last call."""
        return self._weights.unit_calls.called()

    def refuse_other_units(self) -> None:
        """Refuse the last call, in which ranks have called other units; every rank calls it.

        Raises:
            ModelError: always.
        """
        try:
            self._weights.unit_calls.refuse()
        finally:  # what FSDP has noted of the forwards differs between ranks, and would guide the next backward pass
            self.recover()

    def recover(self) -> None:
        """Reset after an exception in a forward or backward; gradients are discarded."""
        if isinstance(self._module, FSDPModule):
            with suppress(AttributeError):  # before a first forward there is nothing to reset, and torch raises
                forget_iteration(self._module)
        self._gradients.discard()
        self._weights.copy_masters_to_model()

    def train(self, mode: bool) -> None:
        self._module.train(mode)

    def sleep(self) -> None:
        if not self._memory.is_away:
            self._weights.copy_masters_to_model()
            self._memory.leave()

    def make_room(self) -> None:
        """Free memory for the turn of another engine, where it needs that."""
        if not self._memory.is_away:
            self._weights.copy_masters_to_model()
            self._memory.make_room()

    def to_host(self) -> None:
        """Move the module from the GPU to host memory."""
        if self._ranks.device.type == "cuda":
            self.sleep()

    def wake(self) -> None:
        self._memory.come_back()

    def _prepare_to_read(self, method: str) -> None:
        """Before the whole module is read: buffers are what all ranks have of them.

        Args:
            method: of the engine, which reads it.
        """
        self.wake()
        self._late.check_none(method, ran=False)
        self._weights.agree_on_buffers()

    def memory(self) -> int:
        return self._memory.held()

    def save(self, folder: str) -> None:
        self._prepare_to_read("save")
        self._trained |= trained_names(self._module, self._weights) | self._frozen.changed()
        save_state(Path(folder), self._module, self._weights, self._attributes, self._trained)

    def load(self, folder: str) -> None:
        self.wake()
        self._exports.spoil()
        self._late.check_none("load", ran=False)
        if is_saved_state(Path(folder)) or not is_weight_directory(Path(folder)):
            changed = self._frozen.changed()
            now = self._trained | trained_names(self._module, self._weights) | changed
            self._trained = now | load_state(Path(folder), self._module, self._weights, self._attributes, now)
        else:
            load_directory(self._module, self._weights, Path(folder))

    def save_pretrained(self, folder: str, dtype: torch.dtype | None) -> None:
        self._prepare_to_read("save_pretrained")
        save_directory(self._module, self._weights, Path(folder), dtype, self._ranks)

    def export(self, number: int, dtype: torch.dtype | None) -> None:
        """Start an export of all weights, under a number of its own."""
        self._prepare_to_read("named_tensors")
        self._exports.begin(number, full_state(self._module, self._weights, self._prefix, dtype))

    def export_next(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """The next weights of an export; empty at its end."""
        self.wake()
        found: list[tuple[str, torch.Tensor]] = []
        size = 0
        with torch.no_grad():
            for name, tensor in self._exports.rest(number, self.name):
                found.append((name, tensor.detach().to("cpu", copy=True)))
                size += tensor.nbytes
                if size >= EXPORT_BYTES:
                    break
        return found

    def push_facts(self) -> Facts:
        return facts_of(self._module)

    def push(self, number: int, names: Names, dtype: torch.dtype | None) -> dict[str, Form] | None:
        """Start an export for another engine; returns the forms of what comes, where they are known."""
        self._prepare_to_read("push_weights")
        self._exports.begin(number, stream(self._module, self._weights, self._prefix, names, dtype))
        return forms_of(self._module, self._weights, names)

    def receive(self, names: Names, forms: dict[str, Form] | None) -> None:
        """Start to take weights from another engine."""
        self.wake()
        self._exports.spoil()
        self._receiver = Receiver(self._module, self._prefix, self._weights, names, forms)

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        assert self._receiver is not None
        for name, whole in tensors:
            self._receiver.put(name, whole)

    def end_receive(self, complete: bool) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close(complete=complete)

    def push_here(self, number: int, other: RankModule, dtype: torch.dtype | None) -> None:
        """All weights to a module on the same ranks."""
        names = names_between(self.push_facts(), other.push_facts())
        other._exports.spoil()
        self.wake()
        other.wake()
        alike = names != "exported" and self.push_facts().adapted == other.push_facts().adapted
        if alike and self._ranks.layout == other._ranks.layout and copy_parts(self._weights, other._weights, dtype):
            return
        other.receive(names, self.push(number, names, dtype))
        complete = False
        try:
            for pair in self._exports.rest(number, self.name):
                other.take([pair])
            complete = True
        finally:
            self.stop_export(number)
            other.end_receive(complete)

    def stop_export(self, number: int) -> None:
        self._exports.end(number)

    def end(self) -> None:
        self._memory.forget()
