"""A user's own callbacks: what they are told and when, what they may ask for, and that they change no number."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import shardtune
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import CheckpointError, ConfigError, Interrupted
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.processes import open_group_of_one
from shardtune.training.callbacks import Ask, CallbackError, Callbacks, RankAlone, StepEnd, TrainEnd, load_callbacks
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, train_on_ranks

ONE = Ranks(0, 1, torch.device("cpu"))
STEP_END = StepEnd(2, 8, 0.5, Path("run"), MappingProxyType({"train/loss": 1.5}), updated=True)

RECORDER = """
import json, os, random
import numpy, torch
import shardtune

class Recorder:
    asks = {asks}
    fails = {fails}

    def __init__(self):
        self.rank = os.environ.get("RANK", "0")

    def note(self, event, *facts):
        entry = [event.method, event.step, *facts]
        with open(event.run_dir / f"events_{{self.rank}}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\\n")
        # Whatever this does to the process is undone.
        random.random(), numpy.random.rand(), torch.rand(3)
        torch.manual_seed(event.step)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        if f"{{event.method}} {{event.step}}" in self.fails:
            raise RuntimeError("no network")
        names = self.asks.get(f"{{event.method}} {{event.step}}")
        asked = None
        for name in names or []:
            asked = shardtune.Ask[name] | (asked or shardtune.Ask(0))
        return asked

    def on_train_start(self, event):
        return self.note(event, str(event.resumed_from and event.resumed_from.name), event.total_steps)

    def on_step_end(self, event):
        assert event.metrics["train/loss"] > 0 and event.updated and 0 < event.epoch <= 2
        return self.note(event)

    def on_evaluate(self, event):
        return self.note(event, sorted(event.metrics)[0])

    def on_save(self, event):
        assert (event.path / "state.json").exists()
        return self.note(event, event.path.name, event.best)

    def on_train_end(self, event):
        return self.note(event, event.checkpoint.name, "eval/loss" in event.metrics)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With dropout, so that the random draws count."""
    return make_tiny(tmp_path_factory.mktemp("callbacks"), dropout=0.2)


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Tiny:
    """`runs/plain`: eight steps without callbacks, saved and evaluated after each fourth."""
    shardtune.train(recipe(tiny, "plain", callbacks=None))
    return tiny


def recipe(tiny: Tiny, name: str, callbacks: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    if callbacks is not None:
        changes["runner__callbacks"] = callbacks
    settings: dict[str, Any] = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__val_check_interval": 4,
        "runner__save_interval": 4,
        "runner__best": {"monitor": "eval/loss"},
    }
    return tiny.recipe(name, **{**settings, **changes})


def recorder(
    folder: Path, *, asks: Mapping[str, list[str]] | None = None, fails: tuple[str, ...] = (), name: str = "recorder"
) -> str:
    """Write a callback that notes what it is told, and asks or fails at some events, written as `on_step_end 3`."""
    file = folder / f"{name}.py"
    file.write_text(RECORDER.format(asks=dict(asks or {}), fails=list(fails)))
    return f"{file}:Recorder"


def events(run: Path, rank: int = 0) -> list[list[Any]]:
    return [json.loads(line) for line in (run / f"events_{rank}.jsonl").read_text().splitlines()]


def assert_as_plain(tiny: Tiny, name: str) -> None:
    assert lines(tiny.run(name)) == lines(tiny.run("plain"))
    last = "checkpoints/global_step_8"
    assert_same_tensors(tiny.run(name) / last, tiny.run("plain") / last)
    assert_same_tensors(tiny.run(name) / "final", tiny.run("plain") / "final")


# What is told, and when.


@pytest.mark.lengthy
def test_events_come_in_order_and_change_no_number(plain: Tiny, tmp_path: Path) -> None:
    shardtune.train(recipe(plain, "told", [recorder(tmp_path)]))
    assert events(plain.run("told")) == [
        ["on_train_start", 0, "None", 8],
        *(["on_step_end", step] for step in range(1, 5)),
        ["on_evaluate", 4, "eval/loss"],
        ["on_save", 4, "global_step_4", True],
        *(["on_step_end", step] for step in range(5, 9)),
        ["on_evaluate", 8, "eval/loss"],
        ["on_save", 8, "global_step_8", True],
        ["on_train_end", 8, "global_step_8", True],
    ]
    assert torch.is_grad_enabled()
    assert torch.get_default_device().type == "cpu"
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("highest", False)
    assert_as_plain(plain, "told")


def test_what_is_asked_for_is_done_and_a_stopped_run_is_finished(plain: Tiny, tmp_path: Path) -> None:
    asks = {
        "on_train_start 0": ["SAVE"],
        "on_step_end 2": ["EVALUATE"],
        "on_evaluate 2": ["SAVE"],
        "on_save 2": ["EVALUATE"],
        "on_step_end 5": ["STOP", "SAVE"],
    }
    callbacks = [recorder(tmp_path, asks=asks)]
    run = shardtune.train(recipe(plain, "asked", callbacks))
    told = [entry[:2] for entry in events(run.dir)]
    assert told == [
        ["on_train_start", 0],
        ["on_step_end", 1],
        ["on_save", 1],  # asked for when there was no step to save
        ["on_step_end", 2],
        ["on_evaluate", 2],
        ["on_save", 2],
        ["on_step_end", 3],
        ["on_evaluate", 3],  # asked for when step 2 was over
        ["on_save", 3],  # as the best so far
        ["on_step_end", 4],
        ["on_evaluate", 4],
        ["on_save", 4],
        ["on_step_end", 5],
        ["on_evaluate", 5],  # as after any run's last step
        ["on_save", 5],
        ["on_train_end", 5],
    ]
    before = lines(plain.run("plain"))
    assert [line["train/loss"] for line in lines(run.dir)] == [line["train/loss"] for line in before[:5]]
    assert [line["step"] for line in lines(run.dir) if "eval/loss" in line] == [2, 3, 4, 5]
    assert json.loads((run.dir / "final/metrics.json").read_text())["step"] == 5
    shardtune.train(recipe(plain, "asked", callbacks))
    assert [entry[:2] for entry in events(run.dir)] == told, "a finished run was gone on with"
    shardtune.train(recipe(plain, "asked", [], runner__max_epochs=3))  # a longer one forgets that it was to stop
    assert len(lines(run.dir)) == 12


def test_stopped_before_the_first_step_there_is_still_a_final_model(plain: Tiny, tmp_path: Path) -> None:
    asks = {"on_train_start 0": ["STOP"]}
    run = shardtune.train(recipe(plain, "at_once", [recorder(tmp_path, asks=asks)]))
    assert [entry[:2] for entry in events(run.dir)] == [["on_train_start", 0], ["on_save", 0], ["on_train_end", 0]]
    assert (run.dir / "final/model.safetensors").exists()


@pytest.mark.parametrize(
    "asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in line", "background"]
)
def test_a_failure_is_named_saves_and_can_be_gone_on_from(plain: Tiny, tmp_path: Path, asynchronous: bool) -> None:
    name = f"failed_{asynchronous}"
    keys = {"runner__async_save": asynchronous}
    broken = recorder(tmp_path, fails=("on_step_end 3",))
    with pytest.raises(ConfigError, match=r"Recorder.on_step_end failed: RuntimeError: no network") as raised:
        shardtune.train(recipe(plain, name, [broken], **keys))
    assert raised.value.exit_code == 2
    place = f"{tmp_path}/recorder.py:"
    assert place in str(raised.value)
    line = int(str(raised.value).partition(place)[2].split()[0])
    assert "raise RuntimeError" in (tmp_path / "recorder.py").read_text().splitlines()[line - 1]
    assert not (plain.run(name) / "final").exists()
    for event in ("on_evaluate 4", "on_save 8", "on_train_end 8"):
        broken = recorder(tmp_path, fails=(event,))
        with pytest.raises(CallbackError, match=f"Recorder.{event.split()[0]} failed"):
            shardtune.train(recipe(plain, name, [broken], **keys))
    shardtune.train(recipe(plain, name, [recorder(tmp_path, name="mended")], **keys))
    told = [entry[:3] for entry in events(plain.run(name))]
    starts = [entry[1:] for entry in told if entry[0] == "on_train_start"]
    assert starts == [[0, "None"], *([step, f"global_step_{step}"] for step in (3, 4, 8, 8))]
    steps = [entry[1] for entry in told if entry[0] == "on_step_end"]
    assert steps == list(range(1, 9)), "a step was told of twice, or not at all"
    assert [entry[1] for entry in told if entry[0] == "on_evaluate"] == [4, 4, 8]  # failed, told again
    assert_as_plain(plain, name)


def test_a_save_that_fails_too_hides_no_failure(
    plain: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Path:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(CheckpointStore, "begin", refuse)
    with pytest.raises(CallbackError, match="no network"):
        shardtune.train(recipe(plain, "full", [recorder(tmp_path, fails=("on_step_end 3",))]))
    assert "no checkpoint was saved: the disk is full" in capsys.readouterr().err


def test_a_signal_in_the_last_evaluation_does_not_forget_that_the_run_was_to_stop(
    plain: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = [recorder(tmp_path, asks={"on_step_end 3": ["STOP"]})]
    original = shardtune.SFTWorker.get_eval_model_output

    def output(self: Any, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    keys = {"actor__eval_micro_batch_size": 1}
    monkeypatch.setattr(shardtune.SFTWorker, "get_eval_model_output", output)
    with pytest.raises(Interrupted):
        shardtune.train(recipe(plain, "signalled", callbacks, **keys))
    monkeypatch.undo()
    run = shardtune.train(recipe(plain, "signalled", callbacks, **keys))
    assert [line["step"] for line in lines(run.dir)] == [1, 2, 3]
    assert "eval/loss" in lines(run.dir)[-1]
    assert [entry[:2] for entry in events(run.dir)][3:] == [
        ["on_step_end", 3],
        ["on_save", 3],
        ["on_train_start", 3],
        ["on_evaluate", 3],
        ["on_train_end", 3],
    ]


def test_an_evaluation_that_cannot_be_is_not_passed_over(plain: Tiny, tmp_path: Path) -> None:
    callbacks = [recorder(tmp_path, asks={"on_step_end 2": ["EVALUATE"]})]
    with pytest.raises(CallbackError, match=r"on_step_end of a callback requests an evaluation"):
        shardtune.train(plain.recipe("nothing_to_evaluate", runner__callbacks=callbacks))


def test_two_ranks_do_what_rank_0_is_asked(plain: Tiny, tmp_path: Path) -> None:
    asks = {"on_step_end 2": ["EVALUATE", "SAVE"], "on_evaluate 4": ["STOP"]}
    stopped = recipe(plain, "two", [recorder(tmp_path, asks=asks)])
    failing = recipe(plain, "two_failed", [recorder(tmp_path, fails=("on_step_end 3",), name="failing")])
    with pytest.raises(AssertionError) as raised:
        train_on_ranks(2, [stopped, failing])
    assert str(raised.value).count("CallbackError: Recorder.on_step_end failed") == 2, "a rank did not end with it"
    assert (plain.run("two_failed") / "checkpoints/global_step_3").exists()
    told = [entry[:2] for entry in events(plain.run("two"))]
    assert [step for name, step in told if name == "on_step_end"] == [1, 2, 3, 4]
    assert [step for name, step in told if name == "on_evaluate"] == [2, 4]
    assert [step for name, step in told if name == "on_save"] == [2, 4]
    assert not (plain.run("two") / "events_1.jsonl").exists()
    assert (plain.run("two") / "final/model.safetensors").exists()


# Which classes are taken.


def refusal(tmp_path: Path, body: str, name: str = "Mine") -> str:
    file = tmp_path / "mine.py"
    file.write_text(f"import shardtune\n{body}\n")
    with pytest.raises(ConfigError) as raised:
        load_callbacks([f"{file}:{name}"])
    return str(raised.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("class Mine:\n  def on_step_ends(self, event): ...", ("Mine.on_step_ends", "did you mean on_step_end?")),
        ("class Mine(shardtune.Callback):\n  def on_evaluated(self, e): ...", ("did you mean on_evaluate?",)),
        ("class Mine:\n  def on_xyz(self, e): ...\n  def on_save(self, e): ...", ("on_xyz", "on_train_start")),
        ("class Mine:\n  def step_end(self, event): ...", ("has no method of a callback", "on_step_end")),
        ("class Mine(shardtune.Callback): ...", ("has no method of a callback",)),
        ("def Mine(event): ...", ("Mine is not a class",)),
        ("class Mine:\n  def on_save(self): ...", ("on_save takes other arguments", "on_save(self, event)")),
        ("class Mine:\n  async def on_save(self, event): ...", ("on_save is a coroutine",)),
        (
            "class Mine:\n  def __init__(self, url): ...\n  def on_save(self, event): ...",
            ("Mine takes other arguments", "'url'", "Mine()"),
        ),
        ("class Other:\n  def on_save(self, event): ...", ("'Mine'", "Other")),
    ],
)
def test_a_class_that_would_not_do_is_refused(tmp_path: Path, body: str, said: tuple[str, ...]) -> None:
    message = refusal(tmp_path, body)
    for part in (*said, "runner.callbacks", f"{tmp_path}/mine.py"):
        assert part in message


def test_it_is_refused_before_anything_is_launched_or_written(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n  def on_stepend(self, event): ...\n")
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="did you mean on_step_end"):
            shardtune.train(recipe(tiny, "refused", [f"{tmp_path}/mine.py:Mine"], runner__nproc_per_node=ranks))
    with pytest.raises(ConfigError, match=r"no_file.py"):
        shardtune.train(recipe(tiny, "refused", [f"{tmp_path}/no_file.py:Mine"]))
    assert not tiny.run("refused").exists()


def made(tmp_path: Path, *bodies: str) -> Callbacks:
    specs = []
    for number, body in enumerate(bodies):
        file = tmp_path / f"mine{number}.py"
        file.write_text(f"import random, numpy, torch, shardtune\nclass Mine{number}:\n{body}\n")
        specs.append(f"{file}:Mine{number}")
    callbacks = Callbacks(load_callbacks(specs), ONE)
    callbacks.make()
    return callbacks


def test_any_kind_of_method_will_do_and_asks_add_up(tmp_path: Path) -> None:
    callbacks = made(
        tmp_path,
        "  @staticmethod\n  def on_step_end(event): return shardtune.Ask.STOP",
        "  @classmethod\n  def on_step_end(cls, event): return shardtune.Ask.SAVE | shardtune.Ask.EVALUATE",
        "  def on_step_end(self, event, *more): return None",
    )
    assert callbacks.tell(STEP_END) == Ask.STOP | Ask.SAVE | Ask.EVALUATE
    assert callbacks.stopped_by == ["Mine0"]
    assert callbacks.listen_to(StepEnd)
    assert not callbacks.listen_to(TrainEnd)


@pytest.mark.parametrize("answer", ["True", "'stop'", "1"])
def test_an_answer_that_means_nothing_is_refused(tmp_path: Path, answer: str) -> None:
    with pytest.raises(CallbackError, match=rf"Mine0.on_step_end returned {answer}(?s:.*)Ask.STOP"):
        made(tmp_path, f"  def on_step_end(self, event): return {answer}").tell(STEP_END)


def test_nothing_can_be_asked_for_at_the_end(tmp_path: Path) -> None:
    end = TrainEnd(8, 8, 2.0, Path("run"), MappingProxyType({}), Path("checkpoint"))
    callbacks = made(tmp_path, "  def on_train_end(self, event): return shardtune.Ask.STOP")
    with pytest.raises(CallbackError, match=r"on_train_end returned(?s:.*)training is over"):
        callbacks.tell(end)


def test_a_constructor_that_fails_and_an_exit_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"Mine0 failed: ValueError: no token(?s:.*)mine0.py:3"):
        made(tmp_path, "  def __init__(self): raise ValueError('no token')\n  def on_save(self, event): ...")
    with pytest.raises(CallbackError, match="SystemExit: 3"):
        made(tmp_path, "  def on_step_end(self, event): raise SystemExit(3)").tell(STEP_END)


def test_nothing_in_an_event_can_be_changed() -> None:
    for name in ("step", "metrics", "run_dir", "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(STEP_END, name, None)
    with pytest.raises(TypeError):
        STEP_END.metrics["train/loss"] = 0.0  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("body", ["all_reduce(torch.ones(()))", "broadcast_object_list([1])", "barrier()"])
def test_a_collective_on_rank_0_alone_is_refused(tmp_path: Path, body: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import torch, torch.distributed\nclass Mine:\n  def on_step_end(self, event):\n    torch.distributed.{body}\n"
    )
    callbacks = Callbacks(load_callbacks([f"{file}:Mine"]), Ranks(0, 2, torch.device("cpu")))
    callbacks.make()
    open_group_of_one(2)
    try:
        with pytest.raises(CallbackError, match=r"on rank 0 alone(?s:.*)mine\.py:4"):
            callbacks.tell(STEP_END)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "computed",
    [
        "torch.compile(torch.sin, backend='eager', fullgraph=True)(torch.zeros(2))",
        "flex_attention(*[torch.zeros(1, 2, 16, 16)] * 3)",
        "torch.cond(torch.tensor(True), torch.sin, torch.cos, [torch.zeros(2)])",
    ],
    ids=["compiled", "flex_attention", "cond"],
)
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_a_callback_of_several_ranks_may_compile(computed: str) -> None:
    with RankAlone():
        result = eval(computed, {"torch": torch, "flex_attention": flex_attention})
    assert not result.any()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_what_numbers_depend_on_is_put_back(tmp_path: Path) -> None:
    callbacks = made(
        tmp_path,
        "  def on_step_end(self, event):\n"
        "    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)\n"
        "    torch.set_grad_enabled(False), torch.set_default_dtype(torch.float64)\n"
        "    torch.set_num_threads(torch.get_num_threads() + 1)\n"
        "    torch.use_deterministic_algorithms(True)\n"
        "    raise KeyError('and failing')",
    )
    seed_all(5)
    wanted = random.random(), np.random.rand(), torch.rand(()).item()
    threads = torch.get_num_threads()
    seed_all(5)
    with pytest.raises(CallbackError, match="KeyError"):
        callbacks.tell(STEP_END)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == wanted
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


# What comes back in a run that continues.


COUNTER = """
import json, os, pathlib, signal

