"""Rows that a trained model answers, read as those it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtune.data.encoder import Row, RowError
from shardtune.data.row_formats import rename_columns
from shardtune.data.sources.resolve import DataOptions
from shardtune.data.sources.transform import Transform, load_transform
from shardtune.errors import ConfigError, DataError

PREPARED = "--prepared"
"""The option by which rows are read as they are."""


@dataclass(frozen=True, slots=True)
class InferenceRows:
    """What the recipe does with a row before it is encoded: `data.transform`, then `data.columns`.

    Attributes:
        transform: the user's function; None: rows are read as they are.
        columns: names known here -> the rows' own names; a row may lack some, such as those of targets.
    """

    transform: Transform | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataOptions, *, prepared: bool = False) -> InferenceRows:
        """As a recipe's `data` has it.

        Args:
            data: the recipe's section.
            prepared: rows are as the transform returns them, and have the names known here.

        Raises:
            ConfigError: rows are prepared, and the recipe has nothing to prepare them by.
            DataError: the function of the transform cannot be loaded.
        """
        if not prepared:
            return cls(load_transform(data.transform) if data.transform else None, dict(data.columns))
        if data.transform or data.columns:
            return cls()
        raise ConfigError(
            "the recipe has neither data.transform nor data.columns, so rows are read as they are",
            where=PREPARED,
            remedy="leave it out",
        )

    def read(self, row: Row, where: str) -> Row | None:
        """The row as training would encode it; None where the transform drops it.

        Args:
            row: as it is in the file.
            where: its file and number, for a message.

        Raises:
            DataError: the transform failed.
        """
        try:
            changed = row if self.transform is None else self.transform.applied(row)
        except RowError as error:
            raise DataError(
                error.reason,
                where=where,
                remedy=f"give rows as those of training; with {PREPARED} they are read as data.transform returns them",
            ) from error
        if changed is None:
            return None
        return rename_columns(changed, {name: own for name, own in self.columns.items() if own in changed})


def dropped_note(count: int) -> str:
    """What is said of rows that the transform drops."""
    what, them = ("rows are", "them") if count > 1 else ("row is", "it")
    return f"{count:,} {what} left out: data.transform drops {them}"
