"""Entries of `data.train_data_paths` from other trainers' data sets, and what can be seen of local rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtune.config.foreign.conversion import DATA_SUFFIXES, Conversion
from shardtune.config.foreign.values import listed, number, whole

BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""Readers of `datasets`, which stand in place of a path."""
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
"""The role of a message by each name that a row may have for it, as `shardtune.data.messages` reads them."""
ONE_VALUE = "data.train_on is one value for all data sets"
TURNS = (
    "loss_weight: 0 on a message leaves a turn of the assistant out, and tokens with labels have any targets; "
    "data.transform: FILE.py:FUNCTION makes either (docs/data.md)"
)
"""How single turns are trained, or are not."""
FORMAT = "data.transform: FILE.py:FUNCTION makes rows of a format that docs/data.md lists"
MOST_BYTES = 1 << 20
TRAIN, EVAL = "data.train_data_paths", "data.eval_data_paths"


def as_entries(entries: Sequence[Mapping[str, object]]) -> object:
    """Entries in their shortest form: a path alone where there is nothing else, no list around one."""
    brief = [entry["path"] if len(entry) == 1 else dict(entry) for entry in entries]
    return brief[0] if len(brief) == 1 else brief


def entry(path: object, **options: object) -> dict[str, object]:
    """An entry with the options that are set."""
    return {"path": path, **{name: value for name, value in options.items() if value not in (None, {}, [])}}


def split_of(given: object) -> tuple[dict[str, object], str]:
    """A split as `datasets` writes it (`test`, `train[:100]`, `train[:95%]`, `train+test`).

    Returns:
        the options of an entry, none for all of `train`; and a remedy for what they leave out, "" if nothing.
    """
    text = str(given or "train").replace(" ", "")
    if "+" in text:
        return {}, "an entry of its own for each split, {path: …, split: …}; here train is taken"
    split, _, part = text.partition("[")
    options: dict[str, object] = {} if split == "train" else {"split": split}
    first = re.fullmatch(r"0?:(\d+)\]", part)
    if first and int(first[1]) > 0:
        return {**options, "max_samples": int(first[1])}, ""
    return (
        options,
        "max_samples: N takes the first N rows, data.eval_split holds a share out; here all are taken" if part else "",
    )


def held_out(training: object, evaluation: object) -> float | None:
    """The share of rows for evaluation of two splits that are the parts of one: `train[:95%]` and `train[95%:]`."""
    first = re.fullmatch(r"(\w+)\[(?:0%?)?:(\d+)%\]", str(training).replace(" ", ""))
    last = re.fullmatch(r"(\w+)\[(\d+)%:(?:100%)?\]", str(evaluation).replace(" ", ""))
    if first is None or last is None or first.groups() != last.groups() or not 0 < int(first[2]) < 100:
        return None
    return (100 - int(first[2])) / 100


def hold_out(c: Conversion, name: str, entries: Sequence[Mapping[str, object]]) -> None:
    """Write a share of all rows, or a number of them, as `train_test_split` of `datasets` reads it.

    Args:
        c: the conversion.
        name: of their key.
        entries: of the training rows, which are counted where they are at hand.
    """
    size = number(c.get(name)) or 0.0
    if not size:
        return
    if size >= 1:
        counts = [
            (number(one.get("weight", 1)) or 0.0) * (rows_of(c, str(one["path"]), whole(one.get("max_samples"))) or 0)
            for one in entries
        ]
        if not counts or not all(counts) or sum(counts) <= size:
            c.missing(f"data.eval_split is a share of the rows: {size:g} / their number", name)
            return
        size = float(f"{size / sum(counts):.6g}")
    c.put("data.eval_split", size, name, comment=f"{name.rpartition('.')[2]}; which rows differs")


def sets_of(c: Conversion, section: str) -> list[tuple[str, Mapping[str, object]]]:
    """The data sets of a section, one or a list of them, each with its name: `dataset`, or `dataset[0]`."""
    given = c.get(section)
    if isinstance(given, Mapping):
        return [(section, given)]
    return [(f"{section}[{place}]", one) for place, one in enumerate(listed(given)) if isinstance(one, Mapping)]


def of_evaluation(path: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """The options of an entry for evaluation: `train` of a data set of the Hub is named, as it is not the default."""
    is_file = path.startswith((".", "/", "~")) or "://" in path or path.endswith(DATA_SUFFIXES)
    return options if is_file or options.get("split") else {**options, "split": "train"}


def files_of(c: Conversion, path: object, data_files: object, split: object = None) -> list[str]:
    """The paths of a data set as `datasets.load_dataset` takes it: a builder with files, a folder, or a Hub name.

    Args:
        c: the conversion.
        path: a builder, a folder or a name on the Hub.
        data_files: the files, or a mapping from splits to files.
        split: of such a mapping; None: train. All files where the mapping lacks it.
    """
    if isinstance(data_files, Mapping):
        own = data_files.get(str(split or "train").partition("[")[0])
        data_files = own if own is not None else [name for files in data_files.values() for name in listed(files)]
    names = listed(data_files)
    if not names:
        return [c.path(path)]
    if str(path) in BUILDERS or path is None:
        return [c.path(name) for name in names]
    return [c.path(f"{path}/{name}") for name in names]


def first_row(c: Conversion, path: str) -> Mapping[str, object]:
    """The first row of a local JSON file, from its beginning; empty where there is none to be seen."""
    file = c.target / path
    if not file.is_file() or not file.name.endswith((".jsonl", ".ndjson", ".json")):
        return {}
    try:
        text = _beginning(file).lstrip().removeprefix("[")
        row, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def unread_files(c: Conversion, name: str, data_files: object, split: object) -> None:
    """Record the files of `data_files` that belong to other splits than the one that is read."""
    own = str(split or "train").partition("[")[0]
    for other, files in data_files.items() if isinstance(data_files, Mapping) and own in data_files else ():
        if other != own:
            shown = ", ".join(str(file) for file in listed(files))
            c.missing(f"only files of {own} are read; {EVAL} names those of evaluation: {shown}", f"{name}.{other}")


def rows_of(c: Conversion, path: str, most: int | None = None) -> int | None:
    """The number of rows of a local JSON file, `most` at most; None: it cannot be seen."""
    file = c.target / path
    if not file.is_file() or not file.name.endswith((".jsonl", ".ndjson", ".json")):
        return None
    try:
        with file.open(encoding="utf-8-sig") as opened:
            is_list = opened.read(MOST_BYTES).lstrip().startswith("[")
            if not is_list and file.suffix == ".json":  # lines, or an object with the rows in it
                return None
            opened.seek(0)
            rows = len(json.load(opened)) if is_list else sum(not line.isspace() for line in opened)
    except (OSError, ValueError, RecursionError):
        return None
    return rows if most is None else min(rows, most)


def _beginning(file: Path) -> str:
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        return opened.read(MOST_BYTES)
