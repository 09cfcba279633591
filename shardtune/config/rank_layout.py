"""The layout of ranks: the sizes of the axes of `actor.parallel` for a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardtune.config.schema import ActorConfig, SequenceMethod
from shardtune.errors import ParallelError

SECTION = "actor.parallel"


@dataclass(frozen=True, slots=True)
class Layout:
    """The mesh of ranks, `replicate x shard x sequence x tensor`, with the last axis innermost.

    Ranks along `replicate` or `shard` have different rows; ranks along `sequence` have parts of the same rows, ranks
    along `tensor` parts of the same matrices. `expert` is not an axis of the mesh: experts are distributed over
    neighbouring ranks of the other axes.

    Worked example of 8 ranks, replicate 1 x shard 2 x sequence 2 x tensor 2: rank 5 = ((0 * 2 + 1) * 2 + 0) * 2 + 1 is
    shard 1, sequence 0, tensor 1. It shares matrices with rank 4, its sequence with rank 7, and works on the same rows
    as ranks 4, 6 and 7 (`model_ranks` is 4), which are those of data rank 5 // 4 = 1 of `num_data_ranks` = 2. Weights
    are sharded over shard and sequence together: rank 5 has the same slice of matrices as ranks 1, 3 and 7, and a
    quarter of it. With expert 2, ranks 4 and 5 hold different experts, and ranks 1, 3, 5, 7 the same ones.

    Attributes:
        replicate: copies of the sharded model.
        shard: ranks over which the weights of each copy are sharded (together with those of `sequence`).
        sequence: ranks that share each sequence.
        tensor: ranks that share each matrix multiplication.
        expert: ranks over which a layer's experts are distributed.
        sequence_method: how ranks share the attention of a sequence: ulysses | ring | auto.
        flat: whether FSDP1 shards, which cuts the concatenated parameters of a unit instead of each parameter's rows.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    sequence_method: SequenceMethod = "auto"
    flat: bool = False

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.replicate * self.shard

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows together."""
        return self.sequence * self.tensor

    def rings(self, query_heads: int, key_value_heads: int) -> bool:
        """Whether ranks share the attention of sequences by a ring: chosen, or because they do not divide the heads."""
        if self.sequence == 1 or self.sequence_method != "auto":
            return self.sequence > 1 and self.sequence_method == "ring"
        return not divides(self.model_ranks, query_heads, key_value_heads)

    def __str__(self) -> str:
        sizes = {
            "replicate": self.replicate,
            "shard": self.shard,
            "sequence": self.sequence,
            "tensor": self.tensor,
            "expert": self.expert,
        }
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"

    @classmethod
    def of(cls, actor: ActorConfig, num_ranks: int) -> Layout:
        """The layout of a recipe on a number of ranks.

        Raises:
            ParallelError: the sizes do not fit; the remedy names sizes that do.
        """
        parallel = actor.parallel
        flat = actor.training_backend == "fsdp1"
        if flat:
            _check_flat(actor)
        inner = parallel.sequence * parallel.tensor
        if num_ranks % inner:
            raise ParallelError(
                f"{SECTION}: sequence {parallel.sequence} x tensor {parallel.tensor} = {inner} ranks do not divide "
                f"{_ranks(num_ranks)}",
                where=_where("tensor" if parallel.tensor > 1 else "sequence"),
                remedy=_fit_inner(parallel.sequence, parallel.tensor, num_ranks)
                + f", or use a multiple of {inner} ranks",
            )
        outer = num_ranks // inner
        replicate, shard = _data_axes(actor, outer, num_ranks)
        layout = cls(
            replicate, shard, parallel.sequence, parallel.tensor, parallel.expert, parallel.sequence_method, flat
        )
        layout._check_experts()
        layout._check_copies()
        return layout

    def _check_copies(self) -> None:
        if self.flat and self.num_ranks > 1 and self.shard * self.sequence == 1:
            raise ParallelError(
                f"FSDP1 has nothing to shard: {SECTION} has {self.replicate} copies of the model on "
                f"{_ranks(self.num_ranks)}",
                where="actor.training_backend: fsdp1",
                remedy="use actor.training_backend: ddp",
            )

    def _check_experts(self) -> None:
        among = self.shard * self.model_ranks
        if among % self.expert:
            nearest = max(size for size in _divisors(among) if size < self.expert)
            raise ParallelError(
                f"{SECTION}.expert: {self.expert} does not divide the {_ranks(among)} that hold a copy of the model",
                where=_where("expert"),
                remedy=f"set it to {nearest}, or use other ranks",
            )


def divides(ranks: int, query_heads: int, key_value_heads: int) -> bool:
    """Whether ranks can share the heads of attention; fewer of keys and values are repeated."""
    fewer, more = sorted((ranks, key_value_heads))
    return query_heads % ranks == 0 and more % fewer == 0


def _check_flat(actor: ActorConfig) -> None:
    """Refuse what FSDP1 cannot be combined with."""
    parallel, lora = actor.parallel, actor.model.lora
    refused = {
        f"{SECTION}.tensor: {parallel.tensor}": (
            parallel.tensor > 1,
            "it concatenates the parameters of a unit, which is not possible with parts of matrices",
        ),
        f"{SECTION}.expert: {parallel.expert}": (
            parallel.expert > 1,
            "it concatenates the parameters of a unit, and experts are sharded over other ranks than the rest",
        ),
        "actor.fsdp_config.cpu_offload: true": (
            actor.fsdp_config.cpu_offload,
            "its own offloading needs a GPU, and FSDP2's does not",
        ),
        "actor.model.compile: true": (actor.model.compile, "its hooks inside compiled units are untested"),
        f"actor.model.kernels.source: {actor.model.kernels.source}": (
            actor.model.kernels.source is not None,
            "it holds weights as views into others, on which replaced modules are untested",
        ),
        f"actor.model.fp8.scaling: {actor.model.fp8.scaling}": (
            actor.model.fp8.scaling is not None,
            "it holds weights as views into others, on which layers in FP8 are untested",
        ),
        "actor.model.lora.base_dtype: nf4": (
            actor.model.is_lora and lora.base_dtype == "nf4",
            "it concatenates weights, not four-bit codes",
        ),
    }
    for key, why in ((key, why) for key, (is_set, why) in refused.items() if is_set):
        raise ParallelError(
            f"actor.training_backend: fsdp1 does not work with {key}: {why}",
            where=key.partition(":")[0],
            remedy="use actor.training_backend: fsdp (FSDP2), or leave it out",
        )


def _data_axes(actor: ActorConfig, outer: int, num_ranks: int) -> tuple[int, int]:
    """The sizes of replicate and shard, whose product is `outer`."""
    parallel = actor.parallel
    replicate, shard = parallel.data_replicate, parallel.data_shard
    if actor.training_backend == "ddp":
        if shard not in (-1, 1) or replicate not in (1, outer):
            raise ParallelError(
                f"actor.training_backend: ddp keeps the whole model on every rank, but {SECTION} has "
                f"data_replicate {replicate} x data_shard {shard}",
                where="actor.training_backend",
                remedy="leave both out, or use actor.training_backend: fsdp",
            )
        return outer, 1
    if shard == -1 and outer % replicate:
        nearest = max(size for size in _divisors(outer) if size <= replicate)
        raise ParallelError(
            f"{SECTION}.data_replicate: {replicate} does not divide {_of(outer, num_ranks)}",
            where=_where("data_replicate"),
            remedy=f"set it to {nearest}, or use a multiple of {replicate} ranks",
        )
    shard = outer // replicate if shard == -1 else shard
    if replicate * shard != outer:
        raise ParallelError(
            f"{SECTION}: data_replicate {replicate} x data_shard {shard} = {replicate * shard} is not "
            f"{_of(outer, num_ranks)}",
            where=_where("data_shard"),
            remedy=f"set {SECTION}.data_shard to -1 (what is left)"
            + (f", or runner.nproc_per_node to {replicate * shard}" if outer == num_ranks else ""),
        )
    return replicate, shard


def _fit_inner(sequence: int, tensor: int, num_ranks: int) -> str:
    """The largest sizes up to the given ones that divide the number of ranks."""
    sizes = _divisors(num_ranks)
    fitting = [
        (s, t) for s in sizes for t in sizes if s <= sequence and t <= tensor and num_ranks % (s * t) == 0
    ]  # (1, 1) always does
    best = max(fitting, key=lambda pair: (math.prod(pair), pair[1]))
    return f"the nearest that fits is sequence {best[0]}, tensor {best[1]}"


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _where(axis: str) -> str:
    return f"{SECTION}.{axis}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _of(outer: int, num_ranks: int) -> str:
    return _ranks(num_ranks) if outer == num_ranks else f"the {outer} of {num_ranks} ranks with rows of their own"
