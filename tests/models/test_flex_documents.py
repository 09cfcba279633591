"""Soft caps and sinks by torch's flex attention, uncompiled on the CPU, against the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch

from shardtune.models import flex_documents, packed_attention
from shardtune.models.flex_documents import AGREEMENT, BLOCK, Soft, by_blocks, document_mask, trial
from shardtune.models.packed_attention import document_attention, explicit
from shardtune.parallel.fp32_compute import computing_in_fp32
from shardtune.run.plan.ledger import AsOnCuda, Ledger
from shardtune.run.plan.timeline import fullest

CPU = torch.device("cpu")


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "settings",
    [(0.3, True, 20, 2.0, True), (0.25, False, None, 2.0, False), (0.25, True, None, None, True)],
    ids=["cap, sinks and window", "cap, both ways", "sinks"],
)
def test_output_and_gradients_are_the_formulas(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """torch computes no gradients of it on a CPU for users, as the compiled form has none; the plain form has."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    attention = partial(by_blocks, of_torch.flex_attention)
    assert max(trial(attention, CPU, torch.float64, (4, 2, 16, 8), settings, explicit)) < 1e-10


class RoundingKernel(torch.autograd.Function):
    """Attention of one document that rounds to bf16 where a fused kernel does; its sums are exact."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, soft: Soft) -> torch.Tensor:
        assert soft.softcap is not None
        ctx.groups, ctx.scale = key.shape[1], soft.scale
        inner, key, value = (
            tensor.double().repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
            for tensor in (query, key, value)
        )
        slope = torch.tanh(inner @ key.mT * soft.scale / soft.softcap)
        hidden = ~packed_attention._visible(query.shape[2], soft.causal, soft.window, CPU)
        weights = (soft.softcap * slope).masked_fill(hidden, -torch.inf).softmax(-1)
        output = (weights.bfloat16().double() @ value).to(query.dtype)
        ctx.save_for_backward(inner, key, value, weights, 1 - slope**2, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, weights, slope, output = ctx.saved_tensors
        grad = grads[0].double()
        rest = (grad * output.double()).sum(-1, keepdim=True)  # of the rounded output, as no kernel keeps another
        scores = (weights * (grad @ value.mT - rest) * slope).bfloat16().double()

        def of_groups(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(1, (ctx.groups, -1)).sum(2).to(output.dtype)

        return (
            (scores @ key * ctx.scale).to(output.dtype), of_groups(scores.mT @ query * ctx.scale),
            of_groups(weights.bfloat16().double().mT @ grad), None,
        )  # fmt: skip


def rounded(query: Any, key: Any, value: Any, cu_seqlens: torch.Tensor, soft: Soft) -> Any:
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([RoundingKernel.apply(*part, soft) for part in parts], dim=2), None  # pyright: ignore


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [((8, 4, 256, 256), (256**-0.5, True, 4096, 50.0, False)), ((4, 2, 32, 32), (32**-0.5, True, 20, 2.0, False))],
    ids=["Gemma 2", "small"],
)
def test_a_trial_accepts_a_kernel_that_rounds_and_no_other(sizes: Any, settings: Any) -> None:
    apart = trial(rounded, CPU, torch.bfloat16, sizes, settings, explicit)
    assert 0 < max(apart) < AGREEMENT[torch.bfloat16] / 2

    def off(*given: Any) -> Any:
        query, *others, soft = given
        return rounded(query, *others, replace(soft, scale=soft.scale * 1.2))

    assert max(trial(off, CPU, torch.bfloat16, sizes, settings, explicit)) > 2 * AGREEMENT[torch.bfloat16]


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 200), (False, None), (False, 100)])
def test_blocks_are_those_with_a_visible_pair(causal: bool, window: int | None) -> None:
    lengths = [300, 7, 1, 500, 90, 128]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tokens = sum(lengths)
    mask = document_mask(bounds, tokens, causal, window)
    parts = [packed_attention._visible(length, causal, window, CPU) for length in lengths]
    number = -(-tokens // BLOCK)
    padded = torch.zeros(number * BLOCK, number * BLOCK, dtype=torch.bool)
    padded[:tokens, :tokens] = torch.block_diag(*parts).bool()
    cut = padded.view(number, BLOCK, number, BLOCK)
    assert torch.equal(mask.to_dense()[0, 0].bool(), cut.any(3).any(1))
    assert mask.full_kv_indices is not None
    assert mask.full_kv_num_blocks is not None
    full = [
        set(row[:count].tolist())
        for row, count in zip(mask.full_kv_indices[0, 0], mask.full_kv_num_blocks[0, 0], strict=True)
    ]
    assert full == [set(torch.nonzero(row).flatten().tolist()) for row in cut.all(3).all(1)]


def test_on_a_gpu_a_plan_counts_no_scores() -> None:
    tokens, heads = 2048, 4
    ledger = Ledger()
    with ledger.counting():
        query, key, value = (
            torch.empty(1, heads, tokens, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        with AsOnCuda():
            bounds = torch.tensor([0, tokens], dtype=torch.int32)
            output, _ = document_attention(
                SimpleNamespace(is_causal=True), query, key, value, None, softcap=2.0, cu_seq_lens_q=bounds,  # pyright: ignore
                max_length_q=tokens,
            )  # fmt: skip
            output.sum().backward()
    assert output.shape == (1, tokens, heads, 16)
    assert query.grad is not None
    assert sum(fullest(ledger.changes()).values()) < heads * tokens * tokens


def test_where_it_fails_the_formula_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no kernel")

    monkeypatch.setattr(flex_documents, "flex", fails)
    flex_documents._works.cache_clear()
    query = torch.ones(1, 2, 8, 16)
    soft = flex_documents.Soft(0.25, True, None, 2.0, None)
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.warns(RuntimeWarning, match=r"by its formula.*no kernel"):
        assert flex_documents.soft_attention(query, query, query, bounds, soft, explicit) is None
    flex_documents._works.cache_clear()


def test_a_comparison_in_fp32_is_computed_by_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function mode would be taken for that of a plan, in which only shapes exist."""
    monkeypatch.setattr(flex_documents, "_attend", None)
    query = torch.ones(1, 2, 8, 16)
    soft = flex_documents.Soft(0.25, True, None, 2.0, None)
    with computing_in_fp32():
        assert flex_documents.soft_attention(query, query, query, torch.tensor([0, 8]), soft, explicit) is None


