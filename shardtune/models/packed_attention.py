"""Attention over rows packed end to end, in which no document sees another.

Registered with transformers' `AttentionInterface` as `DOCUMENTS`; the boundaries arrive as the keyword arguments that
transformers hands down to every attention layer (`cu_seq_lens_q`, `max_length_q`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from shardtune.parallel.sequence_parallel import TokenShare, to_heads, to_tokens

DOCUMENTS = "shardtune_documents"
"""The name of the implementation, as `attn_implementation` of a transformers config."""


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
        module: the attention layer, which says whether it is causal.
        query: [rows, heads, tokens, head_dim]; one row, or with `token_share` several: documents lie end to end.
        key: [rows, key_value_heads, tokens, head_dim].
        value: [rows, key_value_heads, tokens, value_dim].
        attention_mask: must be None; documents are told by `cu_seq_lens_q`.
        dropout: probability on the attention weights.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        sliding_window: tokens a query sees, itself included.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: [heads], attention sinks: one more score per head that takes weight and gives nothing.
        is_causal: None: what the layer says.
        cu_seq_lens_q: int32 [documents + 1].
        max_length_q: tokens in the longest document.
        token_share: where ranks share the tokens of a forward: which are this rank's. Heads are exchanged for tokens.

    Returns:
        ([rows, tokens, heads, value_dim], None).
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(
            f"{DOCUMENTS} needs document boundaries and no mask: the model did not hand them to its layers"
        )
    if token_share is not None:
        whole = (cu_seq_lens_q, max_length_q)
        return _exchanged(
            token_share, module, query, key, value, dropout, scaling, sliding_window, softcap, s_aux, is_causal, *whole
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = softcap is None and s_aux is None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and plain and not dropout:
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scale, causal, sliding_window), None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    if plain:
        outputs = [_sdpa(q, k, v, scale, causal, sliding_window, dropout) for q, k, v in parts]
    else:
        outputs = [_explicit(q, k, v, scale, causal, sliding_window, dropout, softcap, s_aux) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _exchanged(
    share: TokenShare,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    is_causal: bool | None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
) -> tuple[torch.Tensor, None]:
    """`document_attention` of all tokens of this rank's heads, for all heads of this rank's tokens."""
    rows = query.shape[0]
    query, key, value = (_end_to_end(to_heads(tensor, share)) for tensor in (query, key, value))
    if s_aux is not None:
        s_aux = s_aux.chunk(share.ranks.size())[share.ranks.get_local_rank()]
    output, _ = document_attention(
        module, query, key, value, None, dropout, scaling, sliding_window, softcap, s_aux, is_causal, cu_seq_lens_q,
        max_length_q,
    )  # fmt: skip
    return to_tokens(output.unflatten(1, (rows, -1))[0], share), None


def _end_to_end(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, tokens, size] to [1, heads, rows x tokens, size]."""
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """torch's FlashAttention over documents of several lengths."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1  # transformers counts the query itself, FlashAttention does not
    right = 0 if causal else left
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_length, max_length,
        scale=scale, window_size=(left, right), enable_gqa=grouped,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out[None]


def _visible(length: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """Which key each query sees: bool [length, length]."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask &= distance.abs() < window
    return mask


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        mask, causal = _visible(length, causal, window, query.device), False
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The formula written out, for what no kernel offers: soft caps (Gemma 2) and sinks (gpt-oss)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(query.shape[2], causal, window, query.device)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    acc = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=acc)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights.to(query.dtype), dropout) @ value


AttentionInterface.register(DOCUMENTS, document_attention)
