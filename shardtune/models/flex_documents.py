"""Attention with soft caps and sinks over packed rows on a GPU: torch's flex attention, compiled, by documents.

The formula written out holds all scores of a document in memory; this holds none. It is used where a small trial of it,
forward and backward, gives the formula's numbers; elsewhere the formula is.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

from shardtune.parallel.fp32_compute import computes_in_fp32
from shardtune.parallel.torch_private.operations import is_compiled_too_often

BLOCK = 128
"""Tokens of a block of the mask, the size that torch's kernels take by default."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AGREEMENT = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-2}
"""Of the trial: differences relative to the largest value. fp32 is multiplied in TF32 where a user allows that."""
TRIAL_REST = 32
"""Tokens beyond the whole blocks of the trial."""
GRAPHS = 32
"""At most, where this can be set (torch 2.13): of every dtype, scale and head size one with gradients and one without.
Otherwise torch's own limit holds."""
ALL_TOKENS = torch.iinfo(torch.int32).max
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""Not the one for few queries, which torch chooses for less than 128 tokens, and which has no way for some groups."""
Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Soft"], torch.Tensor]
"""Query, key and value of one document [1, heads, tokens, size] to [1, heads, tokens, value_dim], with their scores."""


@dataclass(frozen=True, slots=True)
class Soft:
    """How a layer's attention is computed.

    Attributes:
        scale: factor on the scores.
        causal: whether a query sees the tokens before it alone.
        window: tokens a query sees, itself included; None: all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: they do not.
        sinks: [heads], one more score per head in the softmax, without a value; None: there are none.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def soft_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, soft: Soft, formula: Formula
) -> torch.Tensor | None:
    """Attention of each document to itself; None where it has to be computed by the formula.

    Args:
        query: [1, heads, tokens, head_dim], on a GPU; documents lie end to end.
        key: [1, key_value_heads, tokens, head_dim].
        value: [1, key_value_heads, tokens, value_dim].
        cu_seqlens: int32 [documents + 1].
        soft: the settings.
        formula: the same for one document, for the trial.

    Returns:
        [1, heads, tokens, value_dim].
    """
    if query.dtype not in DTYPES or computes_in_fp32():
        return None
    if not has_torch_function((query, key, value)):  # of a plan, in which nothing can be tried
        sizes = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        settings = (soft.scale, soft.causal, soft.window, soft.softcap, soft.sinks is not None)
        if not _works(query.device, query.dtype, sizes, settings, formula):
            return None
    try:
        return _attend(flex, query, key, value, cu_seqlens, soft)
    except Exception as error:
        if not is_compiled_too_often(error):
            raise
        _say_formula("it was compiled too often, for too many dtypes and sizes of heads")
        return None


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, soft: Soft
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output without sinks, and the logarithm of each query's sum of exponentials, fp32 [1, heads, tokens]."""
    if has_torch_function((query, key, value)):  # in a plan only shapes exist
        return handle_torch_function(flex, (query, key, value), query, key, value, cu_seqlens, soft)
    return by_blocks(_compiled(), query, key, value, cu_seqlens, soft)


