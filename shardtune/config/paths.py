"""Makes the paths in a recipe absolute; distinguishes a path from a name on the Hub."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardtune.config.model_names import POLICIES
from shardtune.config.tree import Tree, get_value, set_value
from shardtune.config.values import FUNCTION_IN_FILE, TASK_FILES
from shardtune.errors import ConfigError, cut

FORMATS = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
MODEL_KEYS = ("actor.model.model_path", "actor.tokenizer.tokenizer_model", "actor.teacher.model_path")
FUNCTION_KEYS = (
    *("actor.worker", "actor.model.adapter", "actor.loss", "actor.optim.name", "data.transform"),
    *("eval.match", "eval.environment", "runner.callbacks", "eval.metrics"),
    "runner.logger.logger_backends",
)
TEMPLATE_KEY = "data.chat_template"
TASK_KEY = "eval.harness"
FILE_KEYS = ("actor.model.lora.load_from", "actor.model.action_statistics", "data.chat_template", "data.quarantine")
PATH_KEYS = {
    **dict.fromkeys(key for key in FILE_KEYS if key != TEMPLATE_KEY),
    "data.cache_dir": None,
    "runner.resume_dir": "auto",
}
"""Keys that hold a path, and the word in its place that is none."""

OPTION_KEYS: Mapping[str, tuple[str, ...]] = {
    "actor.model.options.vlm_model_name": (),
    "actor.model.options.paligemma_variant": ("gemma_2b", "gemma_300m"),
    "actor.model.options.pretrained_backbone_weights": (),
}
"""Options of ready policies that may name a file or directory, and the words in its place that are none."""

DATA_KEYS = ("data.train_data_paths", "data.eval_data_paths")
ALL_KEYS = (
    *("plugins", "runner.logger.log_path", *MODEL_KEYS, *FUNCTION_KEYS, *PATH_KEYS),
    *(TEMPLATE_KEY, *OPTION_KEYS, *DATA_KEYS),
)
"""All keys that may hold a path."""


def user_path(text: str | Path, where: str | None) -> Path:
    """A path that a user gave, with `~` expanded.

    Args:
        text: as given.
        where: the key, override or argument, for the message.

    Raises:
        ConfigError: it is no text and no path; `~name` of no user; or a name that no file can have.
    """
    if not isinstance(text, str | os.PathLike):
        raise ConfigError(f"{cut(repr(text))} is no path", where=where, remedy="give the path of a file or directory")
    try:
        path = Path(text).expanduser()
        reason = _never_a_path(path)
    except RuntimeError as error:  # of `~name`
        path, reason = Path(text), str(error)
    if reason is not None:
        raise ConfigError(
            f"{cut(str(text))} cannot be a path: {reason}", where=where, remedy="give the path of a file or directory"
        )
    return path


def _never_a_path(path: Path) -> str | None:
    """Why no file can have a path; whether there is one is for those who open it to find."""
    if "\0" in str(path):
        return "it holds a zero byte"
    try:
        path.lstat()
    except OSError as error:
        return error.strerror if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else None
    return None


def make_absolute(tree: Tree, base: Path, origins: Mapping[str, str] | None = None) -> None:
    """Make every path of a resolved recipe absolute, in place.

    Args:
        tree: the recipe, all keys present and valid; or some of its keys.
        base: the recipe's directory, which all paths but the log path are relative to; that one is relative to the
            working directory.
        origins: dotted key -> where it was given, for messages.

    Raises:
        ConfigError: a path that cannot be one.
    """
    changes: list[tuple[Iterable[str], Callable[[str], str]]] = [
        (["plugins"], lambda text: _plugin(text, base)),
        (["runner.logger.log_path"], lambda path: _absolute(path, Path.cwd())),
        ((*MODEL_KEYS, *_option_keys(tree)), lambda text: _model(text, base)),
        (FUNCTION_KEYS, lambda text: _function(text, base)),
        ([TEMPLATE_KEY], lambda text: _template(text, base)),
        ([TASK_KEY], lambda text: _absolute(text, base) if text.endswith(TASK_FILES) else text),
        ([key for key, special in PATH_KEYS.items() if get_value(tree, key) != special], lambda p: _absolute(p, base)),
    ]
    for keys, change in changes:
        for key in keys:
            with _named(key, origins):
                _change(tree, key, change)
    for key in DATA_KEYS:
        sources = get_value(tree, key)
        if sources is not None:
            with _named(key, origins):
                set_value(tree, key, _sources(sources, base))


@contextmanager
def _named(key: str, origins: Mapping[str, str] | None) -> Iterator[None]:
    """Adds the key and its place to the error for a path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.what}", where=(origins or {}).get(key), remedy=error.remedy) from error


