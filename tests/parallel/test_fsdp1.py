"""FSDP1 gives the numbers of one process and the bits of FSDP2, and both continue and export each other's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardtune.batch import LossSum, Prompt
from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.loader.step_loader import BatchMaker, Limits
from shardtune.errors import ModelError, ShardtuneError
from shardtune.evaluate.generate import Sampling
from shardtune.optim.build import build_optimizer
from shardtune.parallel import fsdp1
from shardtune.parallel.fsdp1_weights import FlatWeights
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.training.step import optimizer_step
from shardtune.training.whole_step_loss import WholeStep
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.model_state import ModelState
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, recipe, save_model, save_rows, whole
from tests.training.test_whole_step_loss import ROWS as VIEWS
from tests.training.test_whole_step_loss import Rows as Views
from tests.training.test_whole_step_loss import compare, make_adapter, plain

FSDP1 = {"actor__training_backend": "fsdp1"}
EXACT = 1e-10
TORCH_SUMS_IN_FP32 = Version(torch.__version__) >= Version("2.15")


class Hidden:
    """What a class of a user's may return; FSDP looks for tensors in dicts, lists, tuples and dataclasses alone."""

    def __init__(self, x: torch.Tensor) -> None:
        self.inside = [x]


class Block(nn.Module):
    """A frozen matrix, a trained one, and one that no forward uses; fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.matrix = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(x + torch.tanh(self.matrix(self.frozen(x))))


class Net(nn.Module):
    """Parameters of awkward sizes, a scalar among them, and, if tied, the weights of one layer used by another."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(3, 3, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> LossSum:
        hidden = self.first(x)
        for block in self.blocks:
            (hidden,) = block(hidden).inside
        out = self.last(hidden).double()
        return LossSum((out * out).sum() * self.scale.double(), float(len(x)))


@dataclass
class Rows:
    """A micro-batch."""

    x: torch.Tensor
    weights: dict[str, float]


