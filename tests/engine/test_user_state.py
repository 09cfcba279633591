"""What a user's class keeps on its module, sends and is interrupted in; heads that no file holds."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Model

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.engine import checkpoint
from shardtune.errors import CheckpointError, ModelError, ParallelError
from tests.support.engine_modules import SAMPLES
from tests.support.peft_versions import adds_adapters

# -- Attributes --------------------------------------------------------------------------------------------------------


class Keeping(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Counts, averages its weights and lists its losses."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.seen = 0

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedules = [torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)]
        self.ema = {name: p.detach().clone() for name, p in self.named_parameters()}
        self._history: list[tuple[int, float]] = []
        self.lock = threading.Lock()

    def step(self, rows: list[list[int]]) -> float:
        loss = self.mean_over_ranks(self(torch.tensor(rows)).logits.logsumexp(-1).sum(), len(rows))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedules[0].step()
        for name, parameter in self.named_parameters():
            self.ema[name].lerp_(parameter.detach(), 0.5)
        self.seen += 4
        self._history.append((self.seen, loss.item()))
        self.last = torch.tensor([loss.item()])
        self.where = self.ranks.rank
        return loss.item()

    def kept(self) -> tuple[int, list[tuple[int, float]], torch.Tensor, float, float]:
        rate = self.optimizer.param_groups[0]["lr"]
        averages = sum(float((e.full_tensor() if self.ranks.mesh is not None else e).sum()) for e in self.ema.values())
        return self.seen, self._history, self.last, rate, averages

    def forget_average(self) -> None:
        del self.ema

    def unsendable(self, given: Any = None) -> Any:
        return threading.Lock()


@pytest.fixture
def keeping(model: Path) -> Any:
    with shardtune.init_empty_weights():
        return Keeping.from_pretrained(model)


def test_attributes_are_saved_and_loaded_in_any_layout(keeping, two_ranks: TrainEngine, tmp_path: Path, caplog):
    alone = TrainEngine(keeping).build()
    for _ in range(2):
        alone.step(SAMPLES[:4])
    with caplog.at_level(logging.WARNING):
        alone.save(tmp_path / "state")
        alone.save(tmp_path / "again")
    assert caplog.text.count("engine.save() leaves out self.lock (a lock)") == 1
    wanted = alone.kept()[0]
    with TrainEngine(keeping).build(colocate_with=two_ranks, take_turns=False) as engine:
        engine.load(tmp_path / "state")
        for found in engine.kept():
            assert found[:2] == wanted[:2]
            assert torch.equal(found[2], wanted[2])
            assert found[3:] == pytest.approx(wanted[3:], abs=1e-10)
        after = engine.step(NeedParallel(SAMPLES[:4]))[0]
        engine.save(tmp_path / "two")
        again = engine.kept()[0]
    assert after == pytest.approx(alone.step(SAMPLES[:4])[0], abs=1e-10)
    alone.step(SAMPLES[:4])
    alone.load(tmp_path / "two")
    assert alone.kept()[0][:2] == again[:2]
    assert alone.kept()[0][3:] == pytest.approx(again[3:], abs=1e-10)


class Counting(torch.nn.Linear):
    """Keeps a number as torch's extra state."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Scheduled(nn.Fsdp2TrainModule):
    """Has schedules beside optimizers and by themselves, and state that is changed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Counting(2, 2)
        self.center = torch.zeros(2)
        self.meter = {"best": torch.zeros(())}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2], 0.1)
        other = torch.optim.SGD(self.parameters(), lr=1.0)
        self.all: dict[str, Any] = {"optimizer": other, "epoch": 0}
        self.all["schedule"] = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
        self.scale = torch.zeros((), requires_grad=True)

    def step(self) -> list[Any]:
        for optimizer, schedule in ((self.optimizer, self.schedule), (self.all["optimizer"], self.all["schedule"])):
            optimizer.step()
            schedule.step()
        self.all["epoch"] += 1
        self.layer.seen += 1
        self.center += 1
        self.meter["best"] += 1
        self.scale.data += 1
        rates = [self.optimizer.param_groups[0]["lr"], self.all["schedule"].get_last_lr()[0]]
        counts = [self.all["epoch"], self.layer.seen, self.center, self.meter["best"], self.scale.detach()]
        return [*rates, *map(float, (torch.as_tensor(count).max() for count in counts)), self.scale.requires_grad]


def test_schedules_and_what_is_changed_in_its_place_go_on(tmp_path: Path, caplog):
    one = TrainEngine(Scheduled()).build()
    one.step()
    one.save(tmp_path)
    other = TrainEngine(Scheduled()).build()
    other.load(tmp_path)
    assert other.step() == one.step() == [[pytest.approx(0.1), 0.25, *[2.0] * 5, True]]
    assert "leaves out" not in caplog.text


class Unscheduled(Scheduled):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.all = {"optimizer": torch.optim.SGD(self.parameters(), lr=1.0)}


class Averaging(Unscheduled):
    """Has frozen weights that a method changes, as a target network's."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Linear(2, 2).requires_grad_(False)

    def average(self) -> None:
        self.target.weight.data.lerp_(self.layer.weight, 0.5)


