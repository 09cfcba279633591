"""The claim that training equals a plain PyTorch loop over the same rows, one row per forward."""

from __future__ import annotations

from shardtune.verify.claims.evidence import LOSS, NORM, require_frozen
from shardtune.verify.claims.exact import CLOSE
from shardtune.verify.claims.ground import Ground, comparable_ground_of
from shardtune.verify.claims.numbers import Numbers, Recorded, first_over, gaps, largest
from shardtune.verify.claims.short_runs import ShortRun, ShortRuns
from shardtune.verify.result import Failed

REMEDIES = {
    LOSS: "the loss of a micro-batch is no sum over its rows, or rows see each other, or targets or positions differ: "
    "shardtune verify layouts names the part of the layout; for an adapter see shardtune verify adapter",
    NORM: "losses agree and gradients do not: something is computed without a graph, or a gradient is lost or counted "
    "twice; shardtune verify layouts names the part of the layout",
}
UPDATE = (
    "gradients agree and weights do not: the optimizer, its groups, the schedule, clipping, or code that writes to "
    "weights"
)


def check_parity(runs: ShortRuns) -> str:
    """Losses, norms and weights are those of plain PyTorch; and how far apart bf16's own numbers are."""
    ground = comparable_ground_of(runs)
    side = ground.side
    half = [runs.new("half", ground.at("bf16"), ranks=ground.ranks[-1])] if side.by_transformers else []
    made = runs.several([*(ground.exact_run(ranks) for ranks in ground.ranks), *half])
    how = side.how
    worst = max(_require_plain(ground, run) for run in made[: len(ground.ranks)])
    spread = _spread(Recorded(made[-1]), ground) if half else ""
    return (
        f"{in_steps(made[0])} in fp64{ground.left_out} on {on_ranks(ground.ranks)} as in plain PyTorch ({how}): "
        f"losses, norms and weights within {worst:.1g}{sensitive(worst)}{spread}"
    )


def _require_plain(ground: Ground, run: ShortRun) -> float:
    """Refuse a run that parts from the plain one; returns the largest difference."""
    require_frozen(run.evidence, f"the run on {on_ranks([run.recipe.runner.nproc_per_node])}")
    found = list(gaps(ground.plain(), Recorded(run), least=run.recipe.actor.optim.lr))
    if largest(found) <= CLOSE:
        return largest(found)
    gap = first_over(found, ground.sensitivity, CLOSE)
    if gap is not None:
        raise Failed(
            f"in step {gap.step} on {on_ranks([run.recipe.runner.nproc_per_node])} the run parts from plain PyTorch "
            f"({ground.side.how}): {gap}",
            where=f"step {gap.step}: {gap.name}",
            remedy=UPDATE if gap.is_weight else REMEDIES[gap.name],
        )
    return largest(found)


def _spread(packed: Numbers, ground: Ground) -> str:
    """How far two ways to the same numbers are apart in bf16: a run's, and row by row in plain PyTorch."""
    alone = ground.plain("bf16")
    measured = [gap for gap in gaps(alone, packed) if not gap.is_weight]
    losses, norms = (max(gap.size for gap in measured if gap.name == name) for name in (LOSS, NORM))
    return (
        f"; bf16's own spread, the recipe's micro-batches beside row by row: {losses:.1g} in losses, {norms:.1g} in "
        "norms; smaller differences between two runs in bf16 mean nothing"
    )


def sensitive(worst: float) -> str:
    """How a difference above `CLOSE` is explained, for the end of a sentence."""
    return "" if worst <= CLOSE else ", no more than this model makes of an error in the last bit of a weight"


def in_steps(run: ShortRun) -> str:
    """The number of its steps, for a sentence: "1 step", "2 steps"."""
    number = len(run.evidence.steps)
    return f"{number} step{'s' if number != 1 else ''}"


def on_ranks(numbers: list[int]) -> str:
    """Numbers of ranks for a sentence: "1 rank", "1 and 2 ranks"."""
    return f"{' and '.join(str(number) for number in numbers)} rank{'s' if numbers != [1] else ''}"
