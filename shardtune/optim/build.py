"""Optimizers by name, parameter groups, and learning rates as a pure function of the step."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.config import OptimConfig
from shardtune.config.parameter_patterns import as_pattern, remedy_of
from shardtune.config.rank_layout import Layout
from shardtune.config.shown import as_written
from shardtune.config.user_code import named_errors
from shardtune.errors import ConfigError, ModelError
from shardtune.optim.low_bit import LOW_BIT, LowBitOptimizer, ParamGroup, PlainSGD
from shardtune.optim.muon import MATRICES, MuonWithAdamW
from shardtune.optim.named_class import PLAIN, is_of_torch, optimizer_class, way_of
from shardtune.optim.sharded import OfParts, OfWhole, plain_step

FUSED_ON_GPUS = ("AdamW", "Adam", "SGD")
"""Classes of torch with a fused kernel for CUDA."""
FUSED_OF_PARTS = ("SGD", "Adagrad")
"""Classes of torch whose fused kernel takes no `DTensor`; it gets each rank's parts as plain tensors."""
TRUTH = re.compile(r"<class 'bool'>|bool|(typing\.)?optional\[bool\]|bool \| none")
NUMBER = re.compile(r"(<class ')?(int|float)('>)?|int \| float|float \| int|")
"""How parameters are declared that are true or false, and numbers."""
KERNELS = ("capturable", "foreach", "fused")
"""Arguments that choose a kernel, which the device of the run may have and that of the trial may not."""
KNOWN = "known_lr"
"""Of a group that is watched: the rate that was set, or used by a step, last."""


