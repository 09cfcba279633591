"""The collectives of a rank in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardtune.parallel.cost.memory import LOGITS_PER_CHUNK
from shardtune.parallel.cost.shape import ModelShape, Parts, Setting, Work

RING = "keys and values"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind in a step of one rank.

    Attributes:
        what: is moved.
        kind: of collective.
        axis: of the layout: shard (with sequence), replicate, tensor, sequence or expert.
        ranks: that take part.
        stride: how far neighbours among them are apart in the order of ranks.
        calls: of the collective.
        payload: bytes of the whole tensors of all calls.
    """

    what: str
    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "to_one"]
    axis: str
    ranks: int
    stride: int
    calls: int
    payload: float

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, and as many that it receives, in rings."""
        if self.kind == "to_one":
            return self.payload
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.payload * (self.ranks - 1) / self.ranks


def traffic(shape: ModelShape, setting: Setting, work: Work) -> list[Exchange]:
    """The collectives of a rank's step that move more than a few numbers."""
    found = [*_weights(shape, setting, work), *_tensor(shape, setting, work), *_sequence(shape, setting, work)]
    return [exchange for exchange in [*found, *_expert(shape, setting, work)] if exchange.ranks > 1]


def _weights(shape: ModelShape, setting: Setting, work: Work) -> Iterator[Exchange]:
    """Gathering weights, and reducing gradients over shards, then over copies."""
    layout, parts = setting.layout, Parts.of(shape, setting.layout)
    gathers = work.micro_batches * (2 if setting.reshard_after_forward else 1)
    reductions = work.micro_batches if setting.reduce == "every" else 1
    layers, rounds = parts.layers, work.micro_batches
    shard = ("shard", setting.shards, layout.tensor)
    copies = ("replicate", layout.replicate, setting.shards * layout.tensor)
    amount = setting.compute * (gathers * layers * parts.unit + rounds * parts.outside)
    yield Exchange("weights", "all_gather", *shard, gathers * layers + rounds, amount)
    gradients, calls = setting.sums * reductions * parts.dense, reductions * (layers + 1)
    yield Exchange("gradients", "reduce_scatter", *shard, calls, gradients)
    yield Exchange("gradients of copies", "all_reduce", *copies, calls, gradients / setting.shards)
    if parts.experts:
        among = ("shard", layout.num_ranks // layout.expert, layout.expert)
        experts = layers * parts.experts
        yield Exchange("weights", "all_gather", *among, gathers * layers, setting.compute * gathers * experts)
        yield Exchange("gradients", "reduce_scatter", *among, reductions * layers, setting.sums * reductions * experts)


def _tensor(shape: ModelShape, setting: Setting, work: Work) -> Iterator[Exchange]:
    """Sums of what tensor ranks have computed in parts.

    Forward: after the embedding, and after each matrix that is cut along its inputs. Backward: before each that is cut
    along its outputs. At the head: the gradient of its input, and three numbers per target. Once per step the gradients
    of keys' and values' projections, where fewer heads than ranks are repeated.
    """
    layout = setting.layout
    tokens = work.tokens / layout.sequence
    inputs, outputs = (1, 3) if shape.experts else (2, 5)
    again = inputs - 1 if setting.gradient_checkpointing else 0  # the last result of a layer is not needed again
    calls = work.micro_batches * (1 + shape.layers * (inputs + outputs + again))
    axis = ("tensor", layout.tensor, 1)
    yield Exchange("activations", "all_reduce", *axis, calls, calls * tokens * shape.width * setting.compute)
    head = work.micro_batches * work.targets / layout.sequence * setting.sums
    chunks = math.ceil(work.targets * shape.vocabulary / LOGITS_PER_CHUNK / layout.sequence)
    yield Exchange("head", "all_reduce", *axis, work.micro_batches * (1 + 3 * chunks), head * (shape.width + 3))
    if layout.tensor > shape.kv_heads:
        repeated = setting.sums * shape.layers * shape.key_value / setting.shards
        yield Exchange("gradients of repeated heads", "all_reduce", *axis, 1, repeated)


def _sequence(shape: ModelShape, setting: Setting, work: Work) -> Iterator[Exchange]:
    """Queries, keys, values and results, from a part of the tokens to a part of the heads and back; or the keys and
    values of other ranks' tokens, twice, and their gradients once."""
    layout = setting.layout
    tokens = work.tokens / layout.sequence
    if layout.rings(shape.heads, shape.kv_heads):
        kv = max(shape.kv_width // layout.tensor, shape.head_size)
        passes = work.micro_batches * shape.layers * (4 if setting.gradient_checkpointing else 3)
        steps = ring_steps(work.tokens, work.length, layout.sequence)
        each = ring_tokens(work.tokens, work.length, layout.sequence) * setting.compute * 2 * kv
        yield Exchange(RING, "to_one", "sequence", layout.sequence, layout.tensor, passes * steps, passes * each)
        return
    kv = max(shape.kv_width // layout.tensor, shape.head_size * layout.sequence)
    passes = work.micro_batches * shape.layers * (3 if setting.gradient_checkpointing else 2)
    each = tokens * setting.compute * (2 * shape.query_width / layout.tensor + 2 * kv)
    yield Exchange("heads", "all_to_all", "sequence", layout.sequence, layout.tensor, 4 * passes, passes * each)


def ring_tokens(tokens: float, length: float, ranks: int) -> float:
    """Tokens whose keys a rank receives for a layer of packed rows of this length, the mean over ranks.

    Half of a row lies before each of a rank's two chunks, which are neighbours on the last rank; of one row as long as
    the micro-batch, all that is before the later chunk, without the other.
    """
    return min(length, 0.75 * tokens) * (ranks - 1) / ranks


def ring_steps(tokens: float, length: float, ranks: int) -> int:
    """Exchanges of a layer's forward pass: a row reaches so many chunks back, in two directions."""
    return min(ranks - 1, 2 * math.ceil(2 * ranks * length / tokens))


def _expert(shape: ModelShape, setting: Setting, work: Work) -> Iterator[Exchange]:
    """Tokens to their experts and back, if experts are chosen equally often."""
    layout = setting.layout
    tokens = work.tokens / layout.model_ranks
    passes = work.micro_batches * shape.layers * (3 if setting.gradient_checkpointing else 2)
    each = 2 * tokens * shape.experts_per_token * shape.width * setting.compute
    yield Exchange("tokens", "all_to_all", "expert", layout.expert, 1, 2 * passes, passes * each)
