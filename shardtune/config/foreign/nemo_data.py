"""NeMo Automodel's data sets, each made by a class or function, and what is trained of their rows."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import rows
from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.rows import EVAL, FORMAT, TRAIN
from shardtune.config.foreign.values import is_on, listed, whole

PACKING = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")
"""The tokens of a packed sequence, of language and of vision-language models."""
VALIDATION = "validation_dataset"
COLUMNS = "ColumnMappedTextInstruction"
PATHS = ("path_or_dataset_id", "path_or_dataset", "dataset_name")
LIMITS = ("limit_dataset_samples", "num_samples_limit", "num_samples")
NO_CUT = (None, False, "", "do_not_truncate", "false")
CHAT = {"context": "system", "question": "question", "answer": "answer"}
"""Its names of columns -> ours, of rows that the chat template writes."""
_READ = ("_target_", "split", "name", *PATHS, *LIMITS)
_REMEDIES = {
    "mask_reasoning_content": "data.thinking: strip leaves reasoning out",
    "unshifted": "targets are shifted by the model",
    "fp8": "actor.model.fp8.scaling",
}


def packed_size(c: Conversion) -> int | None:
    """The tokens of a packed sequence; None without packing."""
    found = next((whole(c.get(name)) for name in PACKING if whole(c.get(name))), None)
    return found if found and found > 0 else None


def convert(c: Conversion, packed: int | None) -> None:
    """Read the data sets of training and evaluation, and what is trained of them."""
    entries = _entries(c, "dataset", TRAIN)
    if entries:
        c.put(TRAIN, rows.as_entries(entries), comment="dataset")
    sets = {name: _entries(c, name, EVAL) for name in validation_sets(c)}
    named = {name.removeprefix(VALIDATION).strip("_"): rows.as_entries(found) for name, found in sets.items() if found}
    if len(named) == 1 and "" in named:
        c.put(EVAL, named[""], comment=VALIDATION)
    elif named:
        c.put(EVAL, {name or "default": found for name, found in named.items()}, comment=", ".join(sets))
    _targets(c)
    _length(c, packed)
    name = "dataloader.shuffle"
    c.put("data.shuffle", is_on(c.get(name, True)), name)
    c.not_needed("rows are always packed whole, without attention between them", *_left(c, "packed_sequence"))


def validation_sets(c: Conversion) -> list[str]:
    """The sections of evaluation: `validation_dataset`, or several with a name behind it."""
    names = [name for name in c.tree if name == VALIDATION or name.startswith(f"{VALIDATION}_")]
    return [name for name in names if isinstance(c.get(name), Mapping)]


def _left(c: Conversion, section: str) -> list[str]:
    return [name for name in c.given if name.startswith(f"{section}.") and name not in c.outcomes]


def _kind(given: Mapping[str, object]) -> str:
    return str(given.get("_target_", "")).rpartition(".")[2]


def _entries(c: Conversion, section: str, ours: str) -> list[dict[str, object]]:
    """The entries of a data set, one for each of its files; its keys are recorded."""
    given = c.get(section)
    if not isinstance(given, Mapping):
        return []
    paths = [c.path(one) for one in listed(next((given[key] for key in PATHS if given.get(key)), None))]
    options, lost = rows.split_of(given.get("split"))
    limits = [key for key in LIMITS if whole(given.get(key))]
    options |= {"name": given.get("name"), "columns": _columns(c, section, given)}
    options |= {"max_samples": whole(given[limits[0]])} if limits else {}
    entries = [rows.entry(one, **(rows.of_evaluation(one, options) if ours == EVAL else options)) for one in paths]
    line = f"{ours}: {short(rows.as_entries(entries))}" if entries else ""
    for key in given:
        _record(c, f"{section}.{key}", key, _kind(given), line)
    if lost:
        c.missing(lost, f"{section}.split")
    if limits and len(paths) > 1:
        c.missing("max_samples is of each file here, and of all of them there", f"{section}.{limits[0]}")
    return entries


def _columns(c: Conversion, section: str, given: Mapping[str, object]) -> dict[str, object]:
    """Our names of columns -> those of the rows, of its class that takes any columns."""
    mapped = given.get("column_mapping")
    if not isinstance(mapped, Mapping):
        return {}
    name = f"{section}.column_mapping"
    if is_on(given.get("use_hf_chat_template")):
        columns = {CHAT.get(str(key), str(key)): column for key, column in mapped.items()}
    else:
        prompts = [key for key in ("context", "question") if mapped.get(key)]
        columns = {"prompt": mapped.get(prompts[0]) if prompts else None, "completion": mapped.get("answer")}
        if len(prompts) > 1:
            c.missing(f"it joins context and question by a blank: {FORMAT}", f"{name}.context")
            columns["prompt"] = mapped["question"]
        if section == "dataset":
            c.notes.append(
                "such a prompt ends with a blank there, and has none here: its last token may be another one"
            )
    return {ours: column for ours, column in columns.items() if ours != column and column is not None}


def _record(c: Conversion, name: str, key: str, kind: str, line: str) -> None:
    """Record a key of a data set; `line` is what the recipe has of it."""
    if key == "_target_" and not kind.startswith((COLUMNS, "ChatDataset")):
        c.missing(f"name the rows of {kind} in {TRAIN}, in a format that docs/data.md lists, or {FORMAT}", name)
    elif key in (*_READ, "column_mapping"):
        if not line:
            c.missing(f"name the files, or a data set of the Hub: {TRAIN}", name)
        for given in c.given:
            if line and (given == name or given.startswith((f"{name}.", f"{name}["))) and given not in c.outcomes:
                c.record(given, Kind.TRANSLATED, line)
    elif key == "chat_template":
        text = str(c.get(name))
        if "{" in text or "\n" in text:
            c.missing("write it into a file: data.chat_template: FILE.jinja", name)
        elif name.startswith("dataset."):
            c.put("data.chat_template", c.path(text), name)
        else:
            c.not_needed("data.chat_template is for evaluation, too", name)
    elif key == "use_hf_chat_template":
        c.not_needed("the columns of the rows decide: question and answer are a chat, prompt and completion text", name)
    elif key == "skip_invalid_samples":
        c.put("data.on_bad_row", "skip" if is_on(c.get(name)) else "fail", name)
    elif key in _REMEDIES and is_on(c.get(name)):
        c.missing(_REMEDIES[key], name)
    elif key in ("shuffle_seed", "seed", "padding", "pad_to_max_length", "start_of_turn_token", *_REMEDIES):
        c.not_needed("rows are shuffled by runner.seed, packed and not padded", name)
    elif key not in ("seq_length", "truncation", "max_length", "answer_only_loss_mask", "mask_history", "tokenizer"):
        c.missing(FORMAT, name)


def _targets(c: Conversion) -> None:
    """What is trained: answers, unless the class is told otherwise."""
    answers, last = "dataset.answer_only_loss_mask", "dataset.mask_history"
    if not is_on(c.get(answers, True)):
        c.put("data.train_on", "all", answers)
    elif is_on(c.get(last)):
        c.put("data.train_on", "last_assistant", last)
    for name in (answers, last):
        c.record(name, Kind.DEFAULT, "data.train_on: assistant")
    theirs = [name for name in c.given if name.startswith(VALIDATION) and name.endswith(("loss_mask", "mask_history"))]
    c.not_needed("data.train_on is for evaluation, too", *theirs)


def _length(c: Conversion, packed: int | None) -> None:
    """The longest row: that at which it is cut, or that of a packed sequence; otherwise there is no limit."""
    cuts = str(c.get("dataset.truncation", "")).lower() not in map(str, NO_CUT)
    name = "dataset.seq_length" if cuts and c.has("dataset.seq_length") else "dataloader.collate_fn.max_length"
    length = whole(c.get(name))
    if packed is not None and (length is None or length > packed):
        c.put("data.max_length", packed, *PACKING, comment="the tokens of a packed sequence")
    elif length is not None:
        c.put("data.max_length", length, name)
    else:
        c.put("data.max_length", 131072, comment="rows are not cut there")
    for section in ("dataset", *validation_sets(c)):
        keys = [f"{section}.{key}" for key in ("seq_length", "truncation", "max_length", "padding")]
        c.not_needed("data.max_length cuts rows, and none is padded", *(k for k in keys if k not in c.outcomes))
    c.not_needed(
        "data.max_length cuts rows", *(n for n in ("dataloader.collate_fn.max_length",) if n not in c.outcomes)
    )
