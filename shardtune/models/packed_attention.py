"""Attention over rows packed end to end ("documents"), in which no document attends to another.

Registered with transformers' `AttentionInterface` as `DOCUMENTS`; the boundaries are the keyword arguments that
transformers passes to every attention layer (`cu_seq_lens_q`, `max_length_q`).

Worked example: rows of 3, 2 and 4 tokens are packed into one sequence of 9. `cu_seq_lens_q` is [0, 3, 5, 9]: document
d is tokens [cu[d], cu[d + 1]), and the differences [3, 2, 4] are the lengths that query, key and value are split into.
Token 4, the second of document 1, attends to tokens 3 and 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from shardtune.errors import ParallelError
from shardtune.models.flex_documents import Soft, soft_attention
from shardtune.parallel.ring_attention import Scoring, ring_attention
from shardtune.parallel.ring_plan import Sight
from shardtune.parallel.sequence_parallel import TokenShare, to_heads, to_tokens

DOCUMENTS = "shardtune_documents"
"""The name of the implementation, as `attn_implementation` of a transformers config."""
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Names of the dropout on attention weights in configs of transformers."""
_NAMES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether groups of query heads have to be named; torch before 2.13 takes them as they are."""


@torch.compiler.disable(recursive=True)  # document lengths are data; a compiled graph would specialise on each of them
def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    token_share: TokenShare | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of each document to itself, with the model's window, soft cap and sinks.

    Args:
        module: the attention layer; its `is_causal` is the default of the argument.
        query: [rows, heads, tokens, head_dim]; one row, or with `token_share` several: documents lie end to end.
        key: [rows, key_value_heads, tokens, head_dim].
        value: [rows, key_value_heads, tokens, value_dim].
        attention_mask: must be None; the documents are given by `cu_seq_lens_q`.
        dropout: probability on the attention weights.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        sliding_window: tokens a query sees, itself included.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: [heads], attention sinks: one more score per head in the softmax, without a value.
        is_causal: None: as the layer declares.
        cu_seq_lens_q: int32 [documents + 1].
        max_length_q: tokens in the longest document.
        token_share: this rank's tokens under sequence parallelism. Heads are then exchanged for tokens, or keys and
            values come from other ranks; several rows have the same documents.

    Returns:
        ([rows, tokens, heads, value_dim], None).
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(f"{DOCUMENTS} needs document boundaries and no mask: the model passed none to its layers")
    # transformers calls this with layers of any model, which may lack `is_causal`, and looks it up the same way.
    settings = _Settings(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        window=sliding_window,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
    )
    if token_share is not None and token_share.ring is not None:
        return _ring(query, key, value, token_share, settings), None
    rows = query.shape[0]
    if token_share is not None:
        # 4 heads and 8 tokens on 2 ranks: a rank has [rows, 4 heads, 4 tokens], exchanges it for [rows, 2 heads, 8
        # tokens], computes attention of whole documents there, and exchanges the result back. It needs the sinks of its
        # 2 heads.
        query, key, value = (_end_to_end(to_heads(tensor, token_share)) for tensor in (query, key, value))
        if s_aux is not None:
            ranks = token_share.ranks
            settings = replace(settings, sinks=s_aux.chunk(ranks.size())[ranks.get_local_rank()])
    plain, found = softcap is None and s_aux is None, None
    if query.is_cuda and not plain and not dropout:  # None where it has to be computed by the formula
        soft = Soft(settings.scale, settings.causal, settings.window, settings.softcap, settings.sinks)
        found = soft_attention(query, key, value, cu_seq_lens_q, soft, explicit)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and plain and not dropout:
        output = _varlen(query, key, value, cu_seq_lens_q, max_length_q, settings)
    elif found is not None:
        output = found.transpose(1, 2).contiguous()
    else:  # one call per document: of torch's kernel, or of the formula
        dtype, lengths = query.dtype, cu_seq_lens_q.diff().tolist()
        if query.device.type == "cpu" and dtype.itemsize == 2:
            # In half precision oneDNN would compile products for the lengths of all documents, and be slower.
            query, key, value = query.float(), key.float(), value.float()
        documents = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        one = _sdpa if plain else _explicit
        output = torch.cat([one(q, k, v, settings).transpose(1, 2) for q, k, v in documents], dim=1).contiguous()
        output = output.to(dtype)
    return (output if token_share is None else to_tokens(output.unflatten(1, (rows, -1))[0], token_share)), None


@dataclass(frozen=True, slots=True)
class _Settings:
    """How a layer's attention is computed; `window` and `sinks` as `sliding_window` and `s_aux` above."""

    scale: float
    causal: bool
    window: int | None
    dropout: float
    softcap: float | None
    sinks: torch.Tensor | None


