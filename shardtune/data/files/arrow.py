"""pyarrow, imported when something of it is first used: it takes 30 MB, and rows of JSON or CSV need none of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("ipc", "parquet", "types")


def __getattr__(name: str) -> Any:
    value = import_module(f"pyarrow.{name}") if name in _MODULES else getattr(import_module("pyarrow"), name)
    globals()[name] = value
    return value
