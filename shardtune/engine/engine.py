"""The engine: runs a user's module on all ranks and calls its methods as on a single object."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardtune.config.rank_layout import Layout
from shardtune.config.schema import SequenceMethod
from shardtune.engine.checks import check_buffers, check_dtype, check_hooks, check_options, no_engine
from shardtune.engine.initial_weights import forget_recorders, undo_parting
from shardtune.engine.methods import Method, no_method, read_methods
from shardtune.engine.module_copy import copy_of_module
from shardtune.engine.nn import unwrapped
from shardtune.engine.pickling import MODULE, check_sendable
from shardtune.engine.push import names_between
from shardtune.engine.rank_module import Order, precision_of
from shardtune.engine.rank_process import Request
from shardtune.engine.ranks import InProcess, Team
from shardtune.engine.ranks_local import LocalRanks
from shardtune.engine.ranks_spmd import SpmdRanks
from shardtune.engine.requested_layout import Executor, check_divisible, layout_of
from shardtune.engine.sequence_parallel import check_shareable
from shardtune.engine.session import current_session
from shardtune.engine.split_arguments import NeedParallel, divide
from shardtune.errors import ParallelError
from shardtune.parallel.unfit_parameters import check_shapes

_numbers = itertools.count()


class TrainEngine:
    """Runs the methods of a module on all ranks; a call returns one value per rank, in rank order.

    What an engine holds is released by `close()`, at the end of a `with`, or, except on Ray and under torchrun, once
    nothing refers to the engine any more.

    Args:
        module: of a class that inherits from one of `shardtune.nn`, best made inside `init_empty_weights()`; or a model
            of PEFT around such a module. The ranks work on copies of it.
        executor: fsdp2 | fsdp1: weights are sharded; ddp: every rank has them all.
        precision: of the computation, bf16 | fp16 | fp32 | fp64; None: that of the module's parameters. Weights,
            gradients and optimizer states are held in full precision (fp32, with fp64 in fp64).
        seed: of randomly initialised weights.
        gather_to_generate: gather all weights once for a call of `self.generate(...)`, and not for each token: on each
            rank that takes the memory of the whole model in the computation's dtype. None: where that is at most half
            of what is free on every rank.

    Raises:
        ModelError: the module is not a train module, one of its methods has the name of an engine method, or a buffer
            has no values.
    """

    def __init__(
        self,
        module: nn.Module,
        executor: Executor = "fsdp2",
        *,
        precision: str | None = None,
        seed: int = 0,
        gather_to_generate: bool | None = None,
    ) -> None:
        check_options(executor, precision, seed, gather_to_generate)
        inner, _ = unwrapped(module)
        self._kind = type(inner)
        check_buffers(inner)
        undo_parting(inner)
        self._methods: dict[str, Method] = read_methods(self._kind, _own_names())
        self._module, self._seed = module, seed
        self._executor: Executor = executor
        self._gather_to_generate = gather_to_generate
        check_shapes(module)
        check_hooks(module)
        self._precision = precision or precision_of(module)
        self._id = f"{self._kind.__name__}-{os.getpid()}-{next(_numbers)}"
        self._team: Team | None = None
        self._layout = Layout()
        self._exports = itertools.count()
        self._release: weakref.finalize | None = None

    # The user's methods.

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            raise no_method(unwrapped(self._module)[0], name, self._methods)
        return partial(self._call, self._methods[name])

    def __setattr__(self, name: str, value: object) -> None:
        if type(self) is TrainEngine and not name.startswith("_") and name != "notes":
            raise AttributeError(
                f"setting {name} of the engine has no effect on {self._kind.__name__}, which is on the ranks: "
                "write a method of the class that sets it there, and call the method"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        where = f"{self._layout}" if self._team is not None else "not built"
        return f"TrainEngine({self._kind.__name__}, {self._executor}, {where})"

    def _call(self, method: Method, /, *args: object, **kwargs: object) -> list[object]:
        marked = any(isinstance(value, NeedParallel) for value in (*args, *kwargs.values()))
        weighed = method.check(args, kwargs, has_weights=marked)
        team = self._built(method.name)
        parts = divide(args, kwargs, self._layout, weighed=weighed)
        for argument, value in (*zip(method.names(args), args, strict=True), *kwargs.items()):
            data = value.data if isinstance(value, NeedParallel) else value
            check_sendable(data, f"{self._kind.__name__}.{method.name}", f"the argument {argument}")
        self._take_turn(team)
        same = all(part is parts[0] for part in parts)
        request = Request(self._id, "call", (method.name, parts[0]))
        return team.request([request if same else Request(self._id, "call", (method.name, part)) for part in parts])

    # Building.

    def build(
        self,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        colocate_with: TrainEngine | None = None,
        *,
        sequence_parallel_size: int = 1,
        sequence_method: SequenceMethod = "auto",
        replicate_size: int = 1,
        take_turns: bool = True,
    ) -> TrainEngine:
        """Build the module on its ranks, load its weights, and call its `on_weights_materialized` there.

        Args:
            tensor_parallel_size: ranks that share each matrix multiplication.
            data_parallel_size: groups of ranks with different samples; None: all remaining ranks (torchrun,
                colocate_with), otherwise one.
            colocate_with: a built engine, whose ranks are shared.
            sequence_parallel_size: ranks that share each sequence, in calls with NeedParallel(type="seq").
            sequence_method: how they share attention: "ulysses" (they exchange tokens for heads, which they must
                divide), "ring" (keys and values go from rank to rank), "auto" (a ring where they do not divide them).
            replicate_size: copies of the sharded module (fsdp2), which divides data_parallel_size.
            take_turns: with colocate_with: a call wakes its own engine, and the others free their memory: on GPUs
                always, on hosts without them where less than a quarter of the host's memory is free.

        Returns:
            The engine.

        Raises:
            ParallelError: these sizes do not fit the ranks or the module, or there are no such ranks.
            ModelError: the weights do not fit the module.
        """
        if self._team is not None:
            raise ParallelError("the engine is built already", where="build()", remedy="make another, or close() it")
        session = current_session()
        if colocate_with is not None and not isinstance(colocate_with, TrainEngine):
            raise no_engine(colocate_with, "build(colocate_with=…)")
        given = colocate_with._built("build(colocate_with=…)").num_ranks if colocate_with else session.num_ranks
        sizes = (tensor_parallel_size, data_parallel_size, sequence_parallel_size, replicate_size)
        layout = layout_of(self._executor, sizes, sequence_method, given)
        inner, _ = unwrapped(self._module)
        if sequence_parallel_size > 1:
            check_shareable(inner)
        if tensor_parallel_size > 1:
            check_divisible(inner, tensor_parallel_size)
        team = colocate_with._built("build(…)") if colocate_with else session.team(layout.num_ranks)
        if colocate_with is not None and take_turns:
            team.engines |= {colocate_with._id: True, self._id: True}
            self._put_others_to_sleep(team)
        forget_recorders(self._module)
        module, mine = self._module, f"TrainEngine({self._kind.__name__})"
        if _is_here(team):
            module = copy_of_module(module, mine)
        else:
            check_sendable(module, mine, MODULE)
        order = Order(module, layout, self._precision, self._seed, self._gather_to_generate)
        try:
            self.notes: list[str] = team.request_all(Request(self._id, "build", (order,)))[0]
        except BaseException:
            team.engines.pop(self._id, None)
            if colocate_with is None:
                team.close()
            raise
        self._team, self._layout = team, layout
        team.engines.setdefault(self._id, False)
        team.awake.add(self._id)
        if isinstance(team, InProcess | LocalRanks):  # of the others several processes or Ray take part in an end
            self._release = weakref.finalize(self, team.abandon, self._id)
            self._release.atexit = False
        return self

    def _built(self, what: str) -> Team:
        if self._team is None:
            raise ParallelError(
                f"{what}: the engine of {self._kind.__name__} is not built",
                where=what,
                remedy="call build() first",
            )
        return self._team

    @property
    def num_ranks(self) -> int:
        """Number of ranks on which the engine is built."""
        return self._layout.num_ranks

    @property
    def layout(self) -> Layout:
        """The layout of the ranks."""
        return self._layout

    @property
    def methods(self) -> list[str]:
        """The methods that can be called."""
        return sorted(self._methods)

    # The module's place in memory.

    def train(self, mode: bool = True) -> TrainEngine:
        """Set the module to training mode (dropout), or to evaluation mode."""
        self._built("train").request_all(Request(self._id, "train", (mode,)))
        return self

    def eval(self) -> TrainEngine:
        """Set the module to evaluation mode."""
        return self.train(False)

    def cpu(self) -> TrainEngine:
        """Move weights, gradients and optimizer states to host memory; a no-op on ranks without a GPU."""
        self._built("cpu").request_all(Request(self._id, "to_host"))
        return self

    def cuda(self) -> TrainEngine:
        """Move weights, gradients and optimizer states to the ranks' devices."""
        return self.wake()

    def sleep(self) -> TrainEngine:
        """Free the memory of weights, gradients and optimizer states until the next call: from a GPU to host memory,
        from host memory to a file."""
        team = self._built("sleep")
        team.request_all(Request(self._id, "sleep"))
        team.awake.discard(self._id)
        return self

    def wake(self) -> TrainEngine:
        """Restore the memory; a call does so automatically."""
        team = self._built("wake")
        self._take_turn(team)
        team.request_all(Request(self._id, "wake"))
        return self

    def memory(self) -> list[int]:
        """Bytes that weights, buffers, gradients and optimizer states hold on each rank's device."""
        return self._built("memory").request_all(Request(self._id, "memory"))

    def _take_turn(self, team: Team) -> None:
        if team.engines.get(self._id):
            self._put_others_to_sleep(team)
        team.awake.add(self._id)

    def _put_others_to_sleep(self, team: Team) -> None:
        for other in [name for name in team.awake if name != self._id and team.engines.get(name)]:
            team.request_all(Request(other, "make_room"))
            team.awake.discard(other)

    # Saving and loading.

    def save(self, path: str | Path) -> None:
        """Write weights, optimizers and schedules into a folder, each rank its shard."""
        self._on_ranks("save", str(path))

    def load(self, path: str | Path) -> None:
        """Continue from a folder that `save` wrote, with this layout or any other; or take the weights of one that
        `save_pretrained` wrote, with optimizers and schedules as they are."""
        self._on_ranks("load", str(path))

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory that `from_pretrained` loads, an adapted model's PEFT's; of a plain module its weights."""
        check_dtype(dtype, "save_pretrained")
        self._on_ranks("save_pretrained", str(path), dtype)

    def _on_ranks(self, action: str, *arguments: object) -> None:
        team = self._built(action)
        self._take_turn(team)
        team.request_all(Request(self._id, action, arguments, of_first=True))

    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, whole, under their names in exports, in chunks: for an inference engine.

        The names and values are those of `postprocess_output_named_parameters` where the class has one; otherwise of a
        model of transformers those of its directory, an adapter merged.

        Args:
            dtype: of floating tensors; None: full precision.
        """
        check_dtype(dtype, "named_tensors")
        number = next(self._exports)
        self._on_ranks("export", number, dtype)
        team = self._built("named_tensors")
        try:
            while found := self._export_next(team, number):
                yield from found
        finally:
            if not team.dead and self._team is team:
                team.request_all(Request(self._id, "stop_export", (number,), of_first=True))

    def _export_next(self, team: Team, number: int) -> list[tuple[str, torch.Tensor]]:
        self._built("named_tensors")
        self._take_turn(team)
        return team.request_all(Request(self._id, "export_next", (number,), of_first=True))[0]

    def push_weights(self, other: TrainEngine, dtype: torch.dtype | None = None) -> None:
        """Give another engine these weights, in its layout and dtype; its optimizers stay as they are.

        An adapter is merged, unless the other module has the same one. On the same ranks both engines are in memory
        meanwhile, and whole tensors exist one at a time, or not at all if the layouts are the same; to other ranks they
        go through this process in chunks of 32 MB.

        Args:
            other: built, of the same model; a class of its own may rename tensors (`preprocess_input_named_parameters`,
                under the names of `named_tensors`).
            dtype: to which floating tensors are rounded on the way; None: full precision.

        Raises:
            ModelError: the weights do not fit the other module.
        """
        check_dtype(dtype, "push_weights")
        if not isinstance(other, TrainEngine):
            raise no_engine(other, "push_weights(…)")
        if other is self:
            raise ParallelError(
                f"the engine of {self._kind.__name__} is given its own weights, which it has",
                where="push_weights(…)",
                remedy="give another engine of the same model, or leave the call out",
            )
        number = next(self._exports)
        team, others = self._built("push_weights"), other._built("push_weights(…)")
        self._take_turn(team)
        if team is others:
            team.awake.add(other._id)
            team.request_all(Request(self._id, "push_here", (number, other._id, dtype), of_first=True))
            self._take_turn(team)
            return
        other._take_turn(others)
        mine, theirs = (
            each.request_all(Request(name, "push_facts", of_first=True))[0]
            for each, name in ((team, self._id), (others, other._id))
        )
        names = names_between(mine, theirs)
        forms = team.request_all(Request(self._id, "push", (number, names, dtype), of_first=True))[0]
        complete = False
        try:
            others.request_all(Request(other._id, "receive", (names, forms), of_first=True))
            while found := self._export_next(team, number):
                others.request_all(Request(other._id, "take", (found,), of_first=True))
            complete = True
        finally:
            if not team.dead:
                team.request_all(Request(self._id, "stop_export", (number,), of_first=True))
            if not others.dead:
                others.request_all(Request(other._id, "end_receive", (complete,), of_first=True))

    # Its end.

    def close(self) -> None:
        """Release the module, and end the ranks that no other engine uses."""
        team, self._team = self._team, None
        if team is None:
            return
        if self._release is not None:
            self._release.detach()
        if not team.dead:
            team.request_all(Request(self._id, "end"))
        team.engines.pop(self._id, None)
        team.awake.discard(self._id)
        if not team.engines and not _is_here(team):
            team.close()

    def __enter__(self) -> TrainEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_here(team: Team) -> bool:
    """Whether the module would be the caller's own object."""
    return isinstance(team, InProcess | SpmdRanks)


def _own_names() -> frozenset[str]:
    return frozenset(name for name in {*vars(TrainEngine), "notes"} if not name.startswith("_"))
