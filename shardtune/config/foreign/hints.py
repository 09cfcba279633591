"""What to write for a key of another trainer, for the message about an unknown key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shardtune.config.foreign import rlinf
from shardtune.config.foreign.conversion import short
from shardtune.config.foreign.table import By, Entry, Missing, NoCounterpart, NotNeeded, To
from shardtune.config.foreign.trainers import TRAINERS
from shardtune.config.foreign.training_arguments import TRAINING_ARGUMENTS
from shardtune.config.keys import KEYS
from shardtune.config.schema import short_keys

ONE_VALUE = re.compile(r"([\w.]+): (N|SHARE|RATE|NAME|FILE|FOLDER)")
"""A line whose value is that of the other trainer's key."""
NOTHING = "nothing: "
CONVERT = "shardtune convert FILE -o recipe.yaml writes a whole file as a recipe"
ACTOR_DOT = "actor."


def hint(dotted: str, value: object = None) -> str | None:
    """The remedy for an unknown key that is one of another trainer's; None if it is none.

    Args:
        dotted: the key as written; its last part counts too (`actor.load_in_4bit`). With `actor.` in front, the remedy
            names keys so, too.
        value: as written, for the line to write.
    """
    if isinstance(value, Mapping) and dotted not in rlinf.TABLE:
        return None  # a section in the wrong place
    found = next((_remedy(entry, value, theirs) for entry, theirs in _entries(dotted)), None)
    if dotted in rlinf.SECTIONS:
        found = f"{found}; {CONVERT}"
    return found if found is None or dotted.startswith(ACTOR_DOT) else short_keys(found)


def hint_of_value(key: str, value: object) -> str | None:
    """The remedy for a wrong value of a key of ours whose last part is a key of another trainer with another meaning.

    `adapter: qlora` is one, a value of `actor.model.adapter` for Axolotl's `adapter`.
    """
    found = (_remedy(entry, value, theirs) for entry, theirs in _entries(key) if isinstance(entry, By))
    return next((remedy for remedy in found if key not in remedy), None)


def counterpart(name: str) -> str | None:
    """Our key for a key of another trainer; None if there is none, or if it depends on others which one it is."""
    for entry, _ in _entries(name):
        key = entry.key if isinstance(entry, To) else entry.line.partition(":")[0] if isinstance(entry, By) else ""
        return key if key in KEYS else None
    return None


def _entries(dotted: str) -> Iterator[tuple[Entry, str]]:
    """What other trainers have under a key's name, or under its last part; with the name and the trainer."""
    if dotted in rlinf.TABLE:
        yield rlinf.TABLE[dotted], f"{dotted} of {rlinf.NAME}"
    last = dotted.rpartition(".")[2]
    for name in dict.fromkeys((dotted, last, last.lower())):
        for trainer in TRAINERS.values():
            entry = trainer.table.get(name)
            if entry is not None:
                yield entry, f"{name} of {'transformers' if name in TRAINING_ARGUMENTS else trainer.name}"


def _remedy(entry: Entry, value: object, theirs: str) -> str:
    if isinstance(entry, NotNeeded):
        return f"leave it out; {theirs} is not needed: {entry.why}"
    if isinstance(entry, Missing):
        return f"{theirs} has no counterpart: {entry.remedy}"
    if isinstance(entry, By) and entry.read is not None and isinstance(value, str):
        try:
            return f"write {', '.join(f'{key}: {short(each)}' for key, each in entry.read(value).items())} ({theirs})"
        except NoCounterpart as reason:
            return f"did you mean {entry.line.partition(':')[0]}? {reason} ({theirs})"
    if isinstance(entry, By):
        return _line(entry.line, value, theirs)
    try:
        written = f"; write {entry.key}: {short(entry.read(value))}" if value is not None else ""
    except NoCounterpart as reason:
        written = f"; {reason}"
    return f"did you mean {entry.key}?{written} ({theirs})"


def _line(line: str, value: object, theirs: str) -> str:
    if line.startswith(NOTHING):
        return f"leave it out ({theirs}): {line.removeprefix(NOTHING)}"
    single = ONE_VALUE.fullmatch(line)
    if single and isinstance(value, int | float | str) and not isinstance(value, bool):
        return f"did you mean {single[1]}? write {single[1]}: {value} ({theirs})"
    return f"write {line} ({theirs})"
