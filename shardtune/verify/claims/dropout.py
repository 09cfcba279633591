"""Switches dropout off: what it drops depends on the cut of a step into micro-batches, other numbers do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.parallel.torch_private.modules import DropoutBase

RANDOM = ("drop", "jitter")
"""Parts of the names of settings of transformers' configs that make a forward random in training."""
DEPTH = ("DropPath", "StochasticDepth")
"""Ends of the names of layers that leave out branches of rows in training: transformers', timm's, torchvision's."""
LAYERS = "layerdrop"
"""In the names of settings by which whole layers are left out in training, of modules or of their configs."""
MASKS = {"apply_spec_augment": ("mask_time_prob", "mask_feature_prob")}
"""Settings of configs that hide parts of a sound in training (SpecAugment), and the shares that they hide."""
PLUGIN = "shardtune.verify.claims.no_dropout"
"""A recipe's plugin that switches it off in a whole process."""


def drops(model: nn.Module) -> bool:
    """Whether a model has layers that drop."""
    dropout = any(isinstance(module, DropoutBase) and module.p for module in model.modules())
    return dropout or any(_is_depth(module) or _settings_of(module) for module in model.modules())


def _is_depth(module: nn.Module) -> bool:
    return type(module).__name__.endswith(DEPTH)


def _settings_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The attributes by which a module leaves out layers or hides input, each with those of the object that has it."""
    own, config = vars(module), vars(module).get("config")
    holders = [own, vars(config)] if isinstance(config, PretrainedConfig) else [own]
    return [
        (holder, name)
        for holder in holders
        for name, value in holder.items()
        if (LAYERS in name and isinstance(value, float) and value > 0)
        or (name in MASKS and value is True and any(holder.get(share) for share in MASKS[name]))
    ]


def _keep_all(module: nn.Module) -> list[tuple[dict[str, Any], str, object]]:
    """Let a module compute all its layers, of all its input; what was set, to be set again."""
    found = [(holder, name, holder[name]) for holder, name in _settings_of(module)]
    for holder, name, value in found:
        holder[name] = False if value is True else 0.0
    return found


def random_settings(adapter: Adapter | None) -> dict[str, object]:
    """The settings of a language model's config that draw in training, set to 0."""
    if not isinstance(adapter, CausalLM):
        return {}
    values = adapter.config.get_text_config().to_dict()
    return {
        name: 0.0
        for name, value in values.items()
        if any(part in name for part in RANDOM) and isinstance(value, float) and value
    }


def parts_drop(adapter: Adapter | None) -> bool:
    """Whether a part of a language model beside its text (a vision tower) has a setting that drops in training.

    Its attention passes the number to a function, so no layer shows it.
    """
    if not isinstance(adapter, CausalLM):
        return False
    return any(isinstance(part, dict) and _has_dropout(part) for part in adapter.config.to_dict().values())


def _has_dropout(settings: Mapping[object, object]) -> bool:
    nested = any(_has_dropout(value) for value in settings.values() if isinstance(value, dict))
    return nested or any(
        "drop" in str(name) and isinstance(value, float) and value > 0 for name, value in settings.items()
    )


def switch_off() -> None:
    """From now on torch's dropout passes its input on, attention drops nothing, nothing is left out or hidden."""
    attention, train = F.scaled_dot_product_attention, nn.Module.train

    def train_but_depth(self: nn.Module, mode: bool = True) -> nn.Module:
        _keep_all(self)
        return train(self, mode and not _is_depth(self))

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **settings: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, is_causal, **settings)

    F.dropout, F.scaled_dot_product_attention, nn.Module.train = _passed_on, attend, train_but_depth


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, it is switched off in a model."""
    dropout, attention, train = F.dropout, F.scaled_dot_product_attention, nn.Module.train
    depth = [module for module in model.modules() if _is_depth(module) and module.training]
    layers = [found for module in model.modules() for found in _keep_all(module)]
    switch_off()
    try:
        for module in depth:
            module.training = False
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention, nn.Module.train = dropout, attention, train
        for module in depth:
            module.training = True
        for holder, name, value in layers:
            holder[name] = value


def _passed_on(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return input
