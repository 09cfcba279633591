"""Parts of transformers with some methods replaced, which keep their class name and can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

Methods = TypeVar("Methods")


def derived_class(kind: type, methods: type[Methods]) -> type[Methods]:
    """A class whose base is replaced: in its MRO `methods` is after `kind` and its parents, before the library's base.

    So calls of `kind` to its base reach the new methods, and what `kind` overrides itself stays in force. The
    class has the name of `kind`, under which `save_pretrained` writes it down, and its objects can be pickled. It is
    made once for each pair.

    Args:
        kind: a class of transformers.
        methods: derives from the library's base of `kind` (`PilBackend`, `ProcessorMixin`).
    """
    return _derived_class(kind, methods)


def derived(part: object, methods: type[Methods]) -> Methods:
    """A copy of an object in the `derived_class` of its class; it shares what the object refers to."""
    return _make(type(part), methods, vars(part))


@cache
def _derived_class(kind: type, methods: type) -> type:
    def reduce(self: object) -> tuple[object, ...]:
        return _make, (kind, methods, dict(vars(self)))

    return type(kind.__name__, (kind, methods), {"__module__": kind.__module__, "__reduce__": reduce})


def _make(kind: type, methods: type[Methods], state: Mapping[str, object]) -> Methods:
    made = object.__new__(derived_class(kind, methods))
    vars(made).update(state)
    return made
