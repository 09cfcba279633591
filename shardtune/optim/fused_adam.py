"""Steps of Adam and AdamW that round what they store, in one pass over a parameter: on a GPU with Triton.

torch's operations read and write a number some hundred times to round it, which a GPU's memory bounds: for billions of
weights that takes longer than a forward pass. The kernel's arithmetic is that of `low_bit.py`, but for last digits.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from shardtune.batch.seeds import derive_seed
from shardtune.optim.quantized_state import BLOCK, SCALE, Place, codes, local

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


@cache
def kernel() -> Any:
    """The kernel; None without Triton."""
    try:
        return importlib.import_module("shardtune.optim.fused_adam_kernel").adam
    except (ImportError, AttributeError, RuntimeError):
        return None


def first_index(parameter: torch.Tensor, place: Place, state: Mapping[str, Any]) -> int | None:
    """The index in the whole parameter of this rank's first number, or None where one pass cannot update it.

    It needs whole rows, end to end in memory, of blocks of 256 numbers.

    Args:
        parameter: with its gradient.
        place: of this rank's part.
        state: of the parameter.
    """
    part, grad = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
    held = [local(value) for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
    if not part.numel() or part.dtype not in (torch.float32, torch.bfloat16):
        return None
    whole_rows = tuple(part.shape[1:]) == tuple(place.shape[1:]) and not any(place.offsets[1:])
    blocks = part.shape[-1] if MEAN + SCALE in state else part.numel()
    if not whole_rows or blocks % BLOCK or not all(tensor.is_contiguous() for tensor in (part, grad, *held)):
        return None
    return place.offsets[0] * math.prod(place.shape[1:]) if part.ndim else 0


def launch(
    group: Mapping[str, Any], name: str, parameter: torch.Tensor, first: int, state: Mapping[str, Any],
    *, decoupled: bool, seed: int,
) -> None:  # fmt: skip
    """Update a parameter and its moments, for the step that `state` counts.

    Args:
        group: of the parameter.
        name: of the parameter.
        parameter: with its gradient.
        first: of `first_index`.
        state: of the parameter.
        decoupled: AdamW's weight decay.
        seed: of the run.
    """
    number, (beta1, beta2) = int(state["step"]), group["betas"]
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    part, grad = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
    mean, square = local(state[MEAN]), local(state[SQUARE])
    coded = mean.dtype == torch.uint8
    scales = [local(state[key + SCALE]) if coded else part for key in (MEAN, SQUARE)]
    tables = [codes(signed, part.device) for signed in (True, False)]
    keys = [derive_seed(seed, what, name, number) for what in ("moments", "weights")]
    halves = [_signed(half & 0xFFFFFFFF) for key in keys for half in (key, key >> 31)]
    kernel()[(part.numel() // BLOCK,)](
        part, grad, mean, scales[0], square, scales[1], *tables,
        first, *halves,
        1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**number), group["eps"], rate / (1 - beta1**number),
        1 - rate * decay if decoupled else 1.0, 0.0 if decoupled else decay,
        CODED=coded, ROUNDED=mean.dtype == torch.bfloat16, HALF=part.dtype == torch.bfloat16,
        MAXIMIZE=bool(group.get("maximize")), enable_fp_fusion=False,  # each operation rounds
    )  # fmt: skip


def _signed(number: int) -> int:
    """The 32 bits as a signed number: Triton has one kernel for it, whatever the number."""
    return number - 2**32 if number >= 2**31 else number
