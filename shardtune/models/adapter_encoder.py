"""The encoder of a user's adapter: calls its `encode` and `weights`, and names the row in which they fail."""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import importlib
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardtune.batch import Sample
from shardtune.config import Recipe, load_recipe
from shardtune.config.schema import long_key
from shardtune.config.tree import get_value
from shardtune.config.user_code import USER_MODULE, import_file
from shardtune.data.encoder import NEVER_A_ROW, Encoder, FrameOptions, LengthLimit, Row, RowDropped, RowError
from shardtune.data.robot.returns import return_of
from shardtune.data.row_reads import RowReads
from shardtune.data.row_shapes import shown_key
from shardtune.data.sources.hub import some_of
from shardtune.errors import DataError, ModelError, ShardtuneError
from shardtune.models.pretrained import GENERATION, SETTINGS, settings_directory

ENCODING_VERSION = 4
"""Part of every cache key; to be increased when the same row would be encoded differently."""
NOT_ABOUT_ROWS = "actor.model.attn_implementation"
"""A key that an adapter may read, and no row depends on."""
MAX_BYTES = 64 * 2**20
"""Larger files are no settings."""
SHOWN_KEYS = 8
"""Keys of a row that are not read, in one line."""
NOT_OF_ROWS = (GENERATION, "checksums.json", "metrics.json", "trainer_state.json", "*_results.json", "*.index.json")
"""Files beside a model that no row depends on."""


