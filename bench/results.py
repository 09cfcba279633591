"""Where results of benchmarks go: a section of docs/benchmarks.md each, between markers."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def machine() -> str:
    """The machine, the versions and the day, in words."""
    import torch
    import transformers

    cores = len(os.sched_getaffinity(0))
    return (
        f"{date.today()}, {platform.machine()} with {cores} cores (shared), Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def write_section(name: str, text: str, file: Path = PAGE) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`."""
    page = file.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- /{re.escape(name)} -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{file} has no section {name}: add <!-- {name} --> and <!-- /{name} -->")
    file.write_text(pattern.sub(lambda found: found.group(1) + text + found.group(2), page), encoding="utf-8")
