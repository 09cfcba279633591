"""Buffers that a layer changes are those of a run without activation checkpointing, bit by bit, and so is all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardtune.batch import LossSum
from shardtune.config.rank_layout import Layout
from shardtune.config.schema.actor import ModelConfig
from shardtune.models.activation_checkpointing import set_execution
from shardtune.models.kept_buffers import LARGE, KeptBuffers
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.parallel.torch_private.fsdp2 import in_backward
from shardtune.training.step import optimizer_step
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

WIDTH, ROWS, MICRO_BATCHES, STEPS = 4, 6, 3, 3
KINDS = (True, "selective")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.changed(x)))


class Norm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class FrozenNorm(Norm):
    """In evaluation until the third forward."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(self.training and int(self.seen) > 2)
        self.seen += 1
        return self.norm(x)


class OwnNorm(Layer):
    """Its statistics are changed by a kernel, which torch does not count as a change in place."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class Counter(Layer):
    """Saves for the backward pass what shares memory with the buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class LateCounter(Counter):
    """Does so from its fourth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 0 if in_backward() else 1
        return super().changed(x) if self.calls > 3 else x


class Codebook(Layer):
    """A large one, changed as many quantisers do."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, WIDTH).repeat(LARGE // WIDTH + 1, 1))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        out = x - self.codes[:ROWS]
        self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean())
        return out


class Replaced(Layer):
    """Puts another tensor in the place of a buffer, the first time in that of none."""

    last: torch.Tensor | None
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.mean + (0.0 if self.last is None else self.last)
        self.last = x.detach().amax(0)
        self.mean = 0.5 * (self.mean + x.detach().mean(0))
        return out


class Reads(Layer):
    """A small buffer and a large one, and it changes neither."""

    small: torch.Tensor
    large: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.linspace(1, 2, WIDTH), persistent=False)
        self.register_buffer("large", torch.ones(LARGE + 1))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.small * self.large[0]


class Drops(Layer):
    """Draws, and sets an attribute."""

    last: torch.Tensor | None = None

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach()
        return torch.dropout(x, 0.3, self.training)


LAYERS: Sequence[type[Layer]] = (
    Norm, FrozenNorm, OwnNorm, Counter, LateCounter, Codebook, Replaced, Reads,
)  # fmt: skip


