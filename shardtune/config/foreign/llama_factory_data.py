"""LLaMA-Factory's data sets: what its dataset_info.json says of those that are named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardtune.config.foreign.conversion import DATA_SUFFIXES, Conversion, Kind, leaves, short
from shardtune.config.foreign.rows import (
    EVAL,
    FORMAT,
    ROLES,
    TRAIN,
    as_entries,
    entry,
    hold_out,
    of_evaluation,
    rows_of,
    split_of,
)
from shardtune.config.foreign.values import is_on, listed, number, whole
from shardtune.errors import ConfigError

INFO = "dataset_info.json"
PLACES = ("hf_hub_url", "script_url", "cloud_file_name", "file_name")
"""Where the rows are, the first one that is given."""
ELSEWHERE = ("ms_hub_url", "om_hub_url")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
OF_ALL = ("system", "tools", "images")
"""Columns that rows of each format have, under the same name here."""
MEDIA = "there is no video and no audio; single frames can be named as images: docs/vision.md"
PAIRS = "rows with one answer each; methods with preferences are in docs/your-method.md"
ROLE_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
EPOCHS: Mapping[str, Callable[[Iterable[float]], float]] = {"interleave_under": min, "interleave_over": max}
"""The rows of an epoch by those of the data sets, each divided by its share."""
SHARES = "share × (fewest rows / share of all, with interleave_over the most) / own rows"
KEYS = {"role_tag": ("role", "from"), "content_tag": ("content", "value")}
"""The keys of a message that are read."""


def convert(c: Conversion, stage: str) -> None:
    """Read the data sets of training and evaluation."""
    info = _info(c)
    training: list[dict[str, object]] = []
    for key, ours in (("dataset", TRAIN), ("eval_dataset", EVAL)):
        given = [str(name) for name in listed(c.get(key))]
        entries = [line for name in given if (line := _entry(c, name, info.get(name), stage, ours)) is not None]
        if ours == TRAIN:
            _weigh(c, entries, len(given))
            training = entries
        if entries:
            others = ("dataset_dir", "max_samples") if key == "dataset" else ()
            c.put(ours, as_entries(entries), key, *others, comment=key)
        elif given:
            c.missing(f"name the files, or data sets of the Hub: {ours}", key)
        _list_unknown(c, key, ours, info)
    hold_out(c, "val_size", training)


def _weigh(c: Conversion, entries: Sequence[dict[str, object]], sets: int) -> None:
    """Give data sets that are interleaved the weights that have their shares of an epoch."""
    how, both = str(c.get("mix_strategy", "concat")), ("mix_strategy", "interleave_probs")
    if how == "concat" or sets < 2:
        c.record("mix_strategy", Kind.DEFAULT, "all rows of all data sets")
        c.not_needed("nothing is interleaved", "interleave_probs")
        return
    shares = [number(share) or 0.0 for share in listed(c.get("interleave_probs", [1 / sets] * sets))]
    sizes = [rows_of(c, str(one["path"]), whole(one.get("max_samples"))) for one in entries]
    counted = [size for size in sizes if size]
    if how not in EPOCHS or not len(shares) == len(counted) == sets or not all(0 < share <= 1 for share in shares):
        c.missing(f"{TRAIN}: [{{path: FILE, weight: X}}], where an epoch has X × rows of each: {SHARES}", *both)
        return
    epoch = EPOCHS[how](size / share for size, share in zip(counted, shares, strict=True))
    for one, share, size in zip(entries, shares, counted, strict=True):
        weight = float(f"{share * epoch / size:.6g}")
        one |= {} if weight == 1 else {"weight": weight}
    for name in both:
        c.record(name, Kind.TRANSLATED, f"{TRAIN}: weight of each entry")
    c.notes.append(
        f"{how}: LLaMA-Factory draws once from which data set each row comes; here an epoch has exactly these shares, "
        "drawn anew in each epoch"
    )


def _folder(c: Conversion) -> str:
    return str(c.get("dataset_dir", "data"))


def _info(c: Conversion) -> Mapping[str, object]:
    """The entries of dataset_info.json; empty where it is not at hand."""
    file = c.target / c.path(_folder(c)) / INFO
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", where="dataset_dir", remedy="mend the file") from error
    return found if isinstance(found, dict) else {}


def _list_unknown(c: Conversion, key: str, ours: str, info: Mapping[str, object]) -> None:
    """Name the data sets of which only LLaMA-Factory's own name is known, and what to write for each."""
    folder = _folder(c)
    names = [str(name) for name in listed(c.get(key))]
    unknown = [name for name in names if name not in info and not name.endswith(DATA_SUFFIXES) and "/" not in name]
    if unknown and folder != "ONLINE":
        where = f"not in {folder}/{INFO}" if info else f"{folder}/{INFO} is not at hand"
        c.missing(
            f"{where}: in {ours} write the file or the name on the Hub for {', '.join(unknown)}"
            + ("" if info else " (run from LLaMA-Factory's folder, and they are found)"),
            key,
        )


