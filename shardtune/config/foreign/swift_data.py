"""ms-swift's data sets (`OWNER/NAME:SUBSET#N`), what is trained of their rows, and what is cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.rows import EVAL, TRAIN, as_entries, entry, first_row, hold_out, of_evaluation
from shardtune.config.foreign.swift_keys import NAME
from shardtune.config.foreign.values import arguments, is_on, listed, number, whole

COLUMNS = {"query": "question", "response": "answer"}
"""Its names of columns -> ours, where they differ."""
STRATEGIES = {"delete": "drop", "right": "truncate", "split": "split"}
SCALES = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
NO_THINK = "ignore_empty_think"
SELF = "self-cognition"
"""A data set whose rows name the model by `model_name` and `model_author`."""
ANY_LENGTH = 131072


def evaluates(c: Conversion) -> bool:
    """Whether there are rows for evaluation."""
    return bool(listed(c.get("val_dataset"))) or (number(c.get("split_dataset_ratio")) or 0.0) > 0


def convert(c: Conversion) -> None:
    """Read the data sets of training and evaluation, and how their rows are written."""
    entries = _entries(c, "dataset", TRAIN)
    _entries(c, "val_dataset", EVAL)
    if (number(c.get("split_dataset_ratio")) or 0.0) > 0 and not listed(c.get("val_dataset")):
        hold_out(c, "split_dataset_ratio", entries)
    c.record("split_dataset_ratio", Kind.DEFAULT, "data.eval_split: 0.0")
    if not any(SELF in str(one["path"]) for one in entries):
        c.not_needed(f"they are for the data set {SELF}", "model_name", "model_author")
    _columns(c, entries)
    is_plain = c.has("use_chat_template") and not is_on(c.get("use_chat_template"))
    _targets(c, is_plain=is_plain)
    _length(c)
    _system(c)
    if c.has("template"):
        c.not_needed("the tokenizer's own chat template is used; compare a row: shardtune data preview", "template")
    c.notes.append(
        f"{NAME} writes chats by templates of its own, mostly the text of the tokenizer's chat template; a system "
        "prompt or an empty block of reasoning may differ: compare shardtune data preview"
    )
    bad = "strict"
    c.put(
        "data.on_bad_row",
        "fail" if is_on(c.get(bad)) else "skip",
        bad,
        comment=bad if c.has(bad) else f"{NAME}'s default",
    )


def _entries(c: Conversion, key: str, ours: str) -> list[dict[str, object]]:
    """The entries of a key: paths or names, with a part behind a colon and a number of rows behind `#`."""
    found: list[dict[str, object]] = []
    sampled, parts = False, list[str]()
    for one in [str(name) for name in listed(c.get(key))]:
        text = one.partition("::")[2] if one.startswith(("HF::", "MS::", "hf::", "ms::")) else one
        text, _, rows = text.rpartition("#") if text.rpartition("#")[2].isdigit() else (text, "", "")
        is_file = Path(text).expanduser().exists() or (c.base / text).exists()
        name, _, part = (text, "", "") if is_file or text.startswith((".", "/", "~")) else text.partition(":")
        if "/" in part or part == "all":
            parts.append(one)
        options: dict[str, object] = {"name": part if part and "/" not in part and part != "all" else None}
        options["max_samples"] = whole(rows)
        sampled = sampled or bool(rows)
        path = c.path(name)
        found.append(entry(path, **(of_evaluation(path, options) if ours == EVAL else options)))
    if found:
        c.put(ours, as_entries(found), key, comment=key)
    else:
        c.record(key, Kind.DEFAULT, "nothing is set")
    if parts:
        c.missing(f"{ours}: an entry {{path, name}} for each part of {', '.join(parts)}", key)
    if sampled:
        c.notes.append(
            f"the rows of a data set (#N) are drawn in {NAME}, and repeated where it has fewer; here they are the first"
        )
    return found


def _columns(c: Conversion, entries: list[dict[str, object]]) -> None:
    """Columns by our names: those that are given, or query and response of a local file."""
    given = {str(ours): str(theirs) for theirs, ours in arguments(c.get("columns")).items()}
    columns = {COLUMNS.get(name, name): theirs for name, theirs in given.items()}
    row: Mapping[str, object] = first_row(c, str(entries[0]["path"])) if entries else {}
    if not given and {"query", "response"} <= {*row} and "messages" not in row:
        columns = {ours: theirs for theirs, ours in COLUMNS.items()}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if columns:
        c.put(
            "data.columns", columns, "columns", comment="columns" if given else f"query and response of {NAME}'s rows"
        )
    c.record("columns", Kind.DEFAULT, "rows have these names")


def _targets(c: Conversion, *, is_plain: bool) -> None:
    """What is trained: a base of `loss_scale`, and what changes the weights of parts of an answer."""
    name = "loss_scale"
    base, *others = str(c.get(name, "all" if is_plain else "default")).split("+")
    if base not in SCALES:
        base, others = "default", [base, *others]
    c.put("data.train_on", SCALES[base], name, "use_chat_template")
    lost = [one for one in others if one != NO_THINK]
    if lost:
        c.missing(f"a turn with loss_weight counts more or less; {', '.join(lost)}: data.transform writes it", name)
    if NO_THINK in others:
        c.notes.append(f"{NO_THINK}: an empty block of reasoning is trained here, if the chat template prints one")
    c.record("use_chat_template", Kind.DEFAULT, "chats are written by the chat template, plain text as it stands")


def _length(c: Conversion) -> None:
    length, cut = "max_length", "truncation_strategy"
    if c.has(length):
        c.put("data.max_length", whole(c.get(length)), length)
    else:
        c.put("data.max_length", ANY_LENGTH, comment=f"{NAME}'s default is the model's maximum")
    kind = str(c.get(cut, "delete"))
    ours = STRATEGIES.get(kind, "drop")
    c.put("data.on_too_long", ours, cut, comment=cut if c.has(cut) else f"{NAME}'s default ({cut}: delete)")
    if kind not in STRATEGIES:
        c.missing("data.on_too_long is drop, truncate, which keeps the beginning, split or fail; drop is written", cut)


def _system(c: Conversion) -> None:
    """The system prompt, which may be the name of a file with it."""
    given = str(c.get("system", ""))
    if not given:
        c.record("system", Kind.DEFAULT, "that of the chat template")
        return
    file = next((one for one in (Path(given), c.base / given) if given.endswith(".txt") and one.is_file()), None)
    if file is not None:
        c.put("data.system_prompt", file.read_text(encoding="utf-8"), "system", comment=f"the text of {given}")
    elif given.endswith(".txt"):
        c.missing("data.system_prompt: TEXT, that of the file", "system")
    else:
        c.put("data.system_prompt", given.replace("\\n", "\n"), "system")