def model_of(layer: type[Layer]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(layer(), layer(), layer()).double()


def batches() -> torch.Tensor:
    shape = STEPS, MICRO_BATCHES, ROWS, WIDTH
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def apply(model: nn.Module, units: Sequence[nn.Module], kind: bool | str, compiles: bool = False) -> None:
    for _ in range(2):  # the second changes nothing
        set_execution(model, units, ModelConfig(gradient_checkpointing=kind, compile=compiles))


@contextmanager
def compiling() -> Iterator[list[None]]:
    """Graphs are captured as with any backend, and computed without code of their own, which takes minutes to make.

    Yields:
        Grows by one with each graph that is computed.
    """
    computed: list[None] = []

    def backend(graph: GraphModule, _inputs: object) -> Callable[..., object]:
        def compute(*inputs: object) -> object:
            computed.append(None)
            return graph(*inputs)

        return compute

    torch._dynamo.reset()
    try:
        with torch.compiler.set_stance(force_backend=backend):  # pyright: ignore[reportArgumentType]
            yield computed
    finally:
        torch._dynamo.reset()


def train_plainly(model: nn.Module) -> list[torch.Tensor]:
    """Losses of all micro-batches, gradients of all steps, weights and buffers in the end."""
    found = []
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches():
        optimizer.zero_grad()
        for rows in step:
            loss = model(rows).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return [*found, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]


def assert_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_trained_as_without(layer: type[Layer], kind: bool | str) -> None:
    model = model_of(layer)
    apply(model, [*model], kind)
    assert_same(train_plainly(model), train_plainly(model_of(layer)))


@pytest.mark.parametrize(
    "layer",
    [
        LateCounter,
        Drops,
        *(pytest.param(layer, marks=pytest.mark.slow) for layer in LAYERS if layer is not LateCounter),
    ],
)
def test_so_is_a_compiled_one_whose_graphs_are_computed_twice(layer: type[Layer]) -> None:
    wanted = train_plainly(model_of(layer))
    model = model_of(layer)
    apply(model, [*model], True, compiles=True)
    with compiling() as computed:
        assert_same(train_plainly(model), wanted)
    assert len(computed) >= 2 * len(model) * STEPS * MICRO_BATCHES


@pytest.mark.parametrize("layer", [Norm, Counter, Replaced])
def test_a_backward_pass_may_be_repeated(layer: type[Layer]) -> None:
    found = []
    for kind in (False, True):
        model = model_of(layer)
        if kind:
            apply(model, [*model], kind)
        loss = model(batches()[0, 0]).square().sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        found.append([parameter.grad for parameter in model.parameters()] + list(model.buffers()))
    assert_same(*found)


def test_what_is_not_changed_is_not_copied_again() -> None:
    layer = Reads().double()
    kept = KeptBuffers(layer)
    copies = []
    for rows in batches()[0]:
        first, _ = kept.contexts()
        with first:
            layer(rows)
        copies.append({key: one.values for (_, key), one in kept._kept.items()})
    assert copies[0]["small"] is not layer.small
    assert copies[2]["small"] is copies[0]["small"]
    assert all(each["large"] is layer.large for each in copies)


class Convolving(PreTrainedModel):
    """A model of transformers that checkpoints its layers itself."""

    config_class = PreTrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        torch.manual_seed(1)
        self.layers = nn.ModuleList([_Checkpointing(), _Checkpointing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Checkpointing(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Norm(), Counter())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(("kind", "compiles"), [(True, False), ("selective", False), (True, True)])
def test_so_is_a_model_of_transformers(kind: bool | str, compiles: bool) -> None:
    wanted = train_plainly(Convolving(PreTrainedConfig()).double().train())
    model = Convolving(PreTrainedConfig()).double().train()
    apply(model, [*model.layers], kind, compiles)
    assert model.is_gradient_checkpointing
    with compiling() as computed:
        assert_same(train_plainly(model), wanted)
    assert len(computed) >= 2 * len(model.layers) * STEPS * MICRO_BATCHES * compiles


@dataclass
class Rows:
    x: torch.Tensor
    weights: dict[str, float]


def train(layer: type[Layer], kind: bool | str, flat: bool, compiles: bool) -> list[torch.Tensor]:
    """Losses of steps, norms, and all tensors in the end, on the ranks of this process group or this process alone."""
    ranks = Ranks(0, 1, torch.device("cpu"))
    if dist.is_initialized():
        ranks = lay_out(Layout(shard=dist.get_world_size(), flat=flat), dist.get_rank(), torch.device("cpu"))
    model = model_of(layer)
    if kind:
        apply(model, [*model], kind, compiles)
    hold = shard_model(model, [*model], ranks, "fp64")
    materialise(model, dtype=torch.float64, device=ranks.device)
    weights = hold(model)
    optimizer = torch.optim.SGD(weights.trainable().values(), lr=0.1)
    told = []
    for number, step in enumerate(batches()):
        mine: Any = [
            Rows(rows[ranks.rank :: ranks.world_size], {"loss": len(rows) / ranks.world_size}) for rows in step
        ]
        result = optimizer_step(
            lambda batch: {"loss": LossSum(model(batch.x).square().sum(), batch.weights["loss"])},
            mine, {"loss": float(ROWS * MICRO_BATCHES)}, weights, optimizer, ranks, draws=(0, number, ranks.rank),
            clip=None,
        )  # fmt: skip
        told += [torch.tensor(result.loss), torch.tensor(result.gradient_norm)]
    return told + [whole(tensor) for tensor in weights.tensors().values()]


def train_all(requests: Sequence[tuple[type[Layer], bool | str, bool, bool]]) -> list[list[torch.Tensor]]:
    """Each training; where layers are compiled, their graphs are computed twice."""
    found = []
    for request in requests:
        with compiling() as computed:
            found.append(train(*request))
        *_, compiles = request
        assert len(computed) >= 2 * len(model_of(request[0])) * STEPS * MICRO_BATCHES * compiles
    return found


def check_sharded(layers: Sequence[type[Layer]], others: Sequence[tuple[bool | str, bool]], flat: bool) -> None:
    """On one rank and on two, where buffers become the same at the end of a step."""
    ways = [(False, False), *others]
    requests = [(layer, kind, flat, compiles) for layer in layers for kind, compiles in ways]
    for found in (train_all(requests), *run_ranks(train_all, 2, requests)):
        for place in range(0, len(requests), len(ways)):
            for other in range(place + 1, place + len(ways)):
                assert_same(found[other], found[place])


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_so_is_a_sharded_one(flat: bool) -> None:
    check_sharded((Norm, Counter), [(kind, False) for kind in KINDS], flat)


@pytest.mark.slow
def test_so_is_a_sharded_one_with_compiled_layers() -> None:
    check_sharded((Norm, Drops), [(True, True)], flat=False)
