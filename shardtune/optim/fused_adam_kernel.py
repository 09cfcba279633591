"""The kernel of `fused_adam.py`, in Triton; importing this module needs it."""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCK = triton.language.constexpr(256)
"""Numbers of a program, which are one block of 8-bit codes."""


@triton.jit
def _mixed(numbers, low, high):
    """`quantized_state.noise`: 32 random bits for each index. `low` and `high` are the key and the key >> 31."""
    found = numbers.to(tl.uint32) ^ low.to(tl.uint32)
    found = (found ^ (found >> 16)) * 0x21F0AAAD
    found = (found ^ (found >> 15)) ^ high.to(tl.uint32)
    found = found * 0x735A2D97
    return found ^ (found >> 15)


@triton.jit
def _rounded(values, bits):
    """`quantized_state.to_bf16`: the upper half of fp32 after 16 random bits were added to the lower one."""
    raw = values.to(tl.int32, bitcast=True) + bits.to(tl.int32)
    return (raw & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _stored(codes, scale, values, bits, table, places, block, SIGNED: tl.constexpr):
    """`quantized_state.to_codes`, stored: the code below a value's share of the largest one, or the next one."""
    largest = tl.max(tl.abs(values), 0)
    share = tl.div_rn(values, tl.where(largest > 0, largest, 1.0) + tl.zeros_like(values))
    below = tl.zeros_like(share).to(tl.int32)
    step = 128
    for _ in tl.static_range(8):  # the last of the codes 0 to 254 that is not above it
        tried = below + step
        fits = (tried <= 254) & (tl.load(table + tl.minimum(tried, 255)) <= share)
        below = tl.where(fits, tried, below)
        step = step // 2
    lower = tl.load(table + below)
    towards = tl.div_rn(share - lower, tl.load(table + below + 1) - lower)
    found = below + ((bits.to(tl.float32) + 0.5) * (1 / 65536) < towards).to(tl.int32)
    if not SIGNED:
        found = tl.where((values > 0) & (found < 1), 1, found)
    tl.store(codes + places, found.to(tl.uint8))
    tl.store(scale + block, largest)


@triton.jit
def _moment(held, scale, table, places, block, CODED: tl.constexpr):
    if CODED:
        return tl.load(table + tl.load(held + places).to(tl.int32)) * tl.load(scale + block)
    return tl.load(held + places).to(tl.float32)


@triton.jit(do_not_specialize=["first", "low", "high", "own_low", "own_high"])
def adam(
    weights, grad, mean, mean_scale, square, square_scale, signed, unsigned,
    first, low, high, own_low, own_high,
    lerp, beta2, rest2, root, eps, rate, kept, decay,
    CODED: tl.constexpr, ROUNDED: tl.constexpr, HALF: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """A step of Adam or AdamW on 256 numbers: `low_bit.LowBitAdam`, with what it stores rounded in the same way.

    Args:
        weights: fp32, or bf16 if `HALF`; contiguous, as all others.
        grad: fp32 or bf16.
        mean: codes if `CODED`, bf16 if `ROUNDED`, otherwise fp32.
        mean_scale: of each block of codes.
        square: as `mean`.
        signed: the values of signed codes.
        first: the index of the first number in the whole parameter.
        low: of the key of the random bits for moments.
        own_low: of that for weights.
        lerp: 1 - beta1.
        rest2: 1 - beta2.
        root: of 1 - beta2 ** step.
        rate: the learning rate / (1 - beta1 ** step).
        kept: 1 - learning rate * decoupled weight decay.
        decay: weight decay that is added to the gradient.
    """
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    numbers = places + first
    part = tl.load(weights + places).to(tl.float32)
    slope = tl.load(grad + places).to(tl.float32)
    if MAXIMIZE:
        slope = -slope
    slope += part * decay
    part = part * kept
    before = _moment(mean, mean_scale, signed, places, block, CODED)
    average = before + lerp * (slope - before)
    power = _moment(square, square_scale, unsigned, places, block, CODED) * beta2 + rest2 * slope * slope
    divisor = tl.div_rn(tl.sqrt_rn(power), root + tl.zeros_like(power)) + eps
    part -= rate * tl.div_rn(average, divisor)
    bits = _mixed(numbers, low, high)
    if CODED:
        _stored(mean, mean_scale, average, bits & 0xFFFF, signed, places, block, True)
        _stored(square, square_scale, power, bits >> 16, unsigned, places, block, False)
    elif ROUNDED:
        tl.store(mean + places, _rounded(average, bits & 0xFFFF))
        tl.store(square + places, _rounded(power, bits >> 16))
    else:
        tl.store(mean + places, average)
        tl.store(square + places, power)
    if HALF:
        tl.store(weights + places, _rounded(part, _mixed(numbers, own_low, own_high) & 0xFFFF))
    else:
        tl.store(weights + places, part)
