"""What packing saves: the padding that micro-batches of rows side by side would need."""

from __future__ import annotations

import numpy as np

from shardtune.config import Recipe
from shardtune.data.audit.findings import Padding
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.loader.order import DataOrder, OrderSource

_MOST_ROWS = 1 << 20


def padding_avoided(recipe: Recipe, rows: TokenDataset) -> Padding:
    """The padding of the first epoch's rows, in training order, padded to the longest row of each micro-batch.

    Worked example: micro-batches of 2 rows and lengths 5 3 4 4 hold 16 tokens; padded, 2 x 5 + 2 x 4 = 18.

    Args:
        recipe: its micro-batches; where only their tokens are limited, as many rows as are packed on average.
        rows: the training rows.
    """
    actor, lengths = recipe.actor, rows.lengths
    per_forward = actor.micro_batch_size
    if per_forward is None:
        per_forward = max(1, int((actor.max_tokens_per_micro_batch or 0) / max(1.0, float(lengths.mean()))))
    order = DataOrder(
        [OrderSource(span.name, span.start, span.stop, span.weight) for span in rows.sources],
        seed=recipe.runner.seed,
        shuffle=recipe.data.shuffle,
        global_batch_size=1,
    )
    chosen = order.rows(0, 0, _MOST_ROWS)
    tokens = lengths[chosen].astype(np.int64)
    starts = np.arange(0, len(tokens), per_forward)
    sizes = np.diff(starts, append=len(tokens))
    real = int(tokens.sum())
    padding = int((np.maximum.reduceat(tokens, starts) * sizes).sum()) - real
    return Padding(
        rows_per_micro_batch=per_forward,
        rows=len(tokens),
        tokens=real,
        padding=padding,
        saved=padding / max(1, real + padding),
    )
