"""What is begun is finished before an interrupt takes effect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardtune.engine.ranks_local as ranks_local
from shardtune import NeedParallel, TrainEngine
from shardtune.engine.interrupts import held_interrupts
from tests.engine.test_stops import Patient, make


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_takes_effect_afterwards() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with held_interrupts():
        pass


def test_the_second_takes_effect_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        done.append(1)
        interrupt()
        done.append(2)
    assert done == [1]


def test_an_error_takes_precedence() -> None:
    with pytest.raises(ValueError, match="mine"), held_interrupts():  # noqa: PT012
        interrupt()
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_nothing_is_interrupted_nothing_is_held() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    seen = []
    thread = threading.Thread(target=lambda: seen.append(_inside()))
    thread.start()
    thread.join()
    assert seen == [signal.SIG_IGN]


def _inside() -> object:
    with held_interrupts():
        return signal.getsignal(signal.SIGINT)


def test_ranks_whose_answers_were_read_while_it_was_interrupted_live_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of an answer, which would leave the rest of it in the pipe."""
    with TrainEngine(make(model, Patient)).build(data_parallel_size=2) as engine:
        received = ranks_local.Connection.recv_bytes

        def receive(pipe):
            if not pressed:
                pressed.append(True)
                interrupt()
            return received(pipe)

        pressed: list[bool] = []
        with monkeypatch.context() as patched:
            patched.setattr(ranks_local.Connection, "recv_bytes", receive)
            with pytest.raises(KeyboardInterrupt):
                engine.one()
        assert engine.one() == [1, 1]


def test_ranks_that_got_their_call_while_it_was_interrupted_live_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the messages to two ranks."""
    with TrainEngine(make(model, Patient)).build(data_parallel_size=2) as engine:
        sent = ranks_local.Connection.send_bytes

        def send(pipe, message):
            sent(pipe, message)
            if not pressed:
                pressed.append(True)
                interrupt()

        pressed: list[bool] = []
        with monkeypatch.context() as patched:
            patched.setattr(ranks_local.Connection, "send_bytes", send)
            with pytest.raises(KeyboardInterrupt):
                engine.learn(NeedParallel([[1, 2, 3], [4, 5, 6]]), "forward", str(tmp_path / "at"))
        done = engine.one_step(NeedParallel([[1, 2, 3], [4, 5, 6]]))
        assert done[0] == done[1] < 50
        assert all(torch.isfinite(tensor).all() for _, tensor in engine.named_tensors())
