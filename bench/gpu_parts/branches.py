"""Part b: every branch that runs on CUDA alone, found by the words of `MARKS` in the sources."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import shardtune
import shardtune.training.worker.base as worker_base
from gpu_parts.doubles import Doubles
from gpu_parts.numbers import EXACT, HALF, against, moved, trained, truth, values
from gpu_parts.records import FAIL, PASS, Check, Facts, Part, Setting, skip, within
from shardtune import TrainEngine
from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.loader.packing import pack
from shardtune.models import flex_documents
from shardtune.models import loss as loss_module
from shardtune.models.head_gradient import HELD_BYTES
from shardtune.models.lora.nf4 import decode, decode_plainly, encode, kernel_for
from shardtune.models.loss import linear_cross_entropy
from shardtune.models.objectives.log_probs import linear_log_probs_and_entropy
from shardtune.models.packed_attention import document_attention
from shardtune.parallel import flash_pieces
from shardtune.parallel.free_memory import free_bytes
from shardtune.parallel.ranks import Ranks, lay_out, open_group
from shardtune.training.callbacks import undisturbed
from shardtune.training.utilisation import peak_flops
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support import engine_modules
from tests.support.dist.parity import error
from tests.support.dist.training import quiet, run_recipe

PACKAGE = Path(shardtune.__file__).parent
MARKS = re.compile(r"is_cuda|== \"cuda\"|torch\.cuda\.|out_dtype|varlen_attn\(|non_blocking=True|cuda:nccl|pin_memory")
"""What a line that takes another way on a GPU has; `tests/bench` compares the files with `FILES`."""
FILES: Mapping[str, str] = {
    "batch/__init__.py": "pinned transfers",
    "batch/seeds.py": "part throughput",
    "cli/installation.py": "`shardtune env` prints the devices",
    "config/foreign/axolotl_keys.py": "a key of another trainer",
    "config/foreign/nemo_sections.py": "likewise",
    "config/foreign/rlinf.py": "likewise",
    "config/foreign/training_arguments.py": "likewise",
    "engine/cuda_alias.py": "for engines without a GPU",
    "engine/offload.py": "engine, offloaded",
    "engine/rank_module.py": "engine",
    "engine/rank_process.py": "engine",
    "models/distillation.py": "distillation, out_dtype",
    "models/fast_parts/start.py": "FP8 of torchao, fused modules of Liger",
    "models/lora/init.py": "NF4, training",
    "models/head_gradient.py": "head, out_dtype, large",
    "models/loss.py": "head, out_dtype",
    "models/objectives/log_probs.py": "log-probabilities, out_dtype",
    "models/packed_attention.py": "varlen, flex",
    "optim/build.py": "fused",
    "optim/low_bit.py": "weights in bf16",
    "parallel/flash_pieces.py": "ring attention, pieces",
    "parallel/free_memory.py": "memory and peak of the device",
    "parallel/fsdp2.py": "FSDP2 on one rank, offload, waits",
    "parallel/half_products.py": "for processors alone",
    "parallel/ranks.py": "NCCL and gloo, waits",
    "parallel/torch_private/fsdp2.py": "FSDP2 on one rank",
    "parallel/weights.py": "FSDP2 on one rank, offload, waits",
    "parallel/whole_weights.py": "engine",
    "run/plan/comparison.py": "part memory",
    "run/plan/ledger.py": "part memory",
    "run/plan/plan.py": "part memory",
    "run/preflight.py": "checked at the start of several ranks",
    "run/rank_training.py": "the first screen of a run: part memory",
    "training/profiler.py": "part costs",
    "training/step.py": "part throughput",
    "training/utilisation.py": "memory and peak of the device",
    "verify/claims/room.py": "`shardtune verify` of a recipe, typed",
}
"""By file of the package: the checks that run its branch, or why none can."""
BF16_ATTENTION = 3e-2
"""Of outputs and gradients in bf16, relative to the largest value of fp64."""


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))


# -- attention ---------------------------------------------------------------------------------------------------------

LENGTHS = (70, 1, 200, 33)


def attention(setting: Setting, dtype: torch.dtype, limit: float, **settings: Any) -> Facts:
    """Output and gradients of packed rows on the device, against one document after the other on the CPU in fp64."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(1, 4, tokens, 32), (1, 2, tokens, 32), (1, 2, tokens, 32)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    slope = torch.randn(1, tokens, 4, 32, generator=generator).to(dtype)
    if settings.pop("sinks", False):
        inputs.append(torch.randn(4, generator=generator).to(dtype))
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for device, wanted in (("cpu", torch.float64), (setting.device, dtype)):
            leaves = [tensor.to(device, wanted).requires_grad_() for tensor in inputs]
            layer: Any = SimpleNamespace(is_causal=True)
            sinks: dict[str, Any] = {"s_aux": leaves[3]} if len(leaves) > 3 else {}
            output, _ = document_attention(
                layer, leaves[0], leaves[1], leaves[2], None, **settings, **sinks,
                cu_seq_lens_q=bounds.to(device), max_length_q=max(LENGTHS),
            )  # fmt: skip
            found.append([output, *torch.autograd.grad(output, leaves, slope.to(device, wanted))])
    fallen = [str(each.message)[:200] for each in warned if "by its formula" in str(each.message)]
    facts = within(max(apart(one, other) for one, other in zip(found[1], found[0], strict=True)), limit)
    return {**facts, "verdict": FAIL, "note": fallen[0]} if fallen else facts


