"""Gradients that FSDP does not sum, on two tensor ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardtune.config.rank_layout import Layout
from shardtune.parallel.gradient_sums import sum_parts, sum_whole
from shardtune.parallel.ranks import lay_out
from tests.support.dist.ranks import run_ranks


def summed() -> dict[str, object]:
    """Of tensor ranks 0 and 1: what is alike on both, what one has alone, what none has, and parts of a gradient."""
    rank = dist.get_rank()
    ranks = lay_out(Layout(tensor=2), rank, torch.device("cpu"))
    alike, first, second, unused = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(4))
    alike.grad = torch.tensor(3.0, dtype=torch.float64)
    (first if rank == 0 else second).grad = torch.tensor(5.0, dtype=torch.float64)
    sum_whole([alike, first, second, unused], torch.float64, ranks)
    parts = [torch.tensor([1.0, 2.0]) * 10**rank, torch.tensor([[4.0]]) * 10**rank]
    sum_parts(parts, ranks)
    found = {"alike": alike, "first": first, "second": second, "unused": unused}
    grads = {name: None if one.grad is None else one.grad.item() for name, one in found.items()}
    return {**grads, "parts": [part.tolist() for part in parts]}


def test_what_ranks_hold_whole_is_summed_as_it_was_computed() -> None:
    """A gradient that both computed counts once; with T ranks that each contributed, it would count T times."""
    expected = {"alike": 3.0, "first": 5.0, "second": 0.0, "unused": None, "parts": [[11.0, 22.0], [[44.0]]]}
    assert run_ranks(summed, 2) == [expected, expected]
