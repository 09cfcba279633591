"""The claim that a recipe's layout changes no number: where it does, the part of it that makes the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardtune.config import LoraConfig, Recipe
from shardtune.config.tree import get_value
from shardtune.errors import ConfigError
from shardtune.verify.claims.evidence import require_frozen
from shardtune.verify.claims.ground import ONE_PROCESS, Ground, comparable_ground_of
from shardtune.verify.claims.numbers import Recorded, run_gaps
from shardtune.verify.claims.parity import in_steps, on_ranks
from shardtune.verify.claims.rounding import FIRST_LOSS, REGROUPING, RoundedRuns
from shardtune.verify.claims.short_runs import ShortRun, ShortRuns
from shardtune.verify.result import Failed

ROW_BY_ROW: Mapping[str, object] = {"actor.micro_batch_size": 1, "actor.max_tokens_per_micro_batch": None}
IN_MEMORY: Mapping[str, object] = {"actor.fsdp_config.cpu_offload": False}


@dataclass(frozen=True, slots=True)
class Switch:
    """A part of a layout that can be switched off.

    Attributes:
        name: of the part.
        off: the values that switch it off, by dotted key.
        remedy: where to look if it changes numbers.
        one_rank: whether it is switched off by training on one rank.
        changes_model: whether both sides need it switched off, as it changes what is computed.
    """

    name: str
    off: Mapping[str, object]
    remedy: str
    one_rank: bool = False
    changes_model: bool = False


def _parallel(name: str, key: str) -> Switch:
    return Switch(name, {key: 1}, f"set {key}: 1, and report the model: what its ranks share is put together wrongly")


SWITCHES = (
    Switch(
        "packing",
        ROW_BY_ROW,
        "rows of a micro-batch see each other, their positions go on from one to the next, or the loss is no sum over "
        "rows (a mean of each micro-batch); for an adapter: shardtune verify adapter FILE:CLASS --only sums",
    ),
    Switch(
        "checkpointing",
        {"actor.model.gradient_checkpointing": False},
        "a layer gives something else when it is computed again in the backward pass: it counts calls, fills a cache, "
        "keeps state, or draws outside of torch",
    ),
    Switch("compile", {"actor.model.compile": False}, "the compiler changes what the model computes: compile: false"),
    Switch(
        "offload",
        IN_MEMORY,
        "something reads or writes weights or gradients outside of the forward: it finds them elsewhere here",
    ),
    Switch(
        "sequence",
        {"actor.parallel.sequence": 1, "actor.parallel.sequence_method": "auto"},
        "set actor.parallel.sequence: 1, and report the model: what its ranks share is put together wrongly",
    ),
    _parallel("tensor", "actor.parallel.tensor"),
    _parallel("expert", "actor.parallel.expert"),
    Switch(
        "sharding",
        ONE_PROCESS,
        "something depends on the rank: a mean of each rank's rows, weights that are read outside of their unit's "
        "forward (unit_classes, actor.fsdp_config.wrap), a unit called without its __call__, a draw by rank",
        one_rank=True,
    ),
    Switch(
        "adapter",
        {"actor.model.is_lora": False, "actor.model.lora": LoraConfig().model_dump()},
        "the low-rank adapter computes something else in this layout: call adapted layers as modules, and keep no copy "
        "of their weights",
        changes_model=True,
    ),
)
"""In the order in which they are switched off."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of a layout that makes a difference.

    Attributes:
        switch: without it, and those switched off before it, there is no difference.
        off_before: those.
        alone: whether it makes a difference with all others off.
    """

    switch: Switch
    off_before: Sequence[Switch]
    alone: bool


def find_switch(switches: Sequence[Switch], differs: Callable[[Sequence[Switch]], bool]) -> Blame | None:
    """Switch parts off one after the other, until the difference is gone; None where it stays.

    Args:
        switches: of parts that are on.
        differs: whether there is a difference with these off.
    """
    for count in range(1, len(switches) + 1):
        if not differs(switches[:count]):
            found = switches[count - 1]
            others = [switch for switch in switches if switch is not found]
            # Where it is the only one that was off, or is on, the answer is known.
            alone = not others or differs(others)
            return Blame(found, switches[: count - 1], alone)
    return None


def active_switches(recipe: Recipe, ranks: int, *, deals_rows: bool) -> list[Switch]:
    """The parts that a recipe's layout has.

    Args:
        recipe: the user's.
        ranks: it is trained on.
        deals_rows: whether the package's loader makes the micro-batches; a user's own are left as they are.
    """
    values = recipe.to_dict()

    def is_on(switch: Switch) -> bool:
        if switch.one_rank:
            return ranks > 1
        if switch.off is ROW_BY_ROW and not deals_rows:
            return False
        if switch.off is IN_MEMORY and ranks == 1:
            return False  # one process is not sharded, and nothing of it is offloaded
        if switch.changes_model:
            return recipe.actor.model.is_lora
        return any(get_value(values, key) != value for key, value in switch.off.items())

    return [switch for switch in SWITCHES if is_on(switch)]


def check_layouts(runs: ShortRuns) -> str:
    """The recipe's layout gives the numbers of one process; otherwise the part of it that does not is named."""
    ground = comparable_ground_of(runs)
    own = runs.recipe.actor.model.precision
    simple = runs.new("simple", {**ground.changes, **_simplest(ground)}, ranks=1)
    exact = [ground.exact_run(ranks) for ranks in ground.ranks]
    simple, *made = runs.several([simple, *exact, *(_rounded(ground, own) if own != "fp64" else [])])
    for run in (simple, *made[: len(exact)]):
        require_frozen(run.evidence, f"the run on {on_ranks([run.recipe.runner.nproc_per_node])}")
    worst = max(_require_simple(ground, simple, run) for run in made[: len(exact)])
    layouts = [switch.name for switch in _active(ground, max(ground.ranks))]
    text = (
        f"{in_steps(simple)} on {on_ranks(ground.ranks)} "
        f"({', '.join(layouts) or 'nothing to switch off'}) as on one rank in the simplest form: losses, norms and "
        f"weights within {worst:.1g} in fp64{ground.left_out}"
    )
    if own == "fp64":
        return text
    alone, laid_out, *by_row = (Recorded(run).log for run in made[len(exact) :])
    same = ground.side.numbers_rows and not REGROUPING.intersection(layouts)
    return text + RoundedRuns(own, Recorded(simple).log, alone, laid_out, *by_row or [None], same_forwards=same).check()


