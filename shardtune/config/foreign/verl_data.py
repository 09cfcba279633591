"""verl's rows, their columns, and the batches that are made of them."""

from __future__ import annotations

from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.rows import EVAL, TRAIN, as_entries, entry
from shardtune.config.foreign.values import is_on, listed, whole
from shardtune.config.foreign.verl_keys import NAME
from shardtune.config.foreign.verl_source import Source


def convert(s: Source) -> None:
    """Read the rows of training and evaluation, their columns, and how many a step has."""
    c = s.c
    for ours, files, limit in (
        (TRAIN, "data.train_files", "data.train_max_samples"),
        (EVAL, "data.val_files", "data.val_max_samples"),
    ):
        paths = [c.path(one) for one in listed(c.get(files))]
        most = whole(c.get(limit)) or -1
        entries = [entry(path, max_samples=most if most > 0 else None) for path in paths]
        if entries:
            c.put(ours, as_entries(entries), *((files, limit) if most > 0 else (files,)), always=True)
        if most > 0 and len(paths) > 1:
            c.missing(f"max_samples is of each file here; there it is of all of {files} together", limit)
        elif most <= 0:
            c.record(limit, Kind.DEFAULT, "all rows")
    c.put(
        "data.max_length",
        whole(s.get("data.max_length")),
        "data.max_length",
        comment=s.origin("data.max_length"),
    )
    _too_long(s)
    _columns(s)
    _batch(s)
    c.put("data.template_kwargs", c.get("data.apply_chat_template_kwargs", {}), "data.apply_chat_template_kwargs")
    if c.has("data.custom_cls") and c.get("data.custom_cls.path") is None:
        c.record("data.custom_cls", Kind.DEFAULT, "nothing is set")
    if not c.has("data.val_files"):
        c.not_needed("there is no evaluation data", "trainer.test_freq")


def _too_long(s: Source) -> None:
    """Rows longer than the limit; `no_padding` cuts them, whatever `truncation` is."""
    c, name, key = s.c, "data.truncation", "data.on_too_long"
    kind = str(s.get(name))
    if not s.is_older and s.get("data.pad_mode") == "no_padding":
        c.put(key, "truncate", "data.pad_mode", comment="pad_mode: no_padding cuts rows, whatever truncation is")
        c.not_needed("pad_mode: no_padding cuts rows at max_length anyway", name)
    elif kind == "left":
        c.put(key, "fail", comment=f"{name}: left, which there is not")
        c.missing(f"{key} is truncate, which keeps the beginning, drop, fail or split; fail is written", name)
    elif kind == "right":
        c.put(key, "truncate", name)
    else:
        c.put(key, "fail", name, comment=s.origin(name))


def _columns(s: Source) -> None:
    """The columns of chats, or of questions and answers."""
    c = s.c
    section = "data.multiturn." if s.is_older else "data."
    turns = s.is_older and is_on(c.get("data.multiturn.enable"))
    single = ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")
    if s.is_older and not turns:
        c.not_needed("multiturn.enable is off", "data.multiturn")
        _questions(s)
        return
    c.record("data.multiturn.enable", Kind.DEFAULT, "what a row holds is recognised")
    c.not_needed("rows are chats", *(f"data.{name}" for name in single))
    columns: dict[str, object] = {}
    for ours, theirs in (("messages", "messages_key"), ("tools", "tools_key")):
        name = f"{section}{theirs}"
        if c.get(name, ours) != ours:
            columns[ours] = c.get(name)
        c.record(name, Kind.TRANSLATED if ours in columns else Kind.DEFAULT, f"the column {c.get(name, ours)}")
    for ours in ("images", "videos"):
        name = f"data.{ours.removesuffix('s')}_key"
        if c.get(name, ours) != ours:
            columns[ours] = c.get(name)
            c.record(name, Kind.TRANSLATED, f"data.columns: {{{ours}: {c.get(name)}}}")
        c.record(name, Kind.DEFAULT, f"the column {ours}")
    if columns:
        c.put("data.columns", columns, comment="messages_key, tools_key, …")
    name, thinks = f"{section}enable_thinking_key", "enable_thinking"
    remedy = f"values for the chat template are a column chat_template_kwargs, of mappings {{{thinks}: true}}"
    if c.get(name, thinks) == thinks:
        c.not_needed(f"{remedy}; data preview lists a column {thinks} as not read", name)
    else:
        c.missing(f"{remedy}: data.transform: FILE.py:FUNCTION makes it", name)


def _questions(s: Source) -> None:
    """The columns of a question and an answer, or the fields of them that are taken."""
    c = s.c
    columns, fields = {}, False
    for ours, theirs in (("question", "prompt"), ("answer", "response")):
        name, inner = f"data.{theirs}_key", f"data.{theirs}_dict_keys"
        if c.get(inner):
            fields = True
            path = "".join(f"[{str(one)!r}]" for one in (s.get(name), *listed(c.get(inner))))
            c.missing(f"data.transform: FILE.py:FUNCTION makes a row with {ours}: row{path}", name, inner)
        else:
            c.record(inner, Kind.DEFAULT, "nothing is set")
            columns |= {ours: s.get(name)} if s.get(name) != ours else {}
            c.record(name, Kind.TRANSLATED, f"the column {s.get(name)}")
    if columns and not fields:
        c.put("data.columns", columns, "data.prompt_key", "data.response_key")
    c.notes.append(
        f"{NAME} writes the prompt by the chat template and appends the answer and the token of the end; here the "
        "template writes both, and what it writes after an answer is trained as shardtune data preview shows"
    )


def _batch(s: Source) -> None:
    """The rows of a step over all processes, and what a forward pass has at most."""
    c = s.c
    rows, each = "data.train_batch_size", "data.micro_batch_size_per_gpu"
    c.put("actor.global_batch_size", whole(s.get(rows)), rows, comment=s.origin(rows), always=True)
    dynamic, tokens = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
    if is_on(s.get(dynamic)):
        most = (whole(s.get(tokens)) or 1) * s.sequence
        c.put("actor.micro_batch_size", None, dynamic, comment=f"{dynamic}: rows are packed up to a number of tokens")
        comment = f"{s.origin(tokens)}, × ulysses_sequence_parallel_size" if s.sequence > 1 else s.origin(tokens)
        c.put("actor.max_tokens_per_micro_batch", most, tokens, comment=comment)
        c.not_needed(f"{dynamic} is on", each)
    else:
        c.put("actor.micro_batch_size", whole(s.get(each)), each, comment=s.origin(each), always=True)
        c.not_needed(f"{dynamic} is off", dynamic, tokens)
    if s.is_older and not is_on(c.get("data.balance_dp_token")):
        c.notes.append(
            f"{NAME}'s loss is a mean over micro-batches and processes of their means, so tokens in short ones count "
            "more; here it is the mean over the tokens of a step"
        )
    c.notes.append(f"{NAME} leaves out the rows after the last whole step of an epoch; here they are a smaller step")
