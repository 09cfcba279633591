"""What a step of a small model moves and keeps on each rank, beside the formulas of `shardtune.parallel.cost`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from shardtune.batch import PackedBatch
from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.parallel.weights import local
from shardtune.parallel.cost.memory import activations, gathered, head_gradient, memory, waiting_gradients
from shardtune.parallel.cost.shape import ModelShape, Parts, Setting, Work
from shardtune.parallel.cost.traffic import traffic
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.layouts import LaidOut, parallel
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, recipe, save_model, save_rows

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EVERY = {"actor__fsdp_config__reduce": "every"}
KEEP = {"actor__fsdp_config__reshard_after_forward": False}
AGAIN = {"actor__model__gradient_checkpointing": True}
PARTLY = {"actor__model__gradient_checkpointing": "selective"}
CASES = (
    LaidOut("one process", 1),
    LaidOut("FSDP2", 2),
    LaidOut("FSDP2", 4),
    LaidOut("FSDP2, reduce: every", 2, EVERY),
    LaidOut("FSDP2, reshard_after_forward: false", 2, KEEP),
    LaidOut("FSDP2, gradient_checkpointing", 2, AGAIN),
    LaidOut("FSDP2, gradient_checkpointing: selective", 2, PARTLY),
    LaidOut("FSDP2, prefetch: 2", 2, {"actor__fsdp_config__prefetch": 2}),
    LaidOut("FSDP2, state_dtype: bf16", 2, {"actor__optim__state_dtype": "bf16"}),
    LaidOut("FSDP2, state_dtype: int8", 2, {"actor__optim__state_dtype": "int8"}),
    LaidOut("FSDP2, precision: pure_bf16", 2, {"actor__model__precision": "pure_bf16"}),
    LaidOut("FSDP2, cpu_offload", 2, {"actor__fsdp_config__cpu_offload": True}),
    LaidOut("HSDP 2 x 2", 4, parallel(data_replicate=2)),
    LaidOut("DDP", 2, {"actor__training_backend": "ddp"}),
    LaidOut("TP 2", 2, parallel(tensor=2)),
    LaidOut("TP 2, gradient_checkpointing", 2, {**parallel(tensor=2), **AGAIN}),
    LaidOut("TP 2, gradient_checkpointing: selective", 2, {**parallel(tensor=2), **PARTLY}),
    LaidOut("FSDP 2 x TP 2", 4, parallel(tensor=2)),
    LaidOut("SP 2", 2, parallel(sequence=2)),
    LaidOut("SP 2, gradient_checkpointing", 2, {**parallel(sequence=2), **AGAIN}),
    LaidOut("SP 2, gradient_checkpointing: selective", 2, {**parallel(sequence=2), **PARTLY}),
    LaidOut("FSDP 2 x SP 2", 4, parallel(sequence=2)),
)
EXPERTS = (
    LaidOut("FSDP2", 2),
    LaidOut("EP 2", 2, parallel(expert=2)),
    LaidOut("FSDP 2 x EP 2", 4, parallel(expert=2)),
)
SMALL = 256
"""Bytes of a collective that carries a few numbers: a norm, a loss, a flag."""


def _groups(root: nn.Module) -> list[FSDPParamGroup]:
    """What FSDP2 gathers at once."""
    states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
    return [group for state in states if (group := state._fsdp_param_group) is not None]


def _sharded(root: nn.Module) -> list[FSDPParam]:
    """The parameters of a model as FSDP2 has them."""
    return [parameter for group in _groups(root) for parameter in group.fsdp_params]


def gathered_bytes(root: nn.Module) -> int:
    """Of the weights that are whole now, or on their way."""
    outputs = [output for parameter in _sharded(root) for output in parameter.all_gather_outputs]
    coming = [group._all_gather_result for group in _groups(root)]
    arriving = sum(_size(result.all_gather_output) for result in coming if result is not None)
    return arriving + sum(output.untyped_storage().nbytes() for output in outputs)


def waiting_bytes(root: nn.Module) -> int:
    """Of the gradients that are whole now. Since torch 2.15 the sum over micro-batches is the parameter's own one."""
    whole = [parameter._unsharded_param.grad for parameter in _sharded(root)]
    summed = [parameter.unsharded_accumulated_grad for parameter in _sharded(root)]
    different = {id(grad): grad for grad in (*whole, *summed) if grad is not None}
    return sum(_size(_own(grad)) for grad in different.values())


