"""Steps with wrong numbers are left out, rolled back or end the run, as plain PyTorch would do it; on 1 and 2 ranks."""

from __future__ import annotations

import copy
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune import Adapter, Batch, LossSum, Sample, SFTRunner
from shardtune.checkpoint.state_file import read_state
from shardtune.config import load_recipe
from shardtune.config.schema.runner import SpikeConfig
from shardtune.errors import ConfigError, Interrupted, ModelError
from shardtune.training.anomalies import Spikes
from shardtune.training.callbacks import Evaluated, RolledBack, StepEnd, TrainEnd
from shardtune.training.worker import base
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, whole
from tests.training.worker import test_base as own

ROWS, GLOBAL, MICRO, EVERY = 141, 8, 2, 4
SPIKE: dict[str, Any] = {"warmup_steps": 3, "window": 6}
BAD = {53: "spike", 66: "nan", 79: "inf", 121: "spike"}
"""Rows of the steps 6, 8, 9 and 15: after a rollback for step 8, step 9 is in vain gone on with."""
RATE = 0.02
WATCHED = {"eval_interval": 2, "early_stop": {"enabled": True, "patience": 100}}


class Line(Adapter):
    """A squared error; a row of "inf" adds infinity without a gradient of its own."""

    def build(self) -> nn.Module:
        return nn.Linear(2, 1)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={name: np.array(row[name], np.float64) for name in ("x", "y")})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(squared(model, batch["x"], batch["y"]), float(len(batch["y"])))


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    finite = torch.where(torch.isinf(y), 0.0, y)
    return (model(x)[:, 0] - finite).square().sum() + torch.where(torch.isinf(y), torch.inf, 0.0).sum()


def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    values = {"spike": 1e4, "nan": math.nan, "inf": math.inf}
    x = draw.normal(size=(ROWS, 2)).tolist()
    return [{"x": x[n], "y": values[BAD[n]] if n in BAD else 3 + float(draw.normal())} for n in range(ROWS)]


def recipe(folder: Path, name: str, **runner: Any) -> dict[str, Any]:
    logger = {"log_path": str(folder), "experiment_name": name, "logger_backends": ["jsonl"]}
    return {
        "actor": {
            "model": {"adapter": f"{__file__}:Line", "from_scratch": True, "precision": "fp64"},
            "optim": {"lr": RATE, "lr_scheduler": "linear", "weight_decay": 0.0, "clip_grad": None},
            "micro_batch_size": MICRO,
            "global_batch_size": GLOBAL,
        },
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "eval_data_paths": str(folder / "eval.jsonl"),
            "cache_dir": str(folder / "cache"),
            "shuffle": False,
            "num_workers": 0,
        },
        "runner": {"device": "cpu", "max_epochs": 1, "save_interval": EVERY, "logger": logger, **WATCHED, **runner},
    }


class Counted:
    """A callback that counts steps and evaluations, and forgets those that are undone."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluated: list[int] = []
        self.undone: list[tuple[int, int, str]] = []

    def on_step_end(self, event: StepEnd) -> None:
        if event.updated:
            self.steps.append(event.step)

    def on_evaluate(self, event: Evaluated) -> None:
        self.evaluated.append(event.step)

    def on_rollback(self, event: RolledBack) -> None:
        self.undone.append((event.step, event.undone, event.checkpoint.name))
        self.steps = [step for step in self.steps if step <= event.step]
        self.evaluated = [step for step in self.evaluated if step <= event.step]

    def on_train_end(self, event: TrainEnd) -> None:
        (event.run_dir / "counted.json").write_text(json.dumps([self.steps, self.evaluated, self.undone]))


class Kept:
    """A callback that counts steps, and leaves it to its state to forget those that are undone."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_step_end(self, event: StepEnd) -> None:
        if event.updated:
            self.steps.append(event.step)

    def on_train_end(self, event: TrainEnd) -> None:
        (event.run_dir / "kept.json").write_text(json.dumps(self.steps))


