"""Pre-flight check of a multi-rank run: ranks compare environments, and differences are reported by rank and host.

It uses the rendezvous store (MASTER_ADDR, MASTER_PORT), before any process group exists and before any data is read:
rank 0 publishes its inventory, every rank compares it with its own and publishes a verdict, rank 0 collects the
verdicts, and all ranks either end with the same message or continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from shardtune.config import Recipe, flatten
from shardtune.config.environment import digests
from shardtune.config.paths import data_paths, named_files
from shardtune.data.sources.fingerprint import contents
from shardtune.errors import ParallelError, ShardtuneError
from shardtune.launch.heartbeat import PeerWatch
from shardtune.parallel.rendezvous import GLOO_INTERFACE, meet, served_by_agent
from shardtune.run.directory import run_directory
from shardtune.training.worker.base import FSDPSftWorker

MEET_SECONDS = 300.0
"""How long the first rank to arrive waits for the last one."""
SLICE_SECONDS = 2.0
"""How long a signal may have to wait meanwhile."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes torchrun create a new rendezvous store at each start."""
SEEN_SECONDS = 15.0
"""How long a new file may take to appear on the other hosts: network file systems cache missing entries."""
COLLECTIVE_SECONDS = 120.0
"""How long the first reduction over all ranks may take."""
LEAST_FREE_BYTES = 64 * 2**20
MAY_DIFFER = ("runner.nproc_per_node", "runner.num_ranks", "runner.launcher", "runner.master_port", "runner.ray",
              "data.num_workers", "data.cache_dir")  # fmt: skip
"""Keys that may differ between hosts."""
PACKAGES = ("shardtune", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "peft")

_meetings = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """A rank's environment, recipe and files, for comparison with the other ranks'.

    Attributes:
        host: the host's name.
        node: distinguishes hosts of the same name.
        versions: of Python and the packages that numerics depend on, and of the package's sources.
        recipe: the keys that must be the same on all ranks, flattened, as JSON.
        files: the files that the recipe names: path -> (key, fingerprint of the content).
        mark: a file created next to the future run directory.
        error: why the recipe could not be read.
    """

    host: str
    node: str
    versions: dict[str, str]
    recipe: dict[str, str]
    files: dict[str, tuple[str, str]]
    mark: str | None
    error: str | None


def is_one_of_several() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def read_together(read: Callable[[], Recipe]) -> tuple[Recipe, PeerWatch | None]:
    """Read the recipe on every rank and compare the ranks' inventories; every rank calls it.

    Args:
        read: reads and validates the recipe.

    Returns:
        The recipe, and the watch over the other hosts, if there are any.

    Raises:
        ParallelError: ranks differ; raised on all ranks, and names rank and host.
        ShardtuneError: the recipe cannot be used.
    """
    recipe, problem = None, None
    try:
        recipe = read()
    except ShardtuneError as error:
        problem = error
    if "MASTER_ADDR" not in os.environ:  # the caller set up the process group, and is responsible for its ranks
        if problem is not None:
            raise problem
        assert recipe is not None
        return recipe, None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with _marked(recipe if rank == 0 else None) as mark:
        mine = take_inventory(recipe, mark, str(problem) if problem else None)
        nodes = _meet(mine, rank, world_size, recipe)
    if problem is not None:
        raise problem
    assert recipe is not None
    limit, run_dir, rank_0_serves = recipe.runner.lost_after, run_directory(recipe), not served_by_agent()
    return recipe, PeerWatch.over(nodes, rank, limit, run_dir, rank_0_serves=rank_0_serves)


def take_inventory(recipe: Recipe | None, mark: str | None = None, error: str | None = None) -> Inventory:
    """The inventory of this rank."""
    shared_keys: dict[str, str] = {}
    if recipe is not None:
        tree, secret = recipe.to_dict(), recipe.references
        shared_keys = {key: json.dumps(value) for key, value in flatten(recipe.to_stored()).items()}
        shared_keys |= {f"{key} (hashed)": value for key, value in digests(tree, secret, salt="0" * 16).items()}
        shared_keys = {key: value for key, value in shared_keys.items() if not _may_differ(key.partition(" ")[0])}
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    return Inventory(socket.gethostname(), node, _versions(), shared_keys, _files(recipe), mark, error)


