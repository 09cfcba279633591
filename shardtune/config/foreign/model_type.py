"""Whether a model takes images, from its config.json: other trainers find that out when they load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shardtune.config.foreign.conversion import Conversion

PATH, TYPE = "actor.model.model_path", "actor.model.model_type"
CONFIG = "config.json"


def model_type(c: Conversion) -> None:
    """Write the model type of a model with images; note where the model is not at hand."""
    line = c.lines.get(PATH)
    if line is None or TYPE in c.lines:
        return
    path = str(line.value)
    config = _read(c.target / Path(path).expanduser() / CONFIG) or _cached(path)
    if config is None:
        c.notes.append(f"{path} is not at hand: if the model takes images, set {TYPE}: vision_language")
    elif takes_images(config):
        c.put(TYPE, "vision_language", comment=f"{CONFIG} of the model")


def takes_images(config: Mapping[str, object]) -> bool:
    """Whether a config.json is that of a model of images and text."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return "vision_config" in config and not any(str(name).endswith("ForCausalLM") for name in names)


def _read(file: Path) -> Mapping[str, object] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a damaged one is refused when the model is loaded
        return None
    return found if isinstance(found, dict) else None


def _cached(name: str) -> Mapping[str, object] | None:
    """The config.json of a model on the Hub, if it has been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:  # a path
        return None
    return _read(Path(found)) if isinstance(found, str) else None
