"""The state of a user's own loader as JSON, and back: plain values, tensors, arrays and bytes; nothing is executed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import JsonValue

TAG = "__is__"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader whose position can be saved and restored, as torchdata's `StatefulDataLoader`.

    `load_state_dict` affects the next `iter`: it goes on after the last batch that was taken. A state that is taken
    once a pass has come to its end is one from which `iter` begins the next pass.
    """

    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


class NotPlain(Exception):
    """A loader's state holds a value that JSON cannot represent."""


def encode(value: object) -> JsonValue:
    """A state as a JSON value.

    Raises:
        NotPlain: it holds an object of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: encode(item) for key, item in value.items()}
        return {TAG: "dict", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and not value.is_meta:
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {TAG: "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "data": _text(raw)}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    raise NotPlain(f"its state holds a {type(value).__name__}")


def decode(value: Any) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    raw = base64.b64decode(value["data"])
    if kind == "bytes":
        return raw
    if kind == "array":
        return np.frombuffer(raw, value["dtype"]).reshape(value["shape"]).copy()
    flat = torch.frombuffer(bytearray(raw), dtype=_DTYPES[value["dtype"]]) if raw else torch.empty(0)
    return flat.reshape(value["shape"]).to(_DTYPES[value["dtype"]])


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
