"""Subclasses that override every public method of a class and record the calls."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints


class Call(NamedTuple):
    """One call of an overridden method: its arguments without `self`, by their documented names."""

    method: str
    arguments: Mapping[str, object]


CALLS: list[Call] = []
"""Of all recorded classes; shared with copies of a test file that are imported as a user's own file."""


def public_methods(kind: type) -> list[str]:
    """The methods and properties of a class of the package, its bases included."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("shardtune."):
            methods = (types.FunctionType, property, classmethod)
            found |= dict.fromkeys(
                name for name, value in vars(base).items() if not name.startswith("_") and isinstance(value, methods)
            )
    return list(found)


def recorded(kind: type[Any], documented: type, names: Sequence[str]) -> type[Any]:
    """A subclass of `kind` whose overrides of these methods record the call and return what the method of `kind` does.

    Args:
        kind: the class that runs.
        documented: the class that documents the methods' arguments.
        names: of the methods.
    """
    overrides = {name: _override(name, inspect.getattr_static(kind, name), documented) for name in names}
    return type(f"Recorded{kind.__name__}", (kind,), {"__module__": kind.__module__, **overrides})


def _override(name: str, method: Any, documented: type) -> Any:
    if isinstance(method, property):
        return property(lambda self: (CALLS.append(Call(name, {})), method.__get__(self))[1])
    function, signature = _function(method), inspect.signature(_function(inspect.getattr_static(documented, name)))

    @functools.wraps(function)
    def override(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        CALLS.append(Call(name, {key: value for key, value in bound.items() if key not in ("self", "cls")}))
        return function(*args, **kwargs)

    return classmethod(override) if isinstance(method, classmethod) else override


def _function(method: Any) -> Any:
    return method.__func__ if isinstance(method, classmethod) else method


def misfits(documented: type, calls: Sequence[Call]) -> list[str]:
    """The arguments of calls that are not of their documented types."""
    found = []
    for call in calls:
        method = _function(inspect.getattr_static(documented, call.method))
        if isinstance(method, property):
            continue
        hints = get_type_hints(method)
        found += [
            f"{call.method}({name}={value!r:.60}), not {hints[name]}"
            for name, value in call.arguments.items()
            if not _fits(value, hints[name])
        ]
    return found


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if origin is collections.abc.Sequence:
        return isinstance(value, Sequence) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, (int, float) if hint is float else origin or hint)
