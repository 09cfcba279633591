"""The cheapest changes of a recipe with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shardtune.config.rank_layout import Layout
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.optim.low_bit import LOW_BIT
from shardtune.parallel.cost.memory import memory as by_formula
from shardtune.run.plan.plan import Plan, Planner, adapter_of, formula_work, load, setting_of, shape_of

WANTED = 3
TRIED = 24
"""Changes that are computed at most."""
HOPELESS = 1.3
"""A change whose memory is, by the formulas, this many times what there is, is not computed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One change of a recipe.

    Attributes:
        kind: of the change; of each kind a combination has one.
        overrides: to type.
        cost: the time of a step that it adds, as a share, an estimate; or what it changes besides, in the same units.
        effect: on time and numbers, in words.
    """

    kind: str
    overrides: tuple[str, ...]
    cost: float
    effect: str


@dataclass(frozen=True, slots=True)
class Change:
    """Options that fit together.

    Attributes:
        options: of the change.
        plan: with them.
    """

    options: Sequence[Option]
    plan: Plan

    @property
    def overrides(self) -> list[str]:
        return [word for option in self.options for word in option.overrides]

    def to_dict(self) -> dict[str, Any]:
        effects = [option.effect for option in self.options]
        return {"overrides": self.overrides, "effects": effects, "plan": self.plan.to_dict()}


def solve(
    planner: Planner, plan: Plan, computing: Callable[[Sequence[str]], AbstractContextManager[None]] | None = None
) -> Iterator[Change]:
    """The cheapest changes that fit, at most three, as they are found; none where the recipe fits.

    Args:
        planner: of the recipe.
        plan: of it, unchanged.
        computing: a context to compute the plan of some overrides in, which takes a few seconds for a large model.

    Raises:
        ConfigError: it is not known what would fit.
    """
    if plan.fits:
        return iter(())
    if plan.needed is None or plan.available is None:
        unknown = "the memory of this model" if plan.needed is None else "the memory that a rank has"
        raise ConfigError(
            f"{unknown} is unknown, so nothing can be found that fits",
            where="--solve",
            remedy="leave it out" if plan.needed is None else "give --gpu-memory 80G",
        )
    return _found(planner, plan, computing or (lambda words: nullcontext()))


def _found(
    planner: Planner, plan: Plan, computing: Callable[[Sequence[str]], AbstractContextManager[None]]
) -> Iterator[Change]:
    options = list(_options(planner, plan))
    combined = (chosen for number in range(1, 5) for chosen in combinations(options, number))
    found: list[Change] = []
    tried = 0
    for chosen in sorted(filter(_consistent, combined), key=lambda chosen: sum(option.cost for option in chosen)):
        if len(found) == WANTED or tried == TRIED:
            break
        if any(set(change.options) <= set(chosen) for change in found):
            continue  # more than what is enough
        words = [word for option in chosen for word in option.overrides]
        if _is_hopeless(planner, plan, words):
            continue
        tried += 1
        try:
            with computing(words):
                changed = planner.plan(words)
        except ShardtuneError:  # this model or number of ranks cannot be changed in this way
            continue
        if changed.fits:
            found.append(Change(chosen, changed))
            yield found[-1]


def _consistent(chosen: Sequence[Option]) -> bool:
    return len({option.kind for option in chosen}) == len(chosen)


def _is_hopeless(planner: Planner, plan: Plan, words: Sequence[str]) -> bool:
    """Whether the formulas, scaled to what was computed for the recipe itself, exceed the memory by far."""
    try:
        before = _formula(planner, ())
        after = _formula(planner, words)
    except ShardtuneError:
        return True
    if before is None or after is None or plan.needed is None or plan.available is None:
        return False
    return plan.needed * after / before > HOPELESS * plan.available


def _formula(planner: Planner, words: Sequence[str]) -> float | None:
    """Bytes of a rank by the formulas; None where they do not hold."""
    recipe = load(planner.source, [*planner.overrides, *words]) if words else planner.recipe
    adapter = adapter_of(recipe)
    shape = shape_of(adapter)
    if shape is None or recipe.actor.model.is_lora:
        return None
    layout = Layout.of(recipe.actor, planner.hardware.num_ranks)
    work = planner.rows(recipe, adapter, layout)
    return by_formula(shape, setting_of(recipe, layout), formula_work(work)).device


def _options(planner: Planner, plan: Plan) -> Iterator[Option]:
    """Single changes of a recipe."""
    actor, ranks, work = planner.recipe.actor, planner.hardware.num_ranks, plan.work
    yield from _micro_batches(plan, planner.recipe.data.max_length)
    if not actor.model.gradient_checkpointing:
        yield Option(
            "checkpointing",
            ("model.gradient_checkpointing=selective",),
            0.05,
            "recomputes all but matrix products: a few % of the time",
        )
    if actor.model.gradient_checkpointing is not True:
        yield Option(
            "checkpointing", ("model.gradient_checkpointing=true",), 0.33, "recomputes each layer: a third of the time"
        )
    if ranks > 1 and work.micro_batches > 1 and actor.fsdp_config.reduce == "last":
        yield Option("reduce", ("fsdp_config.reduce=every",), 0.1, "reduces gradients after every micro-batch")
    if actor.optim.name in LOW_BIT and actor.optim.state_dtype == "fp32":
        yield Option("states", ("optim.state_dtype=bf16",), 0.15, "optimizer states are rounded to bf16")
        yield Option("states", ("optim.state_dtype=int8",), 0.2, "optimizer states are rounded to 8 bits")
    takes_bf16 = actor.training_backend != "fsdp1" and not actor.model.is_lora
    if takes_bf16 and actor.optim.name in LOW_BIT and actor.model.precision == "bf16":
        yield Option("weights", ("model.precision=pure_bf16",), 0.25, "trained weights are rounded to bf16")
    yield from _layouts(planner)
    if ranks > 1 and planner.hardware.on_cuda and not actor.fsdp_config.cpu_offload:
        yield Option(
            "offload", ("fsdp_config.cpu_offload=true",), 1.0, "updates in host memory: about twice the time, or more"
        )
    if not actor.model.is_lora:
        yield Option("lora", ("model.is_lora=true",), 3.0, "trains a low-rank adapter, not the whole model")


def _micro_batches(plan: Plan, max_length: int) -> Iterator[Option]:
    """Half of the tokens, a quarter, and so on, down to the longest row; no row may be longer than a micro-batch."""
    tokens, cost = plan.work.micro_batch_tokens, 0.0
    while tokens is not None and tokens > plan.work.longest:
        tokens, cost = max(plan.work.longest, tokens // 2), cost + 0.04
        shorter = (f"data.max_length={tokens}",) if tokens < max_length else ()
        yield Option(
            "micro-batch",
            (f"max_tokens_per_micro_batch={tokens}", *shorter),
            cost,
            f"micro-batches of at most {tokens:,} tokens: the same numbers, more of them",
        )


def _layouts(planner: Planner) -> Iterator[Option]:
    actor, ranks = planner.recipe.actor, planner.hardware.num_ranks
    if ranks == 1:
        return
    if actor.training_backend == "ddp" or actor.parallel.data_replicate > 1:
        yield Option(
            "layout",
            ("training_backend=fsdp", "parallel.data_replicate=1", "parallel.data_shard=-1"),
            0.1,
            "shards weights over all ranks in place of copies",
        )
    for size, cost in zip(_multiples(actor.parallel.sequence, ranks), _COSTS, strict=False):
        how = ", by ring attention" if _rings(planner, size) else ""
        yield _sharing("sequence", size, 0.2 + cost, f"{size} ranks share the tokens of the same rows{how}")
    doubled = [size for size in _multiples(actor.parallel.tensor, ranks) if (size & (size - 1)) == 0]
    for size, cost in zip(doubled, _COSTS, strict=False):
        yield _sharing("tensor", size, 0.4 + cost, f"{size} ranks share the matrices of the same rows")


_COSTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def _multiples(size: int, ranks: int) -> list[int]:
    """Larger sizes of an axis, up to 8, that divide the ranks: those of 6 ranks are 2, 3 and 6."""
    return [larger for larger in range(size + 1, min(ranks, 8) + 1) if larger % size == 0 and ranks % larger == 0]


def _sharing(key: str, size: int, cost: float, effect: str) -> Option:
    words = (f"parallel.{key}={size}", "parallel.data_replicate=1", "parallel.data_shard=-1")
    return Option("layout", words, cost, effect)


def _rings(planner: Planner, sequence: int) -> bool:
    """Whether so many ranks would share sequences by a ring: they do not divide the heads, or a ring is set."""
    parallel, shape = planner.recipe.actor.parallel, shape_of(adapter_of(planner.recipe))
    if shape is None:
        return False
    layout = Layout(sequence=sequence, tensor=parallel.tensor, sequence_method=parallel.sequence_method)
    return layout.rings(shape.heads, shape.kv_heads)
