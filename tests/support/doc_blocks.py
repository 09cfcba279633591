"""The code blocks of the documentation, and what each kind of command line must look like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*/README.md")
_FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (?P<kind>not run|file|from): (?P<text>[^\n]+) -->\n\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the project.
        line: of its fence, from 1.
        language: as written behind the fence.
        text: what is between the fences.
        excuse: why it is not run, from a comment right above it; None where it is.
        file: what a reader saves it as, likewise.
        source: the file of the project that it is a part of, likewise.
    """

    page: str
    line: int
    language: str
    text: str
    excuse: str | None
    file: str | None
    source: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a console block behind the prompt, continued lines joined, comments cut off."""
        joined = self.text.replace("\\\n", " ")
        lines = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        return [re.sub(r"\s+#\s.*$", "", line).strip() for line in lines]


def pages() -> list[Path]:
    """The pages that people read."""
    return sorted(
        path for pattern in PAGES for path in ROOT.glob(pattern) if "made" not in path.relative_to(ROOT).parts
    )


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            mark = _MARK.search(text[: match.start()])
            marks = {mark["kind"]: mark["text"]} if mark else {}
            found.append(
                Block(
                    str(page.relative_to(ROOT)),
                    text.count("\n", 0, match.start()) + 1,
                    match["language"],
                    match["text"],
                    marks.get("not run"),
                    marks.get("file"),
                    marks.get("from"),
                )
            )
    return [block for block in found if block.language in languages]