class Counter:
    fails = {fails!r}

    def __init__(self):
        self.best, self.seen = float("inf"), []

    def state_dict(self):
        return {{"best": self.best, "seen": self.seen}}

    def load_state_dict(self, state):
        self.best, self.seen = state["best"], state["seen"]

    def on_step_end(self, event):
        self.seen.append([event.step, "step"])
        if event.step == self.fails:
            raise RuntimeError("no network")

    def on_evaluate(self, event):
        self.best = min(self.best, event.metrics["eval/loss"])
        self.seen.append([event.step, "evaluation"])

    def on_save(self, event):
        self.seen.append([event.step, "checkpoint"])

    def on_train_end(self, event):
        (event.run_dir / "counted.json").write_text(json.dumps(self.state_dict()))

class Other(Counter):
    def on_train_end(self, event):
        pass
"""


def counter(folder: Path, fails: int | None = None) -> list[str]:
    file = folder / "counter.py"
    file.write_text(COUNTER.format(fails=fails))
    return [f"{file}:Counter"]


def counted(tiny: Tiny, name: str) -> dict[str, Any]:
    return json.loads((tiny.run(name) / "counted.json").read_text())


@pytest.mark.lengthy
@pytest.mark.parametrize("fails", [3, 5])
def test_what_a_callback_has_counted_comes_back(plain: Tiny, tmp_path: Path, fails: int) -> None:
    keys = {"runner__save_interval": 2}
    whole = shardtune.train(recipe(plain, f"counted_{fails}", counter(tmp_path), **keys))
    name = f"counted_on_{fails}"
    with pytest.raises(CallbackError, match="no network"):
        shardtune.train(recipe(plain, name, counter(tmp_path, fails), **keys))
    shardtune.train(recipe(plain, name, counter(tmp_path), **keys))
    expected = json.loads((whole.dir / "counted.json").read_text())
    assert expected["best"] == min(line["eval/loss"] for line in lines(whole.dir) if "eval/loss" in line)
    found = counted(plain, name)
    assert found["best"] == expected["best"]
    # The checkpoint that is written because of the failure is no part of the uninterrupted run.
    assert [entry for entry in found["seen"] if entry != [fails, "checkpoint"]] == expected["seen"]


def test_a_callback_without_a_state_in_the_checkpoint_is_named(
    plain: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"runner__max_steps": 2, "runner__save_interval": 2}
    shardtune.train(recipe(plain, "further", counter(tmp_path), **keys))
    both = [*counter(tmp_path), counter(tmp_path)[0].replace("Counter", "Other")]
    capsys.readouterr()
    shardtune.train(recipe(plain, "further", both, **{**keys, "runner__max_steps": 4}))
    printed = capsys.readouterr().err
    assert "Other has no state in the checkpoint: it begins anew" in printed
    assert "Counter has no state" not in printed
    assert [step for step, what in counted(plain, "further")["seen"] if what == "step"] == [1, 2, 3, 4]


def with_state(tmp_path: Path, returned: str) -> Callbacks:
    return made(
        tmp_path,
        f"  def on_save(self, event): ...\n  def state_dict(self): return {returned}\n"
        "  def load_state_dict(self, state): self.state = state",
    )


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", ("Mine0.state_dict() returned None", "return a dict")),
        ("{'a': [1, torch.ones(2)]}", ("Mine0.state_dict()['a'][1] is a Tensor", "tensor.tolist()")),
        ("{'a': {3: 4}}", ("the key 3 of Mine0.state_dict()['a'] is no text", "str(key)")),
        ("{'a': {1, 2}}", ("['a'] is a set", "list(a_set)")),
        ("{'a': __import__('numpy').longdouble(1)}", ("['a'] is a longdouble",)),
        ("(found := {}).update(a=found) or found", ("Mine0.state_dict failed: RecursionError",)),
        ("1 / 0", ("Mine0.state_dict failed: ZeroDivisionError", "mine0.py:4")),
    ],
)
def test_a_state_that_json_would_lose_is_refused(tmp_path: Path, returned: str, said: tuple[str, ...]) -> None:
    callbacks = with_state(tmp_path, returned)
    with pytest.raises(CallbackError) as raised:
        callbacks.state()
    for part in (*said, "runner.callbacks", "mine0.py"):
        assert part in str(raised.value)
    callbacks.silence()
    assert callbacks.state() == []  # the checkpoint after a failure is written without it


def test_states_are_those_of_their_callbacks_and_bit_for_bit(tmp_path: Path) -> None:
    values = "{'a': float('inf'), 'b': 0.1 + 0.2, 'c': [None, True, 'ä'], 'd': (1, 2)}"
    stored = with_state(tmp_path, values).state()
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    callbacks = with_state(tmp_path, "self.state")
    assert callbacks.restore(stored) == []
    assert callbacks.state() == stored
    assert json.loads(stored[0]["state"])["b"] == 0.1 + 0.2


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    of = "__import__('numpy')"
    values = f"{{'a': {of}.int64(3), 'b': {of}.float32(0.1), 'c': [{of}.bool_(True), {of}.float64('nan')]}}"
    (stored,) = with_state(tmp_path, values).state()
    assert stored["state"] == f'{{"a": 3, "b": {float(np.float32(0.1))}, "c": [true, NaN]}}'


def test_classes_of_one_name_have_their_own_states(tmp_path: Path) -> None:
    body = "class Mine:\n  n = None\n  def on_save(self, event): ...\n  def state_dict(self): return {'n': self.n}\n"
    body += "  def load_state_dict(self, state): self.n = state['n'] + '!'\n"
    for name in ("one", "other", "third/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(body.replace("n = None", f"n = {name!r}"))
    both = [f"{tmp_path}/{name}.py:Mine" for name in ("one", "other", "third/other")]
    first = Callbacks(load_callbacks(both), ONE)
    first.make()
    later = Callbacks(load_callbacks(both[1:]), ONE)  # those of one name of file and class, in the recipe's order
    later.make()
    assert later.restore(first.state()) == []
    assert [entry["state"] for entry in later.state()] == ['{"n": "other!"}', '{"n": "third/other!"}']


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def state_dict(self): return {}", ("Mine has state_dict and no load_state_dict", "(self, state)")),
        ("def load_state_dict(self, s): ...", ("Mine has load_state_dict and no state_dict", "state_dict(self)")),
        (
            "def load_state_dict(self): ...\n  def state_dict(self): ...",
            ("load_state_dict takes other arguments", "load_state_dict(self, state)"),
        ),
    ],
)
@pytest.mark.parametrize("base", ["", "(shardtune.Callback)"])
def test_a_class_with_half_a_state_is_refused(tmp_path: Path, body: str, said: tuple[str, ...], base: str) -> None:
    message = refusal(tmp_path, f"class Mine{base}:\n  def on_save(self, event): ...\n  {body}")
    for part in said:
        assert part in message
