"""Attention over documents in half precision on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardtune.models.packed_attention import document_attention

LENGTHS = (5, 70, 33)
SETTINGS = ({}, {"sliding_window": 8}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0])})


def attended(tensors: list[torch.Tensor], **settings: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and the gradients."""
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    output, _ = document_attention(
        nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=max(LENGTHS), **settings
    )
    output.float().square().sum().backward()
    return output.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings), "plain"))
def test_half_precision_on_a_cpu_is_computed_in_fp32_and_rounded_once(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    half = [torch.randn(1, heads, sum(LENGTHS), 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    output, gradients = attended(half, **settings)
    whole, _ = attended([tensor.float() for tensor in half], **settings)
    assert output.dtype == torch.bfloat16
    assert output.is_contiguous()
    assert torch.equal(output, whole.bfloat16())
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3
