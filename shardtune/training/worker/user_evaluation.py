"""Evaluation by a user-defined method over a user-defined loader; every sample counts once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import count, islice

import torch
from torch.utils.data import DataLoader

from shardtune.batch import Metric
from shardtune.data.user_loader.batch import SameFields, rows_of, with_names
from shardtune.data.user_loader.errors import making
from shardtune.data.user_loader.rng import LoaderRng
from shardtune.errors import DataError, ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.user_errors import explaining

EVALUATE = "get_eval_model_output"
ACCURACY = "eval_accuracy"
EvalOutput = int | float | torch.Tensor | Mapping[str, Metric | tuple[float, float]]


def sum_user_batches(
    evaluate: Callable[[object], object],
    batches: Iterable[object],
    ranks: Ranks,
    *,
    sharded: bool,
    num_samples: int | None,
    name: str,
    poll: Callable[[], None],
    draws: LoaderRng | None = None,
    rows_per_batch: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Metric]:
    """Sum the metrics of a user-defined method over the batches of a user-defined loader.

    Args:
        evaluate: maps a batch to its number of correct samples, or to a dict of (sum, weight).
        batches: this rank's if `sharded`, otherwise all of them, of which batch i belongs to rank i mod ranks.
        ranks: over which the sums are taken.
        sharded: whether `batches` are this rank's only.
        num_samples: the announced number; fewer are an error.
        name: of the evaluation set.
        poll: called before each batch, by all ranks alike.
        draws: seeds random draws of the batches, so that all evaluations are alike; None: no seeding.
        rows_per_batch: `actor.eval_micro_batch_size`, with which the loader should be built; None: not given.
        report: receives notes for the user.
    """
    require_all_samples(batches, name)
    sums: dict[str, Metric] = {}
    fields, seen = SameFields(), 0.0
    with torch.no_grad():
        for number, (batch, counts) in enumerate(_turns(_seeded(batches, draws), ranks, sharded)):
            poll()
            fields.check(batch, number)
            with explaining(EVALUATE, batch, ranks.device):
                output = evaluate(with_names(batch))
            if not counts:
                continue
            size = rows_of(batch)
            if number == 0 and None not in (size, rows_per_batch) and size != rows_per_batch:
                report(
                    f"evaluation set {name}: its first batch has {size} rows, actor.eval_micro_batch_size is "
                    f"{rows_per_batch}, with which build_dataloader may build its loader"
                )
            seen += math.nan if size is None else size
            for key, metric in metrics_of(output, size).items():
                sums[key] = sums.get(key, Metric(0.0, 0.0)) + metric
    total = ranks.sum([seen])[0]
    if num_samples is not None and total < num_samples:
        raise _too_few(int(total), f"{num_samples} that build_dataloader announced", name)
    if num_samples is not None and total > num_samples:
        report(
            f"evaluation set {name}: {int(total)} samples were seen, {num_samples} announced, so some count more than "
            "once (torch's DistributedSampler repeats samples to fill up ranks); without sharded: true each counts once"
        )
    return ranks.reduce_metrics(sums)


def metrics_of(output: object, size: int | None) -> dict[str, Metric]:
    """The return value of an eval method as (sum, weight) by name.

    Args:
        output: the number of correct samples, or a dict of (sum, weight).
        size: samples in the batch; None if unknown.
    """
    if isinstance(output, Mapping):
        return {str(name): _pair(name, value) for name, value in output.items()}
    if not isinstance(output, (int, float, torch.Tensor)) or (isinstance(output, torch.Tensor) and output.numel() != 1):
        raise _no_result(output, "neither a number of correct samples nor a dict of (sum, weight)")
    if size is None:
        raise _no_result(output, "and the batch does not show how many samples it holds, so the share is unknown")
    correct = float(output)
    if not 0 <= correct <= size:
        raise _no_result(output, f"which is no number of correct samples in a batch of {size}")
    return {ACCURACY: Metric(correct, float(size))}


def _pair(name: object, value: object) -> Metric:
    if isinstance(value, Metric):
        return value
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _no_result(value, f"as {name!r}, not a pair (sum, weight)")
    total, weight = map(float, value)
    if weight < 0:
        raise _no_result(value, f"as {name!r}, whose weight is negative")
    return Metric(total, weight)


def _no_result(output: object, why: str) -> ModelError:
    what = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else repr(output)[:60]
    return ModelError(
        f"{EVALUATE} returned {what}, {why}",
        where=EVALUATE,
        remedy="return how many samples of this batch are correct, or {name: (sum, weight)}",
    )


def require_all_samples(batches: Iterable[object], name: str) -> None:
    """Refuse a torch loader that drops the last samples of an evaluation set."""
    if not isinstance(batches, DataLoader) or not batches.drop_last or batches.batch_size is None:
        return
    total = len(batches.sampler) if isinstance(batches.sampler, Sized) else 0
    left_out = total % batches.batch_size
    if left_out:
        raise _too_few(total - left_out, f"{total} that there are: the loader has drop_last=True", name)


def _too_few(seen: int, announced: str, name: str) -> DataError:
    return DataError(
        f"evaluation saw {seen} samples of the {announced}",
        where=f"evaluation set {name}",
        remedy="build the evaluation loader with drop_last=False",
    )


def _seeded(batches: Iterable[object], draws: LoaderRng | None) -> Iterator[object]:
    """The batches, with the same random draws in each evaluation."""
    source = iter(batches) if draws is None else draws.begin(0)
    for number in count():
        if draws is not None:
            draws.before(0, number)
        try:
            with making(number):
                batch = next(source)
        except StopIteration:
            return
        yield batch


def _turns(source: Iterator[object], ranks: Ranks, sharded: bool) -> Iterator[tuple[object, bool]]:
    """This rank's batch of each turn, and whether it counts.

    A forward of a sharded model involves all ranks, so all have the same number of turns: a rank without a batch
    repeats another one.
    """
    spare: list[object] = []
    while True:
        taken = list(islice(source, 1 if sharded else ranks.num_data_ranks))
        if not (ranks.largest(len(taken)) if sharded else len(taken)):
            return
        spare = taken[:1] or spare
        mine = taken if sharded else taken[ranks.data_rank : ranks.data_rank + 1]
        if not mine and not spare:
            raise DataError(
                f"rank {ranks.rank} has no batch to evaluate while others have",
                where="build_dataloader",
                remedy="let the loader yield all batches on every rank (without sharded: true)",
            )
        yield (mine or spare)[0], bool(mine)
