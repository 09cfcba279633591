"""Builds a model without memory and allocates only this rank's shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import deterministic
from transformers import PreTrainedModel

from shardtune.errors import ModelError
from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.full_precision import full_precision_parameters
from shardtune.parallel.torch_private.fsdp2 import offloaded_parameters
from shardtune.parallel.torch_private.modules import apply_to_tensors, own_persistent_buffers, set_parameter


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device and their buffers real.

    Unlike `torch.device("meta")` this keeps computed buffers (such as rotary frequencies) correct. Each parameter
    exists only between its creation and its registration, and is never written to, also where torch would fill new
    memory (deterministic algorithms).
    """

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # keeps the object, and with it any tying
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        vars(empty).update(vars(parameter))
        return empty

    # Torch declares that the hook returns nothing, and registers what it returns.
    hook = register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]
    settings: Any = deterministic  # whose properties torch does not declare
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        hook.remove()


def read_parameters(model: nn.Module) -> list[str]:
    """The names of parameters whose values a `from_pretrained` of transformers read from files while it built `model`.

    transformers marks them, and the mark outlasts the move to the meta device.
    """
    return [name for name, parameter in model.named_parameters() if vars(parameter).get("_is_hf_initialized")]


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a parameter: its memory, and where it lies in the whole."""

    local: torch.Tensor
    offsets: tuple[int, ...]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor of the parameter's full shape."""
        return full[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.local.shape, strict=True))]


def shard_of(tensor: torch.Tensor) -> Shard:
    """This rank's part of a plain tensor (all of it) or of a DTensor, without a graph."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(tensor, (0,) * tensor.ndim)
    # A rank without rows (fewer rows than ranks) gets an offset that means nothing.
    local = tensor.to_local()
    return Shard(local, local_offsets(tensor) if local.numel() else (0,) * local.ndim)


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in the whole, for each dimension."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def materialise(
    root: nn.Module, *, dtype: torch.dtype, device: torch.device, frozen: torch.dtype | None = None
) -> None:
    """Gives every parameter and buffer under `root` memory on `device`, floating parameters in `dtype`, and those that
    need full precision in fp32 at least.

    `root` is the outermost sharded module, which has to learn where its shards lie now. What is on the meta device gets
    memory, not values; what is real keeps its values. What FSDP2 offloads gets host memory. Buffers keep their dtype,
    but for the statistics of norms, which have that of the norms' parameters, and in fp64 those outside of models of
    transformers, as with `model.double()`. Shared parameters stay shared.

    Args:
        frozen: the dtype of parameters that are not trained, if it is another.

    Raises:
        ModelError: a buffer without values that no checkpoint or weight file could fill, or modules in a plain list.
    """
    _refuse_unregistered(root)
    # One object may have several names, and moving must not part them.
    shared = _names_by_parameter(root)
    kept = {id(buffer) for buffer in persistent_buffers(root).values()}
    stranded = [name for name, buffer in root.named_buffers() if buffer.is_meta and id(buffer) not in kept]
    if stranded:
        raise ModelError(
            f"the buffer {stranded[0]} is computed from parameters, which have no values while the model is built, and "
            "is not saved with them",
            where=type(root).__name__,
            remedy="compute it in forward, or register it with persistent=True",
        )
    full = {id(parameter) for parameter in full_precision_parameters(root, frozen or dtype)}
    norms = statistical_norms(root).values()
    offloaded = offloaded_parameters(root)
    statistics = {id(tensor) for norm in norms for tensor in (*norm.buffers(recurse=False), *norm.parameters())}
    doubled = {id(buffer) for buffer in _plain_buffers(root)} if dtype == torch.float64 else set()

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        is_parameter, of_norm = isinstance(tensor, nn.Parameter), id(tensor) in statistics
        has_own = not (is_parameter or of_norm or id(tensor) in doubled)
        target_dtype = dtype if tensor.is_floating_point() and not has_own else tensor.dtype
        if (
            frozen is not None
            and target_dtype.is_floating_point
            and is_parameter
            and not (tensor.requires_grad or id(tensor) in full)
        ):
            target_dtype = frozen
        if target_dtype.is_floating_point and (of_norm or id(tensor) in full):  # whatever weights are held in
            target_dtype = torch.promote_types(target_dtype, torch.float32)
        place = torch.device("cpu") if id(tensor) in offloaded else device
        return (
            torch.empty_like(tensor, dtype=target_dtype, device=place)
            if tensor.is_meta
            else tensor.to(place, target_dtype)
        )

    apply_to_tensors(root, allocate)
    for first, *others in shared:
        parameter = root.get_parameter(first)
        for name in others:
            module, _, attribute = name.rpartition(".")
            set_parameter(root.get_submodule(module), attribute, parameter)


def _plain_buffers(root: nn.Module) -> Iterator[torch.Tensor]:
    """The buffers in a module, but for those of models of transformers, which compute with the dtype that they have."""
    if not isinstance(root, PreTrainedModel):
        yield from root.buffers(recurse=False)
        for child in root.children():
            yield from _plain_buffers(child)


def _refuse_unregistered(root: nn.Module) -> None:
    """Refuse modules in plain lists and dicts: without a name in the model they get no values, and are not trained.

    What is a part of the model by another name may stand in a list as well.
    """
    known = {id(parameter) for parameter in root.parameters()}
    for prefix, module in root.named_modules():
        for key, value in vars(module).items():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            for each in inside:
                if isinstance(each, nn.Module) and any(p.is_meta and id(p) not in known for p in each.parameters()):
                    plain = type(value).__name__
                    raise ModelError(
                        f"{f'{prefix}.' if prefix else ''}{key} is a plain {plain} with modules in it, which are no "
                        "part of the model: they get no weights, and are neither trained nor saved",
                        where=type(module).__name__,
                        remedy=f"make it an nn.{'ModuleDict' if plain == 'dict' else 'ModuleList'}",
                    )


def _names_by_parameter(root: nn.Module) -> list[list[str]]:
    """The names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of `model` holds: parameters, each once under its first name, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update(persistent_buffers(model))
    return tensors


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the state dict, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in own_persistent_buffers(module).items()
    }


def fill(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copies this rank's part of `full` into `target`."""
    shard = shard_of(target)
    if shard.local.numel():
        shard.local.copy_(shard.of(full))
