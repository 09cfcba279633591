"""Checks of the loss as a sum: over any split of rows, without masked targets, padding or neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from shardtune.batch import Batch
from shardtune.models.language_model import LanguageRoot
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.training.worker.loss_probe import ALONE, MEAN
from shardtune.verify.buffers import check_moving_buffers
from shardtune.verify.kit import PARITY, Kit
from shardtune.verify.masks import maskings, partial_maskings
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.tokens import check_packing, check_tokens
from shardtune.verify.trial import CLOSE, Measured, Trial, apart, distance

RANDOM_SPLITS = 3
HELD = (
    "with the draws of torch's generator held constant, which depend on micro-batches and ranks (those of "
    "batch.randn_like and batch.rand_like do not)"
)
FURTHER = 3
"""Additional positions of padding for padded fields."""


def check_sums(kit: Kit) -> str:
    """For any split of rows into micro-batches, the totals add up and the weights are those of the rows."""
    trial = kit.deterministic_trial()
    rows = list(range(trial.num_rows))
    splits = list(_splits(trial, rows))
    reference: Measured | None = None
    for how, parts in splits:
        batches = [trial.batch(part) for part in parts]
        measured = trial.measure(batches)
        _check_weights(trial, measured, rows, how, parts)
        if reference is None:
            reference = measured
            continue
        _check_totals(trial, reference, measured, splits[0][0], how)
        _check_gradients(trial, reference, measured, splits[0][0], how)
    result = f"{len(splits)} splits of {len(rows)} rows give the same sums, weights and gradients"
    return "; ".join([result, *([HELD] if trial.holds_draws else []), *_check_training_mode(kit, splits[:2])])


def _check_training_mode(kit: Kit, splits: Sequence[tuple[str, list[list[int]]]]) -> Iterator[str]:
    """The loss in training mode is a sum over rows too, without dropout and batch norms."""
    trial = Trial(kit.worker(PARITY))
    trial.train()
    check_moving_buffers(trial)
    if len(splits) < 2:
        return
    if trial.nondeterminism is not None:
        yield f"not compared in training mode: {trial.nondeterminism}"
        return
    (one, parts), (other, together) = splits
    reference, measured = (trial.measure([trial.batch(part) for part in split]) for split in (parts, together))
    _check_totals(trial, reference, measured, f"{one} in training mode", other)
    _check_gradients(trial, reference, measured, f"{one} in training mode", other)
    yield f"in training mode too{f', {HELD}' if trial.holds_draws and not kit.trial.holds_draws else ''}"


def _splits(trial: Trial, rows: Sequence[int]) -> Iterator[tuple[str, list[list[int]]]]:
    yield "row by row", [[row] for row in rows]
    if not trial.adapter.rows_share_forwards:
        return
    yield f"all {len(rows)} rows together", [list(rows)]
    draw = np.random.default_rng(0)
    for _ in range(RANDOM_SPLITS):
        order = draw.permutation(len(rows))
        cuts = np.sort(draw.choice(np.arange(1, len(rows)), size=min(2, len(rows) - 1), replace=False))
        parts = [part.tolist() for part in np.split(order, cuts)]
        yield f"micro-batches of {', '.join(str(len(part)) for part in parts)} rows", parts


def _check_weights(
    trial: Trial, measured: Measured, rows: Sequence[int], how: str, parts: Sequence[Sequence[int]]
) -> None:
    name, promised = type(trial.adapter).__name__, trial.indexed_weights(rows)
    for term in [term for term, weight in measured.weights.items() if apart(weight, promised[term]) > CLOSE]:
        with torch.no_grad():
            reported = [float(trial.losses(trial.batch(part))[term].weight) for part in parts]
        expected = [trial.indexed_weights(part)[term] for part in parts]
        wrong = next((n for n, pair in enumerate(zip(reported, expected, strict=True)) if apart(*pair) > CLOSE), 0)
        raise Failed(
            f"{how}, the loss reports weight {reported[wrong]:g} for the term {term!r} of {_rows(parts[wrong])}, which "
            f"by weights is {expected[wrong]:g}",
            where=f"{name}.loss: LossSum({term}).weight, {name}.weights",
            remedy="let weights(sample) count exactly what loss sums over, and let loss report that count",
        )


def _rows(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows ({', '.join(map(str, rows[:6]))}…)"


def _check_totals(trial: Trial, reference: Measured, measured: Measured, one: str, other: str) -> None:
    for term, total in reference.totals.items():
        found = measured.totals[term]
        if apart(total, found) <= CLOSE:
            continue
        ratio = total / found if found else float("nan")
        looks_mean = ratio > 1.5 and not isinstance(trial.adapter, WholeStepAdapter)
        raise Failed(
            f"the term {term!r} is {total:.8g} in sum {one} and {found:.8g} with {other} (ratio {ratio:.4g})",
            where=f"{type(trial.adapter).__name__}.loss",
            remedy=MEAN if looks_mean else ALONE,
        )


def _check_gradients(trial: Trial, reference: Measured, measured: Measured, one: str, other: str) -> None:
    far, worst = distance(reference.gradients, measured.gradients)
    if far > CLOSE:
        raise Failed(
            f"the gradient {one} and with {other} differ by {far:.3g} of their size, most at {worst}, though the "
            "losses agree",
            where=f"{type(trial.adapter).__name__}.loss: {worst}",
            remedy="look for functions with a backward of their own, and for what is detached depending on the batch",
        )


def check_masked(kit: Kit) -> str:
    """Targets without weight give no loss and no gradient."""
    trial = kit.deterministic_trial()
    if isinstance(trial.adapter, WholeStepAdapter):
        raise Skipped("the loss is one of all rows of a step, in which each row is another's negative")
    tried = [*_check_masked_rows(trial), *_check_masked_parts(trial), *check_tokens(trial)]
    if not tried:
        raise Skipped("no field takes a target away: whatever was set to 0, NaN or -100, weights stayed what they were")
    return f"without effect: {', '.join(tried)}"


def _check_masked_rows(trial: Trial) -> Iterator[str]:
    """A row whose targets are taken out leaves the losses of the others, and the gradient, in place."""
    kept, taken = trial.samples[0], trial.samples[1]
    alone = trial.measure([trial.batch_of([kept])])
    for masking in maskings(trial.weigh, taken, trial.adapter.padding):
        together = [kept, masking.sample]
        groups = [together] if trial.adapter.rows_share_forwards else [[sample] for sample in together]
        measured = trial.measure([trial.batch_of(group) for group in groups])
        _check_nothing(trial, masking.how, masking.terms, alone, measured)
        if masking.terms == set(trial.terms):
            far, worst = distance(alone.gradients, measured.gradients)
            if far > CLOSE:
                raise Failed(
                    f"a row without targets ({masking.how}) moves the gradient by {far:.3g} of its size, most at "
                    f"{worst}",
                    where=f"{type(trial.adapter).__name__}.loss: {worst}",
                    remedy="leave its targets out of the sum before anything else is done with them",
                )
        yield masking.how


def _check_nothing(trial: Trial, how: str, terms: frozenset[str], alone: Measured, measured: Measured) -> None:
    name = type(trial.adapter).__name__
    for term in sorted(terms):
        # A row without any weight never enters a run, so the weight that the loss reports for it does not matter.
        if terms != set(trial.terms) and apart(alone.weights[term], measured.weights[term]) > CLOSE:
            raise Failed(
                f"a row without targets ({how}) counts {measured.weights[term] - alone.weights[term]:g} in the weight "
                f"that the loss reports for {term!r}; weights has 0",
                where=f"{name}.loss: LossSum({term}).weight",
                remedy="count the targets that are left, not the rows or positions",
            )
        if apart(alone.totals[term], measured.totals[term]) > CLOSE:
            raise Failed(
                f"a row without targets ({how}) changes the term {term!r} from {alone.totals[term]:.8g} to "
                f"{measured.totals[term]:.8g}",
                where=f"{name}.loss",
                remedy="leave masked targets out of the sum: multiply by the mask, or ignore_index=-100",
            )


def _check_masked_parts(trial: Trial) -> Iterator[str]:
    """With some of its targets taken out, a row weighs what is left, and the loss reports that weight."""
    sample = trial.samples[0]
    for masking in partial_maskings(trial.weigh, sample, trial.adapter.padding):
        promised = trial.weigh(masking.sample)
        measured = trial.measure([trial.batch_of([masking.sample])])
        for term in sorted(masking.terms):
            if apart(measured.weights[term], promised[term]) > CLOSE:
                raise Failed(
                    f"a row with {masking.how} has weight {measured.weights[term]:g} by loss (term {term!r}), "
                    f"{promised[term]:g} by weights",
                    where=f"{type(trial.adapter).__name__}.loss: LossSum({term}).weight",
                    remedy="count the targets that are left, not the rows or positions",
                )
        yield masking.how


def check_padding(kit: Kit) -> str:
    """Padding a row further changes nothing; neither do neighbours, where rows are packed."""
    trial = kit.deterministic_trial()
    if isinstance(trial.root, LanguageRoot):
        return check_packing(trial, trial.root)
    if not trial.adapter.padding:
        raise Skipped("no field is padded: all rows have the same shapes")
    before = trial.batch(trial.forwards(range(trial.num_rows))[0])
    padded = [name for name in trial.adapter.padding if name in before.fields]
    if not padded:
        raise Skipped(f"padding names {', '.join(trial.adapter.padding)}, which no row has")
    if made := _made_beside(trial, before, padded):
        raise Skipped(
            f"collate makes {', '.join(made)} of the size of padded rows, which cannot be padded further alone"
        )
    after = _pad_further(before, {name: trial.adapter.padding[name] for name in padded}, _varying(trial, padded))
    short, long = trial.measure([before]), trial.measure([after])
    for term, total in short.totals.items():
        if apart(total, long.totals[term]) > CLOSE or apart(short.weights[term], long.weights[term]) > CLOSE:
            raise Failed(
                f"{FURTHER} more positions of padding in {', '.join(padded)} change the term {term!r} from {total:.8g} "
                f"(weight {short.weights[term]:g}) to {long.totals[term]:.8g} (weight {long.weights[term]:g})",
                where=f"{type(trial.adapter).__name__}.loss",
                remedy="mask what is beyond batch.lengths[name], in attention, in pooling (a mean over its own "
                "positions alone) and in the loss",
            )
    far, worst = distance(short.gradients, long.gradients)
    if far > CLOSE:
        raise Failed(
            f"{FURTHER} more positions of padding move the gradient by {far:.3g} of its size, most at {worst}",
            where=f"{type(trial.adapter).__name__}.loss: {worst}",
            remedy="let no padding reach that parameter: embeddings take padding_idx, masks come before the softmax",
        )
    return f"{', '.join(padded)} padded by {FURTHER} more positions: the same losses and gradients"


def _made_beside(trial: Trial, batch: Batch, padded: Sequence[str]) -> list[str]:
    """The fields of a batch that no row has, and that are as long as padded ones."""
    lengths = {batch.fields[name].shape[1] for name in padded}
    return [
        name
        for name, tensor in batch.fields.items()
        if name not in trial.samples[0].fields and tensor.ndim > 1 and tensor.shape[1] in lengths
    ]


def _varying(trial: Trial, names: Sequence[str]) -> dict[str, list[int]]:
    """The dimensions of padded fields in a batch that are padded further: the first of a row, and those that vary."""
    found = {}
    for name in names:
        shapes = [np.asarray(sample.fields[name]).shape for sample in trial.samples]
        further = [dim for dim in range(1, len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
        found[name] = [1, *(dim + 1 for dim in further)]
    return found


def _pad_further(batch: Batch, padding: Mapping[str, float], dims: Mapping[str, Sequence[int]]) -> Batch:
    fields = dict(batch.fields)
    for name, value in padding.items():
        for dim in dims[name]:
            tensor = fields[name]
            more = tensor.new_full((*tensor.shape[:dim], FURTHER, *tensor.shape[dim + 1 :]), value)
            fields[name] = torch.cat([tensor, more], dim=dim)
    return replace(batch, fields=fields)


def check_empty(kit: Kit) -> str:
    """A micro-batch without targets gives zeros: for a rank without rows, and for rows whose targets were cut off."""
    trial = kit.trial
    _check_zero(trial, trial.filler(), frozenset(trial.terms), "the filler of a rank without rows")
    if isinstance(trial.adapter, WholeStepAdapter):
        return "a filler is harmless"
    ways = maskings(trial.weigh, trial.samples[0], trial.adapter.padding)
    for masking in ways:
        batch = trial.batch_of([masking.sample])
        _check_zero(trial, batch, masking.terms, f"a micro-batch without targets ({masking.how})")
    return "; ".join(["a filler is harmless", *(f"so is {masking.how}" for masking in ways)])


def _check_zero(trial: Trial, batch: Batch, terms: frozenset[str], what: str) -> None:
    name = type(trial.adapter).__name__
    if isinstance(trial.adapter, WholeStepAdapter):
        total = torch.stack([(output * 0.0).sum() for output in trial.root(batch).values()]).sum()
    else:
        losses = trial.losses(batch)
        for term in sorted(terms & losses.keys()):
            loss = losses[term]
            value, weight = loss.total.item(), float(loss.weight)
            if value == 0.0 and (weight == 0.0 or terms == set(trial.terms)):
                continue
            raise Failed(
                f"{what} gives the term {term!r} {value:g} with weight {weight:g}, not 0 with weight 0",
                where=f"{name}.loss",
                remedy="sum over the targets there are (the sum over none is 0): no mean, no division by their number; "
                "torch.where before a function that is infinite at masked values, not after it",
            )
        total = torch.stack([losses[term].total for term in sorted(terms & losses.keys())]).sum()
    if not total.requires_grad:
        raise Failed(
            f"{what} gives a loss without a graph, while other ranks wait for its backward pass",
            where=f"{name}.loss",
            remedy="compute the model and the sum in any case, without a branch for empty batches",
        )
    trial.worker.weights.zero_gradients()
    total.backward()
    try:
        for parameter, tensor in trial.worker.weights.parameters.items():
            if tensor.grad is not None and not (tensor.grad == 0).all():
                raise Failed(
                    f"{what} gives {parameter} a gradient of up to {float(tensor.grad.abs().max()):g}, not 0",
                    where=f"{name}.loss: {parameter}",
                    remedy="let nothing but targets count: regularisers are terms of their own, weighed by rows",
                )
    finally:
        trial.worker.weights.zero_gradients()
