"""A plugin for runs that are killed: saving takes two seconds, and a file is there as long as it does.

`TEST_SAVING` names the file; without it nothing changes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import shardtune.checkpoint.store as store
import shardtune.checkpoint.training_state as training
from shardtune.training.saver import Saver

PAUSE = 0.3
_inside = 0


def _after_pauses(function: Any) -> Any:
    def slow(*given: Any, **known: Any) -> Any:
        pause = PAUSE if "TEST_SAVING" in os.environ else 0.0
        time.sleep(pause)
        result = function(*given, **known)
        time.sleep(pause)
        return result

    return slow


def _marked(function: Any) -> Any:
    def save(*given: Any, **known: Any) -> Any:
        global _inside
        if "TEST_SAVING" not in os.environ:
            return function(*given, **known)
        mark = Path(os.environ["TEST_SAVING"])
        _inside += 1
        mark.touch()
        result = function(*given, **known)
        _inside -= 1
        if not _inside:
            mark.unlink(missing_ok=True)
        return result

    return save


training.save_tensors = _after_pauses(training.save_tensors)  # of the model, then of the optimizer
training.async_save_tensors = _after_pauses(training.async_save_tensors)
store.publish = _after_pauses(store.publish)
store.write_text = _after_pauses(store.write_text)  # of the pointer to the latest
Saver.save = _marked(Saver.save)
Saver.finish = _marked(Saver.finish)
