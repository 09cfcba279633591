"""kill -9 in the middle of a save: the same command goes on and ends with the weights of the run that was left alone.

`bench/kill.py` does it thirty times, at random moments, with the real command.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import shardtune
from tests.support.chosen import slow_except
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny

SLOW_SAVES = str(Path(__file__).parents[1] / "support" / "slow_saves.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("kill"), dropout=0.2)


def killed_in_a_save(recipe: dict[str, Any], mark: Path, seconds: float) -> None:
    """Train in a copy of this process and kill that so many seconds after it began to save."""
    pid = os.fork()
    if pid == 0:
        os.environ["TEST_SAVING"] = str(mark)
        try:
            shardtune.train(recipe)
        finally:
            os._exit(0)
    until = time.monotonic() + 60
    while not mark.exists():
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "it ended before it saved"
        assert time.monotonic() < until
        time.sleep(0.005)
    time.sleep(seconds)
    assert mark.exists(), "the save is over"
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    mark.unlink()


@pytest.mark.lengthy
@pytest.mark.parametrize("background", slow_except([False, True], False))
def test_killed_while_saving(tiny: Tiny, tmp_path: Path, background: bool) -> None:
    keys = {"plugins": [SLOW_SAVES], "runner__save_interval": 2, "runner__async_save": background}
    shardtune.train(tiny.recipe(f"whole{background}", **keys))
    recipe = tiny.recipe(f"killed{background}", **keys)
    # With the model written, with the optimizer too, with the name given but no pointer to it.
    for seconds in (0.5,) if background else (0.7, 1.3, 1.6):
        killed_in_a_save(recipe, tmp_path / "saving", seconds)
    shardtune.train(recipe)
    last = "checkpoints/global_step_8"
    assert_same_tensors(tiny.run(f"whole{background}") / last, tiny.run(f"killed{background}") / last)
    assert lines(tiny.run(f"killed{background}")) == lines(tiny.run(f"whole{background}"))
    left = [path.name for path in (tiny.run(f"killed{background}") / "checkpoints").glob(".*")]
    assert left == [], "torn folders are removed"
