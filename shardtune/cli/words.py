"""The words after a command: a recipe, and overrides of its keys, as `key=value` or as `--key value`."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import typer

from shardtune.cli.first_rank import is_first_rank
from shardtune.errors import ConfigError

RECIPE_FLAGS = ("-c", "--config", "--recipe")
ROWS = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow", ".feather")
UNQUOTED = re.compile(r"[\w./:+%*@?|-]+|[\[{\"'].*|.*\$\{.*", re.DOTALL)
"""Values that Hydra's grammar reads as they are, or that are written in it."""
FORMS: Mapping[str, str] = {"runner.push_to_hub": "OWNER/NAME"}
"""How a value is written, for the message about a flag that is a switch in other trainers."""
OF_MODELS = ("config.yaml", "config.json", "adapter_config.json")
"""Files of which the directory of a run or of a model has one."""
DOTTED = re.compile(r"\w+(\.\w+)+")


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The recipe, if one is named, and the overrides; the recipe is the first word that is no `key=value`.

    An override that a later one replaces is named on standard error.
    """
    given = list(words or ())
    recipe = next((word for word in given if not is_override(word)), None)
    if recipe is not None:
        given.remove(recipe)
    if len(given) > 1 and is_first_rank():
        from shardtune.config.overrides import replaced

        for line in replaced(given):
            typer.echo(line, err=True)
    return recipe, given


def is_override(word: str) -> bool:
    return "=" in word and not _is_file(word)


def refuse_keys(command: str, words: Sequence[str], options: Mapping[str, str], as_word: str) -> None:
    """Refuse an override of a recipe's key where words are texts that the model reads, or names.

    A key's last part alone counts too, in a word without blanks: `max_new_tokens=3`. A text such as `a.b=c`, which
    begins with no section and no key of a recipe, stays a text.

    Args:
        command: which takes no overrides.
        words: as typed after it.
        options: of the command, by the key whose value they have in it.
        as_word: how the word itself is meant all the same; `{}` stands for it.
    """
    for word in words:
        name, equals, value = word.partition("=")
        key = name.lstrip("+")
        meant = _keys_meant(key, value) if equals and not _is_file(word) else []
        if not meant:
            continue
        option = next((options[one] for one in meant if one in options), None)
        instead = f"write {option} {shlex.quote(value)}" if option else f"shardtune {command} --help lists its options"
        raise ConfigError(
            f"{command} takes no overrides of keys, and {_as_key(key, meant)} of a recipe",
            where=word,
            remedy=f"{instead}; {as_word.format(shlex.quote(word))}",
        )


def _keys_meant(key: str, value: str) -> list[str]:
    """The keys of a recipe that `key=value` may mean; the key itself where it begins with a section."""
    from shardtune.config.keys import ALIASES, KEYS
    from shardtune.config.schema import ACTOR_KEYS, Recipe, present_key

    present = present_key(key)
    if present in KEYS or (DOTTED.fullmatch(key) and key.partition(".")[0] in (*Recipe.model_fields, *ACTOR_KEYS)):
        return [present]
    if not key or any(map(str.isspace, value)):
        return []
    named = [ALIASES[key]] if key in ALIASES else []
    return list(dict.fromkeys([*named, *(full for full in KEYS if full.rpartition(".")[2] == key)]))


def _as_key(key: str, meant: Sequence[str]) -> str:
    """What a typed key is, in a sentence that `of a recipe` ends."""
    from shardtune.config.schema import present_key, short_key

    if meant[0] == present_key(key):
        return f"{key} is a key"
    shown = [short_key(full) for full in meant]
    return f"{key} is {' or '.join(shown)}" if len(shown) < 4 else f"{key} is a part of keys"


def refuse_models(command: str, words: Sequence[str], as_text: str) -> None:
    """Refuse the directory of a run or a model where words are texts that the model reads.

    Args:
        command: which takes one of them.
        words: the texts.
        as_text: how the word itself is written as a text; `{}` stands for it.
    """
    for word in words:
        if any(_is_file(os.path.join(word, name)) for name in OF_MODELS):
            raise ConfigError(
                f"{command} takes one run or model, and {word} is a second one",
                where=word,
                remedy=f"leave one of them out; as a text to the model: {as_text.format(shlex.quote(word))}",
            )


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # the value of a key is longer than a name can be
        return False


def without_flags(words: Sequence[str], options: Collection[str]) -> list[str]:
    """The same words with every flag as an override: `--learning_rate 1e-5` as `optim.lr=1e-5`.

    A flag that stands for no key becomes an override of its own name, which the recipe then refuses with the key that
    is probably meant.

    Args:
        words: after the command, without its own options.
        options: of the command, for a misspelt one.

    Raises:
        ConfigError: a flag without its value, given twice, or not known; a file of rows in the place of a recipe.
    """
    if not any(word.startswith("-") for word in words):
        _refuse_rows(words)
        return [*words]
    from shardtune.cli.flags import is_foreign

    plain: list[str] = []
    flags: dict[str, list[tuple[str, str]]] = {}  # by key: the flags as typed, and their values
    rest = deque(words)
    strange: list[str] = []
    while rest:
        word = rest.popleft()
        if word.partition("=")[0] in RECIPE_FLAGS:
            plain.append(_value(word, rest))
        elif word.startswith("-"):
            for key, value in _keys_of(word, rest, options):
                strange += [key] if is_foreign(key) else []
                flags.setdefault(key, []).append((word.partition("=")[0], value))
        else:
            plain.append(word)
    _refuse_rows(plain)
    if strange and all(is_override(word) for word in plain):
        raise _other_command_line(words, {key: flags[key] for key in strange})
    return [*plain, *(_override(key, given) for key, given in flags.items())]


def _refuse_rows(words: Sequence[str]) -> None:
    for word in words:
        if not is_override(word) and word.lower().endswith(ROWS):
            raise ConfigError(
                f"{word} is a file of rows, and a recipe is a YAML file",
                where=word,
                remedy=f"write --data {word}; for several files --data a{Path(word).suffix} --data {word}",
            )


def _value(word: str, rest: deque[str], key: str | None = None) -> str:
    """The value of a flag, of a key if it stands for one: after its `=`, or the next word."""
    flag, equals, value = word.partition("=")
    if equals:
        return value
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{flag} has no value", where=flag, remedy=f"write {flag} {_form(key)}")
    return rest.popleft()


def _form(key: str | None) -> str:
    """What to write as the value of a key, and what the key is."""
    from shardtune.config.keys import KEYS
    from shardtune.config.schema import short_key

    if key not in KEYS:
        return "VALUE"
    return f"{FORMS.get(key, 'VALUE')}; {short_key(key)}: {KEYS[key].field.description}"


def _keys_of(word: str, rest: deque[str], options: Collection[str]) -> list[tuple[str, str]]:
    """The keys that a flag sets, and their values as typed."""
    from shardtune.cli.flags import FOLDER, NAME, RUN_DIRECTORY, TRUTHS, find_flag, known_flags

    flag, equals, given = word.partition("=")
    name = flag.lstrip("-")
    if not flag.startswith("--") or not name:
        raise ConfigError(f"there is no option {flag}", where=word, remedy=_similar(flag, options))
    if name.replace("-", "_") in RUN_DIRECTORY:
        folder = Path(_value(word, rest))
        if not folder.name or folder.name == "..":
            raise ConfigError(
                f"{flag} {folder} has no name of its own", where=flag, remedy=f"give a directory: {flag} runs/my-run"
            )
        return [(FOLDER, str(folder.parent)), (NAME, folder.name)]
    found = find_flag(name)
    is_unknown = found.key == name.replace("-", "_") and "." not in name
    if is_unknown and (near := nearest_option(flag, [*options, *known_flags()])):
        raise ConfigError(f"there is no option {flag}", where=word, remedy=f"did you mean {near}?")
    if is_unknown and not equals and (not rest or rest[0].startswith("--")):
        return [(found.key, "true")]  # refused by the recipe, with the key that is meant
    if found.switch is None:
        return [(found.key, _value(word, rest, found.key))]
    if not equals:
        given = rest.popleft() if rest and rest[0] in (*found.values, found.switch, *TRUTHS) else found.switch
    if found.switch not in TRUTHS and given.lower() == "true":  # `--bf16 true`, as transformers' command lines have it
        given = found.switch
    if given not in (*found.values, found.switch):
        raise ConfigError(
            f"{flag} is {' or '.join(dict.fromkeys((found.switch, *found.values)))}, not {given}",
            where=word,
            remedy=f"write {found.key}=VALUE for another value",
        )
    return [(found.key, given)]


def _other_command_line(words: Sequence[str], flags: Mapping[str, Sequence[tuple[str, str]]]) -> ConfigError:
    """The error about flags that are keys of another trainer, each with what to write, and how to convert them all."""
    from shardtune.config.foreign.hints import hint

    lines = [f"{given[0][0]}: {hint(key, given[0][1])}" for key, given in flags.items()]
    return ConfigError(
        "flags of another trainer that are no single key here:" + "".join(f"\n  {line}" for line in lines),
        remedy=f"to have the whole line as a recipe: shardtune convert -o recipe.yaml -- {shlex.join(words)}",
    )


def _similar(flag: str, options: Collection[str]) -> str:
    near = nearest_option(flag, options)
    return f"did you mean {near}?" if near else f"its options are: {', '.join(options)}; or write key=value"


def nearest_option(flag: str, options: Collection[str]) -> str | None:
    """The option that a misspelt flag probably means."""
    names = {name.replace("_", "-"): name for name in options}
    return next(
        (names[near] for near in difflib.get_close_matches(flag.replace("_", "-"), names, n=1, cutoff=0.85)), None
    )


def _override(key: str, given: Sequence[tuple[str, str]]) -> str:
    from shardtune.cli.flags import SEVERAL

    values = [_quoted(value) for _, value in given]
    if len(values) == 1:
        return f"{key}={values[0]}"
    if key in SEVERAL:
        return f"{key}=[{','.join(values)}]"
    names = " and ".join(dict.fromkeys(name for name, _ in given))
    raise ConfigError(
        f"{key} is given {len(given)} times, as {', '.join(value for _, value in given)}",
        where=names,
        remedy="keep one of them",
    )


def _quoted(value: str) -> str:
    """A value as Hydra's grammar reads it back, unless it is written in that grammar."""
    if UNQUOTED.fullmatch(value):
        return value
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'
