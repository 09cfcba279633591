"""The summary of a run before its first step: model, data, ranks, steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OF_ADAPTER = re.compile(r"(?:(?P<blocks>.*?\.\*)\.)?(?P<module>.+)\.lora_\w+(\.\w+)*")
"""A tensor of LoRA: `model.layers.*.self_attn.q_proj.lora_A.default.weight`."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The contents of the first screen of a run.

    Attributes:
        model: the model's class.
        parameters: how many, and how many of them are trained.
        trainable: of them, how many are trained.
        dtypes: what weights, computation and optimizer are held in.
        ranks: and where they compute.
        attention: how rows share a forward; "" if that does not apply.
        rows: of an epoch; None where they are not counted before training.
        tokens: of an epoch; None where rows are no tokens.
        targets: of an epoch.
        steps_per_epoch: optimizer steps of the first epoch; None where that is not known.
        total_steps: the horizon.
        evaluation: rows of each evaluation set; None where that is not known.
        notes: further messages.
        files: of an epoch, where its rows are not counted.
        trained: where not all parameters are: (name with numbers as *, tensors, parameters).
    """

    model: str
    parameters: int
    trainable: int
    dtypes: str
    ranks: str
    attention: str
    rows: int | None
    tokens: int | None
    targets: float
    steps_per_epoch: int | None
    total_steps: int
    evaluation: Mapping[str, int | None]
    notes: Sequence[str] = ()
    files: str = ""
    trained: Sequence[tuple[str, int, int]] = ()


def adapters_in_brief(trained: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """`RunSummary.trained` with the tensors of an adapter as one entry for each stack of blocks.

    The two tensors of each of seven modules become ("model.layers.*: LoRA on q_proj, k_proj, …", 28, 36864).
    """
    modules: dict[str, list[str]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for name, tensors, parameters in trained:
        found = OF_ADAPTER.fullmatch(name)
        stack = (f"{found['blocks']}: " if found["blocks"] else "") + "LoRA on" if found else name
        named = modules.setdefault(stack, [])
        if found:
            parts = found["module"].split(".")
            module = ".".join(parts[-2:] if parts[-1] == "*" else parts[-1:])
            named += [module] if module not in named else []
        before = counts.get(stack, (0, 0))
        counts[stack] = before[0] + tensors, before[1] + parameters
    return [(f"{stack} {', '.join(modules[stack])}".rstrip(), *counts[stack]) for stack in counts]
