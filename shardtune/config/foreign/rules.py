"""What several keys mean together: batches, the schedule, intervals, loggers. The names are those of each trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.table import NoCounterpart
from shardtune.config.foreign.values import OPTIMIZERS, REPORTS, arguments, as_number, listed, number, optimizer, whole

WARMUP, RATIO, FROM_ZERO = (
    *("actor.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps_ratio"),
    "actor.optim.lr_warmup_from_zero",
)
FIRST_STEP = "as there: the first step of the warm-up has rate 0"

PACKED_ANYWAY = "rows are packed here anyway, which changes no number"
"""The answer to a key that leaves packing off."""


def batch(
    c: Conversion,
    per_device: str,
    accumulation: str,
    *,
    rows: int,
    packed: int | None,
    packing: Sequence[str] = (),
    whole_batch: str = "",
    shared: Sequence[str] = (),
) -> None:
    """The rows, or with packing the tokens, of a step over all processes, and of a forward pass.

    Args:
        c: the conversion.
        per_device: the key with the rows of a forward pass on each process.
        accumulation: the key with the forward passes of a step.
        rows: the default of `per_device`.
        packed: with packing, the tokens of a packed sequence, which then counts as one row.
        packing: the keys that switch packing on.
        whole_batch: a key with the rows of a step on each process, which replaces `accumulation`.
        shared: the keys with numbers of processes that have the same rows, as they divide a model or its sequences.
    """
    each = whole(c.get(per_device)) or rows
    times = whole(c.get(accumulation)) or 1
    if whole_batch and c.has(whole_batch) and not c.has(accumulation):
        times = max(1, (whole(c.get(whole_batch)) or each) // each)
    same = math.prod(max(1, whole(c.get(name)) or 1) for name in shared) * c.sharing
    size = max(1, (c.world_size or 1) // same)
    names = [per_device, accumulation, *([whole_batch] if whole_batch else [])]
    product = f"{each} × {times} × {size} {'process' if size == 1 else 'processes'}"
    if same > 1:
        product = f"{each} × {times} × {size} of {same} processes each, which have the same rows"
    if c.world_size is None:
        product += "; with more, times their number (--world-size)"
    if packed is None:
        c.put("actor.micro_batch_size", each, per_device, comment=origin(c, per_device), always=True)
        c.put("actor.global_batch_size", each * times * size, *names, comment=product, always=True)
        return
    packed_batch(c, each, each * times * size, packed, per_device, (*names, *packing), product)


def packed_batch(
    c: Conversion, each: int, step: int, packed: int, per_device: str, names: Sequence[str], product: str
) -> None:
    """The tokens of a step and of a forward pass, where a row there is a packed sequence.

    Args:
        c: the conversion.
        each, step: packed sequences of a forward pass on a process, and of a step.
        packed: the tokens of one.
        per_device: the key of `each`.
        names: the keys of `step`.
        product: how it is computed, for the line's comment.
    """
    unit = f"packed sequences of {packed} tokens: "
    c.put("actor.micro_batch_size", None, per_device, comment="rows are packed up to the number of tokens")
    c.put("actor.max_tokens_per_micro_batch", each * packed, per_device, comment=f"{each} × {packed} tokens")
    c.put("actor.global_batch_tokens", step * packed, *names, comment=unit + product)
    c.notes.append(
        f"a row of {c.trainer} is a packed sequence of {packed} tokens, so a step is given in tokens; the rows of a "
        "step, and the number of steps of an epoch, are about the same, not exactly"
    )


def origin(c: Conversion, name: str) -> str:
    """The comment of a line: the key, or that it is the other trainer's default."""
    return name if c.has(name) else f"{c.trainer}'s default ({name})"


