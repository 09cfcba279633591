"""`dropped_rows.jsonl` where files are tokenised one by one: the rows of a file are added when it is first read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardtune.data.cache.dataset import TokenDataset
from shardtune.run.directory import DROPPED_ROWS, unwritable

_TRAIN = "train"


def noted_before(run_dir: Path) -> list[dict[str, Any]]:
    """The training rows that a run has noted so far; without those of the file at which a write was cut off."""
    file = run_dir / DROPPED_ROWS
    if not file.exists():
        return []
    *whole, torn = file.read_text(encoding="utf-8").split("\n")
    noted = [line for line in map(json.loads, whole) if line["set"] == _TRAIN]
    return [line for line in noted if line["file"] != noted[-1]["file"]] if torn else noted


class DroppedByFile:
    """Notes what became of the rows of a file, once in a run.

    Args:
        run_dir: of the run.
        before: what it has noted before.
        max_length: `data.max_length`.
        report: receives a line per outcome that is not "kept".
    """

    def __init__(
        self, run_dir: Path, before: Sequence[dict[str, Any]], max_length: int, report: Callable[[str], None]
    ) -> None:
        self._file = run_dir / DROPPED_ROWS
        self._noted = {line["file"] for line in before}
        self._max_length = max_length
        self._report = report

    def __call__(self, rows: TokenDataset) -> None:
        for line in rows.report.lines(max_length=self._max_length):
            self._report(f"data: {line}")
        if rows.report.files[0].label in self._noted:
            return
        lines = [json.dumps({"set": _TRAIN, **row}, ensure_ascii=False) + "\n" for row in rows.dropped()]
        if not lines:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise unwritable(self._file.parent, error) from error
