"""Which linear layers LoRA can adapt: by what they compute, by how they are used, and by what PEFT finds again."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardtune.parallel import peft_names as peft

LINEAR = (nn.Linear, Conv1D)
PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's modules."""


@torch.no_grad()
def unlike_linear(module: nn.Module) -> str:
    """What keeps a module of a linear class from being adapted, in words; empty if nothing does.

    A class of its own may return something else than a product with its weight: a router returns experts, a grouped
    layer takes other shapes. LoRA would add its product to it.
    """
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return ""
    width, features = _sizes(module)
    weight = next(module.parameters())
    if not weight.is_floating_point():  # a quantised layer, which computes a product with what it stands for
        return ""
    try:
        found = module(torch.zeros(2, 3, width, dtype=weight.dtype, device=weight.device))
    except Exception:  # third-party code, called in a way that it need not take
        found = None
    if isinstance(found, torch.Tensor) and found.shape == (2, 3, features):
        return ""
    return f"a {type(module).__name__}, which computes more than a linear layer"


def _sizes(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, Conv1D)
    return module.nx, module.nf


def uncalled(model: nn.Module, name: str) -> str:
    """What keeps a layer from being adapted that is used without being called, in words; empty if it is called.

    Mixers pass weights to fused kernels, which the code of their forward shows.
    """
    parent, _, child = name.rpartition(".")
    owner = type(model.get_submodule(parent))
    used = re.search(rf"(?<!isinstance\()self\.{re.escape(child)}\.weight\b(?!\.dtype|\.device)", _forward(owner))
    return f"part of a {owner.__name__}, which uses its weight without calling it" if used else ""


@functools.cache
def _forward(kind: type[nn.Module]) -> str:
    """The code of a class's forward, where it is known."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def lost_when_loaded(made: peft.LoraConfig, model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """The modules whose LoRA PEFT would not find in a file, as it renames what it reads in this kind of model."""
    keys = {f"{PREFIX}{name}.lora_A.weight": name for name in names}
    read = {key: torch.empty(1, 1, device="meta") for key in keys}
    renamed = peft.convert_peft_adapter_state_dict_for_transformers(model, made, read)
    return {name for key, name in keys.items() if key not in renamed}