class Killed(Exception):
    """The end of a process."""


def train(
    given: dict[str, Any], kill: int = 0, make: Callable[..., FSDPSftWorker] = SFTWorker, spoil: int = 0
) -> dict[str, Any]:
    """Train from the newest checkpoint, if there is one.

    Args:
        given: the recipe.
        kill: the number of the step instead of which the run is killed, from 1 on.
        make: makes the worker.
        spoil: the number of the step after which weights are infinite.
    """
    cfg = load_recipe(given)
    worker = make(cfg, report=quiet) if make is SFTWorker else make(cfg)
    told = Told()
    folder = Path(cfg.runner.logger.log_path) / str(cfg.runner.logger.experiment_name)
    runner = SFTRunner(cfg, worker, run_dir=folder, observer=told)
    found = runner.store.newest_first()
    runner._resume_from, runner._older = (found[0], found[1:]) if found else (None, ())
    runner.prepare()
    result: dict[str, Any] = {"initial": numbers(worker), "ended": ""}
    compute, left = runner._run_training, [kill]

    def step() -> dict[str, float]:
        left[0] -= 1
        if not left[0]:
            raise Killed
        metrics = compute()
        if left[0] == kill - spoil and spoil:
            next(iter(worker.weights.parameters.values())).data.fill_(math.inf)
        return metrics

    runner._run_training = step
    try:
        runner.run()
    except (Killed, ModelError) as error:
        result["ended"] = str(error)
    result |= {"weights": numbers(worker), "step": worker.step, "at": worker.data_state, "told": told.lines}
    result["moments"] = {
        f"{name}.{key}": whole(value)
        for name, parameter in worker.weights.trainable().items()
        for key, value in worker.optimizer.state[parameter].items()
    }
    result["lines"] = lines(folder) if worker.ranks.is_main else []
    result["early"] = [read_state(checkpoint)["early"] for checkpoint in runner.store.newest_first()[:1]]
    worker.ranks.barrier()
    worker.release()
    return result


