"""The kit's other processes: two ranks that train on the case's rows, and a fresh one that loads what was saved.

They are started early and import torch while other checks run. Each reads its work, a line of JSON, from its standard
input; if that is closed because this process is gone, they end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from shardtune.config import Recipe
from shardtune.launch.module_process import module_command
from shardtune.launch.port import free_port
from shardtune.verify.result import Failed

RANKS = 2
LONGEST = 120.0
"""The seconds that a process may take; ranks that wait for each other never end."""
POLL_SECONDS = 0.05
ERROR = "error.json"


class RanksResult(TypedDict):
    """What two ranks measured.

    Attributes:
        losses: of each step.
        norms: of each step's gradient.
        ties: the names of parameters that have several, before training.
        notes: of the worker.
    """

    losses: list[float]
    norms: list[float]
    ties: list[list[str]]
    notes: list[str]


class FreshResult(TypedDict):
    """What a fresh process found.

    Attributes:
        samples: a fingerprint of each encoded row.
        losses: by what was loaded (a checkpoint, an exported model): the terms of each row's loss, as `float.hex`.
    """

    samples: list[str]
    losses: dict[str, list[dict[str, str]]]


class Process:
    """One process of the kit.

    Args:
        folder: of its result and its output.
        environment: variables in addition to this process's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        paths = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), str(Path.cwd())]))
        work, send = os.pipe()
        self._work = os.fdopen(send, "w")
        with (folder / "output.txt").open("w") as output, os.fdopen(work) as stdin:
            self._process = subprocess.Popen(
                module_command("shardtune.verify.helper"),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **environment},
                text=True,
            )

    def send(self, work: Mapping[str, object]) -> None:
        """Send the process its work."""
        self._work.write(json.dumps({**work, "folder": str(self.folder)}) + "\n")
        self._work.flush()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> Failed | None:
        """Why it failed; None after success."""
        if self._process.poll() == 0:
            return None
        file = self.folder / ERROR
        if file.is_file():
            return Failed(**json.loads(file.read_text()))
        output = (self.folder / "output.txt").read_text().strip()
        return Failed(
            f"a process of the kit ended with exit code {self._process.poll()}: {output[-1500:] or 'no output'}",
            where=str(self.folder),
            remedy="check whether the machine is out of memory; the process's output is above",
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._work.close()


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
        """Start both early: importing torch takes seconds."""
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
        """The folder of the ranks' results, once both are done.

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

    def result(self) -> RanksResult:
        """What rank 0 measured; raises as `folder` does."""
        return json.loads((self.folder / "run.json").read_text())

    def _wait(self) -> Failed | None:
        """Wait until both are done; returns why they failed, if they did."""
        until = time.monotonic() + LONGEST
        while not all(process.ended() for process in self._processes):
            failures = [process.failure() for process in self._processes if process.ended()]
            if any(failures):
                until = min(until, time.monotonic() + 3.0)  # the other rank's error may be the cause
            if time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        ended = [process.failure() for process in self._processes if process.ended()]
        causes = [failure for failure in ended if failure is not None]
        if causes:
            causes.sort(key=lambda failure: failure.where == "another rank")
            return causes[0]
        if len(ended) < RANKS:
            return Failed(
                f"two ranks did not come to an end within {LONGEST:.0f} s: they wait for each other",
                where="loss, shard_units",
                remedy="let every rank call the same modules in every forward, whatever its rows; what is called only "
                "sometimes must be no unit (unit_classes, actor.fsdp_config.wrap)",
            )
        return None

    def give_up(self, failure: Failed) -> None:
        """Do not wait for the ranks: this failure is known to make them hang."""
        self._waited, self._failure = True, failure

    def close(self) -> None:
        for process in self._processes:
            process.close()


class FreshProcess:
    """A process that shares nothing with this one except files.

    Args:
        folder: of the case.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None

    def start(self) -> Process:
        """Start it early: importing torch takes seconds."""
        threads = {"OMP_NUM_THREADS": "1"}  # as here: sums over more of them may differ in the last digit
        alone = {name: "" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
        # Never this process's seed, so that code that depends on hash() is found every time.
        hashes = {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
        self._process = Process(self._folder / "fresh", threads | alone | hashes)
        return self._process

    def load(self, recipe: Recipe, checkpoint: Path, final: Path) -> FreshResult:
        """Encode the rows, and compute their losses with the weights of a checkpoint and of an exported model."""
        process = self._process or self.start()
        process.send({"work": "load", "recipe": recipe.to_dict(), "checkpoint": str(checkpoint), "final": str(final)})
        until = time.monotonic() + LONGEST
        while not process.ended() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        failure = process.failure()
        if failure is not None:
            raise failure
        return json.loads((self._folder / "fresh" / "found.json").read_text())

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
