"""Plain modules get exactly the weights they should, on any number of ranks, and train as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel

from shardtune.batch import LossSum
from shardtune.config.schema import OptimConfig, ParameterGroup
from shardtune.errors import ConfigError, ModelError
from shardtune.models.adapter import WeightSource
from shardtune.models.mixed_precision import compute_in
from shardtune.optim.build import build_optimizer
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import named_tensors
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units
from shardtune.parallel.weights import Weights
from shardtune.training.build.model import (
    build_empty,
    freeze,
    load_initial_weights,
    set_values,
    share_values,
    without_values,
)
from shardtune.training.step import optimizer_step
from shardtune.training.worker.model_state import shared_names
from tests.parallel.test_fsdp2 import group
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole
from tests.support.plain_modules import KINDS, SEED, WIDTH, made
from tests.support.workspace import make_model

SOURCES = ("constructor", "state dict", "functions", "file", "several files", "pickle", "parts", "real")
CASES = [(kind, source) for kind in ("tied", "bare") for source in SOURCES]
CASES += [(kind, source) for kind in ("perceptron", "convolutions", "reading") for source in ("constructor", "file")]
CASES += [("convolutions", "real")]
ROWS, STEPS = 12, 3


def source_of(kind: str, source: str, folder: Path) -> WeightSource:
    """The weights of `made(kind)`, handed over in one of the ways."""
    state = dict(made(kind).state_dict())
    if source == "state dict":
        return state
    if source == "functions":
        return {name: tensor.clone for name, tensor in state.items()}
    if source == "parts":
        first = state.pop(next(iter(state)))
        return {"": None, next(iter(made(kind).state_dict())): lambda: first}
    names = {"file": "one.safetensors", "several files": "several", "pickle": "one.pt"}
    return str(folder / kind / names[source]) if source in names else None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for kind in KINDS:
        model = made(kind)
        state = named_tensors(model)  # of a shared tensor one name is enough
        (folder / kind / "several").mkdir(parents=True)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / kind / "one.safetensors"
        )
        for number, name in enumerate(state):
            save_file({name: state[name].detach().contiguous()}, folder / kind / "several" / f"{number}.safetensors")
        torch.save(model.state_dict(), folder / kind / "one.pt")
    return folder


def built(kind: str, source: str, folder: Path, precision: str = "fp64") -> tuple[nn.Module, Ranks, list[str]]:
    """A model on this process's ranks with its initial weights, and the notes about it."""
    ranks = group()
    if source == "real":
        torch.manual_seed(SEED if ranks.is_main else 99)  # a constructor may draw anything on other ranks
        model, notes = KINDS[kind](), []
    else:
        model, notes = build_empty(KINDS[kind], SEED)
    compute_in(model, COMPUTE_DTYPE[precision])
    share_values(model, ranks)
    units, _ = choose_units(model)
    shard(model, units, ranks, precision)
    notes += load_initial_weights(
        source_of(kind, source, folder),
        model,
        model,
        build=KINDS[kind],
        seed=SEED,
        dtype=MASTER_DTYPE[precision],
        ranks=ranks,
        device=ranks.device,
    )
    return model, ranks, notes


def weights_from_everywhere(folder: str) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    return {
        (kind, source): {
            name: whole(tensor) for name, tensor in named_tensors(built(kind, source, Path(folder))[0]).items()
        }
        for kind, source in CASES
    }