def length_of_run(c: Conversion, epochs: str, steps: str, *, default: float) -> None:
    """The epochs or steps of the run; a number of steps replaces that of epochs, as in transformers."""
    limit = whole(c.get(steps))
    if limit is not None and limit > 0:
        c.put("runner.max_steps", limit, steps)
        c.put("runner.max_epochs", -1, comment=f"{steps} alone ends the run, as there")
        c.not_needed(f"{steps} replaces it", epochs)
        return
    if limit is not None:
        c.record(steps, Kind.DEFAULT, "runner.max_steps: -1")
    given = number(c.get(epochs, default)) or 0.0
    if given != int(given) or given < 1:
        up = max(1, math.ceil(given))
        c.put("runner.max_epochs", up, comment=f"{epochs}: {short(c.get(epochs))}, rounded up")
        c.missing("epochs are whole here: give runner.max_steps, the rows × epochs / rows of a step", epochs)
        return
    c.put("runner.max_epochs", int(given), epochs, comment="" if c.has(epochs) else f"{c.trainer}'s default ({epochs})")


def total_steps(c: Conversion, steps: str) -> int | None:
    """The number of steps, where the configuration has it."""
    limit = whole(c.get(steps))
    return limit if limit is not None and limit > 0 else None


def warmup(c: Conversion, steps: str, ratio: str, total: int | None, *, rounded: str = "up") -> None:
    """The warm-up as transformers reads it: `steps` below 1 is a share; a share is rounded up."""
    given, share = number(c.get(steps)) or 0.0, number(c.get(ratio)) or 0.0 if ratio else 0.0
    name = steps if given else ratio
    if given >= 1:
        _warm_up(c, int(given), name, name)
        if ratio:
            c.not_needed(f"{steps} replaces it", ratio)
        return
    share = given or share
    if not share:
        for unset in filter(None, (steps, ratio)):
            c.record(unset, Kind.DEFAULT, f"{WARMUP}: 0")
    elif total is None:
        c.put(RATIO, share, name, comment=f"{name}; of the number of steps, rounded to the nearest (there: {rounded})")
        c.put(FROM_ZERO, True, comment=FIRST_STEP)
    else:
        _warm_up(c, math.ceil(total * share), name, f"{name}: {share:g} of {total} steps, rounded up")
    if given and ratio:
        c.not_needed(f"{steps} replaces it", ratio)


def _warm_up(c: Conversion, steps: int, name: str, comment: str) -> None:
    c.put(WARMUP, steps, name, comment=comment)
    if steps:
        c.put(FROM_ZERO, True, comment=FIRST_STEP)


def schedule(c: Conversion, name: str, options: str, *, default: str, total: int | None, rate: float) -> bool:
    """The schedule by transformers' names, with its arguments.

    Args:
        c: the conversion.
        name: the key of the schedule.
        options: the key of its arguments.
        default: the schedule without the key.
        total: the number of steps, if it is known.
        rate: the peak rate.

    Returns:
        whether it has a warm-up.
    """
    kind = str(c.get(name, default)).lower()
    given = arguments(c.get(options))
    comment = name if c.has(name) else f"{c.trainer}'s default ({name})"

    def put(ours: str, floor: float = 0.0) -> None:
        c.put("actor.optim.lr_scheduler", ours, name, comment=f"{comment}: {kind}" if ours != kind else comment)
        if floor:
            c.put("actor.optim.min_lr", floor, options, comment=options if c.has(options) else f"{kind}'s default")
        else:
            c.record(options, Kind.TRANSLATED, f"actor.optim.lr_scheduler: {ours}")

    if kind in ("linear", "constant", "constant_with_warmup"):
        put("linear" if kind == "linear" else "constant")
    elif kind == "polynomial" and number(given.get("power", 1.0)) == 1.0:
        put("linear", number(given.get("lr_end", 1e-7)) or 0.0)
    elif kind == "cosine" or (kind == "cosine_with_restarts" and number(given.get("num_cycles", 1)) == 1):
        put("cosine")
    elif kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and "warmup_lr_rate" not in given:
        put("cosine", number(given.get("min_lr")) or rate * (number(given.get("min_lr_rate")) or 0.0))
    elif kind == "warmup_stable_decay" and total and given.get("decay_type") == "linear" and "num_decay_steps" in given:
        share = (number(given["num_decay_steps"]) or 0.0) / total
        c.put("actor.optim.decay_ratio", share, comment=f"num_decay_steps of {total} steps")
        put("wsd", rate * (number(given.get("min_lr_ratio")) or 0.0))
        if number(given.get("min_lr_ratio")):
            c.notes.append("a warm-up of transformers' warmup_stable_decay begins at min_lr_ratio, here at 0")
    else:
        near = "wsd" if kind == "warmup_stable_decay" else "linear" if kind == "polynomial" else "cosine"
        c.put("actor.optim.lr_scheduler", near, comment=f"{c.trainer} has {kind} here, which there is not", always=True)
        how = "; wsd falls linearly over actor.optim.decay_ratio of the steps" if near == "wsd" else ""
        remedy = f"constant, linear, cosine and wsd are the schedules here; {near} is written: compare{how}"
        c.missing(remedy, name, options)
        return True
    _unread(c, kind, options, given)
    return kind != "constant"


