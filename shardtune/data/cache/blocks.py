"""Many rows of a cache entry at once, as flat arrays: for passes over a whole data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardtune.batch import Sample


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """The tokens of some rows, end to end.

    Attributes:
        tokens: int32 [tokens].
        offsets: int64 [rows + 1]; row i is `tokens[offsets[i]:offsets[i + 1]]`, empty for a row without tokens.
        trained: bool [tokens]; the targets, never the first token of a row.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def row_of_token(self) -> np.ndarray:
        """int64 [tokens]: the row, counted within the block, that each token belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """int64 [rows]: how many of a row's tokens are chosen.

        Args:
            chosen: bool [tokens].
        """
        sums = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]


def gather(values: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of some rows end to end, and their offsets; a view of `values` where the rows are consecutive.

    Worked example: offsets 0 3 5 9 and rows 0 2 give the values at 0 1 2 and 5 6 7 8, and offsets 0 3 7.

    Args:
        values: [all] those of all rows.
        offsets: int64 [all rows + 1].
        rows: int64 [rows], ascending.
    """
    if not len(rows):
        return values[:0], np.zeros(1, np.int64)
    starts = np.asarray(offsets[rows])
    counts = np.asarray(offsets[rows + 1]) - starts
    inner = np.concatenate([[0], np.cumsum(counts)])
    if rows[-1] - rows[0] + 1 == len(rows):
        return values[starts[0] : starts[0] + inner[-1]], inner
    return values[np.arange(inner[-1]) + np.repeat(starts - inner[:-1], counts)], inner


def block_of(sample: Sample) -> TokenBlock:
    """A single row."""
    trained = np.asarray(sample.loss_weights > 0) if len(sample.input_ids) else np.zeros(0, bool)
    trained[:1] = False
    return TokenBlock(sample.input_ids, np.array([0, len(sample.input_ids)], np.int64), trained)


def token_block(
    tokens: np.ndarray,
    offsets: np.ndarray,
    run_values: np.ndarray,
    run_lengths: np.ndarray,
    run_offsets: np.ndarray,
    rows: np.ndarray,
) -> TokenBlock:
    """Some rows of an entry, of its arrays (see `shardtune.data.cache.entry`)."""
    chosen, inner = gather(tokens, offsets, rows)
    values, _ = gather(run_values, run_offsets, rows)
    lengths, _ = gather(run_lengths, run_offsets, rows)
    trained = np.repeat(values > 0, lengths)
    if len(trained) != len(chosen):  # rows without tokens may have weights of no token
        trained = np.zeros(len(chosen), bool)
    trained[inner[:-1][np.diff(inner) > 0]] = False
    return TokenBlock(np.asarray(chosen), inner, trained)
