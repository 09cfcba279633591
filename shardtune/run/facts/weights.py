"""The tensors of a trained model as a directory holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import nn

from shardtune.checkpoint.export_check_process import digest
from shardtune.checkpoint.safetensors_file import read_header
from shardtune.parallel.meta_init import named_tensors

Described = dict[str, tuple[str, str]]
"""The dtype and a hash of each tensor, by name."""


def described(tensors: Mapping[str, torch.Tensor], dtype: Callable[[str, torch.Tensor], torch.dtype]) -> Described:
    """Tensors brought to the dtypes that they have on disk."""
    found = {}
    for name, tensor in tensors.items():
        kind = dtype(name, tensor)
        found[name] = (str(kind).removeprefix("torch."), digest(tensor.detach().to("cpu", kind)))
    return found


def stored_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a directory's safetensors files."""
    headers = [read_header(file)[0] for file in sorted(directory.glob("*.safetensors"))]
    return {name: stored.dtype for header in headers for name, stored in header.items()}


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of tensors that are one."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def loaded_otherwise(model: nn.Module, directory: Path) -> str | None:
    """The first tensor that `safetensors.torch.load_model` gives another value than a module has; None: all are equal.

    Args:
        model: of the user's own class.
        directory: with its file.
    """
    other, stored = copy.deepcopy(model), stored_dtypes(directory)
    with torch.no_grad():
        for tensor in named_tensors(other).values():
            tensor.zero_()
    load_model(other, directory / "model.safetensors")
    loaded = named_tensors(other)
    for name, tensor in named_tensors(model).items():
        if not torch.equal(loaded[name], tensor.to(stored.get(name, tensor.dtype)).to(tensor.dtype)):
            return name
    return None
