"""Making the paths in a recipe absolute, and telling a path from a name on the Hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardtune.config.values import FUNCTION_IN_FILE

FORMATS = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
FUNCTION_KEYS = (
    *("actor.worker", "actor.model.adapter", "actor.loss", "data.transform"),
    *("eval.match", "eval.environment"),
)
FUNCTION_LISTS = ("runner.callbacks", "eval.metrics")


def make_absolute(tree: dict[str, Any], base: Path) -> None:
    """Make every path of a resolved recipe absolute, in place.

    Args:
        tree: the recipe, all keys present and valid.
        base: the recipe's directory, which paths are relative to; the log path alone starts at the working directory.
    """
    runner, model, data = tree["runner"], tree["actor"]["model"], tree["data"]
    tree["plugins"] = [_plugin(plugin, base) for plugin in tree["plugins"]]
    _change(runner["logger"], "log_path", lambda path: _absolute(path, Path.cwd()))
    if runner["resume_dir"] != "auto":
        _change(runner, "resume_dir", lambda path: _absolute(path, base))
    for holder, name in ((model, "model_path"), (tree["actor"]["tokenizer"], "tokenizer_model")):
        _change(holder, name, lambda path: _model(path, base))
    _change(model["lora"], "adapter_path", lambda path: _absolute(path, base))
    _change(model, "action_statistics", lambda path: _absolute(path, base))
    for holder, name in (_place(tree, dotted) for dotted in FUNCTION_KEYS):
        _change(holder, name, lambda text: _function(text, base))
    for holder, name in (_place(tree, dotted) for dotted in FUNCTION_LISTS):
        holder[name] = [_function(text, base) for text in holder[name]]
    if data["chat_template"] != "chatml":
        _change(data, "chat_template", lambda path: _absolute(path, base))
    _change(data, "cache_dir", lambda path: _absolute(path, base))
    for name in ("train_data_paths", "eval_data_paths"):
        data[name] = _sources(data[name], base)


def named_files(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, path) of every single file or directory that an absolute recipe names, data files excepted."""
    for plugin in tree["plugins"]:
        if os.path.isabs(plugin):
            yield "plugins", plugin
    model, data = tree["actor"]["model"], tree["data"]
    local = {
        "actor.model.model_path": model["model_path"],
        "actor.tokenizer.tokenizer_model": tree["actor"]["tokenizer"]["tokenizer_model"],
        "actor.model.lora.adapter_path": model["lora"]["adapter_path"],
        "actor.model.action_statistics": model["action_statistics"],
        "data.chat_template": data["chat_template"],
    }
    yield from ((key, path) for key, path in local.items() if path is not None and os.path.isabs(path))
    for key in FUNCTION_KEYS + FUNCTION_LISTS:
        holder, name = _place(tree, key)
        for text in holder[name] if key in FUNCTION_LISTS else [holder[name]]:
            found = FUNCTION_IN_FILE.fullmatch(text or "")
            if found:
                yield key, found["file"]


def _place(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a key, and the key's name in it."""
    *sections, name = dotted.split(".")
    for section in sections:
        tree = tree[section]
    return tree, name


def _change(holder: dict[str, Any], name: str, change: Callable[[str], str]) -> None:
    if holder[name] is not None:
        holder[name] = change(holder[name])


def _absolute(path: str, base: Path) -> str:
    return os.path.normpath(base / Path(path).expanduser())


def _says_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..")


def _model(text: str, base: Path) -> str:
    """A model's directory made absolute; `org/name` that is no directory here is left as a Hub name."""
    return _absolute(text, base) if _says_path(text) or (base / text).exists() else text


def _plugin(text: str, base: Path) -> str:
    return _absolute(text, base) if text.endswith(".py") or "/" in text else text


def _function(text: str, base: Path) -> str:
    found = FUNCTION_IN_FILE.fullmatch(text)
    return f"{_absolute(found['file'], base)}:{found['name']}" if found else text


def _sources(value: Any, base: Path) -> Any:
    """All paths in a data key: text, an entry, a list of them, or named sets of these."""
    if isinstance(value, list):
        return [_sources(item, base) for item in value]
    if isinstance(value, dict):
        if "path" in value:
            return {**value, "path": _source(value["path"], base)}
        return {name: _sources(item, base) for name, item in value.items()}
    return _source(value, base) if isinstance(value, str) else value


def _source(text: str, base: Path) -> str:
    if "://" in text:
        return text
    path = _says_path(text) or glob.has_magic(text) or Path(text).suffix.lower() in FORMATS + COMPRESSIONS
    return _absolute(text, base) if path or (base / text).exists() else text
