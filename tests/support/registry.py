"""Registered names, kept apart from those of other tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardtune.config import model_names


@contextmanager
def nothing_registered() -> Iterator[None]:
    """Inside, no file of a user's is imported and no name known but those of packages; afterwards as before."""
    held = model_names._registered, model_names._declared
    imported = {name: module for name, module in sys.modules.items() if name.startswith("shardtune_user_")}
    model_names._registered, model_names._declared = {}, {}
    for name in imported:
        del sys.modules[name]
    try:
        yield
    finally:
        model_names._registered, model_names._declared = held
        sys.modules.update(imported)
