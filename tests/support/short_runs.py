"""Shortened runs of one rank in the process of a test, as `shardtune verify` makes them by processes."""

from __future__ import annotations

from pathlib import Path

import shardtune.run.api as api
from shardtune.config import load_recipe
from shardtune.run.choose_worker import make_worker
from shardtune.training.recorder import Recording
from shardtune.verify.claims.short_runs import ShortRun, ShortRuns


class RunsHere(ShortRuns):
    """Trains each run in this process; see `ShortRuns`."""

    def _made_once(self, run: ShortRun) -> ShortRun:
        key = self._key(run)
        if key not in self._made:
            api.train(run.recipe.to_dict(), recording=Recording(run.recorded))
            self._made[key] = run
        return self._made[key]

    def several(self, runs):
        return [self._made_once(run) for run in runs]


def runs_of(values: dict, folder: Path, *, steps: int = 2) -> RunsHere:
    """The shortened runs of a recipe; rows are cut where no worker of its own reads them."""
    folder.mkdir(exist_ok=True)
    return RunsHere(
        load_recipe(values),
        folder,
        steps=steps,
        ranks=(1,),
        fewer_rows=values["actor"].get("worker") is None,
        make_worker=make_worker,
        report=lambda line: None,
    )
