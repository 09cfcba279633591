"""torchtune's data sets, each made by a builder, and what is trained of their rows."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtune.config.foreign import rows, rules
from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.rows import EVAL, FORMAT, ONE_VALUE, TRAIN, TURNS
from shardtune.config.foreign.values import is_on

TRAIN_ON = "data.train_on"
READ = ("_component_", "source", "data_files", "name", "split", "packed")
"""The keys of every builder that are read."""
TARGETS = ("train_on_input", "masking_strategy")
ENDS = ("add_eos", "split_across_pack")
_CHAT, _TEXT = (*TARGETS, "column_map"), ("column", *ENDS)
_INPUT = {"input": "instruction"}


@dataclass(frozen=True, slots=True)
class Builder:
    """A function of torchtune that makes a data set.

    Attributes:
        read: its keys that are read, besides those of every builder.
        source: without the key.
        on_prompts: whether prompts are trained by default; None: rows are plain text, which is trained whole.
        columns: our names of columns -> its own.
        ours: its names in `column_map` -> ours.
        name: the configuration of `source`, without the key.
    """

    read: tuple[str, ...]
    source: str = ""
    on_prompts: bool | None = False
    columns: Mapping[str, str] = field(default_factory=dict)
    ours: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None


DATASETS: Mapping[str, Builder] = {
    "alpaca_dataset": Builder(_CHAT, "tatsu-lab/alpaca", True),
    "alpaca_cleaned_dataset": Builder(_CHAT, "yahma/alpaca-cleaned", True),
    "instruct_dataset": Builder(_CHAT, columns={"instruction": "input"}, ours=_INPUT),
    "chat_dataset": Builder((*TARGETS, "conversation_column", "conversation_style")),
    "text_completion_dataset": Builder(_TEXT, on_prompts=None),
    "slimorca_dataset": Builder(_CHAT, "Open-Orca/SlimOrca-Dedup"),
    "samsum_dataset": Builder(
        _CHAT, "Samsung/samsum", columns={"instruction": "dialogue", "output": "summary"}, ours=_INPUT
    ),
    "grammar_dataset": Builder(_CHAT, "liweili/c4_200m", columns={"instruction": "input"}, ours=_INPUT),
    "cnn_dailymail_articles_dataset": Builder(
        (), "ccdv/cnn_dailymail", on_prompts=None, columns={"text": "article"}, name="3.0.0"
    ),
    "wikitext_dataset": Builder(
        ("subset", *ENDS),
        "EleutherAI/wikitext_document_level",
        on_prompts=None,
        columns={"text": "page"},
        name="wikitext-103-v1",
    ),
}
MASKS = {"train_on_last": "last_assistant", "train_on_assistant": "assistant", "train_on_all": "all"}
"""`masking_strategy` as `data.train_on`, the one that trains least first."""
LEAST_FIRST = [*MASKS.values()]
STYLES = ("openai", "sharegpt")
LOADING = (
    *("cache_dir", "download_mode", "download_config", "verification_mode", "num_proc", "keep_in_memory"),
    "trust_remote_code",
)
"""Options of `datasets.load_dataset` that change no row."""
REMEDIES = {
    "new_system_prompt": "data.system_prompt: TEXT, for conversations without a system turn",
    **dict.fromkeys(("filter_fn", "filter_kwargs"), "data.transform: FILE.py:FUNCTION drops rows by returning None"),
    "image_dir": "paths of images start at the folder of the data file",
    "image_tag": "an image stands at <image> in a text; data.transform: FILE.py:FUNCTION may write it",
    "message_transform": FORMAT,
    "max_seq_len": "data.max_length, for all data sets",
    **dict.fromkeys(("template", "chat_format"), "the chat template writes the turns: data.chat_template: FILE.jinja"),
    "revision": "write it behind the name: path: OWNER/NAME@REVISION",
    "data_dir": "name the folder, or the files in it: data.train_data_paths: FOLDER",
    "token": "HF_TOKEN in the environment",
    "streaming": "data.cache: by_file trains on the first files while the others are tokenised",
}
ALPACA_TEXT = (
    "torchtune writes Alpaca's own text around such rows, here the chat template is used; docs/coming-from.md has a "
    "function for data.transform that writes the same text"
)


def is_packed(c: Conversion) -> bool:
    """Whether rows are packed, which torchtune does for all data sets or for none."""
    return any(is_on(given.get("packed")) for _, given in rows.sets_of(c, "dataset"))


def convert(c: Conversion) -> None:
    """Read the data sets of training and evaluation, and what is trained of them."""
    share = _held_out(c)
    for section, key in (("dataset", TRAIN), ("dataset_val", EVAL)):
        sets = rows.sets_of(c, section)
        if share is not None and key == EVAL:
            continue
        entries = [line for name, given in sets for line in _entries(c, name, given, key)]
        if entries:
            c.put(key, rows.as_entries(entries), comment=section)
        elif c.has(section) and not sets:
            c.missing(f"name the files, or data sets of the Hub: {key}", section)
    if share is not None:
        _hold_out(c, share)
    _targets(c)
    _packing(c)


def _held_out(c: Conversion) -> float | None:
    """The share of the rows that is for evaluation, where the two sections are the two parts of one split."""
    (training, *more), (test, *others) = (rows.sets_of(c, name) or [("", {})] for name in ("dataset", "dataset_val"))
    own = [{key: value for key, value in one.items() if key not in OF_PART} for _, one in (training, test)]
    if more or others or own[0] != own[1]:
        return None
    return rows.held_out(training[1].get("split"), test[1].get("split"))


def _hold_out(c: Conversion, share: float) -> None:
    """Hold rows out, and record the keys of both sections that say which."""
    line = f"data.eval_split: {share:g}"
    c.put("data.eval_split", share, comment="dataset.split, dataset_val.split; which rows differs")
    for section in ("dataset", "dataset_val"):
        for name, given in rows.sets_of(c, section):
            for key in given if section == "dataset_val" else ("split",):
                if key not in (*TARGETS, "packed"):
                    c.outcomes.pop(f"{name}.{key}", None)
                    c.record(f"{name}.{key}", Kind.TRANSLATED, line)


OF_PART = ("split", "packed")
"""The keys in which the two parts of one split may differ."""


def _kind(given: Mapping[str, object]) -> str:
    return str(given.get("_component_", "")).rpartition(".")[2]


def _is_text(given: Mapping[str, object]) -> bool:
    builder = DATASETS.get(_kind(given))
    return builder is not None and builder.on_prompts is None


def _entries(c: Conversion, name: str, given: Mapping[str, object], ours: str) -> list[dict[str, object]]:
    """The entries of one data set; its keys are recorded, except for packing and targets."""
    kind = _kind(given)
    builder = DATASETS.get(kind, Builder(()))
    path, files = given.get("source") or builder.source, given.get("data_files")
    options, lost = rows.split_of(given.get("split"))
    of_source = builder.name if path == builder.source else None
    options["name"] = given.get("subset") or given.get("name") or of_source
    options["columns"] = _columns(builder, given)
    is_named = path and (files or str(path) not in rows.BUILDERS)
    paths = rows.files_of(c, path, files, given.get("split")) if is_named else []
    if isinstance(files, Mapping):
        options.pop("split", None)
    entries = [rows.entry(one, **(rows.of_evaluation(one, options) if ours == EVAL else options)) for one in paths]
    line = f"{ours}: {short(rows.as_entries(entries))}" if entries else ""
    for key, value in given.items():
        _record(c, kind, f"{name}.{key}", value, line)
    rows.unread_files(c, f"{name}.data_files", files, given.get("split"))
    if lost:
        c.missing(lost, f"{name}.split")
    if kind.startswith("alpaca") and ours == TRAIN:
        c.notes.append(ALPACA_TEXT)
    return entries


def _columns(builder: Builder, given: Mapping[str, object]) -> dict[str, object]:
    """Our names of columns -> those of the rows, where they differ."""
    mapped = given.get("column_map") if "column_map" in builder.read else None
    columns: dict[str, object] = dict(builder.columns)
    if isinstance(mapped, Mapping) and mapped:
        columns = {builder.ours.get(str(theirs), str(theirs)): column for theirs, column in mapped.items()}
    for key, ours, known in (
        ("conversation_column", "messages", ("messages", "conversations")),
        ("column", "text", ("text",)),
    ):
        if key in builder.read and given.get(key) not in (None, *known):
            columns[ours] = given[key]
    return {ours: column for ours, column in columns.items() if ours != column}


def _record(c: Conversion, kind: str, name: str, value: object, line: str) -> None:
    """Record a key of a data set by its builder; `line` is what the recipe has of it."""
    key, builder = name.rpartition(".")[2], DATASETS.get(kind)
    read = (*READ, *(() if builder is None else builder.read))
    if value is None:
        c.record(name, Kind.DEFAULT, "nothing is set")
    elif key in LOADING:
        c.not_needed("rows are read into a cache of shardtune's own: data.cache_dir, data.num_workers", name)
    elif key in REMEDIES:
        c.missing(REMEDIES[key], name)
    elif key == "conversation_style" and key in read:
        if value in STYLES:
            c.not_needed("role and content, and from and value, are recognised", name)
        else:
            c.missing(f"the styles are {' and '.join(STYLES)}; {FORMAT}", name)
    elif key == "_component_" and builder is None:
        c.missing(f"name the rows of {kind} in {TRAIN}; docs/data.md lists the formats", name)
    elif key == "add_eos" and key in read and is_on(value):
        c.record(name, Kind.DEFAULT, "the end token of the tokenizer ends a text")
    elif key == "add_eos" and key in read:
        c.missing(f"a text ends with the tokenizer's end token; {FORMAT}: tokens are taken as they are", name)
    elif key in read and key not in (*TARGETS, *ENDS, "packed"):
        if line:
            c.record(name, Kind.TRANSLATED, line)
        else:
            c.missing(f"name the files, or a data set of the Hub: {TRAIN}", name)
    elif key not in read and builder is None:
        c.missing(f"{TRAIN_ON}: all, assistant or last_assistant" if key in TARGETS else FORMAT, name)
    elif key not in read:
        near = difflib.get_close_matches(key, (*read, *REMEDIES, *LOADING), n=1, cutoff=0.75)
        unknown = f"no key of torchtune's {kind} that is known here"
        c.record(name, Kind.UNKNOWN, unknown + (f"; did you mean {near[0]}?" if near else ""))


def _packing(c: Conversion) -> None:
    """Record what packs rows, and what happens at the end of a packed sequence."""
    packed = is_packed(c)
    sets = rows.sets_of(c, "dataset")
    for name, given in sets:
        if is_on(given.get("packed")):
            line = c.lines.get("actor.global_batch_tokens")
            c.record(f"{name}.packed", Kind.TRANSLATED, f"actor.global_batch_tokens: {line.value if line else ''}")
        elif given.get("packed") is not None:
            c.record(f"{name}.packed", Kind.DEFAULT, rules.PACKED_ANYWAY)
        builder = DATASETS.get(_kind(given))
        if builder is None or "split_across_pack" not in builder.read:
            continue
        key = f"{name}.split_across_pack"
        if not packed:
            c.not_needed("there is no packing", key)
        elif not is_on(given.get("split_across_pack", True)):
            c.record(key, Kind.DEFAULT, "rows are packed whole")
        elif given.get("split_across_pack") is not None:
            c.missing("rows are packed whole: none is cut at the end of a packed sequence; leave it out", key)
        else:
            c.notes.append("torchtune cuts a text at the end of a packed sequence; here rows are packed whole")
    if packed and not all(is_on(given.get("packed")) for _, given in sets):
        c.notes.append("torchtune refuses packed data sets beside others; the recipe counts a step in tokens")
    for name, _ in rows.sets_of(c, "dataset_val"):
        c.not_needed("the loss of a row does not depend on packing", f"{name}.packed", f"{name}.split_across_pack")


def _wanted(given: Mapping[str, object]) -> str | None:
    """What is trained of the rows of a data set; None: plain text, or a builder that is not known."""
    builder = DATASETS.get(_kind(given))
    if builder is None or _is_text(given):
        return None
    if given.get("train_on_input") is None and given.get("masking_strategy") is not None:
        return MASKS.get(str(given["masking_strategy"]))
    return "all" if is_on(given.get("train_on_input", builder.on_prompts)) else "assistant"


def _targets(c: Conversion) -> None:
    """Write what is trained: where data sets differ, the least of it, so nothing that torchtune leaves out."""
    training = [(name, given, _wanted(given)) for name, given in rows.sets_of(c, "dataset")]
    values = [wanted for _, _, wanted in training if wanted is not None]
    if values:
        value = min(values, key=LEAST_FIRST.index)
        name, given = next((name, given) for name, given, wanted in training if wanted == value)
        key = next((key for key in TARGETS if given.get(key) is not None), "_component_")
        c.put(TRAIN_ON, value, comment=f"{name}.{key}: torchtune trains {_SHOWN[value]}")
    elif training and all(_is_text(given) for _, given, _ in training):
        value = "all"
        c.put(TRAIN_ON, value, comment="the rows are plain text, which is trained whole")
    else:
        value = "assistant"
    for name, given, wanted in training:
        _record_targets(c, name, given, wanted, value)
        if wanted not in (None, value) and not any(given.get(key) is not None for key in TARGETS):
            c.notes.append(
                f"{ONE_VALUE}: {value} is in the recipe, and torchtune trains {_SHOWN[str(wanted)]} of {name}"
            )
    for name, given in rows.sets_of(c, "dataset_val"):
        _record_targets(c, name, given, _wanted(given), value)


_SHOWN = {"last_assistant": "last answers", "assistant": "answers", "all": "prompts and answers"}


def _record_targets(c: Conversion, name: str, given: Mapping[str, object], wanted: str | None, value: str) -> None:
    if _kind(given) not in DATASETS or _is_text(given):
        return  # recorded like any other key
    by_switch = given.get("train_on_input") is not None
    if by_switch:
        c.not_needed("train_on_input replaces it, as there", f"{name}.masking_strategy")
    key = f"{name}.{'train_on_input' if by_switch else 'masking_strategy'}"
    if wanted is None:
        c.missing(f"{TRAIN_ON} is {', '.join(LEAST_FIRST)}; torchtune has {', '.join(MASKS)}", key)
    elif wanted != value:
        c.missing(f"{ONE_VALUE}, here {value}, which trains least; {TURNS}", key)
    else:
        c.record(key, Kind.TRANSLATED if TRAIN_ON in c.lines else Kind.DEFAULT, f"{TRAIN_ON}: {value}")
