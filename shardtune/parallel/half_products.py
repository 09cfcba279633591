"""Products of half-precision matrices on a processor without instructions for them.

Without AVX-512 or the like torch multiplies bf16 on a CPU number by number, some fifty to a hundred times slower than
fp32. Products of such numbers are exact in fp32, in which they are summed by every processor: so here factors are
converted, multiplied in fp32, and the result is rounded once, as those instructions do. What is kept for the backward
pass stays in half precision.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardtune.parallel.torch_private.graph import backward
from shardtune.parallel.torch_private.modules import is_compiled
from shardtune.parallel.torch_private.operations import grouped_product, half_is_native, tree_iter

HALF = (torch.bfloat16, torch.float16)
CONVERTED_AT_ONCE = 2**18
"""Numbers that are converted at a time while they are added: fresh memory for all of them takes longer than the sum."""


class _Product(torch.autograd.Function):
    """`torch.matmul` of two tensors of one half precision, with at least two dimensions each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.matmul(one.float(), other.float()).to(one.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        one, other = ctx.saved_tensors
        slope, found_one, found_other = grad.float(), None, None
        if ctx.needs_input_grad[0]:
            found_one = torch.matmul(slope, other.float().mT).sum_to_size(one.shape).to(one.dtype)
        if ctx.needs_input_grad[1]:
            found_other = torch.matmul(one.float().mT, slope).sum_to_size(other.shape).to(other.dtype)
        return found_one, found_other


class _Linear(torch.autograd.Function):
    """`F.linear` of rows [rows, in], a weight [out, in], and a bias [out] or None, of one half precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(rows.float(), weight.float(), None if bias is None else bias.float()).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, Any], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight = ctx.saved_tensors
        slope, (of_rows, of_weight, of_bias) = grad.float(), ctx.needs_input_grad
        return (
            torch.mm(slope, weight.float()).to(rows.dtype) if of_rows else None,
            torch.mm(slope.t(), rows.float()).to(weight.dtype) if of_weight else None,
            slope.sum(0).to(weight.dtype) if of_bias else None,
        )


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.ndim != 2:
        return _converted(F.linear, input, weight, bias)
    found = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias)
    assert isinstance(found, torch.Tensor)
    return found.reshape(*input.shape[:-1], weight.shape[0])


def _matmul(input: torch.Tensor, other: torch.Tensor, **settings: Any) -> torch.Tensor:
    if settings or min(input.ndim, other.ndim) < 2 or input.dtype != other.dtype:
        return _converted(torch.matmul, input, other, **settings)
    found = _Product.apply(input, other)
    assert isinstance(found, torch.Tensor)
    return found


def _converted(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operation in fp32, rounded; for what is rare, as it keeps converted factors for the backward pass."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    if any(kwargs.get(name) is not None for name in ("out", "dtype", "out_dtype")):
        return func(*args, **kwargs)
    found = func(*map(_float, args), **{name: _float(value) for name, value in kwargs.items()})
    return found.to(next(tensor.dtype for tensor in tensors if tensor.dtype in HALF))


def _float(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_float, value))
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


_TENSOR: Any = torch.Tensor
_mkldnn: Any = torch.backends.mkldnn
_FORMS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((_TENSOR.matmul, _TENSOR.__matmul__, _TENSOR.mm, _TENSOR.bmm), _matmul),
}
_RARE: Collection[Any] = (
    torch.addmm, torch.baddbmm, torch.addbmm, torch.einsum, torch.mv, torch.outer,
    _TENSOR.addmm, _TENSOR.baddbmm, _TENSOR.addbmm, _TENSOR.mv, _TENSOR.__rmatmul__,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.bilinear,
    F.scaled_dot_product_attention, grouped_product,
)  # fmt: skip


class ProductsInFp32(TorchFunctionMode):
    """Inside, products of half-precision tensors on the CPU are computed in fp32 and rounded once."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func == _TENSOR.backward:
            with self:  # a mode is off while it handles a function, and this one computes layers again
                return backward(*args, **kwargs)
        form = _FORMS.get(func)
        if form is not None and _are_half(args):
            return form(*args, **kwargs)
        if func in _RARE and _are_half(args):
            return _converted(func, *args, **kwargs)
        return func(*args, **kwargs)


def _are_half(values: Any) -> bool:
    """Whether the floating tensors among an operation's arguments are of half precision, and on the CPU."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    for value in values:
        if isinstance(value, list | tuple):
            tensors += [each for each in value if isinstance(each, torch.Tensor)]
    return bool(tensors) and all(each.dtype in HALF and each.device.type == "cpu" for each in tensors)


class _Inside(threading.local):
    """How many modules of a thread are being called."""

    depth = 0


_computing_so: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def multiply_in_fp32(root: nn.Module) -> None:
    """Let a model compute its products so, whichever of its modules is called, and in `recomputing`.

    A model with compiled layers keeps the products of torch: their code is made once, and called inside of the model as
    well as by itself.

    Args:
        root: a model, sharded or not, that computes in half precision on a processor that lacks its instructions.
    """
    if any(is_compiled(module) for module in root.modules()):
        return
    _computing_so.add(root)
    inside, mode = _Inside(), ProductsInFp32()

    def before(_module: nn.Module, _inputs: object) -> None:
        if not inside.depth:
            mode.__enter__()
        inside.depth += 1

    def after(_module: nn.Module, _inputs: object, _output: object) -> None:
        inside.depth -= 1
        if not inside.depth:
            mode.__exit__(None, None, None)

    for module in root.modules():
        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)


def recomputing() -> AbstractContextManager[object]:
    """For a backward pass, in which checkpointed layers are computed again without the hooks of their modules."""
    return ProductsInFp32() if _computing_so else nullcontext()


@contextmanager
def factors_in_bf16(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within, fp32 matrices on a CPU are multiplied by its instructions for bf16: factors are rounded to bf16, products
    summed in fp32. Of factors that were bf16, nothing is rounded, and it takes half of the time.

    The setting is one of the whole process, so only the product itself may stand inside.

    Args:
        device: of the factors.
        dtype: that they were converted from; for others than bf16, and without the instructions, nothing is set.
    """
    settings = _mkldnn.matmul
    before = settings.fp32_precision
    # What a user has set for all of oneDNN is read here too, and stays theirs to change.
    is_so = before == "bf16"
    if is_so or device.type != "cpu" or dtype != torch.bfloat16 or lacks_half_products(device, dtype):
        yield
        return
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@torch.no_grad()
def add_converted(total: torch.Tensor, part: torch.Tensor) -> None:
    """`total += part`, where `part` may have another dtype; on a CPU without a copy of all of it in that of `total`.

    Args:
        total: [n, ...].
        part: of the same shape.
    """
    if total.dtype == part.dtype or total.device.type != "cpu" or not total.ndim:
        total += part
        return
    rows = max(1, CONVERTED_AT_ONCE * len(total) // max(1, total.numel()))
    for piece, added in zip(total.split(rows), part.split(rows), strict=True):
        piece += added


def lacks_half_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a dtype are computed number by number on a device."""
    return device.type == "cpu" and dtype in HALF and not half_is_native(dtype)
