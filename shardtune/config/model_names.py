"""Registration of users' models by name: worker classes, adapter classes and functions that make a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeAlias, TypeVar

from shardtune.config.user_code import UserFunction, import_users
from shardtune.errors import ConfigError

Registrable: TypeAlias = type | UserFunction
T = TypeVar("T", bound=Registrable)
Kind = Literal["worker", "adapter", "function", "config and processor"]
Gives = Literal["model", "config_and_processor"]

CATEGORIES = ("sft",)
"""The categories of a registered model."""
POLICIES = {
    "act": "ACT: a chunk of actions at once from images and state (Zhao et al., 2023)",
    "diffusion": "diffusion policy: noise is removed from a chunk of actions (Chi et al., 2023)",
    "smolvla": "SmolVLA: flow matching beside SmolVLM (Shukor et al., 2025)",
    "pi0": "pi0: flow matching beside PaliGemma (Black et al., 2024)",
}
"""Ready policies for robots, by LeRobot's names."""
TASKS = {
    "sequence_classifier": "a label for a text or a pair of texts (AutoModelForSequenceClassification)",
    "token_classifier": "a label for each word of a sentence (AutoModelForTokenClassification)",
    "regression": "a number for a text or a pair of texts",
    "embedding": "a vector for a text, as a directory of sentence-transformers",
    "reranker": "a score for a query and a document (a cross-encoder)",
    "seq2seq": "text to text by an encoder-decoder such as T5 or BART (AutoModelForSeq2SeqLM)",
}
"""Tasks other than chat, and what their models give."""
SENTENCE_TRANSFORMERS = ("embedding", "reranker")
"""Those whose directories sentence-transformers loads."""
BUILT_IN = ("causal_lm", "vision_language", "vision_language_action", *TASKS, *POLICIES)
"""The system's own values of `actor.model.model_type`."""
GROUP = "shardtune.adapters"
"""The entry-point group in which installed packages offer models."""
_BASES: dict[tuple[str, str], Kind] = {
    ("shardtune.training.worker.base", "FSDPSftWorker"): "worker",
    ("shardtune.models.adapter", "Adapter"): "adapter",
}
"""By module and name, so that this file does not import torch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered class or function, and the file in which it is defined."""

    thing: Registrable
    file: str

    @property
    def place(self) -> str:
        return f"{self.thing.__qualname__} in {self.file}"

    def is_again(self, other: Entry) -> bool:
        """Whether another is the same class or function, imported again (a changed file, a notebook cell run twice)."""
        return self.thing is other.thing or (
            type(self.thing) is type(other.thing)
            and (self.thing.__qualname__, self.file) == (other.thing.__qualname__, other.file)
        )


_registered: dict[str, dict[Kind, Entry]] = {}
_declared: dict[str, str] = {}  # name -> the Enum member that declares it


def register_model(name: str, category: str = "sft", *, gives: Gives = "model") -> Callable[[T], T]:
    """Decorator: registers a worker class, an adapter class, or a function under a name for `actor.model.model_type`.

    One name may have one of each kind. Registering the same object again, as when its file is imported twice, is
    allowed.

    Args:
        name: as recipes write it.
        category: what the model is for: sft.
        gives: what a function returns: model: (cfg of `actor.model`) -> nn.Module; config_and_processor: (cfg of
            `actor`) -> (config, processor), which `get_model_config_and_processor` calls.

    Raises:
        ConfigError: the name is taken, the category unknown, or a required method is missing.
    """
    _check_name(name, category, f"register_model({name!r})")

    def register(thing: T) -> T:
        kind, entry = _kind_given(thing, name, gives), Entry(thing, _file_of(thing))
        existing = _registered.setdefault(name, {})
        if kind in existing and not entry.is_again(existing[kind]):
            raise ConfigError(
                f"{name!r} is registered twice: as {existing[kind].place} and as {entry.place}",
                where=f"register_model({name!r})",
                remedy="give one of them another name",
            )
        existing[kind] = entry
        return thing

    return register


class SupportedModel(Enum):
    """Model types as an Enum: a member `NAME = ("my_new_model", "sft")` of a subclass makes the name known.

    The worker that drives it is the one that is registered under the name, or else the only one in the plugins.
    """

    def __init__(self, *value: str) -> None:
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


