"""The packing probe: before training, checks that packed rows have the logits that each row has alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.batch import PackedBatch, Sample
from shardtune.errors import ModelError
from shardtune.models.language_model import LanguageRoot
from shardtune.models.mixed_precision import HALF
from shardtune.parallel.fp32_compute import computing_in_fp32, may_be_the_models

LONGEST = 2048
"""Tokens of a row that the probe computes."""
LONGEST_IN_FP32 = 512
"""The same for rows that are computed in fp32 as well, where a model computes in half precision."""
LONGEST_WINDOW = 4096
"""Largest sliding window, in tokens, for which rows longer than the window are probed."""
POSITIONS = 8
"""Tokens at either end of a row whose logits are compared: a leak shows most at the start, a window at the end."""
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest relative difference of logits computed in two ways; a wrong window or a leak causes a larger one."""
ISOLATION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}
"""Largest change of a mixture of experts' logits when the other row changes, as its experts get other shapes."""
SAME_SHAPES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
"""Largest such change in any other model: less than the last digit, as all shapes stay the same."""

LONGEST_REASON = 200
"""Characters of an exception's message that a note repeats."""
MIXED = "rows are packed, but each runs through its layers with a state by itself"
SEE_EACH_OTHER = "packed rows see each other in this model"
WITHOUT_BOUNDARIES = "its linear attention does not receive where rows begin"
NARROWED = "{} are in half precision while it computes, as its code takes one dtype alone"
DIFFERS_FROM_EAGER = "its own attention differs from transformers' eager attention, and is used as it is"
IN_HALF_ALONE = (
    "rows were compared in half precision alone, which shows large differences only: its code does not compute in fp32"
)


class Ways(Protocol):
    """How rows share a forward: `RowSharing`."""

    @property
    def packs(self) -> bool: ...
    @property
    def leaks(self) -> str: ...
    def share_by_length(self, on: bool) -> bool: ...
    def mix_row_by_row(self) -> bool: ...
    def one_row_per_forward(self, model: nn.Module, why: str = "") -> None: ...


class Choices(Protocol):
    """An adapter of language models, with the faster ways that can be switched off where they are not exact."""

    @property
    def sharing(self) -> Ways: ...
    @property
    def has_experts(self) -> bool: ...
    @property
    def sliding_window(self) -> int | None: ...
    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch: ...
    def shortened(self, sample: Sample, most: int) -> Sample: ...
    def changed(self, sample: Sample) -> Sample: ...
    def exchange_transform(self) -> bool: ...
    def use_own_head(self) -> None: ...
    def narrow_buffers(self, model: nn.Module, dtype: torch.dtype) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """The model's own logits of some rows, to which those of a faster way are compared.

    Attributes:
        rows: of the data, cut to a length.
        logits: of each row alone, [positions, vocabulary].
        dtype: in which the model computes.
        computing: makes it compute so.
    """

    rows: Sequence[Sample]
    logits: Sequence[torch.Tensor]
    dtype: torch.dtype
    computing: Callable[[], AbstractContextManager[object]] = nullcontext

    def agree(self, found: Sequence[torch.Tensor]) -> bool:
        """Whether logits of a faster way are those of the model, up to rounding."""
        return all(_agree(got, own, AGREEMENT[self.dtype]) for got, own in zip(found, self.logits, strict=True))

    def may_move(self, *, experts: bool) -> float:
        """How far the logits of a row may move when another one changes."""
        return (ISOLATION if experts else SAME_SHAPES)[self.dtype]


