"""A module's copy for a rank in the caller's process."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import weakref
from collections.abc import Collection, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from shardtune.engine.pickling import MODULE, ByValue, check_sendable, pack, unpack, unsendable


def copy_of_module(module: nn.Module, method: str) -> nn.Module:
    """A copy, with functions that use the copy where they use the module (hooks that are closures over `self`).

    Raises:
        ParallelError: the module could not be sent to a rank in another process either.
    """
    tree = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    inside = list(_reached(module, deep=False))
    if any(isinstance(each, weakref.ref) and id(each()) in tree for each in inside):
        check_sendable(module, method, MODULE)  # refuses it: a copy of a weak reference is of the caller's module
    remade = {id(each): each for each in inside if isinstance(each, FunctionType) and _uses(each, tree)}
    if remade:
        found = _with_functions(module, method, tree, set(remade))
    else:
        found = _plain_copy(module, method)
    copies = dict(found.named_parameters())
    for name, parameter in module.named_parameters():  # torch's copy of a parameter leaves its attributes out
        if own := vars(parameter):
            vars(copies[name]).update(own)
    return found


def _plain_copy(module: nn.Module, method: str) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception:  # of tensors that are computed, such as `torch.nn.utils.weight_norm` keeps
        check_sendable(module, method, MODULE)
        return unpack(pack(module))


def _with_functions(module: nn.Module, method: str, tree: Collection[int], remade: Collection[int]) -> nn.Module:
    buffer = io.BytesIO()
    copier = _Copier(buffer, tree, remade)
    try:
        copier.dump(module)
    except Exception as error:  # what a user's object raises
        raise unsendable(error, method, MODULE) from error
    buffer.seek(0)
    return _Loader(buffer, copier.kept).load()


def _reached(value: object, *, deep: bool) -> Iterator[object]:
    """What modules, containers, methods and partial functions hold, each once.

    Args:
        deep: with what functions refer to.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, nn.Module):
            left.extend(vars(each).values())
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
        elif isinstance(each, MethodType):
            left.extend((each.__self__, each.__func__))
        elif isinstance(each, functools.partial):
            left.extend((each.func, each.args, each.keywords))
        elif isinstance(each, FunctionType) and deep:
            left.extend((each.__defaults__, each.__kwdefaults__, *map(_held, each.__closure__ or ())))


def _held(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _uses(value: object, tree: Collection[int]) -> bool:
    return any(id(each) in tree for each in _reached(value, deep=True))


class _Kept:
    """What a copy shares with its original."""

    def __init__(self, value: object) -> None:
        self.value = value


class _Copier(ByValue):
    """Copies all but functions, classes and weak references; of functions those that use the module.

    Args:
        file: to write to.
        tree: ids of what the module consists of.
        remade: ids of functions to copy.
    """

    def __init__(self, file: io.BytesIO, tree: Collection[int], remade: Collection[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tree, self._remade = tree, remade
        self.kept: list[object] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, _Kept):
            self.kept.append(obj.value)
        elif isinstance(obj, type | ModuleType | weakref.ref) or (
            isinstance(obj, FunctionType) and not self._is_remade(obj)
        ):
            self.kept.append(obj)
        else:
            return None
        return len(self.kept) - 1

    def _is_remade(self, function: FunctionType) -> bool:
        return id(function) in self._remade or _uses(function, self._tree)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType):
            return super().reducer_override(obj)
        cells = obj.__closure__ or ()
        used = [_uses(_held(cell), self._tree) for cell in cells]
        shared = [None if uses else _Kept(cell) for cell, uses in zip(cells, used, strict=True)]
        contents = [_held(cell) if uses else None for cell, uses in zip(cells, used, strict=True)]
        state = (contents, obj.__defaults__, obj.__kwdefaults__, obj.__qualname__, vars(obj))
        made = (_Kept(obj.__code__), _Kept(obj.__globals__), obj.__name__, shared)
        return _function, made, state, None, None, _fill


def _function(code: CodeType, names: dict[str, Any], name: str, shared: list[CellType | None]) -> FunctionType:
    return FunctionType(code, names, name, closure=tuple(CellType() if cell is None else cell for cell in shared))


def _fill(function: FunctionType, state: tuple[Any, ...]) -> None:
    contents, function.__defaults__, function.__kwdefaults__, function.__qualname__, attributes = state
    vars(function).update(attributes)
    for cell, value in zip(function.__closure__ or (), contents, strict=True):
        if value is not None:
            cell.cell_contents = value


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[object]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, pid: int) -> object:
        return self._kept[pid]
