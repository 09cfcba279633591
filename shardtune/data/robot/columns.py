"""The roles of the columns of a robot data set."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardtune.data.encoder import RowError

IMAGES = "images."
_USUAL = {
    "action": ("action",),
    "state": ("observation.state", "state"),
    "instruction": ("instruction", "task", "language_instruction"),
    "episode": ("episode_index", "episode"),
    "frame": ("frame_index", "frame"),
    "actions": ("actions",),
    "action_is_pad": ("action_is_pad",),
    "images": ("images",),
    "dataset": ("dataset",),
    "earlier": ("earlier",),
    "reward": ("next.reward", "reward"),
    "return": ("return",),
}
_CAMERA_PREFIXES = ("observation.images.", "observation.")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a file by what they hold.

    Attributes:
        named: role of a column -> its name; roles that the file lacks are absent.
        cameras: camera -> the column of its images.
    """

    named: Mapping[str, str]
    cameras: Mapping[str, str]

    def require(self, what: str) -> str:
        """The column of that name. Raises `RowError`."""
        if what not in self.named:
            usual = " or ".join(_USUAL[what])
            raise RowError(f"there is no {what}: no column {usual}, and data.columns names none for {what}")
        return self.named[what]


def find_columns(
    names: Collection[str], mapping: Mapping[str, str], pictures: Collection[str] | None = None
) -> Columns:
    """Finds the role of each column of a file.

    Args:
        names: the file's columns.
        mapping: `data.columns`: role -> the file's name for it; `images.<camera>` for images. Where it names
            cameras, those are all.
        pictures: the columns that hold images, if known; otherwise those named
            `observation.images.<camera>` or `observation.image`.

    Raises `RowError` for an unknown role in the mapping, or one that names a missing column.
    """
    for what, column in mapping.items():
        if what not in _USUAL and not what.startswith(IMAGES):
            known = ", ".join(_USUAL)
            raise RowError(
                f"data.columns has {what!r}, which robot data do not have (they have {known}, images.<camera>)"
            )
        if column not in names:
            raise RowError(f"data.columns names {column!r}, which is no column (the columns: {', '.join(names)})")
    named = {what: next((name for name in usual if name in names), None) for what, usual in _USUAL.items()}
    named |= {what: column for what, column in mapping.items() if what in _USUAL}
    cameras = {what.removeprefix(IMAGES): column for what, column in mapping.items() if what.startswith(IMAGES)}
    if not cameras:
        found = [name for name in names if _looks_like_pictures(name)] if pictures is None else pictures
        cameras = {_camera(name): name for name in found}
    return Columns({what: name for what, name in named.items() if name is not None}, cameras)


def _looks_like_pictures(name: str) -> bool:
    return name.startswith("observation.images.") or name == "observation.image"


def _camera(column: str) -> str:
    for prefix in _CAMERA_PREFIXES:
        if column.startswith(prefix):
            return column.removeprefix(prefix)
    return column
