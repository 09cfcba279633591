"""The data types shared by all rooms: an encoded row, a micro-batch, a loss and a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from shardtune.batch.row_draws import RowDraws
from shardtune.errors import ModelError

IGNORED = -100
"""The label of a token that is no target, as `torch.nn.functional.cross_entropy` takes it."""
TOKENS = "ce"
"""The name of a language model's loss term: the cross-entropy of its tokens."""
NO_TOKENS = np.empty(0, np.int32)
NO_WEIGHTS = np.empty(0, np.float32)


def length_name(name: str, dim: int) -> str:
    """The key of `Batch.lengths` for a dimension of a padded field, of which 0 are the rows."""
    return name if dim == 1 else f"{name}:{dim}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row, encoded: tokens with their targets for a language model, named arrays for any other.

    Attributes:
        input_ids: int32 [length]; empty in rows of other models than language models.
        loss_weights: float32 [length]; the weight of token t as a target, 0 where it is not supervised.
            Token 0 has no token before it that could predict it, so its weight never counts.
        prompt_ids: int32 [prompt_length], the conversation up to the answer to generate; only in evaluation rows.
        reference: the answer expected for `prompt_ids`.
        question: what `prompt_ids` ask, for a reader: the text of the last question, without the template's tokens.
        fields: the arrays of a user's adapter, by name; each of one dtype and number of dimensions in all rows.
        size: the size of a row of fields, by which rows are divided evenly; rows of tokens have their length.
        left_out: tokens of reasoning that the row has and the chat template does not print; not stored in the cache.
        prompt_differs: whether the trained answer is preceded by something else than the prompt with which the model
            would generate it; not stored in the cache either.
        control_tokens: special tokens that the text of its turns spells out, each once; likewise not stored.
        changed_turns: roles of turns whose text the chat template prints otherwise, each once; likewise not stored.
    """

    input_ids: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    loss_weights: np.ndarray = field(default_factory=lambda: NO_WEIGHTS)
    prompt_ids: np.ndarray | None = None
    reference: str | None = None
    question: str | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    size: int = 0
    left_out: int = 0
    prompt_differs: bool = False
    control_tokens: tuple[str, ...] = ()
    changed_turns: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens; of a row of fields its `size`."""
        return len(self.input_ids) or self.size

    @property
    def target_weight(self) -> float:
        """The sum of the weights of the tokens that are targets: the row's share of the token mean's denominator."""
        return float(self.loss_weights[1:].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to be continued.

    Attributes:
        tokens: int32 [length].
        fields: arrays besides tokens, as in `Sample.fields`.
    """

    tokens: np.ndarray
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: `batch["name"]` holds a field of all its rows.

    Attributes:
        rows: the dataset row of each, -1 for a filler that only keeps ranks in step and has no weight.
        weights: the weight of each loss term over this micro-batch, from the row index.
        fields: tensors [rows, ...] by name.
        lengths: int64 [rows] by name: the length of each row of a padded field, without padding. Of a field with more
            dimensions those along the second and further ones are under `name:2`, `name:3`, counted as in the batch.
        key: of the rows' random numbers; it stands for seed and step, in evaluation for the seed alone.
        numbered: gives the numbers of rows by which random ones are drawn; None: those in `rows`.
    """

    rows: tuple[int, ...]
    weights: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lengths: Mapping[str, torch.Tensor] = field(default_factory=dict)
    key: int = 0
    numbered: Callable[[Sequence[int]], Sequence[int]] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.fields:
            raise ModelError(
                f"the batch has no field {name!r}; it has {', '.join(sorted(self.fields)) or 'none'}",
                remedy=f"let encode give it: Sample(fields={{{name!r}: …}}), or read a field that it gives",
            )
        return self.fields[name]

    def mask(self, name: str, dim: int = 1) -> torch.Tensor:
        """Bool [rows, longest] of a padded field: False where it is padding.

        Rows of lengths 3 and 1 have [[True, True, True], [True, False, False]].

        Args:
            name: of the field, [rows, ...].
            dim: the dimension of the field that is looked at, of those after the rows.
        """
        key = length_name(name, dim)
        if key not in self.lengths:
            raise ModelError(
                f"the field {name!r} is not padded{f' in dimension {dim}' if name in self.lengths else ''}; padded are "
                f"{', '.join(sorted(self.lengths)) or 'none'}",
                where="Batch.mask",
                remedy=f"let the adapter pad it: padding = {{{name!r}: 0}}",
            )
        lengths = self.lengths[key]
        return torch.arange(self[name].shape[dim], device=lengths.device) < lengths[:, None]

    def randn_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers in shape, dtype and device of `tensor` [rows, …], the same on any layout.

        They depend on the run's seed, the step, the row, `name` and the place in the row's tensor alone; in evaluation
        the step does not enter, so each row always has the same.

        Args:
            name: of this draw; draws of other names are independent, those of the same name are the same numbers.
            tensor: with one entry per row in its first dimension; for one that is not floating the numbers are fp32.
        """
        return self.draws.randn_like(name, tensor)

    def rand_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1), otherwise as `randn_like`."""
        return self.draws.rand_like(name, tensor)

    @property
    def draws(self) -> RowDraws:
        """Random numbers of its rows."""
        return RowDraws(self.key, self.rows if self.numbered is None else self.numbered(self.rows))

    @property
    def num_rows(self) -> int:
        """Number of rows without fillers."""
        return sum(row >= 0 for row in self.rows)

    @property
    def is_filler(self) -> bool:
        """Whether all rows are fillers."""
        return self.num_rows == 0

    @property
    def counts(self) -> bool:
        """Whether any row counts."""
        return max(self.rows, default=-1) >= 0

    @property
    def metric_weight(self) -> float:
        """How much a mean over the batch counts in a metric: its targets where there is one loss term, else rows."""
        weight = next(iter(self.weights.values())) if len(self.weights) == 1 else 0.0
        return weight or float(self.num_rows or 1)

    def widened(self) -> Batch:
        """The same batch with floating fields in fp64."""
        fields = {name: t.double() if t.is_floating_point() else t for name, t in self.fields.items()}
        return replace(self, fields=fields)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            fields={name: moved(tensor, device) for name, tensor in self.fields.items()},
            lengths={name: moved(tensor, device) for name, tensor in self.lengths.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(Batch):
    """Whole rows of tokens ("documents") laid end to end without padding.

    Worked example: rows [5, 6, 7] and [8, 9], of which all tokens but the first are targets. `input_ids` is
    [5, 6, 7, 8, 9], `position_ids` [0, 1, 2, 0, 1], `cu_seqlens` [0, 3, 5], `target_positions` [0, 1, 3] and `targets`
    [6, 7, 9].

    Attributes:
        input_ids: int64 [tokens].
        position_ids: int64 [tokens]; restarts at 0 with each document.
            [axes, tokens] for models that place the parts of an image by several numbers.
        target_positions: int64 [targets]; the tokens from which a target is predicted, never a document's last.
        targets: int64 [targets]; the token that follows each of them.
        target_weights: float32 [targets].
        cu_seqlens: int32 [documents + 1]; document d is `[cu_seqlens[d], cu_seqlens[d + 1])`.
        document_weights: float32 [documents]; 1, or 0 for a filler.
        max_length: tokens in the longest document.
        target_weight: the sum of `target_weights`, computed in fp64 from the rows.
        fields: further inputs of the model (pixels), for all rows together.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    target_positions: torch.Tensor
    targets: torch.Tensor
    target_weights: torch.Tensor
    cu_seqlens: torch.Tensor
    document_weights: torch.Tensor
    max_length: int
    target_weight: float

    def to(self, device: torch.device) -> PackedBatch:
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return moved(tensor, device)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            target_positions=move(self.target_positions),
            targets=move(self.targets),
            target_weights=move(self.target_weights),
            cu_seqlens=move(self.cu_seqlens),
            document_weights=move(self.document_weights),
            fields={name: move(tensor) for name, tensor in self.fields.items()},
        )


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; the CPU does not wait for a GPU's copy of it.

    Only from pinned memory does the GPU copy by itself, while the CPU goes on; torch keeps that memory until it has.
    An expanded tensor, several of whose numbers are one in memory, cannot be pinned as it is.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        tensor = (tensor.contiguous() if expanded else tensor).pin_memory()
    return tensor.to(device, non_blocking=True)


class LossSum(NamedTuple):
    """A loss before its division.

    A step's gradient is that of `total / weight`, both summed over ranks and micro-batches. A tuple, so that the hooks
    of sharded modules find the tensor in what a forward returns.

    Attributes:
        total: scalar tensor with a graph, the weighted sum of the loss over its targets.
        weight: the sum of the targets' weights; the row index has to have the same for these rows.
    """

    total: torch.Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A mean `total / weight`, divided only after both are summed over batches and ranks.

    Raises:
        ValueError: the weight is negative, which would take the weight of other batches away.
    """

    total: float
    weight: float

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"the weight of a metric is negative: {self.weight:g}")

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        """`total / weight`; NaN without weight."""
        return self.total / self.weight if self.weight else float("nan")
