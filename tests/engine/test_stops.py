"""Where the ranks of an interrupted call leave it: all at one place, and the engine goes on from there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen2ForCausalLM

from shardtune import NeedParallel, TrainEngine
from shardtune.engine import ranks_local, ranks_remote, stops
from shardtune.engine.call_board import CallBoard, CallerBoard
from shardtune.engine.rank_process import Outcome, Request
from shardtune.engine.stops import CallInterrupted, Stops
from shardtune.errors import ParallelError
from tests.support.engine_modules import RATE, SAMPLES, Trained, make

# -- The places, without ranks -----------------------------------------------------------------------------------------


def leave(board: CallBoard, plan: list[str], dice: random.Random, found: dict[int, object], rank: int) -> None:
    """One rank: places, tokens by itself, and waiting for the other as in a collective."""
    mine = Stops(board, remote=True)
    try:
        with mine.during(1):
            for what in plan:
                time.sleep(dice.random() * 0.004)
                if what == "place":
                    mine.reach(apart=False)
                else:
                    for _ in range(dice.randrange(1, 9)):
                        mine.reach(apart=True)
                        time.sleep(dice.random() * 0.002)
                    mine.end_apart()
        found[rank] = "ended"
    except CallInterrupted as interrupted:
        found[rank] = interrupted.place


@pytest.mark.parametrize("plan", [["place"] * 40, ["place", "apart"] * 12, ["apart"] * 30])
def test_all_ranks_leave_at_one_place(plan: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stops, "POLL_SECONDS", 0.003)
    monkeypatch.setattr(stops, "AGREE_SECONDS", 0.001)
    places = set()
    for seed in range(4):
        store, found = dist.HashStore(), dict[int, object]()
        boards = [CallBoard(rank, 3, store) for rank in range(3)]
        dice = [random.Random(f"{seed}:{rank}") for rank in range(4)]
        ranks = [
            threading.Thread(target=leave, args=(boards[rank], plan, dice[rank], found, rank), daemon=True)
            for rank in range(3)
        ]
        for rank in ranks:
            rank.start()
        time.sleep(dice[3].random() * 0.1)
        CallerBoard(store).interrupt(1)
        for rank in ranks:
            rank.join(10)
        assert len(found) == 3
        assert len(set(found.values())) == 1, found
        places.add(found[0])
    assert len(places) > 1


def test_without_an_interrupt_all_places_are_passed():
    board = CallBoard(0, 1, dist.HashStore())
    mine = Stops(board, remote=True)
    mine.reach(apart=False)  # outside of a call, as while the module is built
    with mine.during(1):
        for _ in range(3):
            mine.reach(apart=False)
    assert board.stands(1)[0].ended


# -- On ranks ----------------------------------------------------------------------------------------------------------


class Patient(Trained):
    """Waits where it is told to, so that an interrupt finds it there."""

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.done = 0

    def learn(self, rows: list[list[int]], at: str, file: str) -> int:
        for _ in range(100):
            ids = torch.tensor(rows, device="cuda")
            self._linger(at == "forward", file)
            loss = F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            self._linger(at == "backward", file)
            loss.backward()
            self._linger(at == "step", file)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
        return self.done

    def one_step(self, rows: list[list[int]]) -> int:
        ids = torch.tensor(rows, device="cuda")
        F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.done

    def talk(self, rows: list[list[int]], file: str) -> None:
        self._linger(False, file)
        module: Any = self
        module.generate(torch.tensor(rows), max_new_tokens=20_000, min_new_tokens=10_000 * (1 + self.ranks.rank))

    def wait(self, file: str) -> None:
        for number in range(2000):
            Path(f"{file}{self.ranks.rank}").write_text(str(number))
            time.sleep(0.01)

    def one(self) -> int:
        return 1

    def _linger(self, here: bool, file: str) -> None:
        Path(f"{file}{self.ranks.rank}").touch()
        if here:
            time.sleep(0.3 + 0.2 * self.ranks.rank)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Also where the tests themselves run in the background of a shell, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_once(file: Path, times: int = 1) -> None:
    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.01)
        for _ in range(times):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def plain(model: Path, steps: int) -> dict[str, torch.Tensor]:
    made = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float64).train()
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    ids = torch.tensor(SAMPLES)
    for _ in range(steps):
        F.cross_entropy(made(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in made.state_dict().items()}


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_an_interrupted_method_is_left_between_two_of_its_parts(
    model: Path, two_ranks: TrainEngine, tmp_path: Path, executor: Any
):
    engine = TrainEngine(make(model, Patient), executor).build(colocate_with=two_ranks, take_turns=False)
    with engine:
        for at in ("forward", "backward", "step"):
            file = tmp_path / at
            interrupt_once(Path(f"{file}1"))
            with pytest.raises(KeyboardInterrupt):
                engine.learn(NeedParallel(SAMPLES), at, str(file))
        done = engine.one_step(NeedParallel(SAMPLES))
        assert done[0] == done[1] < 50
        wanted, found = plain(model, done[0] + 1), dict(engine.named_tensors())
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-10


@pytest.mark.usefixtures("_interruptible")
def test_generation_is_left_before_the_next_token(model: Path, two_ranks: TrainEngine, tmp_path: Path):
    engine = TrainEngine(make(model, Patient)).build(colocate_with=two_ranks, take_turns=False)
    with engine:
        began = time.monotonic()
        interrupt_once(tmp_path / "at1")
        with pytest.raises(KeyboardInterrupt):
            engine.talk(NeedParallel(SAMPLES), str(tmp_path / "at"))
        assert time.monotonic() - began < 5
        assert engine.one() == [1, 1]


@pytest.mark.usefixtures("_interruptible")
def test_ranks_that_come_to_no_common_place_are_ended(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks_remote, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(ranks_remote, "INTERRUPT_SECONDS", 0.3)
    engine = TrainEngine(make(model, Patient)).build(data_parallel_size=2)
    interrupt_once(tmp_path / "at1")
    with pytest.raises(KeyboardInterrupt):
        engine.wait(str(tmp_path / "at"))
    with pytest.raises(ParallelError, match=r"gone: wait was interrupted.*\n.*\n.*load\(\) what was saved last"):
        engine.one()
    team = engine._team
    assert isinstance(team, ranks_local.LocalRanks)
    assert all(process.poll() is not None for process in team._ranks)
    engine.close()


class Elsewhere(ranks_remote.RemoteRanks):
    """Ranks that exist in words alone: how each of them answers an interrupted call."""

    def __init__(self, answers: list[Outcome] | None, interrupts: int) -> None:
        super().__init__(2)
        self._answers, self._interrupts = answers, interrupts
        self.told: list[int] = []

    @cached_property
    def _board(self) -> Any:
        return SimpleNamespace(interrupt=self.told.append)

    @property
    def _address(self) -> tuple[str, int]: ...

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        self.in_order = True
        raise KeyboardInterrupt

    def _wait(self, seconds: float | None) -> list[Outcome] | None:
        self._interrupts -= 1
        if self._interrupts == 0:
            raise KeyboardInterrupt
        return self._answers


LEFT = Outcome(left=(3, 40))


@pytest.mark.parametrize(
    ("answers", "interrupts", "usable"),
    [
        ([LEFT, LEFT], 9, True),
        ([Outcome(1), Outcome(2)], 9, True),  # all have ended the call by themselves
        ([LEFT, Outcome(2)], 9, False),
        ([LEFT, Outcome(left=(3, 41))], 9, False),  # one of them has called another collective
        (None, 9, False),
        (None, 2, False),  # interrupted once more while it waits
    ],
)
def test_an_engine_stays_usable_only_if_all_ranks_left_alike(
    answers: list[Outcome] | None, interrupts: int, usable: bool
):
    ranks = Elsewhere(answers, interrupts)
    with pytest.raises(KeyboardInterrupt):
        ranks.request_all(Request("engine", "call", ("learn", None)))
    assert ranks.told == [1]
    assert (not ranks.dead) == usable


def test_saving_is_not_left_half_done():
    ranks = Elsewhere([LEFT, LEFT], 9)
    with pytest.raises(KeyboardInterrupt):
        ranks.request_all(Request("engine", "save", ("folder",)))
    assert "save was interrupted" in ranks.dead
