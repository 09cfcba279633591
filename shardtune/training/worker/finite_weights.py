"""Weights that are not finite: refused at the start, in checkpoints, and in what is written of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import final

import torch

from shardtune.checkpoint.hf_save import DiskDtype
from shardtune.errors import CheckpointError, ModelError
from shardtune.parallel.finite import Unfit, find_unfit, some
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

Gather = Callable[[str, torch.Tensor], torch.Tensor]


@final
class FiniteWeights:
    """Finds weights and buffers of a model that are not finite.

    Each rank reads its own parts, once; one reduction joins what the ranks have found. Every rank calls every method.

    Args:
        weights: of the model.
        ranks: of the run.
        compute: the dtype that the model computes in, which has to hold its weights.
    """

    def __init__(self, weights: Weights, ranks: Ranks, compute: torch.dtype) -> None:
        self._weights = weights
        self._ranks = ranks
        self._compute = compute
        self._from_start: Collection[str] = ()

    def find(self) -> list[Unfit]:
        """Those that are not finite in the dtype of the computation; without what was so from the start."""
        return self._find(lambda name, part: self._compute if name in self._weights.parameters else part.dtype)

    def _find(self, dtype: DiskDtype, names: Collection[str] = ()) -> list[Unfit]:
        parts = self._weights.own_parts()
        chosen = {n: p for n, p in parts.items() if n not in self._from_start and (not names or n in names)}
        return find_unfit(chosen, self._ranks, dtype)

    def check_start(self, origin: str) -> list[str]:
        """Refuse initial weights that are not finite; returns notes.

        What is not trained may hold infinities, as a mask does; it stays as it is from now on.

        Args:
            origin: where the weights come from.
        """
        found, weights = self.find(), self._weights
        trained = weights.trainable()
        refused = [one for one in found if one.name in trained or (one.name in weights.parameters and one.is_nan)]
        if refused:
            beyond = math.isfinite(refused[0].largest)
            raise ModelError(
                f"the weights to start from are not finite: {some(refused)}",
                where=origin,
                remedy="set actor.model.precision: bf16" if beyond else "repair these values, or take other weights",
            )
        self._from_start = frozenset(one.name for one in found)
        return [f"{some(found)} from the start; it is not trained and stays as it is"] if found else []

    def check_loaded(self, checkpoint: Path) -> None:
        """Refuse weights that are not finite in a checkpoint."""
        unfit = self.find()
        if unfit:
            raise CheckpointError(
                f"the weights in the checkpoint are not finite: {some(unfit)}",
                where=str(checkpoint),
                remedy="continue from an older one: remove this directory, or name the other in runner.resume_dir",
            )

    def check_written(self, directory: Path, on_disk: DiskDtype, names: Collection[str] = ()) -> None:
        """Refuse to write weights that are not finite, or would not be in their dtype on disk.

        Args:
            directory: that is going to be written.
            on_disk: maps the name of a tensor, and the tensor in the model, to its dtype on disk.
            names: of what is written; empty: everything.
        """
        parameters = self._weights.parameters
        self._require(self._find(lambda name, part: on_disk(name, parameters.get(name, part)), names), directory)

    def checked(self, gather: Gather, directory: Path, on_disk: DiskDtype) -> Gather:
        """`gather`, whose result is whole on every rank, with the same check of what it has computed."""

        def checking(name: str, tensor: torch.Tensor) -> torch.Tensor:
            whole = gather(name, tensor)
            if name not in self._from_start:
                self._require(find_unfit({name: whole}, None, lambda name, _: on_disk(name, tensor)), directory)
            return whole

        return checking

    def _require(self, unfit: Sequence[Unfit], directory: Path) -> None:
        if not unfit:
            return
        beyond = math.isfinite(unfit[0].largest)
        raise CheckpointError(
            f"the model is not written, because it would not be finite: {some(unfit)}",
            where=str(directory),
            remedy="write it in another dtype, bf16 or fp32: runner.final_dtype, --dtype of shardtune export, or dtype="
            " of save_pretrained"
            if beyond
            else "go on from an earlier checkpoint, with a lower actor.optim.lr or with actor.optim.clip_grad",
        )
