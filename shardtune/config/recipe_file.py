"""Reads a recipe: a YAML file, with line numbers for error messages, or a mapping in memory."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import DictConfig, OmegaConf

from shardtune.config.layers import Layer
from shardtune.config.tree import Tree
from shardtune.errors import ConfigError

MOST_BYTES = 1 << 24
MOST_VALUES = 100_000
"""Of a recipe, those that aliases (`*name`) repeat counted each time."""
MOST_LEVELS = 50
SHOWN = 3
"""Names of other files in a message, at most."""
"""How deep lists and mappings may be nested, in a recipe or an override."""
SHOW_KEYS = "a recipe starts like this: model: {model_path: …}; docs/configuration.md lists all keys"


HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


BASE_SIXTY, BASE_EIGHT = re.compile("[-+]?[0-9][0-9_]*:"), re.compile("[-+]?0[0-7_]*[1-9]")


class OtherBase(yaml.constructor.ConstructorError):
    """A number of base 8 or 60, which few would read as YAML does."""


class RecipeConstructor(yaml.constructor.SafeConstructor):
    """Refuses duplicate keys, keys that are no words, and numbers that YAML reads in base 8 or 60; joins the two halves
    of an emoji that JSON escapes."""

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number. Raises `OtherBase` for `010`, which would be 8, and `1:30`, which would be 90."""
        read = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        value, text = read(node), str(node.value)
        base = 60 if BASE_SIXTY.match(text) else 8 if isinstance(value, int) and BASE_EIGHT.match(text) else 0
        if base:
            raise OtherBase(None, None, f"YAML reads {text} as {value}, in base {base}", node.start_mark)
        return value

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and HALVES.search(value):
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, "a key is a word, not a list or mapping", name.start_mark
                )
            if name.value in seen and name.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"duplicate key {name.value}", name.start_mark
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)


_constructor: Any = RecipeConstructor  # add_constructor is typed for loaders, which derive from constructors
for _tag in ("int", "float"):
    _constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", RecipeConstructor.construct_number)


