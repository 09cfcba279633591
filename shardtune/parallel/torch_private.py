"""The private names of torch that the package depends on, each with its reason and with what would replace it.

No other file uses a private name of torch (`tests/test_private_names.py` reads them all), so that a new release of
torch is checked against this file alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from importlib.metadata import requires
from types import CodeType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardtune.errors import ConfigError

try:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.autograd.graph import GradientEdge, _engine_run_backward
    from torch.distributed.distributed_c10d import _get_default_store, _world
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._common_utils import TrainingState as FlatTrainingState
    from torch.distributed.fsdp._flat_param import FlatParameter as FlatParameter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultAllocMixin,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor, is_bw
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.fsdp._runtime_utils import _reduce_grad
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.nn.modules.dropout import _DropoutNd
    from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode
    from torch.utils import checkpoint as checkpointing
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_iter as tree_iter
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        SelectiveCheckpointContext,
        _allowed_determinism_checks_to_fns,
        _VersionWrapper,
        create_selective_checkpoint_contexts,
    )
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
except ImportError as error:
    raise ConfigError(
        f"torch {torch.__version__} lacks a name that shardtune uses: {error}",
        where="torch",
        remedy="pip install '" + next(each for each in requires("shardtune") or () if each.startswith("torch")) + "'",
    ) from error

# `OpOverload` is the type of what a selective-checkpointing policy receives; `torch.library` does not export it.
# `FlatParameter` is the type of a parameter that FSDP1 has joined; only annotations need it.
# `TorchDispatchMode` sees every operation below autograd; the public `TorchFunctionMode` misses those inside of torch.
# `FakeTensorMode` computes the shapes of results without memory, on a CPU too, where meta tensors cannot be sharded.
# `tree_map` and `tree_map_only` go through outputs of transformers, which registers its classes with this pytree and
# with no other. To be replaced by `torch.utils.pytree`, once there is one.

# -- torch 2.11 --------------------------------------------------------------------------------------------------------


@cache
def shard_integers() -> None:
    """Let `fully_shard` take parameters of integers, the codes of four bits among them, as torch 2.12 does by itself.

    torch 2.11 makes each sharded parameter as one that is trained, and then says whether it is; and it gathers integers
    in the dtype of the computation.
    """
    if torch.__version__ >= "2.12":
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    private: Any = _fsdp_param

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    original = private.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        original(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    private.nn = SimpleNamespace(**{**vars(nn), "Parameter": parameter})
    private.FSDPParam.init_dtype_attrs = init_dtype_attrs


# -- Modules -----------------------------------------------------------------------------------------------------------

NormBase = _NormBase
"""Batch and instance norms: their common base, which norms of a user's may derive from without the public classes."""
BatchNormBase = _BatchNorm
"""Batch norms; as `NormBase`."""
DropoutBase = _DropoutNd
"""Layers that drop; as `NormBase`."""


Policy = Callable[..., CheckpointPolicy]
"""Whether the result of an operation is saved in a checkpointed forward pass."""
SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_FORGOTTEN = vars(checkpointing).get("_RECOMPUTE", object())
"""Stands in the place of a saved result that is computed again; torch 2.13 and later have an object for that."""