def registered(name: str) -> list[Registrable]:
    """The worker class, adapter class and functions of a name; a package's entry point of that name is loaded first.

    Raises:
        ConfigError: an installed package offers the name and cannot be loaded.
    """
    if name not in _registered and name not in _declared:
        for entry in _entry_points():
            if entry.name == name:
                register_model(name)(_load(entry))
    return [entry.thing for entry in _registered.get(name, {}).values()]


def registered_worker(name: str) -> type | None:
    """The worker class of a name; None where it has none."""
    return _class_of_kind(name, "worker")


def registered_adapter(name: str) -> type | None:
    """The adapter class of a name; None where it has none."""
    return _class_of_kind(name, "adapter")


def _class_of_kind(name: str, kind: Kind) -> type | None:
    found = _of_kind(name, kind)
    return found if isinstance(found, type) else None


def registered_function(name: str) -> UserFunction | None:
    """The function (cfg) -> nn.Module of a name; None where it has none."""
    return _of_kind(name, "function")


def registered_processor(name: str) -> UserFunction | None:
    """The function (cfg) -> (config, processor) of a name; None where it has none."""
    return _of_kind(name, "config and processor")


def _of_kind(name: str, kind: Kind) -> Registrable | None:
    registered(name)  # loads what a package offers
    entry = _registered.get(name, {}).get(kind)
    return None if entry is None else entry.thing


def is_declared(name: str) -> bool:
    """Whether a subclass of `SupportedModel` has the name."""
    return name in _declared


def is_registered(thing: object) -> bool:
    """Whether an object has any name."""
    return any(thing is entry.thing for held in _registered.values() for entry in held.values())


def known_names() -> list[str]:
    """All names: registered, declared, and offered by installed packages (without loading those)."""
    return sorted({*_registered, *_declared, *(entry.name for entry in _entry_points())})


def describe(name: str) -> str:
    """A line on where a known name comes from."""
    held = _registered.get(name, {})
    parts = [f"{kind} {entry.place}" for kind, entry in held.items()]
    parts += [_declared[name]] if name in _declared else []
    parts += [f"{entry.value} of {_package(entry)}" for entry in _entry_points() if entry.name == name and not held]
    return "; ".join(parts)


def _check_name(name: object, category: object, where: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{name!r} is no name of a model", where=where, remedy="give a text such as my_new_model")
    if name in BUILT_IN:
        raise ConfigError(f"{name!r} is a name of the system's own", where=where, remedy="choose another name")
    if category not in CATEGORIES:
        raise ConfigError(
            f"{category!r} is no category of models", where=where, remedy=f"the categories are: {', '.join(CATEGORIES)}"
        )


def _kind_given(thing: Registrable, name: str, gives: Gives) -> Kind:
    """The kind of a registration, `gives` considered."""
    kind = _kind_of(thing, name)
    if gives == "model":
        return kind
    if gives != "config_and_processor" or kind != "function":
        raise ConfigError(
            f"gives={gives!r} does not go with the {kind} {thing.__qualname__}",
            where=f"register_model({name!r})",
            remedy="only a function takes gives: model or config_and_processor",
        )
    return "config and processor"


def _kind_of(thing: Registrable, name: str) -> Kind:
    """The kind of a registration; refuses other objects, and classes without their required methods."""
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


def kind_of_class(cls: type) -> Kind | None:
    """Whether a class is a worker or an adapter; None for neither."""
    names = [(base.__module__, base.__qualname__) for base in cls.__mro__]
    return next((_BASES[name] for name in names if name in _BASES), None)


def missing_methods(cls: type) -> list[str]:
    """The abstract methods that a class still lacks."""
    return sorted(cls.__abstractmethods__) if inspect.isabstract(cls) else []


def _file_of(thing: Registrable) -> str:
    """The file in which an object is defined, or its module's name where there is no file."""
    module = sys.modules.get(thing.__module__)
    file = vars(module).get("__file__") if module is not None else None
    return str(file or thing.__module__)


def _entry_points() -> tuple[EntryPoint, ...]:
    return _entry_points_on(tuple(sys.path))


@cache
def _entry_points_on(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Of the packages in these directories, whose metadata takes milliseconds to read."""
    return tuple(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


def _load(entry: EntryPoint) -> Registrable:
    try:
        import_users(entry.module)
        return entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the package {_package(entry)} offers the model {entry.name!r} as {entry.value}, which cannot be loaded: "
            f"{type(error).__name__}: {error}",
            where=f"entry point {GROUP}: {entry.name}",
            remedy="fix or uninstall that package",
        ) from error
