"""A conversion under way: the given keys, the lines of the recipe, and what became of each key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from shardtune.config.foreign.table import OURS, By, Missing, NoCounterpart, NotNeeded, Table, To, entry_of
from shardtune.config.keys import nearest
from shardtune.config.schema import Recipe
from shardtune.config.secrets import HIDDEN
from shardtune.config.tree import Tree, get_value, set_value

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst")
PATHS = ("actor.model.model_path", "actor.tokenizer.tokenizer_model", "data.cache_dir")

SECRET = re.compile(r"(?i)(?:^|[._])(?:(?:hub|hf|auth|access|api)_token|api_?key|secret|secret_key|password|passwd)$")
"""Keys of other trainers whose text is shown nowhere."""


class Kind(Enum):
    """What became of a key; the values are the headings of the report."""

    TRANSLATED = "translated"
    DEFAULT = "the default here"
    NOT_NEEDED = "not needed"
    MISSING = "no counterpart: do this"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one key.

    Attributes:
        name: theirs, with sections and places in lists: `datasets[0].path`.
        value: as given.
        kind: the heading.
        text: our line, the reason, or what to do.
    """

    name: str
    value: object
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the recipe.

    Attributes:
        value: of our key.
        comment: where it comes from.
    """

    value: object
    comment: str


@dataclass(slots=True)
class Conversion:
    """Keys of another trainer on their way into a recipe.

    Attributes:
        trainer: its name, for comments.
        tree: the configuration.
        base: its folder.
        target: the folder of the recipe; paths in the recipe start there.
        world_size: the number of processes that the configuration was run with; None: not known.
        mixed_precision: what the launcher sets it to, for a configuration that does not; "": nothing.
        sharing: how many of the processes have the same rows by the launcher.
        beside: keys that are not in the tree, by their name in the report: of the launcher, and of files that the
            configuration names.
        references: values as they are written that name variables of the environment, which the report shows.
        lines: our key -> line.
        outcomes: their name -> what became of it.
        notes: differences that no single key stands for.
    """

    trainer: str
    tree: Mapping[str, object]
    base: Path
    target: Path
    world_size: int | None = None
    mixed_precision: str = ""
    sharing: int = 1
    beside: dict[str, object] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def given(self) -> dict[str, object]:
        """All keys with their values, lists of mappings taken apart: `datasets[0].path`."""
        return {**dict(leaves(self.tree)), **self.beside}

    def get(self, dotted: str, default: object = None) -> object:
        """The value of a key; the default where it is absent or null."""
        value = get_value(self.tree, dotted)
        return default if value is None else value

    def has(self, dotted: str) -> bool:
        """Whether a key is given, with a value."""
        return get_value(self.tree, dotted) is not None

    def put(self, key: str, value: object, *names: str, comment: str = "", always: bool = False) -> None:
        """Write a line of the recipe, unless it is the default here.

        Args:
            key: ours.
            value: ours.
            names: of the keys that it is made of; those that are given are recorded.
            comment: for the line; by default the names.
            always: write the default too.
        """
        given = [name for name in names if name in self.tree or get_value(self.tree, name) is not None]
        is_default = not always and value == get_value(defaults(), key) and key not in self.lines
        if not is_default:
            self.lines[key] = Line(value, comment or (", ".join(given) if given else f"{self.trainer}'s default"))
        for name in given:
            kind = Kind.DEFAULT if is_default else Kind.TRANSLATED
            self.record(name, kind, f"{key}: {short(value)}")

    def record(self, name: str, kind: Kind, text: str) -> None:
        """Note what became of a key and of all inside it; several lines made of one key are all named."""
        for given, value in self.given.items():
            if given == name or given.startswith((f"{name}.", f"{name}[")):
                before = self.outcomes.get(given)
                value = self.shown(given, value)
                if before is not None and before.kind is kind is Kind.TRANSLATED and text not in before.text:
                    self.outcomes[given] = Outcome(given, value, kind, f"{before.text}; {text}")
                elif before is None or kind is not Kind.DEFAULT:
                    self.outcomes[given] = Outcome(given, value, kind, text)

    def shown(self, name: str, value: object) -> object:
        """A value of theirs for the report: of the environment by its variable, of a secret nothing."""
        if name in self.references:
            return self.references[name]
        return HIDDEN if isinstance(value, str) and value and SECRET.search(name) else value

    def not_needed(self, why: str, *names: str) -> None:
        """Note that keys set what does not arise here."""
        for name in names:
            self.record(name, Kind.NOT_NEEDED, why)

    def missing(self, remedy: str, *names: str) -> None:
        """Note that keys have no counterpart, and what to do instead."""
        for name in names:
            self.record(name, Kind.MISSING, remedy)

    def translate(self, table: Table) -> None:
        """Apply the entries of a table to the keys that no rule has read, and write their defaults."""
        for name, entry in table.items():
            if isinstance(entry, To) and entry.default is not OURS and not self.has(name):
                value = entry.read(entry.default)
                if value != get_value(defaults(), entry.key):
                    self.lines.setdefault(entry.key, Line(value, f"{self.trainer}'s default ({name})"))
        for name, value in self.given.items():
            if name not in self.outcomes:  # one that is inside another has the outcome of that
                self._apply(table, name, value)

    def _apply(self, table: Table, name: str, value: object) -> None:
        outer, entry = entry_of(table, name)
        if isinstance(entry, To):
            self._rename(entry, outer, get_value(self.tree, outer))
        elif isinstance(entry, NotNeeded):
            self.not_needed(entry.why, name)
        elif isinstance(entry, Missing):
            is_off = any(value is off or (type(value) is type(off) and value == off) for off in entry.off)
            if is_off or value in ("", [], {}):
                self.record(name, Kind.DEFAULT, "so it is here")
            else:
                self.missing(entry.remedy, name)
        elif isinstance(entry, By):
            if value is None:
                self.record(name, Kind.DEFAULT, "nothing is set")
            else:
                self.not_needed(f"without effect beside the other keys ({entry.line})", name)
        else:
            self.record(name, Kind.UNKNOWN, self._nearest(table, name))

    def _nearest(self, table: Table, name: str) -> str:
        """What an unknown key may mean: a key of that trainer with another spelling, or one of ours."""
        theirs = difflib.get_close_matches(name, table, n=1, cutoff=0.8)
        if theirs:
            known = table[theirs[0]]
            here = (
                known.key
                if isinstance(known, To)
                else known.line
                if isinstance(known, By)
                else "see docs/coming-from.md"
            )
            return f"did you mean {self.trainer}'s {theirs[0]}? Here: {here}"
        near = nearest(name)
        return f"no key of {self.trainer} that is known here" + (f"; the nearest key here is {near}" if near else "")

    def _rename(self, entry: To, name: str, value: object) -> None:
        if value is None:
            self.record(name, Kind.DEFAULT, f"{entry.key}: {short(get_value(defaults(), entry.key))}")
            return
        try:
            ours = entry.read(value)
        except NoCounterpart as reason:
            self.missing(str(reason), name)
            return
        if entry.key in PATHS and isinstance(ours, str):
            ours = self.path(ours)
        self.put(entry.key, ours, name, comment=f"{name}; {entry.note}" if entry.note else name)

    def path(self, text: object) -> str:
        """A path as the recipe has it, from the recipe's folder; a name on the Hub stays as it is."""
        given = str(text)
        for folder in (Path.cwd(), self.base):
            if (folder / Path(given).expanduser()).exists():
                return self._from_target(folder / Path(given).expanduser())
        is_path = given.startswith((".", "/", "~")) or given.endswith(DATA_SUFFIXES)
        return self._from_target(Path.cwd() / Path(given).expanduser()) if is_path and "://" not in given else given

    def _from_target(self, path: Path) -> str:
        """A path of the recipe: a link stays the link, which may lead to other rows later."""
        written = Path(os.path.abspath(path))
        if written.resolve() != path.resolve():  # `..` behind a link
            written = path.resolve()
        target = self.target.resolve()
        near = next((one for one in (written, path.resolve()) if one.is_relative_to(target.parent)), None)
        if near is None:
            return str(written)
        shown = os.path.relpath(near, target)
        return shown if shown.startswith(".") or shown.endswith(DATA_SUFFIXES) else f"./{shown}"

    def as_tree(self) -> Tree:
        """The recipe's lines as a tree."""
        tree: Tree = {}
        for key, line in self.lines.items():
            set_value(tree, key, line.value)
        return tree


@cache
def defaults() -> Tree:
    """The default recipe, which is not to be changed."""
    return Recipe().to_dict()


def short(value: object) -> str:
    """A value on one line, as YAML writes it, cut where it is long."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 70 else f"{text[:60]} …"


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The keys of a tree with their values, in order; those of mappings in lists too: `datasets[0].path`."""
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{dotted}.")
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(i, Mapping) for i in value):
            for place, item in enumerate(value):
                inner = item if isinstance(item, Mapping) else {"": item}
                yield from ((found.rstrip("."), leaf) for found, leaf in leaves(inner, f"{dotted}[{place}]."))
        else:
            yield dotted, value
