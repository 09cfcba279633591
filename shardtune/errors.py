"""Errors for the user. Each names what is wrong, where, and the remedy."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, change the direction of text, or are none."""
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo/transport",
    "remote process exited",
    "connection was likely closed",
    "failed to recv, got 0 bytes",
)
"""Messages of torch's backends when the process at the other end is gone."""
_NO_TEXT = re.compile(rf"(?:{CONTROL.pattern}|[\ufffd\ue000-\uf8ff])+")


def counted(number: int, noun: str) -> str:
    """A number with a noun, which is given for one and gets an s for any other number: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ShardtuneError(Exception):
    """A mistake in the user's input: shown as one message, without a traceback, with exit code 2.

    Args:
        what: the fault with the offending value, as one sentence.
        where: file, line, row, key or field of the fault.
        remedy: how to fix it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return printable("\n".join(lines))

    def __reduce__(self) -> tuple[Callable[..., ShardtuneError], tuple[object, ...]]:
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(kind: type[ShardtuneError], what: str, where: str | None, remedy: str | None) -> ShardtuneError:
    return kind(what, where=where, remedy=remedy)


def printable(text: str) -> str:
    r"""Text for a terminal: characters that control one, or change the order of others, as escapes (`\x1b`).

    Rows, answers and file names may hold any; line breaks and tabs stay.
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def legible(text: str, most: int) -> str:
    """Text of a row or an answer on one line for a reader, without the middle of more than `most` characters.

    What is no text (control characters, bytes that are no characters) is shown as one dot.
    """
    flat = " ".join(_NO_TEXT.sub("·", text).split())
    if len(flat) <= most:
        return flat
    half = (most - 3) // 2
    return f"{flat[:half]} … {flat[-(most - 3 - half) :]}"


def cut(text: str) -> str:
    """Text for a message, without the middle of a long one."""
    return text if len(text) <= 160 else f"{text[:120]} … {text[-30:]}"


class ConfigError(ShardtuneError):
    """A key or value of the recipe is wrong, or two of them contradict each other."""


class DataError(ShardtuneError):
    """A data file or a row in it cannot be used."""


class ModelError(ShardtuneError):
    """The model, its weights or its tokenizer cannot be used."""


class ParallelError(ShardtuneError):
    """The ranks, the layout or the launcher cannot be used."""


class CheckpointError(ShardtuneError):
    """A checkpoint or run directory cannot be read, written or continued."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk, or of a user's share of one, that is full, or of a file that may not grow."""
_DISK_REMEDIES: Mapping[int, str] = {
    **dict.fromkeys(FULL, "make room there (df -h, quota, ulimit -f), and run the same command again"),
    errno.EROFS: "mount the disk for writing, or choose another directory",
    errno.EIO: "check the disk (dmesg), and run the same command again",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""In messages of packages in Rust, whose exceptions are no OSError."""


def disk_error(error: BaseException) -> CheckpointError | None:
    """The error for the user of one that comes from a disk which is full, read-only or broken; None for any other."""
    if isinstance(error, ShardtuneError):
        return None
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if number is None and (told := _OS_ERROR.search(str(cause))):
            number = int(told[1])
        if number is None or number not in _DISK_REMEDIES:
            continue
        why = os.strerror(number)
        file = cause.filename if isinstance(cause, OSError) and isinstance(cause.filename, str | bytes) else None
        return CheckpointError(
            f"a file cannot be read or written: {why}" if number == errno.EIO else f"a file cannot be written: {why}",
            where=_line_of(cause) if file is None else os.fsdecode(file),
            remedy=_DISK_REMEDIES[number],
        )
    return None


@contextmanager
def disk_errors() -> Iterator[None]:
    """Errors of a disk inside as `disk_error` has them."""
    try:
        yield
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        raise found from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _line_of(error: BaseException) -> str | None:
    """The last line of this package that an error passed through, or else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(os.path.dirname(__file__))]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}: {last[0].line}" if last else None


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error is a consequence of another rank's failure."""
    text = str(error).lower()
    return not isinstance(error, ShardtuneError) and any(sign in text for sign in LOST_PEER)


class Interrupted(BaseException):
    """The run was stopped by SIGTERM or SIGINT and has saved its state; the same command continues it.

    Like `KeyboardInterrupt` it is no `Exception`: it can be raised anywhere, and `except Exception` must not catch it.

    Args:
        message: for the user.
        together: all ranks stopped at the same place, so that they can exit together.
    """

    exit_code = 75

    def __init__(self, message: str, *, together: bool = False) -> None:
        super().__init__(message)
        self.together = together
