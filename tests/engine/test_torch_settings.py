"""torch's settings of the caller are those of a method on ranks in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from shardtune import TrainEngine, nn
from shardtune.engine.torch_settings import FollowedSettings, TorchSettings


class Looks(nn.Fsdp2TrainModule):
    """A method that shows what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def looks(self) -> TorchSettings:
        return TorchSettings.here()

    def product_dtype(self) -> torch.dtype:
        return self(torch.ones(1, 2, dtype=torch.float32)).dtype


@pytest.fixture(scope="module")
def looking(two_ranks: TrainEngine) -> TrainEngine:
    return TrainEngine(Looks()).build(colocate_with=two_ranks)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "around",
    [
        nullcontext,
        _default_dtype,
        _deterministic,
        torch.no_grad,
        torch.autograd.detect_anomaly,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["none", "default dtype", "deterministic", "no_grad", "anomalies", "autocast"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_ranks_have_the_callers(looking: TrainEngine, around: Callable[[], AbstractContextManager[object]]) -> None:
    before = TorchSettings.here()
    with around():
        assert looking.looks() == [TorchSettings.here()] * 2
    assert looking.looks() == [before] * 2


def test_an_autocast_around_a_call_computes_on_ranks(looking: TrainEngine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert looking.product_dtype() == [torch.bfloat16] * 2
    assert looking.product_dtype() == [torch.float32] * 2


def test_what_a_method_has_set_stays_until_the_caller_changes_it() -> None:
    caller = TorchSettings.here()
    followed = FollowedSettings()
    with _default_dtype():
        with followed.during(caller):
            assert torch.get_default_dtype() == torch.float64
        with followed.during(TorchSettings({**caller.values, "default dtype": torch.float16}, (), True)):
            assert torch.get_default_dtype() == torch.float16
