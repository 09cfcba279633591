"""The names of keys: with and without `actor.`, present and former ones, and those of other systems."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardtune.config.schema.actor import ActorConfig
from shardtune.config.schema.runner import RunnerConfig
from shardtune.config.schema.section import Section
from shardtune.config.values import FUNCTION_IN_FILE, LOSSES

ACTOR = "actor"
OF_ACTOR = re.compile(r"\bactor\.(?=[a-z])")
ACTOR_KEYS = tuple(ActorConfig.model_fields)
"""The keys and sections of `actor`, which may also stand at the top; no other key at the top has such a name."""
MODEL, LOSS = "model", "loss"
"""Those whose names are also names of config groups and of HALOs' sections."""
ALTERNATIVE_KEYS = {
    "actor.model.micro_batch_size": "actor.micro_batch_size",
    "actor.model.val_micro_batch_size": "actor.eval_micro_batch_size",
}
"""Alternative keys, and the keys that they replace; the resolved recipe has only the latter."""


def _former(kind: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    yield from ((f"{prefix}{former}", f"{prefix}{present}") for former, present in kind.FORMER_NAMES.items())
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _former(field.annotation, f"{prefix}{name}.")


FORMER_KEYS = {**dict(_former(RunnerConfig, "runner.")), **dict(_former(ActorConfig, f"{ACTOR}."))}
"""Former keys, which go on working, and the present ones."""
OTHER_KEYS = {**FORMER_KEYS, **ALTERNATIVE_KEYS}
"""All names of a key besides its own."""


def long_key(name: str) -> str:
    """A dotted name with `actor.` in front where it was left out."""
    return f"{ACTOR}.{name}" if name.partition(".")[0] in ACTOR_KEYS else name


def present_key(name: str) -> str:
    """The key that a dotted name stands for, in its long form: `optim.lr` -> `actor.optim.lr`."""
    return OTHER_KEYS.get(long_key(name), long_key(name))


def is_actors(name: str, value: object) -> bool:
    """Whether one of `ACTOR_KEYS` at the top is meant, not the choice of a config group or a section of HALOs."""
    if name == LOSS:
        text = value if isinstance(value, str) else ""
        return value is None or text in LOSSES or bool(FUNCTION_IN_FILE.fullmatch(text)) or "${" in text
    return name in ACTOR_KEYS and not (name == MODEL and isinstance(value, str | list))


def short_key(key: str) -> str:
    """A key without `actor.` in front."""
    return key.removeprefix(f"{ACTOR}.")


def short_keys(text: str) -> str:
    """A text that names keys, without `actor.` in front of them."""
    return OF_ACTOR.sub("", text)