def attention_memory(setting: Setting) -> Facts:
    """Soft caps over one long document: beyond inputs and outputs, a small part of the scores."""
    if setting.device == "cpu":
        return skip("memory is counted on a GPU")
    tokens, heads, size = 16384, 8, 64
    query, key, value = (
        torch.randn(1, heads, tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    layer: Any = SimpleNamespace(is_causal=True)
    flex_documents.document_mask.cache_clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, _ = document_attention(
        layer, query, key, value, None, softcap=30.0, cu_seq_lens_q=bounds, max_length_q=tokens
    )
    output.sum().backward()
    gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9
    return within(gigabytes, 1.0, note=f"GB; the scores alone would be {heads * tokens**2 * 2 / 1e9:.0f}")


def attention_graphs(setting: Setting) -> Facts:
    """Two, with gradients and without, for rows of any length and any window, at the head size of Gemma 2."""
    if setting.device == "cpu":
        return skip("tests/models/test_flex_documents.py counts on a CPU")
    torch.compiler.reset()
    counters.clear()
    flex_documents._works.cache_clear()
    layer: Any = SimpleNamespace(is_causal=True)
    began = time.perf_counter()
    for gradients in (True, False):
        for lengths in ([300, 41, 20], [50], [4000, 90], [128, 256], [1, 1]):
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
            query, key, value = (
                torch.randn(1, sum(lengths), heads, 256, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                for heads in (8, 4, 4)
            )
            with torch.set_grad_enabled(gradients):
                leaves = [tensor.requires_grad_(gradients) for tensor in (query, key, value)]
                for window in (None, 512):
                    output, _ = document_attention(
                        layer, *leaves, None, softcap=50.0, sliding_window=window, cu_seq_lens_q=bounds,
                        max_length_q=max(lengths),
                    )  # fmt: skip
                    if gradients:
                        output.sum().backward()
    torch.cuda.synchronize()
    graphs = counters["stats"]["unique_graphs"]
    return within(graphs, 2, note=f"graphs, after {time.perf_counter() - began:.0f} s")


def ring_pieces(setting: Setting, groups: int) -> Facts:
    """The kernel of ring attention has, for pieces of documents, the numbers of the way that needs none."""
    if setting.device == "cpu":
        return skip("the kernel runs on a GPU; tests/parallel has its pieces on a CPU")
    agree = flash_pieces.agrees(torch.device("cuda", 0), torch.bfloat16, groups, 64)
    return {"verdict": PASS if agree else FAIL, "note": "" if agree else "see branches.log"}


# -- the head and objectives -------------------------------------------------------------------------------------------


def head(setting: Setting, dtype: torch.dtype, limit: float, held: int = HELD_BYTES) -> Facts:
    """Loss and gradients of a head in half precision, whose products come out in fp32."""
    before, loss_module.HELD_BYTES = loss_module.HELD_BYTES, held
    try:
        return _head(setting, dtype, limit)
    finally:
        loss_module.HELD_BYTES = before


def _head(setting: Setting, dtype: torch.dtype, limit: float) -> Facts:
    rows, width, vocabulary = (300, 64, 1000) if setting.small else (3000, 512, 50_000)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.05).to(dtype)
    targets, weights = torch.randint(vocabulary, (rows,), generator=generator), torch.ones(rows)
    found = []
    for device, wanted in (("cpu", torch.float64), (setting.device, dtype)):
        leaves = [tensor.to(device, wanted).requires_grad_() for tensor in (hidden, weight)]
        total, _ = linear_cross_entropy(leaves[0], leaves[1], targets.to(device), weights.to(device))
        found.append([total, *torch.autograd.grad(total / rows, leaves)])
    differences = [apart(one, other) for one, other in zip(found[1], found[0], strict=True)]
    return within(max(differences[0] * 100, *differences[1:]), limit, note=f"loss {differences[0]:.1e}")


def objectives(setting: Setting) -> Facts:
    """Log-probabilities and entropies with gradients, in bf16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=generator).bfloat16()
    weight = (torch.randn(3000, 64, generator=generator) * 0.1).bfloat16()
    targets = torch.randint(3000, (200,), generator=generator)
    found = []
    for device, wanted in (("cpu", torch.float64), (setting.device, torch.bfloat16)):
        leaves = [tensor.to(device, wanted).requires_grad_() for tensor in (hidden, weight)]
        scores = linear_log_probs_and_entropy(leaves[0], leaves[1], targets.to(device))
        loss = scores.log_probs.sum() + scores.entropy.sum()
        found.append([scores.log_probs, scores.entropy, *torch.autograd.grad(loss, leaves)])
    return within(max(apart(one, other) for one, other in zip(found[1], found[0], strict=True)), 2e-2)


def distilled(setting: Setting) -> Facts:
    """A student beside its teacher, both in bf16, against fp64."""
    teacher = values(setting, "mistral")["actor"]["model"]["model_path"]
    changes = {"actor__loss": "distill", "actor__teacher": {"model_path": teacher}, "runner__max_steps": 3}
    true = trained(setting, "dense", "cpu", **changes)
    run = trained(setting, "dense", setting.device, **changes, actor__model__precision="bf16")
    pairs = zip(run.losses, true.losses, strict=True)
    return within(max(abs(a - b) / abs(b) for a, b in pairs), 5e-2)


# -- quantised weights -------------------------------------------------------------------------------------------------


def nf4(setting: Setting) -> Facts:
    """Codes and values, bitwise those of the CPU."""
    weight = torch.randn(256, 320, generator=torch.Generator().manual_seed(0))
    here, there = encode(weight.to(setting.device)), encode(weight)
    values_here = decode_plainly(here, 320, torch.bfloat16)
    same = torch.equal(here.cpu(), there) and torch.equal(values_here.cpu(), decode_plainly(there, 320, torch.bfloat16))
    return {"verdict": PASS if same else FAIL}


def nf4_kernel(setting: Setting) -> Facts:
    """bitsandbytes' kernel, against the plain decoding."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return skip("bitsandbytes is missing")
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    if kernel_for(device, torch.bfloat16) is None:
        return skip("bitsandbytes has no kernel here")
    packed = encode(torch.randn(256, 320, generator=torch.Generator().manual_seed(0)).to(device))
    found = [function(packed, 320, torch.bfloat16) for function in (decode, decode_plainly)]
    return within(apart(*found), 8e-3)


def nf4_training(setting: Setting) -> Facts:
    """LoRA on weights in NF4, against the same on the CPU."""
    lora = {"base_dtype": "nf4", "r": 4}
    changes = {"actor__model__is_lora": True, "actor__model__lora": lora, "actor__model__precision": "fp32"}
    true, run = (trained(setting, "dense", device, **changes) for device in ("cpu", setting.device))
    pairs = zip(run.losses, true.losses, strict=True)
    return within(max(abs(a - b) / abs(b) for a, b in pairs), 2e-2, note="LoRA is initialised by the device's draws")


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizer(setting: Setting, name: str, **arguments: Any) -> Facts:
    """Chosen by the project for the device: fp64 against the plain one on the CPU; fp32 in parts as in one, bitwise."""
    kind = getattr(torch.optim, name)
    arguments = {"lr": 1e-2, **arguments}

    def stepped(parts: Sequence[torch.Tensor], **further: Any) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(part.clone()) for part in parts]
        made = kind(parameters, **arguments, **further)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * (step + 1))
            made.step()
        return [parameter.detach() for parameter in parameters]

    whole = torch.randn(1001, 257, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, fused = stepped([whole], foreach=False), stepped([whole.to(setting.device)], fused=True)
    single = whole.to(setting.device, torch.float32)
    cut = torch.cat(stepped([single[:333], single[333:]], fused=True))
    differ = int((cut != stepped([single], fused=True)[0]).sum())
    facts = within(apart(fused[0], plain[0]), 1e-12, note=f"{differ} numbers differ in parts")
    return facts if not differ or setting.device == "cpu" else {**facts, "verdict": FAIL}


def low_bit(setting: Setting, state: str) -> Facts:
    """States in few bits, against the CPU."""
    changes = {"actor__optim__state_dtype": state, "actor__model__precision": "fp32"}
    true, run = (trained(setting, "dense", device, **changes) for device in ("cpu", setting.device))
    pairs = zip(run.losses, true.losses, strict=True)
    return within(max(abs(a - b) / abs(b) for a, b in pairs), 2e-2)


def weights_in_bf16(setting: Setting) -> Facts:
    """Updates of weights in bf16, rounded by the same bits as on a CPU; where fp32 differs in its last digit, a few may
    go to the other neighbour."""
    from shardtune.config import OptimConfig
    from shardtune.optim.build import build_optimizer

    def stepped(device: str) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(700, 333, generator=draw).to(device, torch.bfloat16))
        weight.grad_dtype = torch.float32
        optimizer = build_optimizer({"weight": weight}, OptimConfig(state_dtype="int8", lr=1e-4), seed=3)
        for _ in range(5):
            weight.grad = torch.randn(700, 333, generator=draw).to(device)
            optimizer.step()
        return weight.detach().cpu()

    there, here = stepped(setting.device), stepped("cpu")
    return within(float((there != here).double().mean()), 1e-2)


