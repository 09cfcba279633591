"""Parameters and embeddings that cannot be trained or sharded: refused while the model is built, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardtune.errors import ModelError, ParallelError
from shardtune.parallel.meta_init import persistent_buffers
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE

FSDP1_KEY = "actor.training_backend: fsdp1"
AS_REAL = "register it as real numbers, with a last dimension of 2, and use torch.view_as_complex of it in the forward"


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters and buffers of lazy modules, which have no shape yet.

    Raises:
        ModelError: names the first one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name} of {type(model).__name__} gets its shape from a first forward pass",
                where=name,
                remedy="give all sizes: nn.Linear(in, out) instead of nn.LazyLinear(out)",
            )


def check_trained(model: nn.Module, precision: str, *, on_ranks: bool) -> None:
    """Refuse a model whose training would fail, or lose what a forward writes into its weights.

    Args:
        model: before it is sharded, with what is not trained frozen.
        precision: bf16 | pure_bf16 | fp16 | fp32 | fp64; in bf16 and fp16 it computes with copies of its trained
            weights.
        on_ranks: whether several ranks train it.

    Raises:
        ModelError: it has a trained embedding with sparse gradients, an embedding whose forward writes its weights, or
            a trained parameter of complex numbers.
    """
    from_copies = COMPUTE_DTYPE[precision] != MASTER_DTYPE[precision]
    for name, module in model.named_modules():
        if not _is_embedding(module):
            continue
        kind, trained = f"nn.{'EmbeddingBag' if isinstance(module, nn.EmbeddingBag) else 'Embedding'}", _trained(module)
        if module.sparse and trained:
            raise ModelError(
                f"{name} is an {kind} with sparse=True: its gradient is sparse, and neither summed over ranks nor "
                "clipped",
                where=name,
                remedy="leave sparse=True out, or freeze its weight",
            )
        if module.max_norm is not None and (on_ranks or (from_copies and trained)):
            copies = "ranks gather anew" if on_ranks else "are rounded anew from those in full precision"
            raise ModelError(
                f"{name} is an {kind} with max_norm={module.max_norm:g}: its forward writes into weights that "
                f"{copies}, and that is lost",
                where=name,
                remedy="leave max_norm out and scale the rows that the embedding returns; or train on one rank in fp32",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise ModelError(
                f"the parameter {name} holds complex numbers ({_dtype(parameter)}), which are not trained",
                where=name,
                remedy=f"{AS_REAL}; or freeze it",
            )


def check_saved(model: nn.Module) -> None:
    """Refuse what no checkpoint can hold, before training: complex numbers, which files of weights have no place for.

    Args:
        model: of which parameters and persistent buffers are saved.

    Raises:
        ModelError: names the first such tensor.
    """
    for name, tensor in {**dict(model.named_parameters()), **persistent_buffers(model)}.items():
        if tensor.is_complex():
            buffer = "" if isinstance(tensor, nn.Parameter) else ", or leave it out of checkpoints by persistent=False"
            raise ModelError(
                f"{name} holds complex numbers ({_dtype(tensor)}), which checkpoints and models on disk cannot hold",
                where=name,
                remedy=f"{AS_REAL}{buffer}",
            )


def check_python(model: nn.Module) -> None:
    """Refuse weights in modules of TorchScript, which no way of sharding can replace by its own.

    Args:
        model: that several ranks hold.

    Raises:
        ParallelError: names the first such module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            where = name or type(model).__name__
            raise ParallelError(
                f"{where} is a module of TorchScript (torch.jit), whose weights cannot be divided among ranks",
                where=where,
                remedy="build it as a Python module, without torch.jit.script or torch.jit.load; or train on one rank",
            )


def check_joined(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that FSDP1 cannot join with others.

    Args:
        parameters: of the model, by name.

    Raises:
        ParallelError: one holds no real floating-point numbers.
    """
    for name, parameter in parameters.items():
        if parameter.ndim and parameter.numel() and not parameter.is_floating_point():
            raise ParallelError(
                f"{FSDP1_KEY} joins parameters of floating-point numbers alone, and {name} holds {_dtype(parameter)}",
                where=FSDP1_KEY.partition(":")[0],
                remedy="use actor.training_backend: fsdp (FSDP2), or register it as a buffer",
            )


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
