"""Optimizer state as named tensors and a JSON description, for any optimizer and any sharding."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.tensor as sharded_tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from shardtune.checkpoint.dcp import load_tensors
from shardtune.checkpoint.safetensors_file import DTYPE_NAMES
from shardtune.errors import CheckpointError
from shardtune.optim.low_bit import PARTS, LowBitOptimizer
from shardtune.parallel.torch_private import StridedShard

Names = Mapping[torch.nn.Parameter, str]


class Forms(Protocol):
    """How tensors that lie as a parameter does are stored, where that is not as they are."""

    def to_checkpoint_layout(self, name: str, tensor: torch.Tensor, /) -> torch.Tensor:
        """As checkpoints hold it; all ranks call it."""
        ...

    def from_checkpoint_layout(self, name: str, tensor: torch.Tensor, /) -> torch.Tensor:
        """The way back."""
        ...

    def template(self, name: str, /) -> torch.Tensor:
        """A tensor of the form that checkpoints hold a parameter in."""
        ...


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


def optimizer_tensors(
    optimizer: Optimizer, names: Names, forms: Forms | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state's tensors, named "parameter::key", and everything else as JSON.

    The tensors are the optimizer's own, not copies, but for those that `forms` changes. Before the first step there are
    none.

    Args:
        names: the name of every parameter the optimizer has.
        forms: of the tensors; then all ranks call it.

    Raises:
        CheckpointError: the state holds something else than tensors, JSON values and lists of them.
    """
    tensors: dict[str, torch.Tensor] = {}

    def to_checkpoint_layout(name: str, value: Any) -> Any:
        return value if forms is None else _changed(value, name, forms.to_checkpoint_layout)

    state = {
        names[parameter]: {
            key: _describe(
                to_checkpoint_layout(names[parameter], value), f"{names[parameter]}::{key}", parameter, tensors
            )
            for key, value in optimizer.state[parameter].items()
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            "options": {key: _option(key, value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"state": state, "groups": groups}


def load_optimizer_tensors(
    path: str | Path,
    optimizer: Optimizer,
    names: Names,
    description: Mapping[str, Any],
    forms: Forms | None = None,
    *,
    keep: Collection[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Puts the state that `optimizer_tensors` described and `save_tensors` wrote to `path` into an optimizer.

    No step is run for it: tensors are made by the description, sharded as their parameter is now, and filled.

    Args:
        forms: of the tensors, as they were when they were described.
        keep: options of the parameter groups that stay as the optimizer was built, such as "lr".

    Raises:
        CheckpointError: the state is of other parameters, or does not fit them. The optimizer is unchanged then.
    """
    _check_parameters(optimizer, names, description, path)
    _check_state_dtype(optimizer, description, path)
    tensors: dict[str, torch.Tensor] = {}
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names[parameter] in description["state"]:
                described = description["state"][names[parameter]]
                on_device = bool(group.get("capturable") or group.get("fused"))
                like = parameter.detach() if forms is None else forms.template(names[parameter])
                scales = _scales(optimizer, parameter, described)
                state[parameter] = {
                    key: _rebuild(value, scales.get(key, like), on_device, tensors) for key, value in described.items()
                }
    load_tensors(path, tensors, process_group=process_group)
    if forms is not None:
        for parameter, values in state.items():
            state[parameter] = {
                key: _changed(value, names[parameter], forms.from_checkpoint_layout) for key, value in values.items()
            }
    if isinstance(optimizer, LowBitOptimizer):
        for group in optimizer.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter in state):
                state[parameter] = optimizer.own_form(parameter, state[parameter], group["state_dtype"])
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, saved in zip(optimizer.param_groups, description["groups"], strict=False):
        _restore_options(group, saved["options"], keep)


def _describe(value: Any, name: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        placements = [_placement_name(p, name) for p in value.placements] if isinstance(value, DTensor) else None
        return {
            "tensor": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "placements": placements,
            "on_device": value.device.type == parameter.device.type != "cpu",
        }
    if isinstance(value, list | tuple):
        items = [_describe(item, f"{name}.{i}", parameter, tensors) for i, item in enumerate(value)]
        return {"items": items, "tuple": isinstance(value, tuple)}
    return {"value": _json(value, name)}


def _changed(value: Any, name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A value of the state with its tensors changed; `name` is the parameter's."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, name, change) for item in value)
    return value


def optimizer_bytes(optimizer: Optimizer, names: Names, shapes: Mapping[str, torch.Size]) -> int:
    """The size of the state's tensors on all ranks together; `shapes` are those of whole parameters."""
    parts = {name: parameter.shape for parameter, name in names.items()}
    size = 0
    for key, tensor in optimizer_tensors(optimizer, names)[0].items():
        name = key.rpartition("::")[0]
        whole = shapes[name] if tensor.shape == parts[name] else tensor.shape
        size += whole.numel() * tensor.element_size()
    return size


def _placement_name(placement: Placement, name: str) -> str:
    if isinstance(placement, Shard | StridedShard):
        return f"shard:{placement.dim}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise CheckpointError(f"optimizer state '{name}' is a partial sum over ranks and cannot be saved")


def _json(value: Any, name: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(
            f"optimizer state '{name}' is a {type(value).__name__} and cannot be saved",
            where="actor.optim.name",
            remedy="use an optimizer whose state is tensors and numbers",
        ) from problem
    return value


def _option(key: str, value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else _json(value, key)


def _rebuild(
    described: Mapping[str, Any], parameter: torch.Tensor, on_device: bool, tensors: dict[str, torch.Tensor]
) -> Any:
    if "items" in described:
        items = [_rebuild(item, parameter, on_device, tensors) for item in described["items"]]
        return tuple(items) if described["tuple"] else items
    if "value" in described:
        return described["value"]
    made = _empty_like_saved(described, parameter.detach(), on_device)
    tensors[described["tensor"]] = made
    return made


def _empty_like_saved(described: Mapping[str, Any], parameter: torch.Tensor, on_device: bool) -> torch.Tensor:
    shape, dtype = described["shape"], _DTYPES[described["dtype"]]
    if not shape:
        # Step counters stay on the CPU, except for the kernels that read them on the device.
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device or described["on_device"] else "cpu")
    if tuple(shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    mesh = parameter.device_mesh
    saved = described["placements"]
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if saved is not None and len(saved) == mesh.ndim:
        placements = [Replicate() if name == "replicate" else Shard(int(name.partition(":")[2])) for name in saved]
    return sharded_tensor.zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _check_parameters(optimizer: Optimizer, names: Names, description: Mapping[str, Any], path: str | Path) -> None:
    here = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    saved = [name for group in description["groups"] for name in group["params"]]
    gone, added = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    if gone or added:
        complaints = [
            f"{len(some)} {what}: {', '.join(some[:3])}{', …' if len(some) > 3 else ''}"
            for what, some in (("no longer trained", gone), ("newly trained", added))
            if some
        ]
        raise CheckpointError(
            f"the checkpoint's optimizer trains other parameters: {'; '.join(complaints)}",
            where=str(path),
            remedy="continue with the recipe it was made with, or start another run (runner.logger.experiment_name)",
        )


def _check_state_dtype(optimizer: Optimizer, description: Mapping[str, Any], path: str | Path) -> None:
    saved = {group["options"].get("state_dtype", "fp32") for group in description["groups"]}
    here = {group.get("state_dtype", "fp32") for group in optimizer.param_groups}
    if saved != here and description["state"]:
        raise CheckpointError(
            f"the checkpoint's optimizer states are kept in {', '.join(sorted(saved))}, the recipe's in "
            f"{', '.join(sorted(here))}",
            where=str(path),
            remedy=f"set actor.optim.state_dtype: {', '.join(sorted(saved))}, or start another run",
        )


def _scales(optimizer: Optimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors for the scales of an 8-bit state, of the checkpoint's form; they have other shapes than the parameter."""
    if not isinstance(optimizer, LowBitOptimizer) or PARTS not in described:
        return {}
    return optimizer.scales(parameter.detach(), int(described[PARTS]["value"]))


def _restore_options(group: dict[str, Any], saved: Mapping[str, Any], keep: Collection[str]) -> None:
    for key, value in saved.items():
        if key in keep:
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value
