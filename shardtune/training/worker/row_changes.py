"""The random changes of training rows that a recipe names."""

from __future__ import annotations

from shardtune.batch import Sample
from shardtune.batch.seeds import derive_seed
from shardtune.config import Recipe
from shardtune.config.schema import long_key
from shardtune.data.cache.by_file import RowsByFile, TrainingRows
from shardtune.data.images.augmentation import KEY as AUGMENTATION
from shardtune.data.images.augmentation import Augmentation
from shardtune.data.loader.protocol import DataState
from shardtune.data.loader.step_loader import Changes
from shardtune.errors import ConfigError
from shardtune.models.adapter import Adapter


def row_changes(recipe: Recipe, adapter: Adapter, rows: TrainingRows | None) -> Changes | None:
    """The changes of `data.augmentation`; None where there are none.

    Raises:
        ConfigError: the rows have no images.
    """
    augmentation, seed = Augmentation.of(recipe.data.augmentation), recipe.runner.seed
    if augmentation is None:
        return None
    if not adapter.augments and AUGMENTATION not in map(long_key, adapter.reads):
        raise ConfigError(
            f"{AUGMENTATION}: the rows of {type(adapter).__name__} have no images",
            where=recipe.where(AUGMENTATION) or AUGMENTATION,
            remedy="leave it out, or name cameras (data.columns)",
        )

    if isinstance(rows, RowsByFile):
        rows.data_files.count_all()  # before processes begin that make micro-batches

    def changed(sample: Sample, state: DataState, row: int) -> Sample:
        key = derive_seed(seed, AUGMENTATION, state.epoch, state.rows_consumed)
        number = rows.data_files.running_numbers([row])[0] if isinstance(rows, RowsByFile) else row
        return adapter.augmented(sample, augmentation.row(key, number))

    return changed