class RecipeLoader(RecipeConstructor, yaml.SafeLoader):
    """YAML as OmegaConf and Hydra read it: `1e-5` is a number, a date is text, and duplicate keys are refused."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


STORED_LOADER: type[yaml.SafeLoader] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # type: ignore[assignment]
EXPONENT_WITHOUT_DOT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|[-+]?[0-9][0-9_]*\.[0-9_]*[eE][0-9]+$")
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_WITHOUT_DOT, list("-+0123456789"))


class QuickRecipeLoader(RecipeConstructor, STORED_LOADER):
    """The same by libyaml, where it is: 10 times faster; its messages are others."""

    yaml_implicit_resolvers: ClassVar = RecipeLoader.yaml_implicit_resolvers


def read_file(path: Path) -> Layer:
    """The recipe in a YAML file; a file that is missing, empty, broken or no mapping raises a ConfigError."""
    shown = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError as error:
        raise ConfigError("there is no such recipe", where=shown, remedy=_beside(path)) from error
    except IsADirectoryError as error:
        raise ConfigError(
            "a recipe is a YAML file, and this is a directory", where=shown, remedy=_beside(path)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe is not UTF-8 text: {error.reason}", where=shown) from error
    except OSError as error:
        raise ConfigError(f"the recipe cannot be read: {error.strerror}", where=shown) from error
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"the recipe is larger than {MOST_BYTES >> 20} MB", where=shown, remedy="name a recipe, not a file of data"
        )
    if path.suffix == ".toml":
        remedy = f"a file of torchtitan becomes one: shardtune convert {shown} -o recipe.yaml"
        raise ConfigError("a recipe is a YAML file, and this is TOML", where=shown, remedy=remedy)
    try:
        node, tree = _parsed(text)
    except Exception as error:  # the parser raises many kinds: a number of thousands of digits, thousands of brackets
        raise _broken(error, shown) from error
    if node is None:
        raise ConfigError("the recipe is empty", where=shown, remedy=SHOW_KEYS)
    if not isinstance(node, yaml.MappingNode) or not isinstance(tree, dict):
        line = node.start_mark.line + 1
        raise ConfigError(
            f"a recipe is a mapping of keys, and this is a {'list' if isinstance(tree, list) else 'single value'}",
            where=f"{shown}:{line}",
            remedy=SHOW_KEYS,
        )
    return Layer(_named(tree, shown), shown, dict(_lines(node)))


def read_stored(text: str) -> Any:
    """The value of YAML that shardtune wrote, as `yaml.safe_load` reads it; by libyaml, 10 times faster, where it is.

    Raises:
        yaml.YAMLError: no YAML.
    """
    return yaml.load(text, STORED_LOADER)


def read_value(text: str) -> object:
    """The value that YAML reads a text as, in a recipe: a number, a list; the text itself where it cannot be read."""
    try:
        return _parsed(text)[1]
    except Exception:  # the parser raises many kinds
        return text


def _parsed(text: str) -> tuple[yaml.Node | None, object]:
    """The document of a text, None for an empty one, and the value it stands for."""
    try:
        _check_levels(text)
        return _parsed_by(QuickRecipeLoader(text))
    except Exception:  # whatever it is, the other parser's message is the one that is shown
        return _parsed_by(RecipeLoader(text))


def _check_levels(text: str) -> None:
    """Refuse what is too deep for the stack of libyaml's composer, whose overflow would end the process.

    Raises:
        RecursionError: lists and mappings are nested too deep.
    """
    level = 0
    for event in yaml.parse(text, QuickRecipeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise RecursionError


def _parsed_by(loader: RecipeLoader | QuickRecipeLoader) -> tuple[yaml.Node | None, object]:
    node = loader.get_single_node()
    if node is None:
        return None, None
    _measure(node, {}, 0)
    return node, loader.construct_document(node)  # which merges `<<` into the nodes


def read_mapping(recipe: Mapping[str, object] | DictConfig) -> Layer:
    """A recipe in memory: a dict or an OmegaConf config, interpolation not resolved yet."""
    values = _plain(recipe)
    return Layer(_named(values if isinstance(values, dict) else {}, "recipe"), "recipe")


def unresolved(config: DictConfig) -> dict[str, object]:
    """The values of an OmegaConf config, interpolation left as written."""
    values = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}


def _beside(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    found = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, found, n=SHOWN)
    if near:
        return f"did you mean {' or '.join(str(path.with_name(name)) for name in near)}?"
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{folder} holds: {', '.join(found[:SHOWN])}{more}" if found else "name a YAML file"


def _measure(node: yaml.Node, counted: dict[yaml.Node, int | None], level: int) -> int:
    """The number of values in a node; those of an alias count at each of its places, and are visited once.

    Raises:
        yaml.constructor.ConstructorError: too many, too deep, or an anchor inside itself.
    """
    problem = None
    if node in counted:
        count = counted[node]
        if count is not None:
            return count
        problem = "an anchor (&) that holds its own alias (*)"
    elif level > MOST_LEVELS:
        problem = f"nested more than {MOST_LEVELS} levels deep"
    if problem is None:
        counted[node] = None
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [part for pair in inner for part in pair] if isinstance(node, yaml.MappingNode) else inner
        counted[node] = count = 1 + sum(_measure(part, counted, level + 1) for part in nodes)
        if count <= MOST_VALUES:
            return count
        problem = f"more than {MOST_VALUES:,} values"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _broken(error: Exception, shown: str) -> ConfigError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
    if isinstance(error, RecursionError):
        problem = f"nested more than {MOST_LEVELS} levels deep"
    where = f"{shown}:{mark.line + 1}, column {mark.column + 1}" if mark else shown
    if isinstance(error, OtherBase):
        return ConfigError(str(problem), where=where, remedy="write the number that is meant, or put it in quotes")
    return ConfigError(
        f"the recipe is not valid YAML: {problem}",
        where=where,
        remedy="check indentation (spaces, no tabs), the space after a key's colon, and quotes",
    )


def _named(tree: Mapping[object, object], shown: str) -> Tree:
    wrong = [name for name in tree if not isinstance(name, str)]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not the name of a key", where=shown, remedy=SHOW_KEYS)
    return {str(name): value for name, value in tree.items()}


def _plain(value: object) -> object:
    """Mappings, sequences and paths as the dicts, lists and text that YAML would give."""
    if isinstance(value, DictConfig):
        return OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lines(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line) of all keys, from the parser's marks."""
    for name, value in node.value:
        dotted = f"{prefix}{name.value}"
        yield dotted, name.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, f"{dotted}.")