@dataclass
class Told:
    """What a few steps gave, whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


ROWS = 12


def train_net(
    backend: str, replicate: int, precision: str, reduce_each: bool, fault: str = "", tied: bool = True
) -> Told:
    """Three steps of AdamW with decay, over three micro-batches a rank, the last rank with fewer rows."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    size = dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device("cpu")
    ranks = Ranks(0, 1, device)
    if size > 1:
        layout = Layout(replicate, size // replicate, flat=backend == "fsdp1")
        ranks = lay_out(layout, dist.get_rank(), device)
    torch.manual_seed(3)
    model = Net(tied)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    inside = model.blocks[1].get_submodule("matrix")
    hold = shard_model(model, [*model.blocks, inside], ranks, precision)
    materialise(model, dtype=dtype, device=device)
    weights = hold(model, reduce_each=reduce_each)
    assert isinstance(weights, FlatWeights) == (backend == "fsdp1" and size > 1)
    if fault:
        assert isinstance(weights, FlatWeights)
        if fault == "divided":
            for shell in weights._flattened.wrapped:
                shell._gradient_postdivide_factor = 2
        if fault == "not held":
            weights._hold = lambda: None  # type: ignore[method-assign]
        if fault == "decays what is unused":
            for shell in weights._flattened.shells:
                shell.used.update(shell.watched)
                shell.used = _Always(shell.watched)
    config = load_recipe(NET_RECIPE, files_must_exist=False).actor.optim
    optimizer = build_optimizer(weights.trainable(), config, weights.shapes)
    told = Told(names=sorted(name for group in optimizer.param_groups for name in group["names"]))
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(4)).to(dtype)
    share = x[ROWS * ranks.rank // size : ROWS * (ranks.rank + 1) // size]
    for step in range(3):
        result = optimizer_step(
            lambda batch: {"loss": model(batch.x)},
            [Rows(part, {"loss": float(len(part))}) for part in share.tensor_split(3)],
            {"loss": float(ROWS)},
            weights,
            optimizer,
            ranks,
            draws=(0, step, ranks.rank),
            clip=0.5,
        )
        told.losses.append(result.loss)
        told.norms.append(result.gradient_norm)
    told.tensors = {name: whole(tensor) for name, tensor in weights.tensors().items()}
    return told


class _Always(set[str]):
    """A set that stays as it is."""

    def clear(self) -> None:
        pass


NET_RECIPE = {
    "actor": {"optim": {"lr": 0.05, "weight_decay": 0.1}, "model": {"model_path": "none"}},
    "data": {"train_data_paths": "none"},
}


def train_nets(requests: Sequence[tuple[Any, ...]]) -> list[Told]:
    return [train_net(*request) for request in requests]


def apart(one: Told, other: Told) -> float:
    """The largest difference, relative to the largest value of its kind."""
    assert one.tensors.keys() == other.tensors.keys()
    numbers = [abs(a / b - 1) for a, b in zip(one.losses + one.norms, other.losses + other.norms, strict=True)]
    tensors = [float((one.tensors[name] - other.tensors[name]).abs().max()) for name in one.tensors]
    return max(numbers + tensors)


@pytest.fixture(scope="module")
def alone() -> Told:
    told = train_net("fsdp1", 1, "fp64", False)
    assert min(told.norms) > 0.5, "the clip must be active"
    return told


@pytest.mark.parametrize(("ranks", "copies"), [(2, [1]), pytest.param(4, [1, 2], marks=pytest.mark.slow)])
def test_awkward_shapes_equal_one_process(ranks: int, copies: list[int], alone: Told) -> None:
    """Frozen, shared, scalar and unused parameters too, a unit in another, and units that are computed twice."""
    requests = [("fsdp1", replicate, "fp64", each) for replicate in copies for each in (False, True)]
    for told in run_ranks(train_nets, ranks, requests, timeout=120):
        for result in told:
            assert apart(result, alone) < EXACT
            assert result.names == alone.names


@pytest.mark.slow
def test_rounded_numbers_are_those_of_fsdp2() -> None:
    """Weights that two layers use in bf16 are apart where torch sums the two gradients in fp32 under FSDP2 alone.

    Since 2.15 it does so in a step's first micro-batch, unless that is reduced by itself.
    """
    cases = [("fp32", False, "", True), ("bf16", True, "", True), ("bf16", False, "", False), ("bf16", False, "", True)]
    requests = [(backend, 1, *case) for case in cases for backend in ("fsdp", "fsdp1")]
    one_sum = 2**-9 if TORCH_SUMS_IN_FP32 else 1e-6
    for told in run_ranks(train_nets, 2, requests):
        differences = [apart(one, two) for two, one in zip(told[::2], told[1::2], strict=True)]
        assert max(differences[:3]) < 1e-6
        assert differences[3] < one_sum


@pytest.mark.slow
def test_known_faults_would_be_noticed(alone: Told) -> None:
    requests = [
        ("fsdp1", 1, "fp64", False, "divided"),
        ("fsdp1", 1, "fp64", False, "decays what is unused"),
        ("fsdp1", 1, "bf16", False, "not held"),
        ("fsdp", 1, "bf16", False),
    ]
    divided, decays, not_held, right = run_ranks(train_nets, 2, requests)[0]
    assert apart(divided, alone) > 0.1
    assert apart(decays, alone) > 1e-3
    assert apart(not_held, right) > 1e-4


class Skipping(Net):
    """Leaves a unit out where a micro-batch is a single row."""

    def forward(self, x: torch.Tensor) -> LossSum:
        (hidden,) = self.blocks[0](self.first(x)).inside
        if len(x) > 1:
            (hidden,) = self.blocks[1](hidden).inside
        return LossSum(hidden.square().sum(), float(len(x)))


def skip_a_unit(precision: str, reduce_each: bool) -> str:
    """The error of a step whose last micro-batch leaves out what its first one used."""
    device, dtype = torch.device("cpu"), torch.float64 if precision == "fp64" else torch.float32
    ranks = lay_out(Layout(1, dist.get_world_size(), flat=True), dist.get_rank(), device)
    model = Skipping()
    hold = shard_model(model, [*model.blocks], ranks, precision)
    materialise(model, dtype=dtype, device=device)
    weights = hold(model, reduce_each=reduce_each)
    for number, rows in enumerate((2, 1)):
        weights.begin_micro_batch(last=number == 1)
        model(torch.ones(rows, 3, dtype=dtype)).total.backward()
    try:
        weights.sync_replicated_gradients()
    except ModelError as error:
        return str(error)
    used = weights.parameters["blocks.1.matrix.weight"].grad
    assert used is not None
    return "summed"


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_unit_that_the_last_micro_batch_leaves_out_is_no_silent_loss(precision: str) -> None:
    for said in run_ranks(skip_a_unit, 2, precision, False):
        assert "FSDP1 has not summed its gradient" in said
    assert run_ranks(skip_a_unit, 2, precision, True) == ["summed", "summed"]


# Runs of a language model with tied embeddings.


@dataclass
class Run:
    """What a worker does, on all ranks.

    Attributes:
        values: its recipe.
        load: a checkpoint to continue from.
        steps: to train.
        save: where a checkpoint goes, after them.
        export: where the model goes, after them.
        merge: its adapter.
        answers: whether to evaluate and to answer prompts as well.
    """

    values: dict[str, Any]
    load: Path | None = None
    steps: int = 2
    save: Path | None = None
    export: Path | None = None
    merge: bool = False
    answers: bool = False


@dataclass
class Done:
    """What it gave; tensors are whole."""

    flat: bool
    losses: list[float]
    tensors: dict[str, torch.Tensor]
    facts: tuple[int, int]
    evaluation: dict[str, float]
    answers: list[list[int]]
    bytes: int


def do(run: Run) -> Done:
    worker = SFTWorker(load_recipe(run.values), report=quiet)
    worker.setup()
    if run.load is not None:
        worker.load_checkpoint(run.load)
    losses = [worker.run_training()["train/loss"] for _ in range(run.steps)]
    evaluation: dict[str, float] = {}
    answers: list[list[int]] = []
    if run.answers:
        evaluation = worker.run_eval()
        prompts = [Prompt(np.arange(3, 3 + length)) for length in (4, 7, 5)]
        answers = worker.generator().continuations(prompts, Sampling(max_new_tokens=6))
    if run.save is not None:
        worker.save_checkpoint(run.save, run.steps)
    if run.export is not None:
        worker.export(run.export, "auto", merge=run.merge)
    facts = worker.summary()
    done = Done(
        isinstance(worker.weights, FlatWeights),
        losses,
        {name: whole(tensor) for name, tensor in worker.weights.tensors().items()},
        (facts.parameters, facts.trainable),
        evaluation,
        answers,
        worker.state.checkpoint_bytes(),
    )
    worker.release()
    return done


def do_all(runs: Sequence[Run]) -> list[Done]:
    return [do(run) for run in runs]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True)