def selective_contexts(policy: Policy) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of a checkpointed forward pass and of its recomputation; what is changed in place is not saved.

    torch refuses a saved result that is changed after its operation, with an error in the backward pass. Here it is
    computed again. So `out = product(x, w); out.add_(bias)`, as the experts of transformers have it, needs one product
    more: the saved tensor has the bias in it by the time the product is due.
    """

    def unless_forgotten(
        context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        """torch 2.11 and 2.12 call the policy in the recomputation too; what they have saved waits in a list per op."""
        decided = policy(context, op, *args, **kwargs)
        if context.is_recompute and decided in SAVED:
            waiting = saved.get(op)
            if waiting and waiting[0] is _FORGOTTEN:
                waiting.pop(0)
                return CheckpointPolicy.PREFER_RECOMPUTE
        return decided

    forward, again = create_selective_checkpoint_contexts(unless_forgotten)
    saved = cast(dict[object, list[object]], forward.storage)  # `forward` holds the policy, which must not hold it too

    def forget_changed() -> None:
        for results in forward.storage.values():
            for place, result in results.items() if isinstance(results, dict) else enumerate(results):
                if _is_changed(result):
                    results[place] = _FORGOTTEN

    @contextmanager
    def computing() -> Iterator[None]:
        with forward:
            yield
        forget_changed()  # what the layer itself has changed, whose memory is free now

    @contextmanager
    def computing_again() -> Iterator[None]:
        forget_changed()
        with again:
            yield

    return computing(), computing_again()


CALLED_THROUGH = frozenset(
    ("torch.overrides", "torch._ops", "torch._tensor", "torch.functional", "torch.nn.functional")
)
"""Modules of torch through which functions written in Python, and registered operations, come to a function mode."""


def changes_in_place(tensor: torch.Tensor) -> int:
    """How many times a tensor has been changed in place; the public names only raise where that matters."""
    return tensor._version


grouped_product = torch._grouped_mm
"""Products of groups of rows, as the experts of transformers call it; the public one is `F.grouped_mm`."""


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place; of one that was made in inference mode this is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def is_compiled_too_often(error: Exception) -> bool:
    """Whether a full graph was not compiled once more, as torch's limit of its forms is reached.

    Read from the name, as the module of the error takes a second to import; there is no public name for it.
    """
    return type(error).__name__ == "FailOnRecompileLimitHit"


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` has been called."""
    return module._compiled_call_impl is not None


@cache
def half_is_native(dtype: torch.dtype) -> bool:
    """Whether torch's library for CPUs multiplies matrices of bf16 or fp16 here, and not torch number by number."""
    operations = torch.ops.mkldnn
    found = operations._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else operations._is_mkldnn_fp16_supported
    return bool(found())


def _is_changed(result: object) -> bool:
    """Whether a tensor of a saved result has been changed in place since it was saved."""
    parts = [part for part in tree_iter(result) if isinstance(part, _VersionWrapper)]
    return any(part.version is not None and part.val._version != part.version for part in parts)


def own_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own persistent buffers, by name.

    Which buffers are persistent can otherwise be read from a state dict only, which hooks change, FSDP's among them.
    """
    return {
        key: buffer
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if key not in module._non_persistent_buffers_set
    }


Parameters = dict[str, nn.Parameter | None]
ModuleBuffers = dict[str, torch.Tensor | None]
Children = dict[str, nn.Module | None]


def contents(module: nn.Module) -> tuple[Parameters, ModuleBuffers, Children]:
    """A module's own parameters, buffers and children, with the names that hold None.

    The public iterators leave those out, and of a child that has two names the second.
    """
    return module._parameters, module._buffers, module._modules


def set_contents(module: nn.Module, parameters: Parameters, buffers: ModuleBuffers, children: Children) -> None:
    """Replace all that a module holds; for a copy that was made without its class's `__init__`."""
    module._parameters, module._buffers, module._modules = parameters, buffers, children


def set_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of another one of a module's own.

    Unlike `setattr` and `register_parameter` it runs no registration hooks (those of `init_empty_weights` would move
    the parameter to the meta device), and leaves a plain attribute of that name alone, such as FSDP1's views.
    """
    module._parameters[key] = parameter


def apply_to_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change every parameter and buffer of a module as `Module.to` does, with a function of ours.

    FSDP2 learns in the same call where its shards lie; the public methods (`to`, `to_empty`) take one dtype and one
    device for all tensors.
    """
    module._apply(change)


def read_whole_numbers() -> None:
    """Let `float`, `item` and conditions give the number of a whole DTensor; torch gives that of this rank's part.

    A norm or a sum of a sharded weight is a part on each rank until it is added up. All ranks have to read it.
    """
    read = torch.ops.aten._local_scalar_dense.default
    DTensor._op_dispatcher._custom_op_handlers[read] = _whole_number


def _whole_number(_op: object, args: tuple[DTensor], _kwargs: object) -> object:
    with torch.no_grad():
        return args[0].full_tensor().item()


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on a tensor."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., object]]:
    """All hooks of forwards in a module; torch has public ways to add one and to remove it, and none to see them."""
    for each in module.modules():
        yield from (*each._forward_pre_hooks.values(), *each._forward_hooks.values())