class Told:
    """Keeps what a run reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, step: int, total_steps: int) -> None: ...
    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def finished(self) -> None: ...
    def log(self, text: str) -> None:
        self.lines.append(text)


def numbers(worker: FSDPSftWorker) -> dict[str, torch.Tensor]:
    return {name: whole(tensor.detach()).clone() for name, tensor in worker.weights.tensors().items()}


def lines(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics, without those of speed."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in logged]


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] in names]


def plain(initial: Mapping[str, torch.Tensor], action: str) -> tuple[list[tuple[int, float, float]], Any]:
    """The same by PyTorch alone: (step, loss, norm) of the updates that count, and the weights."""
    model = nn.Linear(2, 1).double()
    model.load_state_dict(dict(initial))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    horizon = -(-ROWS // GLOBAL)
    seen: deque[tuple[float, float, int]] = deque(maxlen=SPIKE["window"])
    done: list[tuple[int, float, float]] = []
    kept: dict[int, Any] = {}
    returned = -1
    for start in range(0, ROWS, GLOBAL):
        if len(done) % EVERY == 0 and len(done) != returned:
            kept[len(done)] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), seen, done))
        step = rows()[start : start + GLOBAL]
        x, y = (torch.tensor([row[name] for row in step], dtype=torch.float64) for name in ("x", "y"))
        optimizer.param_groups[0]["lr"] = RATE * (1 - len(done) / horizon)  # a step left out does not count
        optimizer.zero_grad()
        loss = squared(model, x, y) / len(step)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        values = loss.item(), norm.item()
        if all(map(math.isfinite, values)) and not is_spike(values, len(step), seen):
            optimizer.step()
            seen.append((*values, len(step)))
            done.append((len(done) + 1, *values))
        elif action == "rollback":
            steps = sorted(number for number in kept if number <= len(done))
            in_vain = returned == len(done) == steps[-1]
            returned = steps[-2] if in_vain else steps[-1]
            weights, moments, seen, done = copy.deepcopy(kept[returned])
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            kept = {number: one for number, one in kept.items() if number <= returned}
    return done, model.state_dict()


def is_spike(values: tuple[float, float], targets: int, seen: deque[tuple[float, float, int]]) -> bool:
    if len(seen) < SPIKE["warmup_steps"]:
        return False
    last = np.array(seen)
    ratio = math.sqrt(max(1.0, float(np.median(last[:, 2])) / targets))
    for value, column in zip(values, last.T[:2], strict=True):
        median = float(np.median(column))
        spread = max(1.4826 * float(np.median(abs(column - median))), 0.01 * median)
        if value > median * ratio + ratio * 10 * spread:
            return True
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("anomalies")
    text = [json.dumps(row) + "\n" for row in rows()]
    (made / "rows.jsonl").write_text("".join(text))
    (made / "eval.jsonl").write_text("".join(text[:5]))
    return made


ON = {action: {"on_nonfinite": action, "on_spike": action, "spike": SPIKE} for action in ("skip", "rollback")}


def both(folder: Path, name: str, kills: tuple[int, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """Of each action: the uninterrupted run, and those killed before some of their steps and continued."""
    told = {}
    for action, keys in ON.items():
        told[action] = [train(recipe(folder, f"{action}-{name}", **keys))]
        for kill in kills:
            given = recipe(folder, f"{action}-{name}-{kill}", **keys)
            train(given, kill)
            told[action].append(train(given))
    return told


def on_ranks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same, and runs that are killed and not continued."""
    told = both(folder, "2")
    for action, keys in ON.items():
        train(recipe(folder, f"{action}-2-11", **keys, callbacks=[f"{__file__}:Kept"]), 11)
    return told


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[dict[str, Any]]]:
    told = both(folder, "1", (8, 11, 17))
    counted = [f"{__file__}:Counted"]
    told["rollback"].append(
        train(recipe(folder, "rollback-async", **ON["rollback"], async_save=True, callbacks=counted))
    )
    return told


def test_a_callback_that_counts_can_forget_what_is_undone(
    folder: Path, alone: Mapping[str, list[dict[str, Any]]]
) -> None:
    steps, evaluated, undone = json.loads((folder / "rollback-async" / "counted.json").read_text())
    logged = alone["rollback"][-1]["lines"]
    assert steps == [line["step"] for line in logged]
    assert evaluated == [line["step"] for line in logged if "eval/loss" in line]
    happened = events(folder / "rollback-async", "rollback")
    assert [step for step, _, _ in undone] == [event["step"] for event in happened]
    assert undone[0] == [4, 2, "global_step_4"]


@pytest.mark.lengthy
def test_what_is_left_equals_a_plain_loop_that_leaves_out_or_goes_back(
    folder: Path, alone: Mapping[str, list[dict[str, Any]]]
) -> None:
    ranks = run_ranks(on_ranks, 2, folder)
    for action, steps in (("skip", 14), ("rollback", 6)):
        wanted, weights = plain(alone[action][0]["initial"], action)
        assert len(wanted) == steps, "the plain loop meets every anomaly"
        continued = train(recipe(folder, f"{action}-2-11", **ON[action], callbacks=[f"{__file__}:Kept"]))
        kept = json.loads((folder / f"{action}-2-11" / "kept.json").read_text())
        assert kept == [line["step"] for line in continued["lines"]], "a callback's state is that of the checkpoint"
        for run in (*alone[action], *ranks[0][action], continued):
            found = [(line["step"], line["train/loss"], line["train/grad_norm"]) for line in run["lines"]]
            np.testing.assert_allclose(found, wanted, rtol=1e-10)
            for name, weight in weights.items():
                torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=1e-10)
        assert ranks[1][action][0]["step"] == steps
        last = alone[action][0]["lines"][-1]
        assert (last["train/skipped_steps"], last["train/spikes"]) == (4, 2)
        assert last.get("train/rollbacks") == (4 if action == "rollback" else None)