_READ = {
    "polynomial": ("power", "lr_end"),
    "cosine_with_restarts": ("num_cycles",),
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), ("min_lr", "min_lr_rate")),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}
"""The arguments of each schedule that are read."""
_PLAIN: Mapping[str, object] = {"num_cycles": 0.5, "warmup_type": "linear", "last_epoch": -1}
"""The values of the others that describe what happens here anyway."""


def _unread(c: Conversion, kind: str, options: str, given: Mapping[str, object]) -> None:
    """Name the arguments of a schedule that the line of the recipe does not have."""
    is_text = isinstance(c.get(options), str)
    if c.has(options) and not given and c.get(options) != {}:
        c.missing("it is no mapping of names to values, so nothing is read of it", options)
    for key, value in given.items():
        if key not in _READ.get(kind, ()) and value is not None and value != _PLAIN.get(key):
            remedy = "a cosine falls once, to min_lr" if key == "num_cycles" else f"{kind} has no {key} here"
            name = options if is_text else f"{options}.{key}"
            c.missing(f"{remedy}: leave {key} out, and compare the rates", name)


def choose_optimizer(c: Conversion, name: str, options: str) -> None:
    """The optimizer by its name there, and its further arguments."""
    if c.has(name):
        try:
            for key, value in optimizer(c.get(name)).items():
                c.put(key, value, name, comment=f"{name}: {c.get(name)}")
            if "paged" in str(c.get(name)).lower():
                c.notes.append(
                    f"{name}: {c.get(name)} pages its state to the host; here: actor.fsdp_config.cpu_offload"
                )
        except NoCounterpart as reason:
            c.missing(f"{reason}; AdamW is what the recipe has", name)
    for key, value in arguments(c.get(options)).items():
        _argument(c, options, key, value)


def frozen_base(c: Conversion, eight_bits: str = "") -> None:
    """The frozen weights of an adapter that is not in four bits: in bf16 where the computation is.

    Args:
        c: the conversion.
        eight_bits: the key that asks for eight bits, which there are not; "": none does.
    """
    key, half = "actor.model.lora.base_dtype", "actor.model.precision" not in c.lines
    if half:
        why = f"{eight_bits}; there are no eight bits here" if eight_bits else "the frozen weights, as there"
        c.put(key, "bf16", comment=why)
    if eight_bits and half:
        c.missing(f"{key}: bf16 is in the recipe, twice the memory; nf4, four bits, takes half", eight_bits)
    elif eight_bits:
        c.missing(f"{key}: bf16 and nf4 need actor.model.precision: bf16; the recipe has neither", eight_bits)


