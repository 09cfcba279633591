"""A command line of another trainer (`trl sft --learning_rate 2e-5 …`) as the mapping of its configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from shardtune.config.foreign import llama_factory, swift, verl_command
from shardtune.config.foreign.launch import Launch
from shardtune.config.foreign.launch_keys import SHORT, SWITCHES, TABLES
from shardtune.config.foreign.refusals import refuse_command, refuse_llama_factory
from shardtune.config.foreign.trainers import SWIFT, TRAINERS, VERL
from shardtune.config.recipe_file import RecipeLoader
from shardtune.errors import ConfigError

LAUNCHERS = {
    **{name: name for name in ("accelerate", "torchrun", "deepspeed", "python")},
    "accelerate-launch": "accelerate",
    "python3": "python",
}
"""The words that start a launcher, and its name."""
MODULES = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
"""The launchers that Python runs as modules."""
PROGRAMS = ("trl", "sft", llama_factory.COMMAND, "train", "axolotl", swift.COMMAND, "pt")
SCRIPTS = "trl.scripts."
TUNE = ["tune", "run"]
"""torchtune's command: options of torchrun, one of its recipes, `--config FILE`, and keys of the file (`lr=1e-5`)."""
FINE_TUNING = ("finetune", "knowledge_distillation")
"""What the names of its recipes that are converted have in them."""
AUTOMODEL = "automodel"
"""NeMo Automodel's command: a file, options of torchrun, and keys of the file as flags (`--optimizer.lr 1e-5`)."""
OF_AUTOMODEL = ("finetune", "pretrain", "kd", "llm", "vlm")
"""The words before the file in its older form, `automodel finetune llm -c FILE`."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""A word before a command that sets a variable of its environment."""
OFF = "no_"
CONFIG_FILE = "job.config_file"
"""torchtitan's flag for its file; the others are keys of it (`--training.steps 10`)."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words after `shardtune convert`.

    Attributes:
        file: a configuration, whose keys `values` change; None: there is none.
        values: of the flags, by name with underscores.
        launch: what the program was started with; None: nothing.
        keys: dotted keys that replace those of the file.
        environment: the variables that were set for the command, by name.
        trainer: whose command it is, where its words say so; a word of `TRAINERS`.
    """

    file: Path | None
    values: Mapping[str, object] = field(default_factory=dict)
    launch: Launch | None = None
    keys: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    trainer: str | None = None


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Read the words of a command line of another trainer, also as one word in quotes, or the name of its file.

    A flag without a value is true, `--no_NAME` is false, and one with several values is a list, as transformers'
    `HfArgumentParser` reads them.

    Raises:
        ConfigError: a quote is not closed, a flag is given twice, there are two files, or the command is one of TRL's
            or torchtune's that does not fine-tune.
    """
    environment, words = _environment(_words(words))
    if words[:2] == TUNE:
        return replace(_tune(words[2:]), environment=environment)
    if words[:1] == [AUTOMODEL]:
        return replace(_automodel(words[1:]), environment=environment)
    place = verl_command.place_of(words)
    if place is not None:
        return replace(_verl(words, place), environment=environment)
    launch, given = _launcher(words)
    refuse_command(words, given)
    if given[:1] == [llama_factory.COMMAND]:
        refuse_llama_factory(given, environment)
        launch, environment = _by_variables(launch, environment, llama_factory.COMMAND)
    if given[:1] == [swift.COMMAND]:
        launch, environment = _by_variables(launch, environment, swift.COMMAND)
    if given[:1] == ["trl"] and len(given) > 1 and not given[1].startswith("-") and given[1] not in PROGRAMS:
        raise _no_fine_tuning(given[1])
    files, values = _flags(given)
    files = [name for name in files if name not in PROGRAMS]
    files += [str(values.pop(name)) for name in ("config", CONFIG_FILE) if name in values]
    if len(files) > 1:
        raise ConfigError(f"one configuration is converted, not {' and '.join(files)}", where="shardtune convert")
    file = Path(files[0]) if files else None
    keys = {name: values.pop(name) for name in [*values] if "." in name and file is not None and file.suffix == ".toml"}
    trainer = SWIFT if given[:1] == [swift.COMMAND] else None
    is_pt = trainer is not None and given[1:2] == ["pt"]
    values = {"use_chat_template": False, **values} if is_pt else values
    return CommandLine(file, values, launch, keys, environment, trainer)


def _words(given: Sequence[str]) -> list[str]:
    """The words of a command; a single one that has a program's words or flags in it is a line of a shell."""
    line = given[0] if len(given) == 1 else ""
    first, *rest = line.split() or [""]
    is_command = first in (*LAUNCHERS, *PROGRAMS, swift.MEGATRON, *TUNE, AUTOMODEL) or " -" in f" {line}"
    if not rest or not is_command or Path(line).exists():
        return [*given]
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read as a line of a shell: {error}", where=line, remedy="close the quote"
        ) from error