def remove_forward_hooks(module: nn.Module, chosen: Callable[[Callable[..., object]], bool]) -> None:
    """Remove a module's own forward hooks that somebody else has registered and keeps no handle of."""
    for number, hook in list(module._forward_hooks.items()):
        if chosen(hook):
            del module._forward_hooks[number]
            module._forward_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


def schema_of(operation: OpOverload) -> torch.FunctionSchema:
    """The names, defaults and aliases of an operation's arguments; torch has no public way to read them."""
    return operation._schema


without_torch_function = torch._C.DisableTorchFunction
"""A context in which function modes do not see what is called, reads of attributes either; torch has no public one."""

# -- Tensors -----------------------------------------------------------------------------------------------------------

StridedShard = _StridedShard
"""The placement of a dimension that is cut among tensor ranks first and among shards after; no `Shard`."""


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Equal for the same memory, which several Python objects may stand for; `data_ptr` is 0 on the meta device."""
    return storage._cdata


base_of: Callable[[torch.Tensor], torch.Tensor | None] = cast(Any, torch.Tensor)._base.__get__
"""The tensor that another is a view of, if it is one."""


def local_part(tensor: DTensor) -> torch.Tensor:
    """The tensor itself that this rank has; `to_local` gives a view, and another one with gradients."""
    return tensor._local_tensor


LOADING = nn.Module._load_from_state_dict.__code__
"""What compares the shapes of weights with those of a state dict, of which FSDP1 gives this rank's parts."""
multiply_ = torch._foreach_mul_
"""Scales a list of tensors in place, with few kernels; the public optimizers and clipping do it this way."""
norms_of = torch._foreach_norm
"""The norms of a list of tensors, on a GPU in a dtype that they are not copied into; the public clipping uses it."""


@contextmanager
def without_modes(*kinds: type) -> Iterator[None]:
    """Inside, modes of these kinds do not see operations, down to the first of another kind on their stack.

    Each costs a call of Python for every operation; the public way to leave a mode is the end of its own context.
    """
    popped = []
    while (mode := _get_current_function_mode()) is not None and isinstance(mode, kinds):
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


def went_through_units(roots: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether tensors have been computed by sharded units, whose weights are freed after a backward pass.

    FSDP2 puts a node of its own before each unit that a gradient comes back through. FSDP1 has none; what it has joined
    is found where its gradient is accumulated, so not if all of a unit is frozen.
    """
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen: set[object] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, RegisterPostBackwardFunction._backward_cls):
            return True
        if node.name() == ACCUMULATES and isinstance(node.variable, FlatParameter):
            return True
        waiting += [before for before, _ in node.next_functions]
    return False


def unreached(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those of some leaves that no output was computed from, since the inputs."""
    seen: set[object] = {tensor.grad_fn for tensor in inputs}
    waiting = [tensor.grad_fn for tensor in outputs]
    left = {id(leaf): leaf for leaf in leaves}
    while waiting and left:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATES:
            left.pop(id(node.variable), None)
        waiting += [before for before, _ in node.next_functions]
    return [*left.values()]


ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The name of the node at a leaf of autograd's graph."""


def backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """`Tensor.backward`, but the function modes that are active here are active in it.

    What modes handle runs without them, and `Tensor.backward` is handled: so checkpointed layers would run the first
    time with modes, and the second time without.
    """
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(
        (tensor,), (gradient,), keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def unchecked_recomputation() -> Iterator[None]:
    """Inside, what checkpointed layers compute again is not compared with what they computed first.

    `checkpoint` has an argument for it, which a model of transformers that checkpoints itself does not pass on.
    """
    before = dict(_allowed_determinism_checks_to_fns)
    _allowed_determinism_checks_to_fns.update({name: lambda _: None for name in before})
    try:
        yield
    finally:
        _allowed_determinism_checks_to_fns.update(before)


def quieten_redistribution() -> None:
    """No warning where a part of a part is gathered in two steps: that is seldom (exports, probes), and meant."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# -- Process groups ----------------------------------------------------------------------------------------------------


def end_processes(batches: Iterator[object]) -> None:
    """End the processes of a `DataLoader`'s iterator, which otherwise ends them when it is collected.

    A traceback that somebody keeps, as notebooks do, keeps the iterator.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        batches._shutdown_workers()


def default_store() -> dist.Store:
    """The store at which the default process group met. A second one of our own would need another free port."""
    return cast(dist.Store, _get_default_store())


def open_group_of_one(num_ranks: int) -> None:
    """Make this process rank 0 of a default process group whose collectives move nothing, and wait for nobody.

    torch tests its own sharding with it; no public backend does without the other ranks.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401 (it registers collectives of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    before: int,
    behind: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [queries, heads, size] and sums [heads, queries] of FlashAttention over packed queries and keys.

    `varlen_attn` gives both too, but its backward pass knows only the keys of this call; a ring's needs the sums of
    all. To be replaced by a public backward pass that takes them.
    """
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, query_ends, key_ends, most_queries, most_keys, 0.0, (before, behind) == (-1, 0), False,
        scale=scale, window_size_left=before, window_size_right=behind,
    )  # fmt: skip
    return found[0], found[1]


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    before: int,
    behind: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, for results and sums that may be those of more keys than these."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, result, sums, query_ends, key_ends, most_queries, most_keys, 0.0,
        (before, behind) == (-1, 0), unused, unused.new_empty(0), scale=scale,
        window_size_left=before, window_size_right=behind,
    )  # fmt: skip


