"""The methods of a user's class that can be called on an engine, read once."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardtune.config.user_code import names_in
from shardtune.engine import nn as modules
from shardtune.engine.nn import BaseTrainModule
from shardtune.errors import ModelError

HOOKS = frozenset(
    name
    for base in (BaseTrainModule, modules.BaseHuggingFaceTrainModule)
    for name in vars(base)
    if not name.startswith("_")
)
"""Names of hooks and helpers, which are not callable methods."""
OVERRIDDEN = (
    *("on_weights_materialized", "materialization_source", "non_split_modules", "tensor_plan"),
    *("preprocess_input_named_parameters", "postprocess_output_named_parameters"),
)
"""Those that a class may have its own of."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
CACHED: type = type(functools.lru_cache(int))
"""What `functools.cache` and `lru_cache` make of a function."""
WEIGHTS = "weights"
"""The parameter of a method that receives the weights of its samples."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method.

    Attributes:
        name: of the method.
        signature: without `self`.
    """

    name: str
    signature: inspect.Signature

    @property
    def takes_weights(self) -> bool:
        return WEIGHTS in self.signature.parameters

    def names(self, args: Sequence[object]) -> list[str]:
        """The names of positional arguments; those of `*args` are numbered."""
        named = [name for name, parameter in self.signature.parameters.items() if parameter.kind in POSITIONAL]
        return [named[place] if place < len(named) else f"number {place + 1}" for place in range(len(args))]

    def check(self, args: tuple[object, ...], kwargs: Mapping[str, object], *, has_weights: bool) -> bool:
        """Refuse invalid arguments before the ranks are involved; returns whether to pass weights.

        Args:
            has_weights: whether the call has weights to pass.

        Raises:
            TypeError: as Python would.
        """
        pass_weights = has_weights and self.takes_weights and WEIGHTS not in kwargs
        try:
            self.signature.bind(*args, **{**kwargs, **({WEIGHTS: None} if pass_weights else {})})
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None
        return pass_weights


def own_classes(kind: type[BaseTrainModule]) -> list[type]:
    """The user's classes: those before the first of this package."""
    ours = next(place for place, base in enumerate(kind.__mro__) if base.__module__ == modules.__name__)
    return list(kind.__mro__[:ours])


def read_methods(kind: type[BaseTrainModule], taken: Collection[str]) -> dict[str, Method]:
    """The public methods that a class and its bases of the user's define, and `forward`.

    Args:
        kind: of the module.
        taken: names of the engine's methods.

    Raises:
        ModelError: a method has the name of an engine method, or all but the name of a hook.
    """
    _check_hooks(own_classes(kind))
    found: dict[str, Method] = {}
    for owner in own_classes(kind):
        for name, value in vars(owner).items():
            if name.startswith("_") or name in HOOKS or name in found or not _is_method(value):
                continue
            if name in taken:
                raise ModelError(
                    f"{owner.__name__}.{name} has the name of a method of the engine's, which would hide it",
                    where=f"class {owner.__name__}",
                    remedy=f"rename it (for example my_{name}); reserved names are {', '.join(sorted(taken))}",
                )
            found[name] = Method(name, _signature(kind, value))
    if kind.forward is not nn.Module.forward:
        found["forward"] = Method("forward", _signature(kind, kind.forward))
    return found


def _is_method(value: object) -> bool:
    """Whether what a class has under a name is a method: a function, decorated by the standard library's or not."""
    if isinstance(value, staticmethod):
        return _is_method(value.__func__)
    kept = isinstance(value, functools.partialmethod | functools.singledispatchmethod)
    return kept or inspect.isfunction(value) or isinstance(value, CACHED)


def _check_hooks(classes: Sequence[type]) -> None:
    """Refuse misspelt names of hooks, which nothing would ever call, unless another method of the classes uses them."""
    members = [value for owner in classes for value in vars(owner).values()]
    for owner in classes:
        free = [name for name in OVERRIDDEN if name not in vars(owner)]
        for name, value in vars(owner).items():
            near = [] if name in OVERRIDDEN else difflib.get_close_matches(name, free, n=1, cutoff=0.85)
            if near and not any(name in names_in(other) for other in members if other is not value):
                raise ModelError(
                    f"{owner.__name__}.{name} is no hook, so that it would never be called",
                    where=f"class {owner.__name__}",
                    remedy=f"did you mean {near[0]}? A method of that purpose gets another name",
                )


def no_method(module: BaseTrainModule, name: str, methods: Mapping[str, Method]) -> AttributeError:
    """The error for an unknown method name.

    Args:
        module: of the engine.
        name: that was asked for.
        methods: that there are.
    """
    kind = type(module)
    near = difflib.get_close_matches(name, methods, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    of_class = inspect.getattr_static(kind, name, None)
    has = of_class is not None or any(name in vars(module)[held] for held in ("_modules", "_parameters", "_buffers"))
    if has or name in vars(module):
        inherited = callable(of_class) and not any(name in vars(owner) for owner in own_classes(kind))
        what = "is inherited" if inherited else "is no method"
        use = f"self.{name}(…)" if callable(of_class) else f"self.{name}"
        return AttributeError(
            f"{kind.__name__}.{name} {what}, and the module is on the ranks: write a method that uses {use}; those of "
            f"your classes are {', '.join(sorted(methods))}{hint}"
        )
    return AttributeError(f"{kind.__name__} has no method {name!r}: it has {', '.join(sorted(methods))}{hint}")


def _signature(kind: type, value: Any) -> inspect.Signature:
    """The signature of what a class has as a method, as it is called on an object."""
    signature = inspect.signature(value.__get__(None, kind))
    if isinstance(value, staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])