def test_a_killed_run_takes_the_same_decisions_bitwise(alone: Mapping[str, list[dict[str, Any]]]) -> None:
    for action, (whole_run, *killed) in alone.items():
        for run in killed:
            assert run["lines"] == whole_run["lines"], action
            for fact in ("step", "at", "early"):
                assert run[fact] == whole_run[fact], fact
            for part in ("weights", "moments"):
                for name, tensor in whole_run[part].items():
                    assert torch.equal(run[part][name], tensor), (action, name)


def test_the_rows_the_values_and_a_command_are_named(folder: Path, alone: Mapping[str, list[dict[str, Any]]]) -> None:
    told, run = alone["rollback"][0]["told"], folder / "rollback-1"
    spike = next(line for line in told if "spike" in line)
    assert spike.startswith("after step 6: the loss was a spike: ")
    assert f"; highest: {folder / 'rows.jsonl'}:54 (loss " in spike
    assert f"shardtune replay {run} --step 5 --rows names the rows that are left out" in told
    assert any(
        line.startswith(f"rolled back by 2 steps: continuing after step 4 ({run}/checkpoints/global_step_4)")
        for line in told
    )
    assert any("the gradient was not finite for" in line and "rows.jsonl:67;" in line for line in told)
    assert told[-1].endswith("; 4 steps left out (not finite: 2, spikes: 2), with 4 rollbacks")
    happened = events(run, "anomaly", "rollback")
    assert [event["event"] for event in happened] == ["anomaly", "rollback"] * 4
    assert [event["step"] for event in happened] == [6, 4, 5, 4, 4, 0, 5, 4]
    kinds = [(event["kind"], event["epoch"], event["rows_consumed"]) for event in happened[::2]]
    assert kinds == [("spike", 0, 48), ("nonfinite", 0, 64), ("nonfinite", 0, 72), ("spike", 0, 120)]
    assert happened[4]["loss"] == "inf"
    for kill in (8, 11, 17):
        again = [event["rows_consumed"] for event in events(folder / f"rollback-1-{kill}", "anomaly")]
        assert again == [rows for _, _, rows in kinds], "what was rolled back is not computed again after the kill"


def test_stop_saves_and_the_same_command_goes_on_after_the_rows(
    folder: Path, alone: Mapping[str, list[dict[str, Any]]]
) -> None:
    given = recipe(folder, "stop", on_nonfinite="stop", on_spike="stop", spike=SPIKE)
    ended = [train(given) for _ in range(5)]
    problems = [run["ended"].partition("\n")[0] for run in ended]
    assert [problem.rpartition("(")[2] for problem in problems[:4]] == [
        f"runner.on_{kind}: stop)" for kind in ("spike", "nonfinite", "nonfinite", "spike")
    ]
    assert (
        f"--step 7 computes the step again; the same command goes on after these rows, from {folder}"
        in ended[0]["ended"]
    )
    assert ended[4]["ended"] == ""
    assert torch.equal(ended[4]["weights"]["weight"], alone["skip"][0]["weights"]["weight"])


def test_a_run_that_stops_at_its_first_step_goes_on_after_it(folder: Path) -> None:
    text = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "first.jsonl").write_text("".join([text[66], *text[:15]]))
    given = recipe(folder, "first", on_nonfinite="stop")
    given["data"]["train_data_paths"] = str(folder / "first.jsonl")
    assert "first.jsonl:1\n" in train(given)["ended"]
    again = train(given)
    assert (again["ended"], again["step"]) == ("", 1)


