"""Metrics of whole evaluation sets; those of libraries need the extra `tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np


def installed(*libraries: str) -> bool:
    """Whether libraries are installed."""
    return all(find_spec(library) is not None for library in libraries)


F1_NAMES = ("precision_macro", "recall_macro", "f1_macro", "f1_weighted")


def f1_scores(targets: Any, guesses: Any, labels: int) -> dict[str, float]:
    """Precision, recall and F1, each the mean over classes (`_macro`), and F1 weighted by their frequency.

    As by scikit-learn, a class that neither targets nor guesses have is not in the means. With two classes also `f1`,
    that of the second one.

    Args:
        targets, guesses: the numbers of classes, one per row; for several labels per row 0 or 1 [rows, labels].
        labels: number of classes.
    """
    from sklearn.metrics import precision_recall_fscore_support

    settings: dict[str, Any] = {"zero_division": 0.0}
    precision, recall, f1, _ = precision_recall_fscore_support(targets, guesses, average="macro", **settings)
    weighted = precision_recall_fscore_support(targets, guesses, average="weighted", **settings)[2]
    values = (precision, recall, f1, weighted)
    found = {name: float(value) for name, value in zip(F1_NAMES, values, strict=True)}
    if labels == 2:
        each = precision_recall_fscore_support(targets, guesses, average=None, labels=[1], **settings)[2]
        found["f1"] = float(np.asarray(each)[0])
    return found


def correlations(targets: np.ndarray, guesses: np.ndarray) -> dict[str, float]:
    """Spearman's and Pearson's correlation; NaN where either side is constant."""
    from scipy.stats import pearsonr, spearmanr

    if len(targets) < 2 or np.ptp(targets) == 0 or np.ptp(guesses) == 0:
        return {"spearman": float("nan"), "pearson": float("nan")}
    return {
        "spearman": float(np.asarray(spearmanr(targets, guesses)[0])),
        "pearson": float(np.asarray(pearsonr(targets, guesses)[0])),
    }


def rouge(references: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """The mean F-measure of ROUGE-1, ROUGE-2 and ROUGE-L over all rows, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(list(names))
    scores = [scorer.score(reference, answer) for reference, answer in zip(references, answers, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in scores])) for name in names}


def ranking(ranks: Sequence[float], at: Sequence[int]) -> dict[str, float]:
    """The mean reciprocal rank, and the share of queries whose first right answer is among the first k.

    Args:
        ranks: of the first right answer of each query, from 1; of equal scores as `place_among_equal` has it. With one
            that is NaN all metrics are.
        at: the values of k.
    """
    places = np.asarray(ranks, np.float64)
    shares = {f"recall_at_{k}": np.where(np.isnan(places), np.nan, places <= k).mean() for k in at}
    return {"mrr": float((1 / places).mean()), **{name: float(share) for name, share in shares.items()}}


def place_among_equal(higher: int, wrong: int, right: int) -> float:
    """The mean place of the first right answer, from 1, over all orders of those with its score.

    A model that scores all answers alike has found none. Worked example: two answers with a higher score, then two
    wrong ones with that of the only right one have the mean of places 3, 4 and 5: 4.

    Args:
        higher: answers with a higher score.
        wrong, right: wrong and right ones with the same score; of right ones at least one.
    """
    return 1 + higher + wrong / (right + 1)


Span = tuple[str, int, int]
"""The kind of an entity, its first word, and the one after its last."""


def spans(tags: Sequence[str]) -> set[Span]:
    """The entities of a sentence whose tags begin with B-, I-, E-, S- or O, as the CoNLL script reads them.

    An entity that begins with I- counts too. Worked example: B-PER I-PER O I-LOC has (PER, 0, 2) and (LOC, 3, 4).
    """
    found: set[Span] = set()
    kind, start = "", 0
    for number, tag in enumerate([*tags, "O"]):
        mark, _, named = tag.partition("-")
        here = (named or tag) if mark != "O" else ""
        continues = bool(kind) and here == kind and mark in ("I", "E") and not _ended(tags, number)
        if kind and not continues:
            found.add((kind, start, number))
            kind = ""
        if here and not kind:
            kind, start = here, number
    return found


def _ended(tags: Sequence[str], number: int) -> bool:
    """Whether the entity of the tag before ends with it."""
    return number > 0 and tags[number - 1].partition("-")[0] in ("E", "S")


def entity_scores(targets: Sequence[Sequence[str]], guesses: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities over all sentences: right are those with the same words and kind."""
    right = guessed = there = 0
    for target, guess in zip(targets, guesses, strict=True):
        wanted, given = spans(target), spans(guess)
        right, guessed, there = right + len(wanted & given), guessed + len(given), there + len(wanted)
    precision, recall = right / guessed if guessed else 0.0, right / there if there else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
