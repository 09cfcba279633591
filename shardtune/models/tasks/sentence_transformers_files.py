"""The files beside an encoder by which sentence-transformers loads it with its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardtune.errors import ConfigError
from shardtune.models.options import KEY

PACKAGE = "sentence_transformers.models"
POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}


MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"


def options_of(directory: Path) -> dict[str, Any]:
    """The options that a directory of sentence-transformers sets; none of any other.

    Raises:
        ConfigError: it has a module or a pooling that is none of an option's.
    """
    if not (directory / MODULES).is_file():
        return {}
    found: dict[str, Any] = {"normalize": False}
    for module in _read(directory / MODULES):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            found["pooling"] = _pooling(directory / module["path"] / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{directory} has a module {kind} of sentence-transformers, which would not be trained or saved",
                where=str(directory / MODULES),
                remedy="begin from a model of Transformer, Pooling and Normalize",
            )
    prompts = _read(directory / SETTINGS).get("prompts") or {} if (directory / SETTINGS).is_file() else {}
    return found | {f"{name}_prompt": prompts[name] for name in ("query", "document") if prompts.get(name)}


def _pooling(file: Path) -> str:
    settings = _read(file)
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


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def files(options: Any, width: int, most: int) -> dict[str, object]:
    """The files by name, as JSON.

    Args:
        options: of an embedding model.
        width: of its vectors.
        most: tokens of a text.
    """
    names = ["Transformer", "Pooling", *(["Normalize"] if options.normalize else [])]
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": f"{PACKAGE}.{name}"}
        for place, name in enumerate(names)
    ]
    pooling = {f"pooling_mode_{name}": kind == options.pooling for kind, name in POOLINGS.items()}
    prompts = {"query": options.query_prompt, "document": options.document_prompt}
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": most, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if options.normalize else "dot",
        },
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling, "include_prompt": True},
    }
