"""Sharding with torch's `FullyShardedDataParallel` (FSDP1), behind the interface that FSDP2 has here.

FSDP1 joins the parameters of a unit end to end and cuts the whole into equal pieces, so what a rank has of a parameter
is a range of its numbers, of one dimension. Two things follow. Weights are loaded before they are cut so: as rows (what
FSDP2 has), then unit by unit into FSDP1's pieces. And checkpoints hold rows: numbers change ranks when they are written
and read, and any layout continues from any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtune.errors import ModelError
from shardtune.parallel.buffers import fingerprint_of
from shardtune.parallel.full_precision import full_precision_parameters
from shardtune.parallel.outputs import tensors_in
from shardtune.parallel.parts import parts_of
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.second_derivatives import refuse_second_derivatives
from shardtune.parallel.torch_private.fsdp1 import HYBRID_SHARD_ZERO2, flat_parameter, free_gathered, gather
from shardtune.parallel.torch_private.fsdp2 import in_backward
from shardtune.parallel.torch_private.graph import in_differentiation, unreached
from shardtune.parallel.torch_private.modules import set_parameter
from shardtune.parallel.torch_private.operations import tree_map, tree_map_only
from shardtune.parallel.unit_calls import UnitCalls
from shardtune.parallel.unused_units import tie

Place = tuple[nn.Module, str]
"""A module and the name of one of its own parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatSharding:
    """Settings of the sharding, which is completed once the rows have values.

    Attributes:
        root: the module that is called.
        units: modules that are gathered and freed as one.
        ranks: of the run.
        precision: bf16 | fp16 | fp32 | fp64.
        reshard_after_forward: False keeps a unit's weights between forward and backward.
        entry_points: names of further methods of `root` that use its weights.
        cast_inputs: whether floating inputs of the root and of units get the dtype of the computation.
    """

    root: nn.Module
    units: tuple[nn.Module, ...]
    ranks: Ranks
    precision: str
    reshard_after_forward: bool
    entry_points: tuple[str, ...]
    cast_inputs: bool


def into_rows(sharding: FlatSharding) -> None:
    """Replace each parameter of a model by its rows on this rank; every rank has the same whole values, or none (meta).

    Scalars, empty parameters, and those that need full precision stay whole on every rank, as with FSDP2.
    """
    root, mesh = sharding.root, sharding.ranks.shard_mesh
    assert mesh is not None
    whole = {parameter for parameter in root.parameters() if parameter.ndim == 0 or not parameter.numel()}
    if COMPUTE_DTYPE[sharding.precision] != MASTER_DTYPE[sharding.precision]:
        whole |= full_precision_parameters(root, COMPUTE_DTYPE[sharding.precision])
    for parameter, places in _places(root).items():
        if parameter not in whole:
            first, last = row_ranges(parameter.shape, mesh)[rank_in(mesh)]
            local = parameter.detach()[first:last].clone()
            put(places, rows(local, mesh, parameter.shape, parameter.requires_grad))


def rank_in(mesh: DeviceMesh) -> int:
    """This rank's index among those that shard a copy of the model."""
    return mesh.get_local_rank(mesh.ndim - 1)


def row_ranges(shape: torch.Size, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The rows of each of the ranks that shard a copy of the model, as FSDP2 deals them."""
    each = -(-shape[0] // mesh.size(mesh.ndim - 1))
    return [(min(each * rank, shape[0]), min(each * (rank + 1), shape[0])) for rank in range(mesh.size(mesh.ndim - 1))]


def _places(root: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """The places of each parameter; a shared one has several."""
    found: dict[nn.Parameter, list[Place]] = {}
    for module in root.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((module, key))
    return found


def _fingerprint(place: Place) -> torch.Tensor:
    """Of a weight as it is gathered."""
    module, key = place
    return fingerprint_of(getattr(module, key).data)


def put(places: Sequence[Place], parameter: nn.Parameter) -> None:
    for module, key in places:
        set_parameter(module, key, parameter)


def rows(local: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
    """This rank's rows as a part of the whole; along the first of two dimensions of the mesh there are copies."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tuple(strides))
    return nn.Parameter(tensor, requires_grad=requires_grad)


class Shell(nn.Module):
    """What FSDP1 wraps in a unit's place, so that the model keeps its modules, their classes and their names.

    While it is wrapped it holds the unit, whose parameters FSDP1 takes; later only the shells inside it.

    Attributes:
        watched: the places of its parameters, by name.
        used: those that have had a gradient since the last update.
        begin: is called once, before the next of them is noted; None: nothing is.
    """

    def __init__(self, inside: Sequence[FullyShardedDataParallel]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.watched: dict[str, Place] = {}
        self.used: set[str] = set()
        self.begin: Callable[[], None] | None = None

    def forward(self, call: Callable[[], list[torch.Tensor]], *_inputs: torch.Tensor) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            for name, (module, key) in self.watched.items():
                tensor = getattr(module, key)  # not among its parameters now: FSDP1 has put a view there
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note, name))
        return call()

    def _note(self, name: str, _grad: torch.Tensor) -> None:
        if self.begin is not None:
            self.begin()
        self.used.add(name)


