"""Processes beside this one: two ranks that train on the case's rows, and a fresh one that loads what was saved.

They are started before they are needed and import torch while other checks run. Their work comes as a line of JSON on
their standard input; without it, when this process is gone, they end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.config import Recipe
from shardtune.launch.local import free_port
from shardtune.verify.result import Failed

RANKS = 2
LONGEST = 120.0
"""Seconds that a process may take for its work; ranks that wait for each other never end."""
POLL_SECONDS = 0.05
ERROR = "error.json"


class Process:
    """One process of the kit.

    Args:
        folder: where it writes its answer and what it has to say.
        environment: in addition to this process's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        paths = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), str(Path.cwd())]))
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardtune.verify.helper"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **environment},
                text=True,
            )

    def send(self, work: Mapping[str, Any]) -> None:
        """Say what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**work, "folder": str(self.folder)}) + "\n")
        self._process.stdin.flush()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> Failed | None:
        """What it ended with; None where all went well."""
        if self._process.poll() == 0:
            return None
        file = self.folder / ERROR
        if file.is_file():
            return Failed(**json.loads(file.read_text()))
        said = (self.folder / "output.txt").read_text().strip()
        return Failed(
            f"a process of the kit ended with exit code {self._process.poll()}: {said[-1500:] or 'it said nothing'}",
            where=str(self.folder),
            remedy="see whether the machine is out of memory; what the process says is above",
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class RankPair:
    """Two gloo ranks on this machine, which train the case's model once.

    Args:
        recipe: of their run.
        folder: of the case.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe = recipe
        self._folder = folder
        self._processes: list[Process] = []
        self._waited = False
        self._failure: Failed | None = None

    def start(self) -> None:
        """Let them begin; to be called early, as they take seconds to import torch."""
        port = str(free_port(None))
        for rank in range(RANKS):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            process = Process(self._folder / f"rank{rank}", environment)
            self._processes.append(process)
            process.send({"work": "train", "recipe": self._recipe.to_dict(), "shared": str(self._folder / "ranks")})

    @property
    def folder(self) -> Path:
        """Where they have written what they measured, once both are done.

        Raises:
            Failed: one of them failed, or they wait for each other.
        """
        if not self._processes:
            self.start()
        if not self._waited:
            self._waited, self._failure = True, self._wait()
        if self._failure is not None:
            raise self._failure
        return self._folder / "ranks"

    def _wait(self) -> Failed | None:
        """Until both are done; what went wrong, if anything did."""
        until = time.monotonic() + LONGEST
        while not all(process.ended() for process in self._processes):
            failures = [process.failure() for process in self._processes if process.ended()]
            if any(failures):
                until = min(until, time.monotonic() + 3.0)  # the other one may tell more
            if time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        told = [process.failure() for process in self._processes if process.ended()]
        causes = [failure for failure in told if failure is not None]
        if causes:
            causes.sort(key=lambda failure: failure.where == "another rank")
            return causes[0]
        if len(told) < RANKS:
            return Failed(
                f"two ranks did not come to an end within {LONGEST:.0f} s: they wait for each other",
                where="loss, shard_units",
                remedy="let every rank call the same modules in every forward, whatever its rows; what is called only "
                "sometimes must be no unit (unit_classes, actor.fsdp_config.wrap)",
            )
        return None

    def give_up(self, failure: Failed) -> None:
        """Do not wait for them: this is known to keep them from coming to an end."""
        self._waited, self._failure = True, failure

    def close(self) -> None:
        for process in self._processes:
            process.close()


class FreshProcess:
    """A process that has seen nothing of this one but what is on the disk.

    Args:
        folder: of the case.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None

    def start(self) -> None:
        """Let it import what it needs."""
        threads = {"OMP_NUM_THREADS": "1"}  # as here: sums over more of them may differ in the last digit
        alone = {name: "" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
        # Another seed than Python would draw anyway, so that what depends on it is found every time.
        hashes = {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
        self._process = Process(self._folder / "fresh", threads | alone | hashes)

    def load(self, recipe: Recipe, checkpoint: Path, final: Path) -> dict[str, Any]:
        """What it finds: `losses`, the terms of each row's loss with the weights of a checkpoint, and of an exported
        model, as `float.hex`; `samples`, a fingerprint of each row encoded."""
        if self._process is None:
            self.start()
        assert self._process is not None
        self._process.send(
            {"work": "load", "recipe": recipe.to_dict(), "checkpoint": str(checkpoint), "final": str(final)}
        )
        until = time.monotonic() + LONGEST
        while not self._process.ended() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        failure = self._process.failure()
        if failure is not None:
            raise failure
        return json.loads((self._folder / "fresh" / "found.json").read_text())

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
