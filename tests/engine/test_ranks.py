"""Engines on several ranks, processes of this machine: the numbers of plain PyTorch, and what happens in failures."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, JambaForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine
from shardtune.batch import IGNORED
from shardtune.engine import ranks_local, session
from shardtune.engine.nn import HuggingFaceFsdp2TrainModule
from shardtune.engine.rank_process import Limits
from shardtune.errors import DataError, ParallelError
from shardtune.launch.ray.cluster import Placement
from tests.support.chosen import slow_except
from tests.support.engine_modules import SAMPLES, Trained, apart, make, plain, save_model, steps
from tests.support.tiny_architectures import tiny_config


class Failing(Trained):
    """Fails in several ways."""

    def everywhere(self, at: str) -> None:
        ids = torch.zeros(1, 3, dtype=torch.int64)
        if at == "forward":
            self(ids + 1000)
        loss = self(ids).logits.sum()
        if at == "backward":
            loss.register_hook(lambda _: 1 // 0)
            loss.backward()
        raise Missing("Zürich")

    def alone(self, how: str) -> None:
        if self.ranks.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Missing("rank 1 alone")
        self(torch.zeros(1, 3, dtype=torch.int64))

    def unequal(self) -> None:
        for _ in range(1 + self.ranks.rank):
            self(torch.zeros(1, 3, dtype=torch.int64))

    def step_by_micro_batches(self, rows: list[list[list[int]]], weights: list[torch.Tensor]) -> list[int]:
        """The mean over targets of rows that are dealt by their lengths."""
        for micro, shares in zip(rows, weights, strict=True):
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in micro], batch_first=True)
            labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in micro], True, padding_value=IGNORED)
            each = F.cross_entropy(self(ids).logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
            (each / torch.tensor([len(row) - 1 for row in micro]) * shares).sum().backward()
        return [len(micro) * bool(shares.sum()) for micro, shares in zip(rows, weights, strict=True)]

    def own_error(self) -> None:
        raise Unlike("row 3", "no answer")

    def some_return_a_weight(self) -> torch.Tensor | None:
        return self.lm_head.weight if self.ranks.rank else None

    def neighbours(self, adjacency: torch.Tensor) -> torch.Tensor:
        sparse = adjacency.to_sparse()
        return torch.sparse.mm(sparse, self(torch.zeros(1, 3, dtype=torch.int64)).logits[0])

    def targets(self, ids: torch.Tensor) -> list[list[int]]:
        return self.next_tokens(ids).tolist()


class Missing(LookupError):
    """A user's own exception."""


