"""The rendezvous of ranks; those of one machine meet on its loopback interface, which no other host reaches."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from shardtune.config.rank_environment import LISTENING

LOOPBACK = ("127.0.0.1", "localhost")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_served: dict[tuple[str, int], dist.Store] = {}
"""The stores that this process serves, kept until it ends: a server ends with the last reference to its store."""


def served_by_agent() -> bool:
    """Whether torchrun's agent serves the rendezvous store; otherwise rank 0 does."""
    return os.environ.get(AGENT_STORE) == "True"


def meet(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store in which ranks meet; rank 0 serves it until it ends, unless torchrun's agent serves one.

    Ranks of one machine, whose address is loopback, serve it and connect to each other there alone. torch's own
    rendezvous serves it on all interfaces, where any host could write a key, and gloo takes the host's own address.
    """
    if address in LOOPBACK:
        _keep_gloo_on_loopback()
    if served_by_agent():
        return _of_this_start(_connect(address, port, rank, world_size, timeout))
    if rank:
        return _connect(address, port, rank, world_size, timeout)
    if (address, port) not in _served:  # several groups of this process use it, one after another
        store = _serve(port, world_size, timeout) if address in LOOPBACK else None
        _served[address, port] = store or _connect(address, port, rank, world_size, timeout)
    return _served[address, port]


def _connect(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """torch's own rendezvous, in which rank 0 serves the store on all interfaces."""
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(iter(dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout)))
    return store


def _of_this_start(store: dist.Store) -> dist.Store:
    """The agent's store, with keys of this start: it is the same one for all starts of the ranks of one host.

    Ranks would take an address that one of the start before has left there for that of one which is still to come.
    """
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return dist.PrefixStore(f"shardtune/start/{start}", store) if start else store


def _serve(port: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """A store on loopback; None where the port is taken, perhaps by a store of this process."""
    listening = passed_on(port)
    if listening is None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((LOOPBACK[0], port))
            own.listen(1024)
        except OSError:
            own.close()
            return None
        listening = own.detach()
    return dist.TCPStore(
        LOOPBACK[0],
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listening,
    )


def passed_on(port: int) -> int | None:
    """The file of the socket that the launcher has passed on; None without one for this port, or the second time."""
    number = os.environ.pop(LISTENING, "")
    try:
        copy = os.dup(int(number))
    except (ValueError, OSError):
        return None
    try:
        with socket.socket(fileno=copy) as found:
            name = found.getsockname()
    except OSError:  # another file
        os.close(copy)
        return None
    if not isinstance(name, tuple) or name[1] != port:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def _keep_gloo_on_loopback() -> None:
    if GLOO_INTERFACE not in os.environ:
        held = psutil.net_if_addrs().items()
        found = [name for name, entries in held if any(entry.address == LOOPBACK[0] for entry in entries)]
        if found:
            os.environ[GLOO_INTERFACE] = found[0]
