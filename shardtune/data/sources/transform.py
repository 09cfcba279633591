"""`data.transform`: a function of the user's from row to row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from shardtune.config.shown import as_written
from shardtune.data.encoder import Row, RowError
from shardtune.errors import DataError

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Transform:
    """The user's function of `data.transform`; `digest` is the hash of its file."""

    spec: str
    function: RowFunction
    digest: str

    def applied(self, row: Row) -> Row | None:
        """The row that the function makes of one; None where it drops the row.

        Raises:
            RowError: the function failed, or gave no row.
        """
        try:
            changed = self.function(dict(row))
        except Exception as error:
            raise RowError(f"data.transform raised {type(error).__name__}: {error}") from error
        if changed is not None and not isinstance(changed, Mapping):
            raise RowError(f"data.transform gave {type(changed).__name__}, not a row or None")
        return changed


def load_transform(spec: str) -> Transform:
    """The function that `data.transform` names as `file.py:function`, imported from the same bytes that are hashed.

    Imported anew whenever the file has changed, so that a notebook never mixes an old function with a new key.
    """
    path, _, name = spec.rpartition(":")
    where = f"data.transform: {spec}"
    try:
        code = Path(path).read_bytes()
    except OSError as error:
        remedy = "write file.py:function; relative paths are relative to the recipe's directory"
        raise DataError(
            f"{as_written(path or spec)} cannot be read: {error.strerror}", where=where, remedy=remedy
        ) from error
    digest = blake2b(code, digest_size=20).hexdigest()
    function: Any = vars(_import_code(code, path, f"shardtune_transform_{digest}", where)).get(name)
    if not callable(function):
        raise DataError(
            f"{path} has no function {name!r}",
            where=where,
            remedy="write `def name(row)` into it, returning a row or None",
        )
    return Transform(spec, cast(RowFunction, function), digest)


def _import_code(code: bytes, path: str, name: str, where: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # so that its definitions can be found by name
    try:
        exec(compile(code, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise DataError(
            f"importing {path} raised {type(error).__name__}: {error}",
            where=where,
            remedy=f"python {path} shows the whole error",
        ) from error
    return module
