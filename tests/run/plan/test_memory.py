"""The memory of a rank: as planned from shapes, and as torch allocates it in a real step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

from shardtune.models.loss import LOGITS_PER_CHUNK, chunk_rows
from shardtune.parallel.torch_private.operations import FakeTensor
from shardtune.parallel.torch_private.processes import open_group_of_one
from shardtune.run.plan import plan as planning
from shardtune.run.plan.known_shapes import KnownShapes
from shardtune.run.plan.ledger import Ledger, as_on_cuda
from shardtune.run.plan.plan import Planner, planner
from shardtune.run.plan.simulation import AVERAGE, MOMENTS, WEIGHTS
from shardtune.run.plan.timeline import fullest
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.quantized import FP8_SETTINGS
from tests.support.tiny_run import Tiny, make_tiny
from tests.support.tiny_tasks import rows, save_encoder, write

WIDTH = 64
LIMIT = 0.03
"""Kernels of a CPU take scratch memory that shapes do not show; of a model this small it is a few per cent."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"), width=WIDTH, train_rows=12)


def plans(tiny: Tiny, *changes: str, ranks: int | None = None) -> Planner:
    source = tiny.folder / "recipe.yaml"
    source.write_text(
        f"model: {{model_path: {tiny.folder / 'model'}}}\nmicro_batch_size: 6\nglobal_batch_size: 12\n"
        f"data: {{train_data_paths: {tiny.folder / 'train.jsonl'}, num_workers: 0, cache_dir: {tiny.folder / 'c'}}}\n"
    )
    device = [] if ranks else ["runner.device=cpu"]
    return planner(str(source), [*device, *changes], ranks=ranks, report=lambda _: None)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("model.precision=fp32",), marks=pytest.mark.slow),
        pytest.param(("model.precision=bf16", "optim.state_dtype=int8"), marks=pytest.mark.slow),
        ("model.precision=bf16", "model.gradient_checkpointing=selective"),
        ("model.precision=pure_bf16",),
        pytest.param(("model.precision=bf16", "model.is_lora=true", "model.lora.r=4"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_planned_memory_is_what_a_step_allocates(tiny: Tiny, changes: tuple[str, ...]) -> None:
    found = plans(tiny, *changes)
    planned = found.plan()
    assert not planned.notes
    measured = allocated(SFTWorker(found.recipe, report=lambda _: None))
    assert planned.peak == pytest.approx(measured, rel=LIMIT)


def allocated(worker: SFTWorker) -> float:
    """The most bytes that the second step of a worker holds: what it finds, and torch's own count of what it adds."""
    worker.setup()
    worker.run_training()
    states = [value for state in worker.optimizer.state.values() for value in state.values()]
    model = worker.inner_model
    lasting = [*worker.weights.parameters.values(), *model.parameters(), *model.buffers(), *states]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in lasting if torch.is_tensor(t)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        worker.run_training()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    worker.release()
    return sum(storages.values()) + most


@pytest.mark.slow
def test_a_loss_over_all_rows_of_a_step_is_planned(tmp_path: Path) -> None:
    """Of an embedding model: the outputs of four micro-batches, of which two are computed, and their similarities."""
    model = save_encoder(tmp_path / "model")
    source = tmp_path / "recipe.yaml"
    source.write_text(
        f"model: {{model_path: {model}, model_type: embedding, precision: fp32}}\n"
        "micro_batch_size: 32\nglobal_batch_size: 128\n"
        f"data: {{train_data_paths: {write(tmp_path / 'rows.jsonl', rows('embedding', 128))}, num_workers: 0}}\n"
    )
    found = planner(str(source), ["runner.device=cpu"], report=lambda _: None)
    planned = found.plan()
    assert not planned.notes
    assert planned.peak == pytest.approx(allocated(SFTWorker(found.recipe, report=lambda _: None)), rel=2 * LIMIT)
    on_two = planner(str(source), [], ranks=2, report=lambda _: None).plan()
    assert not on_two.notes
    assert on_two.memory is not None


@pytest.mark.slow
def test_several_ranks_need_not_exist(tiny: Tiny) -> None:
    """Shards, states and their parts of tensor ranks are those of the first rank, to the byte of a float."""
    alone = plans(tiny, "model.precision=fp32").plan().memory
    shared = plans(tiny, "runner.device=cpu", "model.precision=fp32", "model.gradient_checkpointing=true", ranks=4)
    plan = shared.plan()
    assert alone is not None
    assert plan.memory is not None
    assert str(plan.layout) == "shard 4"
    for kind in (WEIGHTS, MOMENTS):
        assert plan.memory[kind] == pytest.approx(alone[kind] / 4, rel=0.02)
    both = shared.plan(["parallel.tensor=2"])
    assert str(both.layout) == "shard 2 x tensor 2"
    assert both.memory is not None
    assert not both.notes
    assert both.memory[WEIGHTS] == pytest.approx(plan.memory[WEIGHTS], rel=0.05)


def test_what_operations_on_sharded_tensors_make_is_counted() -> None:
    """torch computes it on this rank's part, where the ledger is off."""
    open_group_of_one(2)
    try:
        mesh, ledger = init_device_mesh("cpu", (2,)), Ledger()
        with ledger.counting():
            half = DTensor.from_local(torch.empty(3, 4), mesh, [Shard(0)])
            both = half + half
            codes = torch.zeros_like(both, dtype=torch.uint8)
            assert codes.shape == (6, 4)
            assert sum(ledger.held().values()) == 2 * 12 * 4 + 12
            del both
        assert sum(ledger.held().values()) == 12 * 4 + 12
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.lengthy
def test_a_base_is_planned_in_the_dtype_of_its_files(tiny: Tiny, tmp_path: Path) -> None:
    """Shards of bf16 where all files are, or a config alone says so; of fp32 where FP8 with scales in fp32 is read."""
    stored = load_file(tiny.folder / "model" / "model.safetensors")
    config = json.loads((tiny.folder / "model" / "config.json").read_text())
    copies = {name: tmp_path / name for name in ("fp32", "bf16", "config", "quantised")}
    for name, folder in copies.items():
        shutil.copytree(tiny.folder / "model", folder)
        named: dict[str, Any] = {"dtype": "float32" if name == "fp32" else "bfloat16"}
        if name == "quantised":
            named["quantization_config"] = FP8_SETTINGS
        (folder / "config.json").write_text(json.dumps({**config, **named}))
        if name == "bf16":
            halves = {key: tensor.bfloat16() for key, tensor in stored.items()}
            save_file(halves, folder / "model.safetensors", {"format": "pt"})
        elif name != "fp32":
            (folder / "model.safetensors").unlink()
    changes = ("model.is_lora=true", "model.lora.r=1")
    found = {
        name: plans(tiny, f"model.model_path={folder}", *changes, ranks=2).plan().memory
        for name, folder in copies.items()
    }
    weights = {name: memory[WEIGHTS] for name, memory in found.items() if memory is not None}
    assert weights["bf16"] == weights["config"] == pytest.approx(weights["fp32"] / 2, rel=0.05)
    assert weights["quantised"] == weights["fp32"]


@pytest.mark.parametrize("lora", [(), ("model.is_lora=true", "model.lora.r=1")])
def test_new_tokens_are_planned(tiny: Tiny, lora: tuple[str, ...]) -> None:
    """Their embeddings, and with LoRA what is trained of them."""
    tokens = [f"<new_{number}>" for number in range(200)]
    without = plans(tiny, "model.precision=fp32", *lora).plan()
    found = plans(tiny, "model.precision=fp32", *lora, f"tokenizer.new_tokens={json.dumps(tokens)}").plan()
    assert not found.notes
    assert found.parameters.total >= without.parameters.total + len(tokens) * WIDTH
    assert found.parameters.trained >= without.parameters.trained + len(tokens) * WIDTH


def test_weights_in_bf16_and_their_average_are_planned_on_ranks(tiny: Tiny) -> None:
    """Gradients of shards are in fp32, and so is the average, which takes twice the memory of the weights."""
    found = plans(tiny, "model.precision=pure_bf16", "optim.ema_decay=0.9", ranks=2).plan()
    assert not found.notes
    assert found.memory is not None
    assert found.memory[AVERAGE] == 2 * found.memory[WEIGHTS]


@pytest.mark.lengthy
def test_a_gpu_is_planned_without_one(tiny: Tiny) -> None:
    """Its attention keeps no copy, its head makes larger chunks, and what is offloaded is in host memory."""
    on_cpu = plans(tiny, "model.precision=bf16").plan()
    on_gpu = plans(tiny, "model.precision=bf16", ranks=1).plan()
    assert on_gpu.hardware.on_cuda
    assert not on_gpu.notes
    assert on_cpu.memory is not None
    assert on_gpu.memory is not None
    assert on_gpu.memory["activations"] < on_cpu.memory["activations"]
    for how in ("true", "selective"):  # layers that are computed again take the GPU's way again
        again = plans(tiny, "model.precision=bf16", f"model.gradient_checkpointing={how}", ranks=1).plan()
        assert not again.notes
        assert again.memory is not None
        assert again.memory["activations"] < on_gpu.memory["activations"]
    # Several micro-batches, for which FSDP2 gathers its shards once.
    several = ("fsdp_config.cpu_offload=true", "micro_batch_size=3")
    offloaded = plans(tiny, "model.precision=bf16", *several, ranks=2).plan()
    assert not offloaded.notes
    assert offloaded.memory is not None
    assert WEIGHTS not in offloaded.memory
    assert offloaded.host > 0


def test_tensors_without_memory_report_a_gpu_too() -> None:
    """Their class has a `device` of its own: the head's chunks were those of a CPU."""
    with Ledger().counting():
        with as_on_cuda():
            tensor = torch.empty(2, 3)
            assert tensor.device == torch.empty_like(tensor).device == torch.device("cuda", 0)
            assert chunk_rows(tensor.device, 2**20) == LOGITS_PER_CHUNK["cuda"] // 2**20
        assert tensor.device.type == "cpu"


def test_whole_numbers_have_values_unless_many_are_made_of_few() -> None:
    """Positions and masks of images decide later shapes; the random bits that round a matrix of states do not."""
    mask = torch.ones(3, 1024, 1024, dtype=torch.int64)
    with Ledger().counting():
        places = torch.arange(2048)
        assert type(places * 3 + 1) is torch.Tensor
        assert type(mask.view(-1)[mask.view(-1) > 0]) is torch.Tensor
        bits = places[:, None] * 1024 + torch.arange(1024)
        assert type(bits) is FakeTensor
        assert bits.shape == (2048, 1024)


@pytest.mark.slow
def test_known_shapes_change_no_byte(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes the shapes of every operation anew: on a GPU with LoRA, on ranks, checkpointed."""
    cases = [(1, "model.is_lora=true", "model.gradient_checkpointing=selective"), (2, "fsdp_config.reduce=every")]
    known = [plans(tiny, *changes, ranks=ranks).plan().memory for ranks, *changes in cases]
    monkeypatch.setattr(KnownShapes, "compute", lambda _, mode, func, args, kwargs: func(*args, **kwargs))
    assert known == [plans(tiny, *changes, ranks=ranks).plan().memory for ranks, *changes in cases]
    assert None not in known


@pytest.mark.lengthy
def test_where_a_step_cannot_be_computed_the_formulas_stand_in(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no shapes of this kernel")

    exact = plans(tiny, "model.precision=fp32").plan()
    monkeypatch.setattr(planning, "simulate", fails)
    estimated = plans(tiny, "model.precision=fp32").plan()
    assert "no shapes of this kernel" in estimated.notes[0]
    assert "formulas" in estimated.notes[1]
    assert exact.memory is not None
    assert estimated.memory is not None
    assert estimated.memory[WEIGHTS] == pytest.approx(exact.memory[WEIGHTS], rel=0.01)
    assert estimated.peak == pytest.approx(exact.peak, rel=0.5)  # a chunk of logits is no larger than the logits
    unknown = plans(tiny, "model.precision=fp32", "model.is_lora=true").plan()
    assert unknown.memory is None
    assert unknown.fits is None
    assert "unknown" in unknown.notes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_groups_have_the_shapes_of_torch_in_every_dtype(dtype: torch.dtype) -> None:
    """Those of experts, and of the gradients of their inputs and weights."""

    def product() -> list[torch.Size]:
        rows = torch.randn(16, 8, dtype=dtype, requires_grad=True)
        experts = torch.randn(3, 8, 24, dtype=dtype, requires_grad=True)
        made = torch.nn.functional.grouped_mm(rows, experts, offs=torch.tensor([4, 8, 16], dtype=torch.int32))
        made.square().sum().backward()
        assert rows.grad is not None
        assert experts.grad is not None
        return [each.shape for each in (made, rows.grad, experts.grad)]

    with Ledger().counting():
        found = product()
    assert found == product()


def test_the_ledger_counts_what_lives_and_what_is_resized() -> None:
    ledger = Ledger()
    with ledger.counting():
        first = torch.empty(250)
        second = first + 1
        ledger.label([second], "second")
        del first
        second.untyped_storage().resize_(0)
        ledger.phase = "third"
        third = torch.empty(1000)
        assert ledger.held() == {"third": 4000}
        del third
    assert fullest(ledger.changes()) == {"third": 4000}
    assert torch.UntypedStorage.resize_ is not None
    assert torch.empty(2).untyped_storage().nbytes() == 8