def test_too_many_end_the_run(folder: Path) -> None:
    given = recipe(folder, "budget", **ON["rollback"], max_anomalies=3)
    ended = train(given)["ended"]
    assert ended.startswith("too many steps had wrong numbers; of the last one the loss was a spike: ")
    assert "(runner.max_anomalies)" in ended
    assert f"the same command continues from {folder / 'budget' / 'checkpoints' / 'global_step_4'}; lower" in ended
    assert train(given)["ended"] == ended, "the same command comes to the same end"
    few = recipe(folder, "few", **ON["skip"], max_anomalies=1, anomaly_window=2)
    first = train(few)
    assert "after step 7, the rows" in first["ended"], "the steps 8 and 9 of the data are in one window"
    assert train(few)["step"] == 14, "7 of the 18 steps, and after the end the others but step 15"


def test_weights_that_are_not_finite_are_rolled_back_when_they_are_to_be_saved(folder: Path) -> None:
    run = train(recipe(folder, "weights", on_nonfinite="rollback"), spoil=EVERY)
    happened = events(folder / "weights", "anomaly", "rollback")[:2]
    assert [(event["event"], event["step"]) for event in happened] == [("anomaly", EVERY), ("rollback", 0)]
    assert happened[0]["reason"].startswith("the weights are not finite after step 4: weight holds infinite values")
    assert run["ended"] == ""
    assert all(bool(weight.isfinite().all()) for weight in run["weights"].values())
    ended = train(recipe(folder, "weights-skip"), spoil=EVERY)["ended"]
    assert ended.startswith("the weights are not finite after step 4")


class StoppedInEvaluation(SFTWorker):
    """The run is stopped in the evaluation after step 6, at which no checkpoint is due."""

    def get_eval_model_output(self, batch: Any) -> Any:
        runner = self.context.poll.__self__
        if self.step == 6 and runner._resume_from is None:
            runner._stop.request()
        return super().get_eval_model_output(batch)


def test_rolled_back_to_where_it_was_stopped_in_an_evaluation_a_step_is_logged_and_counted_once(folder: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for number, row in enumerate(rows()) if number not in (79, 121))
    (folder / "one.jsonl").write_text(text)
    given = recipe(folder, "in-evaluation", on_nonfinite="rollback", save_interval=-1)
    given["data"]["train_data_paths"] = str(folder / "one.jsonl")

    def make(cfg: Any) -> FSDPSftWorker:
        return StoppedInEvaluation(cfg, report=quiet)

    with pytest.raises(Interrupted):
        train(given, make=make)
    run = train(given, make=make)
    happened = [event["step"] for event in events(folder / "in-evaluation", "rollback")]
    assert happened == [6]
    assert [line["step"] for line in run["lines"]] == list(range(1, run["step"] + 1))
    again = copy.deepcopy(given)
    again["runner"] |= {"save_interval": 6, "logger": {**given["runner"]["logger"], "experiment_name": "evaluated"}}
    plain = train(again)
    assert (run["lines"], run["early"]) == (plain["lines"], plain["early"])


def test_by_default_spikes_train_and_a_step_that_is_not_finite_is_passed_over(folder: Path) -> None:
    run = train(recipe(folder, "default"))
    assert (run["step"], run["ended"]) == (16, "")
    assert not (folder / "default" / "checkpoints" / "global_step_0").exists()


def judged(values: list[float], value: float, targets: float = 8.0, **keys: Any) -> str:
    spikes = Spikes(SpikeConfig(warmup_steps=3, watch=["loss"], **keys))
    for one in values:
        spikes.accept(one, 1.0, 8.0)
    return spikes.judge(value, 1.0, targets)


