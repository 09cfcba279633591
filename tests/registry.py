"""Registered names, kept apart from those of other tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardtune import registration


@contextmanager
def nothing_registered() -> Iterator[None]:
    """Inside, no file of a user's is imported and no name known but those of packages; afterwards as before."""
    held = registration._registered, registration._declared
    imported = {name: module for name, module in sys.modules.items() if name.startswith("shardtune_user_")}
    registration._registered, registration._declared = {}, {}
    for name in imported:
        del sys.modules[name]
    try:
        yield
    finally:
        registration._registered, registration._declared = held
        sys.modules.update(imported)
