"""What a page shows of one run, read from its files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shardtune.config import Recipe, flatten
from shardtune.config.schema import short_key
from shardtune.config.tree import get_value, set_value
from shardtune.config.yaml_text import yaml_text
from shardtune.data.file_lock import FileLock
from shardtune.launch.events import ALIVE, BEGINS
from shardtune.run.diff.settings import PLACE
from shardtune.run.directory import LOCK
from shardtune.run.report.curves import natural_order
from shardtune.run.stored_run import StoredRun
from shardtune.training.loggers import SAMPLES, as_numbers

SHOWN_ANSWERS = 12
READ_ANSWERS = 5000
MOST_EVENTS = 60
ENDS = ("end", "stop", "failed", "stuck", "lost")
STATES: Mapping[str, str] = {"stop": "stopped", "failed": "failed", "stuck": "stuck", "lost": "a rank was lost"}


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of an evaluation set.

    Attributes:
        name: of the set; "" for a single one.
        columns: what wrote each answer: the steps of one run, or the names of several.
        rows: question, expected answer, and by column the answer and whether it is right.
        total: questions.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, str | None, Sequence[tuple[str, bool | None]]]]
    total: int


def state(run: StoredRun) -> tuple[str, str]:
    """What a run is doing in words, and good, bad or "" for how it is shown."""
    if run.finished is not None:
        return "finished", "good"
    last = str(run.events[-1].get("event")) if run.events else ""
    if last in STATES:
        return STATES[last], "bad"
    if not (run.path / ALIVE).exists():
        return "not finished", ""
    return ("running", "") if FileLock(run.path / LOCK).in_use() else ("killed", "bad")


def seconds(run: StoredRun) -> float | None:
    """The time that a run took, without the pauses between a stop and a continuation; None if it is not recorded."""
    total, began, last = 0.0, None, None
    for event in run.events:
        at = _time(event)
        if at is None:
            continue
        if event.get("event") in BEGINS:
            total += (last - began) if began is not None and last is not None else 0.0
            began = at
        last = at
    return None if began is None or last is None else total + last - began


def _time(event: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(event["time"])).timestamp()
    except (KeyError, ValueError):
        return None


def chosen_settings(run: StoredRun) -> dict[str, object]:
    """The keys that differ from their defaults, in the short form, without the name and place of the run."""
    defaults = Recipe().to_dict()
    chosen: dict[str, object] = {}
    for key, value in run.settings.items():
        if key not in PLACE and get_value(defaults, key) != value:
            chosen[short_key(key)] = value
    return chosen


def as_yaml(settings: Mapping[str, object]) -> str:
    """Dotted keys as YAML."""
    tree: dict[str, object] = {}
    for key, value in settings.items():
        set_value(tree, key, value)
    return yaml_text(tree, width=100)


def whole_recipe(run: StoredRun) -> str:
    return yaml_text(run.tree, width=100)


def environment(run: StoredRun) -> dict[str, str]:
    """Versions, dtypes, ranks and device."""
    manifest = run.manifest
    dtypes = ", ".join(f"{name} {dtype}" for name, dtype in manifest.get("dtypes", {}).items())
    found = {"dtypes": dtypes, "ranks": str(manifest.get("world_size", "")), "device": str(manifest.get("device", ""))}
    versions = {name: str(value) for name, value in manifest.get("versions", {}).items() if value is not None}
    code = {f"code: {name}": digest for name, digest in manifest.get("user_code", {}).items()}
    return {name: value for name, value in {**found, **versions, **code}.items() if value}


def data_rows(run: StoredRun) -> list[list[str]]:
    """A line per data file: for what, its name, rows, how many are used, what became of the others, its hash."""
    data, inputs = run.manifest.get("data", {}), run.manifest.get("inputs", {})
    digests = {name: content for key in inputs if key.startswith("data.") for name, content in inputs[key]}
    found = []
    for kind, files in data.get("outcomes", {}).items():
        for file in files:
            rest = {name: count for name, count in file.items() if name not in ("source", "file", "rows", "kept")}
            fate = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in rest.items())
            name, digest = str(file["file"]).rpartition("/")[2], digests.get(file["file"], "")
            found.append([kind, name, f"{file['rows']:,}", f"{file['kept']:,}", fate, digest[:16]])
    return found


def shown_events(run: StoredRun) -> list[list[str]]:
    """The last events but for saves: time, event, step, ranks, reason."""
    found = []
    for event in [event for event in run.events if event.get("event") != "save"][-MOST_EVENTS:]:
        at = str(event.get("time", "")).replace("T", " ").partition(".")[0]
        counts = ["" if event.get(name) is None else f"{event[name]:,}" for name in ("step", "ranks")]
        found.append([at, str(event.get("event")), *counts, str(event.get("reason") or "")])
    return found


def saves(run: StoredRun) -> str:
    """How many checkpoints were written, in a sentence; "" for none."""
    steps = [event.get("step") for event in run.events if event.get("event") == "save"]
    return f"Checkpoints were written {len(steps):,} times, the last at step {steps[-1]:,}." if steps else ""


def read_answers(runs: Sequence[StoredRun]) -> list[Answers]:
    """Answers to the same questions: of one run the first and the last ones, of several the last ones of each."""
    files = [_sample_files(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for sets in files for name in sets):
        if len(runs) == 1:
            steps = files[0][name]
            chosen = [steps[0], steps[-1]] if len(steps) > 1 else steps
            columns = [("before training" if not step else f"step {step:,}", file) for step, file in chosen]
        else:
            columns = [(run.name, sets[name][-1][1]) for run, sets in zip(runs, files, strict=True) if name in sets]
        found.append(_joined(name, columns))
    return [answers for answers in found if answers.rows]


def _joined(name: str, columns: Sequence[tuple[str, Path]]) -> Answers:
    """The answers of several files by question; first those whose verdict changed."""
    by_question: list[dict[str, dict[str, Any]]] = []
    for _, file in columns:
        with open(file, encoding="utf-8") as lines:
            read = [json.loads(line) for _, line in zip(range(READ_ANSWERS), lines, strict=False)]
        by_question.append({str(answer.get("row")): answer for answer in read})
    rows = []
    shared = [row for row in by_question[-1] if all(row in answers for answers in by_question)]
    for row in _chosen(shared, by_question):
        last = by_question[-1][row]
        question = str(last.get("question") or last.get("prompt") or row)
        answers = [(str(column[row].get("answer") or ""), column[row].get("correct")) for column in by_question]
        reference = last.get("reference")
        rows.append((question, None if reference is None else str(reference), answers))
    return Answers(name, [label for label, _ in columns], rows, len(shared))


def _chosen(shared: Sequence[str], answers: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Some questions: the first ones, and among them those whose last answer is wrong."""
    wrong = [row for row in shared if any(one[row].get("correct") is False for one in answers[-1:])][
        : SHOWN_ANSWERS // 3
    ]
    first = [row for row in shared if row not in wrong][: SHOWN_ANSWERS - len(wrong)]
    return sorted([*first, *wrong], key=list(shared).index)


def _sample_files(run: StoredRun) -> dict[str, list[tuple[int, Path]]]:
    """By evaluation set: step and file of its answers, in the order of steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for file in (run.path / SAMPLES).glob("step_*.jsonl"):
        match = re.fullmatch(r"step_(\d+)(?:_(.+))?", file.stem)
        if match:
            found.setdefault(match[2] or "", []).append((int(match[1]), file))
    return {name: sorted(files) for name, files in sorted(found.items(), key=lambda one: natural_order(one[0]))}


def final_metrics(run: StoredRun) -> dict[str, float]:
    """The evaluation of `final/`, NaN for what was not finite; empty without one."""
    finished = run.finished or {}
    return as_numbers(finished.get("metrics") or {})


def trained_parameters(run: StoredRun) -> int:
    return sum(int(pattern["parameters"]) for pattern in run.manifest.get("trainable_patterns", ()))


def changed_keys(runs: Sequence[StoredRun]) -> dict[str, list[object]]:
    """The keys that are not the same in all runs, in the short form, with the value of each."""
    defaults = flatten(Recipe().to_dict())
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key, defaults.get(key)) for run in runs] for key in keys if key not in PLACE}
    return {short_key(key): found for key, found in values.items() if any(one != found[0] for one in found)}
