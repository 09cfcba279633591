"""The trainers whose configurations are known, and how one is told from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardtune.config.foreign import axolotl, llama_factory, nemo, swift, torchtitan, torchtune, trl, verl
from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.table import Table
from shardtune.config.tree import get_value


@dataclass(frozen=True, slots=True)
class OtherTrainer:
    """Another trainer.

    Attributes:
        name: as its project spells it.
        table: its keys.
        marks: keys that few others have.
        convert: its rules for keys that mean something together.
        frozen: its switches for the parts of a model with images that are not trained, by the names of the parts.
    """

    name: str
    table: Table
    marks: tuple[str, ...]
    convert: Callable[[Conversion], None]
    frozen: Mapping[str, str] = field(default_factory=dict)


LLAMA_FACTORY, TORCHTUNE, NEMO, TORCHTITAN = "llama-factory", "torchtune", "nemo", "torchtitan"
SWIFT, VERL = "ms-swift", "verl"
TRAINERS: Mapping[str, OtherTrainer] = {
    "trl": OtherTrainer(trl.NAME, trl.TABLE, trl.MARKS, trl.convert),
    "axolotl": OtherTrainer(axolotl.NAME, axolotl.TABLE, axolotl.MARKS, axolotl.convert),
    LLAMA_FACTORY: OtherTrainer(
        llama_factory.NAME, llama_factory.TABLE, llama_factory.MARKS, llama_factory.convert, llama_factory.FROZEN
    ),
    SWIFT: OtherTrainer(swift.NAME, swift.TABLE, (), swift.convert, swift.FROZEN),
    TORCHTUNE: OtherTrainer(torchtune.NAME, torchtune.TABLE, (), torchtune.convert),
    NEMO: OtherTrainer(nemo.NAME, nemo.TABLE, (), nemo.convert),
    TORCHTITAN: OtherTrainer(torchtitan.NAME, torchtitan.TABLE, (), torchtitan.convert),
    VERL: OtherTrainer(verl.NAME, verl.TABLE, (), verl.convert),
}
"""By the word for `--from`; HALOs' names are read in recipes, so it is not among them."""
FEWEST = 2
SECTIONS = {name.partition(".")[0] for name in torchtitan.TABLE}
"""The sections of torchtitan's files."""


def recognise(tree: Mapping[str, object]) -> str | None:
    """The word of the trainer that a configuration is for; None for a recipe of ours, or if no two keys fit."""
    if set(tree) & {"runner", "actor"}:
        return None
    if verl.is_configuration(tree):
        return VERL
    if "data" in tree:
        return None
    if any(isinstance(part, Mapping) and "_component_" in part for part in tree.values()):
        return TORCHTUNE
    if "step_scheduler" in tree and any(isinstance(part, Mapping) and "_target_" in part for part in tree.values()):
        return NEMO
    if isinstance(tree.get("training"), Mapping) and len(SECTIONS & set(tree)) > FEWEST:
        return TORCHTITAN
    if swift.is_configuration(tree):
        return SWIFT
    of_v1 = isinstance(tree.get("model"), str) and bool({"train_dataset", "peft_config"} & set(tree))
    if of_v1 or sum(name in tree for name in llama_factory.V1) >= FEWEST:
        return LLAMA_FACTORY
    named = {word: sum(name in known.table for name in tree) for word, known in TRAINERS.items()}
    scores = {word: sum(get_value(tree, mark) is not None for mark in known.marks) for word, known in TRAINERS.items()}
    best = max(scores, key=lambda word: (scores[word], named[word]))
    return best if scores[best] and named[best] >= FEWEST and named[best] * 2 >= len(tree) else None
