"""The layouts of ranks that are compared with one process, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.dist.parity import Distance, distance
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import (
    LOGIT_ROWS,
    ROWS,
    Trace,
    flat_script,
    own_patterns,
    recipe,
    run_flat,
    run_recipes,
    save_adapter,
    save_model,
    save_rows,
    with_adapter,
)

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

    @property
    def adapted(self) -> bool:
        """Whether a LoRA is trained instead of the model."""
        return "actor__model__is_lora" in self.keys


def parallel(**sizes: int) -> dict[str, Any]:
    return {f"{PARALLEL}{axis}": size for axis, size in sizes.items()}


LAYOUTS = (
    LaidOut("one process", 1),
    LaidOut("FSDP2", 2),
    LaidOut("FSDP2", 4),
    LaidOut("FSDP1", 2, {"actor__training_backend": "fsdp1"}),
    LaidOut("FSDP1", 4, {"actor__training_backend": "fsdp1"}),
    LaidOut("FSDP1 2 x 2", 4, {"actor__training_backend": "fsdp1", **parallel(data_replicate=2)}),
    LaidOut("FSDP1 x SP 2", 4, {"actor__training_backend": "fsdp1", **parallel(sequence=2)}),
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
    LaidOut("selective checkpointing", 2, {"actor__model__gradient_checkpointing": "selective"}),
)
COMPILED = LaidOut("compile", 2, {"actor__model__compile": True})
EXPERTS = (
    LaidOut("EP 2", 2, parallel(expert=2)),
    LaidOut("EP 4", 4, parallel(expert=4)),
    LaidOut("FSDP 2 x EP 2", 4, parallel(expert=2)),
    LaidOut("TP 2", 2, parallel(tensor=2)),
    LaidOut("TP 2 x EP 4", 4, parallel(tensor=2, expert=4)),
    LaidOut("TP 2 x EP 2", 4, parallel(tensor=2, expert=2)),
    LaidOut("HSDP 2 x EP 2", 4, parallel(data_replicate=2, expert=2)),
    LaidOut("SP 2", 2, parallel(sequence=2)),
    LaidOut("EP 2 x SP 2", 4, parallel(expert=2, sequence=2)),
)
RING = {f"{PARALLEL}sequence_method": "ring"}
LORA: dict[str, Any] = {"actor__model__is_lora": True}
ADAPTED = (
    LaidOut("LoRA", 1, LORA),
    LaidOut("LoRA, TP 2", 2, LORA | parallel(tensor=2)),
    LaidOut("LoRA, TP 4", 4, LORA | parallel(tensor=4)),
    LaidOut("LoRA, FSDP 2 x TP 2", 4, LORA | parallel(tensor=2)),
    LaidOut("LoRA, SP 2 x TP 2", 4, LORA | parallel(sequence=2, tensor=2)),
    LaidOut("LoRA, TP 2, checkpointing", 2, LORA | parallel(tensor=2) | {"actor__model__gradient_checkpointing": True}),
)
ADAPTED_EXPERTS = (
    LaidOut("LoRA", 1, LORA),
    LaidOut("LoRA, EP 2", 2, LORA | parallel(expert=2)),
    LaidOut("LoRA, TP 2", 2, LORA | parallel(tensor=2)),
    LaidOut("LoRA, FSDP 2 x EP 2", 4, LORA | parallel(expert=2)),
    LaidOut("LoRA, TP 2 x EP 4", 4, LORA | parallel(tensor=2, expert=4)),
    LaidOut("LoRA, TP 2 x EP 2", 4, LORA | parallel(tensor=2, expert=2)),
    LaidOut("LoRA, HSDP 2 x EP 2", 4, LORA | parallel(data_replicate=2, expert=2)),
    LaidOut("LoRA, EP 2 x SP 2", 4, LORA | parallel(expert=2, sequence=2)),
    LaidOut("LoRA, EP 2, checkpointing", 2, LORA | parallel(expert=2) | {"actor__model__gradient_checkpointing": True}),
)
RINGS = (
    LaidOut("ring 2", 2, parallel(sequence=2) | RING),
    LaidOut("ring 2, checkpointing", 2, parallel(sequence=2) | RING | {"actor__model__gradient_checkpointing": True}),
    LaidOut(
        "ring 2, selective checkpointing",
        2,
        parallel(sequence=2) | RING | {"actor__model__gradient_checkpointing": "selective"},
    ),
    LaidOut("LoRA, ring 2", 2, LORA | parallel(sequence=2) | RING),
    LaidOut("ring 4", 4, parallel(sequence=4) | RING),
    LaidOut("FSDP 2 x ring 2", 4, parallel(sequence=2) | RING),
    LaidOut("HSDP 2 x ring 2", 4, parallel(data_replicate=2, sequence=2) | RING),
)
"""For models of any number of heads."""


@dataclass(frozen=True)
class Apart:
    """How far a layout is from one process.

    Attributes:
        training: of losses, norms, clipped gradients and weights.
        logits: relative to the largest.
        evaluation: of the evaluation's loss.
        same_counts: whether as many of as many predictions are right.
        exported: of the weights of an adapter's directories, as PEFT loads and merges it, and merged on the ranks.
    """

    training: Distance
    logits: float
    evaluation: float
    same_counts: bool
    exported: float = 0.0

    @property
    def largest(self) -> float:
        numbers = (self.training.loss, self.training.norm, self.training.gradient, self.training.weight)
        return max(*numbers, self.logits, self.evaluation, self.exported)


def apart(run: Trace, flat: Trace) -> Apart:
    """How far a run is from the flat script's."""
    assert run.logits is not None
    assert flat.logits is not None
    logits = (run.logits.double() - flat.logits.double()).abs().max() / flat.logits.abs().max()
    # With a router's balance loss the cross-entropy stands by itself.
    cross_entropy = run.evaluation.get("eval/loss/ce", run.evaluation["eval/loss"])
    loss = abs(cross_entropy - flat.evaluation["eval/loss"])
    accuracy = [trace.evaluation["eval/token_accuracy"] for trace in (run, flat)]
    return Apart(distance(run, flat), float(logits), loss, abs(accuracy[0] - accuracy[1]) < 1e-12)


