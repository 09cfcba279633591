"""Parameters that cannot be trained or sharded are refused by their names on the layouts where they cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtune
from shardtune import Adapter, LossSum, Sample, TrainEngine
from shardtune.config import load_recipe
from shardtune.errors import ModelError, ShardtuneError
from shardtune.parallel.meta_init import init_empty_weights, materialise
from shardtune.run.dry_run import dry_run
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole
from tests.training.worker import test_freezing as own

FINE = ""
LAYOUTS = ("fsdp", "ddp", "fsdp1")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, sparse=True)


class SparseBag(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(9, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x[:, None]))


class SparseFrozen(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.embed(x) * self.turn).abs())


class ComplexFrozen(Complex):
    def __init__(self) -> None:
        super().__init__()
        self.turn.requires_grad_(False)


class ComplexBuffer(Net):
    """As rotations by position often are."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        turn = torch.polar(torch.ones(6), torch.arange(6.0))
        self.register_buffer("turn", turn, persistent=self.persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head((hidden * self.get_buffer("turn")).abs().to(hidden.dtype))


class ComplexInMemory(ComplexBuffer):
    persistent = False


class ComplexAsReal(Net):
    """What the message names."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.embed(x) * torch.view_as_complex(self.turn)).abs())


class Integers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)[:, self.order])


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, max_norm=0.7)


class Empty(Net):
    """Nothing to train, in a parameter that is used, and in one that is not; neither is a reason to refuse a model."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3, 0))
        self.unused = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.zeros(0, 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rows.sum() + self.columns.sum() + self.frozen.sum()


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.head = torch.jit.script(self.head)


class Skipping(Net):
    """Of whose layers a draw would leave out half; here none is left out, so that one rank has numbers to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.embed(x)
        for layer in self.layers:
            values = layer(values) if self.layerdrop < 1 else values
        return self.head(values)


SPARSE = "embed is an nn.Embedding with sparse=True"
SCRIPTED = "head is a module of TorchScript"
COMPLEX = "turn holds complex numbers (complex128), which checkpoints and models on disk cannot hold"
MAX_NORM = "embed is an nn.Embedding with max_norm=0.7: its forward writes into weights that ranks gather anew"
EXPECTED = {
    # By class: on one rank, then on two with FSDP2, DDP and FSDP1.
    Sparse: (SPARSE,) * 4,
    SparseBag: ("embed is an nn.EmbeddingBag with sparse=True",) * 4,
    SparseFrozen: (FINE,) * 4,
    Complex: (COMPLEX,) * 4,
    ComplexFrozen: (COMPLEX,) * 4,
    ComplexBuffer: ("turn holds complex numbers (complex64), which checkpoints and models on disk cannot hold",) * 4,
    ComplexInMemory: (FINE,) * 4,
    ComplexAsReal: (FINE,) * 4,
    Integers: (FINE, FINE, FINE, "joins parameters of floating-point numbers alone, and order holds int64"),
    MaxNorm: (FINE, MAX_NORM, MAX_NORM, MAX_NORM),
    Empty: (FINE,) * 4,
    Scripted: (FINE, SCRIPTED, SCRIPTED, SCRIPTED),
    Skipping: (FINE, *(("the model (Skipping) leaves out layers at random in training (a share of 0.5)",) * 3)),
    Lazy: ("head.weight of Lazy gets its shape from a first forward pass",) * 4,
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    net = kind()
    for parameter in net.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    return net


def trained(kind: type[nn.Module], layout: str, folder: Path, precision: str = "fp64") -> str | dict[str, torch.Tensor]:
    """The weights after two steps, a checkpoint and one more step; or the refusal."""

    class Worker(own.Plain):
        def model_provider_func(self) -> nn.Module:
            return made(kind)

    worker = Worker(own.recipe("Plain", layout, precision, max_steps=3))
    try:
        worker.setup()
    except ShardtuneError as error:
        return str(error)
    worker.run_training()
    worker.run_training()
    worker.save_checkpoint(folder, 2)
    worker.load_checkpoint(folder)
    worker.run_training()
    tensors = {name: whole(tensor) for name, tensor in worker.weights.tensors().items()}
    worker.release()
    return tensors


def on_two(folder: Path) -> list[list[str | dict[str, torch.Tensor]]]:
    return [[trained(kind, layout, folder / kind.__name__ / layout) for layout in LAYOUTS] for kind in EXPECTED]


@pytest.mark.lengthy
def test_each_is_refused_where_it_fails_and_trains_alike_elsewhere(tmp_path: Path) -> None:
    every = run_ranks(on_two, 2, tmp_path / "two")[0]
    for (kind, expected), others in zip(EXPECTED.items(), every, strict=True):
        one = trained(kind, "fsdp", tmp_path / kind.__name__)
        for found, says in zip((one, *others), expected, strict=True):
            if says:
                assert isinstance(found, str), (kind, says)
                assert says in found
                assert "remedy" in found
                continue
            assert isinstance(found, dict), (kind, found)
            assert isinstance(one, dict)
            assert found.keys() == one.keys()
            for name, tensor in one.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=f"{kind.__name__} {name}")


def test_on_one_rank_what_a_forward_writes_is_lost_in_half_precision_alone(tmp_path: Path) -> None:
    assert isinstance(trained(MaxNorm, "fsdp", tmp_path / "32", "fp32"), dict)
    told = trained(MaxNorm, "fsdp", tmp_path / "16", "bf16")
    assert "its forward writes into weights that are rounded anew from those in full precision" in told


class Listed(Net):
    """What is registered may be in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.extra = [self.head], {"way": nn.Linear(6, 6)}


def test_modules_in_plain_lists_are_refused_where_they_get_no_weights() -> None:
    with init_empty_weights():
        model = Listed()
    with pytest.raises(ModelError, match=r"(?s)extra is a plain dict with modules in it.*nn.ModuleDict"):
        materialise(model, dtype=torch.float32, device=torch.device("cpu"))
    model.extra.clear()
    materialise(model, dtype=torch.float32, device=torch.device("cpu"))


class Adapted(Adapter):
    """Refused before ranks start."""

    def build(self) -> nn.Module:
        return Sparse()

    def encode(self, row: Any) -> Sample:
        return Sample(fields={"x": torch.tensor(row["x"]).numpy()})

    def loss(self, model: nn.Module, batch: Any) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))