def _entry(c: Conversion, name: str, known: object, stage: str, ours: str) -> dict[str, object] | None:
    """The entry of a data set, whose keys in dataset_info.json are recorded; None: its rows cannot be named."""
    limit = whole(c.get("max_samples"))
    if not isinstance(known, Mapping):
        path = c.path(name)
        columns = {"text": ALPACA["prompt"]} if stage == "pt" and _folder(c) == "ONLINE" else {}
        options = {"max_samples": limit, "columns": columns}
        return entry(path, **(of_evaluation(path, options) if ours == EVAL else options))
    prefix, kind = f"{INFO} {name}", str(known.get("formatting") or "alpaca")
    c.beside |= dict(leaves(known, f"{prefix}."))
    place = next((key for key in PLACES if known.get(key)), "")
    options, lost = split_of(known.get("split"))
    limits = [whole(one) for one in (options.get("max_samples"), known.get("num_samples"), limit)]
    options |= {
        "name": known.get("subset"),
        "max_samples": min((count for count in limits if count is not None), default=None),
        "columns": _columns(c, prefix, kind, known, stage),
    }
    line = None
    if place and place != "script_url":
        path = str(known[place])
        path = path if place == "hf_hub_url" else c.path(path if "://" in path else os.path.join(_folder(c), path))
        line = entry(path, **(of_evaluation(path, options) if ours == EVAL else options))
    _record(c, prefix, known, place, f"{ours}: {short(as_entries([line]))}" if line else "")
    _tags(c, prefix, kind, known.get("tags"), stage)
    if lost:
        c.missing(lost, f"{prefix}.split")
    if whole(known.get("num_samples")) is not None:
        c.notes.append(f"{name}: LLaMA-Factory draws num_samples rows at random, here they are the first ones")
    return line


def _record(c: Conversion, prefix: str, known: Mapping[str, object], place: str, line: str) -> None:
    """Record the keys of a data set, apart from its columns and tags."""
    for key, value in known.items():
        name = f"{prefix}.{key}"
        if value is None or (key == "ranking" and not is_on(value)):
            c.record(name, Kind.DEFAULT, "nothing is set")
        elif key == "ranking":
            c.missing(f"pairs of preferences: {PAIRS}", name)
        elif key == "formatting":
            if value in ("alpaca", "sharegpt", "openai"):
                c.not_needed("the format of the rows is recognised", name)
            else:
                c.missing(FORMAT, name)
        elif (key in PLACES and key != place) or (key in ELSEWHERE and place):
            c.not_needed(f"{place} is where the rows are", name)
        elif key in ("script_url", *ELSEWHERE):
            c.missing(f"rows are files, or a data set of the Hub of Hugging Face: {TRAIN}", name)
        elif key == "folder":
            c.missing(f"name the folder, or the files in it: {TRAIN}", name)
        elif key in (*PLACES, "subset", "split", "num_samples"):
            c.record(name, Kind.TRANSLATED, line or f"{TRAIN}: an entry's name, split or max_samples")
        elif key not in ("columns", "tags"):
            c.record(name, Kind.UNKNOWN, f"no key of LLaMA-Factory's {INFO} that is known here")