def _may_differ(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_DIFFER)


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "shardtune's sources": _hash_of_sources()}


def _hash_of_sources() -> str:
    """A hash of the package's sources: two checkouts may have the same version number."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _files(recipe: Recipe | None) -> dict[str, tuple[str, str]]:
    """The files that the recipe names, those in directories each, with fingerprints of their content."""
    if recipe is None:
        return {}
    tree = recipe.to_dict()
    named = [(path, key) for key, path in named_files(tree)]
    named += [
        (path, f"data.{key}")
        for key in ("train_data_paths", "eval_data_paths")
        for path in data_paths(tree["data"][key])
    ]
    return {
        os.path.join(path, name) if name else path: (key, content)
        for path, key in named
        if os.path.isabs(path)
        for name, content in contents(Path(path)).items()
    }


def check_same_rows(worker: FSDPSftWorker) -> None:
    """Refuse to train or evaluate on rows that differ between ranks; all ranks call it.

    Files were compared by samples; this compares what was read from them.

    Raises:
        ParallelError: on all ranks alike; names rank and host.
    """
    ranks = worker.ranks
    if ranks.world_size == 1:
        return
    found = ranks.gather(worker.task.row_fingerprints())
    if any(other != found[0] for other in found):  # time stamps of videos may differ where rows do not
        found = ranks.gather(worker.task.row_fingerprints(row_by_row=True))
    hosts = ranks.gather(socket.gethostname())
    problems = [
        f"{name}: {mine.get(name, 'missing')} for rank {rank} on {hosts[rank]}, {found[0].get(name, 'missing')} for "
        f"rank 0 on {hosts[0]}"
        for rank, mine in enumerate(found)
        for name in sorted(found[0].keys() | mine.keys())
        if found[0].get(name) != mine.get(name)
    ]
    if problems:
        raise ParallelError(
            "the ranks cannot train together, as their rows differ:\n    " + "\n    ".join(_shortened(problems)),
            where="data.train_data_paths, data.eval_data_paths",
            remedy="give all hosts the same data files, in the same order, and the same tokenizer and chat template",
        )


def _shortened(problems: list[str]) -> list[str]:
    return problems[:8] + ([f"… and {len(problems) - 8} more"] if len(problems) > 8 else [])


@contextmanager
def _marked(recipe: Recipe | None) -> Iterator[str | None]:
    """A temporary file next to the future run directory, which the other hosts must be able to see."""
    if recipe is None:
        yield None
        return
    folder = run_directory(recipe)
    while not folder.is_dir():
        folder = folder.parent
    mark = folder / f".shardtune-{uuid.uuid4().hex[:12]}"
    try:
        mark.touch()
    except OSError:  # `check_writable` of the run directory reports it
        yield None
        return
    try:
        yield str(mark)
    finally:
        mark.unlink(missing_ok=True)


def _meet(mine: Inventory, rank: int, world_size: int, recipe: Recipe | None) -> dict[str, list[int]]:
    """Compare inventories with the other ranks; returns the ranks of each host, in the order of ranks."""
    global _meetings
    _meetings += 1
    _check_store()
    until = time.monotonic() + MEET_SECONDS
    store = dist.PrefixStore(f"shardtune/preflight/{_meetings}", _store(rank, world_size))
    if rank == 0:
        store.set("first", json.dumps(asdict(mine)))
    first = _received(store, "first", until, "rank 0 did not join")
    problems = [] if rank == 0 else compare(Inventory(**json.loads(first)), mine, rank)
    full = {} if recipe is None else short_of_space(recipe)
    store.set(f"verdict/{rank}", json.dumps([mine.node, mine.host, problems, full]))
    if rank == 0:
        names = [f"verdict/{other}" for other in range(world_size)]
        late = "rank {} did not join"
        verdicts = [json.loads(_received(store, name, until, late.format(n))) for n, name in enumerate(names)]
        store.set("outcome", json.dumps(verdicts))
    verdicts = json.loads(_received(store, "outcome", until + SEEN_SECONDS, "rank 0 collected no verdicts"))
    _read_by_all(store, rank, world_size)
    _raise_differences([problem for _, _, found, _ in verdicts for problem in found], mine, rank)
    if mine.error is None:
        refuse_full({f"on {host}, ": full for _, host, _, full in verdicts})
    nodes: dict[str, list[int]] = {}
    for other, (node, _, _, _) in enumerate(verdicts):
        nodes.setdefault(node, []).append(other)
    if len(nodes) > 1:
        _choose_interface()
    return nodes


def _check_store() -> None:
    """Refuse a store that ranks of an earlier start have written to: torchrun's agents reuse theirs.

    Stale keys would be read as current ones, by torch too, which would connect to the addresses of ended processes.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if again and hosts > 1 and served_by_agent():
        raise ParallelError(
            f"torchrun has started the ranks of {hosts} hosts again, in a store with the previous start's keys",
            where="torchrun --max-restarts",
            remedy=f"set {OWN_STORE}=1 for torchrun on every host (shardtune launch --print does), then run the same "
            "command again: it continues",
        )


