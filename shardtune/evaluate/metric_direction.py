"""Whether a metric is better if larger or if smaller, by its name."""

from __future__ import annotations

import re

GROWS = re.compile(
    r"acc|f1|f2|precision|recall|mrr|map|ndcg|auc|auroc|spearman|pearson|explained|r2|mcc|matthews|kappa|iou|dice|"
    r"rouge\w*|bleu\d?|sacrebleu|chrf|meteor|bertscore|exact|em|mc1|mc2|pass|top\d+|hits?|wins?|rewards?|psnr|ssim|"
    r"correct|right"
)
"""Words in the names of metrics that are better if larger."""
GROWN = re.compile(r"(?<!in)accuracy|(?<!un)success")
"""Parts of such words."""
FALLS = re.compile(
    r"loss|losses|perplexity|ppl|nll|bits|rmse|mse|mae|l1|l2|errors?|err|wer|cer|ter|brier|kl|distance|divergence|"
    r"wrong|mistakes?|failures?|unparsed|length|latency"
)
"""Words in the names of metrics that are better if smaller."""
UNCLEAR = re.compile(r"time|times|seconds|steps|gap|drop|delta|difference|std|stdev|stderr|not|non|no")
"""Words that turn the meaning of others: a gap of accuracies, the time to a success, the error of an estimate."""
PART_OF_METRIC = re.compile(r"\d+|size_\d+|none|strict([_-]match)?|flexible([_-]extract)?|remove_whitespace")
"""A part of a name behind that of the metric: a dimension, a size, a filter of the harness."""
OF_LOSS = re.compile(r"/(loss|perplexity)(/|$)")
"""In the names of losses, whatever an evaluation set or a term is called."""


def direction(mode: str, monitor: str) -> str:
    """min or max; `auto` reads it off the name, and takes min where the name shows neither."""
    return mode if mode != "auto" else named_direction(monitor) or "min"


def named_direction(monitor: str) -> str | None:
    """Whether a metric of this name is better if larger (max) or if smaller (min); None where the name shows neither.

    Worked example: in `eval/math/recall_at_10/size_64` the last part that names a metric is `recall_at_10`: max. Of
    `eval/loss/match`, a term of the loss, it is min, whatever the term is called.
    """
    if OF_LOSS.search(monitor):
        return "min"
    name = next((part for part in reversed(monitor.split("/")) if not PART_OF_METRIC.fullmatch(part)), "").lower()
    words = [word for word in re.split(r"[^a-z0-9]+", name) if word]
    if any(UNCLEAR.fullmatch(word) for word in words):
        return None
    grows = GROWN.search(name) is not None or any(GROWS.fullmatch(word) for word in words)
    falls = any(FALLS.fullmatch(word) for word in words)
    return None if grows == falls else "max" if grows else "min"
