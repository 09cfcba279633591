"""What of a module each rank has: matrices and sequences that ranks share, and the units that FSDP gathers."""

from __future__ import annotations

from torch import nn

from shardtune.config.rank_layout import Layout
from shardtune.engine.nn import BaseTrainModule, pretrained_parts
from shardtune.engine.sequence_parallel import SequenceForward
from shardtune.errors import ModelError, ParallelError
from shardtune.models.attention_heads import heads_of
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units
from shardtune.parallel.tensor_parallel import Heads, check_heads


def sequence_forward(module: BaseTrainModule, ranks: Ranks) -> SequenceForward | None:
    """The forward of a module whose sequences are shared by ranks; None: they are not."""
    if ranks.layout.sequence == 1:
        return None
    assert ranks.sequence_mesh is not None
    return SequenceForward(module, ranks.sequence_mesh, rings=_rings(_all_heads(module), ranks.layout))


def share_matrices(module: BaseTrainModule, ranks: Ranks) -> ModelParallel:
    """Divide the module's matrices among tensor ranks.

    Raises:
        ParallelError: its heads cannot be divided among so many ranks.
    """
    layout = ranks.layout
    found = _all_heads(module) if layout.tensor > 1 or layout.sequence > 1 else []
    exchanged = 1 if _rings(found, layout) else layout.sequence
    for heads in found:
        check_heads(heads, layout.tensor, exchanged, ", or leave sequence_method out" if exchanged > 1 else "")
    fewest = min(found, key=lambda heads: heads.key_value, default=None)
    if fewest is not None and fewest.key_value < layout.tensor and len(set(found)) > 1:
        raise ParallelError(
            f"the models in {type(module).__name__} have different heads, and one has {fewest.key_value} of keys and "
            f"values, fewer than {layout.tensor} tensor ranks",
            where=f"build(tensor_parallel_size={layout.tensor})",
            remedy=f"use tensor_parallel_size={fewest.key_value}",
        )
    return apply_model_parallel(module, module.tensor_plan, {}, ranks, fewest if layout.tensor > 1 else None)


def gathered_units(module: BaseTrainModule) -> list[nn.Module]:
    """The modules that are gathered as one: those that the class declares, or detected ones.

    Raises:
        ModelError: the module has none of the declared kind.
    """
    named = tuple(module.non_split_modules or ())  # None: a hook that is still blank
    chosen = [part for part in module.modules() if named and isinstance(part, named)]
    if named and not chosen:
        raise ModelError(
            f"no module of {type(module).__name__} is a {' or a '.join(kind.__name__ for kind in named)}",
            where="non_split_modules",
            remedy=f"it has {', '.join(sorted({type(part).__name__ for part in module.modules()}))}",
        )
    return choose_units(module, sorted({type(part).__name__ for part in chosen}))[0]


def _rings(heads: list[Heads], layout: Layout) -> bool:
    """Whether ranks that share sequences send each other keys and values instead of heads."""
    return any(layout.rings(each.query, each.key_value) for each in heads)


def _all_heads(module: BaseTrainModule) -> list[Heads]:
    """The heads of each model of transformers in the module."""
    return [heads for _, part in pretrained_parts(module) if (heads := heads_of(part.config)) is not None]