def _rounded(ground: Ground, own: str) -> list[ShortRun]:
    """The runs in the recipe's own precision: of one process, as laid out, and on ranks row by row."""
    changes, ranks = ground.at(own), ground.ranks[-1]
    alone = ground.runs.new(f"{own}-simple", {**changes, **_simplest(ground)}, ranks=1)
    laid_out = ground.runs.new(own, changes, ranks=ranks)
    if ranks == 1 or own not in FIRST_LOSS:
        return [alone, laid_out]
    return [alone, laid_out, ground.runs.new(f"{own}-by-row", {**changes, **_by_row(ground)}, ranks=ranks)]


def _by_row(ground: Ground) -> Mapping[str, object]:
    return ROW_BY_ROW if ground.side.numbers_rows else {}


def _simplest(ground: Ground) -> Mapping[str, object]:
    return {**ONE_PROCESS, **_by_row(ground)}


def _active(ground: Ground, ranks: int) -> list[Switch]:
    return active_switches(ground.runs.recipe, ranks, deals_rows=ground.side.numbers_rows)


def _require_simple(ground: Ground, simple: ShortRun, run: ShortRun) -> float:
    """Refuse a layout that parts from the simplest one; returns the largest difference."""
    gap, worst = ground.parting(simple, run)
    if gap is None:
        return worst
    ranks = run.recipe.runner.nproc_per_node

    def differs(off: Sequence[Switch]) -> bool:
        both = {key: value for switch in off if switch.changes_model for key, value in switch.off.items()}
        changes = {**ground.changes, **{key: value for switch in off for key, value in switch.off.items()}}
        name = f"without-{'-'.join(switch.name for switch in off)}-{ranks}"
        try:
            without = ground.runs.new(name, changes, ranks=1 if any(switch.one_rank for switch in off) else ranks)
            reference = ground.runs.new(f"{name}-simple", {**simple_changes, **both}, ranks=1)
            found, expected = ground.runs.several([without, reference])
        except ConfigError:
            return True  # another part needs one of these, so the difference cannot be removed in this way
        return ground.parting(expected, found)[0] is not None

    simple_changes = {**ground.changes, **_simplest(ground)}
    blame = find_switch(_active(ground, ranks), differs)
    weight = next(found for found in run_gaps(simple, run) if found.step == gap.step and found.is_weight)
    raise Failed(
        f"on {on_ranks([ranks])} the recipe parts from one process in step {gap.step}: {gap}; of the weights after it "
        f"{weight.name} is furthest away ({weight.size:.2g} of its size); {_blamed(blame)}",
        where=f"step {gap.step}: {weight.name}" + (f", {blame.switch.name}" if blame else ""),
        remedy=blame.switch.remedy if blame else "the same layout gives other numbers each time: see verify resume",
    )


def _blamed(blame: Blame | None) -> str:
    if blame is None:
        return "it does so with every part of the layout switched off"
    before = [f"without {switch.name} it still does" for switch in blame.off_before]
    together = "" if blame.alone else " (together with another part: alone it does not)"
    return "; ".join(
        [*before, f"without {blame.switch.name} it does not: {blame.switch.name} makes the difference"]
    ) + (together)
