"""The ranks of a run: this process's place and device, and the few collectives that metrics need."""

from __future__ import annotations

import datetime
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtune.batch import Metric
from shardtune.config import ActorConfig, RunnerConfig
from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError
from shardtune.parallel.gloo_threads import batch_threads
from shardtune.parallel.rendezvous import meet
from shardtune.parallel.shutdown import leave_at_exit

T = TypeVar("T")
COLLECTIVE_SECONDS = 1800
ONE_RANK = Layout()
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of the run, from this rank's perspective.

    Attributes:
        rank: of this process, 0 to world_size - 1.
        world_size: processes of the run.
        device: of this rank.
        mesh: ("replicate", "shard", "tensor") over all ranks, those that share a sequence among "shard"; None for a
            single process, which needs no process group.
        layout: the sizes of the axes.
        sequence_mesh: the ranks that share this one's sequences; None if there are none.
        expert_mesh: ("expert_shard", "expert") over all ranks, where experts are spread.
        counts: whether sums over rows count this rank's: of those that work on the same rows together the first does.
        host: where ranks exchange numbers of Python: on the CPU, so that nothing waits for a GPU, if the process group
            can.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    layout: Layout = ONE_RANK
    sequence_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    counts: bool = True
    host: torch.device = CPU

    @property
    def data_rank(self) -> int:
        """The index of this rank's rows, 0 to `num_data_ranks` - 1; ranks that share a model share it."""
        return self.rank // self.layout.model_ranks

    @property
    def num_data_ranks(self) -> int:
        return self.layout.num_data_ranks

    @property
    def sequence_rank(self) -> int:
        return self.rank // self.layout.tensor % self.layout.sequence

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.layout.tensor

    @property
    def draws_rank(self) -> int:
        """Equal for ranks whose random draws have to agree, which are those that compute the same activations."""
        return self.rank // self.layout.tensor

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh that weights are sharded over; with two dimensions they are replicated over the first."""
        if self.mesh is None:
            return None
        return self.mesh["replicate", "shard"] if self.layout.replicate > 1 else self.mesh["shard"]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that share this one's matrix multiplications."""
        assert self.mesh is not None
        return self.mesh["tensor"]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float | torch.Tensor], parts: Sequence[float | torch.Tensor] = ()) -> list[float]:
        """The sums over ranks, in fp64; every rank passes as many; ranks without `counts` add nothing.

        Args:
            values: numbers, or scalar tensors, which are all read at once: a GPU is waited for once.
            parts: further ones, of which every rank adds its own.
        """
        given = [value for value in (*values, *parts) if isinstance(value, torch.Tensor)]
        if not given and self.mesh is None:
            return [float(value) for value in (*values, *parts)]
        if given:
            # `torch.tensor` with numbers would wait for the GPU, `torch.full` does not. What a GPU has stays there till
            # all are read: a copy to the CPU that is not waited for would be read before it is done.
            device = next((each.device for each in given if each.device.type != "cpu"), given[0].device)
            scalars = [
                value.detach()
                if isinstance(value, torch.Tensor)
                else torch.full((), value, dtype=torch.float64, device=device)
                for value in (*values, *parts)
            ]
            tensor = torch.stack([scalar.to(device, torch.float64, non_blocking=True) for scalar in scalars])
        else:
            tensor = torch.tensor([*values, *parts], dtype=torch.float64, device=self.host)
        if not self.counts:
            tensor[: len(values)] = 0.0
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def largest(self, value: float) -> float:
        """The largest of one value over ranks."""
        if self.mesh is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.host)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def largest_of(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of some values over ranks; every rank passes the same number."""
        if self.mesh is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank (pickled: for small things, seldom)."""
        if self.mesh is None:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's values into a tensor, in place, bit by bit."""
        if self.mesh is None or not tensor.numel():
            return
        if tensor.layout != torch.strided:  # a sparse buffer, whose entries may differ in number
            with torch.no_grad():  # what detach() returns would take the entries alone
                tensor.copy_(self.broadcast(tensor.detach().cpu()))
            return
        dense = tensor.detach().contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    def new_group(self, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup | None:
        """A separate process group of all ranks, for work in parallel to training; every rank calls it."""
        if self.mesh is None:
            return None
        with batch_threads():
            group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def barrier(self) -> None:
        if self.mesh is not None:
            dist.barrier()

    def reduce_metrics(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Sum (total, weight) pairs over the union of all ranks' names, which are in one order on any ranks."""
        if self.mesh is None:
            return {name: metrics[name] for name in sorted(metrics, key=_by_number)}
        names = sorted(set().union(*self.gather(list(metrics))), key=_by_number)
        zero = Metric(0.0, 0.0)
        pairs = [metrics.get(name, zero) for name in names]
        flat = self.sum([number for pair in pairs for number in (pair.total, pair.weight)])
        return {name: Metric(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(names)}


def _by_number(name: str) -> list[tuple[str, int]]:
    """A key for sorting in which `action_l1/2` comes before `action_l1/10`."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of `runner.device` (auto, cpu or cuda) for a rank."""
    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ParallelError(
            "runner.device is cuda, but torch sees no CUDA device",
            where="runner.device = cuda",
            remedy="set runner.device: auto, or install a driver and a torch with CUDA (shardtune env shows both)",
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ParallelError(
            f"rank {local_rank} of this machine has no GPU: {local_rank + 1} ranks, and torch sees {count}",
            where="runner.nproc_per_node",
            remedy=f"start at most {count} ranks on this machine (runner.nproc_per_node={count})",
        )
    return torch.device("cuda", local_rank)


def num_ranks(runner: RunnerConfig) -> int:
    """The number of ranks of this run: those started by a launcher, otherwise those to be started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    return started if started > 1 else runner.workers


def check_launcher() -> None:
    """Refuse a part of the variables by which a launcher starts ranks, as another program may have left one in a shell.

    Raises:
        ParallelError: WORLD_SIZE is for several ranks, and the others are missing or do not fit.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1" or dist.is_initialized():  # by the caller, who is responsible for its ranks
        return
    rank, port = os.environ.get("RANK", ""), os.environ.get("MASTER_PORT", "")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if not size.isdecimal() or size == "0":
        wrong = "which is no number of ranks"
    elif missing:
        wrong = f"so a launcher would have started this process, but {', '.join(missing)} "
        wrong += "is not set" if len(missing) == 1 else "are not set"
    elif not rank.isdecimal() or int(rank) >= int(size):
        wrong = f"and RANK is {rank!r}, which is none of these ranks"
    elif not port.isdecimal():
        wrong = f"and MASTER_PORT is {port!r}, which is no port"
    else:
        return
    raise ParallelError(
        f"WORLD_SIZE is {size!r}, {wrong}",
        where="the variables of the environment",
        remedy="unset WORLD_SIZE RANK if they are another program's; torchrun --nproc-per-node=N starts ranks with all "
        "of them",
    )


def join_ranks(device: str, actor: ActorConfig, timeout: float = COLLECTIVE_SECONDS) -> Ranks:
    """Join as the rank of RANK, WORLD_SIZE and LOCAL_RANK (set by torchrun); without them a single process.

    Args:
        device: `runner.device`.
        actor: the section of the recipe with the layout of ranks.
        timeout: seconds that a rank waits in a collective (`runner.collective_timeout`).

    Raises:
        ParallelError: this number of ranks does not fit the layout, or this rank has no device.
    """
    check_launcher()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # One process may evaluate a model that many have trained.
    layout = Layout.of(actor, world_size) if world_size > 1 else Layout()
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1:
        return Ranks(0, 1, chosen)
    open_group(chosen, timeout)
    return lay_out(layout, rank, chosen)


_stores: dict[tuple[str, int], tuple[dist.Store, Iterator[int]]] = {}


def open_group(device: torch.device, timeout: float = COLLECTIVE_SECONDS) -> None:
    """Initialise the process group from torchrun's variables, if that is not done yet.

    A process may do so several times, one run after another: the keys of each group are its own, because ranks would
    take the addresses of an earlier group for those of this one and wait for ever.

    Args:
        device: of this rank.
        timeout: seconds that a rank waits in a collective.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=timeout)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address not in _stores:  # kept, because rank 0 may serve it
        _stores[address] = meet(*address, rank, world_size, limit), count(1)
    store, numbers = _stores[address]
    own = dist.PrefixStore(f"shardtune/group/{next(numbers)}", store)
    with batch_threads():
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=limit)
    leave_at_exit()


def lay_out(layout: Layout, rank: int, device: torch.device) -> Ranks:
    """The ranks of an open process group in a layout; every rank calls it.

    Worked example of 8 ranks, shard 2 x sequence 2 x tensor 2: the mesh of 1 x 4 x 2 is [[[0 1] [2 3] [4 5] [6 7]]],
    whose "shard" axis is shard and sequence together. The second mesh views the same order as [[[0 1] [2 3]] [[4 5]
    [6 7]]], so that its "sequence" groups are 0 2, 1 3, 4 6 and 5 7. Sums over rows count ranks 0 and 4 alone, the
    first of those that work on the same rows.
    """
    sizes = (layout.replicate, layout.shard * layout.sequence, layout.tensor)
    mesh = _mesh(device, sizes, ("replicate", "shard", "tensor"))
    sequence = experts = None
    if layout.sequence > 1:
        size = (layout.num_data_ranks, layout.sequence, layout.tensor)
        sequence = _mesh(device, size, ("data", "sequence", "tensor"))["sequence"]
    if layout.expert > 1:
        # Copies of the model are one more way to shard experts: FSDP2 sums their gradients over all that have them.
        experts = _mesh(device, (layout.num_ranks // layout.expert, layout.expert), ("expert_shard", "expert"))
    counts = rank % layout.model_ranks == 0
    host = CPU if "cpu:" in dist.get_backend_config() else device  # a user's own group may be NCCL's alone
    return Ranks(rank, layout.num_ranks, device, mesh, layout, sequence, experts, counts, host)


_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
_meshes_of: weakref.ref[dist.ProcessGroup] | None = None


def _mesh(device: torch.device, sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh of the open process group, the same one for all runs and engines in it.

    The groups of a mesh's axes end with the process group, so that each further mesh would keep connections and
    threads for as long as that.
    """
    global _meshes_of
    if _meshes_of is None or _meshes_of() is not dist.group.WORLD:
        _meshes.clear()
        _meshes_of = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None
    key = device.type, sizes, axes
    if key not in _meshes:
        with batch_threads():
            _meshes[key] = init_device_mesh(device.type, sizes, mesh_dim_names=axes)
    return _meshes[key]


def leave_ranks(ranks: Ranks) -> None:
    """Leave the process group together: no rank closes its connections while another still uses them."""
    if ranks.mesh is not None and dist.is_initialized():
        with suppress(RuntimeError):  # a rank that died has been reported already
            dist.barrier()
        close_group()


def close_group() -> None:
    """Destroy the process group; its meshes would keep its connections."""
    _meshes.clear()
    dist.destroy_process_group()
