"""Layers that a model leaves out at random in training (LayerDrop): each rank would leave out others.

A rank that leaves out a layer whose weights are sharded does not gather them, and the others wait, or take the next
layer's for them. Some classes of transformers compute such a layer all the same where it is sharded, and discard what
it gives; they call `is_fsdp_managed_module`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import FunctionType

from torch import nn
from transformers import PreTrainedConfig

from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError

SETTING = "layerdrop"
"""The attribute, of a stack of layers or of its config, with the share of layers that are left out."""
COMPUTES_ALL = "is_fsdp_managed_module"
"""The function of transformers by which a forward finds that it has to compute every layer."""


def check_layer_drop(model: nn.Module, units: Collection[nn.Module], layout: Layout) -> None:
    """Refuse a model of whose sharded layers each rank would leave out others.

    Args:
        model: the whole.
        units: its modules that are sharded one by one.
        layout: of the ranks.

    Raises:
        ModelError: names the stack of layers, and what to set.
    """
    if layout.num_data_ranks == 1:  # all draw alike
        return
    sharded = {id(unit) for unit in units}
    for name, module in model.named_modules():
        share = _share(module)
        if share and any(id(part) in sharded for part in module.modules() if part is not module):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) leaves out layers at random in training (a share of "
                f"{share:g}), each rank others, and ranks that share the weights have to compute the same layers",
                where="actor.model.model_path: its config",
                remedy=f"set {_settings(module)}, for a built-in model type in actor.model.config_overrides; "
                "or train on one rank",
            )


def _share(module: nn.Module) -> float:
    """The share of its layers that a module leaves out without computing them."""
    forward = inspect.getattr_static(type(module), "forward")  # of TorchScript's classes it cannot be read otherwise
    forward = inspect.unwrap(forward) if callable(forward) else forward
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    if SETTING not in names or COMPUTES_ALL in names:
        return 0.0
    config = vars(module).get("config")
    values = {**(vars(config) if isinstance(config, PreTrainedConfig) else {}), **vars(module)}
    share = values.get(SETTING)
    return float(share) if isinstance(share, int | float) else 0.0


def _settings(module: nn.Module) -> str:
    """Those of its config that leave out layers, at 0; without a config its attribute."""
    config = vars(module).get("config")
    values = vars(config) if isinstance(config, PreTrainedConfig) else {}
    names = [name for name, value in values.items() if SETTING in name and isinstance(value, int | float) and value]
    return ", ".join(f"{name}: 0.0" for name in names or [SETTING])
