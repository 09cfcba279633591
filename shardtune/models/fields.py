"""The encoder of an adapter of one's own: its `encode` and `weights`, with what goes wrong in them told by row."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from shardtune.batch import Sample
from shardtune.config import Recipe, load_recipe
from shardtune.data.encoder import LengthLimit, Row, RowDropped, RowError
from shardtune.errors import DataError, ModelError
from shardtune.functions import USER_MODULE, import_file

ENCODING_VERSION = 1
"""Part of every cache key: raised when the same row would come out differently."""


class RowEncoding(Protocol):
    """What an adapter says of rows."""

    padding: ClassVar[Mapping[str, float]]

    def encode(self, row: Row) -> Sample: ...
    def weights(self, sample: Sample) -> Mapping[str, float]: ...


class FieldEncoder:
    """Encodes rows by a user's adapter.

    Args:
        adapter: whose methods are asked.
        recipe: by which other processes find the same adapter.
    """

    def __init__(self, adapter: RowEncoding, recipe: Recipe) -> None:
        self._adapter = adapter
        self._recipe = recipe
        data = recipe.data
        self._limit = LengthLimit(data.max_length, data.on_too_long)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (Place.of(type(self._adapter)), self._recipe.to_dict())

    def encode(self, row: Row) -> Sample:
        try:
            sample = self._adapter.encode(row)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise RowError(_reason(error, row)) from error
        if not isinstance(sample, Sample):
            raise ModelError(
                f"encode returned a {type(sample).__name__}, not a Sample",
                where=f"{type(self._adapter).__name__}.encode",
                remedy='return Sample(fields={"name": array, …})',
            )
        fields = {name: _as_array(name, value) for name, value in sample.fields.items()}
        self._check_padding(fields)
        size = sample.size or max(1, sum(len(fields[name]) for name in self._adapter.padding if name in fields))
        return replace(sample, fields=fields, size=size)

    def _check_padding(self, fields: Mapping[str, np.ndarray]) -> None:
        for name in self._adapter.padding:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                raise ModelError(
                    f"padding names {name!r}, which is no field of a row",
                    where=f"{type(self._adapter).__name__}.padding",
                    remedy=f"did you mean {near[0]!r}?" if near else f"encode gives {', '.join(fields) or 'no fields'}",
                )

    def fit(self, sample: Sample) -> Sample:
        """The sample with its padded fields cut at `data.max_length`, or as `data.on_too_long` asks."""
        if len(sample.input_ids):
            return self._limit.apply(sample)
        most, padded = self._limit.max_length, self._adapter.padding
        long = [name for name in padded if name in sample.fields and len(sample.fields[name]) > most]
        if not long:
            return sample
        length = len(sample.fields[long[0]])
        if self._limit.on_too_long == "drop":
            raise RowDropped(f"{long[0]} of length {length:,}")
        if self._limit.on_too_long == "fail":
            raise DataError(
                f"the field {long[0]!r} has length {length:,}, data.max_length is {most:,}",
                remedy="raise data.max_length, or set data.on_too_long to truncate or drop",
            )
        fields = {name: array[:most] if name in padded else array for name, array in sample.fields.items()}
        return replace(sample, fields=fields, size=max(1, sum(len(fields[name]) for name in padded if name in fields)))

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {name: float(weight) for name, weight in self._adapter.weights(sample).items()}

    def title(self, row: Row) -> str:
        """The fields of a row with their shapes."""
        sample = self.encode(row)
        if len(sample.input_ids):
            return f"rows of {type(self._adapter).__name__}: tokens"
        shapes = [f"{name} {list(array.shape) or ''}".strip() for name, array in sample.fields.items()]
        return f"rows of {type(self._adapter).__name__}: {', '.join(shapes)}"

    def cache_key(self) -> str:
        kind, recipe = type(self._adapter), self._recipe
        settings = {
            "version": ENCODING_VERSION,
            "adapter": kind.__qualname__,
            "code": _code(kind),
            "options": recipe.actor.model.options,
            "model": [recipe.actor.model.model_path, recipe.actor.model.config_overrides],
            "tokenizer": recipe.actor.tokenizer.tokenizer_model,
            "data": [recipe.data.max_length, recipe.data.on_too_long, recipe.data.system_prompt],
        }
        return hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=20).hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a class is defined, so that another process finds it.

    Attributes:
        module: its name.
        file: of a module that is a user's own file and no importable module; None otherwise.
        name: of the class.
    """

    module: str
    file: str | None
    name: str

    @classmethod
    def of(cls, kind: type[Any]) -> Place:
        own_file = kind.__module__.startswith(USER_MODULE)
        return cls(kind.__module__, inspect.getfile(kind) if own_file else None, kind.__qualname__)

    def find(self) -> Any:
        if self.file is None:
            module = importlib.import_module(self.module)
        else:
            module = import_file(Path(self.file), "actor.model.adapter")
        found: Any = module
        for part in self.name.split("."):
            found = vars(found)[part]
        return found


def _again(place: Place, values: dict[str, Any]) -> FieldEncoder:
    """The encoder of the same recipe in another process."""
    recipe = load_recipe(values, in_memory=_EVERY_PATH, files_must_exist=False)
    return place.find().from_recipe(recipe).encoder(with_prompts=False)


_EVERY_PATH = ("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths")


def _as_array(name: str, value: Any) -> np.ndarray:
    array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise RowError(f"the field {name!r} is {array.dtype}, not an array of numbers")
    return array


def _reason(error: Exception, row: Row) -> str:
    """What went wrong in a user's `encode`, and where."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    if isinstance(error, KeyError):
        return f"the row has no {error.args[0]!r}, it has {', '.join(map(str, row))}{place}"
    return f"{type(error).__name__}: {error}{place}"


def _code(kind: type[Any]) -> str:
    """The code of the file that a class stands in, whatever its comments and its layout."""
    source = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    return hashlib.blake2b(ast.dump(ast.parse(source)).encode(), digest_size=20).hexdigest()
