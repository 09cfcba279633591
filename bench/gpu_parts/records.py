"""Checks, parts, and the JSON lines in which their results are kept."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
Facts = Mapping[str, Any]
Line = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    Attributes:
        device: cuda or cpu.
        small: tiny shapes.
        folder: of the results, which are small; models and rows of the runs are beside it, in `FOLDER-work`.
        match: a regular expression that a check's name contains; others are left out.
        contenders: likewise, of the contenders of throughput.
    """

    device: str
    small: bool
    folder: Path
    match: str = ""
    contenders: str = ""

    def words(self) -> list[str]:
        """The same as arguments of the command."""
        words = ["--device", self.device, "--folder", str(self.folder), "--match", self.match]
        words += ["--contenders", self.contenders]
        return [*words, *(["--small"] if self.small else [])]

    def work(self, *names: str) -> Path:
        """A folder for files, which is made."""
        folder = self.folder.with_name(f"{self.folder.name}-work").joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Check:
    """One line of a part.

    Attributes:
        name: unique in its part.
        run: computes the facts of the line; one that is called `verdict` is PASS, FAIL or SKIP. A sequence is a line
            for each.
        seconds: what it takes at most, by experience: it is not begun with less time left.
    """

    name: str
    run: Callable[[Setting], Facts | Sequence[Facts]]
    seconds: float = 60.0


@dataclass(frozen=True)
class Part:
    """Some checks that share a process and a table.

    Attributes:
        title: what it shows.
        checks: for a setting.
        heads: keys of facts, which are the columns of its table.
        words: what stands above the table.
    """

    title: str
    checks: Callable[[Setting], Sequence[Check]]
    heads: Sequence[str] = ("value", "limit")
    words: str = ""

    def chosen(self, setting: Setting) -> list[Check]:
        return [check for check in self.checks(setting) if re.search(setting.match, check.name)]

    def names(self, setting: Setting) -> list[str]:
        return [check.name for check in self.chosen(setting)]


class Records:
    """The results of a part: `{"begun": check}` before each, then its lines.

    Args:
        folder: of all results.
        part: the name of the part.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.file = folder / f"{part}.jsonl"

    def lines(self) -> list[Line]:
        """All lines; one that a killed process has left unfinished is none."""
        if not self.file.exists():
            return []
        found = []
        for text in self.file.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        return found

    def results(self) -> list[Line]:
        """The lines with results, in order."""
        return [line for line in self.lines() if "check" in line]

    def pending(self, names: Sequence[str]) -> list[str]:
        """Those of the checks that have no line."""
        done = {line["check"] for line in self.results()}
        return [name for name in names if name not in done]

    def unfinished(self) -> str | None:
        """The check that was begun last, if it has no line."""
        begun = [line["begun"] for line in self.lines() if "begun" in line]
        return begun[-1] if begun and self.pending(begun[-1:]) else None

    def begin(self, check: str) -> None:
        self._write({"begun": check})

    def add(self, check: str, **facts: Any) -> None:
        self._write({"check": check, **facts})

    def forget(self) -> None:
        self.file.unlink(missing_ok=True)

    def _write(self, line: Line) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compute(part: Part, records: Records, setting: Setting, until: float) -> None:
    """Run the checks that have no line yet, one after the other, as long as there is time."""
    checks = {check.name: check for check in part.chosen(setting)}
    for name in records.pending(list(checks)):
        if time.time() + checks[name].seconds > until and not setting.small:
            return
        records.begin(name)
        began = time.perf_counter()
        try:
            found = checks[name].run(setting)
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            found = {"verdict": FAIL, "note": f"{type(error).__name__}: {text[0][:200] if text else ''}"}
        for facts in [found] if isinstance(found, Mapping) else found:
            records.add(name, **{**facts, "seconds": round(time.perf_counter() - began, 1)})


def within(value: float, limit: float, **facts: Any) -> Facts:
    """The facts of a number that must not exceed a limit; NaN does."""
    return {"value": float(value), "limit": limit, "verdict": PASS if value <= limit else FAIL, **facts}


def skip(why: str) -> Facts:
    """A line of something that cannot be checked here."""
    return {"verdict": SKIP, "note": why}
