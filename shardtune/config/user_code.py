"""A user's code: plugins, and functions and classes named as `file.py:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, TypeAlias

from shardtune.config.shown import as_written
from shardtune.errors import ConfigError, ShardtuneError

UserFunction: TypeAlias = Callable[..., Any]
"""A function or class in a user's file, whose arguments and result are not checked yet."""
USER_MODULE = "shardtune_user_"
"""The prefix of the module names under which a user's files are imported."""
_packages: set[str] = set()
"""Top-level packages of users, imported by name."""
_plugins: defaultdict[str, set[str]] = defaultdict(set)
"""The modules that this process has imported for each plugin: several for a file that has changed."""


class _FromSource(SourceFileLoader):
    """Compiles the text of a file: compiled files of Python miss a change within a second that keeps the size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, where: str) -> ModuleType:
    """Import a file under a unique name, once per process, and again only when it has changed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", where=where, remedy="give the path of a Python file"
        ) from error
    digest = blake2b(str(path.resolve()).encode() + b"\0" + content, digest_size=8).hexdigest()
    name = f"{USER_MODULE}{path.stem}_{digest}"  # the same in every process
    if name in sys.modules:
        return sys.modules[name]
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file", where=where, remedy="give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            where=f"{where}: {path}{_line_in(path, error)}",
            remedy=_beside(path, error) or f"python {path} shows the whole error",
        ) from error
    return module


def _beside(path: Path, error: BaseException) -> str:
    """The remedy for a file that imports its neighbour; "" where it does not."""
    if not isinstance(error, ImportError):
        return ""
    first = (error.name or "").partition(".")[0]
    relative = "relative import" in str(error)
    if not relative and not (first and any((path.parent / name).exists() for name in (f"{first}.py", first))):
        return ""
    return (
        "a recipe's file is imported alone, and its directory is not on Python's path: put all of the code into one "
        "file, or into a package that you install (pip install -e .)"
    )


def _line_in(path: Path, error: BaseException) -> str:
    """`:12`, the last line of a file in an error's traceback; "" where the file is not in it."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


@contextmanager
def named_errors(spec: str, key: str, doing: str = "") -> Iterator[None]:
    """Turns an exception in a user's code into an error that names the code and the line.

    Args:
        spec: the code, `file.py:name`.
        key: the recipe key that names it.
        doing: the method that is called.
    """
    try:
        yield
    except ShardtuneError:
        raise
    except (Exception, SystemExit) as error:
        file, _, name = spec.rpartition(":")
        raise ConfigError(
            f"{name}{'.' + doing if doing else ''} failed: {type(error).__name__}: {error}",
            where=f"{key}: {file}{_line_in(Path(file), error)}",
            remedy="fix it, or leave it out of the recipe",
        ) from error


def function_of(member: object) -> object:
    """The function of a member of a class: of a method or property; anything else itself."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def names_in(member: object) -> set[str]:
    """The names of attributes and globals that a function's or method's code refers to; empty for anything else.

    What a decorator wraps counts too, with "super": the wrapper calls it.
    """
    function, found, waiting = function_of(member), set[str](), list[CodeType]()
    while inspect.isfunction(function):
        waiting.append(function.__code__)
        wrapped = vars(function).get("__wrapped__")
        found |= {"super"} if wrapped is not None else set()
        function = wrapped
    while waiting:
        code = waiting.pop()
        found |= set(code.co_names)
        waiting += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return found


def check_call(function: UserFunction, number: int, call: str, where: str) -> None:
    """Refuse a user's function that cannot be called with a number of positional arguments.

    Args:
        function: the user's.
        number: of arguments.
        call: the call as the error shows it, e.g. `metric(outputs, targets, weights)`.
        where: the key that names it.
    """
    name = call.partition("(")[0]
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} is a coroutine", where=where, remedy="write it with def, without async")
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError as error:
        raise ConfigError(
            f"{name} takes other arguments: {error}", where=where, remedy=f"it is called as {call}"
        ) from None


def user_fault(error: BaseException) -> ConfigError | None:
    """A message for an error whose traceback passes through a user's file, from there on; None for any other."""
    traced = error.__traceback__
    while traced is not None and not _is_users(traced):
        traced = traced.tb_next
    if traced is None or not isinstance(error, Exception):
        return None
    inner, last = traced, traced
    while inner is not None:
        last = inner if _is_users(inner) else last
        inner = inner.tb_next
    code = last.tb_frame.f_code
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank = f", on rank {os.environ['RANK']}" if several else ""
    trace = "".join(traceback.format_exception(type(error), error, traced)).rstrip()
    return ConfigError(
        f"{type(error).__name__}: {error}",
        where=f"{code.co_filename}:{last.tb_lineno}, in {code.co_qualname}{rank}",
        remedy=f"{_remedy(str(error), several)}; the traceback from your code on:\n{trace}",
    )


def _remedy(message: str, several_ranks: bool) -> str:
    known = _REMEDIES | (_ON_RANKS if several_ranks else {})
    return next((remedy for part, remedy in known.items() if part in message), "fix it there")