class Moved(TorchDispatchMode):
    """Adds up calls and bytes of the collectives that are begun while it is entered.

    Attributes:
        calls: by (kind, number of ranks).
        bytes: the whole tensors'; the same keys.
        small: calls with a few numbers, and those of more that are pickled.
        gathered: bytes of weights that were whole at one time, at most; what is just arriving counted.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self.gathered = 0
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.small = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor first turns into its collectives, which come here as calls of their own.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        packet = func._overloadpacket
        if packet in _COLLECTIVES:
            kind, number_of_bytes, group = _COLLECTIVES[packet]
            self._note(kind, number_of_bytes(args), group(args))
        elif packet is torch.ops.c10d.allgather_:
            self.small += 1
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, number_of_bytes: int, ranks: int) -> None:
        if number_of_bytes <= SMALL:
            self.small += 1
            return
        if kind == "all_gather":
            self.gathered = max(self.gathered, gathered_bytes(self._root) + number_of_bytes)
        self.calls[kind, ranks] += 1
        self.bytes[kind, ranks] += number_of_bytes


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, outside of any graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _boxed(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


def _named(name: GroupName) -> int:
    return distributed_c10d._resolve_process_group(name).size()


Read = Callable[[Any], int]
_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
_COLLECTIVES: dict[Any, tuple[str, Read, Read]] = {
    _C10D._allgather_base_: ("all_gather", lambda args: _size(args[0]), lambda args: _boxed(args[2])),
    _C10D._reduce_scatter_base_: ("reduce_scatter", lambda args: _size(args[1]), lambda args: _boxed(args[2])),
    _C10D.allreduce_: ("all_reduce", lambda args: sum(map(_size, args[0])), lambda args: _boxed(args[1])),
    _C10D.alltoall_base_: ("all_to_all", lambda args: _size(args[1]), lambda args: _boxed(args[2])),
    _FUNCTIONAL.all_reduce: ("all_reduce", lambda args: _size(args[0]), lambda args: _named(args[2])),
    _FUNCTIONAL.all_gather_into_tensor: (
        "all_gather", lambda args: _size(args[0]) * args[1], lambda args: _named(args[2])
    ),
    _FUNCTIONAL.reduce_scatter_tensor: ("reduce_scatter", lambda args: _size(args[0]), lambda args: _named(args[3])),
    _FUNCTIONAL.all_to_all_single: ("all_to_all", lambda args: _size(args[0]), lambda args: _named(args[3])),
}  # fmt: skip


class Kept:
    """Adds up what autograd keeps for the backward pass, weights aside, until the first backward pass begins."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._seen: dict[int, int] = {}
        self._open = True
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _own(tensor).untyped_storage()
        weights = {_own(weight).untyped_storage().data_ptr() for weight in self._root.parameters()}
        if self._open and tensor.is_floating_point() and storage.data_ptr() not in weights:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._open = False
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


@dataclass
class Counted:
    """What a rank did in a step.

    Attributes:
        tokens: of each micro-batch.
        targets: of each micro-batch.
        calls: of collectives, by (kind, number of ranks).
        bytes: of their whole tensors.
        small: calls with a few numbers.
        weights: bytes of this rank's.
        moments: of the optimizer's two.
        gradients: of this rank's, at the update.
        waiting: of gradients that were whole, before the last micro-batch.
        gathered: of weights that were whole at one time.
        kept: for the backward pass, of the first micro-batch.
    """

    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    calls: dict[tuple[str, int], int] = field(default_factory=dict)
    bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    small: int = 0
    weights: int = 0
    moments: int = 0
    gradients: int = 0
    waiting: int = 0
    gathered: int = 0
    kept: int = 0


def count(values: Mapping[str, Any]) -> Counted:
    """The second step of a recipe (the first finds the outermost weights gathered by the probe)."""
    worker = SFTWorker(load_recipe(dict(values)), report=quiet)
    worker.setup()
    worker.run_training()
    found = Counted()

    def note_batch(_module: nn.Module, args: tuple[Any, ...]) -> None:
        batch = args[0]
        assert isinstance(batch, PackedBatch)
        found.tokens.append(len(batch.input_ids))
        found.targets.append(len(batch.targets))
        found.waiting = max(found.waiting, waiting_bytes(worker.root))

    def note_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found.gradients = sum(_size(local(p.grad)) for p in held)
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [local(value) for value in states if isinstance(value, torch.Tensor) and value.ndim]
        found.moments = sum(map(_size, tensors))

    hooks = worker.root.register_forward_pre_hook(note_batch), register_optimizer_step_pre_hook(note_gradients)
    moved, kept = Moved(worker.root), Kept(worker.root)
    with moved, kept:
        worker.run_training()
    for hook in hooks:
        hook.remove()
    found.weights = sum(_size(local(weight)) for weight in worker.weights.parameters.values())
    found.calls, found.bytes, found.small = dict(moved.calls), dict(moved.bytes), moved.small
    found.gathered, found.kept = moved.gathered, kept.bytes
    worker.release()
    return found


def count_all(recipes: Sequence[Mapping[str, Any]]) -> list[Counted]:
    return [count(values) for values in recipes]