def collectives_issued() -> int:
    """The number of collectives that this process has called so far, in all of its groups.

    torch counts them for its own reports of a lack of agreement; there is no public name for the count.
    """
    issued = 0
    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # a backend that does not count
            issued += group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return issued


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether autograd computes gradients, as while it repeats a forward for activation checkpointing."""
    return is_bw()


def casts_inputs(code: CodeType) -> bool:
    """Whether this is the code with which FSDP2 casts an input of a unit to the dtype of the computation."""
    return code is _cast_fp_tensor.__code__


def initialise_root(root: FSDPModule) -> None:
    """Let `root` be the root of the modules that FSDP2 shards in it; otherwise the first one that is called is.

    At the end of a backward pass FSDP2 sums what autograd has not come by at: the root's gradients, and those of units
    whose inputs had none, in the order of this list. If a rank's rows use weights of the root before the first unit,
    the unit's inputs have gradients on that rank, and its sum comes before the root's; so it has to on the others.
    """
    state = root._get_fsdp_state()
    state._lazy_init()
    order = state._state_ctx.all_states
    if order[0] is state:
        order.reverse()


def is_root(module: FSDPModule) -> bool:
    """Whether a sharded module is the one whose units are the others."""
    return bool(module._get_fsdp_state()._is_root)


def _groups_of(module: FSDPModule) -> list[Any]:
    """The parameters of a sharded module by what they are gathered with; torch 2.11 has one group to a module."""
    state = module._get_fsdp_state()
    return vars(state).get("_fsdp_param_groups") or [group for group in [state._fsdp_param_group] if group]


def keep_reduced_dtype(unit: FSDPModule, dtype: torch.dtype) -> None:
    """Let a unit's weights, if they are in half precision, have gradients in the dtype in which ranks sum them.

    FSDP2 rounds these sums to the dtype of the weights, which it notes anew whenever a method of its gathers them: for
    a group of weights, or for each (torch 2.15).

    Args:
        unit: of an initialised root.
        dtype: that the weights have as `grad_dtype`.
    """
    for group in _groups_of(unit):
        vars(group)["_init_mp_dtypes"] = partial(_init_reduced_dtypes, group, group._init_mp_dtypes, dtype)
        group._init_mp_dtypes()


def _init_reduced_dtypes(group: Any, init: Callable[[], None], dtype: torch.dtype) -> None:
    init()
    if vars(group).get("_orig_dtype") is not None:
        group._orig_dtype = dtype
    for each in group.fsdp_params:
        vars(each)["sharded_grad_dtype"] = dtype


def offloaded_parameters(root: nn.Module) -> set[int]:
    """The `id`s of the parameters under `root` that FSDP2 keeps in host memory."""
    groups = [group for module in root.modules() if isinstance(module, FSDPModule) for group in _groups_of(module)]
    return {id(each.sharded_param) for group in groups for each in group.fsdp_params if each.offload_to_cpu}


def gathered_parameters(module: FSDPModule) -> dict[int, tuple[torch.Tensor, DTensor]]:
    """The weights of a sharded module, without those inside it, that have been gathered: each with this rank's part, by
    `id`. Their memory is empty while they are freed."""
    every = [each for group in _groups_of(module) for each in group.fsdp_params]
    found = [(vars(each).get("_unsharded_param"), each.sharded_param) for each in every]
    return {id(whole): (whole, part) for whole, part in found if whole is not None}


def replaced_parameters(module: FSDPModule) -> list[str]:
    """The names of those weights of a sharded module, without those inside it, in whose place another tensor is.

    FSDP2 puts the gathered weights there in the next forward.
    """
    found = []
    for each in (each for group in _groups_of(module) if not group.is_unsharded for each in group.fsdp_params):
        info, own = each._module_info, (each.sharded_param, vars(each).get("_unsharded_param"), None)
        held = info.module._parameters.get(info.param_name)
        if not any(held is tensor for tensor in own):
            found.append(info.param_name)
    return found


def count_parameters(module: FSDPModule) -> int:
    """The number of weights of a sharded module, without those inside it."""
    return sum(len(group.fsdp_params) for group in _groups_of(module))


class _Noted(DefaultAllocMixin):
    """Calls a function before each collective, when FSDP2 allocates its memory; without a collective it does not."""

    def __init__(self, note: Callable[[], object]) -> None:
        self._note = note

    def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
        self._note()
        return super().allocate(*size, **kind)


class _NotedGather(_Noted, DefaultAllGather):
    pass


class _NotedReduction(_Noted, DefaultReduceScatter):
    pass


def note_collectives(module: FSDPModule, note: Callable[[], object]) -> list[nn.Parameter]:
    """Call a function before FSDP2 gathers a module's weights, and before it sums its gradients over ranks.

    The public methods take what communicates, and torch's own classes for it are private.

    Returns:
        The module's parameters; none where no other rank has parts or copies of them, so that nothing is noted.
    """
    groups = [group for group in _groups_of(module) if group.mesh_info.mesh.size() > 1]
    if groups:
        module.set_custom_all_gather(_NotedGather(note))
        module.set_custom_reduce_scatter(_NotedReduction(note))
    return [each.sharded_param for group in groups for each in group.fsdp_params]


@dataclasses.dataclass(slots=True)
class Filling:
    """Of which parameters FSDP2 has summed gradients, by `id`.

    Attributes:
        on: whether those without a gradient get zeros, in units through which a backward pass went.
        used: with a gradient on this rank.
        filled: with zeros.
        trained: not frozen in a backward pass since the last sum; gradients of earlier micro-batches may be in it.
        passed: the groups of parameters through which a backward pass went since their last sum, by `id`.
    """

    on: bool = False
    used: set[int] = dataclasses.field(default_factory=set)
    filled: set[int] = dataclasses.field(default_factory=set)
    trained: set[int] = dataclasses.field(default_factory=set)
    passed: set[int] = dataclasses.field(default_factory=set)

    def clear(self) -> None:
        """Forget all of it."""
        self.on = False
        for noted in (self.used, self.filled, self.trained, self.passed):
            noted.clear()


def fill_unused(module: FSDPModule, filling: Filling) -> None:
    """Let a unit's parameters without a gradient have zeros when FSDP2 sums gradients over ranks.

    It sums the gradients that there are, end to end; where ranks have used other parameters, or none of a unit that all
    have called, these would be mixed. Its own setting for this fills units that no rank has called, too, and leaves no
    way to know what was used.

    Args:
        module: sharded.
        filling: notes what was done.
    """
    for group in _groups_of(module):
        if group.mesh_info.mesh.size() > 1:
            vars(group)["post_backward"] = torch.compiler.disable(partial(_filled_backward, group, filling))


def count_calls(unit: FSDPModule) -> None:
    """Let `_post_forward_indices` have the calls of a unit that a backward pass has yet to reach, which `_fill` reads.

    FSDP2 takes those away that it has reached where it chooses itself what to gather next, and not where that is set.
    """
    for group in _groups_of(unit):
        vars(group)["pre_backward"] = torch.compiler.disable(partial(_counted_backward, group))


def _counted_backward(group: Any, prefetches: bool, *others: object) -> None:
    begins = group._training_state != TrainingState.PRE_BACKWARD
    type(group).pre_backward(group, prefetches, *others)
    if begins and not prefetches and group._post_forward_indices:
        group._post_forward_indices.pop()


def _filled_backward(group: Any, filling: Filling, *_: object) -> None:
    if filling.on:
        _fill(group, filling)
    type(group).post_backward(group)


def _fill(group: Any, filling: Filling) -> None:
    if group._training_state == TrainingState.PRE_BACKWARD:
        filling.passed.add(id(group))
    made = [(each, whole) for each in group.fsdp_params if (whole := vars(each).get("_unsharded_param")) is not None]
    filling.trained.update([id(each.sharded_param) for each, whole in made if whole.requires_grad])
    if not group.reduce_grads:
        return
    used, unused = [], []
    for each, whole in made:
        if id(each.sharded_param) in filling.trained:
            has_one = whole.grad is not None or each.unsharded_accumulated_grad is not None
            (used if has_one else unused).append(each)
    filling.used.update([id(each.sharded_param) for each in used])
    # Autograd gives the gradient of a unit that is called several times once, after the last of its calls.
    if used or (id(group) in filling.passed and not group._post_forward_indices):
        for each in unused:
            filling.filled.add(id(each.sharded_param))
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
        summed = [*used, *unused]
        if any(each.unsharded_accumulated_grad is not None for each in summed):  # in the dtype of the sum, as all then
            for each in summed:
                if each.unsharded_accumulated_grad is None:
                    each.to_accumulated_grad_if_needed()
    filling.passed.discard(id(group))
    filling.trained.difference_update([id(each.sharded_param) for each, _ in made])


_GATHERED = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)


def gathered_now(modules: Sequence[FSDPModule]) -> Callable[[], bool]:
    """What finds whether one of some sharded modules is in its forward or backward, when its weights are gathered."""
    states = [module._get_fsdp_state() for module in modules]

    def is_open() -> bool:
        for state in states:  # noqa: SIM110 — a generator costs more than what it goes over
            if state._training_state in _GATHERED:
                return True
        return False

    return is_open


def is_at_rest(module: FSDPModule) -> bool:
    """Whether autograd computes no gradients, and a sharded module is not in its forward either."""
    return not is_bw() and module._get_fsdp_state()._training_state not in _GATHERED


def forget_iteration(root: FSDPModule) -> None:
    """Let the next forward of a sharded module begin anew, after an exception in a forward or a backward pass.

    What torch calls `reset_iter_state` from 2.13 on.
    """
    if torch.__version__ >= "2.13":
        root.reset_iter_state()
        return
    state: Any = root._get_fsdp_state()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
    sharded = [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]
    for group in [group for module in sharded for group in _groups_of(module)]:
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


Inputs = tuple[tuple[object, ...], dict[str, object]]


def before_forward(module: FSDPModule, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
    """What FSDP2 does before the forward of a module; `register_fsdp_forward_method` does it for methods alone."""
    return module._get_fsdp_state()._pre_forward(cast(nn.Module, module), args, kwargs)


def after_forward(module: FSDPModule, args: tuple[object, ...], output: object) -> object:
    """What FSDP2 does after the forward of a module; returns the output, through which gradients come back."""
    return module._get_fsdp_state()._post_forward(cast(nn.Module, module), args, output)


@contextmanager
def without_hooks(root: FSDPModule) -> Iterator[None]:
    """Inside, forwards in a sharded module whose weights are gathered, all of them, leave these alone.

    What remains of FSDP2's hooks is that inputs get the dtype of the computation, and those of the root its device.
    """
    changed: list[tuple[dict[int, Callable[..., object]], int, Callable[..., object]]] = []

    def replace(registered: dict[int, Callable[..., object]], number: int, hook: Callable[..., object]) -> None:
        changed.append((registered, number, registered[number]))
        registered[number] = hook

    def prepare(state: FSDPState, moves: bool, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        if moves:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(state._device), (args, kwargs))
        return state._cast_forward_inputs(args, kwargs)

    for module in cast(nn.Module, root).modules():
        if not isinstance(module, FSDPModule):
            continue
        state, moves = module._get_fsdp_state(), module is root and module._get_fsdp_state()._device.type == "cuda"
        inputs = partial(prepare, state, moves) if moves or state._mp_policy.param_dtype is not None else None
        before: Callable[..., object] = lambda _, args, kwargs, inputs=inputs: inputs(args, kwargs) if inputs else None  # noqa: E731
        replace(module._forward_pre_hooks, state._pre_forward_hook_handle.id, before)
        replace(module._forward_hooks, state._post_forward_hook_handle.id, lambda *_: None)
    try:
        yield
    finally:
        for registered, number, hook in changed:
            registered[number] = hook


def gather_before_backward(module: FSDPModule, tensors: Sequence[torch.Tensor]) -> None:
    """Let FSDP2 gather a module's weights, and reduce their gradients, when gradients of these tensors come back.

    `after_forward` does that for the tensors that it finds in the output.
    """
    module._get_fsdp_state()._register_pre_backward_hook(tensors)


# -- FSDP1: torch develops it no further, so nothing of this is going to be public -------------------------------------

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
"""Copies of a sharded model whose weights stay whole between forward and backward."""


def flat_parameter(wrapped: FullyShardedDataParallel) -> FlatParameter | None:
    """The parameter that FSDP1 has made of a unit's; None for a unit without any."""
    return None if wrapped._handle is None else wrapped._handle.flat_param