_NOT_COMPILED = "compiled units have first derivatives only: set model.compile: false for create_graph=True"
_OF_TWO_DTYPES = (
    "model.precision is the dtype of parameters and of a batch's numbers: make other tensors of an input's dtype "
    "(x.new_zeros(3), buffer.to(x.dtype)); with code that casts to fp32 by itself (x.float() before a norm) set "
    "model.precision: fp32, and for bf16 call the model in the loss within torch.autocast(device, torch.bfloat16)"
)
_REMEDIES = {
    "mixed dtype": _OF_TWO_DTYPES,
    "the same dtype": _OF_TWO_DTYPES,
    "expected scalar type": _OF_TWO_DTYPES,
    "bias type (": _OF_TWO_DTYPES,
    "weight type (": _OF_TWO_DTYPES,
    "does not match weight dtype": _OF_TWO_DTYPES,
    "does not require grad and does not have a grad_fn": "an evaluation records no gradients: differentiate inside "
    "`with torch.enable_grad():`, by an input with requires_grad_(), and by weights that are not frozen",
    "compiled with non-empty donated buffers": _NOT_COMPILED,
    "does not currently support double backward": _NOT_COMPILED,
}
"""What mends an error of torch that says it in other words, by a part of its message."""
_ON_RANKS = {
    "appears to not have been used in the graph": "on several ranks the weights of a unit are other tensors in its "
    "forward than outside of it: differentiate by a weight outside of all units (choose them by unit_classes of the "
    "adapter, or by actor.fsdp_config.wrap)",
}


def _is_users(traced: TracebackType) -> bool:
    name = str(traced.tb_frame.f_globals.get("__name__", ""))
    return name.startswith(USER_MODULE) or name.partition(".")[0] in _packages


def import_users(module: str) -> ModuleType:
    """Import a user's module by name; errors in its package count as the user's from now on.

    Recipes may name plugins of this package, as those of shortened runs do: its errors are none of a user's.
    """
    package = module.partition(".")[0]
    if package != __name__.partition(".")[0]:
        _packages.add(package)
    return importlib.import_module(module)


def load_function(spec: str, where: str) -> UserFunction:
    """The function that `file.py:function` names."""
    file, _, name = spec.rpartition(":")
    module = import_file(Path(file), where)
    function = vars(module).get(name)
    if not callable(function):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and value.__module__ == module.__name__
        ]
        near = difflib.get_close_matches(name, known, n=1)
        has = f"it has {', '.join(known)}" if known else "write it into that file"
        raise ConfigError(
            f"{file} has no function or class {name!r}",
            where=f"{where}: {spec}",
            remedy=f"did you mean {near[0]}?" if near else has,
        )
    return function


def import_plugins(plugins: Sequence[str]) -> list[ModuleType]:
    """Import the recipe's plugins, files or modules, before anything else; returns the modules."""
    modules = []
    for plugin in plugins:
        if plugin.endswith(".py"):
            modules.append(import_file(Path(plugin), "plugins"))
            _plugins[plugin].add(modules[-1].__name__)
            continue
        try:
            if importlib.util.find_spec(plugin.partition(".")[0]) is None:  # last: it hides no installed package
                sys.path.append(os.getcwd())
            modules.append(import_users(plugin))
            _plugins[plugin].add(plugin)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the plugin {as_written(plugin)} cannot be imported: {type(error).__name__}: {error}",
                where="plugins",
                remedy="give a file (my_worker.py, relative to the recipe) or an importable module",
            ) from error
    return modules


def note_on_other_plugins(plugins: Sequence[str]) -> list[str]:
    """A note on plugins that this process has imported for an earlier run; none where there are no others.

    Args:
        plugins: of the run, which are imported.
    """
    own = __name__.partition(".")[0]  # those of shortened runs
    others = [plugin for plugin in _plugins if plugin not in plugins and plugin.partition(".")[0] != own]
    changed = [f"{plugin} as it was before its change" for plugin in plugins if len(_plugins[plugin]) > 1]
    if not others and not changed:
        return []
    return [
        f"plugins of earlier runs of this process: {', '.join([*others, *changed])}; what they registered, set or "
        "patched holds in this run too, and its record does not name them (a new process has none of it)"
    ]


def code_hashes(plugins: Sequence[str], named: Sequence[str | None] = ()) -> dict[str, str]:
    """A hash of the content of the user's own code, by plugin or file.

    Args:
        plugins: `plugins` of a recipe; of a package all its files count.
        named: further `file.py:name` values; None where a key names none.
    """
    files = {plugin: [Path(plugin)] if plugin.endswith(".py") else _module_files(plugin) for plugin in plugins}
    files |= {file: [Path(file)] for file in (spec.rpartition(":")[0] for spec in named if spec is not None)}
    return {name: _hash([file for file in found if file.is_file()]) for name, found in files.items()}


def _module_files(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return []
    folders = spec.submodule_search_locations
    return sorted(file for folder in folders for file in Path(folder).rglob("*.py")) if folders else [Path(spec.origin)]


def _hash(files: Sequence[Path]) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(blake2b(file.read_bytes(), digest_size=16).digest())
    return digest.hexdigest()