class Workspace:
    """A model and rows on disk, and recipes with them."""

    folder: Path

    def recipe(self, **changes: Any) -> dict[str, Any]:
        """Two micro-batches a step on two ranks; not clipped, as norms of other pieces are summed in another order."""
        keys = {
            "actor__micro_batch_size": 2,
            "actor__model__precision": "fp32",
            "actor__optim__clip_grad": None,
            "data__eval_data_paths": str(self.folder / "rows.jsonl"),
        }
        return recipe(self.folder / "dense", self.folder / "rows.jsonl", **{**keys, **changes})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("fsdp1")
    save_model("dense", folder / "dense")
    save_rows(folder / "rows.jsonl")
    return Workspace(folder)


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> tuple[Done, Done]:
    """The same run with FSDP2 and with FSDP1 on two ranks, each with a checkpoint and an export."""
    at = workspace.folder
    runs = [
        Run(workspace.recipe(), save=at / "saved2", export=at / "export2", answers=True),
        Run(workspace.recipe(**FSDP1), save=at / "saved1", export=at / "export1", answers=True),
    ]
    two, one = run_ranks(do_all, 2, runs, timeout=120)[0]
    return one, two


def test_it_is_fsdp2_to_the_last_bit(trained: tuple[Done, Done]) -> None:
    one, two = trained
    assert one.flat
    assert not two.flat
    assert one.losses == two.losses
    assert same_bits(one.tensors, two.tensors)
    assert one.facts == two.facts
    assert one.bytes == two.bytes
    assert one.evaluation == two.evaluation
    assert one.answers == two.answers
    assert min(len(tokens) for tokens in one.answers) > 1