def test_frozen_weights_that_a_method_has_changed_are_saved(tmp_path: Path):
    made = Averaging()
    one, other = TrainEngine(made).build(), TrainEngine(made).build()
    one.save(tmp_path / "first")
    one.average()
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    wanted, found = dict(one.named_tensors()), dict(other.named_tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert not torch.equal(found["target.weight"], made.target.weight)
    with pytest.raises(CheckpointError, match=r"1 not in it: target.weight"):  # where it would stay as it is now
        one.load(tmp_path / "first")


def test_a_state_with_other_schedules_is_refused(tmp_path: Path):
    one, other = TrainEngine(Scheduled()).build(), TrainEngine(Unscheduled()).build()
    one.save(tmp_path / "with")
    other.save(tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"the schedules \['schedule'\], the module \[\]"):
        other.load(tmp_path / "with")
    with pytest.raises(CheckpointError, match=r"the schedules \[\], the module \['schedule'\]"):
        one.load(tmp_path / "without")


class OfOtherClasses(Scheduled):
    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.5)


class OfAnotherSchedule(Scheduled):
    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)


def test_a_state_of_other_classes_is_refused(tmp_path: Path):
    TrainEngine(Scheduled()).build().save(tmp_path)
    other = TrainEngine(OfOtherClasses()).build()
    with pytest.raises(CheckpointError, match=r"self\.optimizer was of the class SGD and is of Adam"):
        other.load(tmp_path)
    assert other.step()[0][0] == 0.5  # as its class has made it
    with pytest.raises(CheckpointError, match=r"self\.schedule was of the class MultiStepLR and is of ExponentialLR"):
        TrainEngine(OfAnotherSchedule()).build().load(tmp_path)
    described = json.loads((tmp_path / "engine.json").read_text())
    del described["classes"]  # as earlier versions wrote it
    (tmp_path / "engine.json").write_text(json.dumps(described))
    TrainEngine(Scheduled()).build().load(tmp_path)