class AdaptedScript(Adapted):
    def build(self) -> nn.Module:
        return Scripted()


@pytest.mark.parametrize("command", [shardtune.train, dry_run])
@pytest.mark.parametrize(("adapter", "says"), [("Adapted", SPARSE), ("AdaptedScript", SCRIPTED)])
def test_an_adapters_model_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, says: str, command: Callable[[Any], object]
) -> None:
    monkeypatch.setattr("shardtune.run.ranks.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n' * 8)
    values = {
        "actor": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "model": {"adapter": f"{__file__}:{adapter}", "precision": "fp64"},
        },
        "data": {"train_data_paths": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")},
        "runner": {"device": "cpu", "nproc_per_node": 2, "max_steps": 1, "logger": {"log_path": str(tmp_path)}},
    }
    with pytest.raises(ShardtuneError, match=says):
        command(load_recipe(values).to_dict())


class Engine(shardtune.nn.BaseTrainModule, Net):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embed = embedding

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def step(self, rows: list[int]) -> float:
        loss = self(torch.tensor(rows)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def refused_by_an_engine(settings: dict[str, Any]) -> str:
    engine = TrainEngine(Engine(nn.Embedding(9, 6, **settings)))
    with pytest.raises(ModelError) as error:
        engine.build()
    return str(error.value)


@pytest.mark.lengthy
@pytest.mark.parametrize(("key", "value", "says"), [("sparse", True, SPARSE), ("max_norm", 0.7, MAX_NORM)])
def test_an_engine_refuses_them_on_several_ranks(key: str, value: Any, says: str) -> None:
    settings = {key: value}
    with TrainEngine(Engine(nn.Embedding(9, 6, **settings))).build() as engine:
        assert engine.step([1, 2, 3])[0] > 0  # one rank: PyTorch and the user's optimizer alone
    assert all(says in told for told in run_ranks(refused_by_an_engine, 2, settings))
