"""Sharded gradients and norms are those of one process, on any number of ranks, whatever the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardtune.batch import LossSum, Metric
from shardtune.config.rank_layout import Layout
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.weights import Weights
from shardtune.training.step import optimizer_step
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

ROWS = 12


class Net(nn.Module):
    """Layers of awkward shapes: three rows, one row, a vector of two; some on more ranks than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
        self.last = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> LossSum:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        out = self.last(hidden)
        return LossSum((out * out).sum() * self.scale.sum().to(out.dtype), float(len(x)))


class Rows:
    """One rank's micro-batch."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.weights = {"loss": float(len(x))}


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def all_rows() -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(4)) * 3


def group() -> Ranks:
    """The ranks of this process group, or this process alone."""
    if not dist.is_initialized():
        return Ranks(0, 1, torch.device("cpu"))
    return lay_out(Layout(shard=dist.get_world_size()), dist.get_rank(), torch.device("cpu"))


def train(precision: str, cut: str, fault: str = "") -> dict[str, Any]:
    """Two steps; returns losses, norms, the clipped gradients of the last and the weights.

    Args:
        cut: "even" rows for all ranks, or "ragged": all but one for rank 0.
        fault: what to break, to see that it would be noticed.
    """
    ranks = group()
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model, x = net().to(dtype), all_rows().to(dtype)
    shard(model, [*model.layers], ranks, precision)
    if fault == "root alone":
        for module in model.modules():
            if isinstance(module, FSDPModule) and module is not model:
                module.set_gradient_divide_factor(float(ranks.world_size))
    weights = Weights(model, model, precision, ranks)
    if fault == "norm of the shard":
        square = weights.gradient_square
        weights.gradient_square = lambda: square() / ranks.world_size
    optimizer = torch.optim.SGD(weights.parameters.values(), lr=0.05)
    bounds = [ROWS * n // ranks.world_size for n in range(ranks.world_size + 1)]
    if cut == "ragged":
        bounds = [0, *(ROWS - ranks.world_size + 1 + n for n in range(ranks.world_size))]
    mine = x[bounds[ranks.rank] : bounds[ranks.rank + 1]]
    mine = mine.to(torch.bfloat16) if precision == "bf16" else mine
    half = (len(mine) + 1) // 2
    told: dict[str, Any] = {"losses": [], "norms": []}
    kept: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: kept.update({n: whole(p.grad) for n, p in weights.parameters.items() if p.grad is not None}) or None
    )
    for step in range(2):
        result = optimizer_step(
            lambda batch: {"loss": model(batch.x)},
            [Rows(mine[:half]), Rows(mine[half:])],
            {"loss": float(ROWS)},
            weights,
            optimizer,
            ranks,
            draws=(0, step, ranks.rank),
            clip=0.5,
        )
        told["losses"].append(result.loss)
        told["norms"].append(result.gradient_norm)
    told["gradients"] = kept
    told["weights"] = {name: whole(parameter) for name, parameter in weights.parameters.items()}
    return told


def train_all(requests: list[tuple]) -> list[dict[str, Any]]:
    return [train(*request) for request in requests]


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference relative to the largest value of its kind."""
    differences = [
        max(abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True)) for key in ("losses", "norms")
    ]
    for kind in ("gradients", "weights"):
        assert one[kind].keys() == other[kind].keys()
        scale = max(float(tensor.abs().max()) for tensor in other[kind].values())
        differences += [float((one[kind][name] - other[kind][name]).abs().max()) / scale for name in other[kind]]
    return max(differences)


REQUESTS = [("fp64", "even"), ("fp64", "ragged"), ("fp32", "ragged"), ("bf16", "even")]
TOLERANCE = {"fp64": 1e-10, "fp32": 5e-7, "bf16": 0.03}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {precision: train(precision, "even") for precision in TOLERANCE}


@pytest.mark.parametrize("ranks", slow_except([1, 2, 4], 1, 2))
def test_norm_gradients_and_weights_equal_one_process(ranks: int, alone: dict) -> None:
    """One rank here is FSDP2 over a group of one, against a process without any."""
    assert min(alone["fp64"]["norms"]) > 0.5, "the clip must be active"
    for told in run_ranks(train_all, ranks, REQUESTS):
        for (precision, cut), result in zip(REQUESTS, told, strict=True):
            apart = furthest(result, alone[precision])
            assert apart < TOLERANCE[precision], (precision, cut)
            if ranks == 1 and precision == "bf16":
                assert apart == 0.0, "half precision has one arithmetic, with FSDP2 and without"