# -- transfers and waiting ---------------------------------------------------------------------------------------------


def transfers(setting: Setting) -> Facts:
    """A batch on the device has the values that it had, and moving it waits for nothing."""
    from shardtune.batch import Sample

    samples = [Sample(torch.arange(40, 40 + n).numpy().astype("int32"), torch.ones(n).numpy()) for n in (5, 9)]
    batch = pack(samples, [0, 1], {"ce": 12.0})
    device = torch.device(setting.device)
    with no_waiting(setting):
        there = batch.to(device)
    names = ("input_ids", "position_ids", "targets", "target_weights", "cu_seqlens")
    same = all(torch.equal(vars_of(there, name).cpu(), vars_of(batch, name)) for name in names)
    return {"verdict": PASS if same else FAIL}


def vars_of(batch: Any, name: str) -> torch.Tensor:
    return getattr(batch, name)


@contextmanager
def no_waiting(setting: Setting) -> Iterator[None]:
    """Inside, an operation that waits for the GPU is an error."""
    if setting.device == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def waits(setting: Setting, kind: str, precision: str) -> Facts:
    """How often a step waits for the GPU, by torch's own warnings: at most once."""
    if setting.device == "cpu":
        return skip("counted on a GPU; tests/training/test_reads.py counts on a CPU")
    made = values(setting, kind, runner__device="cuda", actor__model__precision=precision, actor__micro_batch_size=4)
    worker = SFTWorker(load_recipe(made), report=quiet)
    worker.setup()
    for _ in range(3):
        worker.run_training()
    torch.cuda.set_sync_debug_mode("warn")  # at first with a warning of its own
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        worker.run_training()
    torch.cuda.set_sync_debug_mode("default")
    worker.release()
    places = [f"{Path(each.filename).name}:{each.lineno}" for each in warned if "synchroniz" in str(each.message)]
    return within(len(places), 1, note=", ".join(dict.fromkeys(places)))


