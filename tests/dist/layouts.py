"""The layouts of ranks that are compared with one process, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dist.parity import Distance, distance
from tests.dist.ranks import run_ranks
from tests.dist.training import Trace, recipe, run_flat, run_recipes, save_model, save_rows

STEPS = 10
PARALLEL = "actor__parallel__"


@dataclass(frozen=True)
class LaidOut:
    """A layout and what it is called.

    Attributes:
        name: in the table.
        ranks: processes.
        keys: of the recipe, dotted with `__`.
    """

    name: str
    ranks: int
    keys: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}"


def parallel(**sizes: int) -> dict[str, Any]:
    return {f"{PARALLEL}{axis}": size for axis, size in sizes.items()}


LAYOUTS = (
    LaidOut("one process", 1),
    LaidOut("FSDP2", 2),
    LaidOut("FSDP2", 4),
    LaidOut("DDP", 2, {"actor__training_backend": "ddp"}),
    LaidOut("DDP", 4, {"actor__training_backend": "ddp"}),
    LaidOut("HSDP 2 x 2", 4, parallel(data_replicate=2)),
    LaidOut("TP 2", 2, parallel(tensor=2)),
    LaidOut("TP 4", 4, parallel(tensor=4)),
    LaidOut("FSDP 2 x TP 2", 4, parallel(tensor=2)),
    LaidOut("DDP 2 x TP 2", 4, parallel(tensor=2, data_replicate=2)),
    LaidOut("SP 2", 2, parallel(sequence=2)),
    LaidOut("SP 4", 4, parallel(sequence=4)),
    LaidOut("FSDP 2 x SP 2", 4, parallel(sequence=2)),
    LaidOut("SP 2 x TP 2", 4, parallel(sequence=2, tensor=2)),
    LaidOut("HSDP 2 x SP 2", 4, parallel(data_replicate=2, sequence=2)),
    LaidOut("offload", 2, {"actor__fsdp_config__cpu_offload": True}),
    LaidOut("activation checkpointing", 2, {"actor__model__gradient_checkpointing": True}),
)
EXPERTS = (
    LaidOut("EP 2", 2, parallel(expert=2)),
    LaidOut("EP 4", 4, parallel(expert=4)),
    LaidOut("FSDP 2 x EP 2", 4, parallel(expert=2)),
    LaidOut("EP 2 x SP 2", 4, parallel(expert=2, sequence=2)),
)


class LayoutRuns:
    """Trains the same rows in each layout, and by the flat script in one process of plain PyTorch."""

    def __init__(self, folder: Path, precision: str = "fp64", optimizer: str = "AdamW") -> None:
        self._folder = folder
        self._rows = save_rows(folder / "rows.jsonl")
        self._precision = precision
        self._optimizer = optimizer

    def model(self, kind: str) -> Path:
        folder = self._folder / kind
        return folder if folder.is_dir() else save_model(kind, folder)

    def recipe(self, kind: str, layout: LaidOut) -> dict[str, Any]:
        keys = {
            "runner__max_steps": STEPS,
            "actor__micro_batch_size": 2,
            "actor__model__precision": self._precision,
            "actor__optim__name": self._optimizer,
        }
        return recipe(self.model(kind), self._rows, **{**keys, **layout.keys})

    def flat(self, kind: str) -> Trace:
        """The same in one process of plain PyTorch."""
        return run_flat(self.model(kind), self._rows, precision=self._precision, optimizer=self._optimizer, steps=STEPS)

    def run(self, kind: str, layouts: Sequence[LaidOut]) -> list[Trace]:
        """The trace of each, those of one number of ranks in one start of ranks."""
        found: dict[int, Trace] = {}
        for ranks in sorted({layout.ranks for layout in layouts}):
            places = [place for place, layout in enumerate(layouts) if layout.ranks == ranks]
            recipes = [self.recipe(kind, layouts[place]) for place in places]
            traces = run_recipes(recipes) if ranks == 1 else run_ranks(run_recipes, ranks, recipes, timeout=600)[0]
            found.update(zip(places, traces, strict=True))
        return [found[place] for place in range(len(layouts))]

    def distances(self, kind: str, layouts: Sequence[LaidOut]) -> list[Distance]:
        flat = self.flat(kind)
        return [distance(trace, flat) for trace in self.run(kind, layouts)]
