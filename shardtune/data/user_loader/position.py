"""The record of a user's own loader in a checkpoint: its position, and enough to recognise the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import JsonValue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """The state of a loader when a checkpoint was written.

    Attributes:
        batches: of an epoch.
        num_samples: as `build_dataloader` declared it; None if it did not.
        rows_per_batch: `actor.micro_batch_size`.
        ranks: of the run.
        sharded: whether each rank's loader yields its own batches.
        first_batch: a hash of the first batch of the first epoch, of each rank where they differ; empty before it.
        seen: likewise of all batches of the epoch that were trained on.
        own_seeds: of the generators that the loader holds, of each rank where they differ.
        states: the loader's own state, encoded, of each rank where they differ; None: it has none.
    """

    batches: int
    num_samples: int | None
    rows_per_batch: int
    ranks: int
    sharded: bool
    first_batch: Sequence[str] = ()
    seen: Sequence[str] = ()
    own_seeds: Sequence[Sequence[int]] = ()
    states: Sequence[JsonValue] | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoaderRecord:
        return cls(**values)

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    def cut_alike(self, other: LoaderRecord) -> bool:
        """Whether two loaders over the same data yield the same batches on a rank."""
        return (
            self.rows_per_batch == other.rows_per_batch
            and self.sharded == other.sharded
            and (not self.sharded or self.ranks == other.ranks)
        )

    def changes(self, now: LoaderRecord) -> list[str]:
        """How the data differs now, as far as its sizes show."""
        found = []
        if self.num_samples != now.num_samples:
            found.append(f"num_samples: {self.num_samples} -> {now.num_samples}")
        if self.cut_alike(now) and self.batches != now.batches:
            found.append(f"batches of an epoch: {self.batches} -> {now.batches}")
        return found


def of_rank(values: Sequence[T], rank: int) -> T:
    """The value of a rank in a record, in which a single value applies to all ranks."""
    return values[rank if len(values) > 1 else 0]


def merged(values: Sequence[T]) -> list[T]:
    """The values of all ranks, or the one that all have."""
    return list(values[:1]) if all(value == values[0] for value in values) else list(values)