def test_exports_are_the_same(workspace: Workspace, trained: tuple[Done, Done]) -> None:
    one, two = workspace.folder / "export1", workspace.folder / "export2"
    assert same_bits(load_file(one / "model.safetensors"), load_file(two / "model.safetensors"))
    assert "lm_head.weight" not in load_file(one / "model.safetensors"), "tied"
    assert (one / "config.json").read_text() == (two / "config.json").read_text()


@pytest.mark.slow
def test_checkpoints_continue_on_any_layout(workspace: Workspace, trained: tuple[Done, Done]) -> None:
    saved1, saved2 = workspace.folder / "saved1", workspace.folder / "saved2"
    either = [(keys, saved) for keys in ({}, FSDP1) for saved in (saved1, saved2)]
    continued = run_ranks(do_all, 2, [Run(workspace.recipe(**keys), saved) for keys, saved in either], timeout=120)[0]
    assert all(same_bits(done.tensors, continued[0].tensors) for done in continued)
    assert [done.flat for done in continued] == [False, False, True, True]
    hybrid = workspace.recipe(**FSDP1, actor__parallel__data_replicate=2)
    others = [
        do(Run(workspace.recipe(**FSDP1), saved1, save=workspace.folder / "alone")),
        *run_ranks(do_all, 4, [Run(hybrid, saved1), Run(hybrid, workspace.folder / "alone", steps=0)], timeout=120)[0],
    ]
    for done in others:
        assert max(float((done.tensors[n] - t).abs().max()) for n, t in continued[0].tensors.items()) < 1e-4
    assert same_bits(others[0].tensors, others[2].tensors)


LORA = {
    "actor__model__is_lora": True,
    "actor__model__lora__r": 4,
    "actor__model__lora__dropout": 0.0,
    "actor__model__lora__target_modules": ["q_proj", "down_proj"],
}


BF16 = {"actor__model__precision": "bf16", "actor__model__lora__base_dtype": "bf16"}


@pytest.mark.parametrize("kept", [{}, pytest.param(BF16, marks=pytest.mark.slow)])
def test_adapters_are_trained_saved_and_merged(workspace: Workspace, tmp_path: Path, kept: dict[str, Any]) -> None:
    """With a base in another dtype than the adapter too, which FSDP1 cannot join with it."""
    at = tmp_path
    keys = [{**LORA, **kept}, {**LORA, **kept, **FSDP1}]
    runs = [Run(workspace.recipe(**k), save=at / f"saved{n}", export=at / f"adapter{n}") for n, k in enumerate(keys)]
    runs += [
        Run(workspace.recipe(**k), at / f"saved{1 - n}", export=at / f"merged{n}", merge=True)
        for n, k in enumerate(keys)
    ]
    two, one, two_on, one_on = run_ranks(do_all, 2, runs, timeout=120)[0]
    assert one.flat
    assert one.losses == two.losses
    assert same_bits(one.tensors, two.tensors)
    assert one.facts == two.facts
    assert same_bits(one_on.tensors, two_on.tensors)
    assert one_on.losses != one.losses
    for name, file in (("adapter", "adapter_model.safetensors"), ("merged", "model.safetensors")):
        assert same_bits(load_file(at / f"{name}0" / file), load_file(at / f"{name}1" / file))


