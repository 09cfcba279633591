"""The layout that the sizes given to `TrainEngine.build` mean, and whether a module fits it."""

from __future__ import annotations

from typing import Literal, get_args

from shardtune.config.rank_layout import Layout
from shardtune.config.schema import SequenceMethod
from shardtune.engine.nn import BaseTrainModule
from shardtune.engine.split_arguments import is_whole
from shardtune.errors import ParallelError
from shardtune.models.lora.attach import is_adapted

Executor = Literal["fsdp2", "fsdp1", "ddp"]


def layout_of(
    executor: Executor, sizes: tuple[int, int | None, int, int], method: SequenceMethod, given: int | None
) -> Layout:
    """The layout of ranks of an executor.

    Args:
        executor: fsdp2 | fsdp1 | ddp.
        sizes: numbers of tensor ranks, of groups with samples of their own (None: as many as the ranks allow), of
            sequence ranks, and of copies of the sharded module.
        method: how sequence ranks share attention.
        given: number of ranks there are; None: as many as needed.

    Raises:
        ParallelError: the sizes or the method do not fit the ranks or the executor.
    """
    tensor, data, sequence, replicate = sizes
    for size in (tensor, sequence, replicate, *(() if data is None else (data,))):
        if not is_whole(size, 1):
            raise ParallelError(
                f"the size {size!r} is no whole number above 0", where="build(…)", remedy="leave it out"
            )
    inner = tensor * sequence
    if given is not None and (given % inner or (data is not None and data * inner != given)):
        requested = f"tensor {tensor} x sequence {sequence}" + (f" x data {data}" if data is not None else "")
        raise ParallelError(
            f"{requested} ranks are needed, there are {given}",
            where="build(…)",
            remedy="leave data_parallel_size out, and let the others divide the ranks there are",
        )
    data = data if data is not None else (given // inner if given is not None else replicate)
    if data % replicate:
        raise ParallelError(
            f"{replicate} copies do not divide {data} groups of ranks with data of their own",
            where="build(replicate_size=…)",
            remedy="leave it out",
        )
    if executor == "fsdp1" and tensor > 1:
        raise ParallelError(
            "fsdp1 joins the parameters of a unit, so they cannot be parts of matrices",
            where=f"build(tensor_parallel_size={tensor})",
            remedy='use executor="fsdp2"',
        )
    _check_method(method, sequence)
    if executor == "ddp":
        return Layout(data, 1, sequence, tensor, sequence_method=method)
    flat = executor == "fsdp1" and data * sequence > 1
    return Layout(replicate, data // replicate, sequence, tensor, flat=flat, sequence_method=method)


def _check_method(method: SequenceMethod, ranks: int) -> None:
    """Refuse a way to share attention that is not one, or has no effect on this number of sequence ranks."""
    if method not in get_args(SequenceMethod):
        wrong, remedy = "is not one of the methods", f"use one of {', '.join(get_args(SequenceMethod))}"
    elif method != "auto" and ranks == 1:
        wrong, remedy = "has no effect with sequence_parallel_size=1", "leave it out, or give sequence_parallel_size"
    else:
        return
    raise ParallelError(f"sequence_method={method!r} {wrong}", where="build(sequence_method=…)", remedy=remedy)


def check_divisible(module: BaseTrainModule, ranks: int) -> None:
    """Refuse a module whose matrix products this number of tensor ranks cannot share."""
    if is_adapted(module):
        raise ParallelError(
            f"{type(module).__name__} has a low-rank adapter, whose matrices tensor ranks cannot share",
            where=f"build(tensor_parallel_size={ranks})",
            remedy=f"use data_parallel_size={ranks}, which shards the weights over as many ranks",
        )
    if not module.tensor_plan:
        raise ParallelError(
            f"{type(module).__name__} declares no plan by which tensor ranks could share it",
            where=f"build(tensor_parallel_size={ranks})",
            remedy="give its class a tensor_plan, or use data_parallel_size",
        )
