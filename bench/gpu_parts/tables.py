"""Tables of the results, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from results import table

from gpu_parts.records import FAIL, SKIP, Line, Part, Records, Setting


def shown(value: object) -> str:
    """A cell."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def part_table(part: Part, lines: list[Line]) -> str:
    """The lines of a part, without columns that are empty in all of them."""
    heads = [head for head in (*part.heads, "verdict", "note") if any(line.get(head) is not None for line in lines)]
    rows = [[line["check"], *(shown(line.get(head)).replace("|", "/") for head in heads)] for line in lines]
    return table(["", *heads], rows)


def verdicts(name: str, part: Part, setting: Setting) -> str:
    """A part's lines for the terminal."""
    lines = Records(setting.folder, name).results()
    return f"\n{name}: {part.title}\n\n{part_table(part, lines)}\n"


def page(parts: Mapping[str, Part], setting: Setting) -> tuple[str, list[str]]:
    """The text of all tables, and the checks that failed."""
    texts, failed = [], []
    for name, part in parts.items():
        lines = Records(setting.folder, name).results()
        if not lines:
            continue
        bad = [line["check"] for line in lines if line.get("verdict") == FAIL]
        failed += [f"{name}: {check}" for check in bad]
        missing = sum(line.get("verdict") == SKIP for line in lines)
        summary = f"{len(lines)} lines, {len(bad)} failed, {missing} left out."
        texts.append(
            f"### {part.title}\n\n{part.words + ' ' if part.words else ''}{summary}\n\n{part_table(part, lines)}"
        )
    return "\n\n".join(texts), failed
