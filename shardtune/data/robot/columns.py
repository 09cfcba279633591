"""The roles of the columns of a robot data set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

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
JOIN = " + "
"""Between the names of arrays that make one vector, in recordings."""
_CAMERA_PREFIXES = ("observation.images.", "observation.")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a file by what they hold.

    Attributes:
        named: role of a column -> its name; roles that the file lacks are absent.
        cameras: camera -> the column of its images.
        usual: role -> the names that are recognised.
    """

    named: Mapping[str, str]
    cameras: Mapping[str, str]
    usual: Mapping[str, Sequence[str]] = field(default_factory=lambda: _USUAL)

    def require(self, what: str) -> str:
        """The column of that name. Raises `RowError`."""
        if what not in self.named:
            usual = " or ".join(self.usual[what])
            raise RowError(f"there is no {what}: no column {usual}, and data.columns names none for {what}")
        return self.named[what]


def find_columns(
    names: Collection[str],
    mapping: Mapping[str, str],
    pictures: Collection[str] | None = None,
    *,
    usual: Mapping[str, Sequence[str]] | None = None,
) -> Columns:
    """Finds the role of each column of a file.

    Args:
        names: the file's columns.
        mapping: `data.columns`: role -> the file's name for it; `images.<camera>` for images. Where it names
            cameras, those are all.
        pictures: the columns that hold images, if known; otherwise those named
            `observation.images.<camera>` or `observation.image`.
        usual: of a recording, role -> its usual names; there, names joined by `JOIN` are one vector.

    Raises `RowError` for an unknown role in the mapping, or one that names a missing column.
    """
    roles, joins = usual or _USUAL, usual is not None
    for what, column in mapping.items():
        if what not in roles and not what.startswith(IMAGES):
            known = ", ".join(roles)
            raise RowError(
                f"data.columns has {what!r}, which robot data do not have (they have {known}, images.<camera>)"
            )
        if not _is_there(column, names, joins):
            raise RowError(f"data.columns names {column!r}, which is no column (the columns: {', '.join(names)})")
    found = {what: next((name for name in each if _is_there(name, names, joins)), None) for what, each in roles.items()}
    found |= {what: column for what, column in mapping.items() if what in roles}
    cameras = {what.removeprefix(IMAGES): column for what, column in mapping.items() if what.startswith(IMAGES)}
    if not cameras:
        shown = [name for name in names if _looks_like_pictures(name)] if pictures is None else list(pictures)
        short = [_camera(name) for name in shown]
        cameras = {one if short.count(one) == 1 else name: name for one, name in zip(short, shown, strict=True)}
    return Columns({what: name for what, name in found.items() if name is not None}, cameras, roles)


def _is_there(column: str, names: Collection[str], joins: bool) -> bool:
    return column in names or (joins and all(part in names for part in column.split(JOIN)))


def _looks_like_pictures(name: str) -> bool:
    return name.startswith("observation.images.") or name == "observation.image"


def _camera(column: str) -> str:
    for prefix in _CAMERA_PREFIXES:
        if column.startswith(prefix):
            return column.removeprefix(prefix)
    return column.rpartition("/")[2]
