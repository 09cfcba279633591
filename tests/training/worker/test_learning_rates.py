"""Learning rates that a worker's own code sets are used by a step, or refused; none is overwritten in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardtune.config import Recipe, load_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.training.worker.reported import training_method
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole
from tests.training.worker import test_freezing as own

pytestmark = pytest.mark.lengthy

RATES = [0.3 / (1 + step) for step in range(own.STEPS)]


class InSetup(own.Plain):
    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.03


class BeforeSuper(own.Plain):
    def run_training(self) -> dict[str, float]:
        if self.step == 2:
            self.optimizer.param_groups[0]["lr"] = torch.tensor(0.03)
        return super().run_training()


class InEvaluation(own.Plain):
    """Between steps, without a run_training of its own."""

    def get_eval_model_output(self, batch: Any) -> Any:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        return super().get_eval_model_output(batch)


class Scheduled(own.Plain):
    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def run_training(self) -> dict[str, float]:
        found = super().run_training()
        self.schedule.step()
        return found


class ScheduledByAHook(own.Plain):
    """After each step, where the run sets its own rate before the next."""

    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.optimizer.register_step_post_hook(lambda *_: schedule.step())


class ScheduledLoop(own.Plain):
    """The rate is changed after the step of its own loop, and would be overwritten before the next one."""

    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def run_training(self) -> dict[str, float]:
        found = one_step(self)
        self.schedule.step()
        return found


class BeforeEachStep(own.Plain):
    """What the message names: a hook that runs before each step."""

    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.optimizer.register_step_pre_hook(self.set_rate)

    def set_rate(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = RATES[self.step]


class OwnLoop(own.Plain):
    """Sets the rate before its own call of the optimizer, as the documentation has it."""

    def run_training(self) -> dict[str, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = RATES[self.step]
        return one_step(self)

    def load_checkpoint(self, path: str | Path) -> int:
        """As of a file of its own beside the checkpoint: torch's method replaces the groups."""
        found = super().load_checkpoint(path)
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        return found


def one_step(worker: Any) -> dict[str, float]:
    batches = own.GLOBAL // own.MICRO // worker.ranks.world_size
    for _ in range(batches):
        (worker.get_train_model_output(next(worker.data_iter)) * (own.MICRO / own.GLOBAL)).backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad()
    return {}


class TwoOptimizers(own.Plain):
    """The head and a scalar, which ranks hold whole, have an optimizer of their own."""

    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.others = [
            parameter for name, parameter in self.model.named_parameters() if "head" in name or "scale" in name
        ]
        self.second = torch.optim.SGD(self.others, 0.02)

    def run_training(self) -> dict[str, float]:
        for _ in range(own.GLOBAL // own.MICRO // self.ranks.world_size):
            (self.get_train_model_output(next(self.data_iter)) * (own.MICRO / own.GLOBAL)).backward()
        self.begin_second()
        self.second.step()
        for parameter in self.others:
            parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {}

    def begin_second(self) -> None:
        self.clip_grad_norm_()


class Unclipped(TwoOptimizers):
    def begin_second(self) -> None:
        pass


class Keeping(TwoOptimizers):
    def save_checkpoint(self, *given: Any, **named: Any) -> Any:
        return super().save_checkpoint(*given, **named)

    def load_checkpoint(self, *given: Any) -> int:
        return super().load_checkpoint(*given)


class SecondAfterSuper(TwoOptimizers):
    def run_training(self) -> dict[str, float]:
        found = super(TwoOptimizers, self).run_training()
        self.second.step()
        return found


class Halves(torch.optim.SGD):
    """Changes its rates itself, and keeps them as tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]) / 2, dtype=torch.float64)
        return super().step(closure)


def recipe(kind: str, optimizer: str = "SGD", backend: str = "fsdp", precision: str = "fp64") -> Recipe:
    values = own.recipe("Plain").to_dict()
    values["actor"]["training_backend"], values["actor"]["model"]["precision"] = backend, precision
    values["actor"]["worker"] = f"{__file__}:{kind}"
    values["actor"]["optim"] = {"name": optimizer, "lr": own.RATE, "clip_grad": None, "lr_scheduler": "linear"}
    values["actor"]["optim"] |= {"weight_decay": 0.0} if optimizer == "SGD" else {}
    return load_recipe(values)


def trained(kind: str, folder: Path, optimizer: str = "SGD", evaluates: bool = False) -> dict[str, torch.Tensor]:
    """All steps, from the third on once more after loading a checkpoint, as a rollback does; the weights at the end."""
    worker = globals()[kind](recipe(kind, optimizer)) if kind != "Plain" else own.Plain(recipe(kind, optimizer))
    worker.setup()
    step, gone_back = training_method(worker), False
    while not worker.finished:
        step()
        if evaluates:
            worker.run_eval()
        if worker.step == 3 and not gone_back:
            worker.save_checkpoint(folder / "3", 3)
        if worker.step == 4 and not gone_back:
            gone_back = True
            worker.load_checkpoint(folder / "3")
    tensors = {name: whole(tensor) for name, tensor in worker.weights.tensors().items()}
    worker.release()
    return tensors


def plain(rates: list[float]) -> dict[str, torch.Tensor]:
    """The same steps by PyTorch alone."""
    net, data = own.made_net(), own.rows()
    for step, rate in enumerate(rates):
        cut = data[step * own.GLOBAL : (step + 1) * own.GLOBAL]
        x, y = (torch.stack([row[name] for row in cut]) for name in "xy")
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        torch.optim.SGD(net.parameters(), rate).step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "found", "scheduled"),
    [
        ("InSetup", "0.03", "after step 0 the schedule of actor.optim has 0.05"),
        ("BeforeSuper", "0.03", f"after step 2 the schedule of actor.optim has {0.05 * 4 / 6:g}"),
        ("InEvaluation", "", "after step 1 the schedule of actor.optim has"),
        ("Scheduled", "0.025", f"after step 1 the schedule of actor.optim has {0.05 * 5 / 6:g}"),
        ("ScheduledByAHook", "0.025", f"after step 1 the schedule of actor.optim has {0.05 * 5 / 6:g}"),
        ("ScheduledLoop", "0.025", f"after step 1 the schedule of actor.optim has {0.05 * 5 / 6:g}"),
    ],
)
def test_a_rate_that_no_step_would_use_is_refused(tmp_path: Path, kind: str, found: str, scheduled: str) -> None:
    with pytest.raises(ConfigError) as error:
        trained(kind, tmp_path, evaluates=kind == "InEvaluation")
    assert f"the learning rate {found}" in str(error.value)
    assert scheduled in str(error.value)
    assert "actor.optim.lr_scheduler" in str(error.value)
    assert "register_step_pre_hook" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "optimizer", "rates"),
    [
        ("Plain", "SGD", [own.RATE * (1 - step / own.STEPS) for step in range(own.STEPS)]),
        ("BeforeEachStep", "SGD", RATES),
        ("OwnLoop", "SGD", RATES),
        ("Plain", f"{__file__}:Halves", [own.RATE / 2 * (1 - step / own.STEPS) for step in range(own.STEPS)]),
    ],
)
def test_a_rate_that_a_step_uses_is_left_alone(tmp_path: Path, kind: str, optimizer: str, rates: list[float]) -> None:
    """A hook before the step, a loop of one's own, an optimizer that changes its rates; also after a rollback."""
    wanted = plain(rates)
    on_two = run_ranks(trained, 2, kind, tmp_path / "two", optimizer)
    for found in (trained(kind, tmp_path / "one", optimizer), *on_two):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12, msg=name)


