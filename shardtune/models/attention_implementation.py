"""The attention implementation of a model of transformers: its name, and how it is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


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


@contextmanager
def under_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Another attention implementation within a `with` block."""
    before = attention_name(model)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)
