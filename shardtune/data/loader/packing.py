"""How the rows of a step are dealt to ranks and micro-batches, and laid end to end without padding."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shardtune.batch import Batch, PackedBatch, Sample, length_name
from shardtune.errors import ConfigError, ModelError


def deal(lengths: np.ndarray, num_ranks: int, *, max_rows: int | None, max_tokens: int | None) -> list[list[list[int]]]:
    """Deal a step's rows to (rank, micro-batch), longest first, each to the bin with the fewest tokens.

    Every rank gets the same number of micro-batches, the smallest for which both limits hold; a bin may stay empty.
    The fullest bins of all ranks come first, so that ranks that wait for each other hold about as many tokens.

    Worked example: lengths 9 2 7 4 on two ranks, `max_tokens` 12. The 22 tokens need at least ceil(22 / (2 x 12)) = 1
    micro-batch per rank, so two bins: row 0 (9) goes to the first, row 2 (7) to the second, row 3 (4) to the second,
    which has fewer (11), and row 1 (2) to the first (11). The result is [[[0, 1]], [[2, 3]]]. With more bins, sorted
    by tokens, rank r has the bins r, r + ranks, r + 2 ranks, ...: its micro-batch m is bin m x ranks + r.

    Args:
        lengths: int [rows], tokens of each row.
        num_ranks: data-parallel ranks.
        max_rows: rows of a micro-batch at most.
        max_tokens: tokens of a micro-batch at most.

    Returns:
        `[rank][micro_batch]` -> positions in `lengths`, ascending.
    """
    num_rows = len(lengths)
    longest = int(lengths.max()) if num_rows else 0
    if max_tokens is not None and longest > max_tokens:
        raise ConfigError(
            f"a row of {longest} tokens does not fit max_tokens_per_micro_batch = {max_tokens}",
            remedy=f"raise actor.max_tokens_per_micro_batch to {longest} or lower data.max_length to {max_tokens}",
        )
    fewest = 1
    if max_rows is not None:
        fewest = max(fewest, -(-num_rows // (num_ranks * max_rows)))
    if max_tokens is not None:
        fewest = max(fewest, -(-int(lengths.sum()) // (num_ranks * max_tokens)))
    order = np.argsort(-np.asarray(lengths), kind="stable")
    micro_batches = fewest
    while (bins := _fill(lengths, order, num_ranks * micro_batches, max_rows, max_tokens)) is None:
        micro_batches += 1
    bins.sort(key=lambda rows: (-sum(int(lengths[row]) for row in rows), rows))
    return [[sorted(bins[number * num_ranks + rank]) for number in range(micro_batches)] for rank in range(num_ranks)]


def deal_by_length(
    lengths: np.ndarray, num_ranks: int, *, max_rows: int | None, max_tokens: int | None, alone: np.ndarray
) -> list[list[list[int]]]:
    """Deal a step's rows to (rank, micro-batch) so that a micro-batch holds rows of one length, which need no padding.

    For models that cannot keep rows apart in one sequence. Every rank gets the same number of micro-batches; one may
    stay empty. The largest of all ranks come first.

    Worked example: lengths 5 3 5 5 on two ranks, `max_tokens` 10. A micro-batch of length 5 has room for 10 // 5 = 2
    rows, so the bins are [0, 2], [3] and [1], and one that is empty: [[[0, 2], [1]], [[3], []]].

    Args:
        lengths, num_ranks, max_rows, max_tokens: as for `deal`.
        alone: bool [rows], those that share a micro-batch with no other.

    Returns:
        `[rank][micro_batch]` -> positions in `lengths`, ascending.
    """
    bins: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable")
    for length in np.unique(lengths).tolist():
        rows = [row for row in order.tolist() if lengths[row] == length]
        most = max(1, min(max_rows or len(rows), (max_tokens or len(rows) * length) // length))
        sharing = [row for row in rows if not alone[row]]
        bins += [sharing[start : start + most] for start in range(0, len(sharing), most)]
        bins += [[row] for row in rows if alone[row]]
    bins.sort(key=lambda rows: (-sum(int(lengths[row]) for row in rows), rows))
    micro_batches = -(-len(bins) // num_ranks)
    bins += [[] for _ in range(num_ranks * micro_batches - len(bins))]
    return [[sorted(bins[number * num_ranks + rank]) for number in range(micro_batches)] for rank in range(num_ranks)]


def _fill(
    lengths: np.ndarray, order: np.ndarray, num_bins: int, max_rows: int | None, max_tokens: int | None
) -> list[list[int]] | None:
    """Longest-processing-time-first into `num_bins`, or None where a row finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for row in order.tolist():
        if not heap:
            return None
        tokens, number = heap[0]
        tokens += int(lengths[row])
        if max_tokens is not None and tokens > max_tokens:
            return None  # the emptiest bin has no room, so none has
        bins[number].append(row)
        if max_rows is not None and len(bins[number]) == max_rows:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (tokens, number))
    return bins