@pytest.mark.lengthy
def test_a_long_search_for_rows_is_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins, with how long it may take; the parts of a quick step are computed in no time."""
    said: list[str] = []
    settings = recipe(folder, "announced", on_spike="skip", spike=SPIKE, save_interval=-1, eval_interval=-1)
    settings["runner"].pop("early_stop")
    for limit in (10.0, 0.0):
        monkeypatch.setattr(base, "LONG_STEP", limit)
        worker = SFTWorker(load_recipe(settings), report=said.append)
        worker.setup()
        heard = len(said)
        for _ in range(10):
            worker.run_training()
        worker.release()
        told = [line for line in said[heard:] if "those at fault" in line]
        wanted = ["after step 6: a spike", *2 * ["after step 7: a loss or gradient that is not finite"]]
        assert [line.partition(": computing")[0] for line in told] == (wanted if limit == 0.0 else [])


def test_a_spike_is_far_above_the_median() -> None:
    values = [2.0, 2.2, 1.8, 2.1, 1.9]  # median 2, spread 1.4826 * 0.1
    assert judged(values, 3.4) == ""
    assert judged(values, 3.5).startswith("the loss was a spike: 3.5, above 3.4826 (median 2, spread 0.148 over the ")
    assert judged(values, 3.5, targets=2.0) == "", "a quarter of the targets varies twice as much"
    assert judged(values, -50.0) == ""
    assert judged(values, 2.5, factor=3.0) != ""
    assert judged(values[:2], 1e9) == "", "warm-up"
    assert judged([2.0] * 4, 2.1) == ""
    assert judged([2.0] * 4, 2.3) != ""
    assert judged([0.0] * 4, 0.5) == "", "there is no scale to measure it by"
    spikes = Spikes(SpikeConfig(window=20))
    for _ in range(1000):
        spikes.accept(1.0, 1.0, 8.0)
    assert len(json.dumps(spikes.state())) < 500


class OwnLoader(own.Task):
    """Batches of a loader of the user's, which keeps no state; one row is far off."""

    form = "terms"

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        made: Any = own.data()
        if not eval_dataset:
            made[13]["value"] = torch.tensor(1e6, dtype=torch.float64)
        return DataLoader(made, batch_size=own.MICRO), {"num_samples": own.ROWS}


def test_of_a_loader_of_the_users_the_batches_are_left_out(tmp_path: Path) -> None:
    """Steps 1 and 4 of two epochs of three hold the row; a rollback goes to step 0, then to step 2."""
    spike = {"warmup_steps": 1, "factor": 1000}
    skipped, back, killed = (
        own.recipe(str(tmp_path), max_epochs=2, save_interval=2, on_spike=action, spike=spike).to_dict()
        for action in ("skip", "rollback", "rollback")
    )
    for number, given in enumerate((skipped, back, killed)):
        given["runner"]["logger"] |= {"experiment_name": f"own-{number}", "logger_backends": ["jsonl"]}
    left, gone_back = train(skipped, make=OwnLoader), train(back, make=OwnLoader)
    assert (left["step"], gone_back["step"]) == (4, 3)
    named = "highest: micro-batch 3 of rank 0 among those after 8 of epoch 0 (loss "
    assert any(named in line for line in left["told"])
    train(killed, kill=4, make=OwnLoader)
    again = train(killed, make=OwnLoader)
    assert again["lines"] == gone_back["lines"]
    assert torch.equal(again["weights"]["head.weight"], gone_back["weights"]["head.weight"])


class Updating(own.Task):
    def run_training(self) -> dict[str, float]:
        loss = self.get_train_model_output(next(iter(self.data_iter)))
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}


def test_a_worker_that_updates_weights_itself_is_refused_before_it_does(tmp_path: Path) -> None:
    cfg = own.recipe(str(tmp_path), on_spike="skip")
    worker = Updating(cfg)
    runner = SFTRunner(cfg, worker, run_dir=tmp_path / "own")
    runner.prepare()
    before = numbers(worker)
    with pytest.raises(ConfigError, match=r"runner.on_spike: skip has no effect: Updating.run_training updates"):
        runner.run()
    assert all(torch.equal(value, before[name]) for name, value in numbers(worker).items())
