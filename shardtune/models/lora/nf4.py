"""Frozen linear layers stored in four bits (NF4) and decoded in each use, by plain PyTorch or by bitsandbytes.

After QLoRA (Dettmers et al., 2023, arXiv:2305.14314): weights are cut into blocks of 64, each divided by its largest
magnitude, and every value becomes the nearest of 16 levels, the quantiles of a normal distribution. Blocks never cross
rows, so a rank that has some rows of a matrix can encode and decode them alone, and FSDP2 shards the codes like any
matrix.

Worked example: a row of 100 weights is padded with 28 zeros to two blocks of 64. A block takes 36 bytes: 32 bytes of
codes, then its largest magnitude in fp32, so the row takes 72. In the first block let that be 0.5: a weight of 0.22 is
0.44 of it, the nearest level is 0.4407 (code 12), and it is decoded as 0.4407 * 0.5 = 0.2204. If the next weight is
-0.5 (code 0), the two share the byte 12 << 4 | 0 = 192.

The codes are those of bitsandbytes, by level, rounding and order in a byte. Where it is installed, its kernels decode
them, on a CPU or a GPU, if a trial there gives the same bits as plain PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from shardtune.errors import ModelError
from shardtune.parallel.full_precision import full_precision_parameters

logger = logging.getLogger(__name__)

BLOCK = 64
CODE_BYTES = BLOCK // 2
BLOCK_BYTES = CODE_BYTES + 4
"""Two codes per byte, then the block's largest magnitude in fp32."""

# Appendix E of the paper: the levels of NF4.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

_PAIRS = torch.cartesian_prod(torch.tensor(LEVELS), torch.tensor(LEVELS))

KERNELS = "bitsandbytes"
"""The package whose kernels are used where it is installed."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that they can decode to."""

Kernel = Callable[[torch.Tensor, torch.Tensor, int, str, list[int], torch.dtype], torch.Tensor]
"""(codes [bytes, 1], scales [blocks], block, "nf4", shape, dtype) -> values, as bitsandbytes' `dequantize_4bit`."""


