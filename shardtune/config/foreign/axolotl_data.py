"""Axolotl's data sets, chat templates and what it trains of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.rows import EVAL, TRAIN, as_entries, entry, files_of
from shardtune.config.foreign.values import is_on, listed, number

CONVERSATIONS = ("chat_template", "sharegpt")
OWN_TEMPLATES = ("alpaca", "metharme")
"""Templates that are the text of a data set, not of a model."""
SHAREGPT = {"role": "from", "content": "value"}
READ = ("path", "data_files", "split", "name", "type", "ds_type", "field", "field_messages")
READ += ("message_property_mappings", "message_field_role", "message_field_content", "field_tools")
RECOGNISED = "the format of the rows is recognised"
PLAIN = {"trust_remote_code": "data sets are files", "roles": "all usual names of roles are known"}
ALPACA_TEXT = (
    "Axolotl writes Alpaca's own text around such rows, here the chat template is used; docs/coming-from.md has a "
    "function for data.transform that writes the same text"
)


def convert(c: Conversion) -> None:
    """Read the data sets, the template and the targets."""
    kinds: list[str] = []
    for name, key in (("datasets", TRAIN), ("test_datasets", EVAL)):
        given = [one for one in listed(c.get(name)) if isinstance(one, Mapping)]
        entries = [line for place, one in enumerate(given) for line in _entries(c, name, place, one)]
        kinds += [_kind(one) for one in given] if key == TRAIN else []
        if entries:
            c.put(key, as_entries(entries), comment=name)
    _held_out(c)
    _targets(c, kinds)
    _template(c)
    in_order = is_on(c.get("sample_packing_sequentially")) or is_on(c.get("curriculum_sampling"))
    shuffled = is_on(c.get("shuffle_merged_datasets", True)) and not in_order
    names = ("shuffle_merged_datasets", "sample_packing_sequentially", "curriculum_sampling")
    if in_order:
        c.put("data.shuffle", False, *names)
    else:
        c.not_needed("rows are shuffled in every epoch, by Axolotl's sampler too", *names)
        c.put("data.shuffle", True)
    if not shuffled and not in_order:
        c.notes.append("shuffle_merged_datasets: false alone leaves the shuffling of the sampler, so rows are shuffled")


def _held_out(c: Conversion) -> None:
    size = number(c.get("val_set_size")) or 0.0
    if 0 < size < 1:
        c.put("data.eval_split", size, "val_set_size", comment="val_set_size; which rows differs")
    elif size:
        c.missing("data.eval_split is a share of the rows: val_set_size / rows", "val_set_size")
    else:
        c.record("val_set_size", Kind.DEFAULT, "no rows are held out")


def _kind(given: Mapping[str, object]) -> str:
    kind = given.get("type")
    return "own" if isinstance(kind, Mapping) else str(kind or "").partition(":")[0].partition(".")[0]


def _entries(c: Conversion, section: str, place: int, given: Mapping[str, object]) -> list[dict[str, object]]:
    """The entries of one data set; each of its keys is recorded."""
    name, kind = f"{section}[{place}]", _kind(given)
    options: dict[str, object] = {"name": given.get("name")}
    split, _, part = str(given.get("split") or "train").partition("[")
    if split != "train":
        options["split"] = split
    if part:
        first = re.fullmatch(r":(\d+)\]", part)
        options["max_samples"] = int(first[1]) if first else None
        if first is None:
            c.missing("max_samples: N of an entry takes its first N rows; here all are taken", f"{name}.split")
    ours = TRAIN if section == "datasets" else EVAL
    columns = _columns(c, name, kind, given)
    entries = [
        entry(path, **options, columns=columns) for path in files_of(c, given.get("path"), given.get("data_files"))
    ]
    for key in READ:
        theirs = f"{name}.{key}"
        if not any(known == theirs or known.startswith(f"{theirs}.") for known in c.outcomes):
            is_written = key in ("path", "data_files", "split", "name") or columns
            c.record(theirs, Kind.TRANSLATED, f"{ours}: {short(as_entries(entries)) if is_written else RECOGNISED}")
    for key in given:
        if f"{name}.{key}" not in c.outcomes and key in PLAIN:
            c.not_needed(PLAIN[key], f"{name}.{key}")
        elif key not in READ and key not in _LATER:
            c.missing(_remedy(key), f"{name}.{key}")
    return entries


_LATER = ("roles_to_train", "train_on_eos", "train_on_eot", "chat_template", "chat_template_jinja")


def _remedy(key: str) -> str:
    remedies = {
        "shards": "data.train_data_paths: {path: FILE, weight: 1 / shards} trains a share of the rows",
        "revision": "write it behind the name: path: OWNER/NAME@REVISION",
        "message_field_training": "loss_weight: 0 on a message excludes it; data.transform may write it",
        "message_field_training_detail": "a target is a whole turn; loss_weight of a message weighs it",
        "drop_system_message": "data.transform: FILE.py:FUNCTION may drop the turn",
        "conversation": "the chat template writes the turns: data.chat_template",
        "field_thinking": "data.transform may rename it to reasoning_content",
    }
    return remedies.get(key, "data.transform: FILE.py:FUNCTION makes rows of a format that docs/data.md lists")


def _columns(c: Conversion, name: str, kind: str, given: Mapping[str, object]) -> dict[str, object]:
    """Our names of columns -> theirs, where they differ; a format that there is not is recorded with a remedy."""
    if kind in CONVERSATIONS:
        return _conversation(c, name, kind, given)
    if kind == "completion":
        field = given.get("field") or str(given.get("type")).partition(":")[2] or "text"
        return {} if field == "text" else {"text": field}
    if kind == "own":
        own = given["type"] if isinstance(given["type"], Mapping) else {}
        pairs = {ours: own.get(f"field_{ours}") for ours in ("system", "instruction", "input", "output")}
        if own.get("format") or own.get("no_input_format") or own.get("system_prompt"):
            remedy = "a function for data.transform writes that text around a row: {prompt, completion}"
            c.missing(f"here the chat template is used; {remedy}", f"{name}.type")
        return {ours: theirs for ours, theirs in pairs.items() if theirs and theirs != ours}
    if kind.startswith("alpaca") or kind in ("gpteacher", "oasst", "reflection", "concisechoice"):
        c.missing(ALPACA_TEXT, f"{name}.type")
        return {}
    c.missing(f"there is no row format {kind}: {_remedy('')}", f"{name}.type")
    return {}


def _conversation(c: Conversion, name: str, kind: str, given: Mapping[str, object]) -> dict[str, object]:
    column = str(given.get("field_messages") or ("conversations" if kind == "sharegpt" else "messages"))
    mapping = given.get("message_property_mappings")
    mapping = dict(mapping) if isinstance(mapping, Mapping) else {}
    for part in ("role", "content"):
        mapping[part] = given.get(f"message_field_{part}") or mapping.get(part) or part
    if kind == "sharegpt" or mapping == SHAREGPT:
        columns = {} if column == "conversations" else {"conversations": column}
    else:
        columns = {} if column == "messages" else {"messages": column}
        if (mapping["role"], mapping["content"]) != ("role", "content"):
            remedy = "messages have role and content, or from and value: data.transform: FILE.py:FUNCTION renames them"
            c.missing(remedy, f"{name}.message_property_mappings")
    tools = given.get("field_tools")
    return columns | ({"tools": tools} if tools not in (None, "tools") else {})


def _targets(c: Conversion, kinds: list[str]) -> None:
    """What is trained, of all data sets at once: one key is for all of them here."""
    given = [one for one in listed(c.get("datasets")) if isinstance(one, Mapping)]
    names = [f"datasets[{place}]" for place in range(len(given))]
    roles = [[str(role) for role in listed(one.get("roles_to_train", ["assistant"]))] for one in given]
    everything = is_on(c.get("train_on_inputs")) or any({"user", "human"} & set(one) for one in roles)
    value = "all" if everything else "assistant"
    fields = [f"{name}.roles_to_train" for name in names if c.has("datasets")]
    c.put(
        "data.train_on",
        value,
        "train_on_inputs",
        comment="train_on_inputs" if c.has("train_on_inputs") else fields[0] if fields else "",
    )
    for place, name in enumerate(names):
        c.record(f"{name}.roles_to_train", Kind.TRANSLATED, f"data.train_on: {value}")
        for key in ("train_on_eos", "train_on_eot"):
            if given[place].get(key) in (None, "turn"):
                c.record(f"{name}.{key}", Kind.DEFAULT, "the end of every trained turn is a target")
            else:
                c.missing("the end of every trained turn is a target, of no other", f"{name}.{key}")
    if everything and "completion" not in kinds and len(kinds) > 1:
        c.notes.append("data.train_on is one value for all data sets")


def _template(c: Conversion) -> None:
    given = [one for one in listed(c.get("datasets")) if isinstance(one, Mapping)]
    inner = next((one.get("chat_template") for one in given if one.get("chat_template")), None)
    names = ("chat_template", *(f"datasets[{place}].chat_template" for place in range(len(given))))
    files = ("chat_template_jinja", *(f"datasets[{place}].chat_template_jinja" for place in range(len(given))))
    template = str(c.get("chat_template") or inner or "tokenizer_default")
    jinja = c.get("chat_template_jinja") or next((one.get("chat_template_jinja") for one in given), None)
    if jinja:
        is_file = "{" not in str(jinja)
        if is_file:
            c.put("data.chat_template", c.path(jinja), *files)
        else:
            c.missing("write it into a file: data.chat_template: FILE.jinja", *files)
        c.not_needed("chat_template_jinja is the template", *names)
    elif template == "chatml":
        c.put("data.chat_template", "chatml", comment="chat_template")
        for name in names:
            c.record(name, Kind.TRANSLATED, "data.chat_template: chatml")
    elif template in OWN_TEMPLATES:
        c.missing(f"write {template} as a Jinja file: data.chat_template: FILE.jinja", *names)
    else:
        c.not_needed("the tokenizer's own chat template is used", *names)
        if not template.startswith("tokenizer_default"):
            c.notes.append(
                f"the template {template} is Axolotl's copy, mostly the tokenizer's: compare shardtune data preview"
            )
