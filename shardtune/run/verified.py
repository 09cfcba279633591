"""What was verified of a run's recipe: `verified.jsonl` in the run directory, a line for each check of a claim."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardtune.checkpoint.atomic import write_text

FILE = "verified.jsonl"


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of one check.

    Attributes:
        claim: its name, as typed after `shardtune verify`.
        outcome: passed, failed or skipped.
        text: what was seen.
        at: when, in ISO 8601.
    """

    claim: str
    outcome: str
    text: str
    at: str = ""


def note_verified(run_dir: Path, found: Sequence[Verified]) -> Path | None:
    """Append outcomes to those of a run; the file, or None where the run does not exist yet."""
    if not run_dir.is_dir():
        return None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file = run_dir / FILE
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = [{"claim": one.claim, "outcome": one.outcome, "text": one.text, "at": now} for one in found]
    write_text(file, before + "".join(json.dumps(line) + "\n" for line in lines), durably=False)
    return file


def read_verified(run_dir: Path) -> list[Verified]:
    """The newest outcome of each claim, in the order in which they were first checked."""
    file = run_dir / FILE
    if not file.is_file():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    newest = {line["claim"]: Verified(line["claim"], line["outcome"], line["text"], line["at"]) for line in lines}
    return list(newest.values())
