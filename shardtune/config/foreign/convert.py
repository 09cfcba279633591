"""`shardtune convert`: a configuration of another trainer as a recipe."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from shardtune.config.foreign import halos, llama_factory, rlinf, trl
from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.conversion import Conversion, Kind, Outcome, leaves
from shardtune.config.foreign.frozen_parts import frozen_parts
from shardtune.config.foreign.launch import Launch, Started, apply, of_environment, precision_of, sharing, started
from shardtune.config.foreign.launch_keys import ACCELERATE
from shardtune.config.foreign.model_type import model_type
from shardtune.config.foreign.refusals import refuse_launcher
from shardtune.config.foreign.trainers import TRAINERS, OtherTrainer, recognise
from shardtune.config.foreign.written import recipe_text, report_text
from shardtune.config.loading import load_recipe
from shardtune.config.recipe_file import read_file
from shardtune.config.tree import copied, get_value, set_value
from shardtune.errors import ConfigError

HALOS, RLINF = "halos", "rlinf"
COMMAND_LINE = "the command line"
READ = (".yaml", ".yml", ".json", ".toml")
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(,[^{}]*)?\}")
"""A reference to a variable of the environment."""
BARE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
SHELL = (".sh", ".bash", ".slurm", ".sbatch")
FROM: Mapping[str, OtherTrainer] = {
    **TRAINERS,
    HALOS: OtherTrainer(halos.NAME, {}, halos.MARKS, halos.convert),
    RLINF: OtherTrainer(rlinf.NAME, rlinf.TABLE, rlinf.SECTIONS, rlinf.convert),
}
"""By the word for `--from`."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` makes of a file.

    Attributes:
        recipe: its text.
        report: every key of the source under what became of it.
        conversion: lines, outcomes and notes.
    """

    recipe: str
    report: str
    conversion: Conversion


def convert(
    given: CommandLine,
    trainer: str | None = None,
    *,
    to: Path | None = None,
    world_size: int | None = None,
) -> Converted:
    """Convert a configuration; writes nothing.

    Args:
        given: a file in YAML or JSON, flags and keys that replace its keys, and what the run was started with.
        trainer: a word of `FROM`; None: recognised by its keys.
        to: the file of the recipe, whose folder its paths start at; None: the working directory.
        world_size: the number of processes that the configuration was run with; None: as its launcher has it,
            otherwise one is assumed.

    Raises:
        ConfigError: a file cannot be read, is of no known trainer, or is no supervised fine-tuning.
    """
    file = given.file
    shown = COMMAND_LINE if file is None else file.name
    where = str(file or shown)
    tree = _tree(given)
    tree = _with_variables(tree, frozenset(tree))
    written = {name: value for name, value in leaves(tree) if isinstance(value, str) and VARIABLE.search(value)}
    tree = _resolved(tree, where)
    word = trainer or given.trainer or recognise(tree) or _halos(tree) or _rlinf(tree)
    known = FROM.get(word) if word is not None else None
    if known is None and word is None:
        refuse_launcher(tree, where)
        raise _no_trainer("this is not recognised as a configuration of another trainer", where)
    if known is None:
        raise _no_trainer(f"{word} is not a known trainer")
    folder = (to.expanduser().resolve() if to is not None else Path.cwd() / "recipe.yaml").parent
    source = Path.cwd() if file is None else file.expanduser().resolve().parent
    found = _started(given.launch, tree, known.name)
    size = found.processes if world_size is None and found is not None else world_size
    c = Conversion(known.name, tree, source, folder, size)
    c.references = {name: value.replace("\\$", "$") for name, value in written.items()}
    if found is not None:
        c.mixed_precision, c.sharing = precision_of(found), sharing(found)
    known.convert(c)
    c.translate(known.table)
    if found is not None:
        apply(c, found, is_counted=world_size is None)
    _variables(c, given.environment)
    model_type(c)
    frozen_parts(c, known.frozen)
    if word != HALOS:
        _ranks(c, None if world_size is not None else found)
    _check(c)
    return Converted(recipe_text(c, shown), report_text(c, shown), c)


def _variables(c: Conversion, environment: Mapping[str, str]) -> None:
    """Record the variables that were set for a command: those that its trainer alone reads, and others."""
    own = llama_factory.VARIABLES if c.trainer == llama_factory.NAME else {}
    for name, value in environment.items():
        variable = of_environment(name)
        kind, text = own.get(name, (Kind.MISSING, "set it in front of shardtune train, too"))
        c.outcomes[variable] = Outcome(variable, value, kind, text)


def _no_trainer(what: str, where: str = "--from") -> ConfigError:
    return ConfigError(what, where=where, remedy=f"give --from {', '.join([*FROM][:-1])} or {[*FROM][-1]}")


def _tree(given: CommandLine) -> dict[str, object]:
    """The keys of the file with what replaces them."""
    tree = {**({} if given.file is None else _read(given.file)), **given.values}
    for name, value in given.keys.items():
        try:
            set_value(tree, name, value)
        except TypeError as error:
            raise ConfigError(
                f"{name}={value} sets a key below one that is no section", where=str(given.file), remedy="leave it out"
            ) from error
    return tree


def _read(file: Path) -> dict[str, object]:
    """The keys of a file in YAML, JSON or, by its name, TOML."""
    if file.suffix in SHELL:
        raise ConfigError(
            "a script of a shell is not read",
            where=str(file),
            remedy="give the words of its command: shardtune convert -o recipe.yaml trl sft --learning_rate …",
        )
    if not file.is_file():
        raise _no_file(file)
    if file.suffix != ".toml":
        return dict(copied(read_file(file).tree))
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=str(file)) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or no TOML
        raise ConfigError(f"the file is no TOML: {error}", where=str(file), remedy="mend the file") from error


def _no_file(file: Path) -> ConfigError:
    beside = {one.stem: one for one in file.parent.glob("*") if one.suffix in READ}
    near = difflib.get_close_matches(file.stem, beside, n=1)
    remedy = "give a configuration (YAML, JSON, TOML) of another trainer, or its command: trl sft --learning_rate …"
    if not file.suffix:  # torchtitan names a function by --config
        remedy += "; configurations in Python are not converted"
    return ConfigError(
        "this is a directory, no file" if file.is_dir() else "there is no such file",
        where=str(file),
        remedy=f"did you mean {beside[near[0]]}?" if near else remedy,
    )


def _started(launch: Launch | None, tree: Mapping[str, object], trainer: str) -> Started | None:
    """What the run was started with; TRL's own command takes the options of accelerate among its keys."""
    if launch is None and trainer == trl.NAME:
        theirs = {name for name in ACCELERATE if name not in trl.TABLE and name != "env"}  # TRL has an env of its own
        own = {name: value for name, value in tree.items() if name in theirs}
        launch = Launch("accelerate", own) if own else None
    return None if launch is None else started(launch)