class RowEncoding(Protocol):
    """The part of an adapter that deals with rows."""

    padding: ClassVar[Mapping[str, float]]
    image_fields: ClassVar[Sequence[str]]
    reads: ClassVar[Sequence[str]]

    @classmethod
    def from_recipe(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> RowEncoding: ...
    def encoder(self, *, with_prompts: bool) -> Encoder: ...
    def encode(self, row: Row) -> Sample: ...
    def encode_input(self, row: Row) -> Sample: ...
    def weights(self, sample: Sample) -> Mapping[str, float]: ...
    def encoding_settings(self) -> Mapping[str, Any]: ...
    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None: ...


class FieldEncoder:
    """Encodes rows by a user's adapter.

    Args:
        adapter: the adapter, whose methods are called.
        recipe: from which other processes make the same adapter.
        tokenizer: the adapter's, where it is one in memory in the place of the recipe's.
    """

    def __init__(self, adapter: RowEncoding, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self._adapter = adapter
        self._recipe = recipe
        self._tokenizer = tokenizer
        data = recipe.data
        self._limit = LengthLimit(data.max_length, data.on_too_long, data.split_stride)

    def __reduce__(self) -> tuple[Callable[..., Encoder], tuple[object, ...]]:
        adapter = self._adapter
        place, settings = Place.of(type(adapter)), adapter.encoding_settings()
        return _from_recipe, (place, self._recipe.to_dict(), settings, self._tokenizer)

    def encode(self, row: Row) -> Sample:
        sample = self._encoded(self._adapter.encode, row)
        self._check_named(sample.fields)
        return sample

    def encode_input(self, row: Row) -> Sample:
        """A row without its target."""
        return self._encoded(self._adapter.encode_input, row)

    def _encoded(self, encode: Callable[[Row], Sample], row: Row) -> Sample:
        try:
            sample = encode(row)
        except (ShardtuneError, RowError, *NEVER_A_ROW):
            raise
        except Exception as error:
            if isinstance(error, AttributeError) and _is_code(error.obj, self._adapter, row):
                raise
            raise RowError(_reason(error, row)) from error
        self._check_sample(sample, encode.__name__)
        fields = {name: _as_array(name, value) for name, value in sample.fields.items()}
        self._check_padding(fields)
        size = sample.size or max(1, sum(len(fields[name]) for name in self._adapter.padding if name in fields))
        return replace(sample, fields=fields, size=size)

    def _check_sample(self, sample: object, method: str) -> None:
        """Refuse anything from `encode` or `encode_input` that is no sample, or an empty one."""
        if not isinstance(sample, Sample):
            found = f"a {type(sample).__name__}, not a Sample"
        elif not isinstance(sample.fields, Mapping) or isinstance(sample.input_ids, Mapping):
            found = "a Sample whose fields are not given by name"
        elif not sample.fields and not len(sample.input_ids):
            found = "a Sample with nothing in it"
        elif not isinstance(sample.size, int | np.integer) or sample.size < 0:
            found = f"a Sample of size {sample.size!r}, which is not a number of positions"
        else:
            return
        raise ModelError(
            f"{method} returned {found}",
            where=f"{type(self._adapter).__name__}.{method}",
            remedy='return Sample(fields={"name": array, …})',
        )

    def _check_padding(self, fields: Mapping[str, np.ndarray]) -> None:
        for name, value in self._adapter.padding.items():
            if name in fields and not holds(fields[name].dtype, value):
                raise ModelError(
                    f"padding fills {name!r} with {value}, which its rows, of {fields[name].dtype}, cannot hold",
                    where=f"{type(self._adapter).__name__}.padding",
                    remedy="fill it with another number, or let encode give the field in a type that holds this one",
                )
            if name in fields and not fields[name].ndim:
                raise ModelError(
                    f"padding names {name!r}, which is a single number and has no length",
                    where=f"{type(self._adapter).__name__}.padding",
                    remedy="leave it out of padding: it is stacked",
                )

    def _check_named(self, fields: Mapping[str, np.ndarray]) -> None:
        """Refuse names in `padding` and `image_fields` that a row does not have, which may be those of its target."""
        for attribute, names in (("padding", self._adapter.padding), ("image_fields", self._adapter.image_fields)):
            for name in (name for name in names if name not in fields):
                raise self._no_field(attribute, f"{attribute} names {name!r}, which is no field of a row", name, fields)

    def _no_field(self, attribute: str, what: str, name: str, fields: Mapping[str, np.ndarray]) -> ModelError:
        near = difflib.get_close_matches(name, fields, n=1)
        return ModelError(
            what,
            where=f"{type(self._adapter).__name__}.{attribute}",
            remedy=f"did you mean {near[0]!r}?" if near else f"encode gives {', '.join(fields) or 'no fields'}",
        )

    def fit(self, sample: Sample) -> Sample | list[Sample]:
        """The sample with its padded fields cut to `data.max_length`, or handled as `data.on_too_long` specifies."""
        if len(sample.input_ids):
            return self._limit.apply(sample)
        most, padded = self._limit.max_length, self._adapter.padding
        long = [name for name in padded if name in sample.fields and len(sample.fields[name]) > most]
        if not long:
            return sample
        length = len(sample.fields[long[0]])
        if self._limit.on_too_long == "drop":
            raise RowDropped(f"{long[0]} of length {length:,}")
        if self._limit.on_too_long in ("fail", "split"):
            raise DataError(
                f"the field {long[0]!r} has length {length:,}, data.max_length is {most:,}"
                + (", and fields cannot be split" if self._limit.on_too_long == "split" else ""),
                remedy="raise data.max_length, or set data.on_too_long to truncate or drop",
            )
        fields = {name: array[:most] if name in padded else array for name, array in sample.fields.items()}
        return replace(sample, fields=fields, size=max(1, sum(len(fields[name]) for name in padded if name in fields)))

    def weights(self, sample: Sample) -> Mapping[str, float]:
        found = self._adapter.weights(sample)
        try:
            weights = {name: float(weight) for name, weight in found.items()}
        except (AttributeError, TypeError, ValueError):
            weights = {}
        if not weights or not all(0 <= weight < math.inf for weight in weights.values()):
            raise ModelError(
                f"weights returned {found!r:.80}, not a dict of numbers from 0 on",
                where=f"{type(self._adapter).__name__}.weights",
                remedy='return {"loss": how many targets this row has}, with a number for each term of the loss',
            )
        return weights

    @property
    def repeats_bits(self) -> bool:
        """Whether the same file gives the same bits wherever it lies: no paths of images or videos are in its rows."""
        return not self._adapter.image_fields

    def drawn(self, row: Row) -> str | None:
        """The first field that two encodings of a row do not have in common; None where they are the same.

        None also for a row that cannot be copied: a `data.transform` may put objects into it.
        """
        try:
            rows = [copy.deepcopy(row) if isinstance(row, dict) else row for _ in range(2)]  # encode may change its row
            one, other = (self.encode(each) for each in rows)
        except Exception:
            return None  # an error of encode is reported by the encoding of all rows
        first, second = ({"input_ids": sample.input_ids, **sample.fields} for sample in (one, other))
        names = dict.fromkeys([*first, *second])
        same = (n in first and n in second and first[n].tobytes() == second[n].tobytes() for n in names)
        return next((name for name, is_same in zip(names, same, strict=True) if not is_same), None)

    def title(self, row: Row) -> str:
        """The fields of a row with their shapes, and the keys of the row that are not read."""
        unread = some_of([shown_key(key) for key in self._unread(row)], SHOWN_KEYS)  # first: encode may change its row
        sample = self.encode(row)
        shapes = [f"{name} {list(array.shape) or ''}".strip() for name, array in sample.fields.items()]
        fields = "tokens" if len(sample.input_ids) else ", ".join(shapes)
        return f"rows of {type(self._adapter).__name__}: {fields}" + (f" (not read: {unread})" if unread else "")

    def _unread(self, row: Row) -> list[str]:
        """The keys of a row that `encode` does not read; none where that cannot be seen."""
        if type(row) is not dict:
            return []
        try:
            seen = RowReads(copy.deepcopy(row))
            self.encode(seen)
        except Exception:  # as of code that takes nothing but a dict
            return []
        return seen.unread()

    def at(self, folder: Path) -> FieldEncoder:
        return self

    def cache_key(self) -> str:
        kind, recipe = type(self._adapter), self._recipe
        settings = {
            "version": ENCODING_VERSION,
            "adapter": kind.__qualname__,
            "code": _code(kind),
            "options": recipe.actor.model.options,
            "model": [recipe.actor.model.model_path, recipe.actor.model.config_overrides],
            "tokenizer": recipe.actor.tokenizer.tokenizer_model,
            "data": [
                *(recipe.data.max_length, recipe.data.on_too_long, recipe.data.system_prompt),
                *([] if recipe.data.split_stride is None else [recipe.data.split_stride]),
            ],
        }
        further = self._adapter.encoding_settings()
        settings |= {"further": further} if further else {}
        settings["read"] = self._read
        return hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=20).hexdigest()

    @cached_property
    def _read(self) -> list[object]:
        """What `encode` may read besides its row: the keys that the adapter declares, the new tokens, the tokenizer in
        memory, and the content of the files by which these and the directories of model and tokenizer are named."""
        recipe, tree = self._recipe, self._recipe.to_dict()
        keys = sorted({long_key(name) for name in self._adapter.reads} - {NOT_ABOUT_ROWS})
        values = [get_value(tree, key) for key in keys]
        named = [_content(Path(value)) for value in values if isinstance(value, str) and Path(value).is_file()]
        folders = dict.fromkeys([recipe.actor.model.model_path, recipe.actor.tokenizer.tokenizer_model])
        settings = [pair for folder in folders for pair in _settings(folder)]
        in_memory = [] if self._tokenizer is None else [_tokenizer_hash(self._tokenizer)]
        return [keys, values, named, recipe.actor.added_tokens, settings, in_memory]


def holds(dtype: np.dtype[Any], value: float) -> bool:
    """Whether an array of a type can have a value, beside rounding of floating-point numbers."""
    if dtype.kind == "f":
        return abs(value) <= float(np.finfo(dtype).max) or not math.isfinite(value)
    if dtype.kind == "b":
        return value in (0, 1)
    return math.isfinite(value) and value == int(value) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


class FrameFieldEncoder(FieldEncoder):
    """`FieldEncoder` for rows that are frames of robot data.

    Args:
        adapter, recipe, tokenizer: as for `FieldEncoder`.
        frames: how the rows are read.
    """

    def __init__(
        self,
        adapter: RowEncoding,
        recipe: Recipe,
        frames: FrameOptions,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(adapter, recipe, tokenizer)
        self.frames = frames

    @property
    def repeats_bits(self) -> bool:
        return False

    def encode(self, row: Row) -> Sample:
        if self.frames.returns:
            return_of(row)
        return super().encode(row)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a class is defined, so that another process finds it.

    Attributes:
        module: its name.
        file: the user's file, where the module is one that cannot be imported by name; None otherwise.
        name: qualified name of the class.
    """

    module: str
    file: str | None
    name: str

    @classmethod
    def of(cls, kind: type[RowEncoding]) -> Place:
        own_file = kind.__module__.startswith(USER_MODULE)
        return cls(kind.__module__, inspect.getfile(kind) if own_file else None, kind.__qualname__)

    def find(self) -> type[RowEncoding]:
        if self.file is None:
            module = importlib.import_module(self.module)
        else:
            module = import_file(Path(self.file), "actor.model.adapter")
        *outer, last = self.name.split(".")
        for part in outer:
            module = vars(module)[part]
        return vars(module)[last]


def _from_recipe(
    place: Place,
    values: dict[str, object],
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Encoder:
    """The encoder of the same recipe in another process."""
    recipe = load_recipe(values, in_memory=_EVERY_PATH, files_must_exist=False)
    adapter = place.find().from_recipe(recipe, tokenizer)
    adapter.take_encoding_settings(settings)
    return adapter.encoder(with_prompts=False)


_EVERY_PATH = ("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths")


def _as_array(name: str, value: object) -> np.ndarray:
    try:
        array = _from_torch(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError as error:
        raise RowError(f"the field {name!r} is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise RowError(f"the field {name!r} is {array.dtype}, not an array of numbers")
    return array


def _from_torch(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array; bfloat16, which numpy lacks, becomes fp32, which holds it exactly."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _reason(error: Exception, row: Row) -> str:
    """The message for an exception in a user's `encode`, with file and line."""
    own = (__file__, str(Path(__file__).with_name("adapter.py")))  # whose encode_input calls encode
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in own]
    place = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    if isinstance(error, KeyError):
        return f"the row has no {error.args[0]!r}, it has {', '.join(map(str, row))}{place}"
    return f"{type(error).__name__}: {error}{place}"


def _is_code(thing: object, *own: object) -> bool:
    """Whether an object that lacks an attribute is code and no value of a row: then it is a misspelling in the code."""
    return isinstance(thing, ModuleType | type) or any(thing is other for other in own)


def _code(kind: type) -> str:
    """A digest of the code of a user's class and its bases: of their files, or of all files of their packages."""
    digest = hashlib.blake2b(digest_size=20)
    for base in kind.__mro__:
        if _is_ours(base):
            continue
        for part in _sources(base):
            digest.update(part + b"\0")
    return digest.hexdigest()


def _sources(kind: type) -> Iterable[bytes]:
    """A class's own file without its comments and layout, then the other files of its package."""
    try:
        own = Path(inspect.getfile(kind))
        yield _without_layout(own.read_text(encoding="utf-8"))
    except (OSError, TypeError):  # typed into a notebook or a prompt
        yield from (part for value in vars(kind).values() if inspect.isfunction(value) for part in _compiled(value))
        return
    package = sys.modules.get(kind.__module__.partition(".")[0])
    for folder in [] if package is None else vars(package).get("__path__", []):
        yield from (file.read_bytes() for file in sorted(Path(folder).rglob("*.py")) if file != own)


@cache
def _without_layout(text: str) -> bytes:
    return ast.dump(ast.parse(text)).encode()


def _compiled(function: FunctionType) -> Iterable[bytes]:
    """What a function does, where there is no file to read it in."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code.co_code
        plain = [item for item in code.co_consts if not isinstance(item, CodeType)]
        fixed = [sorted(map(repr, item)) if isinstance(item, frozenset) else item for item in plain]
        yield repr((code.co_names, fixed)).encode()
        waiting += [item for item in code.co_consts if isinstance(item, CodeType)]


def _content(file: Path) -> str:
    """The hash of a file."""
    return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()


def _settings(path: str | None) -> list[tuple[str, str]]:
    """The files of settings in the directory of a model or tokenizer, its vocabulary among them, and their hashes."""
    folder = settings_directory(path)
    patterns = [] if folder is None else [pattern for pattern in SETTINGS if pattern != "*.py"]
    files = sorted({file for pattern in patterns for file in Path(folder or "").glob(pattern) if file.is_file()})
    read = [file for file in files if not any(file.match(name) for name in NOT_OF_ROWS)]
    return [(file.name, _content(file)) for file in read if file.stat().st_size <= MAX_BYTES]


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of a tokenizer in memory, without its padding and truncation, which each call sets."""
    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    whole = "" if not is_fast else tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')[2]
    vocabulary = sorted(tokenizer.get_vocab().items())
    parts = [whole, vocabulary, sorted(tokenizer.special_tokens_map.items(), key=str), tokenizer.chat_template]
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def _is_ours(kind: type) -> bool:
    """Whether a class is this package's (covered by `ENCODING_VERSION`) or Python's."""
    return kind.__module__.partition(".")[0] in (__name__.partition(".")[0], "builtins", *sys.stdlib_module_names)
