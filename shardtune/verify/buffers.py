"""Check of buffers that forwards in training mode change: what a loss reads of them may depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardtune.parallel.buffers import same_values
from shardtune.verify.result import Failed
from shardtune.verify.trial import CLOSE, Tensors, Trial, apart, copies


@torch.no_grad()
def check_moving_buffers(trial: Trial) -> None:
    """Refuse a loss that reads buffers whose values depend on how rows are cut into micro-batches and ranks.

    On several ranks a buffer that forwards have changed takes rank 0's value, which has seen its own rows alone.

    Args:
        trial: in training mode, without dropout and batch norms; its buffers are left as they were.

    Raises:
        Failed: names the buffer.
    """
    before = copies(_buffers(trial))
    rows = list(range(trial.num_rows))
    cuts = {
        "row by row": [[row] for row in rows],
        "with all rows together" if trial.adapter.rows_share_forwards else "in another order": (
            trial.forwards(rows) if trial.adapter.rows_share_forwards else [[row] for row in rows[::-1]]
        ),
        "with the first of two ranks' rows": [[row] for row in rows[: len(rows) // 2]],
    }
    ends = {how: _after(trial, before, parts) for how, parts in cuts.items()}
    try:
        (first, reference), *others = ends.items()
        for how, end in others:
            moved = [name for name in reference if _differ(reference[name], end[name])]
            if moved:
                _compare(trial, moved, (first, reference), (how, end))
    finally:
        _restore(trial, before)


def _compare(trial: Trial, moved: Sequence[str], one: tuple[str, Tensors], other: tuple[str, Tensors]) -> None:
    modules, training = list(trial.root.modules()), [module.training for module in trial.root.modules()]
    for mode in ("training", "evaluation"):
        if mode == "evaluation":
            trial.worker.model.eval()
        try:
            mine, its = _losses(trial, one[1]), _losses(trial, other[1])
        finally:
            for module, flag in zip(modules, training, strict=True):
                module.training = flag
        for term in mine:
            if apart(mine[term], its[term]) > CLOSE:
                raise Failed(
                    f"the buffer {moved[0]} changes in training mode, and the loss in {mode} mode reads it: after a "
                    f"step {one[0]} the term {term!r} is {mine[term]:.8g}, after one {other[0]} {its[term]:.8g}",
                    where=f"build(): {moved[0]}",
                    remedy="the numbers would depend on micro-batches and ranks (a changed buffer becomes rank 0's): "
                    "compute it from the options or the row, make it a parameter, or use a norm of torch, whose "
                    "statistics are averaged over ranks",
                )


def _losses(trial: Trial, buffers: Tensors) -> Mapping[str, float]:
    """The loss of the rows of one forward, from given values of the buffers."""
    _restore(trial, buffers)
    batch = trial.batch(trial.forwards(range(trial.num_rows))[0])
    return {term: float(loss.total) for term, loss in trial.losses(batch).items()}


def _after(trial: Trial, before: Tensors, parts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """The buffers after forwards over these micro-batches."""
    _restore(trial, before)
    for part in parts:
        trial.losses(trial.batch(part))
    return copies(_buffers(trial))


def _buffers(trial: Trial) -> dict[str, torch.Tensor]:
    return dict(trial.worker.inner_model.named_buffers())


def _restore(trial: Trial, values: Tensors) -> None:
    """Give buffers these values; one that has another shape or dtype by now is reported by the check of ties."""
    for name, buffer in _buffers(trial).items():
        if name in values and buffer.shape == values[name].shape:
            buffer.copy_(values[name])


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not same_values(one, other)
