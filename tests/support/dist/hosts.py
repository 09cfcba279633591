"""Hosts on one machine: network namespaces, each with a name of its own, joined by a switch.

They share the disk, as hosts with a network file system do, and nothing else: ports, addresses, names are their own.
A host can be cut off (its cable is pulled: no connection is closed, nothing arrives) or killed (all its processes).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NETWORK = "10.213.7."


def why_not() -> str | None:
    """Why this machine cannot make hosts; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    try:
        with hosts(2) as made:
            seen = made[0].start(["hostname"], stdout=subprocess.PIPE)
            told, _ = seen.communicate(timeout=10)
            return None if told.strip() == made[0].name else "no host names of their own"
    except (subprocess.SubprocessError, OSError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"network namespaces cannot be made: {said}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Host:
    """One host.

    Attributes:
        name: as it calls itself.
        address: by which the others reach it.
    """

    def __init__(self, switch: str, number: int, names: Path) -> None:
        self.name = f"host-{'abcd'[number]}"
        self.address = f"{NETWORK}{number + 1}"
        self._switch = switch
        self._namespace = f"{switch}-{number}"
        self._cable = f"cable{number}"
        self._names = names

    def build(self) -> None:
        inside, outside = self._namespace, self._switch
        _ip("netns", "add", inside)
        _ip("link", "add", "eth0", "netns", inside, "type", "veth", "peer", "name", self._cable, "netns", outside)
        _ip("-n", outside, "link", "set", self._cable, "master", "switch", "up")
        _ip("-n", inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", inside, "link", "set", "eth0", "up")
        _ip("-n", inside, "link", "set", "lo", "up")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own."""
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", become, self.name, str(self._names), *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *named],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
            text=True,
            start_new_session=True,
            **options,
        )

    def processes(self) -> list[int]:
        told = subprocess.run(["ip", "netns", "pids", self._namespace], capture_output=True, text=True, timeout=10)
        return [int(pid) for pid in told.stdout.split()]

    def listening(self) -> list[str]:
        """The addresses at which some process still listens."""
        command = ["ip", "netns", "exec", self._namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        rows = [line.split() for line in told.splitlines()]
        return [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]

    def cut_off(self) -> None:
        """Pull its cable."""
        _ip("-n", self._switch, "link", "set", self._cable, "down")

    def plug_in(self) -> None:
        _ip("-n", self._switch, "link", "set", self._cable, "up")

    def kill(self) -> None:
        """End all its processes at once."""
        until = time.monotonic() + 10
        while (alive := self.processes()) and time.monotonic() < until:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def lose_power(self) -> None:
        """Cut it off, and end all its processes: no connection is closed. `plug_in` makes it usable again."""
        self.cut_off()
        self.kill()

    def remove(self) -> None:
        self.kill()
        with suppress(subprocess.SubprocessError):
            _ip("netns", "del", self._namespace)


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Some hosts, for a while; at the end nothing of them is left."""
    switch = f"shardtune-{uuid.uuid4().hex[:6]}"
    folder = tempfile.TemporaryDirectory(prefix="hosts-")
    names = Path(folder.name, "hosts")  # in place of /etc/hosts, which the hosts alone see
    made = [Host(switch, place, names) for place in range(number)]
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in made:
            host.build()
        yield made
    finally:
        for host in made:
            host.remove()
        with suppress(subprocess.SubprocessError):
            _ip("netns", "del", switch)
        folder.cleanup()


def lines_of(process: subprocess.Popen[str], file: Path) -> str:
    """What a process that writes into a file has said, for messages of failed assertions."""
    state = "runs" if process.poll() is None else f"ended with {process.returncode}"
    return f"{file.name}: the process {state}\n{file.read_text()[-6000:]}"
