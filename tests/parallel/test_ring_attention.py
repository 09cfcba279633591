"""Ring attention equals attention in one process, forward and backward, and holds few blocks of keys at once."""

from __future__ import annotations

import itertools
import queue
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtune.parallel import attention_pieces, flash_pieces, ring_attention
from shardtune.parallel.cost.traffic import ring_steps, ring_tokens
from shardtune.parallel.ring_attention import Scoring
from shardtune.parallel.ring_plan import RingPlan, Sight
from shardtune.parallel.sequence_parallel import TokenShare

CAUSAL = Sight(causal=True, window=None)
SIGHTS = (CAUSAL, Sight(causal=True, window=5), Sight(causal=True, window=1), Sight(causal=False, window=None))
SIGHTS = (*SIGHTS, Sight(causal=False, window=7))


@dataclass(eq=False)
class Thread:
    """A thread that stands for a rank, for the mesh along `sequence`, and for its group.

    Attributes:
        rank: this one.
        boxes: what ranks have sent each other, by source and target.
        ranks: how many there are.
        sent: tokens, in each exchange.
        most: blocks of other ranks that it held at one time, in the forward pass.
        most_backward: the same in the backward pass.
    """

    rank: int
    ranks: int
    boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]]
    sent: list[int] = field(default_factory=list)
    most: int = 0
    most_backward: int = 0
    _held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> Thread:
        return self


@dataclass
class Coming:
    """Stands for the work of a collective."""

    box: queue.Queue[torch.Tensor]
    into: torch.Tensor

    def wait(self) -> None:
        self.into.copy_(self.box.get(timeout=30))


def exchange(sent: torch.Tensor, target: int, source: int, number: int, group: Thread) -> tuple[torch.Tensor, Coming]:
    """As `ring_attention._exchange`."""
    received = torch.full((number, *sent.shape[1:]), torch.nan, dtype=sent.dtype)
    group.boxes[group.rank, target].put(sent.clone())
    group.sent.append(len(sent))
    group._held.append(weakref.ref(received))
    group.most = max(group.most, sum(held() is not None for held in group._held))
    return received, Coming(group.boxes[source, group.rank], received)


