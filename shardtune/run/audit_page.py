"""The findings of an audit as one HTML file: no script, no network, light and dark, on a phone too."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shardtune.data.audit.findings import KINDS, Example, Finding, Findings, Lengths, SetFindings
from shardtune.run.audit import example_text, summary, table_of, title_of

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --back: #ffffff; --soft: #656d76; --line: #d0d7de; --bar: #0969da;
  --bad: #b3261e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --soft: #9198a1; --line: #3d444d;
  --bar: #4493f8; --bad: #ff8a80; --good: #57ab5a; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto; padding: 1rem;
  max-width: 60rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin-top: 1rem; } svg rect { fill: var(--bar); }
.ends { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem; }
details { margin: .5rem 0; } summary { cursor: pointer; } li { margin: .4rem 0; } .soft { color: var(--soft); }
.bad { color: var(--bad); } .good { color: var(--good); }
"""
_WIDTH, _HEIGHT = 600, 160


def as_page(found: Findings, name: str) -> str:
    """The whole file.

    Args:
        found: what to show.
        name: of the recipe.
    """
    title = f"Data of {escape(name)}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *_body(found),
            "</body></html>",
            "",
        ]
    )


def _body(found: Findings) -> Iterator[str]:
    if found.limits:
        yield "<h2>Limits</h2><ul>"
        for result in found.limits:
            kind, word = ("bad", "beyond") if result.failed else ("good", "within")
            what = f"{result.key}: {result.limit:g}, found {result.found:.4g}"
            yield f'<li><span class="{kind}">{word}</span> {escape(what)}</li>'
        yield "</ul>"
    for name, one in found.sets.items():
        yield from _set(name, one)
    for name, one in found.contamination.items():
        yield f"<h2>{escape(title_of(name).capitalize())} in training</h2>"
        yield from _finding(one.exact, "the same as a training row")
        if one.near is not None:
            yield from _finding(one.near, "most of the row, or of its prompt, is in one training row")
    if found.padding is not None:
        padding = found.padding
        yield "<h2>Padding avoided</h2>"
        yield (
            f"<p>{padding.saved:.1%}: {padding.rows:,} rows of an epoch have {padding.tokens:,} tokens, and "
            f"{padding.padding:,} more if {padding.rows_per_micro_batch} rows at a time were padded to the longest.</p>"
        )
    if found.notes:
        yield "<h2>Not looked at</h2><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in found.notes)
        yield "</ul>"


def _set(name: str, one: SetFindings) -> Iterator[str]:
    yield f"<h2>{escape(title_of(name).capitalize())}</h2><p>{escape(summary(one.total))}</p>"
    header, *rows = table_of(one)
    yield f'<div class="wide"><table><tr>{"".join(f"<th>{escape(cell)}</th>" for cell in header)}</tr>'
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"
    yield _histogram(one.lengths)
    for kind, finding in one.findings.items():
        if finding.count:
            yield from _finding(finding, KINDS[kind])
    if one.near is not None and not one.near.is_complete:
        yield "<p>More rows are alike than were compared: the number of near duplicates is a lower bound.</p>"


def _finding(finding: Finding, words: str) -> Iterator[str]:
    rows = "row" if finding.count == 1 else "rows"
    what = f"{finding.count:,} {rows} ({finding.share:.2%}): {words}"
    if not finding.examples:
        yield f"<p>{escape(what)}</p>"
        return
    yield f"<details><summary>{escape(what)}</summary><ul>"
    for example in finding.examples:
        yield f"<li>{escape(example_text(example))}{_other(example)}</li>"
    yield "</ul></details>"


def _other(example: Example) -> str:
    if example.other is None:
        return ""
    shared = "the same as" if example.shared is None else f"{example.shared:.0%} shared with"
    return f'<br><span class="soft">{shared} {escape(example_text(example.other))}</span>'


def _histogram(lengths: Lengths) -> str:
    """The lengths as bars, with their range below."""
    most, width = max(lengths.counts), _WIDTH / len(lengths.counts)
    bars = []
    for place, count in enumerate(lengths.counts):
        height = _HEIGHT * count / most
        what = f"{lengths.edges[place]:,} to {lengths.edges[place + 1] - 1:,}: {count:,} rows"
        bars.append(
            f'<rect x="{place * width:.1f}" y="{_HEIGHT - height:.1f}" width="{width - 1:.1f}" height="{height:.1f}">'
            f"<title>{what}</title></rect>"
        )
    words = (
        f"lengths {lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,}, 95 % up to {lengths.p95:,}, "
        f"99 % up to {lengths.p99:,}"
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">{"".join(bars)}</svg>'
        f'<div class="ends"><span>0</span><span>{lengths.edges[-1]:,}</span></div><p>{words}</p>'
    )