def _environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are set in front of a command, and its words."""
    first = int(words[:1] == ["env"])
    last = next((place for place, word in enumerate(words[first:], first) if not ASSIGNMENT.match(word)), first)
    pairs = (word.partition("=") for word in words[first:last])
    return {name: value for name, _, value in pairs}, [*words[last:]]


def _by_variables(
    launch: Launch | None, environment: Mapping[str, str], command: str
) -> tuple[Launch | None, dict[str, str]]:
    """What a command of LLaMA-Factory or ms-swift starts by variables (`NPROC_PER_NODE=4`), and the other variables."""
    names = llama_factory.RANKS
    if launch is not None or names["nproc_per_node"] not in environment:
        return launch, {**environment}
    options: dict[str, object] = {option: environment[name] for option, name in names.items() if name in environment}
    rest = {name: value for name, value in environment.items() if name not in names.values()}
    return Launch("torchrun", options, command, names), rest


def _tune(words: Sequence[str]) -> CommandLine:
    """The words after `tune run`."""
    options, rest = _options("torchrun", words)
    recipe, given = "".join(rest[:1]), [*rest[1:]]
    if not recipe.endswith(".py") and not any(kind in recipe for kind in FINE_TUNING):
        raise ConfigError(
            f"tune run {recipe} is no supervised fine-tuning" if recipe else "the recipe of tune run is missing",
            where="tune run",
            remedy="give tune run full_finetune_single_device --config FILE, or one of the others that fine-tune",
        )
    place = next((place for place, word in enumerate(given) if word.partition("=")[0] in ("--config", "-c")), None)
    if place is None or (given[place] in ("--config", "-c") and place + 1 == len(given)):
        raise ConfigError("it has no --config", where=f"tune run {recipe}", remedy="add --config FILE")
    flag, _, name = given.pop(place).partition("=")
    file = Path(name or given.pop(place))
    if not file.suffix and not file.exists():
        raise ConfigError(
            f"{file} is a configuration inside of torchtune",
            where=f"tune run {recipe} {flag} {file}",
            remedy=f"copy it with tune cp {file} config.yaml, and name that file",
        )
    for word in given:
        if "=" not in word or word.startswith("-"):
            raise ConfigError(f"{word} is no key=value", where=f"tune run {recipe}", remedy="put it into the file")
    pairs = (word.partition("=") for word in given)
    return CommandLine(file, {}, Launch("torchrun", options, "tune run"), {key: _read(text) for key, _, text in pairs})


def _automodel(words: Sequence[str]) -> CommandLine:
    """The words after `automodel`."""
    files: list[str] = []
    given: dict[str, object] = {}
    place = 0
    while place < len(words):
        flag, equals, value = words[place].partition("=")
        place += 1
        if not _is_flag(flag):
            files += [words[place - 1]] if flag not in OF_AUTOMODEL or given else []
            continue
        if not equals and place < len(words) and not _is_flag(words[place]):
            value, equals, place = words[place], "=", place + 1
        name = flag.lstrip("-").replace("nproc-per-node", "nproc_per_node")
        if not name or (name in ("c", "config") and not value):
            raise ConfigError(f"{flag} has no {'value' if name else 'name'}", where=AUTOMODEL, remedy="leave it out")
        if name in given:
            raise ConfigError(f"{flag} is given twice", where=AUTOMODEL, remedy="keep one of them")
        given[name] = value if equals else "true"
    files += [str(given.pop(name)) for name in ("c", "config") if name in given]
    if len(files) != 1:
        raise ConfigError(
            f"one configuration is converted, not {' and '.join(files) or 'none'}",
            where=AUTOMODEL,
            remedy=f"give {AUTOMODEL} FILE, with --nproc-per-node N and keys of the file (--optimizer.lr 1e-5)",
        )
    for name in given:
        outer = next((one for one in given if name.startswith(f"{one}.")), None)
        if outer is not None:
            raise ConfigError(f"--{outer} and --{name} set the same keys", where=AUTOMODEL, remedy="keep one of them")
    options = {name: text for name, text in given.items() if name in RANKS_OF}
    keys = {name: _read(str(text)) for name, text in given.items() if name not in RANKS_OF}
    return CommandLine(Path(files[0]), {}, Launch("torchrun", options, AUTOMODEL), keys)


RANKS_OF = ("nproc_per_node", "nnodes")


def _verl(words: Sequence[str], place: int) -> CommandLine:
    """A command with a module or script of verl's at a place; Ray, or a plain `python`, starts ranks by its keys."""
    file, keys, chosen = verl_command.read(words[place], words[place + 1 :], _read)
    launch, _ = _launcher(words[: place + 1])
    counts = launch is not None and launch.program != "python"
    return CommandLine(file, {"overrides": chosen} if chosen else {}, launch if counts else None, keys, trainer=VERL)