# -- ranks, offload, compile -------------------------------------------------------------------------------------------


@contextmanager
def group_of_one(setting: Setting) -> Iterator[Ranks]:
    """Inside, a run of one rank has a process group, so that it is sharded by FSDP2, over NCCL on a GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before, join = dict(os.environ), worker_base.join_ranks
    os.environ.update(place)
    device = torch.device("cuda", 0) if setting.device == "cuda" else torch.device("cpu")
    open_group(device)
    ranks = lay_out(Layout(), 0, device)
    worker_base.join_ranks = lambda *_, **__: ranks
    try:
        yield ranks
    finally:
        worker_base.join_ranks = join
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def one_rank(setting: Setting, **changes: Any) -> Facts:
    """FSDP2 over a group of one."""
    with group_of_one(setting):
        run = trained(setting, "dense", setting.device, **changes)
    return against(run, truth(setting, "dense"), EXACT)


def collectives(setting: Setting) -> Facts:
    """Numbers of Python go over gloo, without a wait for the GPU; tensors over NCCL."""
    with group_of_one(setting) as ranks:
        with no_waiting(setting):
            host = [*ranks.sum([1.0, 2.0]), ranks.largest(3.0)]
        found = ranks.sum([torch.tensor(4.0, device=ranks.device), 5.0], [torch.tensor(6.0, device=ranks.device)])
        backend = dist.get_backend_config()
    return {"verdict": PASS if [*host, *found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] else FAIL, "note": backend}


def compiled(setting: Setting, kind: str) -> Facts:
    """Losses as without the compiler, and compiled again at most twice for rows of any length."""
    torch._dynamo.reset()
    counters.clear()
    changes = {"actor__model__compile": True, "actor__model__precision": "fp32"}
    worker = SFTWorker(load_recipe(values(setting, kind, runner__device=setting.device, **changes)), report=quiet)
    worker.setup()
    losses, graphs = [], []
    while not worker.finished:
        losses.append(worker.run_training()["train/loss"])
        graphs.append(counters["stats"]["unique_graphs"])
    worker.release()
    again = graphs[-1] - graphs[0]
    pairs = zip(losses, truth(setting, kind).losses, strict=True)
    note = f"{graphs[0]} graphs after the first step, {again} more by the last"
    facts = within(max(abs(a - b) / abs(b) for a, b in pairs), 1e-3, note=note)
    torch._dynamo.reset()
    return facts if again <= 2 else {**facts, "verdict": FAIL}


def differs_little(setting: Setting, limit: float, **changes: Any) -> Facts:
    """A setting that changes nothing but time and memory."""
    run = trained(setting, "dense", setting.device, **changes)
    pairs = zip(run.losses, truth(setting, "dense").losses, strict=True)
    return within(max(abs(a - b) / abs(b) for a, b in pairs), limit)


def checkpointed(setting: Setting, way: bool | str) -> Facts:
    """Against the same run on the same device without it."""
    made = [
        values(setting, "dense", runner__device=setting.device, actor__model__gradient_checkpointing=each)
        for each in (False, way)
    ]
    plain, run = (moved(run_recipe(each)) for each in made)
    return against(run, plain, EXACT)


def scaled(setting: Setting) -> Facts:
    """fp16: its error against fp64, beside that of the CPU."""
    on = {place: trained(setting, "dense", place, actor__model__precision="fp16") for place in {"cpu", setting.device}}
    own, here = error(on["cpu"], truth(setting, "dense")), error(on[setting.device], truth(setting, "dense"))
    return within(here, HALF * max(own, 1e-3), note=f"CPU {own:.1e}")


def fast_part(setting: Setting, package: str, **changes: Any) -> Facts:
    """A fast part of another library: losses in bf16 beside fp64."""
    if importlib.util.find_spec(package) is None:
        return skip(f"{package} is missing")
    if setting.device == "cpu" and package != "torch":
        return skip("its kernels need a GPU")
    limit = 1e-1 if "actor__model__fp8" in changes else 5e-2
    return differs_little(setting, limit, actor__model__precision="bf16", **changes)


# -- the rest ----------------------------------------------------------------------------------------------------------


def generators(setting: Setting) -> Facts:
    """A callback that draws does not change the draws of training, on any device."""
    device = torch.device(setting.device)
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(3)
    with undisturbed():
        torch.rand(7, device=device)
    return {"verdict": PASS if torch.equal(torch.rand(4, device=device), wanted) else FAIL}


def engine(setting: Setting, offloaded: bool = False) -> Facts:
    """Steps of a module of a user's, in which "cuda" is the device, against plain PyTorch on the CPU."""
    model = setting.work("engine") / "model"
    if not model.exists():
        engine_modules.save_model(model)
    shardtune.init(device="cuda" if setting.device == "cuda" else "cpu")
    made = TrainEngine(engine_modules.make(model)).build()
    if offloaded:
        made.sleep()
    with Doubles():
        found = engine_modules.steps(made, "step_by_mean", shardtune.NeedParallel(engine_modules.SAMPLES))
        return within(engine_modules.apart(found, engine_modules.plain(model)), EXACT)


