"""Which keys the queries of a rank attend to under ring attention, and what of it ranks send each other.

Tokens lie on ranks in zigzag order: of 2 q chunks for q ranks, rank r has chunks r and 2 q - 1 - r. A causal layer has
more to do for later tokens; with an early and a late chunk each, all ranks have equally much of a long document. Where
each rank has to have neighbours, rank r has chunk r of q chunks, and later ranks have more to do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """Queries and keys of one document that attend to each other, in blocks of two ranks.

    Attributes:
        query: the first query, counted from the block's first token.
        query_end: behind the last.
        key: the first key, counted from the first token of its block.
        key_end: behind the last.
        distance: position of the first query minus that of the first key.
    """

    query: int
    query_end: int
    key: int
    key_end: int
    distance: int

    def of_keys_from(self, first: int) -> Piece:
        """The same with keys counted from this one."""
        return Piece(self.query, self.query_end, self.key - first, self.key_end - first, self.distance)


class Sight(NamedTuple):
    """What a layer's queries see of their document.

    Attributes:
        causal: not what comes after them.
        window: tokens, itself included, on each side; None: all.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True)
class Exchanges:
    """What a rank computes and sends for layers of one sight.

    Attributes:
        own: pieces of its own keys.
        steps: by distance d of the ranks, those that move anything, on all ranks alike: this rank receives from the
            one d before it, and sends to the one d after it.
    """

    own: tuple[Piece, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Step:
    """An exchange of keys and values between ranks of one distance.

    Attributes:
        source: the rank that this one receives from.
        target: the rank that it sends to.
        received: how many tokens arrive.
        sent: the first token of the block that is sent, and the one behind the last.
        pieces: of the keys that arrive, which are counted from the first that arrives.
    """

    source: int
    target: int
    received: int
    sent: tuple[int, int]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RingPlan:
    """Who attends to what in a forward of packed documents.

    Worked example: documents of 5 and 3 tokens on 2 ranks are 4 chunks of 2: rank 0 has tokens 0, 1 and 6, 7, rank 1
    has 2, 3 and 4, 5. Of a causal layer rank 0 receives token 5 for its queries 6 and 7, rank 1 receives tokens 0 and 1
    for its queries 2, 3 and 4: a document that does not cross a chunk's border costs nothing.

    Attributes:
        ranks: that share the tokens.
        rank: this one.
        chunk: tokens of a chunk.
        documents: the first token of each, and the number of tokens.
        in_order: whether each rank has one chunk, in the order of ranks.
    """

    ranks: int
    rank: int
    chunk: int
    documents: tuple[int, ...]
    in_order: bool = False
    _found: dict[Sight, Exchanges] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, documents: Sequence[int], ranks: int, rank: int, *, in_order: bool = False) -> RingPlan:
        """The plan of a rank for documents given as `PackedBatch.cu_seqlens`."""
        return cls(ranks, rank, chunk_of(documents[-1], ranks if in_order else 2 * ranks), tuple(documents), in_order)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first tokens of this rank's chunks."""
        return self._starts(self.rank)

    def exchanges(self, sight: Sight) -> Exchanges:
        """What this rank computes and sends for layers of a sight."""
        if sight not in self._found:
            own = tuple(self._pieces(self.rank, self.rank, sight))
            steps = tuple(self._step(distance, sight) for distance in self._distances(sight))
            self._found[sight] = Exchanges(own, steps)
        return self._found[sight]

    def _step(self, distance: int, sight: Sight) -> Step:
        source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
        pieces = list(self._pieces(self.rank, source, sight))
        first, end = _hull(pieces)
        shifted = tuple(piece.of_keys_from(first) for piece in pieces)
        return Step(source, target, end - first, _hull(self._pieces(target, self.rank, sight)), shifted)

    def _distances(self, sight: Sight) -> list[int]:
        """Those of ranks between which any keys are sent."""
        found: set[int] = set()
        for number in range(2 * self.ranks):
            start = number * self.chunk
            end = min(start + self.chunk, self.documents[-1])
            if start >= end:
                break
            first, last = self._seen(start, end, sight)
            for other in range(first // self.chunk, (last - 1) // self.chunk + 1):
                found.add((self._owner(number) - self._owner(other)) % self.ranks)
            if len(found) == self.ranks:
                break
        return sorted(found - {0})

    def _owner(self, chunk: int) -> int:
        return chunk if self.in_order else min(chunk, 2 * self.ranks - 1 - chunk)

    def _seen(self, start: int, end: int, sight: Sight) -> tuple[int, int]:
        """The first token that queries [start, end) see, and the one behind the last."""
        first = self.documents[bisect_right(self.documents, start) - 1]
        last = end if sight.causal else self.documents[bisect_right(self.documents, end - 1)]
        if sight.window is not None:
            first, last = max(first, start - sight.window + 1), min(last, end + sight.window - 1)
        return first, last

    def _starts(self, rank: int) -> tuple[int, ...]:
        first = rank * self.chunk
        return (first,) if self.in_order else (first, (2 * self.ranks - 1 - rank) * self.chunk)

    def _pieces(self, rank: int, source: int, sight: Sight) -> Iterator[Piece]:
        """The pieces of a rank's queries and of another's keys, or its own."""
        for place, start in enumerate(self._starts(rank)):
            for other, key_start in enumerate(self._starts(source)):
                shift, key_shift = place * self.chunk - start, other * self.chunk - key_start
                for query, query_end, key, key_end in self._between(start, key_start, sight):
                    yield Piece(query + shift, query_end + shift, key + key_shift, key_end + key_shift, query - key)

    def _between(self, start: int, key_start: int, sight: Sight) -> Iterator[tuple[int, int, int, int]]:
        """The same for two chunks, in tokens of the whole."""
        documents, total = self.documents, self.documents[-1]
        end, keys_end = min(start + self.chunk, total), min(key_start + self.chunk, total)
        if start >= end or key_start >= keys_end or (sight.causal and key_start > start):
            return
        place = bisect_right(documents, start) - 1
        last = place + 1 if key_start < start else len(documents) - 1  # only the first reaches back
        if key_start > start:  # and only the last ahead
            place = bisect_right(documents, end - 1) - 1
        while place < last and documents[place] < end:
            query, query_end = max(start, documents[place]), min(end, documents[place + 1])
            key, key_end = max(key_start, documents[place]), min(keys_end, documents[place + 1])
            place += 1
            if sight.causal:
                key_end = min(key_end, query_end)
            if sight.window is not None:  # every query sees a key, and every key is seen
                key, key_end = max(key, query - sight.window + 1), min(key_end, query_end + sight.window - 1)
                query, query_end = max(query, key - sight.window + 1), min(query_end, key_end + sight.window - 1)
            if query < query_end and key < key_end:
                yield query, query_end, key, key_end


def chunk_of(num_tokens: int, chunks: int) -> int:
    """Tokens of each of these chunks, the last of which are filled up."""
    return -(-num_tokens // chunks)


def _hull(pieces: Iterator[Piece] | Sequence[Piece]) -> tuple[int, int]:
    """The first key of pieces, and the one behind the last; of none 0 and 0."""
    keys = [(piece.key, piece.key_end) for piece in pieces]
    return (min(key for key, _ in keys), max(end for _, end in keys)) if keys else (0, 0)
