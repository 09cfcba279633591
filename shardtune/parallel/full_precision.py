"""Parameters that stay in full precision when a model computes in half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from shardtune.parallel.adapted_names import without_adapter
from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.token_layers import input_embedding


def full_precision_parameters(root: nn.Module, compute: torch.dtype) -> set[nn.Parameter]:
    """The parameters of a module that stay in full precision when it computes in half precision.

    Those of a norm with running statistics, which takes half-precision inputs, but parameters in the statistics' dtype
    alone. And those that transformers keeps in fp32 where it loads a model in this half precision: routers and short
    convolutions, as the code of some models takes them in no other dtype (Inkling 2), and in fp16 layers whose results
    may exceed its range (T5). Embeddings and heads are computed in half precision whatever a class declares
    (Hunyuan 4): they are large, and whole weights are on every rank.

    Args:
        root: the module.
        compute: bf16 or fp16; otherwise there are the norms alone.
    """
    norms = {parameter for norm in statistical_norms(root).values() for parameter in norm.parameters(recurse=False)}
    return norms.union(*(_kept(model, compute) for model in outermost_pretrained(root)))


def full_precision_layers(root: nn.Module, compute: torch.dtype) -> list[nn.Linear]:
    """Linear layers that need units of their own, as transformers keeps them in fp32 in fp16 alone (T5).

    They are too large to lie whole on every rank, as all else that stays in full precision does. Those below an
    adapter, which may use their weights without calling them (DoRA), are left out.
    """
    if compute != torch.float16:
        return []
    of_fp16 = full_precision_parameters(root, compute) - full_precision_parameters(root, torch.bfloat16)
    return [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and of_fp16.issuperset(module.parameters()) and without_adapter(name) == name
    ]


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether transformers has a parameter in fp32 where it loads a model in a dtype, by the parameter's name
    (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`)."""
    declared = [*model._get_dtype_plan(dtype)]
    pattern = build_glob_alternation([*declared])[0] if declared else None
    return lambda name: pattern is not None and pattern.search(without_adapter(name)) is not None


def _kept(model: PreTrainedModel, compute: torch.dtype) -> set[nn.Parameter]:
    is_kept = kept_in_fp32(model, compute)
    outer = (input_embedding(model), model.get_output_embeddings())
    apart = {parameter for module in outer if module is not None for parameter in module.parameters()}
    named = model.named_parameters()
    return {parameter for name, parameter in named if is_kept(name) and parameter.is_floating_point()} - apart


def outermost_pretrained(module: nn.Module) -> Iterator[PreTrainedModel]:
    """The models of transformers in a module that are in no other; each declares what its parts do."""
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from outermost_pretrained(child)