def named_files(tree: Tree) -> Iterator[tuple[str, str]]:
    """(key, path) of every single file or directory that an absolute recipe names, except data files."""
    for key in ("plugins", *MODEL_KEYS, *_option_keys(tree), *FILE_KEYS, TASK_KEY):
        yield from ((key, path) for path in _texts(get_value(tree, key)) if os.path.isabs(path))
    for key in FUNCTION_KEYS:
        found = (FUNCTION_IN_FILE.fullmatch(text) for text in _texts(get_value(tree, key)))
        yield from ((key, match["file"]) for match in found if match)


def _option_keys(tree: Tree) -> list[str]:
    """The keys of `OPTION_KEYS` that name a path, unless the options may be those of another model."""
    model_type = get_value(tree, "actor.model.model_type")
    if get_value(tree, "actor.model.adapter") is not None or not (model_type is None or model_type in POLICIES):
        return []
    return [key for key, words in OPTION_KEYS.items() if get_value(tree, key) not in (None, *words)]


def data_paths(value: object) -> Iterator[str]:
    """The paths and names in a data key: text, an entry, a list of them, or named sets of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from data_paths(item)
    elif isinstance(value, dict):
        yield from data_paths(value["path"] if "path" in value else list(value.values()))


def _change(tree: Tree, key: str, change: Callable[[str], str]) -> None:
    """Replace the text, or each text of the list, that a key holds; null stays null."""
    value = get_value(tree, key)
    if isinstance(value, str):
        set_value(tree, key, change(value))
    elif isinstance(value, list):
        set_value(tree, key, [change(text) if isinstance(text, str) else text for text in value])


def _texts(value: object) -> list[str]:
    """The texts of a key that holds one, a list of them, or null."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _absolute(path: str, base: Path) -> str:
    return os.path.normpath(user_path(base / user_path(path, None), None))


def exists(path: Path) -> bool:
    """Whether there is a file or directory; false for a name that none can have."""
    try:
        return path.exists()
    except OSError:  # its name is too long
        return False


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..")


def _model(text: str, base: Path) -> str:
    """A model's directory made absolute; `org/name` that is no directory here is left as a Hub name."""
    return _absolute(text, base) if _looks_like_path(text) or exists(base / text) else text


def _template(text: str, base: Path) -> str:
    """A template's file made absolute; a word that names no file here may name a template of the tokenizer."""
    return _absolute(text, base) if "/" in text or Path(text).suffix or exists(base / text) else text


def _plugin(text: str, base: Path) -> str:
    return _absolute(text, base) if text.endswith(".py") or "/" in text else text


def _function(text: str, base: Path) -> str:
    found = FUNCTION_IN_FILE.fullmatch(text)
    return f"{_absolute(found['file'], base)}:{found['name']}" if found else text


def _sources(value: object, base: Path) -> object:
    """All paths in a data key: text, an entry, a list of them, or named sets of these."""
    if isinstance(value, list):
        return [_sources(item, base) for item in value]
    if isinstance(value, dict):
        if "path" in value:
            return {**value, "path": _sources(value["path"], base)}
        return {name: _sources(item, base) for name, item in value.items()}
    return _source(value, base) if isinstance(value, str) else value


def _source(text: str, base: Path) -> str:
    if "://" in text:
        return text
    path = _looks_like_path(text) or glob.has_magic(text) or Path(text).suffix.lower() in FORMATS + COMPRESSIONS
    return _absolute(text, base) if path or exists(base / text) else text
