"""The recipe's limits on its data (`data.audit`), and the check of them before training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from shardtune.config import Recipe
from shardtune.config.schema import AuditConfig
from shardtune.data.audit.audit import Options, audit
from shardtune.data.audit.findings import VERSION, Example, Finding, Findings, LimitResult
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.cache_directory import cache_root, write_atomically
from shardtune.data.checksum import is_sealed, sealed
from shardtune.data.file_lock import FileLock
from shardtune.data.prepare import PreparedData
from shardtune.errors import DataError, counted
from shardtune.launch.progress import PROGRESS

OF_OUTCOMES = {
    "max_dropped": ("too_long", "no_target", "bad"),
    "max_without_target": ("no_target",),
    "max_truncated": ("truncated",),
}
"""Limits on what is known as soon as rows are encoded, and the outcomes that count."""
OF_KINDS = {
    "max_near_empty": "near_empty",
    "max_untrained_ends": "untrained_end",
    "max_duplicates": "duplicates",
    "max_near_duplicates": "near_duplicates",
}
NEAR = ("max_near_duplicates", "max_contamination")
_SHOWN = 3


def check_limits(recipe: Recipe, prepared: PreparedData, report: Callable[[str], None]) -> None:
    """Refuse training on data beyond a limit of the recipe.

    Limits on rows that are dropped or cut cost nothing. For others the rows are read once, by one of the processes that
    start together; the result is kept in the cache, so that a continued run does not read them again.

    Raises:
        DataError: with the limit, what was found, and examples.
    """
    limits = recipe.data.audit
    given = {name: value for name, value in limits.model_dump().items() if value is not None}
    train = prepared.whole
    if not given or train is None:
        return
    for name in OF_OUTCOMES.keys() & given.keys():
        found, share = _outcomes(train, OF_OUTCOMES[name])
        if share > given[name]:
            raise _beyond(name, given[name], share, found)
    if given.keys() <= OF_OUTCOMES.keys():
        return
    findings = _audited(recipe, prepared, Options(near=not given.keys().isdisjoint(NEAR)), report)
    for result in results(limits, findings, prepared):
        if result.failed:
            name = result.key.rpartition(".")[2]
            raise _beyond(name, result.limit, result.found, _finding(name, findings))


def results(limits: AuditConfig, findings: Findings, prepared: PreparedData) -> list[LimitResult]:
    """Each limit that is set, with what was found."""
    return [
        LimitResult(
            key=f"data.audit.{name}",
            limit=limit,
            found=round(found, 6),
            failed=found < limit if name == "min_trained_share" else found > limit,
        )
        for name, limit, found in _found(limits, findings, prepared)
    ]


def _found(limits: AuditConfig, findings: Findings, prepared: PreparedData) -> Iterator[tuple[str, float, float]]:
    """Name, limit and what was found. Raises `DataError` for a limit on what these rows do not have."""
    train = findings.sets["train"]
    for name, limit in limits.model_dump().items():
        if limit is None:
            continue
        if name in OF_OUTCOMES:
            assert prepared.whole is not None
            yield name, limit, _outcomes(prepared.whole, OF_OUTCOMES[name])[1]
        elif name == "max_contamination":
            if not findings.contamination:
                raise _inapplicable(name, "there are no evaluation rows", "name data.eval_data_paths")
            yield name, limit, max(one.total.share for one in findings.contamination.values())
        elif name == "min_trained_share":
            if train.total.trained_share is None:
                raise _inapplicable(name, "the rows have no tokens")
            yield name, limit, train.total.trained_share
        elif OF_KINDS[name] not in train.findings:
            raise _inapplicable(name, "; ".join(findings.notes) or "these rows have no such thing")
        else:
            yield name, limit, train.findings[OF_KINDS[name]].share


def _inapplicable(name: str, why: str, remedy: str = "leave it out") -> DataError:
    return DataError(f"data.audit.{name} has no meaning here: {why}", where=f"data.audit.{name}", remedy=f"{remedy}")


def _finding(name: str, findings: Findings) -> Finding | None:
    if name == "max_contamination":
        return max((one.total for one in findings.contamination.values()), key=lambda found: found.share)
    return findings.sets["train"].findings[OF_KINDS[name]] if name in OF_KINDS else None


def _outcomes(rows: TokenDataset, kinds: tuple[str, ...]) -> tuple[Finding, float]:
    """The rows that had these outcomes, and their share of the rows kept (cut ones) or read."""
    files = rows.report.files
    notes = [(file.label, getattr(file.tally, kind)) for kind in kinds for file in files]
    whole = sum(file.tally.kept if kinds == ("truncated",) else file.tally.rows for file in files)
    count = sum(one.count for _, one in notes)
    first = [Example(row=f"{label}:{number}", note=why) for label, one in notes for number, why in one.first[:_SHOWN]]
    share = count / max(1, whole)
    return Finding(count=count, share=share, examples=first[:_SHOWN]), share


def _beyond(name: str, limit: float, share: float, finding: Finding | None) -> DataError:
    is_least = name == "min_trained_share"
    what = "the trained share" if is_least else name.removeprefix("max_").replace("_", " ")
    side = "less" if is_least else "more"
    examples = "" if finding is None else "".join(f"\n    {line}" for line in map(_line, finding.examples[:_SHOWN]))
    rows = "" if finding is None else f" ({counted(finding.count, 'row')})"
    return DataError(
        f"{what} of the data is {share:.4g}{rows}, {side} than data.audit.{name}: {limit:g}{examples}",
        where=f"data.audit.{name}",
        remedy="shardtune data audit RECIPE shows all that is found; mend the data, or change the limit",
    )


def _line(example: Example) -> str:
    """Where a row is, its prompt and its targets, and the row that it resembles."""
    note = f"({example.note})" if example.note else ""
    texts = " → ".join(text for text in (example.text, example.trained) if text)
    other = "" if example.other is None else f"as {example.other.row}"
    return " ".join(part for part in (example.row, note, texts, other) if part)


# -- kept results --------------------------------------------------------------------------------------------------


def _audited(recipe: Recipe, prepared: PreparedData, options: Options, report: Callable[[str], None]) -> Findings:
    """The findings, kept in the cache if it can be written: one process makes them, the others wait."""
    root = cache_root(recipe.data.cache_dir)
    key = _key(prepared, options)
    file = root / "audits" / f"{key}.json"

    def is_there(holder: str = "", seconds: float = 0.0) -> bool:
        PROGRESS.beats += 1
        return _read(file) is not None

    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / "locks" / f"audit-{key}")
        try:
            if not is_there():
                lock.acquire(is_there)
            kept = _read(file)
            if kept is None:
                kept = audit(prepared, options, None, report)
                write_atomically(file, json.dumps(sealed({"findings": kept.model_dump()})).encode())
            return kept
        finally:
            lock.release()
    except OSError:  # a cache that is complete may be read-only
        return audit(prepared, options, None, report)


def _read(file: Path) -> Findings | None:
    with suppress(OSError, ValueError, KeyError, TypeError, ValidationError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if is_sealed(content):
            return Findings.model_validate(content["findings"])
    return None


def _key(prepared: PreparedData, options: Options) -> str:
    """What the findings depend on: rows, their files' names, the encoding, and the options."""
    sets = {"train": prepared.train, **prepared.evals}
    content = {
        "version": VERSION,
        "rows": [[name, rows.fingerprint, rows.files] for name, rows in sets.items() if rows is not None],
        "encoding": prepared.encoder.cache_key(),
        "options": [options.near, options.sample, options.examples],
    }
    return hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=16).hexdigest()
