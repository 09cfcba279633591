"""`shardtune data audit`: what is in a recipe's rows, as text, JSON and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from shardtune.config import Recipe, load_recipe
from shardtune.config.user_code import import_plugins
from shardtune.data.audit.audit import COMPARED_BY, Options, audit
from shardtune.data.audit.findings import KINDS, Contamination, Counts, Example, Finding, Findings, Lengths, SetFindings
from shardtune.data.audit.limits import NEAR, results
from shardtune.data.audit.near import NEAR as NEAR_SHARE
from shardtune.data.audit.padding import padding_avoided
from shardtune.data.prepare import PreparedData, prepare_data
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.language_model import LanguageModel
from shardtune.run.choose_worker import worker_class
from shardtune.run.display import shown_path
from shardtune.training.worker.adapter_worker import SFTWorker

COLUMNS: Mapping[str, Sequence[str]] = {
    "dropped": ("too_long", "no_target", "bad", "filtered"),
    "cut": ("truncated",),
    "near-empty": ("near_empty",),
    "end untrained": ("untrained_end",),
    "duplicates": ("duplicates",),
    "near": ("near_duplicates",),
}
"""The columns of the table of sources, and what they count."""
_BAR = 40
_NOT_LOOKED_FOR = "too short, or outside of the sample"
_NOT_COMPARED = f"exact copies, {_NOT_LOOKED_FOR}"


def audit_recipe(
    recipe: str | Path | Mapping[str, object] | DictConfig | None,
    *overrides: str,
    options: Options | None = None,
    report: Callable[[str], None],
) -> Findings:
    """Look through all rows of a recipe, and compare what is found with the limits in `data.audit`.

    Args:
        recipe: as for training.
        overrides: as for training.
        options: what to look for.
        report: receives progress.

    Raises:
        ConfigError: the rows come from a loader of the user's own.
    """
    loaded = load_recipe(recipe, overrides)
    with loaded.spelling.in_errors():
        return _audit(loaded, options or Options(), report)


def _audit(loaded: Recipe, options: Options, report: Callable[[str], None]) -> Findings:
    import_plugins(loaded.plugins)
    kind = worker_class(loaded)
    if not issubclass(kind, SFTWorker):
        raise ConfigError(
            f"the recipe is driven by {kind.__name__}, whose build_dataloader makes its own batches: there are no rows "
            "whose tokens, targets, duplicates or overlap could be counted",
            where="actor.worker" if loaded.actor.worker else "actor.model.model_type",
            remedy="shardtune train RECIPE --dry-run describes the first batch",
        )
    adapter = find_adapter(loaded)
    prepared: PreparedData = prepare_data(
        loaded, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), whole=True, report=report
    )
    assert prepared.whole is not None
    packs = isinstance(adapter, LanguageModel)
    found = audit(prepared, options, padding_avoided(loaded, prepared.whole) if packs else None, report)
    limits, notes = loaded.data.audit, list(found.notes)
    if kind.build_dataloader is not SFTWorker.build_dataloader:
        notes.append(f"{kind.__name__} has a build_dataloader of its own: these are the rows that the recipe names")
    if not options.near:
        given = limits.model_dump(exclude_none=True)
        notes += [f"data.audit.{name} was not checked" for name in NEAR if name in given]
        limits = limits.model_copy(update=dict.fromkeys(NEAR))
    return found.model_copy(update={"limits": results(limits, found, prepared), "notes": notes})


# -- as text -------------------------------------------------------------------------------------------------------


def as_text(found: Findings) -> str:
    """The findings for a terminal."""
    lines: list[str] = []
    for name, one in found.sets.items():
        lines += [*_set_lines(name, one), ""]
    for name, one in found.contamination.items():
        lines += [*_contamination_lines(name, one, found.sets[name].total.rows), ""]
    if found.padding is not None:
        padding = found.padding
        lines += [
            f"padding avoided: {padding.saved:.1%}; {padding.rows:,} rows of an epoch have {padding.tokens:,} tokens, "
            f"and {padding.padding:,} more if {padding.rows_per_micro_batch} rows at a time were padded to the longest",
            "",
        ]
    if any(one.near is not None for one in found.sets.values()):
        lines.append(f"near: {NEAR_SHARE:.0%} of the n-grams are shared ({COMPARED_BY})")
    lines += [f"note: {note}" for note in found.notes]
    for result in found.limits:
        sign = "✗ beyond" if result.failed else "✓ within"
        lines.append(f"{sign} {result.key}: {result.limit:g}, found {result.found:.4g}")
    return "\n".join(lines).rstrip()


def summary(total: Counts) -> str:
    """Rows, tokens and targets in a line."""
    read = "" if total.rows == total.rows_read else f" of {total.rows_read:,} read"
    if total.trained_share is None:
        weights = ", ".join(f"{weight:,.0f} in {term}" for term, weight in total.weights.items())
        return f"{total.rows:,} rows{read}, weight {weights}"
    return f"{total.rows:,} rows{read}, {total.tokens:,} tokens, {total.trained_share:.1%} trained"


def title_of(name: str) -> str:
    return "training rows" if name == "train" else f"evaluation rows {name.removeprefix('eval').lstrip('/')}".rstrip()


def table_of(one: SetFindings) -> list[list[str]]:
    """A header, and a line for each source."""
    columns = {title: kinds for title, kinds in COLUMNS.items() if any(kind in one.total.kinds for kind in kinds)}
    rows = [["source", "rows", "tokens", "trained", *columns]]
    for name, counts in [*one.sources.items(), *([("all", one.total)] if len(one.sources) > 1 else [])]:
        share = "–" if counts.trained_share is None else f"{counts.trained_share:.1%}"
        found = [f"{sum(counts.kinds.get(kind, 0) for kind in kinds):,}" for kinds in columns.values()]
        rows.append([name, f"{counts.rows:,}", f"{counts.tokens:,}", share, *found])
    return rows


def _set_lines(name: str, one: SetFindings) -> Iterator[str]:
    yield f"{title_of(name)}: {summary(one.total)}"
    table = table_of(one)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield f"  {'  '.join([row[0].ljust(widths[0]), *others])}".rstrip()
    yield from _length_lines(one.lengths)
    for kind, finding in one.findings.items():
        if finding.count:
            yield from _finding_lines(finding, KINDS[kind])
    if one.near is not None and one.near.rows < one.total.rows:
        yield f"  {one.near.rows:,} rows were compared by n-grams; the others are {_NOT_COMPARED}"
    if one.near is not None and not one.near.is_complete:
        yield "  more rows are alike than were compared: the number of near duplicates is a lower bound"


def _length_lines(lengths: Lengths) -> Iterator[str]:
    yield (
        f"  lengths: {lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,}, mean {lengths.mean:,.0f}, "
        f"95 % up to {lengths.p95:,}, 99 % up to {lengths.p99:,}"
    )
    most, width = max(lengths.counts), len(f"{lengths.edges[-1]:,}")
    for edge, count in zip(lengths.edges, lengths.counts, strict=False):
        if count:
            yield f"    from {edge:{width},}  {'█' * max(1, round(_BAR * count / most))} {count:,}"


def _finding_lines(finding: Finding, words: str) -> Iterator[str]:
    yield f"  {finding.count:,} row{'' if finding.count == 1 else 's'} ({finding.share:.2%}) {words}"
    for example in finding.examples:
        yield f"    {example_text(example)}"
        if example.other is not None:
            shared = "the same as" if example.shared is None else f"{example.shared:.0%} shared with"
            yield f"      {shared} {example_text(example.other)}"


def example_text(example: Example) -> str:
    """A row on one line: where it is, what happened to it, its prompt and its targets."""
    note = f" ({example.note})" if example.note else ""
    texts = " → ".join(text for text in (example.text, example.trained) if text)
    return f"{shown_path(Path(example.row))}{note}{'  ' if texts else ''}{texts}"


def _contamination_lines(name: str, one: Contamination, rows: int) -> Iterator[str]:
    if one.total.count:
        yield f"{title_of(name)} that are in training: {one.total.count:,} ({one.total.share:.2%})"
    else:
        yield f"no row of the {title_of(name)} is in training"
    if one.exact.count:
        yield from _finding_lines(one.exact, "exactly")
    if one.near is not None and one.near.count:
        yield from _finding_lines(one.near, "nearly: most of the row, or of its prompt, is in one training row")
    if one.near is not None and one.compared < rows:
        yield f"  {one.compared:,} of {rows:,} were compared by n-grams; the others are {_NOT_LOOKED_FOR}"
