"""How the arguments of a call are divided among ranks: samples over those that have data of their own, tokens over
those that share a sequence."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import torch

from shardtune.config.rank_layout import Layout
from shardtune.data.loader.packing import deal
from shardtune.engine.pickling import dataclass_values
from shardtune.errors import DataError
from shardtune.parallel.torch_private.operations import named_fields

T = TypeVar("T")
Samples = list[object] | tuple[object, ...] | np.ndarray | torch.Tensor
"""Samples along the first dimension."""
WHERE = "NeedParallel"


class NeedParallel(Generic[T]):
    """Marks an argument of a call whose samples are divided among ranks; it does nothing by itself.

    Args:
        data: a list, tuple, tensor or array of samples along its first dimension, or a dict or named tuple of such.
            Numbers of samples need not divide by the ranks; a rank that gets none computes on a sample of another, for
            nothing.
        type: "data" divides samples; "seq" also divides the tokens of each sample (its second dimension) among the
            ranks that share sequences.
        weights: how much each sample counts in the mean over all; by default all alike. Where a method averages over
            tokens, the numbers of tokens make it the mean over all tokens.
        max_tokens: deal the samples by their lengths: each rank gets a list of micro-batches, none with more tokens, as
            many as every other rank. All marked arguments are dealt alike, and a parameter `weights` of the method is a
            list of theirs. An empty micro-batch has a sample of weight 0: its rank has to take part.
        lengths: of the samples, in tokens, with `max_tokens`; None: `len` of each.

    Raises:
        DataError: there are no samples, or what is said about them does not fit.
    """

    def __init__(
        self,
        data: T,
        type: Literal["data", "seq"] = "data",
        weights: Sequence[float] | torch.Tensor | None = None,
        *,
        max_tokens: int | None = None,
        lengths: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        if type not in ("data", "seq"):
            raise DataError(f"type is {type!r}", where=WHERE, remedy='use "data" or "seq"')
        self.data = data
        self.type = type
        self.size = _size(data)
        if self.size == 0:
            raise DataError("there are no samples", where=WHERE, remedy="do not call the method")
        self.weights = None if weights is None else self._weighed(weights)
        if lengths is not None and max_tokens is None:
            raise DataError(
                "lengths has no effect without max_tokens",
                where=f"{WHERE}(…, lengths=…)",
                remedy="give max_tokens=…, by which samples are dealt, or leave lengths out",
            )
        self.max_tokens = max_tokens
        self.lengths = [] if max_tokens is None else self._measured(max_tokens, lengths)

    def _weighed(self, weights: Sequence[float] | torch.Tensor) -> list[float]:
        """The weight of each sample."""
        remedy = "give a list with one number for each sample, none below 0"
        try:
            found = [float(weight) for weight in weights]
        except (TypeError, ValueError):
            raise DataError(f"weights is {weights!r}", where=WHERE, remedy=remedy) from None
        if len(found) != self.size:
            raise DataError(f"{len(found)} weights for {self.size} samples", where=WHERE, remedy=remedy)
        wrong = [weight for weight in found if not 0 <= weight < float("inf")]
        if wrong:
            raise DataError(f"a weight is {wrong[0]:g}", where=WHERE, remedy=remedy)
        return found

    def _measured(self, max_tokens: int, lengths: Sequence[int] | torch.Tensor | None) -> list[int]:
        """The number of tokens of each sample."""
        (samples, *_) = _leaves(self.data)
        where = f"{WHERE}(…, max_tokens={max_tokens!r})"
        if not is_whole(max_tokens, 1):
            raise DataError("it is no whole number above 0", where=where, remedy="give the tokens of a micro-batch")
        found = _counted(lengths, where) if lengths is not None else []
        sized = [sample for sample in samples if isinstance(sample, Sized) and not _is_number(sample)]
        if lengths is None and len(sized) == self.size:
            found = [len(sample) for sample in sized]
        what = remedy = ""
        if self.type == "seq":
            what, remedy = 'type="seq" divides tokens among ranks', "use max_tokens with whole samples alone"
        elif len(found) != self.size:
            what, remedy = f"{len(found)} lengths for {self.size} samples", "give lengths=[…], one for each sample"
        elif max(found) > max_tokens:
            what, remedy = f"a sample of {max(found)} tokens", "raise max_tokens, or shorten the sample"
        if what:
            raise DataError(what, where=where, remedy=remedy)
        return found

    def __repr__(self) -> str:
        return f"NeedParallel({self.size} samples, type={self.type!r})"


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(sample: object) -> bool:
    """Whether a sample is a tensor without dimensions, which has no length."""
    return isinstance(sample, torch.Tensor) and not sample.ndim


def _counted(lengths: Sequence[int] | torch.Tensor, where: str) -> list[int]:
    """Lengths that were given, as whole numbers."""
    found = [length.item() if isinstance(length, torch.Tensor | np.generic) else length for length in lengths]
    wrong = [length for length in found if not is_whole(length, 0)]
    if wrong:
        raise DataError(f"a length is {wrong[0]!r}", where=where, remedy="give whole numbers, none below 0")
    return [int(length) for length in found]


@dataclass(frozen=True, slots=True)
class Part:
    """What of a call is one rank's.

    Attributes:
        args: of the method.
        kwargs: of the method.
        share: by how much the rank's loss counts.
        idle: whether the rank has no samples, and computes on another's.
        num_tokens: of a whole sequence, in a call that divides tokens.
        shared: the arguments that all ranks have whole, in a call that divides others; None where none is divided.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    share: float
    idle: bool = False
    num_tokens: int | None = None
    shared: tuple[object, ...] | None = None


