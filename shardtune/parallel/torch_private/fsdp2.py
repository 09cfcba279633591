"""What FSDP2 knows of its units: their weights, gradients and states, and the calls around a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState, _cast_fp_tensor, is_bw
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardtune.parallel.second_derivatives import refuse_second_derivatives
from shardtune.parallel.torch_private.graph import accumulates, current_node, graph_is_retained, number_of_pass


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


@torch.no_grad()
def changed_gathered(module: FSDPModule) -> list[DTensor]:
    """This rank's parts of those weights of a gathered module, without those inside it, that have other values now than
    were gathered: in the range of the part."""
    found = []
    for each in (each for group in _groups_of(module) if group.is_unsharded for each in group.fsdp_params):
        own, whole = each.sharded_param.to_local(), each.unsharded_param
        whole = whole.to_local() if isinstance(whole, DTensor) else whole
        info, dim = each.mesh_info, each.fsdp_placement.dim
        if type(own) is not torch.Tensor or own.ndim == 0:  # a class that gathers itself otherwise
            continue
        if isinstance(info, FSDPMeshInfo):
            chunks = whole.chunk(info.shard_mesh_size, dim)
            whole = chunks[info.shard_mesh_rank] if info.shard_mesh_rank < len(chunks) else whole[:0]
        if own.numel() and not torch.equal(whole, own.to(whole.device, whole.dtype)):
            found.append(each.sharded_param)
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


@dataclasses.dataclass(slots=True)
class SecondDerivatives:
    """Whether a backward pass is differentiated itself, as that of `torch.autograd.grad(…, create_graph=True)` may be.

    Args:
        refuse: is called where one is to be; None: second derivatives are right.

    Attributes:
        recorded: the present backward pass records a graph of its own.
        ahead: such a graph was recorded, and weights stay gathered for passes through it.
        sums: the present pass gives weights their gradients, as that of `torch.autograd.grad` for inputs does not.
        last: it does, and its graph is not retained: no pass through what was recorded follows.
        hooked: the weights that end a pass which reaches them, by `id`.
        number: of the pass, by autograd.
    """

    refuse: Callable[[], None] | None = None
    recorded: bool = False
    ahead: bool = False
    sums: bool = False
    last: bool = False
    hooked: set[int] = dataclasses.field(default_factory=set)
    number: int = -1

    def enter(self) -> None:
        """Note the pass in which a unit or a weight is reached."""
        if self.ahead and (number := number_of_pass()) != self.number:
            self.ahead = not self.last
            self.number, self.sums = number, self.ahead and accumulates()
            self.last = self.sums and not graph_is_retained()


def watch_backward(module: FSDPModule, filling: Filling, second: SecondDerivatives) -> None:
    """Let a unit's parameters without a gradient have zeros when FSDP2 sums gradients over ranks, and let its weights
    stay gathered as long as second derivatives need them.

    FSDP2 sums the gradients that there are, end to end; where ranks have used other parameters, or none of a unit that
    all have called, these would be mixed. Its own setting for this fills units that no rank has called, too, and leaves
    no way to know what was used.

    It frees a unit's weights after a forward, and when a gradient has come back to its inputs. From a pass that records
    a graph (`create_graph=True`) on they are kept, until a pass has given weights their gradients: such a one reaches
    the recorded products first and the forward's after them, so it sums each gradient when it ends.

    Args:
        module: sharded.
        filling: notes what was done.
        second: of the whole model.
    """
    state = module._get_fsdp_state()
    for group in _groups_of(module):
        begin = partial(_begin_backward, group, state, filling, second, group.pre_backward)
        vars(group)["pre_backward"] = torch.compiler.disable(begin)
        fills = group.mesh_info.mesh.size() > 1
        vars(group)["post_backward"] = torch.compiler.disable(partial(_end_backward, group, filling, second, fills))


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


def _begin_backward(
    group: Any,
    state: FSDPState,
    filling: Filling,
    second: SecondDerivatives,
    pre_backward: Callable[..., None],
    *how: object,
) -> None:
    if second.ahead:
        second.enter()
    second.recorded = torch.is_grad_enabled()  # as autograd sets it for `create_graph`
    if second.recorded and second.refuse is not None:
        second.refuse()
    if second.recorded and not second.ahead:
        second.ahead, second.last, second.number = True, False, -1
    pre_backward(*how)
    if not second.ahead:
        return
    if second.recorded:
        filling.passed.add(id(group))
        vars(group)["reshard"] = partial(_free, group, second)
    for each in group.fsdp_params:
        whole = each.unsharded_param
        if whole.requires_grad and id(whole) not in second.hooked:
            second.hooked.add(id(whole))
            whole.register_post_accumulate_grad_hook(partial(_reach_weight, state, second))


def _reach_weight(state: FSDPState, second: SecondDerivatives, _: torch.Tensor) -> None:
    """Let a pass end with its sums that reaches weights, and perhaps no output of a unit, where FSDP2 notes passes."""
    if torch.is_grad_enabled():
        refuse_second_derivatives(
            "a gradient of weights, which ranks sum,",
            "differentiate by inputs: torch.autograd.grad(value, inputs, create_graph=True)",
        )
    second.enter()
    second.recorded = False
    state._register_root_post_backward_final_callback()


def _free(group: Any, second: SecondDerivatives) -> None:
    if second.last or not second.ahead:
        type(group).reshard(group)


def _end_backward(group: Any, filling: Filling, second: SecondDerivatives, fills: bool, *_: object) -> None:
    if second.recorded or (second.ahead and (current_node() is not None or not second.sums)):
        return  # FSDP2 calls this once more when the pass ends
    if fills and filling.on:
        _fill(group, filling, complete=second.ahead)
    made = [each for each in group.fsdp_params if "_unsharded_param" in vars(each)] if group.reduce_grads else ()
    if any(each.unsharded_accumulated_grad is not None for each in made):
        for each in made:  # FSDP2 sums gradients of one dtype, and a parameter's first may come in the last micro-batch
            if each.unsharded_accumulated_grad is None and vars(each)["_unsharded_param"].grad is not None:
                each.to_accumulated_grad_if_needed()
    type(group).post_backward(group)


def _fill(group: Any, filling: Filling, *, complete: bool) -> None:
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
    if used or (id(group) in filling.passed and (complete or not group._post_forward_indices)):
        for each in unused:
            filling.filled.add(id(each.sharded_param))
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
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
