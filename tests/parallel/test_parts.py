"""What uses the weights of a sharded model beside its forward: parts called by themselves, on 2 ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError, ParallelError
from shardtune.parallel import same_call
from shardtune.parallel.direct_use import in_methods, own_methods
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.parallel.weights import Weights
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

LAYOUTS = {"fsdp": Layout(shard=2), "ddp": Layout(replicate=2, shard=1), "fsdp1": Layout(shard=2, flat=True)}
ROWS, WIDTH = 8, 6
WAYS = ("forward", "parts")
READS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda weight: weight.detach().sum(),
    lambda weight: (weight.data * 2).abs().max(),
    lambda weight: bool(torch.isfinite(weight.detach()).all()),
    lambda weight: weight.detach().tolist(),
    lambda weight: torch.ones(2, WIDTH, dtype=torch.float64) @ weight.detach().T,
    lambda weight: torch.equal(weight.detach(), weight.detach()),
)
"""What would be of a rank's part alone with fsdp1."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Reads a weight of a layer that it does not call; the last block is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.token = nn.Embedding(4, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        nn.init.normal_(self.token)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.position.weight.mean(0) * self.token
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return hidden


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.norm, self.head = Tower(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.gain, self.anchor = nn.Parameter(torch.ones(WIDTH) * 1.5), nn.Parameter(torch.ones(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tower(x * self.gain))) * self.anchor[:, :3]

    def by_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Parts, weights that it reads itself (one of them a unit's), and a norm of one."""
        up, down = (getattr(block, name).weight for block, name in zip(self.tower.blocks, ("up", "down"), strict=False))
        x = self.norm(x) * (self.gain * 0.75)  # while the weights outside of all units are gathered
        hidden = self.norm(self.tower(x * self.gain)) + x @ (up.T @ down.T)
        return self.head(hidden) * self.anchor.expand(len(x), -1)[:, :3]

    def averaged(self) -> None:
        """Changes weights in place, as an average of them does, after using them."""
        with torch.no_grad():
            self.norm(torch.zeros(1, WIDTH, dtype=torch.float64))
        self.gain.data.mul_(0.5).add_(self.gain, alpha=0.25)
        self.head.weight.data.mul_(0.75)

    def averaged_between(self) -> torch.Tensor:
        """The same between a forward and its backward pass, where weights outside of all units stay gathered; what
        follows in the same method is computed with what they are then."""
        self.norm(torch.zeros(1, WIDTH, dtype=torch.float64))
        with torch.no_grad():
            self.gain.mul_(0.75).add_(self.gain, alpha=0.5)
        self.norm.bias.data.add_(0.125)
        with torch.no_grad():
            return self.norm(torch.ones(1, WIDTH, dtype=torch.float64)) * self.gain

    def first_block(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tower.blocks[0](x))


def made() -> Whole:
    torch.manual_seed(5)
    return Whole().double()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def steps(model: Whole, weights: Weights, x: torch.Tensor, way: str) -> dict[str, Any]:
    """The outputs of methods before any forward, and gradients of two micro-batches."""
    in_methods(model, weights.whole.method, own_methods(model))
    with torch.no_grad():
        told: dict[str, Any] = {"first": model.first_block(x), "parts": model.by_parts(x)}
    model.averaged()
    if way == "parts":
        told["between"] = model.averaged_between()
    for last, part in enumerate(x.chunk(2)):
        weights.begin_micro_batch(bool(last))
        out = model(part) if way == "forward" else model.by_parts(part)
        out.square().sum().backward()
    weights.sync_replicated_gradients()
    told["norm"] = weights.gradient_norm()
    grads = {name: p.grad for name, p in weights.parameters.items()}
    rows = {name: None if g is None else whole(weights.to_checkpoint_layout(name, g)) for name, g in grads.items()}
    return told | {"grads": rows}


def sharded(model: Whole, layout: str) -> tuple[Weights, Ranks]:
    ranks = lay_out(LAYOUTS[layout], dist.get_rank(), torch.device("cpu"))
    return shard_model(model, [*model.tower.blocks], ranks, "fp64")(model), ranks


def on_ranks(layout: str) -> list[dict[str, Any]]:
    found = []
    for way in WAYS:
        model = made()
        weights, ranks = sharded(model, layout)
        found.append(steps(model, weights, rows().chunk(2)[ranks.rank], way))
        with weights.whole.method("other"), torch.no_grad():
            before = model.head.weight.sum().item()
            with pytest.raises(ModelError, match="no effect"):  # sharding goes on with the tensor that was there
                model.gain.data = model.gain.data * 2
            model.head.weight.data *= 2
            assert model.head.weight.sum().item() == pytest.approx(2 * before)
            if layout != "ddp":  # where a row is a view of the weight
                with pytest.raises(ModelError, match="changes a copy"):
                    model.head.weight[1].zero_()
            assert (model.head.weight.ndim, len(model.head.weight), model.head.weight.size(1)) == (2, 3, WIDTH)
            for parameter in model.parameters():
                torch.zeros_like(parameter).add_(parameter.grad if parameter.grad is not None else 0)
        with weights.whole.method("draws"):
            torch.manual_seed(9)
            if layout == "fsdp1":
                with pytest.raises(ModelError, match="would repeat one another"), torch.no_grad():
                    nn.init.normal_(model.head.weight)
            else:
                nn.init.kaiming_uniform_(model.tower.blocks[1].down.weight)
                nn.init.xavier_normal_(model.head.weight)
                model.norm.bias.data.uniform_(-2, 2)
                torch.manual_seed(9)
                drawn = [torch.empty(shape, dtype=torch.float64) for shape in ((WIDTH, 9), (3, WIDTH), (WIDTH,))]
                nn.init.kaiming_uniform_(drawn[0])
                nn.init.xavier_normal_(drawn[1])
                drawn[2].uniform_(-2, 2)
                filled = (model.tower.blocks[1].down.weight, model.head.weight, model.norm.bias)
                with torch.no_grad():
                    assert all(torch.equal(whole(one), other) for one, other in zip(filled, drawn, strict=True))
        if layout != "fsdp1":
            continue
        with weights.whole.method("lists"):
            every = [parameter for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_([parameter.grad for parameter in every], 0.5)
            torch._foreach_lerp_([p.detach().clone() for p in every], [p.detach() for p in every], 0.5)
            weights.whole.stepping = True
            with torch.no_grad(), pytest.raises(ModelError, match="step of an optimizer"):
                every[0].norm()
            weights.whole.stepping = False
        with weights.whole.method("other"):
            for read in (*READS, partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)):
                with pytest.raises(ModelError, match="this rank's part alone"):
                    read() if isinstance(read, partial) else read(model.head.weight)
            copy = model.head.weight.detach().clone().mul_(0.5).add_(model.head.weight.data, alpha=0.5)
            assert (copy.ndim, copy.dtype, copy - model.head.weight.detach() is None) == (1, torch.float64, False)
            with torch.no_grad():
                assert model.head.weight.sum().item() == pytest.approx(model.head.weight.clone().sum().item())
    return found


def alone(way: str) -> dict[str, Any]:
    model = made()
    hold = shard_model(model, [], Ranks(0, 1, torch.device("cpu")), "fp64")
    return steps(model, hold(model), rows(), way)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_called_by_themselves_compute_as_on_one_rank(layout: str) -> None:
    by_rank = run_ranks(on_ranks, 2, layout)
    both = [alone(way) for way in WAYS]
    for number, expected in enumerate(both):
        for name in ("first", "parts"):
            found = torch.cat([told[number][name] for told in by_rank])
            assert (found - expected[name]).abs().max() < 1e-12
        for told in by_rank:
            if "between" in expected:
                assert (told[number]["between"] - expected["between"]).abs().max() < 1e-12
            assert abs(told[number]["norm"] - expected["norm"]) < 1e-11
            for name, grad in expected["grads"].items():
                mine = told[number]["grads"][name]
                assert (mine is None) == (grad is None), name
                assert grad is None or (mine - grad).abs().max() < 1e-11, name
        assert expected["grads"]["tower.blocks.2.up.weight"] is None


def not_the_same() -> list[str]:
    """Rank 0 calls a method alone; then each rank calls another one."""
    same_call.LIMIT_SECONDS = 2.0
    told = []
    for layout in ("fsdp", "fsdp1"):
        for names in (("by_parts", ""), ("by_parts", "first_block")):
            model = made()
            weights, ranks = sharded(model, layout)
            in_methods(model, weights.whole.method, own_methods(model))
            try:
                if names[ranks.rank]:
                    getattr(model, names[ranks.rank])(rows())
            except ParallelError as error:
                told.append(str(error))
            dist.barrier()
    return told


def test_a_call_on_some_ranks_alone_is_an_error() -> None:
    first, second = run_ranks(not_the_same, 2, fresh=True)
    assert len(first) == 4
    for alone, other in (first[:2], first[2:]):
        assert "rank 0 calls by_parts, and not all others do (waited for up to 2 s)" in alone
        assert "rank 0 calls by_parts, and others something else" in other
    assert len(second) == 2
    assert all("rank 1 calls first_block, and others something else" in told for told in second)