class Unlike(Exception):
    """One that is made of other arguments than those it keeps."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where, self.lock = where, threading.Lock()


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[TrainEngine]:
    with TrainEngine(make(model, Failing)).build(data_parallel_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[TrainEngine]:
    with TrainEngine(make(model, Failing)).build(data_parallel_size=4) as engine:
        yield engine


WAYS = ("step_by_mean", "step_by_weights", "step_by_sums")


def check(model: Path, ranks: TrainEngine, executor: Any, ways: tuple[str, ...] = WAYS, **sizes: int) -> None:
    wanted = plain(model)
    for way in ways:
        engine = TrainEngine(make(model), executor).build(colocate_with=ranks, take_turns=False, **sizes)
        with engine:
            assert apart(steps(engine, way, NeedParallel(SAMPLES)), wanted) < 1e-10, way


@pytest.mark.parametrize("executor", slow_except(["fsdp2", "fsdp1", "ddp"], "fsdp2", "ddp"))
def test_two_ranks_are_plain_pytorch(model: Path, two: TrainEngine, executor: Any):
    check(model, two, executor)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
def test_four_ranks_are_plain_pytorch(model: Path, four: TrainEngine, executor: Any):
    check(model, four, executor)


def test_tensor_parallel_is_plain_pytorch(model: Path, two: TrainEngine):
    check(model, two, "fsdp2", tensor_parallel_size=2)


@pytest.mark.slow
def test_tensor_parallel_is_plain_pytorch_on_four_ranks(model: Path, four: TrainEngine):
    check(model, four, "fsdp2", ("step_by_mean",), tensor_parallel_size=2)
    check(model, four, "fsdp2", ("step_by_mean",), tensor_parallel_size=4)  # more ranks than heads of keys and values


@pytest.mark.parametrize("number", slow_except(["two", "four"], "two"))
def test_copies_of_the_sharded_module(model: Path, number: str, request: pytest.FixtureRequest):
    check(model, request.getfixturevalue(number), "fsdp2", ("step_by_mean",), replicate_size=2)


@pytest.mark.parametrize("way", ["step_by_sums", "step_by_token_weights"])
@pytest.mark.parametrize("number", slow_except(["two", "four"], "two"))
def test_sequence_parallel_is_plain_pytorch(model: Path, number: str, way: str, request: pytest.FixtureRequest):
    data = NeedParallel(torch.tensor(SAMPLES).clamp(min=1), type="seq")
    wanted = plain(model, data.data.tolist())
    ranks: TrainEngine = request.getfixturevalue(number)
    engine = TrainEngine(make(model)).build(colocate_with=ranks, take_turns=False, sequence_parallel_size=2)
    with engine:
        ids = data if way == "step_by_token_weights" else NeedParallel(data.data.tolist(), type="seq")
        assert apart(steps(engine, way, ids), wanted) < 1e-10


def test_tokens_that_do_not_divide(model: Path, two: TrainEngine):
    rows = [row[:7] for row in SAMPLES]
    engine = TrainEngine(make(model, Failing)).build(colocate_with=two, take_turns=False, sequence_parallel_size=2)
    with engine:
        assert apart(steps(engine, "step_by_sums", NeedParallel(rows, type="seq")), plain(model, rows)) < 1e-10
        whole = engine.logits(SAMPLES)[0]
        parts = engine.logits(NeedParallel(SAMPLES, type="seq"))
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)
        targets = engine.targets(NeedParallel(torch.tensor([[1, 2, 3, 4, 5]]), type="seq"))
        assert targets == [[[2, 3, 4]], [[5, IGNORED]]]


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that two ranks do not divide."""
    return save_model(tmp_path_factory.mktemp("three"), heads=3, key_value_heads=1, width=48)


class Accumulating(Trained):
    """Two micro-batches for each update."""

    def step_in_two(self, input_ids: torch.Tensor, weights: torch.Tensor) -> None:
        for part in (slice(0, 2), slice(2, None)):
            self.step_by_token_weights(input_ids[part], weights[part])


@pytest.mark.parametrize("length", [12, 7])
def test_a_ring_is_plain_pytorch(three_heads: Path, two: TrainEngine, length: int):
    """Rows of one length, in two micro-batches, on tokens that two ranks divide and on others."""
    rows = torch.tensor(SAMPLES).clamp(min=1)[:, :length]
    engine = TrainEngine(make(three_heads, Accumulating)).build(
        colocate_with=two, take_turns=False, sequence_parallel_size=2
    )
    with engine:
        assert engine.notes == ["sequences are shared by ring attention"]
        found = steps(engine, "step_in_two", NeedParallel(rows, type="seq"))
        assert apart(found, plain(three_heads, rows.tolist())) < 1e-10
        parts = engine.logits(NeedParallel(SAMPLES, type="seq"))
        assert torch.allclose(torch.cat(parts, 1), engine.logits(SAMPLES)[0], atol=1e-12)


