"""torch's operations: their schemas, modes that see them, trees of arguments, kernels without a public name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import is_namedtuple_instance
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

# `OpOverload` is the type of what a selective-checkpointing policy receives; `torch.library` does not export it.
# `TorchDispatchMode` sees every operation below autograd; the public `TorchFunctionMode` misses those inside of torch.
# `FakeTensorMode` computes the shapes of results without memory, on a CPU too, where meta tensors cannot be sharded.
# `tree_map` and `tree_map_only` go through outputs of transformers, which registers its classes with this pytree and
# with no other. `is_namedtuple_instance` is of the same. To be replaced by `torch.utils.pytree`, once there is one.

CALLED_THROUGH = frozenset(
    ("torch.overrides", "torch._ops", "torch._tensor", "torch.functional", "torch.nn.functional")
)
"""Modules of torch through which functions written in Python, and registered operations, come to a function mode."""
grouped_product = torch._grouped_mm
"""Products of groups of rows, as the experts of transformers call it; the public one is `F.grouped_mm`."""


def named_fields(value: object) -> dict[str, object] | None:
    """The fields of a named tuple, whose own method for them begins with an underscore; None: it is none."""
    return cast(Any, value)._asdict() if is_namedtuple_instance(value) else None


def is_compiled_too_often(error: Exception) -> bool:
    """Whether a full graph was not compiled once more, as torch's limit of its forms is reached.

    Read from the name, as the module of the error takes a second to import; there is no public name for it.
    """
    return type(error).__name__ == "FailOnRecompileLimitHit"


@cache
def half_is_native(dtype: torch.dtype) -> bool:
    """Whether torch's library for CPUs multiplies matrices of bf16 or fp16 here, and not torch number by number."""
    operations = torch.ops.mkldnn
    found = operations._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else operations._is_mkldnn_fp16_supported
    return bool(found())


def schema_of(operation: OpOverload) -> torch.FunctionSchema:
    """The names, defaults and aliases of an operation's arguments; torch has no public way to read them."""
    return operation._schema


without_torch_function = torch._C.DisableTorchFunction
"""A context in which function modes do not see what is called, reads of attributes either; torch has no public one."""
multiply_ = torch._foreach_mul_
"""Scales a list of tensors in place, with few kernels; the public optimizers and clipping do it this way."""
norms_of = torch._foreach_norm
"""The norms of a list of tensors, on a GPU in a dtype that they are not copied into; the public clipping uses it."""

Unscale = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""Multiplies gradients by a number (the last argument), and sets a scalar to 1 where one of them is not finite."""


def get_unscale() -> Unscale:
    """What `torch.amp.GradScaler` calls with gradients of one device and dtype."""
    return torch._amp_foreach_non_finite_check_and_unscale_


def set_unscale(function: Unscale) -> None:
    """Let it call another function; only a mode, which costs a call for every operation, would be public."""
    torch._amp_foreach_non_finite_check_and_unscale_ = function


@contextmanager
def without_modes(*kinds: type) -> Iterator[None]:
    """Inside, modes of these kinds do not see operations, down to the first of another kind on their stack.

    Each costs a call of Python for every operation; the public way to leave a mode is the end of its own context.
    """
    popped = []
    while (mode := _get_current_function_mode()) is not None and isinstance(mode, kinds):
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    before: int,
    behind: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [queries, heads, size] and sums [heads, queries] of FlashAttention over packed queries and keys.

    `varlen_attn` gives both too, but its backward pass knows only the keys of this call; a ring's needs the sums of
    all. To be replaced by a public backward pass that takes them.
    """
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, query_ends, key_ends, most_queries, most_keys, 0.0, (before, behind) == (-1, 0), False,
        scale=scale, window_size_left=before, window_size_right=behind,
    )  # fmt: skip
    return found[0], found[1]


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    before: int,
    behind: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, for results and sums that may be those of more keys than these."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, result, sums, query_ends, key_ends, most_queries, most_keys, 0.0,
        (before, behind) == (-1, 0), unused, unused.new_empty(0), scale=scale,
        window_size_left=before, window_size_right=behind,
    )  # fmt: skip
