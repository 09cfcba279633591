"""What a class has to be to serve as an adapter, checked before anything is built or read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from shardtune.config.user_code import check_call
from shardtune.errors import ConfigError
from shardtune.models.adapter import Adapter

PAGE = "docs/add-a-model.md shows how"
CALLS = {
    "build": "",
    "encode": "row",
    "weights": "sample",
    "loss": "model, batch",
    "outputs": "model, batch",
    "step_loss": "outputs",
    "metrics": "model, batch",
    "predictions": "model, batch",
    "initial_weights": "",
    "examples": "",
}
"""The methods that authors write, and what they are called with."""
DECLARED = ("Options", "padding", "unit_classes", "reads")
OWN = "shardtune."
"""How the names of the package's own modules begin."""
MEANT = 0.83
"""How alike a name has to be to one of the above to be taken for a misspelling of it: metric and metrics are."""


def check_adapter_class(kind: type[Adapter], where: str) -> None:
    """Refuse a class that lacks methods, whose methods take other arguments, or that declares what cannot be.

    Args:
        kind: the user's.
        where: the recipe names it.

    Raises:
        ConfigError: says what, and how it is written.
    """
    if inspect.isabstract(kind):
        lacking = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"the adapter {kind.__name__} lacks {lacking}", where=where, remedy=f"write it; {PAGE}")
    written = {name: value for base in reversed(kind.__mro__) if _is_users(base) for name, value in vars(base).items()}
    _check_declared(kind, where)
    for name in CALLS.keys() & written.keys():
        _check_method(kind, name, written[name], where)
    if "__init__" in written and "from_recipe" not in written:
        made = f"{kind.__name__}.__init__(recipe, tokenizer)"
        check_call(written["__init__"], 3, made, where)
    _check_names(kind, written, where)


def check_made(adapter: Adapter, where: str) -> None:
    """Refuse an adapter whose own `__init__` has left out that of `Adapter`."""
    if "recipe" not in vars(adapter):
        name = type(adapter).__name__
        raise ConfigError(
            f"{name}.__init__ does not call that of Adapter, so it has no recipe and no options",
            where=where,
            remedy="begin it with super().__init__(recipe, tokenizer), or do without it: an adapter keeps nothing",
        )


def _check_declared(kind: type[Adapter], where: str) -> None:
    """What the class says in place of methods has the types that are read."""
    options: Any = kind.Options
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise ConfigError(
            f"{kind.__name__}.Options is {_told(options)}, not a class of pydantic",
            where=where,
            remedy="class Options(pydantic.BaseModel): width: int = 16; and in the adapter: Options = Options",
        )
    padding: Any = kind.padding
    if not isinstance(padding, Mapping) or not all(isinstance(value, int | float) for value in padding.values()):
        raise ConfigError(
            f"{kind.__name__}.padding is {_told(padding)}, not a dict of numbers",
            where=where,
            remedy='padding = {"field": 0}: the fields whose rows differ in length, and what they are filled with',
        )
    for name, value in (("unit_classes", kind.unit_classes), ("reads", kind.reads)):
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise ConfigError(
                f"{kind.__name__}.{name} is {_told(value)}, not a tuple of names",
                where=where,
                remedy=f'{name} = ("{value}",)'
                if isinstance(value, str)
                else f'{name} = ("Block",): texts, no classes',
            )


def _check_method(kind: type[Adapter], name: str, found: Any, where: str) -> None:
    """A method that is called with what the system has to give."""
    call = f"{kind.__name__}.{name}({CALLS[name]})"
    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not callable(function):
        raise ConfigError(
            f"{kind.__name__}.{name} is {_told(found)}, not a method", where=where, remedy=f"write {call}"
        )
    arguments = len(CALLS[name].split(", ")) if CALLS[name] else 0
    check_call(function, arguments + (not isinstance(found, staticmethod)), call, where)


def _check_names(kind: type[Adapter], written: Mapping[str, Any], where: str) -> None:
    """A name that is nearly one of those that are read would be passed over in silence."""
    free = [name for name in (*CALLS, *DECLARED) if name not in written]
    lower = {name.lower(): name for name in free}
    for name in written:
        if name.startswith("_") or name in vars(Adapter) or name in CALLS or name in DECLARED:
            continue
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=MEANT)
        if near:
            raise ConfigError(
                f"{kind.__name__}.{name} is nothing that an adapter is asked for",
                where=where,
                remedy=f"did you mean {lower[near[0]]}? The name of a helper of your own may begin with _",
            )
    if "options" in written:
        raise ConfigError(
            f"{kind.__name__}.options is what a recipe gives, and cannot be set by the class",
            where=where,
            remedy="did you mean Options, the class of their types?",
        )


def _is_users(kind: type[Any]) -> bool:
    """Whether a base class is none of the package's, nor of Python's."""
    return issubclass(kind, Adapter) and not kind.__module__.startswith(OWN)


def _told(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"{value!r}"[:60]
