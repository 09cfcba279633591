"""Axolotl's data sets, chat templates and what it trains of a row."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.rows import (
    EVAL,
    FORMAT,
    ROLES,
    TRAIN,
    TURNS,
    as_entries,
    entry,
    files_of,
    hold_out,
    of_evaluation,
    sets_of,
    split_of,
)
from shardtune.config.foreign.values import is_on, listed, number

CONVERSATIONS = ("chat_template", "sharegpt")
OWN_TEMPLATES = ("alpaca", "metharme")
"""Templates that are the text of a data set, not of a model."""
SHAREGPT = {"role": "from", "content": "value"}
READ = ("path", "data_files", "split", "name", "type", "ds_type", "field", "field_messages")
READ += ("message_property_mappings", "message_field_role", "message_field_content", "field_tools")
RECOGNISED = "the format of the rows is recognised"
PLAIN = {"trust_remote_code": "data sets are files"}
SECTIONS = (("datasets", TRAIN), ("test_datasets", EVAL))
ALPACA_TEXT = (
    "Axolotl writes Alpaca's own text around such rows, here the chat template is used; docs/coming-from.md has a "
    "function for data.transform that writes the same text"
)


def convert(c: Conversion) -> None:
    """Read the data sets, the template and the targets."""
    training: list[dict[str, object]] = []
    for section, key in SECTIONS:
        entries = [line for name, given in sets_of(c, section) for line in _entries(c, name, key, given)]
        if entries:
            c.put(key, as_entries(entries), comment=section)
        training = entries if key == TRAIN else training
    hold_out(c, "val_set_size", training)
    if not number(c.get("val_set_size")):
        c.record("val_set_size", Kind.DEFAULT, "no rows are held out")
    _targets(c)
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


def _kind(given: Mapping[str, object]) -> str:
    kind = given.get("type")
    return "own" if isinstance(kind, Mapping) else str(kind or "").partition(":")[0].partition(".")[0]


def kinds(c: Conversion) -> set[str]:
    """The types of all data sets, each without what follows its first word."""
    return {_kind(given) for section, _ in SECTIONS for _, given in sets_of(c, section)}


def _entries(c: Conversion, name: str, ours: str, given: Mapping[str, object]) -> list[dict[str, object]]:
    """The entries of one data set; each of its keys is recorded."""
    kind = _kind(given)
    options, lost = split_of(given.get("split"))
    options["name"] = given.get("name")
    if lost:
        c.missing(lost, f"{name}.split")
    columns = _columns(c, name, kind, given)
    entries = [
        entry(path, **(of_evaluation(path, options) if ours == EVAL else options), columns=columns)
        for path in files_of(c, given.get("path"), given.get("data_files"))
    ]
    for key in READ:
        theirs = f"{name}.{key}"
        if not any(known == theirs or known.startswith(f"{theirs}.") for known in c.outcomes):
            is_written = key in ("path", "data_files", "split", "name") or columns
            line = f"{ours}: {short(as_entries(entries)) if is_written else RECOGNISED}"
            c.record(theirs, Kind.DEFAULT if given.get(key) is None else Kind.TRANSLATED, line)
    for key, value in given.items():
        if f"{name}.{key}" not in c.outcomes and key in PLAIN:
            c.not_needed(PLAIN[key], f"{name}.{key}")
        elif value is None and key not in READ:
            c.record(f"{name}.{key}", Kind.DEFAULT, "nothing is set")
        elif key not in (*READ, *_LATER):
            c.missing(_remedy(key), f"{name}.{key}")
    return entries


_LATER = ("roles", "roles_to_train", "train_on_eos", "train_on_eot", "chat_template", "chat_template_jinja")


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
    return remedies.get(key, FORMAT)


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


def _targets(c: Conversion) -> None:
    """What is trained, of all data sets at once: one key is for all of them here."""
    everything = is_on(c.get("train_on_inputs"))
    c.put("data.train_on", "all" if everything else "assistant", "train_on_inputs")
    if everything and "chat_template" in kinds(c):
        c.notes.append(
            "train_on_inputs: of a conversation Axolotl trains the text and the end of every turn; data.train_on: all "
            "trains what the chat template writes between them, too"
        )
    for section, _ in SECTIONS:
        for name, given in sets_of(c, section):
            _role_names(c, name, given.get("roles"))
            _trained_roles(c, name, given, everything)
            for key in ("train_on_eos", "train_on_eot"):
                if given.get(key) in (None, "turn"):
                    c.record(f"{name}.{key}", Kind.DEFAULT, "the end of every trained turn is a target")
                else:
                    c.missing("the end of every trained turn is a target, of no other", f"{name}.{key}")


def _role_names(c: Conversion, name: str, roles: object) -> None:
    """Record the names of roles, each of which has to have the same role here."""
    if not isinstance(roles, Mapping):
        if roles is not None:
            c.missing(FORMAT, f"{name}.roles")
        return
    for role, names in roles.items():
        unknown = [str(one) for one in listed(names) if ROLES.get(str(one)) != ROLES.get(str(role), "")]
        if unknown:
            known = f"known are {', '.join(ROLES)}"
            c.missing(
                f"{', '.join(unknown)}: data.transform: FILE.py:FUNCTION renames it, {known}", f"{name}.roles.{role}"
            )
        else:
            c.not_needed("these names of roles are known", f"{name}.roles.{role}")


def _trained_roles(c: Conversion, name: str, given: Mapping[str, object], everything: bool) -> None:
    """Record the roles whose turns are trained: here those of the assistant, or all."""
    key, roles = f"{name}.roles_to_train", given.get("roles")
    if given.get("roles_to_train") is None:
        c.record(key, Kind.DEFAULT, "data.train_on: assistant")
        return
    if everything:
        c.not_needed("train_on_inputs trains every turn", key)
        return
    pairs = roles.items() if isinstance(roles, Mapping) else ()
    mapped = {str(one): str(role) for role, names in pairs for one in listed(names)}
    trained = {mapped.get(str(role), str(role)) for role in listed(given["roles_to_train"])}
    if trained - {"function_call"} and {ROLES.get(role) for role in trained} == {"assistant"}:
        c.record(key, Kind.TRANSLATED, "data.train_on: assistant")
    else:
        c.missing(f"the recipe trains the turns of the assistant, data.train_on: all every token; {TURNS}", key)


def _template(c: Conversion) -> None:
    sets = [one for section, _ in SECTIONS for one in sets_of(c, section)]
    given = [one for _, one in sets]
    inner = next((one.get("chat_template") for one in given if one.get("chat_template")), None)
    names = ("chat_template", *(f"{name}.chat_template" for name, _ in sets))
    files = ("chat_template_jinja", *(f"{name}.chat_template_jinja" for name, _ in sets))
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