def test_one_graph_with_gradients_and_one_without_serve_all_rows_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles eight forms of a function and then none: beyond them all scores would be in memory."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(of_torch.flex_attention, dynamic=True, fullgraph=True, backend=backend)

    def kernel(query: torch.Tensor, *given: Any, **settings: Any) -> Any:
        assert query.shape[2] > BLOCK  # shorter ones have a graph of their own on a GPU
        return compiled(query, *given, **settings)

    draws = torch.Generator().manual_seed(0)

    def forward(lengths: list[int], window: int | None) -> None:
        soft = Soft(0.25, True, window, 2.0, None)
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        query, key, value = (
            torch.randn(1, sum(lengths), heads, 16, generator=draws).transpose(1, 2) for heads in (4, 3, 3)
        )
        query, key, value = (tensor.requires_grad_(torch.is_grad_enabled()) for tensor in (query[:, :3], key, value))
        found, _ = by_blocks(kernel, query, key, value, bounds, soft)
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        torch.testing.assert_close(found, torch.cat([explicit(*part, soft) for part in parts], dim=2))

    settings = (0.25, True, 9, 2.0, False)
    apart = trial(partial(by_blocks, kernel), CPU, torch.float32, (3, 3, 16, 16), settings, explicit)
    assert max(apart) < 1e-5
    after_trial = len(graphs)
    for window in (9, None, 200):
        for lengths in ([300, 41, 20], [128], [128, 256], [50], [7], [1, 1], [1]):
            forward(lengths, window)
    assert len(graphs) == after_trial
    with torch.no_grad():
        for lengths in ([300, 41, 20], [50], [128]):
            forward(lengths, None)
            forward(lengths, 9)
    assert len(graphs) == after_trial + 1


def test_what_is_compiled_too_often_is_computed_by_the_formula_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    compiled = torch.compile(of_torch.flex_attention, dynamic=True, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex_documents, "_works", lambda *_: True)
    monkeypatch.setattr(flex_documents, "_compiled", lambda: compiled)
    soft = Soft(0.25, True, None, 2.0, None)
    bounds = torch.tensor([0, 8], dtype=torch.int32)

    def attention(dtype: torch.dtype) -> torch.Tensor | None:
        query = torch.ones(1, 2, 8, 16, dtype=dtype)
        return flex_documents.soft_attention(query, query, query, bounds, soft, explicit)

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        assert attention(torch.float32) is not None
        with pytest.warns(RuntimeWarning, match=r"by its formula.*compiled too often"):
            assert attention(torch.bfloat16) is None
    torch.compiler.reset()