def _store(rank: int, world_size: int) -> dist.Store:
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", ""))
        return meet(address, port, rank, world_size, timedelta(seconds=MEET_SECONDS))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().splitlines()[0]
        if "joined" in reason:
            raise _late(f"not all {world_size} ranks joined: {reason}") from error
        raise ParallelError(
            f"rank {rank} on {socket.gethostname()} cannot reach {address}, the rendezvous address: {reason}",
            where=f"MASTER_ADDR = {os.environ['MASTER_ADDR']}",
            remedy="check that the address is one by which the other hosts reach rank 0's, and that the port is open",
        ) from error


def _received(store: dist.Store, key: str, until: float, late: str) -> str:
    """The value of a key. Waits in slices: Python handles a signal, and stops, between two of them."""
    while True:
        began = time.monotonic()
        seconds = min(SLICE_SECONDS, max(1.0, until - began))
        try:
            store.wait([key], timedelta(seconds=seconds))
            return store.get(key).decode()
        except RuntimeError as error:  # DistStoreError among them
            now = time.monotonic()
            if now >= until or now - began < seconds / 2:  # too late, or the store is gone
                raise _late(late) from error


def _late(what: str) -> ParallelError:
    return ParallelError(
        f"{what} (waited for {MEET_SECONDS:.0f} s on {socket.gethostname()})",
        where=f"MASTER_ADDR = {os.environ['MASTER_ADDR']}",
        remedy="start all ranks at about the same time, and look at the messages of those on the other hosts",
    )


def _read_by_all(store: dist.Store, rank: int, world_size: int) -> None:
    """Wait until all ranks have read the outcome: rank 0 may host the store, so it must end last."""
    store.add("read", 1)
    until = time.monotonic() + 10.0
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < until:
        time.sleep(0.01)


def compare(first: Inventory, mine: Inventory, rank: int) -> list[str]:
    """The differences between a rank's inventory and rank 0's, as sentences that name rank and host."""
    here, there = f"rank {rank} on {mine.host}", f"rank 0 on {first.host}"
    if mine.error is not None or first.error is not None:
        if mine.error == first.error:
            return []
        bad, what = (here, mine.error) if mine.error is not None else (there, first.error)
        return [f"{bad} cannot use the recipe: {what}"]
    found = [
        f"{name} is {mine.versions.get(name, 'missing')} for {here}, {first.versions.get(name, 'missing')} for {there}"
        for name in sorted(first.versions.keys() | mine.versions.keys())
        if first.versions.get(name) != mine.versions.get(name)
    ]
    found += [
        f"{key} is {mine.recipe.get(key)} for {here}, {first.recipe.get(key)} for {there}"
        for key in sorted(first.recipe.keys() | mine.recipe.keys())
        if first.recipe.get(key) != mine.recipe.get(key)
    ]
    found += [
        f"{path} ({key}) is {mine.files[path][1]} for {here}, {content} for {there}"
        for path, (key, content) in first.files.items()
        if path in mine.files and mine.files[path][1] != content
    ]
    if first.mark is not None and not _seen(Path(first.mark)):
        found.append(
            f"{here} does not see the run directory of {there}: a file made in {Path(first.mark).parent} does not "
            f"appear (waited for {SEEN_SECONDS:.0f} s); runner.logger.log_path has to be on a file system that all "
            "hosts share"
        )
    return found


