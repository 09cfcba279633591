"""The attention implementation of a model of transformers: its name, and how it is replaced."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.hub_kernels import is_kernel
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

from shardtune.errors import ConfigError

KEY = "actor.model.attn_implementation"
AUTO = "auto"
FLASH = {f"flash_attention_{version}": version for version in FLASH_ATTENTION_COMPATIBILITY_MATRIX}
FLASH_PACKAGES = {2: "flash-attn", 3: "flash-attn-3 (flash_attn_interface)", 4: "flash-attn-4"}


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The same model, as the type that an adapter of transformers' models has built."""
    assert isinstance(model, PreTrainedModel)
    return model


def attention_name(model: nn.Module) -> str:
    """The name of the language model's attention implementation."""
    return pretrained(model).config.get_text_config()._attn_implementation or "eager"


def set_attention(model: nn.Module, name: str) -> None:
    """Replace the attention implementation of the language model; a vision tower keeps its own."""
    config = pretrained(model).config
    if config.get_text_config()._attn_implementation == name:
        return
    inner = [key for key in config.sub_configs if config.get_text_config() is getattr(config, key)]
    pretrained(model).set_attn_implementation({inner[0]: name} if inner else name)


def takes_boundaries(name: str) -> bool:
    """Whether an implementation of transformers takes the boundaries of packed rows as keyword arguments: the
    FlashAttentions, by its own names and by names of the Hub, owner/name."""
    return is_flash_attention_requested(requested_attention_implementation=name) or is_kernel(name)


def check_attention(name: str) -> None:
    """Refuse an implementation that transformers cannot load here, without building a model.

    Raises:
        ConfigError: its package or GPU is missing, or nothing has this name.
    """
    from_hub = is_kernel(name)
    if from_hub and not is_kernels_available():
        why = f"the package kernels ({KERNELS_MIN_VERSION} or newer, before {KERNELS_MAX_VERSION}) is not installed"
        raise _cannot(name, why, "pip install 'shardtune[hub-kernels]'")
    if name in FLASH:
        version = FLASH[name]
        available = FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]["general_availability_check"]()
        if not available and not is_kernels_available():  # with which transformers fetches it from the Hub
            package = FLASH_PACKAGES.get(version, name)
            why = f"it needs a GPU and the package {package}, or the package kernels, which fetches it from the Hub"
            raise _cannot(name, why, f"install one of them on a machine with a GPU, or set {KEY}: {AUTO}")
    known = [AUTO, "eager", *AttentionInterface().valid_keys()]
    if not from_hub and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise _cannot(name, "transformers has no attention implementation of this name", remedy)


def _cannot(name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"{KEY}: {name} cannot be used: {why}", where=KEY, remedy=remedy)


@contextmanager
def under_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Another attention implementation within a `with` block."""
    before = attention_name(model)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)
