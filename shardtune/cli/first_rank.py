"""Which of several processes prints: under torchrun each runs the command."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is the first of its launcher, or the only one."""
    return os.environ.get("RANK", "0") == "0"
