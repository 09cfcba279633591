"""A word on the terminal while torch is imported, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting(text: str = "starting …") -> Iterator[None]:
    """Show a text meanwhile, where there is a terminal to take it away from again."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" or "RANK" in os.environ:
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