def on_threads(ranks: int, function: Callable[[Thread], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a function gives on each of the ranks."""
    monkeypatch.setattr(ring_attention, "_exchange", exchange)
    boxes = {(a, b): queue.Queue[torch.Tensor]() for a in range(ranks) for b in range(ranks)}
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(function, [Thread(rank, ranks, boxes) for rank in range(ranks)]))


def visible(documents: Sequence[int], sight: Sight) -> torch.Tensor:
    """Bool [tokens, tokens]: which keys each query sees."""
    number = torch.repeat_interleave(torch.arange(len(documents) - 1), torch.tensor(documents).diff())
    distance = torch.arange(documents[-1])[:, None] - torch.arange(documents[-1])
    mask = number[:, None] == number
    mask = mask & (distance >= 0) if sight.causal else mask
    return mask & (distance.abs() < sight.window) if sight.window else mask


@dataclass
class Layer:
    """A layer's tensors for tokens of packed documents; [1, heads, tokens, size]."""

    documents: list[int]
    scoring: Scoring
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    weights: torch.Tensor
    in_order: bool = False

    @classmethod
    def drawn(cls, lengths: Sequence[int], heads: int, kv_heads: int, scoring: Scoring, *, sinks: bool) -> Layer:
        documents = [0, *itertools.accumulate(lengths)]
        draw = torch.Generator().manual_seed(sum(lengths))

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        total = documents[-1]
        query, key, value = randn(1, heads, total, 4), randn(1, kv_heads, total, 4), randn(1, kv_heads, total, 6)
        return cls(documents, scoring, query, key, value, randn(heads) if sinks else None, randn(1, total, heads, 6))

    def leaves(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        found = [cut(tensor).requires_grad_() for tensor in (self.query, self.key, self.value)]
        return found if self.sinks is None else [*found, self.sinks.clone().requires_grad_()]

    def plain(self) -> list[torch.Tensor]:
        """Output, and gradients of queries, keys, values and sinks."""
        leaves = self.leaves(torch.clone)
        query, key, value, *sinks = leaves
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * self.scoring.scale
        if self.scoring.softcap:
            scores = self.scoring.softcap * torch.tanh(scores / self.scoring.softcap)
        scores = scores.masked_fill(~visible(self.documents, self.scoring.sight), float("-inf"))
        for sink in sinks:
            scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        found = scores.softmax(-1)[..., : query.shape[2]] @ value.repeat_interleave(groups, 1)
        (found.transpose(1, 2) * self.weights).sum().backward()
        return [found.detach(), *(cast(torch.Tensor, leaf.grad) for leaf in leaves)]

    def on_rank(self, thread: Thread) -> list[torch.Tensor]:
        """The same of a rank's tokens, put into their places among zeros."""
        share = TokenShare.in_ring(self.documents, cast(DeviceMesh, thread), in_order=self.in_order)
        mine = share.mine(torch.arange(self.documents[-1]))
        place = share.local(torch.arange(self.documents[-1])[mine])

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            found = torch.full((*tensor.shape[:2], share.length, tensor.shape[-1]), 7.0, dtype=tensor.dtype)
            found[:, :, place] = tensor[:, :, mine]
            return found

        def put(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.new_zeros((*tensor.shape[:2], len(mine), tensor.shape[-1]))
            found[:, :, mine] = tensor[:, :, place]
            return found

        leaves = self.leaves(cut)
        sinks = None if self.sinks is None else leaves[3]
        query, key, value = leaves[:3]
        found = ring_attention.ring_attention(query, key, value, share, self.scoring, sinks)
        forward, thread.most = thread.most, 0
        (found.transpose(1, 2) * cut(self.weights.transpose(1, 2))).sum().backward()
        thread.most, thread.most_backward = forward, thread.most
        grads = [cast(torch.Tensor, leaf.grad) for leaf in leaves]
        return [*map(put, [found.detach().transpose(1, 2), *grads[:3]]), *grads[3:]]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("ranks", "in_order"),
    [*(pytest.param(ranks, False, marks=pytest.mark.slow) for ranks in (2, 4)), (3, False), (3, True)],
)
def test_ring_attention_is_attention(ranks: int, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged documents that cross chunks, grouped heads, windows, soft caps and sinks; a few scores at a time."""
    draw = random.Random(ranks)
    for trial, sight in enumerate(SIGHTS * 3):
        monkeypatch.setitem(attention_pieces.SCORES, "cpu", draw.choice((32, 2**20)))
        monkeypatch.setattr(attention_pieces, "KEYS", draw.choice((4, 1024)))
        longest = draw.choice((3, 12, 60))
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 7))]
        kv_heads = draw.choice((1, 3))
        scoring = Scoring(sight, 0.5, 3.0 if trial % 3 == 1 else None)
        layer = Layer.drawn(lengths, kv_heads * draw.choice((1, 2)), kv_heads, scoring, sinks=trial % 3 == 2)
        layer.in_order = in_order
        found = [sum(parts) for parts in zip(*on_threads(ranks, layer.on_rank, monkeypatch), strict=True)]
        for ours, plain in zip(found, layer.plain(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def kernel_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    most_queries: int, most_keys: int, before: int, behind: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What torch documents of FlashAttention: the last query is aligned with the last key; -1 is no limit."""
    outputs, sums = [], []
    for scores, _, v, _ in kernel_scores(query, key, value, query_ends, key_ends, before, behind, scale):
        sums.append(scores.logsumexp(-1))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        assert scores.shape[-2] <= most_queries
        assert scores.shape[-1] <= most_keys
    return torch.cat(outputs), torch.cat(sums, dim=1)


def kernel_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, result: torch.Tensor,
    sums: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor, most_queries: int, most_keys: int,
    before: int, behind: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    found: list[list[torch.Tensor]] = [[], [], []]
    parts = kernel_scores(query, key, value, query_ends, key_ends, before, behind, scale)
    groups = query.shape[1] // key.shape[1]
    for (scores, k, v, place), q in zip(parts, query.split(query_ends.diff().tolist()), strict=True):
        upstream, output = grad[place].transpose(0, 1), result[place].transpose(0, 1)
        weights = (scores - sums[:, place, None]).exp()
        of_scores = weights * (upstream @ v.transpose(1, 2) - (upstream * output).sum(-1, keepdim=True)) * scale
        found[0].append((of_scores @ k).transpose(0, 1))
        for place_of, left, right in ((1, of_scores, q.transpose(0, 1)), (2, weights, upstream)):
            each = left.transpose(1, 2) @ right
            found[place_of].append(each.unflatten(0, (-1, groups)).sum(1).transpose(0, 1))
    of_query, of_key, of_value = map(torch.cat, found)
    return of_query, of_key, of_value


def kernel_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    before: int, behind: int, scale: float,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:  # fmt: skip
    """Masked scores, repeated keys and values [heads, tokens, size], and place among the queries, part by part."""
    groups = query.shape[1] // key.shape[1]
    parts = (itertools.pairwise(ends.tolist()) for ends in (query_ends, key_ends))
    for (start, end), (first, last) in zip(*parts, strict=True):
        q = query[start:end].transpose(0, 1)
        k, v = (tensor[first:last].transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        ahead = torch.arange(last - first) - torch.arange(end - start)[:, None] - (last - first) + (end - start)
        seen = (ahead >= -before if before >= 0 else ahead == ahead) & (ahead <= behind if behind >= 0 else True)
        assert seen.any(1).all()
        yield (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf), k, v, slice(start, end)


@pytest.mark.parametrize("sight", SIGHTS)
def test_pieces_are_what_the_kernel_takes(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself needs a GPU, and is compared there with the plain way before it is used."""
    monkeypatch.setattr(flash_pieces, "flash_attention_forward", kernel_forward)
    monkeypatch.setattr(flash_pieces, "flash_attention_backward", kernel_backward)
    assert flash_pieces.agrees.__wrapped__(torch.device("cpu"), torch.float32, 2, 8)
    monkeypatch.setattr(flash_pieces, "usable", lambda *_: True)
    layer = Layer.drawn([9, 1, 30, 4, 25], 4, 2, Scoring(sight, 0.5), sinks=True)
    found = [sum(parts) for parts in zip(*on_threads(3, layer.on_rank, monkeypatch), strict=True)]
    for ours, plain in zip(found, layer.plain(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_a_kernel_that_gives_other_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unscaled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found, sums = kernel_forward(*arguments)
        return 2 * found, sums

    monkeypatch.setattr(flash_pieces, "flash_attention_forward", unscaled)
    monkeypatch.setattr(flash_pieces, "flash_attention_backward", kernel_backward)
    assert not flash_pieces.agrees.__wrapped__(torch.device("cpu"), torch.float32, 2, 8)
    assert "without FlashAttention on cpu: it gives other numbers" in caplog.text


@pytest.mark.parametrize("ranks", [2, 8])
def test_two_blocks_of_other_ranks_are_held_at_most(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document over all ranks, whose keys and values all of them need."""
    layer = Layer.drawn([16 * ranks - 3], 2, 1, Scoring(CAUSAL, 0.5), sinks=False)

    def held(thread: Thread) -> tuple[int, int, int]:
        layer.on_rank(thread)
        sent = [step.sent for step in plan(layer.documents, ranks, thread.rank).exchanges(CAUSAL).steps]
        assert thread.sent[: len(sent)] == [end - first for first, end in sent]
        return thread.most, thread.most_backward, len(thread.sent)

    # Backward the gradient of a block that this rank has sent, too; keys and values go once more, and gradients return.
    assert on_threads(ranks, held, monkeypatch) == [(min(ranks - 1, 2), min(ranks - 1, 3), 3 * (ranks - 1))] * ranks


def plan(documents: Sequence[int], ranks: int, rank: int) -> RingPlan:
    return RingPlan.of(documents, ranks, rank)


def pairs(documents: Sequence[int], ranks: int, rank: int) -> int:
    """Pairs of a query and a key that a rank computes, in causal layers."""
    exchanges = plan(documents, ranks, rank).exchanges(CAUSAL)
    return sum(
        min(query - piece.query + piece.distance + 1, piece.key_end - piece.key)
        for piece in itertools.chain(exchanges.own, *(step.pieces for step in exchanges.steps))
        for query in range(piece.query, piece.query_end)
    )


def test_ranks_have_equally_much_of_a_long_document() -> None:
    alone, ragged = [0, 4096], [0, 700, 3100, 3150, 4096]
    for documents, unequal in ((alone, 1.001), (ragged, 1.6)):
        found = [pairs(documents, 8, rank) for rank in range(8)]
        lengths = [end - start for start, end in itertools.pairwise(documents)]
        assert sum(found) == sum(length * (length + 1) // 2 for length in lengths)
        assert max(found) < unequal * sum(found) / 8


def test_documents_within_chunks_are_not_sent() -> None:
    assert not plan([0, 16, 32, 48, 64], 2, 0).exchanges(CAUSAL).steps
    found = [plan([0, 5, 8], 2, rank).exchanges(CAUSAL).steps[0] for rank in range(2)]
    assert [step.received for step in found] == [1, 2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_sent_is_what_the_formula_says(ranks: int) -> None:
    """Exact for one document; for ragged ones, whose borders fall anywhere, on average."""

    def received(documents: Sequence[int]) -> float:
        steps = [plan(documents, ranks, rank).exchanges(CAUSAL).steps for rank in range(ranks)]
        return sum(step.received for each in steps for step in each) / ranks

    assert received([0, 4096]) == ring_tokens(4096, 4096, ranks)
    assert len(plan([0, 4096], ranks, 0).exchanges(CAUSAL).steps) == ring_steps(4096, 4096, ranks)
    draw, found = random.Random(0), 0.0
    for _ in range(200):
        lengths = [draw.randint(1, 127) for _ in range(64)]
        found += received([0, *itertools.accumulate(lengths)]) / 200
    length = sum(each * each for each in range(128)) / sum(range(128))  # of the document that a token is in
    assert found == pytest.approx(ring_tokens(4096, length, ranks), rel=0.1)
