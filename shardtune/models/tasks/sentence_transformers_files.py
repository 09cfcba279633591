"""The files beside an encoder by which sentence-transformers loads it with its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from shardtune.errors import ConfigError
from shardtune.models.options import KEY

T = TypeVar("T")
PACKAGE = "sentence_transformers.models"
POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
TEXT_SETTINGS = "sentence_*_config.json"
DOCUMENT = ("document", "passage", "corpus")
"""Names of the prompt of documents, in the order in which sentence-transformers looks for it."""
REPAIR = "repair it, or remove modules.json, by which the directory is one of sentence-transformers"


def options_of(directory: Path) -> dict[str, Any]:
    """The options that a directory of sentence-transformers sets; none of any other.

    Vectors without a module that normalises them are compared by cosine all the same, unless it names another way.

    Raises:
        ConfigError: it has a module, a pooling or a setting that is none of an option's, or a file cannot be read.
    """
    if not (directory / MODULES).is_file():
        return {}
    settings = settings_of(directory)
    if settings.get("truncate_dim"):
        what, remedy = (
            f"cuts vectors to truncate_dim: {settings['truncate_dim']}",
            f"remove it, and name {KEY}.matryoshka",
        )
        raise _unknown(f"{what}, and whole ones are trained", directory / SETTINGS, remedy)
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise _unknown(f"compares vectors by {similarity}", directory / SETTINGS, "give one of cosine or dot")
    found: dict[str, Any] = {"normalize": similarity == "cosine"}
    for module in _modules(directory):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            found["pooling"] = _pooling(directory / str(module.get("path")) / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{directory} has a module {kind} of sentence-transformers, which would not be trained or saved",
                where=str(directory / MODULES),
                remedy="begin from a model of Transformer, Pooling and Normalize",
            )
    prompts = settings["prompts"]
    document = next((name for name in DOCUMENT if prompts.get(name)), "")
    named = {"query_prompt": prompts.get("query"), "document_prompt": prompts.get(document)}
    return found | {name: prompt for name, prompt in named.items() if prompt}


def settings_of(directory: Path | None) -> dict[str, Any]:
    """What a directory of sentence-transformers sets for the whole model; its `prompts` are a dictionary in any case.

    Raises:
        ConfigError: the file cannot be read, or its prompts are no texts by name.
    """
    file = None if directory is None or not (directory / MODULES).is_file() else directory / SETTINGS
    found = _read(file, dict) if file is not None and file.is_file() else {}
    prompts = found.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise _unknown(f"has the prompts {prompts!r:.80}", file, 'write texts by name: {"query": "query: "}')
    return {**found, "prompts": {name: text for name, text in prompts.items() if text is not None}}


def lowers_text(directory: Path | None) -> bool:
    """Whether a directory of sentence-transformers writes texts in small letters before its tokenizer reads them."""
    if directory is None or not (directory / MODULES).is_file():
        return False
    return any(_read(file, dict).get("do_lower_case") for file in directory.glob(TEXT_SETTINGS))


def _modules(directory: Path) -> list[dict[str, Any]]:
    found = _read(directory / MODULES, list)
    if not all(isinstance(module, dict) and isinstance(module.get("path"), str) for module in found):
        raise _unknown("does not list modules with type and path", directory / MODULES, REPAIR)
    return found


def _pooling(file: Path) -> str:
    settings = _read(file, dict)
    if settings.get("include_prompt") is False:
        raise _unknown(
            "leaves the tokens of prompts out of the pooling (include_prompt: false), which training does not",
            file,
            "begin from a model that pools all tokens",
        )
    given = [
        name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True and "_mode_" in name
    ]
    if isinstance(settings.get("pooling_mode"), str):  # as newer versions write it
        given = [settings["pooling_mode"]]
    names = {**{kind: kind for kind in POOLINGS}, **{kind: name for name, kind in POOLINGS.items()}}
    if len(given) == 1 and given[0] in names:
        return names[given[0]]
    raise ConfigError(
        f"the pooling of the directory is {', '.join(given) or 'not given'}",
        where=str(file),
        remedy=f"{KEY}.pooling may be {', '.join(POOLINGS)}",
    )


def _read(file: Path, kind: type[T]) -> T:
    """A file of JSON that has one dictionary, or one list."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unknown(f"cannot be read: {error}", file, REPAIR) from error
    if not isinstance(found, kind):
        raise _unknown(f"has a {type(found).__name__}, not a {kind.__name__}", file, REPAIR)
    return found


def _unknown(what: str, file: Path | None, remedy: str) -> ConfigError:
    return ConfigError(f"the directory of sentence-transformers {what}", where=str(file), remedy=remedy)


def files(options: Any, width: int, most: int, base: Path | None) -> dict[str, object]:
    """The files by name, as JSON.

    Args:
        options: of an embedding model.
        width: of its vectors.
        most: tokens of a text.
        base: the directory that training began from, whose other prompts stay.
    """
    names = ["Transformer", "Pooling", *(["Normalize"] if options.normalize else [])]
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": f"{PACKAGE}.{name}"}
        for place, name in enumerate(names)
    ]
    pooling = {f"pooling_mode_{name}": kind == options.pooling for kind, name in POOLINGS.items()}
    settings = settings_of(base)
    others = {name: options.document_prompt if name in DOCUMENT else text for name, text in settings["prompts"].items()}
    prompts = {**others, "query": options.query_prompt, "document": options.document_prompt}
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": most, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": prompts,
            "default_prompt_name": settings.get("default_prompt_name"),
            "similarity_fn_name": "cosine" if options.normalize else "dot",
        },
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling, "include_prompt": True},
    }