def gather(wrapped: FullyShardedDataParallel) -> None:
    """Gather a unit's weights outside of a forward, in the dtype of the computation; `free_gathered` frees them.

    The public `summon_full_params` gathers them in full precision.
    """
    if wrapped._handle is not None:
        wrapped._handle.pre_unshard()
        wrapped._handle.unshard()
        wrapped._handle.post_unshard()


def free_gathered(wrapped: FullyShardedDataParallel) -> None:
    """Free a unit's gathered weights, which FSDP1 keeps after a forward without a backward; the next one gathers."""
    if wrapped._handle is not None:
        wrapped._handle.reshard(free_unsharded_flat_param=True)
        wrapped._handle.post_reshard()


def is_gathered(wrapped: FullyShardedDataParallel) -> bool:
    """Whether a unit's weights are gathered, or its modules have views of what was, or its memory still holds it."""
    handle = wrapped._handle
    if handle is None:
        return False
    holds = handle.uses_sharded_strategy and not handle.needs_unshard()
    return holds or handle._skipped_use_sharded_views or not handle.is_sharded(handle.flat_param)


def sum_gradients(wrapped: FullyShardedDataParallel) -> None:
    """Let FSDP1 sum gradients over ranks, where it would average."""
    wrapped._gradient_predivide_factor = wrapped._gradient_postdivide_factor = 1