def _ranks(c: Conversion, found: Started | None) -> None:
    """Write the ranks of one host."""
    if found is None and c.world_size is not None and c.world_size > 1:
        comment = "--world-size; on several hosts: the processes of one"
        c.put("runner.nproc_per_node", c.world_size, comment=comment)
    elif found is not None and found.processes is not None:
        hosts = f" on {found.hosts} hosts" if found.hosts > 1 else ""
        comment = f"{found.launch.program}: {found.processes} processes{hosts}"
        c.put("runner.nproc_per_node", found.each, comment=comment)


def _with_variables(value: Any, keys: frozenset[str]) -> Any:
    """A tree whose references to variables of the environment are `${oc.env:NAME}`, and stay where one is not set.

    NeMo writes `${NAME}` for one, where its file has no such key.
    """
    if isinstance(value, Mapping):
        return {name: _with_variables(item, keys) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_variables(item, keys) for item in value]
    if not isinstance(value, str):
        return value
    text = BARE.sub(lambda found: found[0] if found[1] in keys else f"${{oc.env:{found[1]}}}", value)
    return VARIABLE.sub(lambda found: found[0] if found[2] or found[1] in os.environ else f"\\{found[0]}", text)


def _resolved(tree: dict[str, object], shown: str) -> dict[str, object]:
    """The values with their references (`${output_dir}/logs`) replaced."""
    try:
        values = OmegaConf.to_container(DictConfig(tree), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(
            f"a value is ???, to be given on the command line of that trainer: {str(error).splitlines()[0]}",
            where=shown,
            remedy="write the values into the file, with the parts that Hydra composes (defaults): HALOs writes such a "
            "config.yaml into the directory of a run",
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"a reference cannot be resolved: {str(error).splitlines()[0]}",
            where=shown,
            remedy="write the value itself, or leave the line out; an environment variable is ${oc.env:NAME}",
        ) from error
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}


def _halos(tree: Mapping[str, object]) -> str | None:
    return HALOS if sum(get_value(tree, mark) is not None for mark in halos.MARKS) >= 2 else None


def _rlinf(tree: Mapping[str, object]) -> str | None:
    own = any(isinstance(tree.get(name), Mapping) for name in rlinf.SECTIONS)
    return RLINF if own and isinstance(tree.get("actor"), Mapping) else None


def _check(c: Conversion) -> None:
    """Note what the loading of the recipe finds wrong, apart from the keys that the source does not have."""
    tree = c.as_tree()
    try:
        load_recipe(tree, in_memory=("actor.model.model_path", "data.train_data_paths"), files_must_exist=False)
    except ConfigError as problem:
        c.notes.append(f"the recipe does not load yet: {' '.join(str(problem).split())}")
