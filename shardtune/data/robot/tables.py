"""Robot data in plain files: rows of single frames become rows with the actions that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardtune.data.encoder import FrameOptions, Row, RowError
from shardtune.data.files.chunk import Chunk, NumberedRow, RowChunk
from shardtune.data.robot.columns import Columns, find_columns
from shardtune.data.robot.frames import FrameRow, Origin, episode_digest
from shardtune.data.robot.images import ImageRecord, image_record
from shardtune.data.robot.returns import RETURN, finite_return, role_of
from shardtune.errors import DataError, counted

_CHUNK_FRAMES = 64
_Names = tuple[str, ...]


def read_frames(
    chunks: Iterable[Chunk], columns: Mapping[str, str], options: FrameOptions, origin: Origin
) -> Iterator[Chunk]:
    """Rows of a file as frames: consecutive rows with the same episode are one; rows that hold `actions` are whole.

    Args:
        chunks: the file's rows in file order.
        columns: `data.columns`.

    Raises `DataError` if the rows of an episode are not consecutive.
    """
    grouping = _Grouping(columns, options, origin)
    for chunk in chunks:
        rows = [complete for number, row in chunk.rows() for complete in grouping.add(number, row)]
        if rows:
            yield RowChunk(rows, chunk.progress)
    rest = list(grouping.finish())
    if rest:
        yield RowChunk(rest, 1.0)


_OF_WHOLE_ROWS = ("action_is_pad", "images", "dataset", "earlier")


def unread_columns(chunks: Iterable[Chunk], columns: Mapping[str, str], options: FrameOptions) -> list[str]:
    """The columns of a table's first row that frames are not made of.

    Args:
        chunks: the file's rows in file order.
        columns: `data.columns`.
        options: how frames become rows.
    """
    names = tuple(_first_row(chunks))
    return _not_read(names, find_columns(names, columns), options)


def _not_read(names: _Names, found: Columns, options: FrameOptions) -> list[str]:
    idle = {"action"} if "actions" in found.named else {*_OF_WHOLE_ROWS}
    idle |= {RETURN, "reward"} - {role_of(options)}
    read = {name for role, name in found.named.items() if role not in idle} | set(found.cameras.values())
    return [name for name in names if name not in read]


def holds_actions(chunks: Iterable[Chunk], columns: Mapping[str, str]) -> bool:
    """Whether a table's first row holds the actions that follow, so that no other rows are needed for them.

    Args:
        chunks: the file's rows in file order.
        columns: `data.columns`.
    """
    with suppress(RowError):  # which reading the rows reports
        return "actions" in find_columns(tuple(_first_row(chunks)), columns).named
    return False


def _first_row(chunks: Iterable[Chunk]) -> Row:
    return next((row for chunk in chunks for _, row in chunk.rows() if not isinstance(row, RowError)), {})


@dataclass(frozen=True, slots=True)
class _Frame:
    """One row; `problem` is the reason why it cannot be used."""

    number: int
    place: int
    action: np.ndarray | None = None
    state: np.ndarray | None = None
    instruction: str = ""
    images: Mapping[str, ImageRecord] = field(default_factory=dict)
    problem: str | None = None
    worth: float | None = None  # its return, or the reward that it is computed from
    unread: Sequence[str] = ()


@dataclass(slots=True)
class _Grouping:
    """The rows of the current episode whose following actions have not all been read yet."""

    columns: Mapping[str, str]
    options: FrameOptions
    origin: Origin
    _found: dict[_Names, Columns | RowError] = field(default_factory=dict)
    _unread: dict[_Names, list[str]] = field(default_factory=dict)
    _seen: set[str | int | float] = field(default_factory=set)
    _episode: str | int | float | None = None
    _frames: list[_Frame] = field(default_factory=list)
    _earlier: list[_Frame] = field(default_factory=list)  # those before `_frames` that these show
    _next: int = 0
    _digest: int | None = None
    _dimensions: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, row: Row | RowError) -> Iterator[NumberedRow]:
        """The rows that are complete with this one."""
        try:
            if isinstance(row, RowError):
                raise row
            columns = self._columns(row)
            whole = self._whole(row, columns) if "actions" in columns.named else None
            episode = None if whole else row[columns.require("episode")]
        except RowError as error:
            # The episode of an unreadable row is unknown, so it counts as a gap in the current one.
            self._frames.append(_Frame(number, self._next, problem=error.reason))
            return
        if whole is not None:
            yield from self.finish()
            yield number, whole
            return
        if episode != self._episode:
            yield from self.finish()
            self._begin(episode, number)
        self._frames.append(self._frame(number, row, columns))
        self._next = self._frames[-1].place + 1
        # A return is the sum of all rewards that follow, so an episode is read to its end first.
        waits = self.options.discount is not None
        if len(self._frames) >= _CHUNK_FRAMES + self.options.chunk and not waits:
            yield from self._rows(_CHUNK_FRAMES)

    def finish(self) -> Iterator[NumberedRow]:
        """The remaining rows of the current episode."""
        yield from self._rows(len(self._frames))

    def _begin(self, episode: Any, number: int) -> None:
        usable = isinstance(episode, str | int | float)
        if not usable or episode in self._seen:
            what = "are not consecutive" if usable else "have no usable name"
            raise DataError(
                f"the rows of episode {episode!r} {what}",
                where=f"{self.origin.file}: row {number:,}",
                remedy="order the file by episode and frame; data.columns: {episode: …} names its column",
            )
        self._seen.add(episode)
        self._episode, self._next, self._digest, self._earlier = episode, 0, None, []

    def _columns(self, row: Row) -> Columns:
        names = tuple(row)
        if names not in self._found:
            try:
                found = self._found[names] = find_columns(names, self.columns)
                self._unread[names] = _not_read(names, found, self.options)
            except RowError as error:
                self._found[names] = error
        found = self._found[names]
        if isinstance(found, RowError):
            raise found
        return found

    def _frame(self, number: int, row: Row, columns: Columns) -> _Frame:
        place, worth = self._next, None
        try:
            if "frame" in columns.named:
                place = _after(row[columns.named["frame"]], place)
            worth = self._worth(row, columns)
            action = _vector(row[columns.require("action")], "action")
            self._require_dimensions("action", len(action))
            state = _vector(row[columns.named["state"]], "state") if "state" in columns.named else None
            if state is not None:
                self._require_dimensions("state", len(state))
            instruction = _instruction(row, columns)
            folder = self.origin.folder
            images = {camera: image_record(row[name], folder) for camera, name in columns.cameras.items()}
        except RowError as error:
            return _Frame(number, place, problem=error.reason, worth=worth)
        if self._digest is None:
            self._digest = episode_digest(self._episode, instruction, action, state)
        return _Frame(number, place, action, state, instruction, images, None, worth, self._unread[tuple(row)])

    def _worth(self, row: Row, columns: Columns) -> float | None:
        """The return of a row, or the reward that it is computed from; None where it has none and needs none."""
        role = role_of(self.options)
        if role is None or (role == RETURN and role not in columns.named):
            return None  # `data.transform` may give rows a return
        found = _vector(row[columns.require(role)], role)
        if len(found) != 1:
            raise RowError(f"the {role} has {len(found)} numbers, it is one")
        return float(found[0])

    def _require_dimensions(self, what: str, found: int) -> None:
        before = self._dimensions.setdefault(what, found)
        if found != before:
            raise RowError(f"the {what} has {found} dimensions, those before have {before}")

    def _rows(self, count: int) -> Iterator[NumberedRow]:
        """Turns the first `count` frames into rows, each with the frames after it, and removes them."""
        returns = self._returns()
        for index in range(count):
            frame = self._frames[index]
            try:
                row = self._row(self._frames[index : index + self.options.chunk])
                if index in returns:
                    row[RETURN] = finite_return(returns[index])
                if self.options.observations > 1:
                    row["earlier"] = self._before(index)
                yield frame.number, row
            except RowError as error:
                yield frame.number, RowError(f"{self._place(frame)}: {error.reason}")
        known = [*self._earlier, *self._frames[:count]]
        self._earlier = known[max(0, len(known) - (self.options.observations - 1)) :]
        del self._frames[:count]

    def _returns(self) -> dict[int, float]:
        """By index in `_frames`, of those that have one; NaN where the reward of a later frame is not known."""
        discount, found = self.options.discount, dict[int, float]()
        after: _Frame | None = None
        for index in reversed(range(len(self._frames))):
            frame = self._frames[index]
            worth = frame.worth
            if discount is not None:
                worth = math.nan if worth is None else worth
                if after is not None:
                    known = after.place == frame.place + 1
                    worth += discount * (found[index + 1] if known else math.nan)
            if worth is not None:
                found[index] = worth
            after = frame
        return found

    def _before(self, index: int) -> list[dict[str, Any]]:
        """The frames that a frame shows besides itself, the oldest first; the episode's first is repeated."""
        known, count = [*self._earlier, *self._frames[: index + 1]], self.options.observations - 1
        found = []
        for back in range(count, 0, -1):
            frame = known[max(0, len(known) - 1 - back)]
            if frame.action is None:
                raise RowError(f"{back} rows before, {frame.problem}")
            padded = len(known) - 1 < back
            if not padded and frame.place != known[-1].place - back:
                raise RowError(f"frame {known[-1].place - back} is missing")
            found.append({"images": frame.images, "state": frame.state, "action": frame.action, "is_pad": padded})
        return found

    def _row(self, frames: Sequence[_Frame]) -> FrameRow:
        actions, present = [], frames[0]
        for steps, frame in enumerate(frames):
            if frame.action is None:
                ahead = f"{counted(steps, 'row')} on, " if steps else ""
                raise RowError(f"{ahead}{frame.problem}")
            if frame.place != present.place + steps:
                raise RowError(
                    f"frame {present.place + steps} is missing, the next one is {frame.place} (rows without a column "
                    "of frames follow one another)"
                )
            actions.append(frame.action)
        missing = self.options.chunk - len(frames)
        content = {
            "images": present.images,
            "instruction": present.instruction,
            "state": present.state,
            "actions": np.stack(actions + [actions[-1]] * missing),
            "action_is_pad": np.arange(self.options.chunk) >= len(frames),
            "dataset": self.origin.dataset,
            "episode": self._episode,
            "frame": present.place,
        }
        return FrameRow(content, self._digest or 0, self._place(present), present.unread)

    def _place(self, frame: _Frame) -> str:
        return f"episode {self._episode}, frame {frame.place}"

    def _whole(self, row: Row, columns: Columns) -> FrameRow:
        """A row that holds its following actions itself."""
        named = columns.named
        actions = np.stack([_vector(action, "actions") for action in row[named["actions"]]])
        if len(actions) != self.options.chunk:
            raise RowError(f"the row has {len(actions)} actions, actor.model.action_chunks_len is {self.options.chunk}")
        self._require_dimensions("action", actions.shape[1])
        padding = row[named["action_is_pad"]] if "action_is_pad" in named else [False] * self.options.chunk
        if len(padding) != self.options.chunk or padding[0]:
            raise RowError(
                f"action_is_pad is {list(padding)}, not {self.options.chunk} truth values of which the first is false"
            )
        state = row[named["state"]] if "state" in named else None
        images = {**row[named["images"]]} if "images" in named else {}
        images |= {camera: row[name] for camera, name in columns.cameras.items()}
        instruction = _instruction(row, columns)
        dataset = row[named["dataset"]] if "dataset" in named else self.origin.dataset
        episode, frame = (row[named[name]] if name in named else None for name in ("episode", "frame"))
        content = {
            "images": {camera: image_record(image, self.origin.folder) for camera, image in images.items()},
            "instruction": instruction,
            "state": None if state is None else _vector(state, "state"),
            "actions": actions,
            "action_is_pad": np.array(padding, bool),
            "dataset": _text(dataset),
            "episode": episode,
            "frame": frame,
        }
        if self.options.discount is not None:
            raise RowError(
                "the row holds its actions, and the rewards after it are not known: give one row per frame with "
                "episode, or the return of each row, and leave model.value_head.discount out"
            )
        worth = self._worth(row, columns)
        if worth is not None:
            content[RETURN] = worth
        if self.options.observations > 1:
            content["earlier"] = self._given(row, columns)
        digest = episode_digest("" if episode is None else episode, instruction, actions[0], content["state"])
        place = "" if episode is None else f"episode {episode}, frame {frame}"
        return FrameRow(content, digest, place, self._unread[tuple(row)])

    def _given(self, row: Row, columns: Columns) -> list[dict[str, Any]]:
        """The earlier frames that a row holds itself."""
        wanted, found = (
            self.options.observations - 1,
            row[columns.named["earlier"]] if "earlier" in columns.named else (),
        )
        if len(found) != wanted:
            raise RowError(
                f"the row holds its actions and {len(found)} earlier frames, the model takes {wanted}: give one row "
                "per frame with episode, or as many dictionaries of images, state, action and is_pad in earlier"
            )
        folder = self.origin.folder
        return [
            {
                "images": {camera: image_record(image, folder) for camera, image in (one.get("images") or {}).items()},
                "state": None if one.get("state") is None else _vector(one["state"], "state"),
                "action": _vector(one["action"], "action"),
                "is_pad": bool(one["is_pad"]),
            }
            for one in found
        ]


def _after(frame: object, place: int) -> int:
    if isinstance(frame, float) and frame.is_integer():  # as pandas writes a column with gaps
        frame = int(frame)
    if not isinstance(frame, int):
        raise RowError(f"the frame is {frame!r}, not a whole number")
    if frame < place:
        raise RowError(f"the frame {frame!r} does not come after {place - 1}")
    return frame


def _instruction(row: Row, columns: Columns) -> str:
    """In words; empty where there is none, which models that read it refuse, as they do in a recording."""
    value = row[columns.named["instruction"]] if "instruction" in columns.named else None
    return "" if value is None else _text(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RowError(f"the instruction is {value!r}, not text")
    return value


def _vector(value: Any, name: str) -> np.ndarray:
    """Numbers as float32 [D]; one number has one dimension."""
    try:
        numbers = np.atleast_1d(np.asarray(value, np.float32))
    except (TypeError, ValueError) as error:
        raise RowError(f"the {name} is {_brief(value)}, not numbers") from error
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise RowError(f"the {name} is {_brief(value)}, not finite numbers in a list")
    return numbers


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "…"
