"""Random weights that depend on the seed and the parameter alone, not on ranks, sharding or precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from shardtune.checkpoint.base_weights import fill_base, whole_base
from shardtune.errors import ModelError
from shardtune.models.lora.attach import BaseTensor, base_tensors
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.torch_private.modules import set_parameter
from shardtune.parallel.torch_private.operations import OpOverload, TorchDispatchMode, schema_of
from shardtune.parallel.torch_private.tensors import storage_identity

Initialiser = Callable[[nn.Module], None]


@runtime_checkable
class _Resettable(Protocol):
    """A module that initialises itself, as torch's own do."""

    def reset_parameters(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """The initialisation of one module.

    Attributes:
        name: the module's name in the model, "" for the model itself.
        written: the parameters that `init(module)` writes, by their names inside the module.
    """

    name: str
    module: nn.Module
    init: Initialiser
    written: frozenset[str]

    def full_names(self) -> set[str]:
        return {_join(self.name, name) for name in self.written}


@torch.no_grad()
@guard_torch_init_functions()
def initialise_weights(
    model: nn.Module,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    root: nn.Module | None = None,
    frozen: torch.dtype | None = None,
    unadapted: nn.Module | None = None,
) -> None:
    """Gives a model made inside `init_empty_weights()` the initial weights of its own class.

    Module by module, children first, in the order transformers uses: each module's parameters are made whole in fp32
    on the CPU, drawn from a generator seeded by (seed, the module's name), and each rank keeps its shard in `dtype`.
    So the numbers are the same on any number of ranks, and whole parameters exist for one module at a time.

    Args:
        root: the outermost sharded module, where that is not `model` itself.
        frozen: the dtype of parameters that are not trained, if it is another.
        unadapted: the same model without memory and without an adapter, where `model` has one.

    Raises:
        ModelError: a parameter that the model's class does not initialise.
    """
    pattern = unadapted if unadapted is not None else model
    first_names = {name for name, _ in pattern.named_parameters()}
    steps = _steps(pattern, first_names)
    written = set().union(*(step.full_names() for step in steps))
    bare = sorted(first_names - written)
    bare += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if bare:
        raise ModelError(
            f"{type(model).__name__.removeprefix('FSDP')} does not initialise {len(bare)} of its parameters: "
            + ", ".join(bare[:5]),
            where="actor.model.from_scratch",
            remedy="add them to the model's _init_weights (or the module's reset_parameters), or load weights",
        )
    materialise(root if root is not None else model, dtype=dtype, device=torch.device(device), frozen=frozen)
    targets = {target.name: target for target in base_tensors(model)}
    done: set[str] = set()
    for step in steps:
        _run(step, done, _seed(seed, step.name), targets)
        done |= step.full_names()


def initialised_by_class(model: nn.Module) -> set[str]:
    """The names of the parameters of a model that its class, or a module's own initialiser, gives values."""
    first_names = {name for name, _ in model.named_parameters()}
    return set().union(*(step.full_names() for step in _steps(model, first_names)))


@torch.no_grad()
@guard_torch_init_functions()
def initialise_some(model: nn.Module, names: Collection[str], seed: int, unadapted: nn.Module | None = None) -> None:
    """Give some parameters of a model in memory the initial values of its own class; the others keep theirs.

    The numbers are those of `initialise_weights`, on any number of ranks.

    Args:
        names: of the parameters, as before an adapter was attached.
        unadapted: as for `initialise_weights`.
    """
    pattern = unadapted if unadapted is not None else model
    targets = {target.name: target for target in base_tensors(model)}
    done = targets.keys() - set(names)
    for step in _steps(pattern, {name for name, _ in pattern.named_parameters()}):
        if step.full_names() & set(names):
            _run(step, done, _seed(seed, step.name), targets, only=names)
            done |= step.full_names()


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _steps(model: nn.Module, first_names: set[str]) -> list[_Step]:
    """The modules that initialise something, children first. A shared parameter belongs to its first name."""
    steps: list[_Step] = []
    covered: set[str] = set()

    def visit(name: str, module: nn.Module, owner: PreTrainedModel | None) -> None:
        if isinstance(module, PreTrainedModel):
            owner = module
        for child_name, child in module.named_children():
            visit(_join(name, child_name), child, owner)
        own = {_join(name, key) for key, _ in module.named_parameters(recurse=False)} & first_names
        inits: list[Initialiser] = [_reset] if owner is None else [owner._init_weights, _reset]
        for init in inits:
            touched = {key for key in _written_by(module, init) if _join(name, key) in first_names}
            if touched:
                steps.append(_Step(name, module, init, frozenset(touched)))
                covered.update(steps[-1].full_names())
            if own <= covered:
                return  # torch's own initialisation only serves where the model's class has none

    visit("", model, None)
    return steps


def _reset(module: nn.Module) -> None:
    if isinstance(module, _Resettable):
        module.reset_parameters()


class _Writes(TorchDispatchMode):
    """Records the storages that operations write to, through views and `.data` too."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: dict | None = None
    ) -> object:
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.storages.add(storage_identity(value.untyped_storage()))
        return func(*args, **(kwargs or {}))


def _written_by(module: nn.Module, init: Initialiser) -> set[str]:
    """The parameters under `module` that `init(module)` changes, found by running it on tensors without memory."""
    stand_ins = {name: _empty(parameter) for name, parameter in _parameters(module)}
    with _swapped(module, stand_ins), _Writes() as writes:
        init(module)
    return {name for name, p in stand_ins.items() if storage_identity(p.untyped_storage()) in writes.storages}


def _run(
    step: _Step, done: set[str], seed: int, targets: Mapping[str, BaseTensor], only: Collection[str] | None = None
) -> None:
    """Runs one module's initialiser on whole fp32 parameters and keeps this rank's shards of what it wrote."""
    stand_ins = {}
    for name, parameter in _parameters(step.module):
        target = targets[_join(step.name, name)]
        if name not in step.written:
            stand_ins[name] = _empty(parameter)
        elif target.name in done:  # by a child's initialiser; its parent's may scale that
            stand_ins[name] = nn.Parameter(whole_base(target), requires_grad=False)
        else:
            stand_ins[name] = nn.Parameter(torch.zeros(parameter.shape), requires_grad=False)
    with torch.random.fork_rng(devices=[]), _swapped(step.module, stand_ins):
        torch.default_generator.manual_seed(seed)
        step.init(step.module)
    for name in step.written:
        if only is None or _join(step.name, name) in only:
            fill_base(targets[_join(step.name, name)], stand_ins[name].detach())


def _empty(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


@contextmanager
def _swapped(module: nn.Module, stand_ins: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Replaces the parameters under `module`; restores the original objects at the end."""
    slots = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in stand_ins]
    originals = [(owner, key, owner.get_parameter(key)) for owner, key, _ in slots]
    for owner, key, name in slots:
        set_parameter(owner, key, stand_ins[name])
    try:
        yield
    finally:
        for owner, key, parameter in originals:
            set_parameter(owner, key, parameter)