def pack(samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
    """Lay rows end to end as one micro-batch.

    Worked example: rows of tokens [5 6 7] (weights 0 1 1) and [8 9] (weights 0 1) become input_ids 5 6 7 8 9,
    position_ids 0 1 2 0 1, target_positions 0 1 3 and targets 6 7 9: the token at position 2 ends its document, so it
    predicts nothing.
    """
    lengths = [sample.length for sample in samples]
    input_ids = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_weights = np.concatenate([sample.loss_weights for sample in samples]).astype(np.float32)
    token_weights[cu_seqlens[:-1]] = 0.0  # nothing comes before a document's first token
    targets = np.flatnonzero(token_weights)  # never a first token, so targets - 1 stays in the same document
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        target_positions=torch.from_numpy(targets - 1),
        targets=torch.from_numpy(input_ids[targets]),
        target_weights=torch.from_numpy(token_weights[targets]),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        document_weights=torch.tensor([float(row >= 0) for row in rows]),
        max_length=max(lengths),
        rows=tuple(int(row) for row in rows),
        target_weight=float(token_weights.sum(dtype=np.float64)),
        weights=dict(weights),
    )


NO_ROW = Sample(np.zeros(1, np.int32), np.zeros(1, np.float32))
"""One token without a target: what a rank without rows computes."""


def filled_size(tokens: int, most: int | None) -> int:
    """The number of tokens that a micro-batch is filled up to: eight sizes from each power of two to the next.

    1,610 tokens are between 1,024 and 2,048, where sizes are 128 apart, and become 1,664. Below 512 they are 32 apart.

    Args:
        tokens: of its rows.
        most: tokens of a micro-batch; None: any number.
    """
    apart = max(32, 1 << max(0, tokens.bit_length() - 4))
    size = -(-tokens // apart) * apart
    return size if most is None else max(tokens, min(size, most))


def fillers(samples: Sequence[Sample], most: int | None) -> list[Sample]:
    """The documents that fill a micro-batch up to `filled_size`: the first tokens of its longest row, without a target.

    They are tokens that the model computes anyway, so nothing new can overflow, and none is longer than that row, so no
    limit on the length of rows is passed.

    Worked example: rows of 50 and 40 tokens are filled up to 96 by a document of 6; 3 rows of 9 tokens, 27 in all, up
    to 32 by a document of 5; 10 rows of 5 tokens up to 64 by documents of 5, 5 and 4.

    Args:
        samples: of the micro-batch.
        most: tokens of a micro-batch; None: any number.
    """
    longest, tokens = max(samples, key=lambda sample: sample.length), sum(sample.length for sample in samples)
    missing, found = filled_size(tokens, most) - tokens, []
    while missing > 0:
        length = min(missing, longest.length)
        found.append(Sample(longest.input_ids[:length], np.zeros(length, np.float32)))
        missing -= length
    return found


def stack(
    samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float], padding: Mapping[str, float]
) -> Batch:
    """One micro-batch of samples of named arrays, each field stacked to [rows, ...].

    Args:
        samples: with the same fields.
        rows: the dataset row of each, -1 for a filler.
        weights: of the loss terms.
        padding: fields padded at the end of each dimension to the largest row, and with what.
    """
    fields, lengths = {}, {}
    for name in samples[0].fields:
        arrays = [sample.fields[name] for sample in samples]
        if name in padding:
            sizes = arrays
            arrays = _padded(name, arrays, padding[name])
            for dim in range(1, arrays[0].ndim + 1):
                lengths[length_name(name, dim)] = torch.tensor([array.shape[dim - 1] for array in sizes])
        elif any(array.shape != arrays[0].shape for array in arrays):
            shapes = sorted({str(list(array.shape)) for array in arrays})
            raise ModelError(
                f"the field {name!r} has rows of different shapes, {' and '.join(shapes[:3])}",
                where="Adapter.encode",
                remedy=f"give all rows one shape, or let the adapter pad them: padding = {{{name!r}: 0}}",
            )
        fields[name] = torch.from_numpy(np.stack(arrays))
    return Batch(rows=tuple(int(row) for row in rows), weights=dict(weights), fields=fields, lengths=lengths)


def _padded(name: str, arrays: Sequence[np.ndarray], value: float) -> list[np.ndarray]:
    """Each as large as the largest in every dimension."""
    if len({array.ndim for array in arrays}) > 1:
        shapes = sorted({str(list(array.shape)) for array in arrays})
        raise ModelError(
            f"the field {name!r} has rows of different numbers of dimensions, {' and '.join(shapes[:3])}",
            where="Adapter.encode",
            remedy="give all rows as many dimensions; padding makes their sizes the same",
        )
    largest = tuple(np.max([array.shape for array in arrays], axis=0).tolist())
    return [array if array.shape == largest else _enlarged(array, largest, value) for array in arrays]


def _enlarged(array: np.ndarray, shape: tuple[int, ...], value: float) -> np.ndarray:
    whole = np.full(shape, value, array.dtype)
    whole[tuple(slice(size) for size in array.shape)] = array
    return whole
