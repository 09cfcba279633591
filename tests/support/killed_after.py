"""A plugin that ends rank 1 by SIGKILL when it has done a step.

`TEST_KILLED_AFTER` is the step; without it nothing changes.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from shardtune.training.runner import SFTRunner

_after_step = SFTRunner._after_step


def _killed(self: SFTRunner, **known: Any) -> None:
    if os.environ.get("RANK") == "1" and os.environ.get("TEST_KILLED_AFTER") == str(self._actor.step):
        os.kill(os.getpid(), signal.SIGKILL)
    _after_step(self, **known)


SFTRunner._after_step = _killed