def by_blocks(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    soft: Soft,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `flex`, by torch's `flex_attention`, compiled or not."""
    tokens = query.shape[2]
    query, key, value = _laid_out(query), _laid_out(key), _laid_out(value)
    mask = document_mask(cu_seqlens, query.shape[2], soft.causal, soft.window)
    cap = None if soft.softcap is None else _cap(soft.softcap, query.dtype, query.device)
    grouped = query.shape[1] != key.shape[1]
    output, aux = kernel(
        query, key, value, score_mod=cap, block_mask=mask, scale=soft.scale, enable_gqa=grouped,
        kernel_options=KERNEL, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return output[:, :, :tokens], aux.lse[..., :tokens]


def _laid_out(heads: torch.Tensor) -> torch.Tensor:
    """With more than a block of tokens, in memory one after the other, as models compute them.

    Any other layout, and the case of a single block or token, would be compiled for itself. Tokens that are added are
    of no document.
    """
    missing = max(0, BLOCK + 1 - heads.shape[2])
    heads = F.pad(heads, (0, 0, 0, missing)) if missing else heads
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, soft: Soft
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flex` allocates and keeps for the backward pass, without values: for a plan."""
    return _Shapes.apply(query, key, value)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=8)
def document_mask(cu_seqlens: torch.Tensor, tokens: int, causal: bool, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries attends to, computed on the device from the bounds of documents.

    All layers of a forward share it: they get the same tensor of bounds.

    Worked example with blocks of 2: documents of 3 and 2 tokens, 0 0 0 1 1 and padding 2, have the blocks [0 0] [0 1]
    [1 2]. Causal, block 1 attends to block 0 (document 0) and to itself, block 2 to block 1 (document 1) and to itself.
    Within these the mask decides token by token.

    Args:
        cu_seqlens: int32 [documents + 1].
        tokens: of all documents, and of none after them.
        causal: as of `Soft`.
        window: likewise.
    """
    number = -(-tokens // BLOCK)
    places = torch.arange(number * BLOCK, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.bucketize(places, cu_seqlens[1:], right=True, out_int32=True)
    first, last = document[::BLOCK], document[BLOCK - 1 :: BLOCK]
    distance = places[:number, None] - places[None, :number]
    some = (first[:, None] <= last[None]) & (first[None] <= last[:, None])
    every = (first == last)[:, None] & (first == last)[None] & (first[:, None] == first[None])
    if causal:
        some, every = some & (distance >= 0), every & (distance > 0)
    if window is not None:
        some = some & ((distance.abs() * BLOCK - (BLOCK - 1)) < window)
        every = every & ((distance.abs() * BLOCK + (BLOCK - 1)) < window)
    # A tensor, as for `_cap`, and beyond all tokens where there is no window: layers of either kind share a graph.
    reach = torch.full((), window or ALL_TOKENS, dtype=torch.int32, device=cu_seqlens.device)

    def visible(_row: Any, _head: Any, query: Any, key: Any) -> Any:
        found = (document[query] == document[key]) & ((query - key) < reach)
        return found & (query >= key) if causal else found & ((key - query) < reach)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of a row's blocks [1, 1, rows], and their places first in [1, 1, rows, columns]; both int32."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


@lru_cache(maxsize=8)
def _cap(softcap: float, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """A soft cap of scores; a number of Python could not be compiled for any number of tokens at once."""
    limit = torch.full((), softcap, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def capped(score: Any, _row: Any, _head: Any, _query: Any, _key: Any) -> Any:
        return limit * torch.tanh(score / limit)

    return capped


def _attend(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    soft: Soft,
) -> torch.Tensor:
    """Attention with sinks: a sink s takes part in the sum of exponentials, exp(lse) becomes exp(lse) + exp(s)."""
    output, lse = attention(query, key, value, cu_seqlens, soft)
    if soft.sinks is None:
        return output
    share = torch.sigmoid(lse - soft.sinks.to(lse.dtype)[None, :, None])
    return (output * share[..., None]).to(output.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled once for any number of tokens.

    As a full graph: where torch has compiled it too often it raises an error. Otherwise it would go on uncompiled, with
    the scores of all tokens of a micro-batch to each other in memory.
    """
    limit: Any = {"recompile_limit": GRAPHS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, **limit)


@cache
def _works(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    settings: tuple[float, bool, int | None, float | None, bool],
    formula: Formula,
) -> bool:
    """Whether two small documents, with these sizes and settings, have the formula's output and gradients.

    In a thread of its own, which has none of the caller's modes: whether gradients are recorded, what is checkpointed.
    """
    differences: list[float] = []
    problems: list[str] = []

    def attempt() -> None:
        try:
            differences.extend(trial(flex, device, dtype, sizes, settings, formula))
        except Exception as error:  # no compiler, no kernel for these sizes: the formula has no such limits
            problems.append(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")

    thread = threading.Thread(target=attempt, name="shardtune-flex-trial")
    thread.start()
    thread.join()
    furthest = max(differences, default=0.0)
    if not problems and furthest <= AGREEMENT[dtype]:  # NaN is not
        return True
    _say_formula(problems[0] if problems else f"a trial of it is off by {furthest:.1e} of the largest value")
    return False


def _say_formula(why: str) -> None:
    warnings.warn(
        f"attention with soft caps or sinks is computed by its formula, with all scores of a document in memory, as "
        f"torch's flex attention cannot be used here: {why}",
        RuntimeWarning,
        stacklevel=3,
    )


def trial_tokens(sizes: Sequence[int]) -> int:
    """Tokens of the trial: three blocks or a few more, the last of them in part.

    What is compiled for the trial is used for all rows, so no size of it may be that of heads by chance: torch takes
    equal sizes for one and the same, and would compile once more for other rows.
    """
    places = ((blocks, (blocks - 1) * BLOCK + TRIAL_REST, blocks * BLOCK) for blocks in count(3))
    return next(place[1] for place in places if not {*place} & {*sizes})


def trial(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    settings: tuple[float, bool, int | None, float | None, bool],
    formula: Formula,
) -> list[float]:
    """The largest differences from the formula, of the output and of the gradients, relative to its largest values.

    Args:
        attention: `flex`, or another form of it.
        device: of the numbers.
        dtype: likewise.
        sizes: heads, heads of keys and values, their size, that of values.
        settings: those of `Soft`, for sinks whether there are any.
        formula: as for `soft_attention`.
    """
    heads, groups, size, value_size = sizes
    scale, causal, window, softcap, has_sinks = settings
    tokens = trial_tokens(sizes)
    lengths = [tokens * 2 // 3, tokens - tokens * 2 // 3]

    # Of a generator of its own: those of training stay as they are. Regular values would do less well: if all keys were
    # much alike, the gradient of a query would be a small rest of large terms, and of bf16 the rounding alone.
    draws = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(device, dtype)

    inputs = [
        numbers(1, heads, tokens, size),
        numbers(1, groups, tokens, size),
        numbers(1, groups, tokens, value_size),
        *([numbers(heads)] if has_sinks else []),
    ]
    slope = numbers(1, heads, tokens, value_size)
    bounds = torch.tensor([0, lengths[0], tokens], dtype=torch.int32, device=device)

    def computed(by_documents: bool) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        query, key, value = leaves[:3]
        soft = Soft(scale, causal, window, softcap, leaves[3] if has_sinks else None)
        if by_documents:
            parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
            output = torch.cat([formula(q, k, v, soft) for q, k, v in parts], dim=2)
        else:
            output = _attend(attention, query, key, value, bounds, soft)
        return [output.detach(), *torch.autograd.grad(output, leaves, slope)]

    with torch.enable_grad():
        pairs = zip(computed(False), computed(True), strict=True)
        return [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]


class _Shapes(torch.autograd.Function):
    """See `shapes`."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, _, lse = ctx.saved_tensors
        torch.empty_like(lse)  # the sum of each query's output times its gradient
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
