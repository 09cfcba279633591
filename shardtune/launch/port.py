"""The port at which ranks of this machine meet; its socket is passed on to rank 0, so that no other takes the port."""

from __future__ import annotations

import socket

from shardtune.errors import ParallelError

BACKLOG = 1024


def free_port(preferred: int | None) -> int:
    """A free port, or the preferred one; raises if that is taken."""
    with listening_at(preferred) as found:
        return int(found.getsockname()[1])


def listening_at(preferred: int | None) -> socket.socket:
    """A socket of this machine's own interface that listens at a free port, or at the preferred one.

    Raises:
        ParallelError: that is taken.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", preferred or 0))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ParallelError(
            f"port {preferred} cannot be used: {error.strerror}",
            where=f"runner.master_port = {preferred}",
            remedy="choose another, or leave runner.master_port out: a free one is chosen",
        ) from error
    return found