def held_while_cut(values: dict[str, Any]) -> tuple[list[int], int, int]:
    """How much of the parameters is here before each unit is cut and in the end; all of them, and the largest unit."""
    worker = SFTWorker(load_recipe(values), report=quiet)
    root = worker.model_provider_func()
    parameters = list(root.parameters())
    units = [
        sum(p.numel() for p in unit.parameters()) for unit in worker.task.shard_units(worker.task.inner_model(root))[0]
    ]
    in_all = sum(parameter.numel() for parameter in parameters)
    largest = max(*units, in_all - sum(units))
    held: list[int] = []

    def note() -> None:
        held.append(sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in root.parameters()))

    def noted(*args: Any, **kwargs: Any) -> FullyShardedDataParallel:
        note()
        return FullyShardedDataParallel(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp1, "FullyShardedDataParallel", noted)
        ModelState(worker.recipe, worker.ranks, worker.task, lambda: root, worker.tokenizer)
    note()
    return held, in_all, largest


def test_no_rank_holds_the_whole_model(workspace: Workspace) -> None:
    for held, in_all, largest in run_ranks(held_while_cut, 2, workspace.recipe(**FSDP1)):
        assert len(held) == 4, "two layers, the rest, and the end"
        assert largest < 0.5 * in_all
        assert max(held) <= 0.52 * in_all + 0.5 * largest
        assert held[-1] < 0.52 * in_all


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"actor__parallel__tensor": 2}, "actor.parallel.tensor: 2"),
        ({"actor__parallel__expert": 2}, "actor.parallel.expert: 2"),
        ({"actor__fsdp_config__cpu_offload": True}, "actor.fsdp_config.cpu_offload: true"),
        ({"actor__model__compile": True}, "actor.model.compile: true"),
        ({**LORA, "actor__model__lora__base_dtype": "nf4"}, "actor.model.lora.base_dtype: nf4"),
        ({"actor__parallel__data_replicate": 2}, "use actor.training_backend: ddp"),
    ],
)
def test_what_it_cannot_do_is_refused_before_launch(workspace: Workspace, change: dict[str, Any], names: str) -> None:
    values = workspace.recipe(**FSDP1, **change, actor__model__precision="bf16", runner__nproc_per_node=2)
    with pytest.raises(ShardtuneError, match=names):
        load_recipe(values)


def whole_steps(layout: Layout) -> Any:
    """Steps with one loss of all rows: forwards without a graph, then with one, and an evaluation after them."""
    adapter, ranks = make_adapter(), lay_out(layout, dist.get_rank(), torch.device("cpu"))
    torch.manual_seed(0)
    model = adapter.build().double()
    root = adapter.root(model)
    weights = shard_model(root, [model.get_submodule("tower.0")], ranks, "fp64", entry_points=root.entry_points)(model)
    assert isinstance(weights, FlatWeights)
    optimizer = build_optimizer(weights.trainable(), adapter.recipe.actor.optim, weights.shapes)
    maker = BatchMaker(Views(), Limits(3), adapter, rank=ranks.rank, num_ranks=ranks.world_size)
    step, numbers = WholeStep(adapter, ranks), np.arange(VIEWS)
    results = [
        optimizer_step(
            root, maker.micro_batches(numbers), {"loss": float(VIEWS)}, weights, optimizer, ranks,
            draws=(0, number, ranks.rank), clip=0.5, accumulate=step.accumulate,
        )
        for number in range(2)
    ]  # fmt: skip
    measured = step.evaluate(root, iter([maker.micro_batches(numbers)]), poll=lambda: None)
    losses, norms = [result.loss for result in results], [result.gradient_norm for result in results]
    return losses, norms, {name: whole(t) for name, t in weights.tensors().items()}, measured["loss/loss"].mean


def test_a_loss_of_a_whole_step_equals_one_process() -> None:
    for told in run_ranks(whole_steps, 2, Layout(1, 2, flat=True)):
        compare(told, plain())