class Routed:
    """A module's method that runs while FSDP1 has the module's weights gathered.

    FSDP1 sees tensors only, those that it hooks: inputs and outputs of any kind go past it as they are.

    Args:
        through: the wrapped shells, outermost first.
        cast: the dtype of floating inputs.
        keeps: whether weights stay gathered after the method, until the backward pass is over.
        is_root: whether the module is the root, whose hook has to be the first in a backward pass (it drops gradients
            that it takes for old ones). A unit returns other tensors than those that have its own hooks, so that the
            root's come first even if the root returns what the unit does.

    Attributes:
        done: is called after the method.
        note: is called before weights are gathered for it.
        gathered: all weights are gathered already.
        kept: they may have stayed gathered since the micro-batch began.
        watch: is entered around the method, while weights are gathered.
    """

    def __init__(
        self, through: Sequence[FullyShardedDataParallel], cast: torch.dtype | None, keeps: bool, is_root: bool
    ) -> None:
        self.through = through
        self._cast = cast
        self._keeps = keeps
        self._is_root = is_root
        self._open = False
        self.gathered = self.kept = False
        self.done: Callable[[], None] | None = None
        self.note: Callable[[], object] | None = None
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_open(self) -> bool:
        """Whether the module is in its forward, or in another of its methods."""
        return self._open

    def method(self, original: Callable[..., object]) -> Callable[..., object]:
        """`original`, or another method of the same module called inside it."""

        @wraps(original)
        def run(*args: object, **kwargs: object) -> object:
            if self.gathered and not self._open and self._cast is not None:
                args, kwargs = tree_map(self._to_compute, (args, kwargs))
            return original(*args, **kwargs) if self._open or self.gathered else self._run(original, args, kwargs)

        return run

    def part(self, original: Callable[..., object], compare: Callable[[], None]) -> Callable[..., object]:
        """The forward of a module inside, with this one as its root: only the root ends a backward pass.

        Activation checkpointing repeats such a forward while the weights are gathered.
        """

        @wraps(original)
        def run(*args: object, **kwargs: object) -> object:
            if self._open or self.gathered or in_backward():
                return original(*args, **kwargs)
            compare()
            return self._run(original, args, kwargs)

        return run

    def _run(self, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if in_differentiation():
            raise ModelError(
                "fsdp1 cannot gather weights while torch.func differentiates",
                where="torch.func",
                remedy="use torch.autograd.grad(…), or FSDP2 (or DDP), with which torch.func works",
            )
        if self._cast is not None:
            args, kwargs = tree_map(self._to_compute, (args, kwargs))
        if self.note is not None and not self.kept:
            self.note()
        self.kept = self._keeps
        result: list[object] = []

        def innermost() -> list[torch.Tensor]:
            given = tensors_in((args, kwargs), bases=True)
            with self.watch():
                output = original(*args, **kwargs)
            result[:] = [_tied(self.through, given, output)]
            known = {id(tensor) for tensor in given}
            return [tensor for tensor in tensors_in(result[0], bases=True) if id(tensor) not in known]

        call, inputs = innermost, tensors_in((args, kwargs))
        for shell in reversed(self.through[1:]):
            call = partial(shell, call, *inputs)
        self._open = True
        try:
            self.through[0](call, *inputs)
        finally:
            self._open = False
        if self.done is not None:
            self.done()
        if not self._is_root:
            return tree_map_only(torch.Tensor, _alias, result[0])
        for tensor in tensors_in(result[0]):
            tensor.register_hook(_refuse_second)
        return result[0]

    def _to_compute(self, value: object) -> object:
        return value.to(self._cast) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tied(through: Sequence[FullyShardedDataParallel], given: Sequence[torch.Tensor], output: object) -> object:
    """What a unit returns, from which gradients come back to each parameter that FSDP1 has made of the unit's.

    Args:
        through: the wrapped shells, all of which are gathered now.
        given: the tensors with which the unit was called.
        output: of the unit.
    """
    if not torch.is_grad_enabled():
        return output
    flats = [flat for flat in map(flat_parameter, through) if flat is not None and flat.requires_grad]
    unused = unreached(tensors_in(output), flats, given)
    return tie(output, [flat[:1] for flat in unused]) if unused else output


def _refuse_second(_: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        refuse_second_derivatives("a model that FSDP1 shards", "actor.training_backend: fsdp (or ddp)")


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


class Flattening:
    """Rows with values into FSDP1's pieces, unit by unit: one unit is whole at a time, in one more copy while FSDP1
    joins its parameters.

    Parameters of a unit that differ in dtype, or in whether they are trained, are joined apart.

    Attributes:
        wrapped: FSDP1's modules, each after those inside it; the last is the root's.
        places: of the cut parameters, by name.
        shapes: of the whole parameters, by name.
        owners: the place of each parameter that FSDP1 has made, what gathers it, and its whole shape.
    """

    def __init__(self, sharding: FlatSharding, names: Mapping[nn.Parameter, str]) -> None:
        self._sharding = sharding
        self._names = names
        self._routed: list[tuple[nn.Module, str, Callable[..., object] | None]] = []
        self._gathering: dict[nn.Module, Routed] = {}
        self.owners: dict[nn.Parameter, tuple[Place, Routed, torch.Size]] = {}
        self.wrapped: list[FullyShardedDataParallel] = []
        self.shells: list[Shell] = []
        self.places: dict[str, list[Place]] = {}
        self.shapes: dict[str, torch.Size] = {}
        root, compute = sharding.root, COMPUTE_DTYPE[sharding.precision]
        self._all_places = _places(root)
        cast = compute if sharding.cast_inputs and compute != MASTER_DTYPE[sharding.precision] else None
        units = [module for module in reversed(list(root.modules())) if module in set(sharding.units)]
        waiting: dict[nn.Module, list[FullyShardedDataParallel]] = {}
        for unit in (*units, root):
            inside = [shell for inner in unit.modules() for shell in waiting.pop(inner, [])]
            before = set(self.places)
            through = self._wrap(unit, inside)
            waiting[unit] = through[:1]
            keeps = unit is root or not sharding.reshard_after_forward
            self._root = routed = Routed(through, cast, keeps, unit is root)  # in the end the root's
            self._gathering[unit] = routed
            for name in self.places.keys() - before:
                module, key = self.places[name][0]
                self.owners[module.get_parameter(key)] = (module, key), routed, self.shapes[name]
            for name in ("forward", *(sharding.entry_points if unit is root else ())):
                self._route(unit, name, routed.method)

    def compare_parts(self, compare: Callable[[str], None], done: Callable[[], None]) -> None:
        """Gather the root's weights for parts that are called by themselves.

        Args:
            compare: is called before weights are gathered for a part or a unit, with the name of its class.
            done: is called after a forward of the root or of a part.
        """
        self._root.done = done
        units = set(self._sharding.units)
        for part in {*parts_of(self._sharding.root, units), *units}:
            named = partial(compare, type(part).__name__)
            self._route(part, "forward", partial(self._root.part, compare=named))

    def note_calls(self, names: Mapping[nn.Module, str], calls: UnitCalls) -> None:
        """Note the calls for which weights are gathered.

        Args:
            names: of the units.
            calls: where they are noted.
        """
        for unit, routed in self._gathering.items():
            if any(flat_parameter(wrapped) is not None for wrapped in routed.through):
                routed.note = calls.noting(names.get(unit, ""))

    def begin_micro_batch(self) -> None:
        """Before a micro-batch: nothing is gathered."""
        for routed in self._gathering.values():
            routed.kept = False

    @property
    def root(self) -> Routed:
        """What gathers the root's weights."""
        return self._root

    def _route(self, module: nn.Module, name: str, through: Callable[[Callable[..., object]], object]) -> None:
        self._routed.append((module, name, vars(module).get(name)))
        setattr(module, name, through(getattr(module, name)))

    @contextmanager
    def noting_written(self, written: set[int]) -> Iterator[None]:
        """Inside, the `id`s of this rank's parts of weights that methods change while they are gathered are added."""
        held = {routed: list[tuple[nn.Parameter, Place]]() for routed in self._gathering.values()}
        for part, (place, routed, _) in self.owners.items():
            held[routed].append((part, place))

        @contextmanager
        def compared(own: Sequence[tuple[nn.Parameter, Place]]) -> Iterator[None]:
            """By value: writes through `.data` leave a version as it was."""
            before = [_fingerprint(place) for _, place in own]
            try:
                yield
            finally:
                pairs = zip(own, before, strict=True)
                written.update(id(part) for (part, place), old in pairs if not torch.equal(_fingerprint(place), old))

        for routed, own in held.items():
            routed.watch = partial(compared, own)
        try:
            yield
        finally:
            for routed in held:
                routed.watch = nullcontext

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return self._root.is_open

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all weights are gathered, and forwards leave them so."""
        try:
            for wrapped in self.wrapped:
                gather(wrapped)
            for routed in self._gathering.values():
                routed.gathered = True
            yield
        finally:
            for routed in self._gathering.values():
                routed.gathered = False
            for wrapped in self.wrapped:
                free_gathered(wrapped)

    def undo(self) -> None:
        """Remove FSDP1's wrappers from the model."""
        for module, name, own in reversed(self._routed):
            delattr(module, name)
            if own is not None:
                setattr(module, name, own)

    def _wrap(self, unit: nn.Module, inside: list[FullyShardedDataParallel]) -> list[FullyShardedDataParallel]:
        """One module of FSDP1 for each kind of parameters, outermost first; one without any, if there are none."""
        groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in unit.parameters():
            if isinstance(parameter, DTensor):
                groups.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        through: list[FullyShardedDataParallel] = []
        for group in [*groups.values()] or [[]]:
            through.insert(0, self._wrap_group(unit, group, through[:1] or inside))
        return through

    @torch.no_grad()
    def _wrap_group(
        self, unit: nn.Module, group: Sequence[nn.Parameter], inside: Sequence[FullyShardedDataParallel]
    ) -> FullyShardedDataParallel:
        ranks, shell = self._sharding.ranks, Shell(inside)
        taken: set[nn.Parameter] = set()
        for parameter in group:
            assert isinstance(parameter, DTensor)
            name, places = self._names[parameter], self._all_places[parameter]
            full = nn.Parameter(parameter.full_tensor(), requires_grad=parameter.requires_grad)
            put(places, full)
            taken.add(full)
            self.places[name], self.shapes[name] = places, parameter.shape
            if full.requires_grad:
                shell.watched[name] = places[0]
        compute, master = COMPUTE_DTYPE[self._sharding.precision], MASTER_DTYPE[self._sharding.precision]
        shell.owner = unit
        wrapped = FullyShardedDataParallel(
            shell,
            process_group=self._process_group(),
            sharding_strategy=self._strategy(),
            mixed_precision=MixedPrecision(
                param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False, cast_root_forward_inputs=False
            ),
            device_id=ranks.device,
            use_orig_params=True,
            ignored_states=[parameter for parameter in unit.parameters() if parameter not in taken],
        )
        del shell.owner
        self.wrapped.append(wrapped)
        self.shells.append(shell)
        return wrapped

    def _process_group(self) -> dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]:
        mesh = self._sharding.ranks.shard_mesh
        assert mesh is not None
        return mesh.get_group() if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0))

    def _strategy(self) -> ShardingStrategy:
        if self._sharding.ranks.layout.replicate > 1:
            hybrid = ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2
            return hybrid[not self._sharding.reshard_after_forward]
        return ShardingStrategy.FULL_SHARD if self._sharding.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