def test_known_faults_would_be_noticed(alone: dict) -> None:
    requests = [("fp64", "even", "root alone"), ("fp64", "even", "norm of the shard")]
    for result in run_ranks(train_all, 2, requests)[0]:
        assert furthest(result, alone["fp64"]) > 1e-2


def uneven_metrics() -> dict[str, Metric]:
    ranks = group()
    mine = {f"only {10 * ranks.rank}": Metric(3.0, 4.0), "all": Metric(1.0 + ranks.rank, 2.0)}
    mine |= {"only 2": Metric(0.0, 1.0)}
    return ranks.reduce_metrics({} if ranks.rank == 2 else mine)


def test_metrics_are_summed_over_the_union_of_names() -> None:
    """In one order, too: on one rank they come as on several."""
    wanted = {
        "all": Metric(3.0, 4.0),
        "only 0": Metric(3.0, 4.0),
        "only 2": Metric(0.0, 2.0),
        "only 10": Metric(3.0, 4.0),
    }
    assert [list(found.items()) for found in run_ranks(uneven_metrics, 3)] == [list(wanted.items())] * 3
    alone = [("all", Metric(1.0, 2.0)), ("only 0", Metric(3.0, 4.0)), ("only 2", Metric(0.0, 1.0))]
    assert list(uneven_metrics().items()) == alone


def changed_after_a_forward() -> tuple[float, float]:
    """The loss before and after the weights were set to zero, the first without a backward pass."""
    model, ranks = net().double(), group()
    shard(model, [*model.layers], ranks, "fp64")
    weights = Weights(model, model, "fp64", ranks)
    x = all_rows().double()
    with torch.no_grad():
        before = float(model(x).total)
        for parameter in weights.parameters.values():
            parameter.zero_()
        weights.copy_masters_to_model()
        return before, float(model(x).total)


def test_weights_that_change_after_an_evaluation_are_seen_by_the_next_forward() -> None:
    for before, after in [*run_ranks(changed_after_a_forward, 2), changed_after_a_forward()]:
        assert before > 1.0
        assert after == 0.0


def nested_units() -> int:
    """A unit inside another, as Mamba declares them; returns how many modules shard by themselves."""
    block = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    model = nn.Sequential(block, nn.Linear(3, 1))
    shard(model, [block, block[1]], group(), "fp32")
    model(all_rows()).sum().backward()
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def test_units_may_be_nested() -> None:
    assert run_ranks(nested_units, 2) == [3, 3]


def test_the_norm_of_a_large_gradient_is_summed_in_fp64_without_a_copy_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1200, 700, bias=False)
    weights, vector_norm, sizes = Weights(layer, layer, "fp32", group()), torch.linalg.vector_norm, list[int]()
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **how: sizes.append(x.numel()) or vector_norm(x, **how))
    transposed = torch.randn(1200, 700, generator=torch.Generator().manual_seed(1)).t()
    for grad in (transposed, transposed.contiguous()):
        layer.weight.grad = grad
        sizes.clear()
        expected = float(grad.double().square().sum().sqrt())
        assert weights.gradient_norm() == pytest.approx(expected, rel=1e-12)
        assert sum(sizes) == grad.numel()
    assert max(sizes) < 300_000


def places(offload: bool) -> list[tuple[str, str]]:
    """Where parameters and buffers lie that are allocated on the meta device, which stands for a GPU."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    shard(model, [model[0]], group(), "fp32", offload=offload)
    materialise(model, dtype=torch.float32, device=torch.device("meta"))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, whole(tensor).device.type if not tensor.is_meta else "meta") for name, tensor in tensors]


def test_what_is_offloaded_gets_host_memory_at_once() -> None:
    """On a GPU FSDP2 would otherwise hold it there and replace its memory, which torch refuses."""
    for found in run_ranks(places, 2, True):
        assert dict(found) == {
            "0.weight": "cpu", "0.bias": "cpu", "1.weight": "cpu", "1.bias": "cpu", "1.running_mean": "meta",
            "1.running_var": "meta", "1.num_batches_tracked": "meta",
        }  # fmt: skip
    for found in run_ranks(places, 2, False):
        assert {place for _, place in found} == {"meta"}