def divide(args: Sequence[object], kwargs: Mapping[str, object], layout: Layout, *, weighed: bool) -> list[Part]:
    """Each rank's part of a call, in rank order.

    Worked example: 3 samples on 2 ranks give samples 0 on rank 0 and 1, 2 on rank 1, with shares 1/3 and 2/3. So the
    means over each rank's samples, times its share, add up to the mean over all three.

    Args:
        args: of the method, some of them marked.
        kwargs: of the method, some of them marked.
        layout: of the engine.
        weighed: the method takes `weights` and weighs its samples itself; then every loss counts whole.
    """
    marked = [value for value in (*args, *kwargs.values()) if isinstance(value, NeedParallel)]
    _check_outermost([*args, *kwargs.values()])
    if not marked:
        share = 1.0 / (layout.num_data_ranks * layout.sequence)
        return [Part(tuple(args), dict(kwargs), share)] * layout.num_ranks
    size, weights = _agreed(marked)
    if any(value.max_tokens is not None for value in marked):
        return _dealt(args, kwargs, layout, marked, weights, weighed=weighed)
    num_tokens = _tokens(marked, layout)
    return [
        _part(args, kwargs, _Place.of(rank, size, num_tokens, layout), weights, weighed)
        for rank in range(layout.num_ranks)
    ]


def _check_outermost(values: Sequence[object]) -> None:
    """Refuse marks inside of arguments, which nothing would divide."""
    for value in values:
        inside = value.data if isinstance(value, NeedParallel) else value
        if _holds_mark(inside):
            raise DataError(
                f"it is inside a {type(inside).__name__}, where nothing divides it",
                where=WHERE,
                remedy="mark whole arguments: NeedParallel({'ids': ids, 'rewards': rewards}) divides a dict, and an "
                "argument of its own has what is not divided",
            )


