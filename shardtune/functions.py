"""A user's own code: plugins, and functions named as `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtune.errors import ConfigError


def import_file(path: Path, where: str) -> ModuleType:
    """Import a file under a name of its own, once per process, and again only when it has changed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", where=where, remedy="give the path of a Python file"
        ) from error
    digest = blake2b(str(path.resolve()).encode() + b"\0" + content, digest_size=8).hexdigest()
    name = f"shardtune_user_{path.stem}_{digest}"  # the same in every process
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            where=f"{where}: {path}{_line_in(path, error)}",
            remedy=f"python {path} shows the whole error",
        ) from error
    return module


def _line_in(path: Path, error: BaseException) -> str:
    """`:12`, the last line of a file that an error came through; "" where it did not."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


def load_function(spec: str, where: str) -> Callable[..., Any]:
    """The function that `file.py:function` names."""
    file, _, name = spec.rpartition(":")
    module = import_file(Path(file), where)
    function = vars(module).get(name)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{file} has no function {name!r}",
            where=f"{where}: {spec}",
            remedy=f"its functions are: {', '.join(known)}" if known else "write it into that file",
        )
    return function


def import_plugins(plugins: Sequence[str]) -> None:
    """Import the recipe's plugins, files or modules, before anything else."""
    for plugin in plugins:
        if plugin.endswith(".py"):
            import_file(Path(plugin), "plugins")
            continue
        try:
            importlib.import_module(plugin)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the plugin {plugin!r} cannot be imported: {type(error).__name__}: {error}",
                where="plugins",
                remedy="give a file (my_worker.py, relative to the recipe) or an importable module",
            ) from error