def exported_apart(run: Trace, model: Path, folder: Path) -> float:
    """How far the directories of an adapter are from what was trained, and from each other."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with own_patterns():
        tuned: Any = peft.PeftModel.from_pretrained(base, str(folder / "adapter"), autocast_adapter_dtype=False)
    loaded = dict(tuned.get_base_model().named_parameters())
    trained = max(float((loaded[name] - weight).detach().abs().max()) for name, weight in run.weights.items())
    joined = tuned.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
    assert joined.keys() == merged.keys()
    return max(trained, *(float((merged[name] - weight).abs().max()) for name, weight in joined.items()))


def evaluate_flat(trace: Trace, model: Path, rows: Path, dtype: torch.dtype, adapter: Path | None) -> None:
    """What evaluation should find, each row by itself with the model's own forward."""
    flat = flat_script()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, experts_implementation="eager")
    made = with_adapter(base, adapter).eval()
    made.load_state_dict({name: weight.to(dtype) for name, weight in trace.weights.items()}, strict=False)
    total = right = targets = 0.0
    logits = []
    with torch.no_grad():
        for ids, weights in flat.read_rows(rows, AutoTokenizer.from_pretrained(model)):
            found = made(input_ids=torch.tensor([ids])).logits[0]
            places = [place - 1 for place, weight in enumerate(weights) if weight]
            wanted = torch.tensor([ids[place + 1] for place in places])
            logits.append(found[places])
            total += float(torch.nn.functional.cross_entropy(found[places], wanted, reduction="sum"))
            right += float((found[places].argmax(-1) == wanted).sum())
            targets += len(places)
    trace.evaluation = {"eval/loss": total / targets, "eval/token_accuracy": right / targets}
    trace.logits = torch.cat(logits[:LOGIT_ROWS])


class LayoutRuns:
    """Trains the same rows in each layout, and by the flat script in one process of plain PyTorch."""

    def __init__(
        self, folder: Path, precision: str = "fp64", optimizer: str = "AdamW", steps: int = STEPS, rows: int = ROWS
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._rows = save_rows(folder / "rows.jsonl", rows)
        self._evaluated = save_rows(folder / "evaluated.jsonl", 13, seed=7)
        self._precision = precision
        self._optimizer = optimizer

    def model(self, kind: str) -> Path:
        folder = self._folder / kind
        return folder if folder.is_dir() else save_model(kind, folder)

    def adapter(self, kind: str) -> Path:
        folder = self._folder / f"{kind}-adapter"
        return folder if folder.is_dir() else save_adapter(self.model(kind), folder)

    def recipe(self, kind: str, layout: LaidOut) -> dict[str, Any]:
        keys = {
            "runner__max_steps": self._steps,
            "actor__micro_batch_size": 2,
            "actor__model__precision": self._precision,
            "actor__optim__name": self._optimizer,
            "data__eval_data_paths": str(self._evaluated),
        }
        if layout.adapted:
            keys["actor__model__lora__load_from"] = str(self.adapter(kind))
        return recipe(self.model(kind), self._rows, **{**keys, **layout.keys})

    def flat(self, kind: str, *, adapted: bool = False) -> Trace:
        """The same in one process of plain PyTorch, and PEFT."""
        model, adapter = self.model(kind), self.adapter(kind) if adapted else None
        options = {"precision": self._precision, "optimizer": self._optimizer, "steps": self._steps}
        trace = run_flat(model, self._rows, adapter=adapter, **options)
        dtype = torch.float64 if self._precision == "fp64" else torch.float32
        evaluate_flat(trace, model, self._evaluated, dtype, adapter)
        return trace

    def run(self, kind: str, layouts: Sequence[LaidOut]) -> list[Trace]:
        """The trace of each, those of one number of ranks in one start of ranks.

        The processes are new: tensors' caches would still name the groups of an earlier start.
        """
        found: dict[int, Trace] = {}
        for ranks in sorted({layout.ranks for layout in layouts}):
            places = [place for place, layout in enumerate(layouts) if layout.ranks == ranks]
            recipes = [self.recipe(kind, layouts[place]) for place in places]
            exports = [self._export(kind, layouts[place]) for place in places]
            traces = (
                run_recipes(recipes, exports)
                if ranks == 1
                else run_ranks(run_recipes, ranks, recipes, exports, timeout=600, fresh=True)[0]
            )
            found.update(zip(places, traces, strict=True))
        return [found[place] for place in range(len(layouts))]

    def compare(self, kind: str, layouts: Sequence[LaidOut]) -> list[Apart]:
        """How far each is from one process."""
        flat = {adapted: self.flat(kind, adapted=adapted) for adapted in {layout.adapted for layout in layouts}}
        found = []
        for each, trace in zip(layouts, self.run(kind, layouts), strict=True):
            written = self._export(kind, each)
            exported = 0.0 if written is None else exported_apart(trace, self.model(kind), written)
            found.append(replace(apart(trace, flat[each.adapted]), exported=exported))
        return found

    def _export(self, kind: str, layout: LaidOut) -> Path | None:
        """Where the adapter of a layout is written, which is compared in full precision alone."""
        compared = layout.adapted and self._precision == "fp64"
        return self._folder / f"{kind}-{layout}".replace(" ", "-") if compared else None
