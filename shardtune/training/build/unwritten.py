"""Finds tensors to which nothing gave values while a model was built.

`from_pretrained` of transformers allocates a tensor that is not in the files, and leaves its values to the class's
`_init_weights`. What that does not write is memory as it was found, and training would start from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel

from shardtune.errors import ModelError
from shardtune.parallel.meta_init import read_parameters

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Inside, torch fills new memory with NaN, so that `check_written` finds what nothing has written.

    Torch does so with deterministic algorithms, by its default for `torch.utils.deterministic`.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(before or "warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@torch.no_grad()
def check_written(model: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> None:
    """Refuse a model, built inside `unwritten_is_nan()`, with tensors that have no values.

    Buffers that a constructor leaves empty (a cache that is filled later) become zero.

    Args:
        model: what is on the meta device is left out.
        counts: whether the values of a tensor, by its name, are used.

    Raises:
        ModelError: names the tensors, and the class that has to give them values.
    """
    read = [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and read_parameters(module)
    ]
    found: list[str] = []
    tensors = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in tensors:
        if not _is_unwritten(tensor):
            continue
        if not isinstance(tensor, nn.Parameter) and not any(name.startswith(prefix) for prefix, _ in read):
            tensor.zero_()
        elif counts(name):
            found.append(name)
    if not found:
        return
    owners = [type(module).__name__ for prefix, module in read if found[0].startswith(prefix)]
    owner = owners[0] if owners else type(model).__name__
    names = f"{', '.join(found[:3])}{', …' if len(found) > 3 else ''}"
    raise ModelError(
        f"{len(found)} of {len(tensors)} tensors of {owner} have no values: {names}"
        + ("; they are not in the files that from_pretrained read, nor written by _init_weights" if owners else ""),
        where=f"{owner}._init_weights" if owners else f"{owner}.__init__",
        remedy="initialise them in the class's _init_weights(module), as its constructor does"
        if owners
        else "initialise them in the constructor, or after it in build; or return their values from initial_weights",
    )


def _is_unwritten(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, UninitializedParameter) or tensor.is_meta or not tensor.numel():
        return False
    if tensor.layout != torch.strided:  # a sparse one is made of entries
        return False
    if tensor.dtype in FLOATS:
        return bool(tensor.flatten()[0].isnan()) and bool(tensor.isnan().all())
    # Torch fills whole numbers with their largest.
    return tensor.dtype in INTEGERS and bool((tensor == torch.iinfo(tensor.dtype).max).all())
