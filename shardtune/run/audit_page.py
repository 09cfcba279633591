"""The findings of an audit as one HTML file: no script, no network, light and dark, on a phone too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardtune.data.audit.findings import KINDS, Example, Finding, Findings, Lengths, LimitResult, SetFindings
from shardtune.run.audit import example_text, summary, table_of, title_of
from shardtune.run.html import Html, document, element, joined, table

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
    title = f"Data of {name}"
    return document(title, _STYLE, joined([element("h1", title), *_body(found)]))


def _body(found: Findings) -> Iterator[Html]:
    if found.limits:
        yield element("h2", "Limits")
        yield _list(_limit(result) for result in found.limits)
    for name, one in found.sets.items():
        yield from _set(name, one)
    for name, one in found.contamination.items():
        yield element("h2", f"{title_of(name).capitalize()} in training")
        yield _finding(one.exact, "the same as a training row")
        if one.near is not None:
            yield _finding(one.near, "most of the row, or of its prompt, is in one training row")
    if found.padding is not None:
        padding = found.padding
        yield element("h2", "Padding avoided")
        yield element(
            "p",
            f"{padding.saved:.1%}: {padding.rows:,} rows of an epoch have {padding.tokens:,} tokens, and "
            f"{padding.padding:,} more if {padding.rows_per_micro_batch} rows at a time were padded to the longest.",
        )
    if found.notes:
        yield element("h2", "Not looked at")
        yield _list(found.notes)


def _list(items: Iterable[str]) -> Html:
    return element("ul", *(element("li", item) for item in items))


def _limit(result: LimitResult) -> Html:
    kind, word = ("bad", "beyond") if result.failed else ("good", "within")
    what = f" {result.key}: {result.limit:g}, found {result.found:.4g}"
    return joined([element("span", word, class_=kind), what])


def _set(name: str, one: SetFindings) -> Iterator[Html]:
    yield element("h2", title_of(name).capitalize())
    yield element("p", summary(one.total))
    header, *rows = table_of(one)
    yield table(header, rows)
    yield from _histogram(one.lengths)
    for kind, finding in one.findings.items():
        if finding.count:
            yield _finding(finding, KINDS[kind])
    if one.near is not None and not one.near.is_complete:
        yield element("p", "More rows are alike than were compared: the number of near duplicates is a lower bound.")


def _finding(finding: Finding, words: str) -> Html:
    rows = "row" if finding.count == 1 else "rows"
    what = f"{finding.count:,} {rows} ({finding.share:.2%}): {words}"
    if not finding.examples:
        return element("p", what)
    examples = _list(joined([example_text(example), _other(example)]) for example in finding.examples)
    return element("details", element("summary", what), examples)


def _other(example: Example) -> Html:
    if example.other is None:
        return Html()
    shared = "the same as" if example.shared is None else f"{example.shared:.0%} shared with"
    return joined([element("br"), element("span", f"{shared} {example_text(example.other)}", class_="soft")])


def _histogram(lengths: Lengths) -> Iterator[Html]:
    """The lengths as bars, with their range below."""
    most, width = max(lengths.counts), _WIDTH / len(lengths.counts)
    bars = []
    for place, count in enumerate(lengths.counts):
        height = _HEIGHT * count / most
        what = f"{lengths.edges[place]:,} to {lengths.edges[place + 1] - 1:,}: {count:,} rows"
        corner = {"x": f"{place * width:.1f}", "y": f"{_HEIGHT - height:.1f}"}
        bars.append(element("rect", element("title", what), **corner, width=f"{width - 1:.1f}", height=f"{height:.1f}"))
    words = (
        f"lengths {lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,}, 95 % up to {lengths.p95:,}, "
        f"99 % up to {lengths.p99:,}"
    )
    yield element("svg", *bars, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=words)
    yield element("div", element("span", "0"), element("span", f"{lengths.edges[-1]:,}"), class_="ends")
    yield element("p", words)
