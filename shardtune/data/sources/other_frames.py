"""LeRobot data sets of one run whose numbers mean other things than those of the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardtune.data.robot.lerobot import differences
from shardtune.data.sources.source import LEROBOT, Source


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
