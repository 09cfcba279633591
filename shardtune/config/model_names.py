"""Names of the user's own models: worker classes, adapter classes and functions that make a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from shardtune.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])
Kind = Literal["worker", "adapter", "function", "config and processor"]
Gives = Literal["model", "config_and_processor"]

CATEGORIES = ("sft",)
"""What a registered model is for."""
BUILT_IN = ("causal_lm", "vision_language", "vision_language_action")
"""The system's own values of `actor.model.model_type`."""
GROUP = "shardtune.adapters"
"""The entry-point group in which installed packages offer models."""
_BASES: dict[tuple[str, str], Kind] = {
    ("shardtune.training.worker.base", "FSDPSftWorker"): "worker",
    ("shardtune.models.adapter", "Adapter"): "adapter",
}
"""By name, so that this module does without torch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered thing, and the file it is written in."""

    thing: Any
    file: str

    @property
    def place(self) -> str:
        return f"{self.thing.__qualname__} in {self.file}"

    def is_again(self, other: Entry) -> bool:
        """Whether another is the same thing, imported once more (a changed file, a cell that is run again)."""
        return self.thing is other.thing or (
            type(self.thing) is type(other.thing)
            and (self.thing.__qualname__, self.file) == (other.thing.__qualname__, other.file)
        )


_registered: dict[str, dict[Kind, Entry]] = {}
_declared: dict[str, str] = {}  # name -> the Enum member that declares it


def register_model(name: str, category: str = "sft", *, gives: Gives = "model") -> Callable[[T], T]:
    """Decorates a worker class, an adapter class, or a function with a `actor.model.model_type`.

    One name may have one of each kind. To register the same thing again, as when its file is imported twice, is fine.

    Args:
        name: as recipes write it.
        category: what the model is for: sft.
        gives: of a function: model: (cfg of `actor.model`) -> nn.Module; config_and_processor: (cfg of `actor`) ->
            (config, processor), which `get_model_config_and_processor` calls.

    Raises:
        ConfigError: the name is taken, the category unknown, or the class lacks methods that it has to have.
    """
    _check_name(name, category, f"register_model({name!r})")

    def register(thing: T) -> T:
        kind, entry = _kind_given(thing, name, gives), Entry(thing, _file_of(thing))
        held = _registered.setdefault(name, {})
        if kind in held and not entry.is_again(held[kind]):
            raise ConfigError(
                f"{name!r} is registered twice: as {held[kind].place} and as {entry.place}",
                where=f"register_model({name!r})",
                remedy="give one of them another name",
            )
        held[kind] = entry
        return thing

    return register


class SupportedModel(Enum):
    """Model types as an Enum: a member `NAME = ("my_new_model", "sft")` of a subclass makes the name known.

    The worker that drives it is the one that is registered under the name, or else the only one in the plugins.
    """

    def __init__(self, *value: Any) -> None:
        where = f"{type(self).__qualname__} in {_file_of(type(self))}"
        if len(value) != 2:
            raise ConfigError(
                f"the member is {value!r}, not a name and a category",
                where=where,
                remedy='write ("my_new_model", "sft")',
            )
        self.model_type, self.category = value
        _check_name(self.model_type, self.category, where)
        _declared[self.model_type] = where


def registered(name: str) -> list[Any]:
    """What a name stands for: worker class, adapter class, function; the first of these that packages offer is loaded.

    Raises:
        ConfigError: an installed package offers the name and cannot be loaded.
    """
    if name not in _registered and name not in _declared:
        for entry in _entry_points():
            if entry.name == name:
                register_model(name)(_load(entry))
    return [entry.thing for entry in _registered.get(name, {}).values()]


def registered_worker(name: str) -> type[Any] | None:
    """The worker class of a name; None where it has none."""
    return _of_kind(name, "worker")


def registered_adapter(name: str) -> type[Any] | None:
    """The adapter class of a name; None where it has none."""
    return _of_kind(name, "adapter")


def registered_function(name: str) -> Callable[..., Any] | None:
    """The function (cfg) -> nn.Module of a name; None where it has none."""
    return _of_kind(name, "function")


