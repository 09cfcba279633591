"""Optimizers that cannot step the parts of ranks, as attributes of a user's class: the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shardtune import NeedParallel, TrainEngine, nn
from shardtune.errors import ModelError


class Masks(torch.optim.Optimizer):
    """Changes numbers by a mask, which sharded parameters do not have in earlier versions of torch."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            parameter[parameter < 0] = 0


class Stepped(nn.Fsdp2TrainModule):
    """Layers with torch's two optimizers of this kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 7) for _ in range(2)])
        self.out = torch.nn.Linear(7, 3)

    def on_weights_materialized(self) -> None:
        self.factored = torch.optim.Adafactor(self.layers.parameters(), lr=0.01, weight_decay=0.1)
        self.signs = torch.optim.Rprop(self.out.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.factored, 0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.out(inputs)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        F.mse_loss(self(inputs), targets).backward()
        self.factored.step()
        self.signs.step()
        self.schedule.step()
        kept = all(parameter.grad is not None for parameter in self.parameters())
        self.factored.zero_grad()
        self.signs.zero_grad()
        return kept

    def mask(self) -> None:
        Masks(list(self.out.parameters())).step()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, width, dtype=torch.float64, generator=draw) for width in (7, 3))  # pyright: ignore


def alone() -> dict[str, torch.Tensor]:
    """Four steps of plain PyTorch."""
    module = Stepped().double()
    module.on_weights_materialized()
    for _ in range(4):
        module.train_step(*rows())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_adafactor_and_rprop_step_as_in_one_process_and_go_on_elsewhere(two_ranks: TrainEngine, tmp_path: Path):
    """From two ranks of fsdp2 to two of ddp, and to one."""
    expected, (inputs, targets) = alone(), map(NeedParallel, rows())
    with TrainEngine(Stepped().double()).build(colocate_with=two_ranks) as engine:
        assert all(engine.train_step(inputs, targets) + engine.train_step(inputs, targets))
        engine.save(tmp_path)
        before = {name: tensor for name, tensor in engine.named_tensors() if name.startswith("out.")}
        refused = ""
        try:
            engine.mask()
        except ModelError as error:  # later versions of torch have it for sharded tensors
            refused = str(error)
            assert "__setitem__ changes in place what ranks have parts of" in refused
            assert "Adafactor" in refused
        found = dict(engine.named_tensors())
        for name, tensor in before.items():
            assert torch.equal(found[name], tensor if refused else tensor.clamp(min=0)), name
    with (
        TrainEngine(Stepped().double(), executor="ddp").build(colocate_with=two_ranks) as copies,
        TrainEngine(Stepped().double()).build() as one,
    ):
        for other in (copies, one):
            other.load(tmp_path)
            for _ in range(2):
                other.train_step(inputs, targets)
            for name, tensor in other.named_tensors():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)


class Searching(nn.Fsdp2TrainModule):
    """Steps by the loss that its closure returns: of this rank's rows, or of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(7, 3)

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def search(self, inputs: torch.Tensor, targets: torch.Tensor, whole: bool) -> float:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.layer(inputs), targets)
            if whole:
                loss = self.mean_over_ranks(loss * len(inputs), len(inputs))
            loss.backward()
            return loss

        return self.optimizer.step(closure=closure).item()


def test_lbfgs_takes_the_loss_of_all_ranks(two_ranks: TrainEngine):
    found: list[list[float]] = []
    for colocated in (None, two_ranks):
        with TrainEngine(Searching().double(), "ddp").build(colocate_with=colocated, take_turns=False) as engine:
            given = [NeedParallel(each) for each in rows()]
            found.append([engine.search(*given, whole=True)[0] for _ in range(2)])
            if colocated is not None:
                with pytest.raises(ModelError, match=r"the closure gives LBFGS another loss on each rank"):
                    engine.search(*given, whole=False)
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)
    assert found[0][1] < found[0][0]
