"""How two runs differ in versions, code, data, model, dtypes, layout and history, by their manifests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardtune.config.rank_layout import Layout
from shardtune.config.schema import short_key
from shardtune.data.cache.entry import ENCODED
from shardtune.errors import ParallelError
from shardtune.run.diff.continued import changed_on_the_way
from shardtune.run.diff.settings import ANY, Difference, Effect
from shardtune.run.inputs import IN_MEMORY, MODEL, TOKENIZER
from shardtune.run.stored_run import StoredRun

OF_VERSIONS: Mapping[str, tuple[Effect, ...]] = {
    "shardtune": ANY,
    "transformers": ("tokens", "loss", "rounding"),
    "tokenizers": ("tokens",),
    "torch": ("loss", "rounding"),
    "numpy": ("rounding",),
    "datasets": ("rows",),
    "safetensors": (),
    "python": ("rounding",),
    "platform": ("rounding",),
    "git": ANY,
}
"""What another version can change. `git` is the working directory's commit, which may hold the run's own code."""
NOT_RECORDED = "not recorded"
NONE = "none"


def changed_circumstances(first: StoredRun, second: StoredRun) -> list[Difference]:
    """Everything that the manifests and events record and that differs, besides the recipe."""
    return [
        *_versions(first, second),
        *_files(first, second),
        *_data(first, second),
        *_numbers(first, second),
        *_layout(first, second),
        *_history(first, second),
    ]


def same_content(first: StoredRun, second: StoredRun) -> set[str]:
    """The keys of the recipe that name files or objects of the same content in both runs."""
    one, other = (run.manifest.get("inputs", {}) for run in (first, second))
    return {key for key in one.keys() & other.keys() if _contents(one[key]) == _contents(other[key])}


def _contents(pairs: Sequence[Sequence[str]]) -> list[str]:
    return [content for _, content in pairs]


def _versions(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    one, other = (run.manifest.get("versions", {}) for run in (first, second))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            effects = OF_VERSIONS.get(name, ("rounding",))
            yield Difference("versions", name, _text(one.get(name)), _text(other.get(name)), effects)


def _files(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    """Files of code, weights and data, and objects in memory, by their content."""
    for key, one, other in _pairs(first.manifest, second.manifest, "inputs"):
        was, now = one or [], other or []
        if _contents(was) == _contents(now):
            continue
        section, effects = _of_input(key)
        before, after = _by_name(was), _by_name(now)
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                label = short_key(key) if name in ("", IN_MEMORY) else f"{short_key(key)}: {name}"
                yield Difference(section, label, _text(before.get(name)), _text(after.get(name)), effects)
    for name, one, other in _pairs(first.manifest, second.manifest, "user_code"):
        if one != other:
            yield Difference("code", name, _text(one), _text(other), ANY)
    workers = first.manifest.get("worker"), second.manifest.get("worker")
    if workers[0] != workers[1]:
        yield Difference("code", "the worker's class", _text(workers[0]), _text(workers[1]), ANY)


def _of_input(key: str) -> tuple[str, tuple[Effect, ...]]:
    """The section of an input, and what another content of it can change."""
    if key.startswith("data.eval_data_paths"):
        return "data", ("evaluation",)
    if key.startswith("data.train_data_paths"):
        return "data", ("rows",)
    if key.startswith("data."):
        return "data", ("rows", "tokens")
    if key == TOKENIZER:
        return "model", ("tokens", "loss")
    if key.startswith("eval."):
        return "code", ("evaluation",)
    return ("model", ("loss",)) if key == MODEL else ("code", ANY)


def _by_name(pairs: Sequence[Sequence[str]]) -> dict[str, str]:
    """Contents by the part of each path that follows what all have in common; "" for a single one."""
    if len(pairs) < 2:
        return {"": pairs[0][1]} if pairs else {}
    base = os.path.commonpath([os.path.abspath(name) for name, _ in pairs])
    return {os.path.relpath(os.path.abspath(name), base): content for name, content in pairs}


def _data(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    one, other = (run.manifest.get("data", {}) for run in (first, second))
    checks: tuple[tuple[str, str, tuple[Effect, ...]], ...] = (
        ("train_fingerprint", "training rows as tokens, in order", ("rows", "tokens")),
        ("encoding", "settings of the encoding", ("tokens",)),
        ("template_hash", "chat template", ("tokens",)),
        ("rows_per_epoch", "rows of an epoch", ("rows", "update")),
        ("num_samples", "samples", ("rows", "update")),
    )
    for key, name, effects in checks:
        if one.get(key) != other.get(key):
            section = "template" if key == "template_hash" else "data"
            yield Difference(section, name, _short(one.get(key)), _short(other.get(key)), effects)
    yield from files_read(one.get("train", []), other.get("train", []))
    for name, was, now in _pairs(one, other, "evaluation_fingerprints"):
        if was != now:
            yield Difference("data", f"evaluation rows {name}".rstrip(), _short(was), _short(now), ("evaluation",))
    for kind, was, now in _pairs(one, other, "outcomes"):
        yield from _outcomes(kind, was or [], now or [])


def _outcomes(kind: str, was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """What became of the rows of each file, where that differs; files are compared in their order."""
    effects: tuple[Effect, ...] = ("rows",) if kind == "train" else ("evaluation",)
    for place in range(max(len(was), len(now))):
        one, other = (files[place] if place < len(files) else {} for files in (was, now))
        name = str((one or other).get("file", "")).rpartition("/")[2]
        counts = [key for key in dict.fromkeys([*one, *other]) if key not in ("source", "file")]
        for key in counts:
            if one.get(key, 0) != other.get(key, 0):
                values = (f"{files.get(key, 0):,}" if files else NONE for files in (one, other))
                yield Difference("data", f"{name}: rows {key}".replace("rows rows", "rows"), *values, effects=effects)


def _numbers(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    """Dtypes and the trained parameters."""
    for name, one, other in _pairs(first.manifest, second.manifest, "dtypes"):
        if one != other:
            yield Difference(
                "dtypes", name, _text(one), _text(other), ("update",) if name == "optimizer" else ("loss",)
            )
    one, other = (_trained(run.manifest) for run in (first, second))
    if one != other:
        counts = (f"{sum(parameters.values()):,} parameters" for parameters in (one, other))
        yield Difference("model", "trained", *counts, effects=("loss", "update"))
        for name in [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)][:8]:
            values = (f"{parameters[name]:,}" if name in parameters else NONE for parameters in (one, other))
            yield Difference("model", f"trained: {name}", *values, effects=("loss", "update"))


def _trained(manifest: Mapping[str, Any]) -> dict[str, int]:
    return {pattern["name"]: int(pattern["parameters"]) for pattern in manifest.get("trainable_patterns", ())}


def _layout(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    one, other = _ranks(first), _ranks(second)
    if one != other:
        yield Difference("layout", "ranks", one, other, ("rounding",))
    layouts = _layout_of(first), _layout_of(second)
    if layouts[0] != layouts[1]:
        yield Difference("layout", "axes", *layouts, effects=("rounding",))
    devices = [_text(run.manifest.get("device")) for run in (first, second)]
    if devices[0] != devices[1]:
        yield Difference("layout", "device of rank 0", *devices, effects=("rounding",))


def _ranks(run: StoredRun) -> str:
    """The number of ranks, at each start if it changed."""
    numbers = [ranks for _, ranks in run.starts() if ranks is not None] or [run.manifest.get("world_size")]
    return ", then ".join(
        str(number) for place, number in enumerate(numbers) if not place or numbers[place - 1] != number
    )


def _layout_of(run: StoredRun) -> str:
    if run.resolved is None or "world_size" not in run.manifest:
        return NOT_RECORDED
    try:
        return str(Layout.of(run.resolved.actor, int(run.manifest["world_size"])))
    except ParallelError:  # of another version
        return NOT_RECORDED


def _history(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    one, other = ([step for step, _ in run.starts()] for run in (first, second))
    if one != other:
        yield Difference("history", "started and continued", _begun(one), _begun(other), ())
    yield from changed_on_the_way(first, second)
    came = [_text(run.manifest.get("resumed_from"), NONE) for run in (first, second)]
    if came[0] != came[1]:
        yield Difference("history", "began from the checkpoint", *came, effects=("loss", "update"))


def _begun(steps: Sequence[int]) -> str:
    again = [f"{step:,}" for step in steps[1:]]
    return "once" if not again else f"continued after step {', '.join(again)}"


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any, Any]]:
    """The entries of a mapping in two manifests, by name."""
    one, other = first.get(key) or {}, second.get(key) or {}
    for name in dict.fromkeys([*one, *other]):
        yield name, one.get(name), other.get(name)


def _text(value: object, missing: str = NOT_RECORDED) -> str:
    return missing if value is None else str(value)


def files_read(one: Sequence[Mapping[str, object]], other: Sequence[Mapping[str, object]]) -> Iterator[Difference]:
    """Files that both runs have read and whose contents or encoded rows differ where no fingerprint has it; by place.

    Contents are those of `data.cache: by_file`, encoded rows those that a user's code makes.
    """
    for was, now in zip(one, other, strict=False):
        encoded = was.get(ENCODED), now.get(ENCODED)
        if was.get("key") == now.get("key") and None not in encoded and encoded[0] != encoded[1]:
            name = f"encoded rows of {was['file']}"
            yield Difference("data", name, _short(encoded[0]), _short(encoded[1]), ("rows", "tokens"))
        contents = was.get("content"), now.get("content")
        if None not in contents and contents[0] != contents[1]:
            name = f"training file {was['file']}"
            yield Difference("data", name, _short(contents[0]), _short(contents[1]), ("rows", "tokens"))


def _short(value: object) -> str:
    """A fingerprint, shortened; a number with separators."""
    if isinstance(value, int):
        return f"{value:,}"
    return NONE if value is None else str(value)[:12]
