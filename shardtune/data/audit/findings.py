"""The result of an audit, as it is printed, written as JSON and shown on a page."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

VERSION = 1
"""Of the JSON form: raised when a name is removed or changes its meaning; names may be added."""
KINDS: Mapping[str, str] = {
    "too_long": "dropped, longer than data.max_length",
    "no_target": "dropped, without a target",
    "bad": "skipped, not usable",
    "filtered": "dropped by data.transform",
    "truncated": "cut at data.max_length",
    "left_out": "without reasoning that they have",
    "near_empty": "near-empty: nothing but space and punctuation is trained",
    "untrained_end": "with an answer whose end of turn is not trained",
    "duplicates": "exact duplicates of an earlier row",
    "near_duplicates": "near duplicates of an earlier row",
}
"""What is counted, and the words for it."""
OF_ROWS_READ = ("too_long", "no_target", "bad", "filtered")
"""Those whose share is one of the rows read; that of the others is one of the rows kept."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Example(_Frozen):
    """One row.

    Attributes:
        row: `file:row`.
        text: the beginning and end of what comes before its first target, or its fields.
        trained: the beginning and end of what is trained.
        note: the reason why it was dropped, or how long it was.
        other: the row that it resembles.
        shared: the part of the n-grams that both have; None for rows that are the same.
    """

    row: str
    text: str = ""
    trained: str = ""
    note: str = ""
    other: Example | None = None
    shared: float | None = None


class Finding(_Frozen):
    """Rows of one kind: how many, which share of all, and the first of them."""

    count: int
    share: float
    examples: list[Example] = []


class Counts(_Frozen):
    """Sums over a source, or over a set.

    Attributes:
        rows_read: rows of its files, usable or not.
        rows: rows that are kept.
        tokens: of the rows kept; 0 for rows of fields.
        trained_tokens: targets among them.
        trained_share: `trained_tokens / tokens`; None without tokens.
        weights: the sum of each loss term's weights.
        kinds: rows of each kind, by the names in `KINDS`; a kind that does not apply is absent.
    """

    rows_read: int
    rows: int
    tokens: int
    trained_tokens: int
    trained_share: float | None
    weights: dict[str, float]
    kinds: dict[str, int]


class Lengths(_Frozen):
    """The lengths of rows in tokens, or their sizes; `counts[i]` rows are from `edges[i]` to below `edges[i + 1]`."""

    shortest: int
    median: int
    mean: float
    p95: int
    p99: int
    longest: int
    edges: list[int]
    counts: list[int]


class Compared(_Frozen):
    """How rows were compared n-gram by n-gram.

    Attributes:
        rows: how many were; the others are too short, exact copies, or outside of the sample.
        is_complete: False where there were too many candidates to compare all: the count is then a lower bound.
    """

    rows: int
    is_complete: bool


class SetFindings(_Frozen):
    """The training rows, or those of an evaluation set."""

    total: Counts
    sources: dict[str, Counts]
    findings: dict[str, Finding]
    lengths: Lengths
    near: Compared | None


class Contamination(_Frozen):
    """Rows of an evaluation set that training has too.

    Attributes:
        exact: they are a training row, or a frame of an episode that training has.
        near: one training row has most of their n-grams, or of those of their prompt. None: not compared.
        total: either.
        compared: rows that were compared by n-grams.
    """

    exact: Finding
    near: Finding | None
    total: Finding
    compared: int


class Padding(_Frozen):
    """What packing saves in an epoch, against padding each micro-batch to its longest row.

    Attributes:
        rows_per_micro_batch: in both cases.
        rows: of the epoch, from its beginning, that were counted.
        tokens: of these rows.
        padding: what would be added to them.
        saved: `padding / (tokens + padding)`.
    """

    rows_per_micro_batch: int
    rows: int
    tokens: int
    padding: int
    saved: float


class LimitResult(_Frozen):
    """One limit of the recipe: its key, its value, what was found, and whether that is beyond it."""

    key: str
    limit: float
    found: float
    failed: bool


class Findings(_Frozen):
    """All that an audit found.

    Attributes:
        version: of this form.
        sets: `train`, and `eval` or `eval/NAME`.
        contamination: by evaluation set.
        padding: None for rows that are not packed.
        limits: those that the recipe sets.
        notes: what could not be audited, and why.
    """

    version: int = VERSION
    sets: dict[str, SetFindings]
    contamination: dict[str, Contamination]
    padding: Padding | None
    limits: list[LimitResult] = []
    notes: list[str] = []

    @property
    def failed(self) -> list[LimitResult]:
        return [result for result in self.limits if result.failed]
