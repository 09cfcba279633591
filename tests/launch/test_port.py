"""The port of the rendezvous: a free one, whose socket rank 0 gets from the launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from shardtune.config.rank_environment import LISTENING
from shardtune.errors import ParallelError
from shardtune.launch.port import free_port, listening_at
from shardtune.parallel.rendezvous import passed_on

MEETS = """
from datetime import timedelta
from shardtune.parallel.rendezvous import meet
store = meet("127.0.0.1", {port}, 0, 1, timedelta(seconds=30))
store.set("met", "yes")
print(store.get("met").decode())
"""


def test_a_port_in_use_is_an_error_with_the_way_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ParallelError, match=rf"port {port} cannot be used(?s:.*)a free one is chosen"):
            free_port(port)
    assert free_port(None) > 0


def test_rank_0_has_the_launchers_socket() -> None:
    """No other process can take the port meanwhile; without the socket rank 0 itself could not listen there either."""
    with listening_at(None) as place:
        number, port = place.fileno(), place.getsockname()[1]
        with pytest.raises(ParallelError, match="cannot be used"):
            free_port(port)
        answers = []
        for given in (str(number), ""):
            ended = subprocess.run(
                [sys.executable, "-c", MEETS.format(port=port)],
                env={**os.environ, LISTENING: given},
                pass_fds=(number,),
                capture_output=True,
                text=True,
                timeout=120,
            )
            answers.append((ended.returncode, ended.stdout))
    assert answers[0] == (0, "yes\n")
    assert answers[1][0] == 1


def test_a_file_that_is_not_that_socket_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place, (read, write) = listening_at(None), os.pipe()
    port, unix = place.getsockname()[1], socket.socketpair()[0]
    for number in ("", "x", "99999", str(read), str(unix.fileno()), str(place.fileno())):
        monkeypatch.setenv(LISTENING, number)
        assert passed_on(port if number != str(place.fileno()) else port + 1) is None
        assert LISTENING not in os.environ
    monkeypatch.setenv(LISTENING, str(place.fileno()))
    assert passed_on(port) == place.fileno()
    os.close(read)
    os.close(write)
    place.close()
    unix.close()
