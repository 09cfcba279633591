"""A logger of the user's own, named `package.module:Class` or `file.py:Class` in `runner.logger.logger_backends`.

The class is made and called on rank 0 only, in the main thread:

- `Class(run)`: with a `LoggedRun`, once everything has been checked, before the first step;
- `log(step, metrics)`: the metrics of each logged step, as in `metrics.jsonl`;
- `samples(step, name, answers)`, if it has one: some answers of an evaluation, as in `samples/`;
- `close()`, if it has one: after the last step, and when a run is interrupted.

It cannot change numerics: random state, grad mode and the like are restored after each call. An exception in a call
ends the logger, not the run.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.config.user_code import UserFunction, check_call, import_users, load_function
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.errors import ConfigError
from shardtune.training.callbacks import undisturbed
from shardtune.training.experiment.run import LoggedRun

KEY = "runner.logger.logger_backends"
ALIKE = {"finish": "close", "end": "close", "stop": "close", "shutdown": "close", "teardown": "close"}
"""Names of other systems for the end of a logger."""
METHODS = {
    "log": (2, "log(self, step, metrics)"),
    "samples": (3, "samples(self, step, name, answers)"),
    "close": (0, "close(self)"),
}
"""The number of arguments of each method besides self, and its call in messages; only `log` is required."""


def load_class(spec: str) -> type:
    """Import the class of a logger and check its methods.

    Raises:
        ConfigError: it cannot be imported, is no class, or its methods cannot be called.
    """
    where = f"{KEY}: {spec}"
    kind = load_function(spec, KEY) if FUNCTION_IN_FILE.fullmatch(spec) else _from_module(spec, where)
    if not isinstance(kind, type):
        raise ConfigError(
            f"{spec.rpartition(':')[2]} is not a class",
            where=where,
            remedy="name a class with a method log(self, step, metrics)",
        )
    members = dict(inspect.getmembers_static(kind))
    if "log" not in members:
        near = difflib.get_close_matches("log", [name for name in members if name[0] != "_"], n=1, cutoff=0.4)
        raise ConfigError(
            f"{kind.__name__} has no method log" + (f", but {near[0]}" if near else ""),
            where=where,
            remedy="write log(self, step, metrics); samples(self, step, name, answers) and close(self) are optional",
        )
    check_call(kind, 1, f"{kind.__name__}(run)", where)
    for name, (arguments, call) in METHODS.items():
        if name in members:
            bound = 0 if isinstance(members[name], (staticmethod, classmethod)) else 1
            check_call(getattr(kind, name), arguments + bound, call, where)
    for name in members:
        meant = None if name in METHODS or name[0] == "_" else _meant(name)
        if meant is not None and meant not in members and callable(getattr(kind, name)):
            raise ConfigError(
                f"{kind.__name__}.{name} would never be called; the method of a logger is {meant}",
                where=where,
                remedy=f"name it {meant}; a helper of your own has another name, such as _{name}",
            )
    return kind


def _meant(name: str) -> str | None:
    """The method of a logger that a name is near to, or means elsewhere."""
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.8)
    return near[0] if near else ALIKE.get(name)


def _from_module(spec: str, where: str) -> UserFunction:
    module_name, _, name = spec.partition(":")
    try:
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:  # last: it hides no installed package
            sys.path.append(os.getcwd())
        module = import_users(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            remedy="install the package, or give a file: my_logger.py:MyLogger, relative to the recipe",
        ) from error
    if name not in vars(module):
        known = [key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{module_name} has no class {name!r}",
            where=where,
            remedy=f"did you mean {near[0]}?" if near else f"its classes are {', '.join(known) or 'none'}",
        )
    return vars(module)[name]


class UserLogger:
    """An object of the user's class, called without disturbing this process's numerics.

    Args:
        kind: from `load_class`.
        run: of the logger.
    """

    def __init__(self, kind: type, run: LoggedRun) -> None:
        self._methods = frozenset(name for name, _ in inspect.getmembers_static(kind)) & METHODS.keys()
        with undisturbed():
            self._made: Any = kind(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with undisturbed():
            self._made.log(step, dict(metrics))

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        if "samples" in self._methods:
            with undisturbed():
                self._made.samples(step, name, [dict(answer) for answer in answers])

    def close(self) -> None:
        if "close" in self._methods:
            with undisturbed():
                self._made.close()
