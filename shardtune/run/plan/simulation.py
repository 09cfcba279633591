"""One optimizer step of a recipe as its first rank computes it, without memory: the package's own code, shapes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.batch import Batch, PackedBatch
from shardtune.checkpoint.quantized.read import holds_only
from shardtune.checkpoint.quantized.scheme import MXFP4, quantization_of
from shardtune.checkpoint.weight_files import has_weights, stored_dtype
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.models.adapter import Adapter, AdapterRoot, WeightSource
from shardtune.models.distillation import Distillation, TeacherLogits, TopTokens
from shardtune.models.lora.nf4 import coded_sizes
from shardtune.models.pretrained import settings_directory
from shardtune.models.recipe_hooks import Hooks
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.optim.build import build_optimizer, check_optimizer
from shardtune.optim.low_bit import LowBitOptimizer
from shardtune.optim.quantized_state import chunks, codes, full_dtype
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks, close_group, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.parallel.torch_private.processes import open_group_of_one
from shardtune.parallel.torch_private.recomputation import unchecked_recomputation
from shardtune.parallel.weights import Weights, local
from shardtune.run.plan.by_depth import Shallow
from shardtune.run.plan.known_shapes import KnownShapes
from shardtune.run.plan.layer_stacks import Stack, cut, stacks_of
from shardtune.run.plan.ledger import CPU, GATHERED, Ledger, as_on_cuda
from shardtune.run.plan.timeline import Change, fullest
from shardtune.training.build.lora import adapt, frozen_dtype, keeps_base
from shardtune.training.build.model import build_empty, freeze
from shardtune.training.build.teacher import ShardedTeacher
from shardtune.training.step import Accumulate, accumulate
from shardtune.training.utilisation import Utilisation
from shardtune.training.whole_step_loss import WholeStep
from shardtune.training.worker.averaged_weights import AveragedWeights
from shardtune.training.worker.model_state import outer_parameters

R = TypeVar("R")
WEIGHTS = "weights"
COPIES = "weights in compute precision"
BUFFERS = "buffers"
MOMENTS = "optimizer states"
AVERAGE = "averaged weights"
TEACHER = "teacher"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
HEAD = "head and loss"
BACKWARD = "unreduced gradients, backward pass"
UPDATE = "update"
BATCH = "rows"
LASTING = (WEIGHTS, COPIES, BUFFERS, MOMENTS, AVERAGE, TEACHER)


class SoleRanks(Ranks):
    """The ranks of a process group without others."""

    def new_group(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """None: nothing is compared with ranks that do not exist."""
        return None


@contextmanager
def ranks_of(layout: Layout) -> Iterator[Ranks]:
    """The first rank of a layout, without the others."""
    if layout.num_ranks == 1:
        yield Ranks(0, 1, CPU)
        return
    open_group_of_one(layout.num_ranks)
    try:
        found = lay_out(layout, 0, CPU)
        yield SoleRanks(**{each.name: getattr(found, each.name) for each in fields(found)})
    finally:
        close_group()


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model.

    Attributes:
        total: all of them.
        trained: those with a gradient.
        use: what a token is multiplied with, for a peak of one operation per second; None: unknown.
    """

    total: int
    trained: int
    use: Utilisation | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a step holds at its fullest moment.

    Attributes:
        parameters: of the model.
        memory: bytes by category, on the device of a rank.
        host: bytes of it in host memory, with `cpu_offload` on a GPU.
    """

    parameters: Parameters
    memory: Mapping[str, int]
    host: int = 0

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def add_lora(model: nn.Module, recipe: Recipe, adapter: Adapter) -> None:
    """Add new tokens' embeddings and the low-rank adapter that the recipe configures, if any, and train a new head in
    full, as training does.

    Of the base's weights headers are read; where there are none, all that may be new is taken to be new.
    """

    def source() -> WeightSource:
        found = adapter.initial_weights()
        return settings_directory(found) if isinstance(found, str) else found

    everything = [name for name, _ in model.named_parameters()]
    may_lack = partial(adapter.new_weights, model) if adapter.new_weights(model, everything) else None
    tokenizer = adapter.tokenizer if recipe.actor.added_tokens else None
    adapt(model, recipe, tokenizer, source, adapter.new_parts, may_lack)


class OfSoleRank(WholeStep):
    """A loss over all rows of a step, of which this rank's outputs stand for those of all others.

    Args:
        adapter: whose loss it is.
        ranks: of which there is one.
        shares: how many times as many rows as this rank computes a step has.
    """

    def __init__(self, adapter: WholeStepAdapter, ranks: Ranks, shares: int) -> None:
        super().__init__(adapter, ranks)
        self._shares = shares

    def _gather(self, mine: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        return {name: torch.cat([tensor] * self._shares) for name, tensor in mine.items()}, 0


def simulate(
    recipe: Recipe,
    adapter: Adapter,
    layout: Layout,
    micro_batches: Sequence[Batch],
    number: int,
    *,
    on_cuda: bool,
    every_layer: bool = False,
    known: KnownShapes | None = None,
) -> Simulated:
    """Compute a step without memory.

    Layers that repeat are computed as far as they show what each further one adds, with the same result.

    Args:
        recipe: of the run.
        adapter: of its model.
        layout: of the ranks.
        micro_batches: of the first rank in a step; of several that are alike two are enough.
        number: of micro-batches that a rank has in a step.
        on_cuda: whether the ranks have GPUs.
        every_layer: whether all layers are computed, even those that repeat.
        known: shapes that were computed for other steps; None: none yet.
    """
    with ranks_of(layout) as ranks:
        compute, shares = accumulate, ranks.num_data_ranks * -(-number // len(micro_batches))
        if isinstance(adapter, WholeStepAdapter):
            compute = OfSoleRank(adapter, ranks, shares).accumulate
        names = {name for batch in micro_batches for name in batch.weights}
        sums = {name: shares * sum(batch.weights.get(name, 0.0) for batch in micro_batches) for name in names}
        compute = partial(compute, denominators=sums)
        step = _Step(recipe, adapter, ranks, micro_batches, compute, on_cuda, known or KnownShapes())
        model = with_trained_parts(recipe, adapter)
        parameters, stacks = count_parameters(model), stacks_of(model)
        found = None if every_layer else _from_fewer_layers(step, stacks)
        memory = dict(fullest(step.changes({})) if found is None else found)
    host = 0
    if recipe.actor.fsdp_config.cpu_offload and on_cuda and ranks.mesh is not None:
        host = sum(memory.pop(name, 0) for name in (WEIGHTS, MOMENTS, AVERAGE))
    return Simulated(parameters, memory, host)


def _from_fewer_layers(step: _Step, stacks: Sequence[Stack]) -> dict[str, int] | None:
    """Bytes by category at the fullest moment; None: all layers have to be computed, as in a model that reads or sets
    something of a layer that is left out."""
    try:
        return Shallow(step.changes).fullest(stacks)
    except Exception:
        return None


def with_trained_parts(recipe: Recipe, adapter: Adapter) -> nn.Module:
    """The model of a recipe without memory, with its low-rank adapter, if any, and what is frozen."""
    model, _ = build_empty(adapter.build, recipe.runner.seed)
    add_lora(model, recipe, adapter)
    freeze(model, recipe.actor.model.freeze)
    return model


@dataclass(frozen=True, slots=True)
class ReadTeacher:
    """A teacher whose tokens are read from files: their shapes."""

    top_k: int

    def compute(self, batch: PackedBatch, use: Callable[[TeacherLogits | TopTokens], R]) -> R:
        """See `shardtune.models.distillation.Teacher`."""
        shape = (len(batch.targets), self.top_k)
        return use(TopTokens(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step without memory.

    Attributes:
        recipe: of the run.
        adapter: of its model.
        ranks: of which there is one.
        micro_batches: of it.
        compute: their losses and gradients.
        on_cuda: whether the ranks have GPUs.
        known: shapes that were computed.
    """

    recipe: Recipe
    adapter: Adapter
    ranks: Ranks
    micro_batches: Sequence[Batch]
    compute: Accumulate
    on_cuda: bool
    known: KnownShapes

    def changes(self, depths: Mapping[str, int]) -> list[Change]:
        """What it allocates and releases, in order.

        Args:
            depths: how many layers are left of some lists of layers, by name.
        """
        recipe, adapter, ranks = self.recipe, self.adapter, self.ranks
        actor = recipe.actor
        check_optimizer(actor.optim, ranks.layout)  # what it tries, it tries on tensors with values
        codes.cache_clear()  # a step of fewer layers would be alike but for this table
        model, _ = build_empty(adapter.build, recipe.runner.seed)
        cut(model, depths)
        adapter.set_execution(model)
        hooks = Hooks.of(recipe, adapter, training=True)
        root = hooks.attach(adapter.root(model))
        add_lora(model, recipe, adapter)
        freeze(model, actor.model.freeze)
        parallel = adapter.apply_model_parallel(model, ranks)
        units, _ = adapter.shard_units(model)
        hold = shard_model(
            root,
            units,
            ranks,
            actor.model.precision,
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            prefetch=actor.fsdp_config.prefetch,
            entry_points=root.entry_points,
            experts=parallel.experts,
            offload=actor.fsdp_config.cpu_offload,
            cast_inputs=False,
        )
        compute = COMPUTE_DTYPE[actor.model.precision]
        exact = _stored_dtype(recipe) == compute
        narrow = exact and keeps_base(model, actor) and _holds_only(recipe, compute)
        frozen = frozen_dtype(actor.model) or (compute if narrow else None)
        ledger = Ledger(exact=exact, known=self.known)
        with ledger.counting():
            materialise(root, dtype=MASTER_DTYPE[actor.model.precision], device=CPU, frozen=frozen)
            weights = hold(model, reduce_each=actor.fsdp_config.reduce == "every", partial=parallel.partial)
            ledger.label(model.parameters(), COPIES)
            ledger.label(weights.parameters.values(), WEIGHTS)
            root.train()
            if hooks.teacher is not None and isinstance(hooks.token_loss, Distillation):
                if actor.teacher.top_k is not None:
                    hooks.token_loss.teacher = ReadTeacher(actor.teacher.top_k)
                else:
                    hooks.token_loss.teacher = teacher = ShardedTeacher(recipe, hooks.teacher, ranks, values=False)
                    ledger.label(teacher.weights.parameters.values(), TEACHER)
            _label_as_used(ledger, root, units)
            # Operations see the CPU, and Python a GPU: so comparing what is computed again would find two devices.
            with as_on_cuda() if self.on_cuda else nullcontext(), unchecked_recomputation():
                optimizer = build_optimizer(
                    weights.trainable(),
                    actor.optim,
                    weights.shapes,
                    starts=weights.starts,
                    outer=outer_parameters(model),
                )
                average = None if actor.optim.ema_decay is None else AveragedWeights(weights, actor.optim.ema_decay)
                ledger.label(average.parts if average is not None else (), AVERAGE)
                _first_update(ledger, weights, optimizer)
                _step(ledger, root, weights, self.micro_batches, self.compute)
        beside = [(BUFFERS, buffer.nbytes) for buffer in model.buffers()]
        beside += [(BATCH, tensor.nbytes) for batch in self.micro_batches for tensor in tensors_of(batch)]
        return [*(change for change in beside if change[1]), *ledger.changes()]


