"""The parts of a model with images that other trainers leave untrained unless they are switched on."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.model_type import TYPE
from shardtune.config.foreign.values import is_on
from shardtune.config.parameter_patterns import PARTS

LANGUAGE = "language_model"
EXCLUDED = "actor.model.lora.exclude_modules"


def frozen_parts(c: Conversion, switches: Mapping[str, str]) -> None:
    """Read which parts of a model with images are not trained: tower and projector, unless they are set to false.

    Args:
        c: the conversion, with the model's type.
        switches: their keys, and the part that each one freezes.
    """
    line = c.lines.get(TYPE)
    has_images = line is not None and line.value == "vision_language"
    frozen = {name: part for name, part in switches.items() if is_on(c.get(name, has_images and part != LANGUAGE))}
    parts = list(frozen.values())
    comment = ", ".join(name if c.has(name) else f"{c.trainer}'s default ({name})" for name in frozen)
    if not parts:
        pass
    elif "actor.model.is_lora" not in c.lines:
        c.put("actor.model.freeze", parts, *frozen, comment=comment)
    elif "actor.model.lora.load_from" not in c.lines:
        pattern = f".*?({'|'.join(PARTS[part] for part in parts)}).*"
        c.put(EXCLUDED, pattern, *frozen, comment=comment)
    else:
        c.not_needed("an adapter that is loaded has its own modules", *frozen)
    c.not_needed("the part is trained, as it is here", *(name for name in switches if name not in frozen))
    if line is None and any(not c.has(name) for name, part in switches.items() if part != LANGUAGE):
        c.notes.append(
            f"of a model with images {c.trainer} freezes vision tower and projector unless it is told otherwise: "
            f"actor.model.freeze: [vision_tower, projector], or with LoRA {EXCLUDED}"
        )