OF_FUSED = (
    *("master_weights", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"),
    *("bias_correction", "adam_w_mode"),
)
"""Arguments of fused Adam (Apex, Transformer Engine), for weights in half precision."""
ADAM = {"beta1": "actor.optim.adam_beta1", "beta2": "actor.optim.adam_beta2", "eps": "actor.optim.adam_eps"}


def _argument(c: Conversion, options: str, key: str, value: object) -> None:
    is_text = isinstance(c.get(options), str)
    name = options if is_text else f"{options}.{key}"
    if key == "betas":
        pair = listed(value.strip("[]() ")) if isinstance(value, str) else listed(value)
        for place, ours in enumerate(("actor.optim.adam_beta1", "actor.optim.adam_beta2")):
            c.put(ours, as_number([*pair, None, None][place]), name)
    elif key in ADAM:
        c.put(ADAM[key], value, name)
    elif key in ("fused", "foreach", "capturable", "differentiable"):
        c.not_needed("the same numbers, chosen by torch", name)
    elif key in OF_FUSED and value is not False:
        c.not_needed("weights and states are fp32, the decay is AdamW's", name)
    elif key in ("momentum", "nesterov", "alpha", "dampening", "centered", "amsgrad", "lr_decay"):
        args = {**_args(c), key: value}
        c.put("actor.optim.args", args, name, comment=options)
    else:
        c.missing("actor.optim.args holds arguments of the class of torch.optim", name)


def _args(c: Conversion) -> dict[str, object]:
    line = c.lines.get("actor.optim.args")
    return dict(line.value) if line is not None and isinstance(line.value, dict) else {}


def component_optimizer(c: Conversion, kind: str, *, decays_all: bool) -> None:
    """The section `optimizer`, which names a class and has its arguments.

    Args:
        c: the conversion.
        kind: the key of the class.
        decays_all: whether the weight decay is of norms and biases too.
    """
    options = c.get("optimizer")
    options = dict(options) if isinstance(options, Mapping) else {}
    name = str(options.pop(kind, "torch.optim.AdamW"))
    _of_class(c, kind, name, options)
    default = "the default of its class"
    rate = 0.01 if name.endswith(("Adagrad", "RMSprop")) else 5e-4 if name.startswith("dion.") else 1e-3
    comment = "optimizer.lr" if "lr" in options else default
    c.put("actor.optim.lr", as_number(options.get("lr", rate)), "optimizer.lr", comment=comment)
    decay = as_number(options.get("weight_decay", 0.01 if "AdamW" in name else 0.0))
    comment = "optimizer.weight_decay" if "weight_decay" in options else default
    c.put("actor.optim.weight_decay", decay, "optimizer.weight_decay", comment=comment)
    if decay and decays_all:
        groups = [{"pattern": ".", "weight_decay": decay}]
        c.put("actor.optim.groups", groups, comment=f"{c.trainer} decays norms and biases too; shardtune does not")


PACKAGES = (
    *("torch", "torchao", "torchtune", "bitsandbytes", "transformer_engine", "apex", "transformers", "dion"),
    *("nemo_automodel", ""),
)
"""Whose optimizers have counterparts by the names of their classes alone; those of others are named as they are."""


def _of_class(c: Conversion, kind: str, name: str, options: Mapping[str, object]) -> None:
    """The optimizer by its class, and the arguments of it that are not of every optimizer."""
    module, _, short_name = name.rpartition(".")
    known = short_name.lower() in OPTIMIZERS
    if (known and module.partition(".")[0] not in PACKAGES) or (not known and _is_plain(module)):
        ours = short_name if module.startswith("torch.optim") else f"{module}:{short_name}"
        c.put("actor.optim.name", ours, f"optimizer.{kind}", comment=f"optimizer.{kind}")
        further = {key: value for key, value in options.items() if key not in (*ALWAYS, *GROUPS)}
        c.put("actor.optim.args", further, *(f"optimizer.{key}" for key in further), comment="optimizer")
        return
    flat = Conversion(c.trainer, {"optim": name, "args": {**options}}, c.base, c.target)
    choose_optimizer(flat, "optim", "args")
    for key, line in flat.lines.items():
        c.put(key, line.value, comment=f"optimizer: {name}")
    found = flat.outcomes.get("optim")
    c.record(f"optimizer.{kind}", found.kind if found else Kind.DEFAULT, found.text if found else "AdamW")
    for key in options:
        inner = [one for one in flat.outcomes.values() if re.match(rf"args\.{re.escape(key)}(\.|\[|$)", one.name)]
        if inner and key not in ALWAYS:
            c.record(f"optimizer.{key}", inner[0].kind, inner[0].text)


ALWAYS, GROUPS = ("lr", "weight_decay"), ("param_group_overrides",)


def _is_plain(module: str) -> bool:
    """Whether classes of a module take the parameters of a model and their own arguments."""
    return module.startswith("torch.optim") or module.partition(".")[0] not in PACKAGES


def interval(
    c: Conversion, key: str, strategy: str, steps: str, *, default: str, every: int | None, total: int | None
) -> None:
    """An interval of saving or evaluating: `no`, `epoch`, or a number of steps (below 1: a share of all steps)."""
    kind = str(c.get(strategy, default)).lower()
    kind = {"false": "no", "true": "steps"}.get(kind, kind)
    count = number(c.get(steps, every))
    if kind in ("no", "epoch"):
        c.put(key, -1 if kind == "no" else "epoch", strategy)
        c.not_needed(f"{strategy} is {kind}", steps)
    elif kind != "steps" or count is None:
        c.missing(f'{key} is a number of steps, or "epoch"; runner.best.monitor keeps the best', strategy, steps)
    elif count >= 1 or (total and count > 0):
        value = int(count) if count >= 1 else max(1, math.ceil(count * (total or 0)))
        origin = steps if c.has(steps) else f"{c.trainer}'s default ({steps})"
        c.put(key, value, strategy, steps, comment=origin if count >= 1 else f"{steps}: {count:g} of {total} steps")
    else:
        c.put(key, "epoch", comment=f"{steps} is a share of all steps, see the end")
        c.missing(f"{key}: {count:g} × the number of steps, as a whole number", steps)
        c.record(strategy, Kind.TRANSLATED, key)


def run_directory(c: Conversion, folder: str, name: str) -> None:
    """The run directory: its parent folder and its name."""
    if c.has(folder):
        path = PurePosixPath(str(c.get(folder)))
        if path.name and path.name != "..":
            c.put("runner.logger.log_path", str(path.parent), folder)
            c.put("runner.logger.experiment_name", path.name, folder)
            if name:
                c.not_needed("the run is called like its directory", name)
            return
        c.put("runner.logger.log_path", str(path), folder)
    if name and c.has(name):
        c.put("runner.logger.experiment_name", str(c.get(name)).strip("/").replace("..", "-"), name)


def loggers(c: Conversion, name: str, given: Sequence[object]) -> None:
    """Where metrics go; jsonl is always among them."""
    wanted = [str(one).lower() for one in given]
    if "all" in wanted:
        c.missing(f"runner.logger.logger_backends names each: jsonl, {', '.join(REPORTS)}, prometheus", name)
        return
    known = [REPORTS[one] for one in wanted if one in REPORTS]
    unknown = [one for one in wanted if one not in REPORTS and one != "none"]
    if known:
        c.put("runner.logger.logger_backends", ["jsonl", *known], name)
    elif not unknown:
        c.put("runner.logger.logger_backends", ["jsonl"], name)
    if unknown:
        remedy = (
            f"there is no {', '.join(unknown)}: jsonl, {', '.join(REPORTS)}; or a class of yours, package.module:Class"
        )
        c.missing(remedy, name)


def hub(c: Conversion, name: str, *others: str) -> None:
    """The repository that the model is pushed to."""
    if "/" in str(c.get(name, "")):
        c.put("runner.push_to_hub", c.get(name), name, *others)
    else:
        c.missing("runner.push_to_hub: OWNER/NAME, with the owner", name, *others)
