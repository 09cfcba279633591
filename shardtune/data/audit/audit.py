"""Audits the prepared data of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.data.audit.contamination import EvaluationGrams
from shardtune.data.audit.content import repeats
from shardtune.data.audit.findings import (
    KINDS,
    OF_ROWS_READ,
    Compared,
    Contamination,
    Counts,
    Example,
    Finding,
    Findings,
    Lengths,
    Padding,
    SetFindings,
)
from shardtune.data.audit.near import Comparison, NearRows, Sketches, near_rows
from shardtune.data.audit.ngrams import FEWEST, SIZE, common_text
from shardtune.data.audit.scan import RowFacts, Written, scan
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import FrameEncoder
from shardtune.data.prepare import PreparedData
from shardtune.data.progress import show_progress
from shardtune.errors import legible

TEXT_LETTERS = 90
"""Of a text in an example, at most."""
_TEXT_TOKENS = 200
_BINS = 20
_AUDITING, _COMPARING = ("auditing", "audited"), ("comparing", "compared")


@dataclass(frozen=True, slots=True)
class Options:
    """How to audit.

    Attributes:
        near: also compare rows by n-grams: near duplicates, and near copies of evaluation rows in training.
        sample: compare at most so many rows of each set, evenly spaced; None: all.
        examples: rows to name of each kind.
    """

    near: bool = True
    sample: int | None = None
    examples: int = 5


@dataclass(frozen=True, slots=True)
class _Set:
    """A set with what was read of it."""

    rows: TokenDataset
    facts: RowFacts
    first: np.ndarray
    near: NearRows | None


def audit(prepared: PreparedData, options: Options, padding: Padding | None, report: Callable[[str], None]) -> Findings:
    """What is in the data.

    Memory: about 80 bytes per row, at most 77 per token of the evaluation sets, and a block of tokens; 64 bytes of
    temporary disk per row. Time: one pass over the tokens, and a comparison of n-grams per candidate.

    Args:
        prepared: the encoded rows.
        options: what to do of it.
        padding: as counted by `padding_avoided`.
        report: receives progress.
    """
    reader = _Reader(prepared, options, report)
    evals = {f"eval/{name}" if name else "eval": rows for name, rows in prepared.evals.items()}
    read = prepared.read()
    with ExitStack() as stack:
        stack.callback(reader.close)
        found = {name: reader.read(name, rows, is_training=False) for name, rows in evals.items()}
        if prepared.whole is not None:
            found = {"train": reader.read("train", prepared.whole, is_training=True), **found}
        return Findings(
            sets={name: _describe(reader, one, has_outcomes=name in read) for name, one in found.items()},
            contamination={
                name: _contamination(reader, name, found["train"], found[name]) for name in evals if "train" in found
            },
            padding=padding,
            notes=reader.notes(),
        )


class _Reader:
    """Reads sets, evaluation sets first, and makes examples of their rows."""

    def __init__(self, prepared: PreparedData, options: Options, report: Callable[[str], None]) -> None:
        encoder = prepared.encoder
        self.is_robot = isinstance(encoder, FrameEncoder)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.stops: Sequence[int] = ()
        if isinstance(encoder, ChatEncoder):
            self.tokenizer = encoder.tokenizer
            self.stops = () if self.is_robot else encoder.stop_token_ids
        self.options = options
        self.report = report
        self.has_tokens = any(_has_tokens(rows) for rows in prepared.read().values())
        self.compares = options.near and self.has_tokens and not self.is_robot
        self.indices: dict[str, EvaluationGrams] = {}
        self._sketches: list[Sketches] = []
        self._written = Written(self.tokenizer, self.stops)
        known = [rows for rows in (prepared.whole, *prepared.evals.values()) if rows is not None]
        self._common: np.ndarray | None = None
        if self.compares:
            self._common = np.logical_or.reduce([common_text(rows) for rows in known])

    def close(self) -> None:
        for sketches in self._sketches:
            sketches.close()

    def notes(self) -> list[str]:
        """What is not looked at."""
        found = []
        if self.is_robot:
            found.append(
                "rows are frames of robot data: frames are compared as they are, not by n-grams; the ends of turns are "
                "not looked at; an evaluation row counts as contaminated if training has its episode"
            )
        elif not self.has_tokens:
            found.append("rows have fields and no tokens: they are compared by their fields, not by n-grams")
        if self.has_tokens and not self.stops and not self.is_robot:
            found.append("the adapter's own encoder names no end-of-turn token: the ends of answers are not looked at")
        if not self.options.near:
            found.append("near duplicates and near copies of evaluation rows were not looked for (--near off)")
        if self.options.sample is not None and self.compares:
            found.append(f"by n-grams at most {self.options.sample:,} rows of each set were compared (--sample)")
        return found

    def read(self, name: str, rows: TokenDataset, *, is_training: bool) -> _Set:
        """One pass over a set, and the groups of its near duplicates."""
        if not self.compares or self._common is None:
            with self._progress(name, rows, _AUDITING) as step:
                facts = scan(rows, self.stops, self._written, step=step)
            return _Set(rows, facts, repeats(facts.keys), None)
        sketches = Sketches(len(rows))
        self._sketches.append(sketches)
        index = None if is_training else self.indices.setdefault(name, EvaluationGrams(len(rows)))
        with self._progress(name, rows, _AUDITING) as step:
            facts = scan(
                rows, self.stops, self._written, common=self._common, sketches=sketches, collect=index,
                look_up=self.indices if is_training else None, sample=self.options.sample, step=step,
            )  # fmt: skip
        if index is not None:
            index.finish()
        first = repeats(facts.keys)
        similarity = Comparison(rows, facts.others, self._common).similarity
        with self._progress(name, rows, _COMPARING) as step:
            near = near_rows(
                sketches, first == np.arange(len(rows)), similarity, most_pairs=self.options.examples, step=step
            )
        return _Set(rows, facts, first, near)

    @contextmanager
    def _progress(self, name: str, rows: TokenDataset, verbs: tuple[str, str]) -> Iterator[Callable[[int], None]]:
        with show_progress(name, self.report, verbs) as progress:
            yield lambda done: progress.update(done, done / max(1, len(rows)))
            progress.finish(len(rows))

    # Examples.

    def example(self, rows: TokenDataset, index: int, note: str = "") -> Example:
        sample = rows.row(index)
        text, trained = self._texts(sample)
        return Example(row=rows.locate(index), text=text, trained=trained, note=note)

    def pair(self, rows: TokenDataset, index: int, others: TokenDataset, other: int, shared: float | None) -> Example:
        one = self.example(rows, index)
        rounded = None if shared is None else round(shared, 3)
        return one.model_copy(update={"other": self.example(others, other), "shared": rounded})

    def _texts(self, sample: Sample) -> tuple[str, str]:
        """What comes before the first target, and what is trained."""
        if not len(sample.input_ids):
            fields = (f"{name} {value.dtype} {list(value.shape)}" for name, value in sample.fields.items())
            return legible("; ".join(fields), TEXT_LETTERS), ""
        targets = np.flatnonzero(sample.loss_weights)
        start = int(targets[0]) if len(targets) else len(sample.input_ids)
        return self._text(sample.input_ids[:start]), self._text(sample.input_ids[targets])

    def _text(self, tokens: np.ndarray) -> str:
        if len(tokens) > 2 * _TEXT_TOKENS:
            tokens = np.concatenate([tokens[:_TEXT_TOKENS], tokens[-_TEXT_TOKENS:]])
        if self.tokenizer is None:
            return legible(" ".join(str(token) for token in tokens.tolist()), TEXT_LETTERS)
        return legible(str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)), TEXT_LETTERS)


def _has_tokens(rows: TokenDataset) -> bool:
    return len(rows) > 0 and len(rows.row(0).input_ids) > 0


# -- a set ---------------------------------------------------------------------------------------------------------


def _describe(reader: _Reader, one: _Set, *, has_outcomes: bool) -> SetFindings:
    rows, facts, number = one.rows, one.facts, np.arange(len(one.rows))
    flags = {"near_empty": facts.near_empty} if reader.has_tokens and not reader.is_robot else {}
    flags |= {"untrained_end": facts.untrained_end} if len(reader.stops) else {}
    flags["duplicates"] = one.first != number
    examples = {kind: partial(_flagged, reader, rows, flagged) for kind, flagged in flags.items()}
    examples["duplicates"] = partial(_copies, reader, one)
    if one.near is not None:
        flags["near_duplicates"] = one.near.first != number
        examples["near_duplicates"] = partial(_near_copies, reader, one.near, rows)
    outcomes = _outcomes(rows) if has_outcomes else {}
    read = sum(file.tally.rows for file in rows.report.files) if has_outcomes else len(rows)
    sums = {source: {kind: counted.get(source, 0) for kind, counted in outcomes.items()} for source in _names(rows)}
    terms = rows.term_weights
    sources = {}
    for span in rows.sources:
        here = slice(span.start, span.stop)
        of_source = sum(file.tally.rows for file in rows.report.files if file.source == span.name)
        kinds = sums[span.name] | {kind: int(flagged[here].sum()) for kind, flagged in flags.items()}
        sources[span.name] = _counts(
            of_source if has_outcomes else span.stop - span.start, rows, facts, here, terms, reader.has_tokens, kinds
        )
    kinds = {kind: sum(counted.values()) for kind, counted in outcomes.items()}
    kinds |= {kind: int(flagged.sum()) for kind, flagged in flags.items()}
    kept = sum(file.tally.kept for file in rows.report.files)
    findings = {}
    for kind in (kind for kind in KINDS if kind in kinds):
        whole = read if kind in OF_ROWS_READ else kept if kind in outcomes else len(rows)
        named = examples[kind]() if kind in examples else _noted(reader, rows, kind)
        findings[kind] = Finding(count=kinds[kind], share=kinds[kind] / max(1, whole), examples=named)
    return SetFindings(
        total=_counts(read, rows, facts, slice(None), terms, reader.has_tokens, kinds),
        sources=sources,
        findings=findings,
        lengths=_lengths(rows.lengths),
        near=None if one.near is None else Compared(rows=one.near.compared, is_complete=one.near.is_complete),
    )


def _names(rows: TokenDataset) -> list[str]:
    return [span.name for span in rows.sources]


def _outcomes(rows: TokenDataset) -> dict[str, dict[str, int]]:
    """Kind -> source -> rows, of what became of rows when they were encoded."""
    found: dict[str, dict[str, int]] = {}
    for kind in ("too_long", "no_target", "bad", "filtered", "truncated", "left_out"):
        counted = found.setdefault(kind, {})
        for file in rows.report.files:
            counted[file.source] = counted.get(file.source, 0) + getattr(file.tally, kind).count
    return found


def _counts(
    read: int,
    rows: TokenDataset,
    facts: RowFacts,
    here: slice,
    terms: Mapping[str, np.ndarray],
    has_tokens: bool,
    kinds: dict[str, int],
) -> Counts:
    tokens = int(rows.lengths[here].sum(dtype=np.int64)) if has_tokens else 0
    trained = int(facts.trained[here].sum(dtype=np.int64))
    return Counts(
        rows_read=read,
        rows=len(facts.trained[here]),
        tokens=tokens,
        trained_tokens=trained,
        trained_share=trained / tokens if tokens else None,
        weights={name: float(weights[here].sum()) for name, weights in terms.items()},
        kinds=kinds,
    )


def _lengths(lengths: np.ndarray) -> Lengths:
    longest = int(lengths.max())
    width = max(1, -(-(longest + 1) // _BINS))
    edges = list(range(0, longest + width + 1, width))
    counts, _ = np.histogram(lengths, edges)
    p95, p99 = (int(value) for value in np.percentile(lengths, [95, 99], method="nearest"))
    return Lengths(
        shortest=int(lengths.min()), median=int(np.median(lengths)), mean=round(float(lengths.mean()), 2),
        p95=p95, p99=p99, longest=longest, edges=edges, counts=counts.tolist(),
    )  # fmt: skip


def _flagged(reader: _Reader, rows: TokenDataset, flagged: np.ndarray) -> list[Example]:
    return [reader.example(rows, int(index)) for index in np.flatnonzero(flagged)[: reader.options.examples]]


def _copies(reader: _Reader, one: _Set) -> list[Example]:
    copies = np.flatnonzero(one.first != np.arange(len(one.first)))[: reader.options.examples]
    return [reader.pair(one.rows, int(index), one.rows, int(one.first[index]), None) for index in copies]


def _near_copies(reader: _Reader, near: NearRows, rows: TokenDataset) -> list[Example]:
    return [reader.pair(rows, row, rows, other, shared) for row, other, shared in near.pairs]


def _noted(reader: _Reader, rows: TokenDataset, kind: str) -> list[Example]:
    """The first rows of an outcome; of one that is kept its text too."""
    found: list[Example] = []
    for place, file in enumerate(rows.report.files):
        for number, reason in getattr(file.tally, kind).first[: reader.options.examples - len(found)]:
            index = None if kind in OF_ROWS_READ else rows.find(place, number)
            note = legible(reason, TEXT_LETTERS)
            dropped = Example(row=f"{file.label}:{number}", note=note)
            found.append(dropped if index is None else reader.example(rows, index, note))
    return found


# -- training against evaluation -----------------------------------------------------------------------------------


def _contamination(reader: _Reader, name: str, train: _Set, held_out: _Set) -> Contamination:
    rows = held_out.rows
    order = np.argsort(train.facts.keys, kind="stable")
    places = np.searchsorted(train.facts.keys, held_out.facts.keys, sorter=order).clip(max=len(order) - 1)
    match = order[places]
    exact = train.facts.keys[match] == held_out.facts.keys
    if reader.is_robot:
        order = np.argsort(train.rows.hashes, kind="stable")
        places = np.searchsorted(train.rows.hashes, rows.hashes, sorter=order).clip(max=len(order) - 1)
        of_episode = train.rows.hashes[order[places]] == rows.hashes
        match, exact = np.where(exact, match, order[places]), exact | of_episode
    most, total = reader.options.examples, max(1, len(rows))
    same = [reader.pair(rows, int(row), train.rows, int(match[row]), None) for row in np.flatnonzero(exact)[:most]]
    index = reader.indices.get(name)
    covered = {} if index is None else {row: one for row, one in index.covered().items() if not exact[row]}
    near = [reader.pair(rows, row, train.rows, other, shared) for row, (other, shared) in list(covered.items())[:most]]
    count = int(exact.sum())
    both = count + len(covered)
    return Contamination(
        exact=Finding(count=count, share=count / total, examples=same),
        near=None if index is None else Finding(count=len(covered), share=len(covered) / total, examples=near),
        total=Finding(count=both, share=both / total, examples=[*same, *near][:most]),
        compared=0 if index is None else int(index.compared.sum()),
    )


COMPARED_BY = f"{SIZE} tokens in a row; rows of fewer than {FEWEST} of them are compared as a whole only"
"""How rows are compared, in words."""