class Phases(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Trains its layers, then freezes them; later also what was frozen at first."""

    def on_weights_materialized(self) -> None:
        self.model.norm.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def step(self, rows: list[list[int]]) -> None:
        self(torch.tensor(rows)).logits.logsumexp(-1).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, layers: bool, norm: bool) -> None:
        self.model.layers.requires_grad_(layers)
        self.model.norm.requires_grad_(norm)


def test_what_is_frozen_later_is_saved(model: Path, two_ranks: TrainEngine, tmp_path: Path) -> None:
    with shardtune.init_empty_weights():
        made = Phases.from_pretrained(model)
    with TrainEngine(made).build(colocate_with=two_ranks, take_turns=False) as engine:
        begun = dict(engine.named_tensors())
        engine.step(NeedParallel(SAMPLES[:4]))
        engine.turn(False, True)
        engine.step(NeedParallel(SAMPLES[:4]))
        engine.turn(False, False)
        engine.save(tmp_path / "state")
        engine.step(NeedParallel(SAMPLES[:4]))  # changes the embeddings alone
        engine.load(tmp_path / "state")
        wanted = dict(engine.named_tensors())
    assert [name for name, tensor in wanted.items() if torch.equal(tensor, begun[name])] == []
    alone = TrainEngine(made).build()
    alone.load(tmp_path / "state")
    found = dict(alone.named_tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


# -- Values that cannot travel -----------------------------------------------------------------------------------------


def test_values_that_cannot_be_pickled_name_method_and_rank(keeping, two_ranks: TrainEngine):
    alone = TrainEngine(keeping).build()
    ranks = TrainEngine(keeping).build(colocate_with=two_ranks, take_turns=False)
    for engine in (alone, ranks):
        with pytest.raises(ParallelError, match=r"the argument given cannot be sent .*\n.*Keeping\.unsendable"):
            engine.unsendable(threading.Lock())
        with pytest.raises(ParallelError, match=r"its value on rank 0 cannot be sent.*\n.*Keeping\.unsendable"):
            engine.unsendable(given=[torch.zeros(2), {"a": {1, 2}}])
        assert engine.step(SAMPLES[:4])
    ranks.close()


# -- New heads ---------------------------------------------------------------------------------------------------------


class Reward(nn.HuggingFaceFsdp2TrainModule, Qwen2ForSequenceClassification):
    def on_weights_materialized(self) -> None:
        """Trained."""


class Actor(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.v_head = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 1))


class Body(nn.HuggingFaceFsdp2TrainModule, Qwen2Model):
    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.value = torch.nn.Linear(32, 1, bias=False)


def begun(kind: Any, model: Path, ranks: TrainEngine | None, **sizes: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    with shardtune.init_empty_weights():
        module = kind.from_pretrained(model)
    given: dict[str, Any] = {"colocate_with": ranks, "take_turns": False, **sizes} if ranks else {}
    with TrainEngine(module).build(**given) as engine:
        return dict(engine.named_tensors()), engine.notes


@pytest.mark.parametrize(
    ("kind", "new"), [(Reward, "score.weight"), (Actor, "v_head.0.weight"), (Body, "value.weight")]
)
def test_a_new_head_is_initialised_alike_in_all_layouts(model: Path, two_ranks: TrainEngine, kind: Any, new: str):
    alone, notes = begun(kind, model, None)
    assert 0.01 < float(alone[new].std()) < 0.03  # the config's initializer_range
    assert [note for note in notes if new in note and "not in" in note]
    for sizes in ({}, {"tensor_parallel_size": 2}) if kind is Reward else ({},):
        found, _ = begun(kind, model, two_ranks, **sizes)
        assert all(torch.equal(found[name], alone[name]) for name in alone)


class Adapted(nn.LoraTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.v_head = torch.nn.Linear(32, 1)


@adds_adapters
def test_a_head_beside_an_adapter_is_named_where_it_is_left_out(model: Path, tmp_path: Path, caplog):
    with shardtune.init_empty_weights():
        module: Any = Adapted.from_pretrained(model)
        module.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    engine = TrainEngine(module).build()
    with caplog.at_level(logging.WARNING):
        engine.save_pretrained(tmp_path)
    assert "leaves out v_head.bias, v_head.weight" in caplog.text
    assert "v_head.weight" in dict(engine.named_tensors())


def test_foreign_and_incomplete_weights_are_refused_still(model: Path, tmp_path: Path):
    config = Qwen2Config.from_pretrained(model)
    made = Qwen2ForCausalLM(config)
    del made.lm_head
    made.all_tied_weights_keys = {}
    made.save_pretrained(tmp_path / "incomplete")
    torch.nn.Module.register_module(made.model, "blocks", made.model.layers)
    del made.model.layers
    made.save_pretrained(tmp_path / "foreign")
    for kind, folder in ((Actor, "incomplete"), (Reward, "foreign"), (Body, "foreign")):
        with pytest.raises(ModelError, match="are not among the weights"):
            begun(kind, tmp_path / folder, None)


def test_a_state_without_a_place_is_refused(keeping, two_ranks: TrainEngine, tmp_path: Path):
    with TrainEngine(keeping).build(colocate_with=two_ranks, take_turns=False) as engine:
        engine.save(tmp_path)
        engine.forget_average()
        with pytest.raises(CheckpointError, match=r"self.ema was saved with a sharded tensor"):
            engine.load(tmp_path)


class Stepping(nn.Fsdp2TrainModule):
    """One layer, the steps of which are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def on_weights_materialized(self) -> None:
        self.optimizer, self.seen = torch.optim.AdamW(self.parameters(), lr=0.1), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def step(self) -> None:
        self(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.seen += 1

    def state(self) -> tuple[torch.Tensor, float, float]:
        steps = self.optimizer.state[self.layer.weight]["step"]
        return self.layer.weight.detach().clone(), float(steps), float(self.seen)


class Copying(Stepping):
    """Keeps copies of its weights beside them."""

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.average = [parameter.detach().clone() for parameter in self.parameters()]


def test_copies_of_weights_that_were_saved_whole_are_not_put_in_the_place_of_fsdp1s_parts(
    two_ranks: TrainEngine, tmp_path: Path
) -> None:
    with TrainEngine(Copying()).build() as engine:
        engine.step()
        engine.save(tmp_path)
    with (
        TrainEngine(Copying(), executor="fsdp1").build(colocate_with=two_ranks) as engine,
        pytest.raises(CheckpointError, match=r"(?s)average was saved as a whole, \[2, 2\], .*fsdp1 divides .*fsdp2"),
    ):
        engine.load(tmp_path)


@pytest.mark.parametrize("at", ["save_tensors", "sync_tree"])
def test_a_save_that_is_interrupted_leaves_the_one_before(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TrainEngine(Stepping()).build()
    engine.step()
    engine.save(tmp_path)
    (wanted,) = engine.state()
    original, calls = getattr(checkpoint, at), []

    def interrupted(*given: Any) -> None:
        if calls or at == "sync_tree":
            raise KeyboardInterrupt
        calls.append(original(*given))

    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save(tmp_path)
    engine.load(tmp_path)
    (found,) = engine.state()
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:] == (1.0, 1.0)
    for steps in (2.0, 3.0):
        engine.step()
        engine.save(tmp_path)
        assert engine.state()[0][1] == steps
        assert len([*tmp_path.iterdir()]) == 2


def test_a_state_of_an_earlier_version_is_loaded_and_replaced(tmp_path: Path) -> None:
    engine = TrainEngine(Stepping()).build()
    engine.step()
    engine.save(tmp_path)
    file = tmp_path / "engine.json"
    described = json.loads(file.read_text())
    for folder in (tmp_path / described.pop("part")).iterdir():
        folder.rename(tmp_path / folder.name)
    (tmp_path / "a").rmdir()
    file.write_text(json.dumps(described))
    (wanted,) = engine.state()
    engine.step()
    engine.load(tmp_path)
    assert torch.equal(engine.state()[0][0], wanted[0])
    engine.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "engine.json"]