def _holds_mark(value: object, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a mark is in a container, at any depth of dicts and dataclasses; of lists the first value is read."""
    if id(value) in seen:  # a dataclass that leads back to itself
        return False
    if isinstance(value, Mapping):
        return any(isinstance(each, NeedParallel) or _holds_mark(each, seen) for each in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(each, NeedParallel) for each in value) or (bool(value) and _holds_mark(value[0], seen))
    held = (dataclass_values(value) or {}).values()
    within = seen | {id(value)} if held else seen
    return any(isinstance(each, NeedParallel) or _holds_mark(each, within) for each in held)


def _dealt(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    layout: Layout,
    marked: Sequence[NeedParallel[object]],
    weights: Sequence[float],
    *,
    weighed: bool,
) -> list[Part]:
    """Each rank's part of a call with micro-batches.

    Worked example: rows of 9, 2, 7 and 4 tokens, `max_tokens` 9, two ranks. They take two micro-batches on each rank:
    rank 0 gets [[0], [3]], and rank 1 [[2], [1]]. Row 3 counts on rank 0 by weights[1], which is [0.25].
    """
    limits = {(value.max_tokens, *value.lengths) for value in marked if value.max_tokens is not None}
    if len(limits) > 1 or any(value.type == "seq" for value in marked):
        raise DataError("the marked arguments are divided differently", where=WHERE, remedy="give max_tokens once")
    if not weighed:
        raise DataError(
            "a mean over one rank's micro-batch has no meaning for all",
            where=f"{WHERE}(…, max_tokens=…)",
            remedy="let the method have a parameter weights: (loss_of_each * weights[number]).sum().backward() for "
            "micro-batch `number` gives the gradient of the mean over all samples",
        )
    ((most, *lengths),) = limits
    assert most is not None
    rank_rows = deal(np.array(lengths), layout.num_data_ranks, max_rows=None, max_tokens=most)
    total, stand_in = sum(weights), int(np.argmin(lengths))
    parts: list[Part] = []
    for micro_batches in rank_rows:
        given = {
            **kwargs,
            "weights": [
                torch.tensor([weights[row] for row in rows] or [0.0], dtype=torch.float64) / total
                for rows in micro_batches
            ],
        }
        chosen = [rows or [stand_in] for rows in micro_batches]
        own, named = ([_dealt_to(value, chosen) for value in values] for values in (args, given.values()))
        shared = _unmarked(args, kwargs)
        part = Part(tuple(own), dict(zip(given, named, strict=True)), 1.0 / layout.sequence, shared=shared)
        parts += [part] * layout.model_ranks
    return parts


def _dealt_to(value: object, micro_batches: Sequence[Sequence[int]]) -> object:
    if not isinstance(value, NeedParallel):
        return value
    return [_map(value.data, lambda samples, rows=rows: _pick(samples, rows)) for rows in micro_batches]


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank gets: samples start to stop; tokens first to last, of num_tokens."""

    layout: Layout
    start: int
    stop: int
    num_tokens: int | None
    first: int
    last: int

    @classmethod
    def of(cls, rank: int, size: int, num_tokens: int | None, layout: Layout) -> _Place:
        data, ranks = rank // layout.model_ranks, layout.num_data_ranks
        sequence = rank // layout.tensor % layout.sequence
        start, stop = size * data // ranks, size * (data + 1) // ranks
        if size < ranks:  # the first ranks have them, so that the first results are those of samples
            start, stop = min(data, size), min(data + 1, size)
        length = 0 if num_tokens is None else -(-num_tokens // layout.sequence)
        return cls(layout, start, stop, num_tokens, sequence * length, min((sequence + 1) * length, num_tokens or 0))

    @property
    def idle(self) -> bool:
        return self.start == self.stop

    @property
    def targets(self) -> int:
        """Tokens of this rank that another follows."""
        assert self.num_tokens is not None
        return self.last - self.first - (self.last == self.num_tokens)


def _part(
    args: Sequence[object], kwargs: Mapping[str, object], place: _Place, weights: Sequence[float], weighed: bool
) -> Part:
    def mine(value: object) -> object:
        if not isinstance(value, NeedParallel):
            return value
        rows = slice(0, 1) if place.idle else slice(place.start, place.stop)
        part = _map(value.data, lambda samples: _take(samples, rows))
        if value.type == "seq" and place.num_tokens is not None:
            part = _map(part, lambda samples: _take_tokens(samples, slice(place.first, place.last)))
        return part

    own, total = weights[place.start : place.stop], sum(weights)
    given = dict(kwargs)
    share = (
        sum(own) / total * (place.targets / (place.num_tokens - 1) if place.num_tokens else 1 / place.layout.sequence)
    )
    if weighed:
        share = 1.0 if place.num_tokens else 1.0 / place.layout.sequence
        each = torch.tensor(own if own else [0.0], dtype=torch.float64) / total
        if place.num_tokens:
            followed = torch.zeros(place.last - place.first, dtype=torch.float64)
            followed[: place.targets] = 1.0 / (place.num_tokens - 1)
            each = each[:, None] * followed
        given["weights"] = each
    return Part(
        tuple(mine(value) for value in args),
        {key: mine(value) for key, value in given.items()},
        0.0 if place.idle else share,
        place.idle,
        place.num_tokens,
        _unmarked(args, kwargs),
    )


def _unmarked(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(value for value in (*args, *kwargs.values()) if not isinstance(value, NeedParallel))


def _agreed(marked: Sequence[NeedParallel[object]]) -> tuple[int, list[float]]:
    """The number of samples, and their weights."""
    if len({value.size for value in marked}) > 1:
        found = ", ".join(f"{value.size} (a {type(value.data).__name__})" for value in marked)
        raise DataError(
            f"the marked arguments have different numbers of samples: {found}",
            where=WHERE,
            remedy=f"mark arguments with one value per sample only; {_COUNTED}",
        )
    given = [value.weights for value in marked if value.weights is not None]
    if any(weights != given[0] for weights in given):
        raise DataError("two arguments give different weights", where=WHERE, remedy="give them once")
    weights = given[0] if given else [1.0] * marked[0].size
    if not sum(weights):
        raise DataError("all weights are 0", where=WHERE, remedy="do not call the method")
    return marked[0].size, weights


def _tokens(marked: Sequence[NeedParallel[object]], layout: Layout) -> int | None:
    """Tokens of each sequence, where the call divides them among ranks."""
    divided = [value for value in marked if value.type == "seq"]
    if not divided or layout.sequence == 1:
        return None
    lengths = {length for value in divided for leaf in _leaves(value.data) for length in _lengths(leaf)}
    if len(lengths) > 1:
        raise DataError(
            f"sequences of {min(lengths)} to {max(lengths)} tokens",
            where=f'{WHERE}(…, type="seq")',
            remedy="pad them on the right to one length; give the numbers of real tokens as weights",
        )
    tokens = lengths.pop()
    length = -(-tokens // layout.sequence)
    if (layout.sequence - 1) * length >= tokens or tokens < 2:
        raise DataError(
            f"{tokens} tokens cannot be divided among {layout.sequence} ranks, so that each gets some",
            where=f'{WHERE}(…, type="seq")',
            remedy=f"give sequences of a multiple of {layout.sequence} tokens",
        )
    return tokens


def _size(data: object, place: str = "") -> int:
    """The number of samples; what a dict holds has to have as many of each.

    Args:
        data: samples, or a dict or named tuple of them.
        place: where they are in what was given, for messages.
    """
    fields = _fields(data)
    if fields is None:
        return len(_samples(data, place))
    sizes = {key: _size(value, f"{key!r} of the {type(data).__name__}: ") for key, value in fields.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the values of the {type(data).__name__} have different numbers of samples: "
            + ", ".join(f"{key!r} {size}" for key, size in sizes.items()),
            where=WHERE,
            remedy=f"give as many of each; {_COUNTED}",
        )
    return next(iter(sizes.values()), 0)


_COUNTED = "a list or tuple has as many as it has elements: several tensors go together in a dict or a named tuple"


def _fields(data: object) -> Mapping[str, object] | None:
    """What a dict or a named tuple holds, each with a value for each sample; None: the data are samples themselves."""
    if isinstance(data, Mapping):
        return data
    return named_fields(data)


def _samples(data: object, place: str = "") -> Samples:
    if isinstance(data, list | tuple | np.ndarray | torch.Tensor):
        if isinstance(data, torch.Tensor) and (data.layout != torch.strided or data.is_nested):
            listed = "a list with a tensor for each sample"
            raise DataError(
                f"{place}a {'nested' if data.is_nested else 'sparse'} tensor cannot be divided",
                where=WHERE,
                remedy=f"give {listed}: list(tensor.unbind())"
                if data.is_nested
                else f"give a dense one (to_dense()), or {listed}",
            )
        if isinstance(data, list | tuple) or data.ndim:
            return data
    raise DataError(
        f"{place}a {type(data).__name__} has no samples to divide",
        where=WHERE,
        remedy="give a list, a tuple, a tensor or an array with samples along its first dimension, or a dict or named "
        "tuple of such; what is not divided is an argument of its own, without NeedParallel",
    )


def _leaves(data: object) -> list[Samples]:
    fields = _fields(data)
    return [_samples(data)] if fields is None else [leaf for value in fields.values() for leaf in _leaves(value)]


def _map(data: object, take: Callable[[Samples], object]) -> object:
    fields = _fields(data)
    if fields is None:
        return take(_samples(data))
    taken = {key: _map(value, take) for key, value in fields.items()}
    if isinstance(data, UserDict):  # batches of transformers: batch.to(device)
        return type(data)(taken)
    if isinstance(data, dict) and type(data) is not dict:  # outputs of transformers: output.logits
        made = copy.copy(data)
        for key, value in taken.items():
            made[key] = value
        return made
    return taken if isinstance(data, Mapping) else cast(Any, type(data))(**taken)


def _take(samples: Samples, part: slice) -> Samples:
    # A copy: a part of a tensor would be sent with the memory of the whole.
    return samples[part].clone() if isinstance(samples, torch.Tensor) else samples[part]


def _pick(samples: Samples, rows: Sequence[int]) -> Samples:
    if isinstance(samples, torch.Tensor | np.ndarray):
        return samples[list(rows)]
    return type(samples)(samples[row] for row in rows)


def _take_tokens(samples: Samples, part: slice) -> Samples:
    if isinstance(samples, torch.Tensor):
        return samples[:, part].clone()
    if isinstance(samples, np.ndarray):
        return samples[:, part]
    return type(samples)(sample[part] for sample in samples if isinstance(sample, Sequence))


def _lengths(samples: Samples) -> set[int]:
    if isinstance(samples, torch.Tensor | np.ndarray):
        if samples.ndim >= 2:
            return {samples.shape[1]}
    else:
        lengths = [len(s) for s in samples if isinstance(s, Sequence) and not isinstance(s, str)]
        if len(lengths) == len(samples):
            return set(lengths)
    raise DataError(
        "a sample is no sequence of tokens",
        where=f'{WHERE}(…, type="seq")',
        remedy='mark arguments with one value per sample with NeedParallel(…, type="data")',
    )
