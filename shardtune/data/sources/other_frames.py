"""Data sets of one run whose numbers mean other things than those of the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardtune.data.robot.lerobot import differences
from shardtune.data.robot.representation import MASK_KEY, Representation
from shardtune.data.sources.source import LEROBOT, Source
from shardtune.errors import ConfigError


def notes_on_other_frames(sources: Sequence[Source]) -> Iterator[str]:
    """A sentence for each name of a dimension, and each rate of frames, that differs from the first data set's.

    Args:
        sources: of training, then of evaluation.
    """
    recorded = [one for one in sources if one.files[0].kind == LEROBOT]
    for one in recorded[1:]:
        first, file = recorded[0], one.files[0]
        for sentence in differences(file.path, one.columns, first.files[0].path, first.columns, first.files[0].label):
            yield f"{file.label}: {sentence}"


def check_masks(sources: Sequence[Source]) -> None:
    """Refuse a mask by names that keeps other dimensions absolute in rows that share statistics: those of one name.

    Args:
        sources: of training, then of evaluation.

    Raises:
        ConfigError: such a mask.
    """
    first: dict[str, tuple[Source, list[int]]] = {}
    for one in sources:
        form = one.representation
        if form is None or not form.names:
            continue
        before, wanted = first.setdefault(one.name, (one, _kept(form)))
        if _kept(form) != wanted:
            raise ConfigError(
                f"by the names of its dimensions it keeps {_kept(form)} absolute in {one.files[0].label}, and {wanted} "
                f"in {before.files[0].label}, whose statistics apply to both ({one.name})",
                where=MASK_KEY,
                remedy="give a truth value for each dimension, by place, and order the dimensions in data.transform",
            )


def _kept(form: Representation) -> list[int]:
    """The dimensions that stay absolute."""
    return [at for at, converted in enumerate(form.mask(len(form.names)).tolist()) if not converted]