def with_second(kind: str, backend: str = "fsdp", precision: str = "fp64") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Two steps; the weights at the end, and the lines that were reported."""
    lines: list[str] = []
    worker = globals()[kind](recipe(kind, backend=backend, precision=precision))
    worker.setup()
    worker.report, step = lines.append, training_method(worker)
    for _ in range(2):
        step()
    tensors = {name: whole(tensor) for name, tensor in worker.weights.tensors().items()}
    worker.release()
    return tensors, lines


def refused(kind: str, backend: str) -> str:
    with pytest.raises(ModelError) as error:
        with_second(kind, backend)
    return str(error.value)


def test_an_optimizer_of_a_workers_own_steps_what_all_ranks_have_summed() -> None:
    net, data = own.made_net(), own.rows()
    others = [*net.head.parameters(), net.scale]
    for step in range(2):
        x, y = (torch.stack([row[name] for row in data[step * own.GLOBAL : (step + 1) * own.GLOBAL]]) for name in "xy")
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        torch.optim.SGD(others, 0.02).step()
        for parameter in others:
            parameter.grad = None
        torch.optim.SGD(net.parameters(), own.RATE * (1 - step / own.STEPS)).step()
    wanted = dict(net.named_parameters())
    on_two = [one for backend in ("fsdp", "fsdp1") for one in run_ranks(with_second, 2, "TwoOptimizers", backend)]
    for found, lines in (with_second("TwoOptimizers"), *on_two):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=1e-12, msg=name)
        (line,) = (line for line in lines if "an optimizer of its own (SGD)" in line)
        assert "no checkpoint has its state" in line
    assert not any("of its own" in line for line in with_second("Keeping")[1])
    for backend in ("fsdp", "fsdp1"):
        for message in run_ranks(refused, 2, "Unclipped", backend):
            assert "before the gradients are summed over ranks" in message


def test_an_optimizer_of_a_workers_own_that_changes_nothing_is_said_or_refused() -> None:
    (line,) = (line for line in with_second("SecondAfterSuper")[1] if "of its own" in line)
    assert "none of its parameters has a gradient" in line
    with pytest.raises(ModelError, match=r"changes .*head\.weight.* beside self\.optimizer\.step\(\)"):
        with_second("TwoOptimizers", precision="bf16")


class Nested(torch.optim.SGD):
    """Steps another optimizer within."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class OneOfSeveral(TwoOptimizers):
    """Its only optimizer is the run's, which steps another one within."""

    def run_training(self) -> dict[str, float]:
        (self.get_train_model_output(next(self.data_iter)) * (own.MICRO / own.GLOBAL)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {}


def test_the_parts_of_the_runs_own_optimizer_are_none_of_the_workers() -> None:
    lines: list[str] = []
    worker = OneOfSeveral(recipe("OneOfSeveral", f"{__file__}:Nested"))
    worker.setup()
    worker.report = lines.append
    training_method(worker)()
    worker.release()
    assert not any("of its own" in line for line in lines)