def _arguments(name: str, config: OptimConfig) -> ParamGroup:
    """The recipe's values as arguments of this optimizer; values that it cannot take are refused."""
    kind = optimizer_class(name)
    shown = f"torch.optim.{name}" if is_of_torch(name) else name
    parameters = inspect.signature(kind).parameters
    accepted = {key for key, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    accepted -= {"self", "params"}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    needs_rate = "lr" in accepted and parameters["lr"].default is inspect.Parameter.empty
    rate: ParamGroup = {"lr": config.lr} if needs_rate else {}  # groups have their own
    # The betas of another package's class have its own defaults and meanings: they belong into `args`.
    adam = is_of_torch(name) and ("betas" in accepted or kind is torch.optim.Muon)
    decays = "weight_decay" in accepted or (takes_any and _passes_decay(name, config, rate))
    values: ParamGroup = {**rate, **({"weight_decay": config.weight_decay} if decays else {})}
    if adam and kind is not torch.optim.Muon:  # its adam_* are those of the AdamW beside it
        values |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    own_keys = {"lr", *values}
    further = accepted - own_keys
    unused = {"adam_beta1": adam, "adam_beta2": adam, "adam_eps": adam, "weight_decay": decays}
    changed = config.model_dump(exclude_defaults=True)
    if not config.weight_decay:
        del unused["weight_decay"]  # what an optimizer without a decay does
    for key in [key for key, used in unused.items() if not used and key in changed]:
        raise ConfigError(
            f"actor.optim.{key} = {changed[key]:g} has no effect: {shown} does not take it",
            where=f"actor.optim.{key}",
            remedy=f"leave it out; actor.optim.args may hold {', '.join(sorted(further)) or 'nothing'}",
        )
    for key, value in config.args.items():
        if key in own_keys or (key not in further and not takes_any):
            takes = ", ".join(sorted(further)) or ("others" if takes_any else "none")
            has = "takes that from keys of their own" if key in own_keys else "has no such argument"
            raise ConfigError(
                f"actor.optim.args.{key} = {value!r}: {shown} {has}",
                where="actor.optim.args",
                remedy=f"it takes {takes}; lr, weight_decay and adam_* are keys of actor.optim",
            )
        if key in parameters:
            _check_type(shown, parameters[key], value)
        values[key] = tuple(value) if isinstance(value, list) else value
    if not decays and any(group.weight_decay for group in config.groups):
        raise ConfigError(
            f"the weight_decay of an entry of actor.optim.groups has no effect: {shown} does not take it",
            where="actor.optim.groups",
            remedy="leave it out, or use another optimizer",
        )
    return values


def _passes_decay(name: str, config: OptimConfig, rate: ParamGroup) -> bool:
    """Whether a class with `**kwargs` passes a weight decay on, so that its groups have it."""
    tried = config.weight_decay + 0.125
    arguments: ParamGroup = {**{key: value for key, value in config.args.items() if key != "lr"}, **rate}
    try:
        made = optimizer_class(name)(
            [{"params": [nn.Parameter(torch.zeros(1, 1))]}], **{**arguments, "weight_decay": tried}
        )
    except Exception:  # whatever a class of others raises: its own message comes when it is made without a decay
        return False
    return all(group.get("weight_decay") == tried for group in made.param_groups)


def recipe_options(config: OptimConfig, optimizer: torch.optim.Optimizer) -> set[str]:
    """The settings of parameter groups that come from the recipe; the others are the optimizer's own numbers.

    Classes of torch have none of their own. Those of others may count steps or estimate a rate in a group, from its
    construction on.

    Args:
        config: the recipe's `actor.optim`.
        optimizer: built from it.
    """
    if is_of_torch(config.name):
        return {key for group in optimizer.param_groups for key in group}
    return {"params", "names", "lr", "base_lr", KNOWN, *KERNELS, *_arguments(config.name, config)}


def _check_type(shown: str, parameter: inspect.Parameter, value: object) -> None:
    """Refuse text for a truth value, which would be true whatever it says, and a truth value for a number."""
    default = parameter.default
    declared = "" if parameter.annotation is parameter.empty else str(parameter.annotation).lower()
    if TRUTH.fullmatch(declared) or (not declared and isinstance(default, bool)):
        right, allowed = isinstance(value, bool) or value is default, "true or false"
    elif isinstance(default, int | float) and not isinstance(default, bool) and NUMBER.fullmatch(declared):
        whole = "int" in declared and "float" not in declared
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        right, allowed = is_number, "a whole number" if whole else "a number"
        if isinstance(value, float) and whole:
            right = value.is_integer()
    else:
        return
    if not right:
        raise ConfigError(
            f"actor.optim.args.{parameter.name}: {as_written(value)} is not allowed: {shown} takes {allowed}",
            where="actor.optim.args",
            remedy=f"write {allowed}",
        )


def check_optimizer(config: OptimConfig, layout: Layout) -> None:
    """Refuse, before anything is launched, an optimizer or arguments that cannot work.

    Args:
        config: the recipe's `actor.optim`.
        layout: of the ranks over which the weights are sharded.
    """
    arguments = _arguments(config.name, config)
    stand_in = nn.Parameter(torch.zeros(1, 1))
    _make(config.name, [{"params": [stand_in], "lr": config.lr}], arguments)
    if config.args and is_of_torch(config.name):
        _try_step(config.name, stand_in, {key: value for key, value in arguments.items() if key not in KERNELS})
    way = way_of(config.name, arguments)
    if way == "parts" or layout.num_ranks == 1:
        return
    why = "each of its steps depends on all parameters together"
    if way == "whole":
        why = "it steps whole matrices"
        if not layout.flat and layout.expert == 1:
            return
    remedy = "use AdamW, or one rank"
    if way == "whole":
        remedy = "use AdamW, or actor.training_backend: fsdp without actor.parallel.expert"
    raise ConfigError(
        f"actor.optim.name = {config.name} cannot train on {layout.num_ranks} ranks in this layout: {why}",
        where="actor.optim.name",
        remedy=remedy,
    )


def _try_step(name: str, stand_in: nn.Parameter, arguments: ParamGroup) -> None:
    optimizer = _make(name, [{"params": [stand_in]}], arguments)
    stand_in.grad = torch.ones(1, 1)
    try:
        plain_step(optimizer)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise _refused(name, error) from error


def _group_of(name: str, ndim: int, config: OptimConfig) -> tuple[float, float]:
    """(learning rate, weight decay) of a parameter; the last pattern that matches its name wins."""
    decay = config.weight_decay if ndim >= 2 else 0.0  # norms and biases are vectors
    rate = config.lr
    for group in config.groups:
        if re.search(as_pattern(group.pattern), name):
            rate = rate if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
    return rate, decay


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimConfig,
    shapes: Mapping[str, torch.Size] = MappingProxyType({}),
    *,
    seed: int = 0,
    starts: Mapping[str, int] = MappingProxyType({}),
    outer: Collection[str] = (),
    shared: Mapping[str, str] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """The optimizer over named parameters, in groups of equal learning rate and weight decay.

    Each group has `base_lr`, which `set_learning_rate` scales, and `names`, those of its parameters.

    Args:
        parameters: by name.
        config: the recipe's `actor.optim`.
        shapes: of whole parameters, by name, where a rank's part has another number of dimensions.
        seed: of the run; states in bf16 and int8 and weights in bf16 are rounded by it.
        starts: by name, for parameters of which this rank has a range of the flattened numbers: its first index.
        outer: names of embeddings and the head, which Muon leaves to AdamW, as it does all but matrices.
        shared: further names of shared parameters, with the name that `parameters` has; for messages.
    """
    kind = optimizer_class(config.name)
    arguments = _arguments(config.name, config)
    _check_groups(config, parameters, shared)
    if arguments.get("capturable") and any(parameter.device.type == "cpu" for parameter in parameters.values()):
        raise ConfigError(
            "actor.optim.args.capturable: true is for parameters on GPUs",
            where="actor.optim.args",
            remedy="leave it out",
        )
    # Sharded and replicated parameters are in different groups: torch does not mix them in one operation.
    muon = kind is torch.optim.Muon
    groups: dict[tuple[float, float, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        dimensions = len(shapes.get(name, parameter.shape))
        matrix = muon and dimensions == 2 and name not in outer
        key = (*_group_of(name, dimensions, config), isinstance(parameter, DTensor), matrix)
        groups.setdefault(key, []).append((name, parameter))
    settings = [
        {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "lr": rate,
            "base_lr": rate,
            **({"weight_decay": decay} if "weight_decay" in arguments else {}),
            **({MATRICES: matrix} if muon else {}),
        }
        for (rate, decay, _, matrix), members in groups.items()
    ]
    if muon:
        return _muon(settings, arguments, config)
    if config.state_dtype != "fp32" or any(parameter.dtype == torch.bfloat16 for parameter in parameters.values()):
        kind = _low_bit(config.name, arguments)
        return kind(settings, arguments, state_dtype=config.state_dtype, seed=seed, starts=starts)
    arguments |= _kernels(config.name, arguments, parameters.values())
    way = way_of(config.name, arguments)
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return _make(config.name, settings, arguments)
    if way == "whole":
        return OfWhole(settings, lambda groups: _make(config.name, groups, arguments))
    fused = arguments.get("fused") and config.name in FUSED_OF_PARTS
    if not is_of_torch(config.name) or config.name in PLAIN or fused:
        return OfParts(settings, lambda groups: _make(config.name, groups, arguments))
    return _make(config.name, settings, arguments)


def _check_groups(config: OptimConfig, names: Collection[str], shared: Mapping[str, str]) -> None:
    """Refuse an entry of `groups` that matches nothing, or whose values later ones replace in all that it matches."""
    matched = [{name for name in names if re.search(as_pattern(group.pattern), name)} for group in config.groups]
    for number, (group, found) in enumerate(zip(config.groups, matched, strict=True)):
        shown = as_written(group.pattern)
        if not found:
            raise ConfigError(
                f"actor.optim.groups: the pattern {shown} matches no trainable parameter",
                where="actor.optim.groups",
                remedy=_by_its_name(group.pattern, names, shared) or remedy_of(group.pattern, list(names)),
            )
        later = list(zip(config.groups, matched, strict=True))[number + 1 :]
        for key in ("lr", "weight_decay"):
            given = [others for other, others in later if getattr(other, key) is not None]
            if getattr(group, key) is not None and found <= set().union(*given):
                raise ConfigError(
                    f"actor.optim.groups: the {key} of {shown} has no effect: later patterns match all that it "
                    "matches, and the last match counts",
                    where="actor.optim.groups",
                    remedy="put the wider pattern first, or leave one of them out",
                )


def _by_its_name(pattern: str, names: Collection[str], shared: Mapping[str, str]) -> str:
    """What to write instead of a pattern that matches a further name of a shared parameter; empty for any other."""
    found = [other for other in shared if shared[other] in names and re.search(as_pattern(pattern), other)]
    return f"{found[0]} is shared with {shared[found[0]]}, which is its name here" if found else ""


def _kernels(name: str, arguments: ParamGroup, parameters: Iterable[nn.Parameter]) -> ParamGroup:
    """Arguments that choose torch's fused kernels where all parameters are on GPUs, if the recipe chooses none.

    There a number's update does not depend on its place, as it does on a CPU: a CPU's kernel computes the last numbers
    of a part one by one, with other roundings than those before, which it computes several at a time.
    """
    chosen = {"fused", "foreach", "capturable", "differentiable"} & arguments.keys()
    if chosen or name not in FUSED_ON_GPUS:
        return {}
    return {"fused": True} if all(parameter.is_cuda for parameter in parameters) else {}


def _muon(groups: list[ParamGroup], arguments: ParamGroup, config: OptimConfig) -> MuonWithAdamW:
    if not any(group[MATRICES] for group in groups):
        raise ConfigError(
            "actor.optim.name = Muon trains the matrices of hidden layers, and none is trained here",
            where="actor.optim.name",
            remedy="use AdamW",
        )
    own = {key: value for key, value in arguments.items() if key != "weight_decay"}
    return MuonWithAdamW(groups, own, {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps})


def _low_bit(name: str, arguments: ParamGroup) -> type[LowBitOptimizer]:
    if name not in LOW_BIT:
        raise ConfigError(
            f"{name} keeps its states and weights in fp32 only",
            where="actor.optim.name",
            remedy=f"use one of {', '.join(LOW_BIT)}, or actor.optim.state_dtype: fp32 and a precision other than "
            "pure_bf16",
        )
    return PlainSGD if name == "SGD" and not arguments.get("momentum") else LOW_BIT[name]


def _make(name: str, groups: list[ParamGroup], arguments: ParamGroup) -> torch.optim.Optimizer:
    kind = optimizer_class(name)
    if not is_of_torch(name):
        with named_errors(name, "actor.optim.name", "__init__"):
            return kind(groups, **arguments)
    try:
        return kind(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(name, error) from error


def _refused(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"torch.optim.{name} refuses its parameters or arguments: {error}",
        where="actor.optim",
        remedy=f"see the documentation of torch.optim.{name}; AdamW takes any parameters",
    )


def rate_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """The schedule at a step, between 0 (the minimal rate) and 1 (the full rate).

    Worked example: 4 warm-up steps of 10 in total, linear: 1/4, 2/4, 3/4, 4/4, then 1 - 0/6, 1 - 1/6, …, 1 - 5/6.

    Args:
        step: optimizer steps done before this one.
        total_steps: the horizon; from there on the rate is the minimal one (the full one for `constant`).
    """
    warmup = config.lr_warmup_steps or round(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step if config.lr_warmup_from_zero else step + 1) / warmup
    if config.lr_scheduler == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler == "linear":
        return 1.0 - progress
    if config.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = max(1, round(config.decay_ratio * total_steps))  # wsd: warm-up, stable, linear decay
    return min(1.0, max(0.0, (total_steps - step) / decay_steps))


def watch_rates(optimizer: torch.optim.Optimizer) -> None:
    """Let `set_learning_rate` refuse rates that neither it nor a step of the optimizer has set: no step would use them.

    What is set between the two is used: by a loop of the user's, a hook before the step, or the step itself.

    Args:
        optimizer: that a user's code can reach.
    """

    def keep(*_: object) -> None:
        for group in optimizer.param_groups:
            group[KNOWN] = float(group["lr"])

    keep()
    optimizer.register_step_post_hook(keep)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, total_steps: int, config: OptimConfig) -> float:
    """Set every group's learning rate for a step; returns the rate that `actor.optim.lr` has then.

    Raises:
        ConfigError: a group has another rate than was set, where `watch_rates` watches.
        ModelError: there are parameters that `build_optimizer` was not given.
    """
    for group in optimizer.param_groups:
        if "base_lr" not in group or len(group.get("names", group["params"])) != len(group["params"]):
            raise _foreign(group)
    factor = rate_factor(step, total_steps, config)
    in_warmup = step < (config.lr_warmup_steps or round(config.lr_warmup_steps_ratio * total_steps))
    bases = [*(group["base_lr"] for group in optimizer.param_groups), config.lr]
    floors = [0.0 if in_warmup else min(config.min_lr, base) for base in bases]
    *rates, rate = [floor + (base - floor) * factor for base, floor in zip(bases, floors, strict=True)]
    for number, (group, group_rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
        if KNOWN in group:
            if group["lr"] != group[KNOWN]:
                raise _without_effect(number, float(group["lr"]), group_rate, step)
            group[KNOWN] = group_rate
        group["lr"] = group_rate
    return rate


def _foreign(group: ParamGroup) -> ModelError:
    shapes = [list(parameter.shape) for parameter in group["params"]]
    return ModelError(
        f"a parameter group of the optimizer is not as it was built (its parameters have the shapes "
        f"{', '.join(map(str, shapes[:3]))}{', …' if len(shapes) > 3 else ''}): checkpoints have no names for what was "
        "added",
        where="self.optimizer.param_groups",
        remedy="leave the groups as they are: register each parameter in the model that model_provider_func or build "
        "returns, trainable there, and set its rate in actor.optim.groups; it may be frozen in setup after "
        "super().setup(), by requires_grad_(False), and unfrozen later",
    )


def _without_effect(number: int, found: float, scheduled: float, step: int) -> ConfigError:
    return ConfigError(
        f"the learning rate {found:g} has no effect: after step {step} the schedule of actor.optim has {scheduled:g} "
        "for this group",
        where=f'self.optimizer.param_groups[{number}]["lr"]',
        remedy="set actor.optim.lr, actor.optim.groups and actor.optim.lr_scheduler; a schedule of your own sets it in "
        "a hook that runs before each step: self.optimizer.register_step_pre_hook(function)",
    )