def _stored_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype that holds most of the base model's weights, by its config.json or its files; None: fp32."""
    directory = _directory(recipe)
    quantization = None if directory is None else quantization_of(directory)
    rounded = quantization is not None and quantization.format != MXFP4  # bf16 would round FP8 times its scale
    return None if directory is None or rounded else stored_dtype(directory)


def _holds_only(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether all of the base model's weights are of a dtype, as far as its files are here."""
    directory = _directory(recipe)
    return directory is not None and (not has_weights(directory) or holds_only(directory, dtype))


def _directory(recipe: Recipe) -> Path | None:
    config = recipe.actor.model
    return None if config.from_scratch else settings_directory(config.model_path)


def count_parameters(model: nn.Module) -> Parameters:
    """The parameters of a whole model; of quantised ones the numbers that they encode."""
    coded = coded_sizes(model)
    sizes: dict[nn.Parameter, int] = {p: coded.get(p, p.numel()) for p in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    return Parameters(sum(sizes.values()), trained, Utilisation.of_model(model, 1.0, coded))


def _first_update(ledger: Ledger, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's states, which its first step makes."""
    ledger.phase = UPDATE
    for parameter in weights.trainable().values():
        parameter.grad = torch.empty_like(parameter, dtype=full_dtype(parameter))
    ledger.label((parameter.grad for parameter in weights.trainable().values()), GRADIENTS)
    if isinstance(optimizer, LowBitOptimizer):
        optimizer.chunks = UnlikeChunks(weights.trainable().values())
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    ledger.label((value for value in states if isinstance(value, torch.Tensor)), MOMENTS)
    weights.copy_masters_to_model()
    weights.zero_gradients()


class UnlikeChunks:
    """The chunks of parameters at which an update's memory may be fullest, in place of all of them.

    Of parameters that are alike the last one is updated, when the states of the others are there. Of its chunks the
    second one is updated while what the first one took is still held, and those between it and the last are as the
    second.

    Args:
        parameters: that are updated, in order.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._left: dict[_Kind, int] = {}
        wholes: dict[_Kind, set[tuple[object, ...]]] = {}
        for parameter in parameters:
            kind = _kind(local(parameter))
            self._left[kind] = self._left.get(kind, 0) + 1
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            wholes.setdefault(kind, set()).add((parameter.shape, *placements))
        self._alike = {kind for kind, found in wholes.items() if len(found) == 1}

    def __call__(self, part: torch.Tensor) -> list[tuple[int, int]]:
        """See `LowBitOptimizer.chunks`; a parameter's part is given once."""
        kind = _kind(part)
        self._left[kind] -= 1
        if self._left[kind] and kind in self._alike:
            return []
        found = list(chunks(part))
        return [*found[:2], *found[2:][-1:]]


_Kind = tuple[torch.Size, torch.dtype]


def _kind(part: torch.Tensor) -> _Kind:
    return part.shape, part.dtype


def _step(
    ledger: Ledger, root: AdapterRoot, weights: Weights, micro_batches: Sequence[Batch], compute: Accumulate
) -> None:
    """Forward and backward of the micro-batches."""

    def forward(batch: Batch) -> object:
        ledger.label((parameter.grad for parameter in weights.parameters.values()), GRADIENTS)
        ledger.phase = ACTIVATIONS
        output = root(batch)
        ledger.phase = BACKWARD
        return output

    compute(forward, micro_batches, weights=weights, draws=(0, 0, 0), scale=1.0)
    ledger.label((parameter.grad for parameter in weights.parameters.values()), GRADIENTS)


def _label_as_used(ledger: Ledger, root: AdapterRoot, units: Sequence[nn.Module]) -> None:
    """Assign the weights that a unit finds when it is called, and what is allocated after the last unit."""
    kept = (WEIGHTS, COPIES)

    def before(module: nn.Module, _inputs: object) -> None:
        ledger.label(module.parameters(), GATHERED, unless=kept)

    def after(module: nn.Module, _inputs: object, _output: object) -> None:
        if ledger.phase == ACTIVATIONS:
            ledger.phase = HEAD

    for module in (root, *units):
        module.register_forward_pre_hook(before)
    if units:
        units[-1].register_forward_hook(after)


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """The tensors of a micro-batch."""
    for each in fields(batch):
        value = getattr(batch, each.name)
        values = value.values() if isinstance(value, Mapping) else [value]
        yield from (tensor for tensor in values if isinstance(tensor, torch.Tensor))