def registered_processor(name: str) -> Callable[..., Any] | None:
    """The function (cfg) -> (config, processor) of a name; None where it has none."""
    return _of_kind(name, "config and processor")


def _of_kind(name: str, kind: Kind) -> Any:
    registered(name)  # what a package offers is loaded
    entry = _registered.get(name, {}).get(kind)
    return None if entry is None else entry.thing


def is_declared(name: str) -> bool:
    """Whether a subclass of `SupportedModel` has the name."""
    return name in _declared


def is_registered(thing: object) -> bool:
    """Whether an object has any name."""
    return any(thing is entry.thing for held in _registered.values() for entry in held.values())


def known_names() -> list[str]:
    """All names: registered, declared, and offered by installed packages (which are not loaded for it)."""
    return sorted({*_registered, *_declared, *(entry.name for entry in _entry_points())})


def describe(name: str) -> str:
    """Where a known name comes from, in words."""
    held = _registered.get(name, {})
    parts = [f"{kind} {entry.place}" for kind, entry in held.items()]
    parts += [_declared[name]] if name in _declared else []
    parts += [f"{entry.value} of {_package(entry)}" for entry in _entry_points() if entry.name == name and not held]
    return "; ".join(parts)


def _check_name(name: Any, category: Any, where: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{name!r} is no name of a model", where=where, remedy="give a text such as my_new_model")
    if name in BUILT_IN:
        raise ConfigError(f"{name!r} is a name of the system's own", where=where, remedy="choose another name")
    if category not in CATEGORIES:
        raise ConfigError(
            f"{category!r} is no category of models", where=where, remedy=f"the categories are: {', '.join(CATEGORIES)}"
        )


def _kind_given(thing: Any, name: str, gives: Gives) -> Kind:
    """What kind of thing is registered, by what it is said to give."""
    kind = _kind_of(thing, name)
    if gives == "model":
        return kind
    if gives != "config_and_processor" or kind != "function":
        raise ConfigError(
            f"gives={gives!r} does not go with the {kind} {thing.__qualname__}",
            where=f"register_model({name!r})",
            remedy="gives is of functions: model or config_and_processor",
        )
    return "config and processor"


def _kind_of(thing: Any, name: str) -> Kind:
    """What kind of thing is registered; refuses what is none, and classes that lack something."""
    where = f"register_model({name!r})"
    if not inspect.isclass(thing):
        if callable(thing):
            return "function"
        raise ConfigError(
            f"{thing!r} is neither a class nor a function",
            where=where,
            remedy="register a worker class, an adapter class, or a function (cfg) -> nn.Module",
        )
    kind = kind_of_class(thing)
    if kind is None:
        raise ConfigError(
            f"the class {thing.__name__} is neither a worker nor an adapter",
            where=where,
            remedy="derive it from shardtune.FSDPSftWorker or shardtune.Adapter, or register a function "
            "(cfg) -> nn.Module",
        )
    lacking = missing_methods(thing)
    if lacking:
        raise ConfigError(
            f"the {kind} {thing.__name__} lacks {', '.join(lacking)}",
            where=f"{where}: {_file_of(thing)}",
            remedy=f"write {'them' if len(lacking) > 1 else 'it'}; each is a method of the class",
        )
    return kind


def kind_of_class(cls: type[Any]) -> Kind | None:
    """Whether a class is a worker or an adapter; None for neither."""
    names = [(base.__module__, base.__qualname__) for base in cls.__mro__]
    return next((_BASES[name] for name in names if name in _BASES), None)


def missing_methods(cls: type[Any]) -> list[str]:
    """The abstract methods that a class still lacks."""
    return sorted(cls.__abstractmethods__) if inspect.isabstract(cls) else []


def _file_of(thing: Any) -> str:
    """The file that something is written in, or its module's name where there is none."""
    module = sys.modules.get(thing.__module__)
    file = vars(module).get("__file__") if module is not None else None
    return str(file or thing.__module__)


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the package {_package(entry)} offers the model {entry.name!r} as {entry.value}, which cannot be loaded: "
            f"{type(error).__name__}: {error}",
            where=f"entry point {GROUP}: {entry.name}",
            remedy="mend or uninstall that package",
        ) from error
