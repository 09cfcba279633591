"""The rendezvous of ranks; those of one machine meet on its loopback interface, which no other host reaches."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

LOOPBACK = ("127.0.0.1", "localhost")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_served: dict[int, dist.Store] = {}


def meet(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store in which ranks meet; rank 0 serves it and waits for the others, unless torchrun serves one.

    Ranks of one machine, whose address is loopback, serve it and connect to each other there alone. torch's own
    rendezvous serves it on all interfaces, where any host could write a key, and gloo takes the host's own address.
    """
    if address in LOOPBACK:
        _keep_gloo_on_loopback()
        if rank == 0 and os.environ.get(_AGENT_STORE) != "True":
            store = _serve(port, world_size, timeout)
            if store is not None:
                return store
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(iter(dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout)))
    return store


def _serve(port: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """The store that this process serves on loopback; None where the port is taken, perhaps by a store of its own."""
    if port not in _served:  # kept for several groups of this process, one after another
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK[0], port))
            listening.listen(1024)
        except OSError:
            listening.close()
            return None
        _served[port] = dist.TCPStore(
            LOOPBACK[0],
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )
    return _served[port]


def _keep_gloo_on_loopback() -> None:
    if GLOO_INTERFACE not in os.environ:
        held = psutil.net_if_addrs().items()
        found = [name for name, entries in held if any(entry.address == LOOPBACK[0] for entry in entries)]
        if found:
            os.environ[GLOO_INTERFACE] = found[0]
