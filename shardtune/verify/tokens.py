"""Checks of rows of tokens: each target counts by its weight, no token sees a later one, packed rows are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from shardtune.batch import Batch, PackedBatch
from shardtune.models.language_model import LanguageRoot
from shardtune.verify.masks import halves, without_last_target
from shardtune.verify.result import Failed
from shardtune.verify.trial import CLOSE, Trial, apart


def check_tokens(trial: Trial) -> Iterator[str]:
    """The loss of a row of tokens is that of one half of its targets and of the other; no token sees a later one."""
    yield from _check_scaled_targets(trial)
    yield from _check_causal(trial)
    for sample in trial.samples:
        parts = halves(sample)
        if parts is None:
            continue
        whole, first, second = (trial.measure([trial.batch_of([one])]) for one in (sample, *parts))
        for term in trial.terms:
            sums = first.totals[term] + second.totals[term]
            if trial.adapter.row_terms().get(term) is None and apart(whole.totals[term], sums) > CLOSE:
                raise Failed(
                    f"the term {term!r} is {whole.totals[term]:.8g} over all targets of a row, {sums:.8g} over "
                    "one half of them and the other",
                    where=f"{type(trial.adapter).__name__}.loss",
                    remedy="multiply each target's loss by its weight, and divide by nothing",
                )
        yield "half of a row's targets at a time"
        break
    for sample in trial.samples:
        pair = without_last_target(sample, _another_token(trial))
        if pair is None:
            continue
        before, after = (trial.measure([trial.batch_of([one])]) for one in pair)
        for term in trial.terms:
            if trial.adapter.row_terms().get(term) is None and apart(before.totals[term], after.totals[term]) > CLOSE:
                raise Failed(
                    f"another token in the place of the last, which is no target, changes the term {term!r} from "
                    f"{before.totals[term]:.8g} to {after.totals[term]:.8g}",
                    where=f"{type(trial.adapter).__name__}.loss",
                    remedy="predict token t from tokens before t alone: a causal mask, targets shifted by one",
                )
        yield "the last token, where it is no target"
        break


def _check_scaled_targets(trial: Trial) -> Iterator[str]:
    """A target of half the weight counts half."""
    sample = trial.samples[0]
    if not len(sample.loss_weights):
        return
    half = replace(sample, loss_weights=sample.loss_weights / 2)
    whole, halved = (trial.measure([trial.batch_of([one])]) for one in (sample, half))
    for term in [term for term in trial.terms if trial.adapter.row_terms().get(term) is None]:
        if apart(whole.totals[term] / 2, halved.totals[term]) > CLOSE:
            raise Failed(
                f"with half the weight on every target the term {term!r} is {halved.totals[term]:.8g}, not half of "
                f"{whole.totals[term]:.8g}",
                where=f"{type(trial.adapter).__name__}.loss",
                remedy="multiply each target's loss by its weight (batch.target_weights)",
            )
    yield "half of each target's weight"


@torch.no_grad()
def _check_causal(trial: Trial) -> Iterator[str]:
    """The last token of a row changes no logits before it, which would otherwise see what they predict."""
    root = trial.root
    sample = max(trial.samples, key=lambda sample: sample.length)
    if not isinstance(root, LanguageRoot) or sample.length < 2:
        return
    tokens = sample.input_ids.copy()
    tokens[-1] = _another_token(trial)[int(tokens[-1])]
    places = torch.arange(sample.length - 1)
    with trial.draws():
        before, after = (
            root.logits(_packed(trial.batch_of([one])), places) for one in (sample, replace(sample, input_ids=tokens))
        )
    moved = (before - after).abs().amax(-1) > CLOSE * before.abs().max()
    if bool(moved.any()):
        raise Failed(
            f"another last token moves the logits at {int(moved.sum())} of the {len(places)} tokens before it, which "
            "are to predict it and others",
            where=f"{type(trial.adapter).__name__}.logits",
            remedy="let a token see itself and those before it alone: a causal mask, targets shifted by one",
        )
    yield "a token for those before it"


def _another_token(trial: Trial) -> Mapping[int, int]:
    """For each token of the rows another one, taken from the targets, so that it is not part of an image."""
    seen = {int(token) for sample in trial.samples for token in sample.input_ids}
    targets = {int(token) for sample in trial.samples for token in sample.input_ids[sample.loss_weights > 0]}
    return {token: min(targets - {token}, default=token) for token in seen}


@torch.no_grad()
def check_packing(trial: Trial, root: LanguageRoot) -> str:
    """Packed rows have the logits that each has alone, by the model's own forward."""
    name = type(trial.adapter).__name__
    chosen = sorted(range(trial.num_rows), key=lambda row: -trial.samples[row].length)[:3]
    for rows in trial.forwards(chosen):
        batch = _packed(trial.batch(rows))
        start = 0
        for row in rows:
            sample = trial.samples[row]
            places = torch.arange(sample.length)
            with trial.draws():
                packed = root.logits(batch, places + start)
                alone = root.reference_logits(_packed(trial.batch([row])), places)
            far = float((packed - alone).abs().max() / alone.abs().max().clamp(min=1e-30))
            if not far <= CLOSE:
                raise Failed(
                    f"the logits of row {row} among {len(rows)} in one forward differ from its own by {far:.3g} of the "
                    "largest",
                    where=f"{name}.logits, {name}.reference_logits",
                    remedy="give position_ids and document boundaries (batch.cu_seqlens) to the attention, or let "
                    "rows_share_forwards be False",
                )
            start += sample.length
    packed = trial.adapter.rows_share_forwards
    result = "packed rows have the logits that each has alone" if packed else "one row per forward"
    return "; ".join([result, *trial.worker.notes])


def _packed(batch: Batch) -> PackedBatch:
    if not isinstance(batch, PackedBatch):
        raise Failed(
            f"a language model's micro-batch is a {type(batch).__name__}, not a PackedBatch",
            where="collate",
            remedy="return a PackedBatch: rows end to end, with cu_seqlens and position_ids",
        )
    return batch