def _end_to_end(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, tokens, size] to [1, heads, rows * tokens, size]."""
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def _ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: TokenShare, settings: _Settings
) -> torch.Tensor:
    if settings.dropout:
        raise ParallelError(
            f"ring attention has no dropout on attention weights ({settings.dropout:g})",
            where="actor.parallel.sequence_method",
            remedy="set the model's dropout of attention to 0 (actor.model.config_overrides)",
        )
    scoring = Scoring(Sight(settings.causal, settings.window), settings.scale, settings.softcap)
    # Rows with the same documents are as further heads: [2 rows, 4 heads, tokens, size] as [1, 8 heads, tokens, size].
    rows, sinks = query.shape[0], settings.sinks
    q, k, v = (tensor.flatten(0, 1)[None] for tensor in (query, key, value))
    output = ring_attention(q, k, v, share, scoring, sinks if sinks is None else sinks.repeat(rows))
    return output[0].unflatten(1, (rows, -1)).transpose(0, 1)


def check_no_dropout(values: Mapping[str, object], where: str, remedy: Callable[[str], str]) -> None:
    """Refuse dropout on attention weights, which ring attention does not have.

    Args:
        values: of the config of a model's texts.
        where: the ring was chosen.
        remedy: for the key that has the dropout.
    """
    for name in ATTENTION_DROPOUT:
        if values.get(name):
            raise ParallelError(
                f"ring attention has no dropout on attention weights, and the model's {name} is {values[name]}",
                where=where,
                remedy=f"{remedy(name)}, or use ranks that divide the heads",
            )


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    settings: _Settings,
) -> torch.Tensor:
    """torch's FlashAttention over documents of different lengths."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # A window of 4 is the query and 3 tokens before it; FlashAttention counts those 3, and -1 means no limit.
    left = -1 if settings.window is None else settings.window - 1
    right = 0 if settings.causal else left
    grouped: dict[str, Any] = {"enable_gqa": True} if _NAMES_GROUPS and q.shape[1] != k.shape[1] else {}
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, scale=settings.scale, window_size=(left, right),
        **grouped,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out[None]


def explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, soft: Soft) -> torch.Tensor:
    """The formula for one document: [1, heads, tokens, size] to [1, heads, tokens, value_dim]."""
    settings = _Settings(soft.scale, soft.causal, soft.window, 0.0, soft.softcap, soft.sinks)
    return _explicit(query, key, value, settings)


def _visible(length: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys]: which keys each query attends to.

    `distance` is query minus key position. Causal with a window of 2, query 3 has distances [3, 2, 1, 0] to keys 0 to
    3 and attends to keys 2 and 3.
    """
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask &= distance.abs() < window
    return mask


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: _Settings) -> torch.Tensor:
    length, causal, mask = query.shape[2], settings.causal, None
    if settings.window is not None and settings.window < length:
        mask, causal = _visible(length, causal, settings.window, query.device), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=settings.dropout, is_causal=causal, scale=settings.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """The formula written out, for features that no kernel has: soft caps (Gemma 2) and sinks (gpt-oss)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    visible = _visible(query.shape[2], settings.causal, settings.window, query.device)
    sinks = settings.sinks
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    acc = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=acc)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights.to(query.dtype), settings.dropout) @ value


AttentionInterface.register(DOCUMENTS, document_attention)
