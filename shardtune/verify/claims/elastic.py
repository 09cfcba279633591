"""The claim that a run's numbers do not depend on the number of ranks, also where it changes at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from shardtune.verify.claims.evidence import LOSS, NORM, first_difference, largest_gap, require_frozen
from shardtune.verify.claims.exact import CLOSE
from shardtune.verify.claims.ground import Ground, ground_of
from shardtune.verify.claims.parity import in_steps, sensitive
from shardtune.verify.claims.resume import require_stopped
from shardtune.verify.claims.short_runs import ShortRun, ShortRuns
from shardtune.verify.result import Failed, Skipped

RANKS = "runner.nproc_per_node"
DRAWS = (
    "what depends on the rank or on the micro-batch differs: draws of torch (dropout, noise; take them by row_draws or "
    "batch.randn_like), means over a micro-batch, batch norms, rows that a rank chooses for itself"
)


def check_elastic(runs: ShortRuns) -> str:
    """The same rows and, in fp64, the same losses, norms and weights on every number of ranks."""
    if len(runs.ranks) < 2:
        raise Skipped(f"--ranks {','.join(map(str, runs.ranks))}: give two numbers or more, as --ranks 1,2")
    ground = ground_of(runs)
    if len(ground.ranks) < 2:
        raise Skipped("; ".join(ground.notes))
    fixed = [ground.exact_run(count) for count in ground.ranks]
    fewest, most = ground.ranks[0], ground.ranks[-1]
    ways = ((fewest, most), (most, fewest)) if runs.steps > 1 else ()
    with ThreadPoolExecutor() as threads:
        change_of = {way: threads.submit(_changed, runs, ground.changes, *way) for way in ways}
        one, *others = runs.several(fixed)
        changed = {way: run.result() for way, run in change_of.items()}
    named = [(other, f"{other.recipe.runner.nproc_per_node} ranks") for other in others]
    named += [(other, f"{first} and then {then} ranks") for (first, then), other in changed.items()]
    worst = max(_require_same(one, other, ground, what) for other, what in named)
    gap = max(largest_gap(one.evidence, other.evidence) for other, _ in named)
    numbers = ", ".join(map(str, ground.ranks))
    return (
        f"on {numbers} ranks, and from {fewest} to {most} and back at a resume, in fp64{ground.left_out}: the same "
        f"rows in {in_steps(one)}, losses and norms within {gap:.1g}, weights within {worst:.1g} after "
        f"each step{sensitive(worst)}"
    )


def _changed(runs: ShortRuns, changes: Mapping[str, object], first: int, then: int) -> ShortRun:
    """A run that is stopped in the middle and continued on another number of ranks."""
    run = runs.new(f"ranks-{first}-then-{then}", changes, ranks=first)
    middle = max(1, runs.steps // 2)
    require_stopped(runs.start(run, stop_after=middle), middle)
    runs.start(run, changes={RANKS: then}).wait()
    return run


def _require_same(one: ShortRun, other: ShortRun, ground: Ground, what: str) -> float:
    """Refuse runs that part; returns the largest difference."""
    base = f"{one.recipe.runner.nproc_per_node} rank{'s' if one.recipe.runner.nproc_per_node > 1 else ''}"
    for run, name in ((one, base), (other, what)):
        require_frozen(run.evidence, f"the run on {name}")
    found = first_difference(one.evidence, other.evidence, close=CLOSE)
    if found is not None:
        rows = found.what not in (LOSS, NORM) and not found.what.startswith("train/")
        raise Failed(
            f"{base} and {what} part in step {found.step}: {found.text}",
            where=f"step {found.step}",
            remedy="let the order of the rows depend on seed, epoch and position alone, not on rank or world size"
            if rows
            else DRAWS,
        )
    gap, worst = ground.parting(one, other)
    if gap is not None:
        raise Failed(
            f"{base} and {what} part after step {gap.step}: {gap}", where=f"step {gap.step}: {gap.name}", remedy=DRAWS
        )
    return worst