class Rows:
    """One micro-batch."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y
        self.weights = {"loss": float(len(x))}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return (
        torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64),
        torch.randn(ROWS, generator=draw, dtype=torch.float64),
    )


def optim(name: str) -> OptimConfig:
    args = {"momentum": 0.9} if name == "SGD" else {}
    return OptimConfig(name=name, args=args, lr=0.05, weight_decay=0.1)


def trained(kind: str, folder: Path, name: str, precision: str = "fp64") -> dict[str, Any]:
    """A few steps; the losses, the norms, and the whole weights and buffers."""
    model, ranks, _ = built(kind, "constructor", folder, precision)
    weights = Weights(model, model, precision, ranks)
    optimizer = build_optimizer(weights.trainable(), optim(name))
    x, y = data()
    share = ROWS // ranks.world_size
    mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
    x, y = x[mine], y[mine]
    told: dict[str, Any] = {"losses": [], "norms": []}
    pieces = [Rows(x, y)] if kind == "convolutions" else [Rows(x[:1], y[:1]), Rows(x[1:], y[1:])]
    for step in range(STEPS):
        result = optimizer_step(
            lambda batch: {"loss": LossSum((model(batch.x) - batch.y).square().sum(), float(len(batch.x)))},
            pieces,
            {"loss": float(ROWS)},
            weights,
            optimizer,
            ranks,
            draws=(0, step, ranks.rank),
            clip=1.0,
        )
        told["losses"].append(result.loss)
        told["norms"].append(result.gradient_norm)
    told["tensors"] = {name: whole(tensor) for name, tensor in weights.tensors().items()}
    return told


def train_all(folder: str, requests: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    return [trained(kind, Path(folder), name, precision) for kind, name, precision in requests]


def trained_plainly(kind: str, name: str) -> dict[str, Any]:
    """The same in plain torch, all rows at once."""
    model = made(kind).double()
    x, y = data()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, 0.05, 0.9) if name == "SGD" else torch.optim.AdamW(groups, 0.05)
    told: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        told["losses"].append(loss.item())
        told["norms"].append(nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
    told["tensors"] = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    return told


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["tensors"].keys() == other["tensors"].keys()
    apart = [abs(a - b) for key in ("losses", "norms") for a, b in zip(one[key], other[key], strict=True)]
    apart += [float((one["tensors"][name] - other["tensors"][name]).abs().max()) for name in other["tensors"]]
    return max(apart)


REQUESTS = [
    ("perceptron", "SGD", "fp64"),
    ("tied", "SGD", "fp64"),
    ("bare", "SGD", "fp64"),
    ("bare", "AdamW", "fp64"),
    ("reading", "AdamW", "fp64"),
    ("convolutions", "SGD", "fp64"),
    ("bare", "SGD", "bf16"),
    ("convolutions", "SGD", "bf16"),
]


class Counting(nn.Module):
    """Buffers that each forward changes, in ways that leave no trace in a tensor's version or in the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)
        self.seen: torch.Tensor
        self.calls: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("still", torch.full((3,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data += x.sum()
        self.calls = self.calls + len(x)
        return self.inner(x)


def moved_buffers() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The buffers after a first forward on this rank's rows alone, and after the ranks agreed: rows 1, then row 2."""
    ranks = group()
    model = Counting()
    shard(model, [], ranks, "fp32")
    weights = Weights(model, model, "fp32", ranks)
    weights.begin_micro_batch(last=True)
    model(torch.full((ranks.rank + 1, WIDTH), float(ranks.rank + 1)))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    weights.sync_replicated_gradients()
    return before, {name: tensor.clone() for name, tensor in weights.tensors().items() if name in before}


def first_statistics() -> torch.Tensor:
    """Of the first batch norm, after one micro-batch on each rank."""
    model, ranks, notes = built("convolutions", "constructor", Path("nowhere"))
    assert "2 batch norms (layers.1, …)" in notes[0]
    weights = Weights(model, model, "fp64", ranks)
    weights.begin_micro_batch(last=True)
    model(data()[0].chunk(2)[ranks.rank]).sum().backward()
    weights.sync_replicated_gradients()
    return weights.tensors()["layers.1.running_mean"].clone()


def everything(folder: str) -> tuple[Any, ...]:
    return weights_from_everywhere(folder), train_all(folder, REQUESTS), first_statistics(), moved_buffers()


@pytest.fixture(scope="module")
def two_ranks(files: Path) -> list[tuple[Any, ...]]:
    return run_ranks(everything, 2, str(files))


@pytest.fixture(scope="module")
def one_rank(files: Path) -> tuple[Any, ...]:
    return weights_from_everywhere(str(files)), train_all(str(files), REQUESTS)


@pytest.mark.lengthy
@pytest.mark.parametrize(("kind", "source"), CASES)
def test_weights_are_those_of_the_source_on_one_rank_and_two(
    kind: str, source: str, one_rank: Any, two_ranks: list[Any]
) -> None:
    model = made(kind)
    expected = named_tensors(model)
    for found in (one_rank, *two_ranks):
        tensors = found[0][kind, source]
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].dtype == (torch.float64 if tensor.is_floating_point() else tensor.dtype)
            assert torch.equal(tensors[name], tensor.detach().to(tensors[name].dtype)), name


@pytest.mark.lengthy
@pytest.mark.parametrize("number", [n for n, request in enumerate(REQUESTS) if request[2] == "fp64"])
def test_training_equals_plain_torch(number: int, one_rank: Any, two_ranks: list[Any]) -> None:
    kind, name, _ = REQUESTS[number]
    reference = trained_plainly(kind, name)
    assert max(reference["norms"]) > 1.0, "the clip must be active"
    assert furthest(one_rank[1][number], reference) < 1e-12
    if kind != "convolutions":  # a batch norm depends on the micro-batch
        for found in two_ranks:
            assert furthest(found[1][number], reference) < 1e-12


def test_half_precision_has_one_arithmetic_and_keeps_norms_and_scalars_right(
    one_rank: Any, two_ranks: list[Any]
) -> None:
    for kind in ("bare", "convolutions"):
        number = REQUESTS.index((kind, "SGD", "bf16"))
        reference = trained_plainly(kind, "SGD")
        for found in (one_rank, *two_ranks):
            tensors = found[1][number]["tensors"]
            assert all(tensor.dtype != torch.bfloat16 for tensor in tensors.values())
            if kind == "bare":
                assert abs(found[1][number]["losses"][-1] / reference["losses"][-1] - 1) < 0.05
                for name in ("scale", "weight"):
                    assert torch.allclose(tensors[name].double(), reference["tensors"][name], atol=0.03)
                assert torch.equal(tensors["unused"], torch.tensor(2.0))


def test_running_statistics_are_averaged_over_ranks(two_ranks: list[Any]) -> None:
    number = REQUESTS.index(("convolutions", "SGD", "fp64"))
    first, second = (found[1][number]["tensors"] for found in two_ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["layers.1.num_batches_tracked"]) == STEPS
    # The first layer's inputs do not depend on its norm, so the first step's statistics are known.
    halves = []
    for half in data()[0].chunk(2):
        model = made("convolutions").double()
        model(half)
        halves.append(model.state_dict()["layers.1.running_mean"].clone())
    assert not torch.equal(*halves)
    for found in two_ranks:
        assert torch.allclose(found[2], (halves[0] + halves[1]) / 2, atol=1e-14, rtol=0)


def test_other_buffers_that_forwards_change_become_rank_0s(two_ranks: list[Any]) -> None:
    (_, agreed), (own, same) = (found[3] for found in two_ranks)
    assert {name: tensor.tolist() for name, tensor in own.items()} == {
        "seen": 4.0 * WIDTH, "calls": 2, "still": agreed["still"].tolist()
    }  # fmt: skip
    assert agreed["seen"].item() == 1.0 * WIDTH
    assert agreed["calls"].item() == 1
    assert all(torch.equal(agreed[name], same[name]) for name in agreed)


def load(source: WeightSource, kind: str = "tied") -> list[str]:
    model, _ = build_empty(KINDS[kind], SEED)
    ranks = Ranks(0, 1, torch.device("cpu"))
    return load_initial_weights(
        source, model, model, build=KINDS[kind], seed=SEED, dtype=torch.float32, ranks=ranks, device=ranks.device
    )


def without(name: str, kind: str = "tied") -> dict[str, torch.Tensor]:
    state = dict(made(kind).state_dict())
    del state[name]
    return state


def test_names_and_shapes_that_do_not_fit_are_told_with_a_remedy() -> None:
    state = dict(made("tied").state_dict())
    load(without("out.weight"))
    load(without("into.weight"))
    with pytest.raises(ModelError, match=r"1 missing: out\.bias\n  where:  initial_weights\(\)\n.*state_dict\(\)"):
        load(without("out.bias"))
    with pytest.raises(ModelError, match=r"1 without a place in the model: more"):
        load({**state, "more": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"begin with 'module\.': give them without it"):
        load({f"module.{name}": tensor for name, tensor in state.items()})
    with pytest.raises(ModelError, match=r"'out\.bias' has shape \[6\] in the model, the weights give \[7\]"):
        load({**state, "out.bias": torch.zeros(7)})
    with pytest.raises(ModelError, match=r"'out\.bias' is floating-point in the model, the weights give int64"):
        load({**state, "out.bias": torch.zeros(6, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"'out\.weight' is the same parameter as 'into\.weight' .* differ"):
        load({**state, "out.weight": state["out.weight"] + 1})
    with pytest.raises(ModelError, match=r"function for 'out\.bias' returned a float"):
        load({**state, "out.bias": lambda: 1.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match=r"1 missing: kept_shift"):
        load(without("kept_shift", "bare"), "bare")
    load({**without("kept_shift", "bare"), "kept_shift": None}, "bare")
    with pytest.raises(
        ModelError, match=r"for 'encoder', which is no submodule of Tied\n.*\n.*it has into, blocks, out"
    ):
        load({"": None, "encoder": None})


def test_the_longest_name_decides_where_values_come_from(tmp_path: Path) -> None:
    """A new head beside a file that has an old one, and a value of its own for a tensor that the file has, too."""
    stored = {name: tensor + 1 for name, tensor in made("tied").state_dict().items()}
    save_file({name: tensor for name, tensor in stored.items() if name != "out.weight"}, tmp_path / "all.safetensors")
    model, _ = build_empty(KINDS["tied"], SEED)
    fresh, ranks = dict(made("tied").state_dict()), Ranks(0, 1, torch.device("cpu"))
    bias = next(name for name in stored if name.startswith("blocks") and name.endswith("bias"))
    load_initial_weights(
        {"": str(tmp_path / "all.safetensors"), "out.bias": None, bias: lambda: torch.full_like(stored[bias], 7.0)},
        model, model, build=KINDS["tied"], seed=SEED, dtype=torch.float32, ranks=ranks, device=ranks.device,
    )  # fmt: skip
    wanted = {**stored, "out.bias": fresh["out.bias"], bias: torch.full_like(stored[bias], 7.0)}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("whole_first", [True, False])
def test_of_two_files_that_of_the_part_decides(whole_first: bool, tmp_path: Path) -> None:
    """In whatever order they are given; a part whose file lacks a tensor is not drawn by an entry for everything."""
    stored = {key: tensor.clone() for key, tensor in made("tied").state_dict().items()}
    name = next(name for name in stored if name.startswith("blocks"))
    part = {key.removeprefix("blocks."): tensor + 2.0 for key, tensor in stored.items() if key.startswith("blocks.")}
    save_file({key: tensor for key, tensor in stored.items() if key != "out.weight"}, tmp_path / "all.safetensors")
    save_file(part, tmp_path / "part.safetensors")
    ranks = Ranks(0, 1, torch.device("cpu"))

    def begun(source: WeightSource) -> dict[str, torch.Tensor]:
        model, _ = build_empty(KINDS["tied"], SEED)
        form: dict[str, Any] = {"seed": SEED, "dtype": torch.float32, "ranks": ranks, "device": ranks.device}
        load_initial_weights(source, model, model, build=KINDS["tied"], **form)
        return dict(model.state_dict())

    entries = {"": str(tmp_path / "all.safetensors"), "blocks": str(tmp_path / "part.safetensors")}
    found = begun(entries if whole_first else dict(reversed(entries.items())))
    assert torch.equal(found[name], stored[name] + 2)
    save_file(dict(list(part.items())[1:]), tmp_path / "part.safetensors")
    with pytest.raises(ModelError, match="1 missing"):
        begun({**entries, "": None})


class Joint(nn.Module):
    """A model of transformers inside another module."""

    def __init__(self, config: BertConfig, *, pools: bool) -> None:
        super().__init__()
        self.encoder, self.head = BertModel(config, add_pooling_layer=pools), nn.Linear(8, 3)


def test_a_part_of_a_model_of_transformers_may_begin_anew(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    stored = Joint(config, pools=False).encoder
    stored.save_pretrained(tmp_path)

    def build() -> nn.Module:
        return Joint(config, pools=True)

    def begin(source: WeightSource) -> dict[str, torch.Tensor]:
        model, _ = build_empty(build, SEED)
        ranks = Ranks(0, 1, torch.device("cpu"))
        load_initial_weights(
            source, model, model, build=build, seed=SEED, dtype=torch.float32, ranks=ranks, device=ranks.device
        )
        return dict(model.state_dict())

    torch.manual_seed(SEED)
    fresh, words = build().state_dict(), "encoder.embeddings.word_embeddings.weight"
    source: dict[str, Any] = {"encoder": str(tmp_path), "encoder.pooler": None, "head": None}
    found = begin({**source, words: lambda: torch.ones(20, 8)})
    assert torch.equal(found[words], torch.ones(20, 8))
    for name in ("encoder.pooler.dense.weight", "head.weight"):
        assert torch.equal(found[name], fresh[name])
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(found[f"encoder.{name}"], stored.get_parameter(name))
    with pytest.raises(ModelError, match=r"2 missing: head\.weight, head\.bias\n.*initial_weights\(\)\n.*'head': None"):
        begin({"encoder": str(tmp_path), "encoder.pooler": None})


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for gone in (
        tmp_path / "gone.safetensors",
        "gone.safetensors",
        "weights/gone.pt",
    ):  # texts name no model on the Hub
        with pytest.raises(ModelError, match=r"gone\.(safetensors|pt) does not exist"):
            load(gone)
    with pytest.raises(ModelError, match="initial_weights returned a int, which holds no weights"):
        load(5)  # pyright: ignore[reportArgumentType]
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ModelError, match=r"notes\.txt is no weight file"):
        load(tmp_path / "notes.txt")
    torch.save(made("tied"), tmp_path / "module.pt")  # a pickled module could execute anything
    with pytest.raises(ModelError, match="cannot be read safely"):
        load(tmp_path / "module.pt")
    state = {name: tensor.clone() for name, tensor in made("tied").state_dict().items()}
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"is in both a\.safetensors and b\.safetensors"):
        load(tmp_path)


def test_a_constructor_that_needs_values_is_run_for_real_with_a_note() -> None:
    model, notes = build_empty(KINDS["reading"], SEED)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_parameter("bias") is model.get_parameter("inner.bias")
    assert len(notes) == 1
    assert notes[0].startswith("Reading cannot be built without memory")
    assert build_empty(KINDS["tied"], SEED)[1] == []

    def broken() -> nn.Module:
        raise KeyError("width")

    with pytest.raises(KeyError, match="width"):
        build_empty(broken, SEED)
    with pytest.raises(ModelError, match=r"weight of LazyLinear gets its shape from a first forward"):
        build_empty(lambda: nn.LazyLinear(3), SEED)


def test_what_is_built_is_a_module() -> None:
    with pytest.raises(ModelError, match=r"build returned a NoneType, not a torch\.nn\.Module"):
        build_empty(lambda: None, SEED)  # pyright: ignore[reportArgumentType]


def test_building_leaves_no_trace_in_the_callers_draws() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load(None)
    assert torch.equal(torch.rand(1), expected)


class Drawn(nn.Module):
    """A buffer that is drawn, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("draw", torch.randn(3), persistent=False)


class Computed(nn.Module):
    """A buffer that is computed from weights, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("norm", self.inner.weight.detach().norm(), persistent=False)


class Masked(nn.Module):
    """A buffer that is made where the weights are, of numbers of its own, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.arange(3.0, device=self.inner.weight.device), persistent=False)


def test_a_buffer_that_is_made_on_the_device_of_the_weights_has_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, notes = build_empty(Masked, SEED)
    assert model.get_buffer("mask").tolist() == [0, 1, 2]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert notes == [
        "Masked cannot be built without memory, so every rank first builds it whole (its buffer mask has no values "
        "then, and is not saved)"
    ]
    monkeypatch.setitem(KINDS, "masked", Masked)
    load(None, "masked")


def test_buffers_that_no_checkpoint_restores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "drawn", Drawn)
    monkeypatch.setitem(KINDS, "computed", Computed)
    (note,) = load(None, "drawn")
    assert note.startswith("the buffer draw comes out differently each time")
    assert "persistent=True" in note
    with pytest.raises(ModelError, match="the buffer norm is computed from parameters"):
        load(None, "computed")


def test_freezing_takes_every_name_of_a_parameter() -> None:
    model, _ = build_empty(KINDS["tied"], SEED)
    freeze(model, [r"^out\.weight"])
    assert not model.get_parameter("into.weight").requires_grad
    assert model.get_parameter("out.bias").requires_grad
    with pytest.raises(ConfigError, match="pattern nothing matches no parameter"):
        freeze(model, ["nothing"])
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(model, ["."])
    with pytest.raises(ModelError, match="ReLU has no parameter that is trained"):
        freeze(nn.ReLU(), [])


def test_a_pattern_of_rates_that_matches_nothing_is_refused_before_training() -> None:
    model = made("tied")
    config = optim("AdamW").model_copy(update={"groups": [ParameterGroup(pattern="head", lr=0.1)]})
    with pytest.raises(ConfigError, match=r"pattern head matches no trainable parameter(.|\n)*into\.weight"):
        build_optimizer(dict(model.named_parameters()), config)


def test_a_pattern_of_rates_for_a_further_name_of_a_parameter_is_answered_with_the_first() -> None:
    model = made("tied")
    config = optim("AdamW").model_copy(update={"groups": [ParameterGroup(pattern=r"^out\.weight", lr=0.1)]})
    with pytest.raises(ConfigError, match=r"out\.weight is shared with into\.weight, which is its name here"):
        build_optimizer(dict(model.named_parameters()), config, shared=shared_names(model))


def test_a_model_without_values_gets_them_back_with_shared_weights_shared() -> None:
    kept = make_model(40, tie_word_embeddings=True)
    empty: Any = without_values(kept)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(parameter.is_meta for parameter in kept.parameters())
    values = {name: p.detach().clone() for name, p in kept.named_parameters(remove_duplicate=False)}
    set_values(empty, values)
    assert empty.get_input_embeddings().weight is empty.get_output_embeddings().weight
    ids = torch.arange(6)[None]
    assert torch.equal(empty(ids).logits, kept(ids).logits)