class OfGPT2(HuggingFaceFsdp2TrainModule, GPT2LMHeadModel):
    """A model whose config has other names for its heads."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids).logits.detach()


def test_heads_are_read_by_any_name(tmp_path: Path, two: TrainEngine):
    config = GPT2Config(n_head=3, n_embd=24, n_layer=1, vocab_size=64, n_positions=16, attn_pdrop=0.0)
    GPT2LMHeadModel(config).double().save_pretrained(tmp_path)
    ids = torch.tensor(SAMPLES)[:, :12]
    made = OfGPT2.from_pretrained(tmp_path, dtype=torch.float64)
    with TrainEngine(made.eval()).build(colocate_with=two, take_turns=False, sequence_parallel_size=2) as engine:
        assert engine.notes == ["sequences are shared by ring attention"]
        parts = engine.logits(NeedParallel(ids, type="seq"))
    whole = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64).eval()(ids).logits
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)


@pytest.mark.slow
def test_a_ring_of_ranks_that_divide_the_heads(model: Path, four: TrainEngine):
    """It is taken where it is named, and beside tensor ranks; heads of keys and values are in groups."""
    rows = NeedParallel(SAMPLES, type="seq")
    for sizes in ({"sequence_parallel_size": 4}, {"sequence_parallel_size": 2, "tensor_parallel_size": 2}):
        engine = TrainEngine(make(model)).build(colocate_with=four, take_turns=False, sequence_method="ring", **sizes)
        with engine:
            assert engine.notes == ["sequences are shared by ring attention"]
            assert apart(steps(engine, "step_by_sums", rows), plain(model)) < 1e-10


REFUSED_RINGS: dict[str, tuple[dict[str, Any], str]] = {
    "ulysses": ({"sequence_parallel_size": 2, "sequence_method": "ulysses"}, "2 ranks cannot share 3 heads"),
    "no ranks": ({"sequence_method": "ring"}, "has no effect with sequence_parallel_size=1"),
    "another": ({"sequence_parallel_size": 2, "sequence_method": "star"}, "is not one of the methods"),
}


@pytest.mark.parametrize("case", REFUSED_RINGS)
def test_ways_to_share_attention_that_are_refused(three_heads: Path, two: TrainEngine, case: str):
    arguments, says = REFUSED_RINGS[case]
    with pytest.raises(ParallelError, match=says):
        TrainEngine(make(three_heads)).build(colocate_with=two, take_turns=False, **arguments)


def test_a_ring_refuses_dropout_on_attention_weights(three_heads: Path, two: TrainEngine):
    made = make(three_heads)
    made.config.attention_dropout = 0.1
    with pytest.raises(ParallelError, match=r"ring attention has no dropout on attention weights, .* is 0\.1"):
        TrainEngine(made).build(colocate_with=two, take_turns=False, sequence_parallel_size=2)


class Stateful(HuggingFaceFsdp2TrainModule, JambaForCausalLM):
    """A model whose layers have a state."""


def test_ranks_share_no_sequence_of_a_model_with_a_state(tmp_path: Path, two: TrainEngine):
    JambaForCausalLM(tiny_config("jamba", {})).save_pretrained(tmp_path)
    with pytest.raises(ParallelError, match="of Stateful: JambaMambaMixer computes a row's state from all tokens"):
        TrainEngine(make(tmp_path, Stateful)).build(colocate_with=two, take_turns=False, sequence_parallel_size=2)


class Shifting(Trained):
    """Each token's embedding has a part of the one before, by less than bf16 rounds in the end; only ranks that have
    one before on another rank see a difference."""

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + 0.01 * F.pad(embedded, (0, 0, 1, -1)), **arguments)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_ranks_share_no_sequence_whose_tokens_meet_elsewhere_than_in_attention(
    model: Path, two: TrainEngine, precision: str
):
    """All ranks say so, whichever of them sees a difference."""
    with pytest.raises(
        ParallelError, match=r"Shifting gives other logits when ranks share its sequences \(by .*e-03\)"
    ):
        TrainEngine(make(model, Shifting), precision=precision).build(
            colocate_with=two, take_turns=False, sequence_parallel_size=2
        )


def test_in_half_precision_ranks_share_sequences(model: Path, two: TrainEngine):
    ids = NeedParallel(torch.tensor(SAMPLES).clamp(min=1), type="seq")
    found = []
    for precision in ("bf16", "fp32"):
        engine = TrainEngine(make(model), precision=precision)
        with engine.build(colocate_with=two, take_turns=False, sequence_parallel_size=2):
            found.append(steps(engine, "step_by_token_weights", ids))
    assert apart(*found) < 0.05


class Masked(Trained):
    def masked(self, ids: list[list[int]]) -> None:
        self(torch.tensor(ids), labels=torch.tensor(ids))


def test_what_a_shared_sequence_cannot_take(model: Path, two: TrainEngine):
    engine = TrainEngine(make(model, Masked)).build(colocate_with=two, take_turns=False, sequence_parallel_size=2)
    with engine, pytest.raises(DataError, match="labels cannot be given where ranks share sequences"):
        engine.masked(NeedParallel(SAMPLES, type="seq"))


class Listening(Trained):
    def listen(self) -> None:
        self.heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.heard.append(record.getMessage())
        logging.getLogger("shardtune.engine.rank_module").addHandler(handler)

    def messages(self) -> list[str]:
        return self.heard


def test_targets_behind_borders_that_are_not_fetched_are_reported(model: Path, two: TrainEngine):
    """Once, on one rank, and not for a method that fetches them, or that trains nothing."""
    engine = TrainEngine(make(model, Listening)).build(colocate_with=two, take_turns=False, sequence_parallel_size=2)
    data = NeedParallel(SAMPLES, type="seq")
    with engine:
        engine.listen()
        engine.logits(data)
        engine.step_by_sums(data)
        assert engine.messages() == [[], []]
        for _ in range(2):
            engine.step_by_mean(data)
        (told,), others = engine.messages()
        assert others == []
        assert "Listening.step_by_mean: the 12 tokens of each sequence are divided among 2 ranks" in told
        assert "self.next_tokens(input_ids)" in told


def test_rows_are_dealt_by_tokens(model: Path, two: TrainEngine):
    """Micro-batches of equal count, of which one has no rows; the gradient is that of one process."""
    rows = [SAMPLES[row][:size] for row, size in enumerate((9, 3, 8))]
    dealt = NeedParallel(rows, weights=[len(row) - 1 for row in rows], max_tokens=9)
    engines = [TrainEngine(make(model, Failing)).build(colocate_with=two, take_turns=False)]
    engines.append(TrainEngine(make(model, Failing)).build())
    for engine in engines:
        with engine:
            assert apart(steps(engine, "step_by_micro_batches", dealt), plain(model, rows)) < 1e-10
            if engine.num_ranks == 2:
                assert engine.step_by_micro_batches(dealt) == [[1, 1], [1, 0]]


@pytest.mark.slow
def test_one_sample_over_four_ranks(model: Path, four: TrainEngine):
    engine = TrainEngine(make(model)).build(colocate_with=four, take_turns=False)
    with engine:
        values = engine.step_by_mean(NeedParallel(SAMPLES[:1]))
        assert sum(value is not None for value in values) == 1
    for way in ("step_by_mean", "step_by_weights", "step_by_sums"):
        engine = TrainEngine(make(model)).build(colocate_with=four, take_turns=False)
        with engine:
            found = steps(engine, way, NeedParallel(SAMPLES[:1]))
            assert apart(found, plain(model, SAMPLES[:1])) < 1e-10


def test_threads_of_the_caller_take_turns(two: TrainEngine):
    found = dict[int, object]()

    def call(numbers: range) -> None:
        for number in numbers:
            found[number] = two.seen(number)

    threads = [threading.Thread(target=call, args=(range(first, 30, 3),), daemon=True) for first in range(3)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    if any(thread.is_alive() for thread in threads):  # each waits for a reply that another one has read
        assert two._team is not None
        two._team.close()  # so that the tests that follow end, too
    assert found == {number: [((number,), {})] * 2 for number in range(30)}


def test_values_come_in_the_order_of_ranks(two: TrainEngine):
    assert [value[:2] for value in two.where()] == [(0, 0), (1, 1)]
    seen = two.seen(NeedParallel(["a", "b", "c"]), all="x", part=NeedParallel(torch.arange(3)))
    assert [value[0] for value in seen] == [(["a"],), (["b", "c"],)]
    assert [value[1]["part"].tolist() for value in seen] == [[0], [1, 2]]


def test_state_moves_between_layouts(model: Path, two: TrainEngine, tmp_path: Path):
    data = NeedParallel(SAMPLES)
    alone = TrainEngine(make(model)).build()
    steps(alone, "step_by_mean", data)
    alone.save(tmp_path)
    wanted = steps(alone, "step_by_mean", data)
    for sizes in ({}, {"tensor_parallel_size": 2}):
        engine = TrainEngine(make(model)).build(colocate_with=two, take_turns=False, **sizes)
        with engine:
            engine.load(tmp_path)
            assert apart(steps(engine, "step_by_mean", data), wanted) < 1e-10
            engine.save(tmp_path / "again")
    alone.load(tmp_path / "again")


def test_the_sleeping_engine_holds_nothing_on_any_rank(model: Path, two: TrainEngine):
    first = TrainEngine(make(model)).build(colocate_with=two, take_turns=False)
    second = TrainEngine(make(model)).build(colocate_with=first)
    with first, second:
        wanted = second.step_by_mean(NeedParallel(SAMPLES))
        first.sleep()
        assert first.memory() == [0, 0]
        assert first.step_by_mean(NeedParallel(SAMPLES)) == wanted


@pytest.mark.parametrize("at", ["forward", "backward", "after"])
def test_an_exception_on_all_ranks_leaves_the_engine_usable(model: Path, two: TrainEngine, at: str):
    engine = TrainEngine(make(model, Failing)).build(colocate_with=two, take_turns=False)
    with engine:
        expected = {"forward": IndexError, "backward": ZeroDivisionError, "after": Missing}[at]
        with pytest.raises(expected) as caught:
            engine.everywhere(at)
        assert "on rank 0" in str(caught.value.__cause__)
        assert "in everywhere" in str(caught.value.__cause__)
        assert apart(steps(engine, "step_by_mean", NeedParallel(SAMPLES)), plain(model)) < 1e-10


def test_an_exception_with_an_init_of_its_own_keeps_its_type(two: TrainEngine):
    with pytest.raises(Unlike, match=r"row 3: no answer") as caught:
        two.own_error()
    assert caught.value.where == "row 3"
    assert "in own_error" in str(caught.value.__cause__)


def test_sparse_tensors_are_operands(two: TrainEngine):
    adjacency = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.float64)
    for found in two.neighbours(adjacency):
        assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("method", ["unequal", "some_return_a_weight"])
def test_a_collective_that_only_one_rank_calls_is_named(model: Path, method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks_local, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(session, "_session", None)
    shardtune.init()  # ten minutes, but it is known as soon as one rank has ended the call and all others wait
    session.current_session().limits = Limits(ended_seconds=1.0)
    with TrainEngine(make(model, Failing)).build(data_parallel_size=2) as engine:
        with pytest.raises(ParallelError, match=rf"in the call of {method}: rank 0 has returned") as caught:
            getattr(engine, method)()
        assert "rank 1 waits in the collective" in str(caught.value)
        place = {"unequal": "in Failing.unequal: self(torch.zeros", "some_return_a_weight": "full_tensor"}[method]
        assert place in str(caught.value)
        with pytest.raises(ParallelError, match="the ranks of this engine are gone"):
            engine.where()


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_fails_alone_ends_the_engine(model: Path, how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks_local, "GRACE_SECONDS", 2.0)
    engine = TrainEngine(make(model, Failing)).build(data_parallel_size=2)
    began = time.monotonic()
    told = "SIGKILL" if how == "kill" else "rank 1 alone"
    with pytest.raises(RuntimeError if how == "kill" else Missing, match=told):
        engine.alone(how)
    assert time.monotonic() - began < 20
    with pytest.raises(ParallelError, match="the ranks of this engine are gone"):
        engine.where()
    team = engine._team
    assert isinstance(team, ranks_local.LocalRanks)
    assert all(process.poll() is not None for process in team._ranks)
    engine.close()


def test_the_end_of_a_rank_is_noticed_though_another_process_holds_its_connection():
    here, there = socket.socketpair()  # `there` stands for the end that a child of the rank has inherited
    with there, ranks_local.Connection(here.dup().detach()) as pipe:
        ranks_local.Connection(there.dup().detach()).send_bytes(b"answer")
        ranks_local._end_with(subprocess.Popen(["true"]), here)
        assert pipe.recv_bytes() == b"answer"
        with pytest.raises(EOFError):
            pipe.recv_bytes()
        with pytest.raises(BrokenPipeError):
            pipe.send_bytes(bytes(1 << 20))


def test_the_end_of_an_engine_is_that_of_its_ranks(model: Path):
    engine = TrainEngine(make(model, Failing)).build(data_parallel_size=2)
    team = engine._team
    assert isinstance(team, ranks_local.LocalRanks)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            engine.where()  # refused
            os._exit(1)
        team.close()  # as at the end of a fork's interpreter
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(engine.where()) == 2
    began = time.monotonic()
    del engine  # without close()
    assert [process.returncode for process in team._ranks] == [0, 0]
    assert time.monotonic() - began < ranks_local.END_SECONDS


def test_gpus_of_ended_ranks_are_used_again():
    here = session.Session("local", "cpu", Placement("pack", 1.0, None, {}, 60.0))
    for gpus in (range(2), range(2, 3)):
        team = object.__new__(ranks_local.LocalRanks)
        team.dead, team.gpus = "", gpus
        here._noted(team)
    assert (here._first_gpu(1), here._first_gpu(4)) == (3, 3)
    here.teams[0].dead = "it was closed"
    assert (here._first_gpu(1), here._first_gpu(2), here._first_gpu(3)) == (0, 0, 3)
