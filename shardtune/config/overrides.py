"""Command-line overrides: `key=value` in Hydra's grammar, config groups, and HALOs' names of our keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.config.keys import ALIASES, IN_ROWS
from shardtune.config.layers import Layer
from shardtune.config.paths import exists
from shardtune.config.recipe_file import MOST_LEVELS, unresolved
from shardtune.config.schema import is_actors, present_key, short_key
from shardtune.config.shown import as_written
from shardtune.config.tree import Tree, get_section, set_value
from shardtune.config.values import LOSSES
from shardtune.errors import ConfigError, cut

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser

CONF = Path(__file__).parent / "conf"
LISTED_GROUP = "datasets"  # the only group that allows several choices at once
GROUPS = ("loss", "model", LISTED_GROUP)
LISTS = {name: ALIASES[name] for name in (LISTED_GROUP, "train_datasets", "test_datasets")}
"""Names under which choices of the listed group may be given, and our keys."""
CHOOSING = (*GROUPS, *(name for name in LISTS if name != LISTED_GROUP))
LONGEST_QUOTED = 100
"""Characters of an override that a message repeats with quotes around its value."""
PLAIN = re.compile(
    r"""(?P<key>\+{0,2}[a-z_]\w*(?:\.[a-z_]\w*)*)=
    (?P<value>-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:e[+-]?\d+)?
    | (?!(?:nan|inf)$) (?:~?/)?[a-z_][\w./-]*)""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
