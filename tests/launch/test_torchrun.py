"""How long torchrun waits for ranks that save, and which ranks it starts again."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import PContext

from shardtune.launch.torchrun import SAVE_SECONDS, SIGNALS, _with_defaults

GIVEN = {"signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "standalone": True, "rdzv_conf": ""}


def test_ranks_have_time_to_save_where_nothing_else_is_said() -> None:
    made = _with_defaults(Namespace(**GIVEN, shutdown_timeout=None), {})
    assert (made.shutdown_timeout, made.signals_to_handle) == (SAVE_SECONDS, SIGNALS)
    assert _with_defaults(Namespace(**GIVEN, shutdown_timeout=7), {}).shutdown_timeout == 7
    said = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    assert _with_defaults(Namespace(**GIVEN, shutdown_timeout=None), said).shutdown_timeout is None


def test_with_a_torch_without_the_option_they_have_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 30))
    assert "shutdown_timeout" not in vars(_with_defaults(Namespace(**GIVEN), {}))
    assert PContext.close.__defaults__ == (None, SAVE_SECONDS)


WAITS = """
import os, signal, sys, time
open({started!r}, "a").write("x")
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(75))
if os.environ["RANK"] == "0":
    while os.path.getsize({started!r}) % 2:  # until the other has started, too
        time.sleep(0.05)
    os._exit({code})
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "starts"), [(75, 1), (2, 1), (1, 2)])
def test_ranks_that_were_stopped_or_found_a_mistake_are_not_started_again(
    code: int, starts: int, tmp_path: Path
) -> None:
    """The agent stops the other rank because of that: its code does not count."""
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(WAITS.format(started=str(started), code=code))
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    ended = subprocess.run(
        [sys.executable, "-m", "shardtune.launch.torchrun", *options, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert started.read_text() == starts * "xx"
