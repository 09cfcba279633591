"""Fields that are stacked as they are: all rows have one shape."""

from __future__ import annotations

from shardtune.data.cache.dataset import TokenDataset
from shardtune.errors import ModelError
from shardtune.models.adapter import Adapter


def check_shapes(adapter: Adapter, rows: TokenDataset) -> None:
    """Raises `ModelError` for rows that `Adapter.collate` could not stack, before anything is written.

    Rows that are kept apart by their tokens, stacked by a method of the user's, or changed on the way to a micro-batch
    may be of any shape.
    """
    kind = type(adapter)
    if kind.collate is not Adapter.collate:
        return
    changed = adapter.augments and adapter.recipe.data.augmentation.is_on
    if changed or adapter.recipe.actor.max_tokens_per_micro_batch is not None:
        return
    for name in rows.fields.keys() - adapter.padding.keys():
        other = rows.of_other_shape(name)
        if other is not None:
            first = rows.first_trained
            shapes = [list(rows.row(index).fields[name].shape) for index in (first, other)]
            raise ModelError(
                f"the field {name!r} has rows of different shapes: {shapes[0]} in {rows.locate(first)}, {shapes[1]} in "
                f"{rows.locate(other)}",
                where=f"{kind.__name__}.encode",
                remedy=f"give all rows one shape, let the adapter pad them: padding = {{{name!r}: 0}}; or train one at "
                "a time (actor.micro_batch_size=1)",
            )
