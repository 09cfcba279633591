"""While torch is imported, which takes seconds: a word on the terminal, and no search for garbage."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting(text: str = "starting …") -> Iterator[None]:
    """Show a text meanwhile, where there is a terminal to take it away from again; imports as in `importing`."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" or "RANK" in os.environ:
        with importing():
            yield
        return
    width = shutil.get_terminal_size().columns - 1  # a second line would stay
    print(text[:width], end="", file=sys.stderr, flush=True)
    try:
        with importing():
            yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage during the first import of torch, and never look through what it has made.

    Of 700,000 objects 12,000 are garbage then; looking for them takes a sixth of the time.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(unfreeze_bindings)


def unfreeze_bindings() -> None:
    """Let the end of the process free what triton has made; its bindings (3.9) print thirty lines about what is left.

    Without triton, which comes with torch's builds for GPUs, the last search for garbage is left out: it takes time.
    """
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