def figures(setting: Setting) -> Facts:
    """Free memory and the peak of the device are known."""
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    free, peak = free_bytes(device), peak_flops(device, "bf16")
    known = bool(free) and (peak is not None or setting.device == "cpu")
    return {"verdict": PASS if known else FAIL, "note": f"{(free or 0) / 1e9:.0f} GB free, peak {peak or 0:.2e}"}


def leaves_nothing(setting: Setting) -> Facts:
    """After a released worker the device has what it had before."""
    if setting.device == "cpu":
        return skip("memory is counted on a GPU")
    trained(setting, "dense", "cuda", runner__max_steps=2)
    gc.collect()
    before = torch.cuda.memory_allocated()
    trained(setting, "dense", "cuda", runner__max_steps=2)
    gc.collect()
    return within((torch.cuda.memory_allocated() - before) / 1e6, 1.0, note="MB")


def checks(setting: Setting) -> Sequence[Check]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    soft = {"window and cap": {"sliding_window": 20, "softcap": 2.0}, "sinks": {"sinks": True}}
    found: list[tuple[str, Callable[[Setting], Any]]] = [
        ("varlen, bf16", partial(attention, dtype=bf16, limit=BF16_ATTENTION)),
        ("varlen, fp16", partial(attention, dtype=fp16, limit=BF16_ATTENTION / 4)),
        ("varlen, window, bf16", partial(attention, dtype=bf16, limit=BF16_ATTENTION, sliding_window=20)),
        ("varlen, both ways, bf16", partial(attention, dtype=bf16, limit=BF16_ATTENTION, is_causal=False)),
    ]
    for name, given in soft.items():
        found.append((f"flex, {name}, fp32", partial(attention, dtype=fp32, limit=1e-3, **given)))
        found.append((f"flex, {name}, bf16", partial(attention, dtype=bf16, limit=BF16_ATTENTION, **given)))
    found += [
        ("flex, memory", attention_memory),
        ("flex, graphs", attention_graphs),
        ("ring attention, pieces", partial(ring_pieces, groups=1)),
        ("ring attention, pieces, groups", partial(ring_pieces, groups=4)),
        ("head, out_dtype, bf16", partial(head, dtype=bf16, limit=2e-2)),
        ("head, out_dtype, fp16", partial(head, dtype=fp16, limit=5e-3)),
        ("head, out_dtype, large, bf16", partial(head, dtype=bf16, limit=2e-2, held=0)),
        ("head, fp32", partial(head, dtype=fp32, limit=1e-3)),
        ("log-probabilities, out_dtype", objectives),
        ("distillation, out_dtype", distilled),
        ("NF4, codes", nf4),
        ("NF4, bitsandbytes", nf4_kernel),
        ("NF4, training", nf4_training),
        ("fused AdamW", partial(optimizer, name="AdamW", weight_decay=0.1)),
        ("fused Adam", partial(optimizer, name="Adam")),
        ("fused SGD", partial(optimizer, name="SGD", momentum=0.9)),
        ("states in bf16", partial(low_bit, state="bf16")),
        ("states in int8", partial(low_bit, state="int8")),
        ("weights in bf16", weights_in_bf16),
        ("pinned transfers", transfers),
        ("waits of a step, dense, bf16", partial(waits, kind="dense", precision="bf16")),
        ("waits of a step, gemma2, bf16", partial(waits, kind="gemma2", precision="bf16")),
        ("waits of a step, fp16", partial(waits, kind="dense", precision="fp16")),
        ("NCCL and gloo", collectives),
        ("FSDP2 on one rank, fp64", one_rank),
        ("offload, fp64", partial(one_rank, actor__fsdp_config__cpu_offload=True)),
        ("FSDP1 on one rank, fp64", partial(one_rank, actor__training_backend="fsdp1")),
        ("DDP on one rank, fp64", partial(one_rank, actor__training_backend="ddp")),
        ("checkpointing, fp64", partial(checkpointed, way=True)),
        ("selective checkpointing, fp64", partial(checkpointed, way="selective")),
        ("fp16 with a loss scale", scaled),
        ("compile, dense", partial(compiled, kind="dense")),
        *([] if setting.small else [("compile, mistral", partial(compiled, kind="mistral"))]),
        ("fused modules of torch", partial(fast_part, package="torch", actor__model__kernels={"source": "torch"})),
        (
            "fused modules of Liger",
            partial(fast_part, package="liger_kernel", actor__model__kernels={"source": "liger"}),
        ),
        ("FP8 of torchao", partial(fast_part, package="torchao", actor__model__fp8={"scaling": "tensorwise"})),
        ("engine", engine),
        ("engine, offloaded", partial(engine, offloaded=True)),
        ("generators", generators),
        ("memory and peak of the device", figures),
        ("memory after a run", leaves_nothing),
    ]
    return [Check(name, run, 30.0) for name, run in found]


PART = Part("What runs on CUDA alone", checks)