@dataclass(frozen=True)
class Ratio:
    """A counted number beside the formula's."""

    what: str
    counted: float
    formula: float

    @property
    def ratio(self) -> float:
        return self.counted / self.formula if self.formula else float(self.counted == 0) or float("inf")


def compare(shape: ModelShape, values: Mapping[str, Any], ranks: int, found: Counted) -> list[Ratio]:
    """The numbers of a case, counted and by the formulas."""
    actor = load_recipe({**values, "runner": {**values["runner"], "nproc_per_node": ranks}}).actor
    fsdp, model = actor.fsdp_config, actor.model
    setting = Setting(
        Layout.of(actor, ranks),
        model.precision,
        fsdp.reduce,
        fsdp.reshard_after_forward,
        fsdp.prefetch,
        model.gradient_checkpointing,
        fsdp.cpu_offload,
        actor.optim.state_dtype,
    )
    rounds = len(found.tokens)
    work = Work(sum(found.tokens) / rounds, rounds, sum(found.targets) / rounds, 0.0)
    first = Work(found.tokens[0], rounds, found.targets[0], 0.0)
    calls: Counter[tuple[str, int]] = Counter()
    payload: dict[tuple[str, int], float] = defaultdict(float)
    for exchange in traffic(shape, setting, work):
        calls[exchange.kind, exchange.ranks] += exchange.calls
        payload[exchange.kind, exchange.ranks] += exchange.payload
    lines = []
    for key in sorted({*calls, *found.calls}):
        kind, among = key[0].replace("_", "-"), f"{key[1]} ranks"
        lines.append(Ratio(f"{kind} over {among}, calls", found.calls.get(key, 0), calls[key]))
        lines.append(Ratio(f"{kind} over {among}, bytes", found.bytes.get(key, 0), payload[key]))
    # Whole gradients that wait for the last micro-batch are gone at the update, and so is what host memory has.
    expected = memory(shape, replace(setting, reduce="every", cpu_offload=False), work)
    lines.append(Ratio("weights, bytes", found.weights, expected.weights))
    lines.append(Ratio("moments, bytes", found.moments, expected.moments))
    lines.append(Ratio("gradients, bytes", found.gradients, expected.gradients))
    if ranks > 1:
        lines.append(Ratio("gradients that wait, bytes", found.waiting, waiting_gradients(shape, setting, work)))
    if setting.shards > 1:
        whole = gathered(Parts.of(shape, setting.layout), setting, buffers=False)
        lines.append(Ratio("gathered weights at most, bytes", found.gathered, whole))
    if not setting.gradient_checkpointing:  # which keeps its inputs where no hook of autograd sees them
        kept = activations(shape, setting, first) + head_gradient(shape, setting) + copies_on_a_cpu(shape, setting, first)
        lines.append(Ratio("kept for the backward pass, bytes", found.kept, kept))
    return lines


def copies_on_a_cpu(shape: ModelShape, setting: Setting, work: Work) -> float:
    """Bytes that attention keeps more on a CPU, where it computes half precision in fp32, than on a GPU.

    Queries, keys, values and results take 4 bytes a number instead of 2, and results are kept in both forms.
    """
    if setting.compute != 2:
        return 0.0
    layout = setting.layout
    tokens, tensor = work.tokens / layout.sequence, layout.tensor
    kv = max(shape.kv_width, shape.head_size * max(tensor, layout.sequence))
    return tokens * shape.layers * (2 * (2 * shape.query_width + 2 * kv) + 2 * shape.query_width) / tensor


class Counts:
    """Counts cases with a model of one shape and rows of one file."""

    def __init__(self, folder: Path, kind: str = "dense", **changes: Any) -> None:
        self._model = save_model(kind, folder / "model", **{**SIZES, **changes})
        self._rows = save_rows(folder / "rows.jsonl", 32, longest=400)
        self.shape = ModelShape.of(json.loads((self._model / "config.json").read_text(encoding="utf-8")))

    def recipe(self, case: LaidOut, precision: str) -> dict[str, Any]:
        keys = {"runner__max_steps": 3, "actor__micro_batch_size": 2, "actor__model__precision": precision}
        return recipe(self._model, self._rows, **{**keys, **case.keys})

    def of(self, cases: Sequence[tuple[LaidOut, str]]) -> list[list[Ratio]]:
        """Per case (a layout and a precision) rank 0's numbers; those of one number of ranks in one start of ranks."""
        lines: dict[int, list[Ratio]] = {}
        for ranks in sorted({case.ranks for case, _ in cases}):
            places = [place for place, (case, _) in enumerate(cases) if case.ranks == ranks]
            recipes = [self.recipe(*cases[place]) for place in places]
            found = count_all(recipes) if ranks == 1 else run_ranks(count_all, ranks, recipes, timeout=600)[0]
            for place, values, counted in zip(places, recipes, found, strict=True):
                lines[place] = compare(self.shape, values, ranks, counted)
        return [lines[place] for place in range(len(cases))]
