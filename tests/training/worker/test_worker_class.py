"""Methods of a worker's class that nothing would call are refused, and helpers of any name are not."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.errors import ConfigError
from shardtune.run.choose_worker import check_worker
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.worker_class import check_worker_names
from tests.training.worker import test_base as own


def derived(name: str, *bases: type) -> type[FSDPSftWorker]:
    return type("Mine", bases or (own.Task,), {name: lambda self, *arguments: None})


@pytest.mark.parametrize("name", ["summary", "export", "step", "weights", "finished", "evaluates", "generator"])
def test_what_cannot_be_overridden_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called"):
        derived(name, SFTWorker)


def test_neither_can_a_mixin_override_it() -> None:
    mixin = type("Mixin", (), {"summary": property(lambda self: None)})
    with pytest.raises(TypeError, match=r"Mine\.summary would never be called"):
        type("Mine", (mixin, SFTWorker), {})
    type("Fine", (type("Mixin", (), {"run_eval": lambda self: {}}), SFTWorker), {})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("loss_weight", "did you mean loss_weights"),
        ("run_train", "did you mean run_training"),
        ("save_checkpoints", "did you mean save_checkpoint"),
        ("model_provider", "did you mean model_provider_func"),
        ("set_up", "did you mean setup"),
        ("configure_optimizers", r"optim\.name"),
        ("training_step", "get_train_model_output"),
        ("on_train_end", "callbacks"),
    ],
)
def test_a_misspelt_method_and_one_that_another_trainer_calls_are_refused(name: str, instead: str) -> None:
    kind = derived(name)
    error = rf"Mine\.{name} would never be called(.|\n)*{instead}(.|\n)*helper of your own may begin with _"
    with pytest.raises(ConfigError, match=error):
        check_worker(own.recipe(), kind)  # before ranks start
    with pytest.raises(ConfigError, match=error):
        kind(own.recipe())
    with pytest.raises(ConfigError, match=error):
        type("Further", (kind,), {})(own.recipe())


def test_the_class_of_another_trainer_calls_its_own_methods() -> None:
    mixin = type("Mixin", (), {"training_step": lambda self, *arguments: None})
    check_worker_names(derived("training_step", own.Task, mixin), FSDPSftWorker)


def test_a_method_that_calls_itself_alone_is_called_by_nothing() -> None:
    class Recursive(own.Task):
        def training_step(self, depth: int) -> Any:
            return self.training_step(depth - 1) if depth else None

    with pytest.raises(ConfigError, match=r"Recursive\.training_step would never be called"):
        check_worker_names(Recursive, FSDPSftWorker)


def test_a_helper_may_be_named_almost_as_a_method_of_the_same_class() -> None:
    """As what it is like is there, it is no misspelling of that."""
    methods = dict.fromkeys(("loss_weight", "loss_weights"), lambda self, *arguments: None)
    check_worker_names(type("Both", (own.Task,), methods), FSDPSftWorker)


class Shared(own.Task):
    """A project's own base class, whose helpers one of its workers calls, and another does not."""

    def train_step(self, batch: Any) -> Any:
        return self.get_output(batch)

    def loss_weight(self) -> float:
        return 1.0

    def get_output(self, batch: Any) -> Any:
        return super().get_train_model_output(batch)


class Calling(Shared):
    @property
    def factor(self) -> float:
        return self.loss_weight()

    def get_train_model_output(self, batch: Any) -> Any:
        return self.train_step(batch) * self.factor


def test_a_helper_of_such_a_name_may_be_called_by_a_class_that_is_derived() -> None:
    check_worker_names(Calling, FSDPSftWorker)
    further = type("Further", (Calling,), {"train_step": lambda self, batch: Calling.train_step(self, batch)})
    check_worker_names(further, FSDPSftWorker)
    with pytest.raises(ConfigError, match=r"Shared\.train_step would never be called"):
        check_worker_names(Shared, FSDPSftWorker)