def _columns(c: Conversion, prefix: str, kind: str, known: Mapping[str, object], stage: str) -> dict[str, object]:
    """Our names of columns -> theirs, where they differ; theirs are recorded."""
    given = known.get("columns")
    columns = dict(given) if isinstance(given, Mapping) else {}
    if stage == "pt":
        return _text(c, prefix, kind, columns)
    tags = known.get("tags") if isinstance(known.get("tags"), Mapping) else {}
    plain = kind == "openai" or _pair(tags) == ("role", "content")
    ours = dict(ALPACA) if kind == "alpaca" else {"messages": "messages" if plain else "conversations"}
    ours |= {name: name for name in OF_ALL}
    for key, column in columns.items():
        _record_column(c, f"{prefix}.columns.{key}", column, ours.get(str(key)))
    if kind == "alpaca" and (not columns or columns.get("query")):
        note = "LLaMA-Factory joins instruction and input with one line break, shardtune with two"
        c.notes.append(f"{prefix.removeprefix(f'{INFO} ')}: {note}")
    pairs = {ours[str(key)]: column for key, column in columns.items() if key in ours}
    return {name: column for name, column in pairs.items() if column and name != column}


def _pair(tags: object) -> tuple[object, object]:
    return (tags.get("role_tag"), tags.get("content_tag")) if isinstance(tags, Mapping) else (None, None)


def _record_column(c: Conversion, name: str, column: object, ours: str | None) -> None:
    key = name.rpartition(".")[2]
    if column is None:
        c.record(name, Kind.DEFAULT, "nothing is set")
    elif key in ("videos", "audios"):
        c.missing(MEDIA, name)
    elif key in ("chosen", "rejected", "kto_tag"):
        c.missing(f"it is for preferences: {PAIRS}", name)
    elif ours is None and key in (*ALPACA, "messages"):
        c.not_needed("rows of this formatting have no such column", name)
    elif ours is None:
        c.record(name, Kind.UNKNOWN, f"no column of LLaMA-Factory's {INFO} that is known here")
    elif ours == column:
        c.record(name, Kind.DEFAULT, "the column has the same name here")
    else:
        c.record(name, Kind.TRANSLATED, f"columns of an entry: {{{ours}: {column}}}")


def _text(c: Conversion, prefix: str, kind: str, columns: Mapping[str, object]) -> dict[str, object]:
    """The column of plain text, which stage: pt reads alone: that of the prompt."""
    for key in columns:
        c.not_needed("stage: pt reads the prompt alone", f"{prefix}.columns.{key}")
    if kind != "alpaca":
        c.missing(f"stage: pt trains the first message alone: {FORMAT}", f"{prefix}.formatting")
        return {}
    for key in ("query", "history"):
        if columns.get(key):
            c.missing(
                "rows of text have one column; data.transform: FILE.py:FUNCTION joins several",
                f"{prefix}.columns.{key}",
            )
    column = columns.get("prompt") if columns else ALPACA["prompt"]
    if not columns:
        name = prefix.removeprefix(f"{INFO} ")
        c.notes.append(
            f"{name}: LLaMA-Factory trains instruction and input, joined by a line break; here instruction alone"
        )
    if column in (None, "text"):
        c.record(f"{prefix}.columns.prompt", Kind.DEFAULT, "the column is called text here")
        return {}
    c.record(f"{prefix}.columns.prompt", Kind.TRANSLATED, f"columns of an entry: {{text: {column}}}")
    return {"text": column}


def _tags(c: Conversion, prefix: str, kind: str, tags: object, stage: str) -> None:
    """Record how messages name their keys and roles: what is known here is recognised."""
    for key, value in tags.items() if isinstance(tags, Mapping) else ():
        name = f"{prefix}.tags.{key}"
        function = value == "function_call" or (kind == "openai" and ROLES.get(str(value)) == "assistant")
        if stage == "pt" or kind == "alpaca":
            c.not_needed("there are no messages", name)
        elif value is None:
            c.record(name, Kind.DEFAULT, "nothing is set")
        elif key in KEYS and value not in KEYS[key]:
            c.missing(f"messages have {' or '.join(KEYS[key])}: data.transform: FILE.py:FUNCTION renames {value}", name)
        elif (key in ROLE_TAGS and ROLES.get(str(value)) != ROLE_TAGS[key]) or (key == "function_tag" and not function):
            c.missing(f"data.transform: FILE.py:FUNCTION renames the role {value}; known are {', '.join(ROLES)}", name)
        elif key in KEYS or key in ROLE_TAGS or key == "function_tag":
            c.not_needed("it is recognised", name)
        else:
            c.record(name, Kind.UNKNOWN, f"no tag of LLaMA-Factory's {INFO} that is known here")
