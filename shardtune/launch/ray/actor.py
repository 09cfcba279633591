"""The actor for one rank: it starts the rank's process on its host, forwards its output, and ends it.

A rank needs a separate process: signals reach its main thread, its exit code is its outcome, and nothing of a broken
process group survives until the next start. This file is sent to the cluster as it is, so that a host without
shardtune can report that: at import it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LINES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """The placement of a rank.

    Attributes:
        node: Ray's name of the host.
        host: its host name.
        address: the IP address by which the others reach it.
        gpus: those that Ray assigned to the rank, in the format of CUDA_VISIBLE_DEVICES.
        cores: of the host that it may use.
        port: a free one there; 0 if the preferred one is taken.
        shardtune: whether it is installed there.
    """

    node: str
    host: str
    address: str
    gpus: tuple[str, ...]
    cores: int
    port: int
    shardtune: bool


@dataclass(frozen=True, slots=True)
class Sign:
    """An update on a rank since the last poll.

    Attributes:
        lines: of its output: stdout or stderr, text.
        code: its exit code, once it has ended and all its lines were returned.
        report: the error that it wrote, as JSON (`RankReport`).
    """

    lines: list[tuple[str, str]]
    code: int | None
    report: str | None


class RankHolder:
    """Holds one rank.

    Args:
        patience: seconds without a call after which the launcher counts as gone, and the rank is killed.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lines: deque[tuple[str, str]] = deque()
        self._readers: list[threading.Thread] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def place(self, wanted_port: int | None) -> Place:
        import ray

        context = ray.get_runtime_context()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        is_installed = importlib.util.find_spec("shardtune") is not None
        gpus = tuple(name for name in visible.split(",") if name) if context.get_accelerator_ids().get("GPU") else ()
        return Place(
            context.get_node_id(),
            socket.gethostname(),
            own_address(),
            gpus,
            _cores() if is_installed else 1,
            free_port(wanted_port),
            is_installed,
        )

    def start(self, arguments: list[str], recipe: str, environment: dict[str, str], names: dict[str, str]) -> None:
        """Start the rank.

        Args:
            arguments: of `python -m shardtune`; RECIPE is replaced by the path of the recipe's file.
            recipe: its text.
            environment: additional variables, besides this actor's.
            names: of the variables for the directory of reports (`reports`), the launcher's process (`launcher`) and
                the network interface between hosts (`interface`, with several hosts).
        """
        self._heard = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="shardtune-rank-")
        file = Path(self._folder.name, "recipe.yaml")
        file.write_text(recipe)
        words = [str(file) if word == "RECIPE" else word for word in arguments]
        further = {names["reports"]: self._folder.name, names["launcher"]: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        if "interface" in names and names["interface"] not in {**os.environ, **environment}:
            further |= _interface(names["interface"])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardtune", *words],
            env={**os.environ, **environment, **further},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def sign(self) -> Sign:
        """The update since the last call."""
        self._heard = time.monotonic()
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(timeout=2)  # a child of the rank may hold the pipes open
        count = min(len(self._lines), LINES_AT_ONCE)
        lines = [self._lines.popleft() for _ in range(count)]
        report = self._report() if code is not None else None
        return Sign(lines, code if not self._lines else None, report)

    def stop(self) -> None:
        """Send the rank SIGTERM: it saves and ends."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> int | None:
        """Kill the rank if it is running; returns its process id."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            # Its children too: the loader's workers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        return process.pid

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append((name, line.rstrip("\n")))

    def _report(self) -> str | None:
        assert self._folder is not None
        files = list(Path(self._folder.name).glob("rank_*.json"))
        return files[0].read_text() if files else None

    def _watch(self) -> None:
        raylet = os.getppid()  # Ray's process on this host, without which the launcher cannot reach the actor
        while time.monotonic() - self._heard < self._patience and os.getppid() == raylet:
            time.sleep(0.25)
        self.end()
        os._exit(1)


def own_address() -> str:
    """The IP address by which the other hosts of the cluster reach this one."""
    import ray

    return ray.util.get_node_ip_address()


def free_port(preferred: int | None = None) -> int:
    """A port of this host that is free now, or the preferred one; 0 if that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", preferred or 0))
            return int(probe.getsockname()[1])
        except OSError:
            return 0


def _interface(variable: str) -> dict[str, str]:
    """The network interface that has the address by which the other hosts reach this one."""
    import psutil

    address = own_address()
    found = [name for name, held in psutil.net_if_addrs().items() if any(entry.address == address for entry in held)]
    return {variable: found[0]} if found else {}


def _cores() -> int:
    from shardtune.launch.cores import usable_cores

    return usable_cores()
