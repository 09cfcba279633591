"""NeMo Automodel's data sets, each made by a class or function, and what is trained of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardtune.config.foreign import rows
from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.nemo_sections import NAME, OF_NEMO, VALIDATION
from shardtune.config.foreign.rows import EVAL, FORMAT, TRAIN
from shardtune.config.foreign.values import is_on, listed, whole

PACKING = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")
"""The tokens of a packed sequence, of language and of vision-language models."""
COLUMNS, CHATS = "ColumnMappedTextInstruction", "ChatDataset"
LINES = (".json", ".jsonl", ".ndjson")
"""The files whose rows those two read all of, whatever the split."""
COLLATE = "dataloader.collate_fn"
PATHS = ("path_or_dataset_id", "path_or_dataset", "dataset_name")
LIMITS = ("limit_dataset_samples", "num_samples_limit", "num_samples")
NO_CUT = (None, False, "", "do_not_truncate", "false")
CHAT = {"context": "system", "question": "question", "answer": "answer"}
"""Its names of columns -> ours, of rows that the chat template writes."""
_CUTS = ("seq_length", "truncation", "truncate", "max_length")
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
    _collated(c)
    apart = ("max_packs", "post_tokenize_hook_fn")
    rest = [
        n for n in _left(c, "packed_sequence") if not n.startswith(tuple(f"packed_sequence.{one}" for one in apart))
    ]
    c.not_needed("rows are always packed whole, without attention between them", *rest)


def _collated(c: Conversion) -> None:
    """The function that makes a batch: its own ones make what there is here, apart from a prefix of answers."""
    function = str(c.get(f"{COLLATE}._target_", c.get(COLLATE, "default")))
    inner = [name for name in c.given if name.startswith(COLLATE) and name not in c.outcomes]
    if "prefix_collate" in function:
        c.missing("it begins answers with a prefix: write it into data.chat_template: FILE.jinja", *inner)
    elif function.startswith((OF_NEMO, "torch.")) or function == "default":
        c.not_needed("rows are packed, and their targets are those of data.train_on", *inner)
    else:
        c.missing(
            "it is not read: data.transform: FILE.py:FUNCTION makes rows, with targets too (docs/data.md)", *inner
        )
    if whole(c.get("dataloader.batch_size")) == (whole(c.get("step_scheduler.local_batch_size")) or 1):
        c.not_needed("it is the rows of a forward pass", "dataloader.batch_size")


def validation_sets(c: Conversion) -> list[str]:
    """The sections of evaluation: `validation_dataset`, or several with a name behind it."""
    names = [name for name in c.tree if name == VALIDATION or name.startswith(f"{VALIDATION}_")]
    return [name for name in names if isinstance(c.get(name), Mapping)]


def _left(c: Conversion, section: str) -> list[str]:
    return [name for name in c.given if name.startswith(f"{section}.") and name not in c.outcomes]


def _kind(given: Mapping[str, object]) -> str:
    target = str(given.get("_target_", ""))
    return target.rpartition(".")[2] if target.startswith(OF_NEMO) else target


def _entries(c: Conversion, section: str, ours: str) -> list[dict[str, object]]:
    """The entries of a data set, one for each of its files; its keys are recorded."""
    given = c.get(section)
    if not isinstance(given, Mapping):
        return []
    paths = [c.path(one) for one in listed(next((given[key] for key in PATHS if given.get(key)), None))]
    options, lost = _split(c, section, given, paths)
    limits = [key for key in LIMITS if whole(given.get(key))]
    options |= {"name": None if _is_whole(given, paths) else given.get("name"), "columns": _columns(c, section, given)}
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


def _is_whole(given: Mapping[str, object], paths: Sequence[str]) -> bool:
    """Whether a data set reads all rows of local files, without a split."""
    return _kind(given).startswith((COLUMNS, CHATS)) and bool(paths) and all(one.endswith(LINES) for one in paths)


def _split(
    c: Conversion, section: str, given: Mapping[str, object], paths: Sequence[str]
) -> tuple[dict[str, object], str]:
    """The options of an entry for its split, and a remedy for what they leave out."""
    name, part = f"{section}.split", given.get("split")
    if _is_whole(given, paths):
        if part not in (None, "train"):
            c.not_needed(f"{NAME} reads all rows of a local file, whatever the split", name)
        c.not_needed("a local file has no configurations", f"{section}.name")
        return {}, ""
    if isinstance(part, list):
        if len(part) != 1:
            return {}, "an entry of its own for each split, {path: …, split: …}; here train is taken"
        part = part[0]
    if "[" in str(part) and given.get("shuffle_seed") is not None:
        c.missing(
            "the rows of such a part are drawn by it there, here they are the first ones", f"{section}.shuffle_seed"
        )
    return rows.split_of(part)


def _columns(c: Conversion, section: str, given: Mapping[str, object]) -> dict[str, object]:
    """Our names of columns -> those of the rows, of its class that takes any columns."""
    mapped = given.get("column_mapping")
    name = f"{section}.column_mapping"
    if not isinstance(mapped, Mapping):
        c.missing("columns: {question: COLUMN, answer: COLUMN} of an entry", name)
        return {}
    for key in mapped:
        if key not in CHAT:
            c.record(f"{name}.{key}", Kind.UNKNOWN, f"no column of {NAME}: {', '.join(CHAT)}")
    mapped = {key: column for key, column in mapped.items() if key in CHAT and column is not None}
    if is_on(given.get("use_hf_chat_template")):
        columns = {CHAT[key]: column for key, column in mapped.items()}
        if section == "dataset" and "context" not in mapped:
            c.notes.append(
                f"a chat of {NAME} begins with an empty system turn where there is no context, here with none"
            )
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
            c.notes.append(
                "such a row ends with its answer there, unless the tokenizer adds an end token (most do not); here the "
                "end token is trained"
            )
    return {ours: column for ours, column in columns.items() if ours != column and column is not None}


def _record(c: Conversion, name: str, key: str, kind: str, line: str) -> None:
    """Record a key of a data set; `line` is what the recipe has of it."""
    if key == "_target_" and not kind.startswith((COLUMNS, CHATS)):
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
    elif name in c.outcomes:
        return
    elif key in ("shuffle_seed", "seed", "padding", "pad_to_max_length", "start_of_turn_token", *_REMEDIES):
        c.not_needed("rows are shuffled by runner.seed, packed and not padded", name)
    elif key == "tokenizer" and not name.startswith("dataset."):
        c.not_needed("the tokenizer of training is that of evaluation, too", name)
    elif key not in (*_CUTS, "answer_only_loss_mask", "mask_history", "tokenizer"):
        c.missing(FORMAT, name)


def _targets(c: Conversion) -> None:
    """What is trained: answers by default."""
    answers, last = "dataset.answer_only_loss_mask", "dataset.mask_history"
    if not is_on(c.get(answers, True)):
        c.put("data.train_on", "all", answers)
    elif is_on(c.get(last)):
        c.put("data.train_on", "last_assistant", last)
    is_chat = f".{CHATS}" in str(c.get("dataset._target_")) or is_on(c.get("dataset.use_hf_chat_template"))
    if is_chat and is_on(c.get(answers, True)):
        c.notes.append(
            f"{NAME} trains what opens an answer, too (<|im_start|>assistant), unless the chat template has generation "
            "marks; here what the model writes is trained alone"
        )
    for name in (answers, last):
        c.record(name, Kind.DEFAULT, "data.train_on: assistant")
    theirs = [name for name in c.given if name.startswith(VALIDATION) and name.endswith(("loss_mask", "mask_history"))]
    c.not_needed("data.train_on is for evaluation, too", *theirs)


def _length(c: Conversion, packed: int | None) -> None:
    """The longest row: that at which it is cut, or that of a packed sequence; otherwise there is no limit."""
    cuts = str(c.get("dataset.truncation", "")).lower() not in map(str, NO_CUT)
    given = [
        *(["dataset.seq_length"] if cuts else []),
        *(["dataset.max_length"] if is_on(c.get("dataset.truncate", True)) else []),
        *("packed_sequence.max_length", f"{COLLATE}.max_length"),
    ]
    name = next((one for one in given if whole(c.get(one))), "")
    length = whole(c.get(name)) if name else None
    if packed is not None and (length is None or length > packed):
        c.put("data.max_length", packed, *PACKING, comment="the tokens of a packed sequence")
        keeps = "packed_sequence.drop_long_samples"
        is_strict = c.get("packed_sequence.packing_strategy") == "neat" and not is_on(c.get(keeps, True))
        comment = keeps if c.has(keeps) else f"{NAME} drops rows that are longer than a packed sequence"
        c.put("data.on_too_long", "fail" if is_strict else "drop", keeps, comment=comment)
    elif length is not None:
        c.put("data.max_length", length, name)
        if is_on(c.get(f"{COLLATE}.drop_overlong")):
            c.put("data.on_too_long", "drop", f"{COLLATE}.drop_overlong")
    else:
        c.put("data.max_length", 131072, comment="rows are not cut there")
    for section in ("dataset", *validation_sets(c)):
        keys = [f"{section}.{key}" for key in (*_CUTS, "padding")]
        c.not_needed("data.max_length cuts rows, and none is padded", *(k for k in keys if k not in c.outcomes))
    c.not_needed("data.max_length cuts rows", *(n for n in (f"{COLLATE}.max_length",) if n not in c.outcomes))