def packed_width(columns: int) -> int:
    """Bytes of a row of so many weights: ceil(columns / 64) blocks of 36, as the last may be padded."""
    return -(-columns // BLOCK) * BLOCK_BYTES


@torch.no_grad()
def encode(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in NF4, row by row.

    Args:
        weight: [rows, columns], finite, of any floating dtype.

    Returns:
        uint8 [rows, packed_width(columns)].
    """
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    padded = weight.new_zeros(rows, blocks * BLOCK, dtype=torch.float32)
    padded[:, :columns] = weight
    values = padded.view(rows, blocks, BLOCK)
    scale = values.abs().amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(scale).all()):
        raise ModelError(
            "a weight that is infinite or not a number has no place among the levels of NF4",
            where="actor.model.lora.base_dtype: nf4",
            remedy="mend the base model's weights, or set actor.model.lora.base_dtype: bf16",
        )
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2  # the code of a value is the number of midpoints below it
    codes = torch.bucketize(values / torch.where(scale > 0, scale, 1.0), between, out_int32=True).to(torch.uint8)
    pairs = (codes[..., 0::2] << 4) | codes[..., 1::2]  # weights 0 and 1 are the high and the low half of byte 0
    return torch.cat([pairs, scale.contiguous().view(torch.uint8)], dim=-1).view(rows, blocks * BLOCK_BYTES)


@torch.no_grad()
def decode(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights that `encode` stored: [rows, columns], level times scale in fp32, then cast.

    Args:
        packed: uint8 [rows, packed_width(columns)].
        columns: of the matrix.
        dtype: of the result.
    """
    # torch.compile fuses the plain decoding.
    kernel = None if torch.compiler.is_compiling() else kernel_for(packed.device, dtype)
    if kernel is None:
        return decode_plainly(packed, columns, dtype)
    return _decode_by(kernel, packed, columns, dtype)


def decode_plainly(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`decode` in PyTorch alone."""
    rows = packed.shape[0]
    blocks = packed.view(rows, -1, BLOCK_BYTES)
    scale = blocks[..., CODE_BYTES:].contiguous().view(torch.float32)
    values = _pairs(packed.device)[blocks[..., :CODE_BYTES].int()].view(rows, -1, BLOCK)
    return values.mul_(scale).view(rows, -1)[:, :columns].to(dtype)


def _decode_by(kernel: Kernel, packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`decode` by a kernel that takes codes and scales as separate tensors."""
    rows = packed.shape[0]
    blocks = packed.view(rows, -1, BLOCK_BYTES)
    codes = blocks[..., :CODE_BYTES].reshape(-1, 1)
    scale = blocks[..., CODE_BYTES:].contiguous().view(torch.float32).view(-1)
    return kernel(codes, scale, BLOCK, "nf4", [rows, blocks.shape[1] * BLOCK], dtype)[:, :columns]


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The installed kernel for a device and dtype, if its results equal those of `decode_plainly` bit for bit."""
    if device.type == "meta" or dtype not in KERNEL_DTYPES or importlib.util.find_spec(KERNELS) is None:
        return None
    # Every byte of codes, and scales of many sizes; the last block of each row is not full.
    trial = torch.cat(
        [
            torch.arange(256, dtype=torch.uint8).view(8, CODE_BYTES),
            torch.logspace(-6, 4, 8).view(8, 1).view(torch.uint8),
        ],
        dim=1,
    ).view(4, 2 * BLOCK_BYTES).to(device)  # fmt: skip
    columns = 2 * BLOCK - 1
    try:
        importlib.import_module(KERNELS)
        kernel: Kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        agrees = torch.equal(_decode_by(kernel, trial, columns, dtype), decode_plainly(trial, columns, dtype))
    except (ImportError, OSError, AttributeError, RuntimeError) as problem:
        logger.warning("%s cannot decode NF4 on %s (%s); plain PyTorch does, slower", KERNELS, device, problem)
        return None
    if not agrees:
        logger.warning("%s decodes NF4 on %s to other values; plain PyTorch is used, slower", KERNELS, device)
    return kernel if agrees else None


def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2]: the levels of both codes of a byte; cached per device, except under torch.compile."""
    return _PAIRS.to(device) if torch.compiler.is_compiling() else _pairs_on(device)


@functools.cache
def _pairs_on(device: torch.device) -> torch.Tensor:
    return _PAIRS.to(device)


class _Context(FunctionCtx):
    """The state between the two passes of `_Linear`."""

    columns: int
    saved_tensors: tuple[torch.Tensor, ...]


class _Linear(torch.autograd.Function):
    """A linear layer whose matrix is decoded in each pass, so that the graph does not keep it."""

    @staticmethod
    def forward(
        ctx: _Context, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, columns: int
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.columns = columns
        return F.linear(x, decode(packed, columns, x.dtype), bias)

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return grads[0] @ decode(packed, ctx.columns, grads[0].dtype), None, None, None


class NF4Linear(nn.Linear):
    """A frozen linear layer whose matrix is stored in NF4, on the meta device until it is loaded.

    Args:
        linear: the layer it replaces.
        dtype: of the property `weight`.

    Attributes:
        packed: uint8 [out_features, packed_width(in_features)], sharded by rows.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        width = packed_width(self.in_features)
        self.packed = nn.Parameter(
            torch.empty(self.out_features, width, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        self.bias = linear.bias
        self.dtype = dtype
        self.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The matrix, decoded."""
        return decode(self.packed, self.in_features, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(input, self.packed, self.bias, self.in_features)


def to_nf4(model: nn.Module, kept: Collection[nn.Module], dtype: torch.dtype) -> list[str]:
    """Replace frozen linear layers by `NF4Linear`, in a model on the meta device; returns their names.

    Layers that are trained, tied to another weight, or of a subclass (which may use its matrix otherwise) are left out.

    Args:
        model: parameters on the meta device.
        kept: modules that are left out, with all their submodules.
        dtype: of the computation. Layers that need full precision compute in that.
    """
    in_full = full_precision_parameters(model, dtype)
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    inside = {child for module in kept for child in module.modules()}
    replaced: list[str] = []
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module in inside:
            continue
        if any(parameter.requires_grad for parameter in module.parameters()) or owners[id(module.weight)] > 1:
            continue
        parent, _, child = name.rpartition(".")
        own = torch.promote_types(dtype, torch.float32) if module.weight in in_full else dtype
        setattr(model.get_submodule(parent), child, NF4Linear(module, own))
        replaced.append(name)
    return replaced


def coded_sizes(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of weights that each parameter of codes represents."""
    layers = [module for module in model.modules() if isinstance(module, NF4Linear)]
    return {layer.packed: layer.in_features * layer.out_features for layer in layers}
