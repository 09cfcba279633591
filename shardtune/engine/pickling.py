"""Pickling between the caller and its ranks: by value what the other side cannot import."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy as shallow_copy
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from shardtune.errors import ParallelError
from shardtune.parallel.operation import returned
from shardtune.parallel.torch_private.modules import empty_parametrized
from shardtune.parallel.torch_private.operations import tree_map

T = TypeVar("T")
MODULE = "the module"
_Cached: type = type(functools.lru_cache(int))


class ByValue(cloudpickle.CloudPickler):
    """Pickles what cloudpickle does not, or what refuses to be pickled.

    Modules that are objects of another class (`torch.backends` and what is in it) are pickled by name. Parametrized
    modules (`torch.nn.utils.parametrize`), of which each has a class of its own, are pickled with the class before.
    A `functools.cached_property` is pickled without its lock, and functions of a script under `functools.lru_cache`
    without what they keep. The `step` of a script's optimizer that was used here is pickled without torch's wrapper,
    whose hooks would be copies of this process's; an optimizer of the other side wraps it anew.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, nn.Module) and type(obj).__module__ == parametrize.__name__ and is_parametrized(obj):
            names = [name for name, _ in obj.get_submodule("parametrizations").named_children()]
            return empty_parametrized, (type_before_parametrizations(obj), names), vars(obj)
        if type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, _Cached) and not _is_importable(cast(Any, obj)):
            cached = cast(Any, obj)
            return _cached_function, (cached.__wrapped__, cached.cache_parameters())
        if isinstance(obj, FunctionType) and "hooked" in vars(obj) and not _is_importable(obj):
            return _itself, (vars(obj)["__wrapped__"],)
        return super().reducer_override(obj)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(function)


def _is_importable(function: Callable[..., Any]) -> bool:
    return function.__module__ != "__main__" and "<locals>" not in function.__qualname__


def pack(value: object) -> bytes:
    """Serialise a value for `unpack` in any process with the same packages."""
    buffer = io.BytesIO()
    ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pack_for_twin(value: object) -> bytes:
    """The same for a process that runs the same script, where classes are found by name."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # not importable there, for example functions inside functions
        return pack(value)


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Trial(ByValue):
    """Pickles all but the numbers of tensors and arrays, which always can be."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | np.ndarray) and (isinstance(obj, torch.Tensor) or obj.dtype != object):
            return int, ()
        return super().reducer_override(obj)


def check_sendable(value: object, method: str, what: str) -> None:
    """Refuse what cannot travel between the caller and a rank, also where both are one process.

    Args:
        method: "Class.method", for the message.
        what: which value this is.
    """
    try:
        _Trial(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # what a user's object raises
        raise unsendable(error, method, what, _holder(value) if isinstance(value, nn.Module) else "") from error


def _holder(module: nn.Module) -> str:
    """The attribute of a module that cannot be sent, where it is one and not the module's class."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers") or isinstance(value, nn.Module):
                continue
            if not _is_pickled(value):
                return f"{prefix}.{name}" if prefix else name
    return ""


class _OfAttribute(_Trial):
    """Pickles the rest of an attribute, without the modules in it, such as that of a closure."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, nn.Module) else super().reducer_override(obj)


def _is_pickled(value: object) -> bool:
    try:
        _OfAttribute(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # what a user's object raises
        return False
    return True


def unsendable(error: Exception, method: str, what: str, holder: str = "") -> ParallelError:
    """The error for what cannot travel; arguments as those of `check_sendable`.

    Args:
        holder: the attribute of a module that cannot.
    """
    if what != MODULE:
        remedy = "pass plain values, lists, dicts, tensors or paths; what holds files, locks or generators is made on "
        return ParallelError(
            f"{what} cannot be sent between processes: {error}", where=method, remedy=f"{remedy}the ranks"
        )
    return ParallelError(
        f"{what} cannot be sent between processes{f', for its attribute {holder}' if holder else ''}: {error}",
        where=method,
        remedy="make what holds files, locks, weak references or compiled functions in on_weights_materialized, which "
        "runs on each rank; where it is no attribute, a function or a global of the script has it: move the class and "
        "what it uses into a file that the script imports",
    )


def unpack(packed: bytes) -> Any:
    """Deserialise a value; only for data from this engine's ranks or caller."""
    return pickle.loads(packed)


def sendable_error(error: BaseException) -> BaseException | None:
    """An exception that arrives with its own type; None where its class cannot be sent.

    Python calls the class with `args` again, which is another call than that of an `__init__` of one's own.
    """
    without_init = cast(BaseException, _WithoutInit(error))
    return next((form for form in (error, without_init) if _arrives(form)), None)


class _WithoutInit:
    """Pickles as an exception that is made without its `__init__`, with those attributes that can be sent."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        state = {name: value for name, value in vars(self._error).items() if _arrives(value)}
        return _error_without_init, (type(self._error), self._error.args, state)


def _error_without_init(
    kind: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]
) -> BaseException:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def _arrives(value: object) -> bool:
    try:
        unpack(pack(value))
    except Exception:  # what a user's object raises
        return False
    return True


def detached(value: T, in_rows: Callable[[torch.Tensor], torch.Tensor], *, copy: bool) -> T:
    """A method's result in the form the caller receives: whole tensors without a graph, in host memory.

    Every rank calls it, as a sharded tensor is gathered from all.

    Args:
        in_rows: gives a tensor of which this rank has a part that is no rows as one that has rows.
        copy: also copy what is in host memory already, so that the caller's does not change with the module's.
    """

    copies: dict[int, object] = {}

    def taken(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            leaf = in_rows(leaf)
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        if isinstance(leaf, torch.Tensor):
            leaf = returned(leaf)
        if isinstance(leaf, torch.Tensor):
            return leaf.detach() if leaf.is_meta else leaf.detach().to("cpu", copy=copy)
        held = dataclass_values(leaf)
        if held is None:
            return leaf
        if id(leaf) not in copies:  # one that leads back to itself is copied once
            copies[id(leaf)] = made = shallow_copy(leaf)
            for name, each in held.items():
                object.__setattr__(made, name, tree_map(taken, each))  # of a frozen one, too; __init__ may compute
        return copies[id(leaf)]

    return tree_map(taken, value)


def dataclass_values(value: object) -> dict[str, object] | None:
    """The values of a dataclass's fields, of those that are set; None: it is none."""
    if not is_dataclass(value) or isinstance(value, type):
        return None
    found: dict[str, object] = {}
    for field in fields(value):
        with suppress(AttributeError):
            found[field.name] = object.__getattribute__(value, field.name)
    return found
