"""What the claims start from that compare a run with a simpler way to the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from threading import Lock, RLock

from shardtune.config.schema.actor import TeacherConfig
from shardtune.errors import ConfigError, ParallelError
from shardtune.parallel.ranks import choose_device
from shardtune.verify.claims.dropout import PLUGIN, random_settings
from shardtune.verify.claims.exact import CLOSE, in_fp64
from shardtune.verify.claims.numbers import Gap, first_over, gaps, largest, run_gaps
from shardtune.verify.claims.plain_run import PlainRun, PlainSide
from shardtune.verify.claims.short_runs import ShortRun, ShortRuns
from shardtune.verify.result import Failed, Skipped

ONE_PROCESS: Mapping[str, object] = {
    "actor.training_backend": "fsdp",
    "actor.model.gradient_checkpointing": False,
    "actor.model.compile": False,
    "actor.fsdp_config.cpu_offload": False,
    "actor.parallel.data_replicate": 1,
    "actor.parallel.data_shard": -1,
    "actor.parallel.tensor": 1,
    "actor.parallel.sequence": 1,
    "actor.parallel.sequence_method": "auto",
    "actor.parallel.expert": 1,
}
"""The model as one process computes it without further ado."""
LAST_BIT = {"fp64": 2.0**-52, "fp32": 2.0**-24}
OVERRIDES = "actor.model.config_overrides"
_MAKING = Lock()
TIMES = 100.0
"""Where more than `CLOSE` differs, so many times what random errors in the last bit of the weights change is allowed:
some models round to fp32 inside of an fp64 run, and an optimizer may divide noise by noise."""


class Ground:
    """A recipe in the form in which its numbers are exact, and its plain run.

    Args:
        runs: of the recipe.

    Attributes:
        runs: of the recipe.
        changes: of the recipe, by dotted key, that make its numbers exact.
        notes: what is thereby not the recipe's own.
        side: the recipe in this process.
        ranks: the given numbers of ranks on which the recipe can be trained.

    Raises:
        ConfigError: there is none.
        Skipped: its loss cannot be computed in fp64.
    """

    def __init__(self, runs: ShortRuns) -> None:
        self.runs = runs
        self.changes, self.notes = in_fp64(runs.recipe)
        if runs.recipe.actor.optim.name == "Muon":
            self.changes |= {"actor.optim.name": "AdamW", "actor.optim.args": {}}
            self.notes.append("AdamW in place of Muon, whose iteration torch computes in bf16")
        if runs.recipe.actor.neftune_alpha is not None:
            self.changes["actor.neftune_alpha"] = None
            self.notes.append("no noise on embeddings")
        if runs.recipe.actor.loss == "distill":
            self.changes |= {"actor.loss": None, "actor.teacher": TeacherConfig().model_dump()}
            self.notes.append("cross-entropy in place of the distance to the teacher")
        self.side = self._side()
        self.side.refuse_without_fp64()
        further: dict[str, object] = {}
        if settings := random_settings(self.side.adapter):
            further[OVERRIDES] = {**self.side.recipe.actor.model.config_overrides, **settings}
        if self.side.drops():
            further["plugins"] = [*runs.recipe.plugins, PLUGIN]
        if further:
            self.notes.append("dropout off")
            self.changes |= further
            self.side = self._side()
        self.ranks = self._possible_ranks()
        self._plain: dict[tuple[str, float], PlainRun] = {}
        self._lock = RLock()

    def at(self, precision: str) -> dict[str, object]:
        """The changes for another precision."""
        return {**self.changes, "actor.model.precision": precision}

    def _side(self) -> PlainSide:
        run = self.runs.new("plain", {**self.changes, **ONE_PROCESS}, ranks=1)
        return PlainSide(run.recipe, self.runs.folder, self.runs.make_worker)

    def _possible_ranks(self) -> list[int]:
        """The given numbers of ranks on which the recipe can be trained.

        Raises:
            ConfigError: there is none, by the recipe.
            ParallelError: there is none, by the GPUs of this machine.
        """
        found: list[int] = []
        problem: ConfigError | ParallelError | None = None
        for ranks in self.runs.ranks:
            try:
                self.runs.new("tried", self.changes, ranks=ranks)
                self.side.check_ranks(ranks)
                choose_device(self.side.recipe.runner.device, ranks - 1)
                found.append(ranks)
            except (ConfigError, ParallelError) as error:
                problem = error
                way = "; runner.device=cpu compares them" if isinstance(error, ParallelError) else ""
                self.notes.append(f"not on {ranks} rank{'s' if ranks > 1 else ''}: {error.what}{way}")
        if problem is not None and not found:
            raise problem
        return found

    @property
    def left_out(self) -> str:
        """What is not the recipe's own, in brackets; empty where there is nothing."""
        return f" ({'; '.join(self.notes)})" if self.notes else ""

    def exact_run(self, ranks: int) -> ShortRun:
        """The recipe's own layout in fp64, not trained yet."""
        return self.runs.new(f"exact{ranks}", self.changes, ranks=ranks)

    def plain(self, precision: str = "fp64", noise: float = 0.0) -> PlainRun:
        """The plain run over the rows of the recipe; made once for the same arguments."""
        (run,) = self.runs.several([self.exact_run(self.ranks[0])])
        with self._lock:
            if (precision, noise) not in self._plain:
                name = f"plain-{len(self._plain)}"
                self._plain[precision, noise] = self.side.run(run.evidence, name=name, precision=precision, noise=noise)
            return self._plain[precision, noise]

    @cached_property
    def sensitivity(self) -> Mapping[tuple[int, str], float]:
        """By step and name, the difference of a number that the recipe's own rounding explains.

        A compiler fuses roundings to fp32 away, and the attention that transformers calls eager rounds to fp32. Weights
        are measured as in `run_gaps`. Empty where there is no plain run to measure it on.
        """
        try:
            plain = self.plain()
            rounded = plain.rounds or self.runs.recipe.actor.model.compile
            noisy = self.plain(noise=LAST_BIT["fp32" if rounded else "fp64"])
        except (Skipped, Failed):
            return {}
        least = self.runs.recipe.actor.optim.lr
        return {(gap.step, gap.name): TIMES * gap.size for gap in gaps(plain, noisy, least=least)}

    def parting(self, expected: ShortRun, found: ShortRun) -> tuple[Gap | None, float]:
        """The first difference of two runs that the recipe's own rounding does not explain, and the largest of all."""
        every = run_gaps(expected, found)
        if largest(every) <= CLOSE:
            return None, largest(every)
        return first_over(every, self.sensitivity, CLOSE), largest(every)


@lru_cache(maxsize=1)
def _ground(runs: ShortRuns) -> Ground:
    return Ground(runs)


def ground_of(runs: ShortRuns) -> Ground:
    """The ground of a recipe; claims share it, in whatever thread they are checked."""
    with _MAKING:
        return _ground(runs)


def comparable_ground_of(runs: ShortRuns) -> Ground:
    """The ground of a recipe whose steps may be cut in another way.

    Raises:
        Skipped: its numbers depend on the cut of a step, whatever computes them.
    """
    ground = ground_of(runs)
    with _MAKING:
        ground.side.refuse_what_is_random()
    return ground
