"""Linear layers whose matrix products are computed in FP8 by torchao (`actor.model.fp8`).

Weights, gradients and the optimizer keep their dtypes: operands are rounded to eight bits, with a scale, where a
product is computed, forward and backward. Scales are computed anew each time, from the operands as they are then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.config.schema import Fp8Config
from shardtune.errors import ConfigError
from shardtune.models.fast_parts.replacement import Forward, Replacement

SECTION = "actor.model.fp8"
MULTIPLE = 16
"""Both sizes of a matrix must be multiples of this for the products of FP8."""
ROUTERS = ("gate", "router")
"""Last names of layers that choose experts: other choices are worse than other roundings."""
BASE = ".base_layer"
"""What PEFT appends to the name of a layer with an adapter."""


def find_layers(model: nn.Module, config: Fp8Config) -> tuple[list[Replacement], list[str]]:
    """The linear layers that compute in FP8, and a phrase for each group of those that do not.

    Raises:
        ConfigError: there is none, or a pattern of `exclude` matches none.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    named = {name: name.removesuffix(BASE) for name in linear}
    for pattern in config.exclude:
        if not any(re.search(pattern, name) for name in named.values()):
            raise ConfigError(
                f"{SECTION}.exclude: the pattern {pattern} matches no linear layer",
                where=f"{SECTION}.exclude",
                remedy=f"names look like {', '.join(list(named.values())[:3])}",
            )
    rules: dict[str, Callable[[str, nn.Linear], bool]] = {
        "the head": lambda name, layer: layer is head,
        "adapters": lambda name, layer: ".lora_" in name,
        "routers": lambda name, layer: name.rpartition(".")[2] in ROUTERS,
        f"sizes that {MULTIPLE} does not divide": lambda name, layer: bool(
            layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
        ),
        "excluded": lambda name, layer: any(re.search(pattern, named[name]) for pattern in config.exclude),
    }
    left: dict[str, list[str]] = {}
    found: list[Replacement] = []
    for name, layer in linear.items():
        why = next((why for why, applies in rules.items() if applies(name, layer)), None)
        if why is None:
            found.append(Replacement(named[name], layer, [_in_fp8(layer, config)]))
        else:
            left.setdefault(why, []).append(named[name])
    phrases = [f"{why} ({_brief(names)})" for why, names in left.items()]
    if not found:
        raise ConfigError(
            f"{SECTION}.scaling: {config.scaling}: no linear layer of {type(model).__name__} can compute in FP8: "
            + ("; ".join(phrases) or "it has none"),
            where=f"{SECTION}.scaling",
            remedy="leave it out",
        )
    return found, phrases


def _brief(names: list[str]) -> str:
    """Some names with numbers as *, each once."""
    stems = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    return f"{', '.join(stems[:3])}{', …' if len(stems) > 3 else ''}"


def _in_fp8(layer: nn.Linear, config: Fp8Config) -> Forward:
    """The forward of torchao's `Float8Linear` on the parameters that a layer has then.

    The layer itself stays: FSDP has found its parameters there, and an adapter or an export its class.
    """
    library: Any = import_module("torchao.float8")
    linear: Any = import_module("torchao.float8.float8_linear")
    # Rows are ragged: in the gradient of the weight the number of tokens is a size that 16 need not divide.
    made = replace(
        library.Float8LinearConfig.from_recipe_name(config.scaling), emulate=config.emulate, pad_inner_dim=True
    )
    with torch.device("meta"):
        products = linear.Float8Linear(layer.in_features, layer.out_features, bias=False, config=made).linear_mm_config

    def forward(x: torch.Tensor) -> torch.Tensor:
        output = linear.matmul_with_hp_or_float8_args.apply(x, layer.weight.t(), products, made)
        return output if layer.bias is None else output + layer.bias

    return forward