"""An override that needs no grammar: a key with a number, a word or a path."""
MODEL, DATA = "actor.model.model_path", "data.train_data_paths"
TEST = "test"  # of an entry of `datasets`: the split that HALOs evaluates on


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value`.

    Attributes:
        text: as the user wrote it.
        key: dotted, without `+`.
        value: parsed into numbers, booleans, null, lists and mappings.
    """

    text: str
    key: str
    value: object

    @property
    def name(self) -> str:
        """The key as the user wrote it, without `+`."""
        return self.text.partition("=")[0].lstrip("+")

    @property
    def origin(self) -> str:
        return f"override {self.text}"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Overrides sorted by kind.

    Attributes:
        groups: one layer for all chosen config groups; empty if none is.
        values: one layer per `key=value`, under the name that was given.
        name: the chosen groups' names joined, e.g. `sft-llama`; None if none is.
    """

    groups: tuple[Layer, ...]
    values: tuple[Layer, ...]
    name: str | None


def read_overrides(texts: Sequence[str]) -> CommandLine:
    """Parse the words that follow the recipe; a word that cannot be used raises a ConfigError that quotes it."""
    parsed = _parse(texts)
    choices = [override for override in parsed if _chooses_group(override)]
    values = [override for override in parsed if not _chooses_group(override)]
    _refuse_two_names(parsed)
    groups, name = choose(choices) if choices else ((), None)
    return CommandLine(groups, tuple(_as_layer(override) for override in values), name)


def _parse(texts: Sequence[str]) -> list[Override]:
    parsed = []
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f"an override is a {type(text).__name__}: {text!r}",
                where="overrides",
                remedy='write each as text of its own: "optim.lr=3e-5", "runner.max_epochs=1"',
            )
        plain = PLAIN.fullmatch(text)
        if plain is not None:
            value = plain_value(plain["value"])
            parsed.append(Override(text, _in_full(plain["key"].lstrip("+"), value), value))
            continue
        if text.startswith("~"):
            raise ConfigError(
                f"override {text} deletes a key, which a recipe does not allow",
                where=" ".join(texts),
                remedy="to switch a key off, set it: key=null",
            )
        if "=" not in text:
            raise ConfigError(
                f"{text!r} is not an override",
                where=" ".join(texts),
                remedy="write key=value, e.g. optim.lr=3e-5",
            )
        key = text.partition("=")[0]
        if "[" in key:
            raise ConfigError(
                f"override {text} names an entry of a list by its number, which overrides cannot",
                where=" ".join(texts),
                remedy=f"give the whole list: '{key.partition('[')[0].lstrip('+')}=[{{path: a.jsonl, weight: 3}}, "
                "b.jsonl]'",
            )
        try:
            _check_depth(text)
            override = _parser().parse_override(text)
            several = override.is_sweep_override()
            value = override.value()
        except Exception as error:  # Hydra's own, and what values raise: a number of thousands of digits
            reason = cut((str(error) or type(error).__name__).splitlines()[0])
            raise ConfigError(
                f"override {cut(text)} cannot be read: {reason}",
                where=cut(" ".join(texts)),
                remedy="quote values with spaces or special characters, such as =, for the shell and again "
                f"inside: {_in_quotes(text)}",
            ) from error
        if override.package is not None:
            raise ConfigError(
                f"override {text} names a package (@), which recipes do not have",
                where=" ".join(texts),
                remedy="write key=value",
            )
        if several:
            raise ConfigError(
                f"override {text} gives several values, but a run has one",
                where=" ".join(texts),
                remedy="write a list in brackets, key=[a,b], or text with a comma in quotes, 'key=\"a,b\"'",
            )
        parsed.append(Override(text, _in_full(override.key_or_group, value), value))
    return parsed


def _in_quotes(text: str) -> str:
    """The override with its value or the entries of a list in quotes, to be typed; an example if that is not possible.

    It is not where the override is long or has quotes of its own.
    """
    key, _, value = text.partition("=")
    if len(text) > LONGEST_QUOTED or not value or any(sign in value for sign in "'\"\\$"):
        return "'key=\"a value\"'"
    if value[0] == "[" and value[-1] == "]" and not any(sign in value[1:-1] for sign in "[]{}"):
        entries = ",".join(f'"{entry.strip()}"' for entry in value[1:-1].split(","))
        return f"'{key}=[{entries}]'"
    return f"'{key}=\"{value}\"'"


@cache
def _parser() -> OverridesParser:
    """Hydra's, which takes a quarter of a second to be imported."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def plain_value(text: str) -> str | int | float | bool | None:
    """What Hydra's grammar makes of a value that `PLAIN` matches."""
    constants = {"true": True, "false": False, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    if text[0].isdigit() or text[0] == "-":
        return float(text) if set(text) & set(".eE") else int(text)
    return text


def _in_full(key: str, value: object) -> str:
    """The key that is meant: `model=DIRECTORY`, `model=org/name` and `data=rows.jsonl` name the model and the rows."""
    if key == "data" and isinstance(value, str | list):
        return DATA
    if (
        key == "model"
        and isinstance(value, str)
        and value not in options(key)
        and ("/" in value or exists(Path(value)))
    ):
        return short_key(MODEL)
    return key


def _check_depth(text: str) -> None:
    """Refuse what takes Hydra's parser minutes: brackets in brackets in brackets."""
    level = 0
    for character in text:
        level += (character in "[{(") - (character in "]})")
        if level > MOST_LEVELS:
            raise ValueError(f"nested more than {MOST_LEVELS} levels deep")


def _chooses_group(override: Override) -> bool:
    """Whether an override chooses a config group; `datasets` may also name files, which `choose` keeps."""
    return override.key in CHOOSING and not is_actors(override.key, override.value)


def _refuse_two_names(parsed: Sequence[Override]) -> None:
    given: dict[str, Override] = {}
    for override in parsed:
        if override.key in GROUPS and _chooses_group(override) and override.key not in LISTS:
            continue
        theirs = {**ALIASES, **IN_ROWS}.get(override.key)
        ours = _present(override.key)
        other = given.setdefault(ours, override)
        of_halos = theirs is not None or other.key in {**ALIASES, **IN_ROWS}
        if other.name != override.name and (of_halos or other.value != override.value):
            raise ConfigError(
                f"{other.name} and {override.name} are two names of {ours}, given as {as_written(other.value)} "
                f"and {as_written(override.value)}",
                where=f"overrides {other.text} and {override.text}",
                remedy="keep one of them",
            )


def replaced(texts: Sequence[str]) -> list[str]:
    """A sentence for each override of a command line whose value a later one replaces; the last one counts.

    Two names of one key with two values are no such case: `read_overrides` refuses them.

    Args:
        texts: the overrides that a user typed, each as for `read_overrides`.
    """
    seen: list[tuple[str, object, Override]] = []
    found: dict[str, None] = {}
    for override in _parse(texts):
        chosen = f"group {override.key}" if _chooses_group(override) else None
        for key, value in _leaves(chosen or _present(override.key), override.value):
            for other_key, other_value, other in seen:
                has_two_names = _present(override.key) == _present(other.key) and override.name != other.name
                if not has_two_names and _contradicts(key, value, other_key, other_value):
                    found[f"{other.text} is replaced by {override.text}, which comes after it"] = None
            seen.append((key, value, override))
    return [*found]


def set_keys(texts: Sequence[str]) -> list[str]:
    """The dotted keys that overrides set, in the long form; those of config groups are left out."""
    given = [override for override in _parse(texts) if not _chooses_group(override)]
    found = (key for override in given for key, _ in _leaves(_present(override.key), override.value))
    return [*dict.fromkeys(found)]


def written_value(texts: Sequence[str], key: str) -> str | None:
    """The value of a key as the last override that sets it has it; None where none does."""
    return next((text.partition("=")[2] for text in reversed(texts) if _name(text) == _present(key)), None)


def with_keys(overrides: Sequence[str], keys: Sequence[str]) -> list[str]:
    """A command's overrides with further ones, which replace those of the same keys."""
    names = {_name(word) for word in keys}
    return [*(word for word in overrides if _name(word) not in names), *keys]


def _name(text: str) -> str:
    return _present(text.partition("=")[0].lstrip("+"))


def _present(key: str) -> str:
    return {**ALIASES, **IN_ROWS}.get(key) or present_key(key)


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """The dotted keys that an override sets: those inside of a mapping, by themselves."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}", each)
    else:
        yield key, value


def _contradicts(key: str, value: object, other_key: str, other_value: object) -> bool:
    """Whether the later of two keys replaces the earlier one; a section is set to null before keys in it."""
    if key == other_key:
        return type(value) is not type(other_value) or value != other_value
    return other_key.startswith(f"{key}.") or (key.startswith(f"{other_key}.") and other_value not in (None, {}))


def _as_layer(override: Override) -> Layer:
    tree: Tree = {}
    set_value(tree, override.key, override.value)
    return Layer(tree, override.origin, named=override.key)


def choose(choices: Sequence[Override]) -> tuple[tuple[Layer, ...], str | None]:
    """The layers of the chosen groups: Hydra composes them; data sets add up to one list of sources."""
    selected: list[str] = []
    lists: dict[str, list[object]] = {}
    known: list[str] = []
    names: list[str] = []
    for override in choices:
        if override.key in LISTS:
            sources = override.value if isinstance(override.value, list) else [override.value]
            lists[override.key] = sources
            known += [str(source) for source in sources if _is_option(LISTED_GROUP, source, override)]
        elif isinstance(override.value, str) and override.value in options(override.key):
            selected.append(f"{override.key}={override.value}")
            names.append(override.value)
        else:
            raise _no_such_option(override.key, override.value, override)
    tree = _compose([*selected, f"{LISTED_GROUP}=[{','.join(dict.fromkeys(known))}]"])
    entries = get_section(tree, LISTED_GROUP)
    del tree[LISTED_GROUP]
    for key, sources in lists.items():
        entry_of = _test_entry if LISTS[key] == LISTS["test_datasets"] else _entry
        chosen = [entry_of(entries, source) if isinstance(source, str) else source for source in sources]
        set_value(tree, LISTS[key], chosen)
    origin = " ".join(override.text for override in choices)
    return (Layer(tree, f"config group {origin}"),), "-".join(names) or None


def _entry(entries: Tree, source: str) -> object:
    """What a word of `datasets` stands for: a choice of the group, for training; otherwise itself."""
    known = entries.get(source)
    return {key: value for key, value in known.items() if key != TEST} if isinstance(known, dict) else source


def _test_entry(entries: Tree, source: str) -> object:
    """What a word of `test_datasets` stands for: the test split of a choice of the group; otherwise itself."""
    known = entries.get(source)
    if not isinstance(known, dict):
        return source
    if TEST not in known:
        raise ConfigError(
            f"the data set {source} has no test split",
            where=f"test_datasets: {source}",
            remedy="leave it out, and hold rows out of the training data: data.eval_split=0.05",
        )
    return {"path": known["path"], "name": known["name"], "split": known[TEST]}


def test_splits(sources: Sequence[object]) -> list[Tree]:
    """The test splits of training sources that are choices of `datasets`; empty unless each has one."""
    entries = get_section(_compose([f"{LISTED_GROUP}=[{','.join(options(LISTED_GROUP))}]"]), LISTED_GROUP)
    known = [entry for entry in entries.values() if isinstance(entry, dict)]
    found = []
    for source in sources:
        entry = next((entry for entry in known if source == _entry({"": entry}, "")), {})
        found.append({"path": entry["path"], "name": entry["name"], "split": entry[TEST]} if TEST in entry else {})
    return found if all(found) else []


def _is_option(group: str, value: object, override: Override) -> bool:
    """Whether a data set is a choice of the group; a misspelt one is an error, any other a path or Hub name."""
    if not isinstance(value, str) or value in options(group):
        return isinstance(value, str)
    if difflib.get_close_matches(value, options(group), n=1, cutoff=0.8) and not Path(value).exists():
        raise _no_such_option(group, value, override)
    return False


def _no_such_option(group: str, value: object, override: Override) -> ConfigError:
    near = difflib.get_close_matches(str(value), [*options(group), *(LOSSES if group == "loss" else ())], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    instead = ", or any model with model.model_path=…" if group == "model" else ""
    instead = f", {', '.join(LOSSES)}, or a function of yours, file.py:function" if group == "loss" else instead
    return ConfigError(
        f"the config group {group} has no {value!r}",
        where=override.origin,
        remedy=f"{meant}there are: {', '.join(options(group))}{instead}",
    )


def options(group: str) -> list[str]:
    """The choices of a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _compose(selected: Sequence[str]) -> Tree:
    return deepcopy(_composed(tuple(selected)))


@cache
def _composed(selected: tuple[str, ...]) -> Tree:
    from hydra import compose

    with _own_hydra():
        return unresolved(compose("groups", overrides=list(selected)))


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra over our groups; the state of a calling Hydra application is restored afterwards."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    state = GlobalHydra.instance()
    callers = state.hydra
    state.clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = callers
