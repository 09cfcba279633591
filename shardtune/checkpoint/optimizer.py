"""Optimizer state as named tensors and a JSON description, for any optimizer and any sharding."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.tensor as sharded_tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from shardtune.checkpoint.dcp import load_tensors
from shardtune.checkpoint.safetensors_file import DTYPE_NAMES
from shardtune.errors import CheckpointError
from shardtune.optim.low_bit import PARTS, LowBitOptimizer
from shardtune.parallel.torch_private.tensors import StridedShard

Names = Mapping[torch.nn.Parameter, str]


class CheckpointLayout(Protocol):
    """How tensors with the layout of a parameter are stored, where checkpoints have another layout."""

    def to_checkpoint_layout(self, name: str, tensor: torch.Tensor, /) -> torch.Tensor:
        """The tensor in the layout of checkpoints; all ranks call it."""
        ...

    def from_checkpoint_layout(self, name: str, tensor: torch.Tensor, /) -> torch.Tensor:
        """The inverse of `to_checkpoint_layout`."""
        ...

    def template(self, name: str, /) -> torch.Tensor:
        """A tensor like a parameter, in the layout of checkpoints."""
        ...


class SavedTensor(TypedDict):
    """A tensor of the state.

    Attributes:
        tensor: its name among the saved tensors.
        shape: of the whole tensor.
        dtype: without "torch.".
        placements: "replicate" or "shard:<dimension>" for each mesh axis; None for a plain tensor.
        on_device: whether it was on the parameter's accelerator; step counters may be on the CPU.
    """

    tensor: str
    shape: list[int]
    dtype: str
    placements: list[str] | None
    on_device: bool


class SavedSequence(TypedDict):
    """A list or tuple of the state."""

    items: list[SavedValue]
    tuple: bool


class SavedScalar(TypedDict):
    """A JSON value of the state."""

    value: object


SavedValue: TypeAlias = SavedTensor | SavedSequence | SavedScalar


class SavedGroup(TypedDict):
    """A parameter group: the names of its parameters, and its options."""

    params: list[str]
    options: dict[str, object]


class OptimizerDescription(TypedDict):
    """An optimizer's state as JSON, its tensors by reference.

    Attributes:
        state: by parameter and key.
        groups: in the optimizer's order.
    """

    state: dict[str, dict[str, SavedValue]]
    groups: list[SavedGroup]


OPTIONAL_STATES = (
    ("amsgrad", "max_exp_avg_sq", "exp_avg_sq"), ("centered", "grad_avg", "square_avg"),
    ("momentum", "momentum_buffer", "square_avg"),
)  # fmt: skip
"""Options of torch's optimizers, the state that each needs, and one that is there without it (SGD makes its later)."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