def _seen(file: Path) -> bool:
    until = time.monotonic() + SEEN_SECONDS
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
        with suppress(OSError):
            os.listdir(file.parent)  # makes a network file system refresh its cache
    return True


def short_of_space(recipe: Recipe) -> dict[str, str]:
    """File systems that this host writes to and that are full, by the key that names them; room for a checkpoint is
    checked later."""
    places = {"runner.logger.log_path": run_directory(recipe), "data.cache_dir": recipe.data.cache_dir}
    found = {}
    for key, place in places.items():
        if place is None:
            continue
        folder = Path(place).absolute()
        while not folder.is_dir():
            folder = folder.parent
        if not os.access(folder, os.W_OK):  # a cache that is only read: a read-only file system never has room
            continue
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            found[key] = f"{folder} has {free / 2**20:.0f} MiB left"
    return found


def refuse_full(hosts: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse full file systems.

    Args:
        hosts: what `short_of_space` has found, by words for the host.

    Raises:
        ParallelError: one is full; names host, folder and key.
    """
    found = {f"{host}{text} ({key})": key for host, full in hosts.items() for key, text in full.items()}
    if found:
        keys = " and ".join(sorted(set(found.values())))
        raise ParallelError(
            f"several ranks need {LEAST_FREE_BYTES // 2**20} MiB of room: " + "; ".join(_shortened(list(found))),
            where=keys,
            remedy=f"make room, or set {keys} to another disk",
        )


def _raise_differences(problems: list[str], mine: Inventory, rank: int) -> None:
    if not problems:
        return
    if mine.error is not None and rank == 0:
        return  # its own error is more specific
    raise ParallelError(
        "the ranks cannot train together:\n    " + "\n    ".join(_shortened(problems)),
        where=f"{os.environ['WORLD_SIZE']} ranks, rendezvous at {os.environ['MASTER_ADDR']}",
        remedy="give all hosts the same environment, recipe and files, and a run directory that they share",
    )


def _choose_interface() -> None:
    """Let gloo use the interface that reaches the other hosts; by default it resolves the host's name."""
    if GLOO_INTERFACE in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        address = probe.getsockname()[0]
        interfaces = psutil.net_if_addrs()
        found = [name for name, entries in interfaces.items() if any(entry.address == address for entry in entries)]
        if found and not address.startswith("127."):
            os.environ[GLOO_INTERFACE] = found[0]


@contextmanager
def connecting() -> Iterator[None]:
    """Turn gloo's error for unreachable hosts into a readable one, while ranks connect to each other."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise _unreachable(f"connecting the ranks failed: {str(error).strip().splitlines()[0][:300]}") from error


def _unreachable(what: str) -> ParallelError:
    return ParallelError(
        f"{what}, on rank {os.environ.get('RANK')} on {socket.gethostname()}",
        where=f"{GLOO_INTERFACE} = {os.environ.get(GLOO_INTERFACE, 'not set')}",
        remedy="hosts have to reach each other on all ports; name the network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )


def try_collective(device: torch.device) -> None:
    """Check one reduction over all ranks, with a known result and a time limit; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = world_size * (world_size + 1) / 2
    tensor, fault = torch.tensor([rank + 1.0], dtype=torch.float64, device=device), ""
    try:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=COLLECTIVE_SECONDS))
        if tensor.item() != expected:
            fault = f"gave {tensor.item():g} for {expected:g}"
    except RuntimeError as error:
        if re.search("(closed|reset) by peer", str(error), re.IGNORECASE):
            raise  # a rank has ended: its own error, or the launcher, names the cause
        fault = f"failed: {str(error).strip().splitlines()[0][:300]}"
    if fault:
        backend = dist.get_backend() if device.type == "cuda" else "gloo"
        raise _unreachable(f"the first reduction over {world_size} ranks ({backend}) {fault}")
