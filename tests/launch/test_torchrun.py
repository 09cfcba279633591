"""How long torchrun waits for ranks that save: by its option, or with torch 2.11, which has none, by its default."""

from __future__ import annotations

from argparse import Namespace

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
