"""The schedule of NeMo Automodel's rates."""

from __future__ import annotations

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.nemo_sections import NAME, count
from shardtune.config.foreign.values import as_number, number, whole


def schedule(c: Conversion, total: int | None) -> None:
    """The schedule, whose warm-up begins at a tenth of the rate and which falls to a hundredth by default."""
    if not c.has("lr_scheduler"):
        c.put("actor.optim.lr_scheduler", "constant", comment=f"{NAME}'s default: no lr_scheduler")
        return
    name = "lr_scheduler.lr_decay_style"
    style = str(c.get(name, "cosine"))
    if not c.get("lr_scheduler"):
        c.record("lr_scheduler", Kind.TRANSLATED, "actor.optim.lr_scheduler: cosine, its default")
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    if style in kinds:
        c.put("actor.optim.lr_scheduler", kinds[style], name, comment=rules.origin(c, name))
    else:
        c.missing("constant, linear, cosine and wsd are the schedules here; cosine is what the recipe has", name)
    line = c.lines.get("actor.optim.lr")
    rate = number(line.value if line is not None else c.get("optimizer.lr")) or 0.0
    peak = number(c.get("lr_scheduler.max_lr", rate)) or 0.0
    if c.has("lr_scheduler.max_lr"):
        c.put("actor.optim.lr", peak, "lr_scheduler.max_lr", comment="lr_scheduler.max_lr")
    if style != "constant":
        name = "lr_scheduler.min_lr"
        least = as_number(c.get(name, rate / 100))
        c.put(
            "actor.optim.min_lr", least, name, comment=name if c.has(name) else "its default: a hundredth of the rate"
        )
    else:
        c.not_needed("the rate is constant", "lr_scheduler.min_lr")
    _warm_up(c, total, rate)
    _decay_steps(c, style, total)
    steady = [f"lr_scheduler.{key}" for key in ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")]
    c.missing("the weight decay is constant: actor.optim.weight_decay", *steady[:3])
    if str(c.get(steady[3], "constant")) == "constant":
        c.not_needed("the weight decay is constant", steady[3])
    c.not_needed("a run continues with its own schedule", *(n for n in c.given if n.endswith("_opt_param_scheduler")))


def _warm_up(c: Conversion, total: int | None, rate: float) -> None:
    name, first = "lr_scheduler.lr_warmup_steps", number(c.get("lr_scheduler.init_lr", rate / 10)) or 0.0
    steps = count(c, name, 0)
    if steps is None and total is not None:
        steps = min(1000, total // 10)
    if steps is None:
        c.put(rules.RATIO, 0.1, comment="its default: a tenth of the steps, at most 1,000")
    else:
        origin = name if c.has(name) else "its default: a tenth of max_steps, at most 1,000"
        c.put(rules.WARMUP, steps, name, comment=origin)
    if steps == 0:
        c.not_needed("there is no warm-up", "lr_scheduler.init_lr")
    elif first == 0:
        c.put(rules.FROM_ZERO, True, "lr_scheduler.init_lr", comment=rules.FIRST_STEP)
    else:
        c.missing("the warm-up begins at 0 here", "lr_scheduler.init_lr")
        c.notes.append(f"the warm-up of {NAME} begins at a rate of {first:g}, here at that of its first step")


def _decay_steps(c: Conversion, style: str, total: int | None) -> None:
    name, fall = "lr_scheduler.lr_decay_steps", "lr_scheduler.wsd_decay_steps"
    if whole(c.get(name)) == total and total is not None:
        c.not_needed("it is the number of steps", name)
    else:
        c.missing("the rate falls until the last step: runner.max_steps", name)
    falls = whole(c.get(fall))
    if style != "WSD":
        c.not_needed("it is for WSD", fall, "lr_scheduler.lr_wsd_decay_style")
    elif falls is not None and total is not None and 0 < falls <= total:
        c.put("actor.optim.decay_ratio", falls / total, fall, comment=f"{fall}: {falls} of {total} steps")
    else:
        c.missing("actor.optim.decay_ratio: the share of all steps in which the rate falls", fall)
    if style == "WSD" and str(c.get("lr_scheduler.lr_wsd_decay_style")) != "linear":
        c.missing("wsd falls linearly", "lr_scheduler.lr_wsd_decay_style")
    elif style == "WSD":
        c.not_needed("wsd falls linearly", "lr_scheduler.lr_wsd_decay_style")