def _no_fine_tuning(command: str) -> ConfigError:
    return ConfigError(
        f"trl {command} is no supervised fine-tuning",
        where=f"trl {command}",
        remedy="shardtune trains one model by the tokens of its rows, as trl sft does; keep TRL for others, or write "
        "the method on the engine (docs/your-method.md)",
    )


def _launcher(words: Sequence[str]) -> tuple[Launch | None, list[str]]:
    """What the program is started with, and the words behind the script or module."""
    if not words or words[0] not in LAUNCHERS:
        return None, list(words)
    program, shown, rest = LAUNCHERS[words[0]], words[0], list(words[1:])
    if program == "accelerate" and rest[:1] == ["launch"]:
        shown, rest = f"{shown} launch", rest[1:]
    options, rest = _options(program, rest)
    if program == "python" and "module" in options and rest and rest[0] in MODULES:
        program, shown = MODULES[rest[0]], rest[0]
        options, rest = _options(program, rest[1:])
    module = rest[0] if rest and "module" in options else ""
    if module.startswith(SCRIPTS) and module != f"{SCRIPTS}sft":
        raise _no_fine_tuning(module.removeprefix(SCRIPTS))
    given = ["trl", *rest[1:]] if rest and Path(rest[0]).name == "trl" else rest[1:]
    return Launch(program, options, shown), given


def _options(program: str, words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """The options of a launcher, as text and by name, and the words from its program on."""
    table, switches = TABLES[program], SWITCHES[program]
    found: dict[str, object] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        flag, equals, value = words[place].partition("=")
        name = flag.lstrip("-").replace("-", "_")
        name = name if flag.startswith("--") else SHORT[program].get(name, name)
        if name in found:
            raise ConfigError(f"{flag} is given twice", where=flag, remedy="keep one of them")
        place += 1
        following = words[place] if place < len(words) else "-"
        is_script = name not in table and following.endswith(".py")
        if equals or name in switches or is_script or _is_flag(following):
            found[name] = value if equals else True
        else:
            found[name] = following
            place += 1
    return found, list(words[place:])


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _flags(words: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """The words before the first flag, and the values of the flags."""
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    found: dict[str, list[str]] = {}
    name = ""
    for word in words[first:]:
        if not word.startswith("--"):
            found[name].append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in found:
            raise ConfigError(f"{flag} is given twice", where=flag, remedy="keep one of them")
        found[name] = [value] if equals else []
    return [*words[:first]], dict(_value(name, values) for name, values in found.items())


def _value(name: str, given: Sequence[str]) -> tuple[str, object]:
    if not given:
        section, dot, key = name.rpartition(".")
        plain = f"{section}{dot}{key.removeprefix(OFF)}"
        off = key.startswith(OFF) and any(plain in trainer.table for trainer in TRAINERS.values())
        return (plain, False) if off else (name, True)
    values = [_read(text) for text in given]
    return name, values[0] if len(values) == 1 else values


def _read(text: str) -> object:
    """A value as YAML would have it; text that is no YAML, or would be a mapping by a colon in it, stays text."""
    try:
        value = yaml.load(text, RecipeLoader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict | list) and text[:1] not in ("{", "[") else value