def optimizer_tensors(
    optimizer: Optimizer, names: Names, layout: CheckpointLayout | None = None
) -> tuple[dict[str, torch.Tensor], OptimizerDescription]:
    """The state's tensors, named "parameter::key", and everything else as JSON.

    The tensors are the optimizer's own, not copies, except those that `layout` converts. Before the first step there
    are none.

    Args:
        names: the name of every parameter of the optimizer.
        layout: of the tensors in checkpoints; if given, all ranks call this function.

    Raises:
        CheckpointError: the state contains something other than tensors, JSON values and lists of these.
    """
    tensors: dict[str, torch.Tensor] = {}

    def to_checkpoint_layout(name: str, value: object) -> object:
        return value if layout is None else _convert(value, name, layout.to_checkpoint_layout)

    state: dict[str, dict[str, SavedValue]] = {
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
    groups: list[SavedGroup] = [
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
    description: OptimizerDescription,
    layout: CheckpointLayout | None = None,
    *,
    keep: Collection[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Puts the state that `optimizer_tensors` described and `save_tensors` wrote to `path` into an optimizer.

    No optimizer step is needed: tensors are created from the description, sharded as their parameter is now, and
    filled.

    Args:
        layout: as for `optimizer_tensors`.
        keep: options of the parameter groups that are not restored, such as "lr".

    Raises:
        CheckpointError: the state belongs to other parameters, or does not fit them. The optimizer is unchanged then.
    """
    _check_parameters(optimizer, names, description, path)
    _check_state_dtype(optimizer, description, path)
    _check_states(optimizer, names, description, keep, path)
    tensors: dict[str, torch.Tensor] = {}
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names[parameter] in description["state"]:
                described = description["state"][names[parameter]]
                on_device = bool(group.get("capturable") or group.get("fused"))
                like = parameter.detach() if layout is None else layout.template(names[parameter])
                scales = _scales(optimizer, parameter, described)
                state[parameter] = {
                    key: _rebuild(value, scales.get(key, like), on_device, tensors) for key, value in described.items()
                }
    load_tensors(path, tensors, process_group=process_group)
    if layout is not None:
        for parameter, values in state.items():
            state[parameter] = {
                key: _convert(value, names[parameter], layout.from_checkpoint_layout) for key, value in values.items()
            }
    if isinstance(optimizer, LowBitOptimizer):
        for group in optimizer.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter in state):
                state[parameter] = optimizer.own_form(parameter, state[parameter], group["state_dtype"])
    optimizer.state.clear()
    optimizer.state.update(state)
    options = {name: saved["options"] for saved in description["groups"] for name in saved["params"]}
    for group in optimizer.param_groups:
        _restore_options(group, options[names[group["params"][0]]] if group["params"] else {}, keep)


def _describe(value: object, name: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> SavedValue:
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


def _convert(value: object, name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> object:
    """A value of the state with its tensors converted; `name` is the parameter's."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if isinstance(value, list | tuple):
        return type(value)(_convert(item, name, change) for item in value)
    return value


def optimizer_bytes(optimizer: Optimizer, names: Names, shapes: Mapping[str, torch.Size]) -> int:
    """The bytes of the state's tensors, all ranks together; `shapes` are those of whole parameters."""
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


def _json(value: object, name: str) -> object:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(
            f"optimizer state '{name}' is a {type(value).__name__} and cannot be saved",
            where="actor.optim.name",
            remedy="use an optimizer whose state is tensors and numbers",
        ) from problem
    return value


def _option(key: str, value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else _json(value, key)


def _rebuild(
    described: SavedValue, parameter: torch.Tensor, on_device: bool, tensors: dict[str, torch.Tensor]
) -> object:
    if "items" in described:
        items = [_rebuild(item, parameter, on_device, tensors) for item in described["items"]]
        return tuple(items) if described["tuple"] else items
    if "value" in described:
        return described["value"]
    tensor = _empty_like_saved(described, parameter.detach(), on_device)
    tensors[described["tensor"]] = tensor
    return tensor


def _empty_like_saved(described: SavedTensor, parameter: torch.Tensor, on_device: bool) -> torch.Tensor:
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


def _check_parameters(optimizer: Optimizer, names: Names, description: OptimizerDescription, path: str | Path) -> None:
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


def _check_state_dtype(optimizer: Optimizer, description: OptimizerDescription, path: str | Path) -> None:
    saved = {str(group["options"].get("state_dtype", "fp32")) for group in description["groups"]}
    here = {group.get("state_dtype", "fp32") for group in optimizer.param_groups}
    if saved != here and description["state"]:
        raise CheckpointError(
            f"the checkpoint's optimizer states are kept in {', '.join(sorted(saved))}, the recipe's in "
            f"{', '.join(sorted(here))}",
            where=str(path),
            remedy=f"set actor.optim.state_dtype: {', '.join(sorted(saved))}, or start another run",
        )


def _check_states(
    optimizer: Optimizer, names: Names, description: OptimizerDescription, keep: Collection[str], path: str | Path
) -> None:
    """Refuse options of torch's optimizers for which a saved parameter lacks a state; a step would look for it."""
    held = [(group, names[parameter]) for group in optimizer.param_groups for parameter in group["params"]]
    for group, name in held:
        saved = description["state"].get(name, {})
        for option, state, beside in OPTIONAL_STATES:
            if option in keep and group.get(option) and beside in saved and state not in saved:
                raise CheckpointError(
                    f"the optimizer's {option} = {group[option]} needs a state {state!r}, which the checkpoint lacks "
                    f"for {name}",
                    where=str(path),
                    remedy=f"put actor.optim.args.{option} back, or begin another run with the weights of this one as "
                    "actor.model.model_path",
                )


def _scales(
    optimizer: Optimizer, parameter: torch.Tensor, described: Mapping[str, SavedValue]
) -> dict[str, torch.Tensor]:
    """Tensors shaped like the checkpoint's scales of an 8-bit state, whose shapes differ from the parameter's."""
    match described.get(PARTS):
        case {"value": int(parts)} if isinstance(optimizer, LowBitOptimizer):
            return optimizer.scales(parameter.detach(), parts)
    return {}


def _restore_options(group: dict[str, object], saved: Mapping[str, object], keep: Collection[str]) -> None:
    for key, value in saved.items():
        if key in keep:
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, int | float):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value