@torch.no_grad()
def probe_packing(
    root: LanguageRoot, adapter: Choices, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Choose the fastest way that is exact for this model; every rank calls it with the same rows.

    Packing and the chunked head are used if the logits of real rows agree with the model's own forward of each row
    alone with its own eager attention, and if changing one packed row does not change the logits of the other.
    Whatever a way raises, the next simpler one is tried: packed rows; packed rows, each by itself in layers with a
    state; rows of one length; one row per forward; and last the logits of the model's own forward.

    Half precision rounds by more than a wrong mask may change: a Gemma 3 whose images are masked as text differs by
    2 %, as much as bf16 rounds. So a model in half precision is compared in fp32 too, with shorter rows.

    Args:
        root: the (sharded) module.
        adapter: its faster ways are switched off where a check fails.
        samples: two rows of the data.
        device: where the model computes.
        dtype: the compute dtype.

    Returns:
        One sentence for each way that is not used; empty if packing is exact.
    """
    was_training = root.training
    root.eval()
    samples = samples if len(samples) > 1 else [*samples] * 2
    try:
        return _choose(root, adapter, samples, device, dtype)
    finally:
        root.train(was_training)


def _choose(
    root: LanguageRoot, adapter: Choices, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> list[str]:
    own, notes = _own(root, adapter, samples, device, dtype)
    finer = _in_fp32(root, adapter, samples, device) if dtype in HALF else None

    def holds(check: Callable[[Comparison], bool]) -> bool:
        """Whether a check finds no difference, in fp32 either where the model's code computes in it."""
        nonlocal finer
        if not check(own):
            return False
        if finer is not None:
            try:
                with finer.computing():
                    return check(finer)
            except Exception as error:  # such as of a kernel for half precision: what it computes in that may be right
                if not may_be_the_models(error):
                    raise
                finer = None
        return True

    def alone() -> bool:
        return holds(lambda those: those.agree([_packed(root, adapter, [row], device)[0] for row in those.rows]))

    def together() -> bool:
        def exact(those: Comparison) -> bool:
            packed, tolerance = _packed(root, adapter, those.rows, device), those.may_move(experts=adapter.has_experts)
            return those.agree(packed) and _isolated(root, adapter, those.rows, packed, device, tolerance)

        return holds(exact)

    def with_either_transform(difference: str) -> str:
        """As `_obstacle` of `alone`, with the logits as the config declares them, or else as the head gives them."""
        obstacle = _obstacle(alone, difference)
        if obstacle and adapter.exchange_transform():
            if not _obstacle(alone, difference):
                return ""
            adapter.exchange_transform()
        return obstacle

    def when_packed() -> str:
        if not _obstacle(together, SEE_EACH_OTHER):  # what is exact for both rows is so for each alone
            return ""
        obstacle = with_either_transform("its attention over packed rows differs from its own")
        return obstacle or _obstacle(together, SEE_EACH_OTHER)

    sharing = adapter.sharing
    if sharing.packs:
        obstacle = sharing.leaks or when_packed()
        if obstacle and sharing.mix_row_by_row() and not when_packed():
            notes.append(f"{obstacle}: {MIXED}")
        elif obstacle:
            sharing.one_row_per_forward(root.model, obstacle)
            notes.append(f"{obstacle}: one row per forward")
    if not sharing.packs:
        obstacle = with_either_transform("its logits are not a linear head of its last hidden state")
        if obstacle:
            adapter.use_own_head()
            notes.append(f"{obstacle}: taken from its own forward")
            obstacle = _obstacle(alone, DIFFERS_FROM_EAGER)
            if obstacle == DIFFERS_FROM_EAGER:
                notes.append(obstacle)
            elif obstacle:
                raise _cannot_compute(root, own.rows[0], obstacle, dtype)
    if not sharing.packs and sharing.share_by_length(True):
        if _obstacle(lambda: holds(lambda those: _batches(root, adapter, those, device)), "differs"):
            sharing.share_by_length(False)
        else:
            notes.append("rows of one length share a forward")
    return notes if finer is not None or dtype not in HALF else [*notes, IN_HALF_ALONE]


def _own(
    root: LanguageRoot, adapter: Choices, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> tuple[Comparison, list[str]]:
    """The logits of each row by the model's own forward; where its code takes no two dtypes in half precision, with its
    buffers in the dtypes of `from_pretrained`, and a sentence about that.

    Raises:
        ModelError: see `_own_logits`.
    """
    rows = [adapter.shortened(sample, _most(adapter.sliding_window, LONGEST)) for sample in samples]

    def computed() -> Comparison:
        return Comparison(rows, [_own_logits(root, adapter, row, device, dtype) for row in rows], dtype)

    try:
        return computed(), []
    except ModelError:
        narrowed = adapter.narrow_buffers(root.model, dtype) if dtype in HALF else []
        if not narrowed:
            raise
    return computed(), [NARROWED.format(", ".join(narrowed[:2]) + ", …" * (len(narrowed) > 2))]


def _in_fp32(
    root: LanguageRoot, adapter: Choices, samples: Sequence[Sample], device: torch.device
) -> Comparison | None:
    """The same in fp32, of a model in half precision; None where its code does not compute in fp32."""
    rows = [adapter.shortened(sample, _most(adapter.sliding_window, LONGEST_IN_FP32)) for sample in samples]
    try:
        with computing_in_fp32():
            logits = [_reference(root, adapter, row, device) for row in rows]
    except ModelError:
        raise
    except Exception as error:  # such as of a kernel for half precision
        if not may_be_the_models(error):
            raise
        return None
    return Comparison(rows, logits, torch.float32, computing_in_fp32)


def _own_logits(
    root: LanguageRoot, adapter: Choices, row: Sample, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The logits of transformers' own forward of a row alone.

    Raises:
        ModelError: transformers cannot compute this model, or computes another balance loss of its routers.
    """
    try:
        return _reference(root, adapter, row, device)
    except ModelError:
        raise
    except Exception as error:  # a model's code is third-party and may raise anything
        if not may_be_the_models(error):
            raise
        raise _cannot_compute(root, row, named_cause(error), dtype) from error


def _reference(root: LanguageRoot, adapter: Choices, row: Sample, device: torch.device) -> torch.Tensor:
    return root.reference_logits(adapter.collate([row], [0], {}).to(device), _ends(row).to(device))


def _cannot_compute(root: LanguageRoot, row: Sample, reason: str, dtype: torch.dtype) -> ModelError:
    half, shared = dtype in HALF, _shared_axes(root)
    if shared:
        return ModelError(
            f"{type(root.model).__name__} on ranks that share its layers ({', '.join(shared)}) cannot compute one row "
            f"of {row.length} tokens: {reason}",
            where=shared[0],
            remedy=f"set {' and '.join(f'{axis}: 1' for axis in shared)}: what transformers declares for such ranks "
            "does not fit the model's code, if that computes the row on one",
        )
    if half:
        return takes_no_half(root.model, row.length, reason)
    return ModelError(
        f"transformers' own forward of one row of {row.length} tokens fails: {reason}",
        where=type(root.model).__name__,
        remedy="the same call fails without shardtune: use a version of transformers, or packages, with which it works",
    )


def takes_no_half(model: nn.Module, tokens: int, reason: str) -> ModelError:
    """The error for a model of transformers whose code fails in half precision.

    Args:
        model: fails.
        tokens: of the row that it fails for.
        reason: what it raises.
    """
    return ModelError(
        f"transformers' own forward of one row of {tokens} tokens fails in half precision: {reason}",
        where=f"{type(model).__name__}; actor.model.precision",
        remedy="train it with actor.model.precision: fp32. Weights and buffers have the dtypes that from_pretrained "
        "gives them, so the same call fails without shardtune: the model's code takes no half precision",
    )


def _shared_axes(root: LanguageRoot) -> list[str]:
    """The keys of the layout that cut layers of a model among ranks."""
    meshes = [each.device_mesh.mesh_dim_names or () for each in root.parameters() if isinstance(each, DTensor)]
    return [f"actor.parallel.{axis}" for axis in ("tensor", "expert") if any(axis in names for names in meshes)]


def _obstacle(is_exact: Callable[[], bool], difference: str) -> str:
    """Why a way cannot be used: what it raises, or the given difference; empty if it is exact."""
    try:
        return "" if is_exact() else difference
    except Exception as error:  # a model's code is third-party and may raise anything
        if not may_be_the_models(error):
            raise
        return named_cause(error)


def named_cause(error: Exception) -> str:
    """The type of an exception and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # as torch.compile's, with its cause behind
    return f"{type(error).__name__}: {first[:LONGEST_REASON].rstrip('.')}".rstrip(": ")


def _batches(root: LanguageRoot, adapter: Choices, own: Comparison, device: torch.device) -> bool:
    """Whether two rows of one length in a batch have the logits of each alone and do not affect each other."""
    pair = [own.rows[0], adapter.changed(own.rows[0])]
    other = _reference(root, adapter, pair[1], device)
    together, tolerance = _packed(root, adapter, pair, device), own.may_move(experts=adapter.has_experts)
    both = replace(own, rows=pair, logits=[own.logits[0], other])
    return both.agree(together) and _isolated(root, adapter, pair, together, device, tolerance)


def _isolated(
    root: LanguageRoot,
    adapter: Choices,
    rows: Sequence[Sample],
    together: Sequence[torch.Tensor],
    device: torch.device,
    tolerance: float,
) -> bool:
    """Whether the logits of a row stay the same when all tokens of the other change."""
    for number in range(len(rows)):
        changed = list(rows)
        changed[number] = adapter.changed(rows[number])
        moved = _packed(root, adapter, changed, device)
        for place, (before, after) in enumerate(zip(together, moved, strict=True)):
            if place != number and not _within(_distance(after, before).amax(), tolerance):
                return False
    return True


def _most(window: int | None, longest: int) -> int:
    """Tokens of a row: more than the model's sliding window, and few enough for one forward."""
    beyond = window + 2 * POSITIONS if window is not None and window <= LONGEST_WINDOW else 0
    return max(longest, beyond)


def _ends(row: Sample) -> torch.Tensor:
    """Positions of the first and the last POSITIONS tokens of a row; all of a short one."""
    place = torch.arange(row.length)
    return place[(place < POSITIONS) | (place >= row.length - POSITIONS)]


def _packed(root: LanguageRoot, adapter: Choices, rows: Sequence[Sample], device: torch.device) -> list[torch.Tensor]:
    """The logits at both ends of each row when the rows are packed into one forward.

    Rows of 20 and 30 tokens start at 0 and 20: the positions are 0-7, 12-19 and 20-27, 42-49, and the logits
    [32, vocabulary] are split into two of 16.
    """
    batch = adapter.collate(rows, range(len(rows)), {}).to(device)
    starts = np.cumsum([0, *(row.length for row in rows)])
    ends = [_ends(row) + int(start) for row, start in zip(rows, starts, strict=False)]
    logits = root.logits(batch, torch.cat(ends).to(device))
    return list(logits.split([len(place) for place in ends]))


def _distance(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[positions]: the largest difference at each, relative to the largest logit of all."""
    return (got - expected).abs().amax(-1) / expected.abs().max().clamp(min=1e-30)


def _agree(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether all positions agree; in half precision most at each end, as rounding may choose another expert at one."""
    distance = _distance(got, expected)
    if got.dtype in (torch.float32, torch.float64):
        return _within(distance.amax(), tolerance)
    return all(_within(end.median(), tolerance) for end in distance.split(max(1, len(got) // 2)))


def _within(distance: torch.Tensor, tolerance: float) -> bool:
    return float(distance) <= tolerance