def reduces_gradients(wrapped: FullyShardedDataParallel) -> bool:
    """Whether this backward pass reduces gradients over ranks, that is, is not inside `no_sync`."""
    return wrapped._sync_gradients


def reduce_left_gradient(wrapped: FullyShardedDataParallel) -> None:
    """Reduce a unit's gradient over ranks, if a backward pass has left it whole.

    FSDP1 reduces it at the end of the first forward since the last pass. In half precision each forward accumulates by
    itself, so a pass without that one (its output is dropped, or detached) does not come by there.
    """
    handle = wrapped._handle
    flat = None if handle is None else handle.flat_param
    if handle is None or flat is None or flat.grad is None or flat.grad.numel() == flat.numel():
        return
    flat.grad.data = flat.grad.to(handle._reduce_dtype)
    before = wrapped.training_state, handle._training_state
    wrapped.training_state = FlatTrainingState.FORWARD_BACKWARD
    handle._training_state = HandleTrainingState.BACKWARD_POST
    try:
        _reduce_grad(wrapped, handle)
    finally:
        wrapped.training_state, handle._training_state = before
    handle.prepare_gradient_for_optim()


def drop_unreduced_gradient(flat: FlatParameter) -> None:
    """Forget a gradient that is not reduced yet; FSDP1 would go on adding to it, in the dtype of the computation."""
    flat.grad = None
    flat._post_backward_called = False
    for parameter in flat._params or ():
        parameter.grad = None
