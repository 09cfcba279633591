"""A disk that is full at each write of the real command, which is then continued with room to its end and compared.

    python bench/full_disk.py [--every N] [--save]

A small library between the command and libc (`tests/support/full_disk.c`, compiled here; Linux) lets every write below
a folder fail from the n-th one on: what makes a file, a folder, a link or a name, and what writes into a file. In that
folder lie the run, its cache of rows and, in some trials, the directory for temporary files. The command has to end
with one message and exit code 2, or go on without a file that is none of the results. The same command then goes on
with room: weights, optimizer, log and `final/` must be those of a run that was left alone, bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
SOURCE = ROOT / "tests" / "support" / "full_disk.c"
STEPS, SAVED_EVERY = 4, 2
LAST = f"checkpoints/global_step_{STEPS}"
LIMIT = 120.0
ERRORS = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO")
SHAPES: Mapping[str, Mapping[str, object]] = {
    "one rank": {"runner__async_save": False},
    "one rank, async_save": {"runner__async_save": True},
    "two ranks": {"runner__async_save": False, "runner__nproc_per_node": 2, "runner__logger__rank_logs": True},
}
"""Shapes of a run, and the keys of each."""
EVERY = {"one rank": 1, "one rank, async_save": 3, "two ranks": 5}
"""Of the writes of each, every so-many-th is tried."""


class Disk(ctypes.Structure):
    """As in `full_disk.c`."""

    _fields_ = [
        ("writes", ctypes.c_long),
        ("full_at", ctypes.c_long),
        ("error", ctypes.c_long),
        ("below", ctypes.c_char * 1000),
    ]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run on a disk that gets full.

    Attributes:
        shape: of `SHAPES`.
        number: of the first write that fails.
        error: its name in `errno`.
        everything: whether the directory for temporary files is on that disk as well.
    """

    shape: str
    number: int
    error: str
    everything: bool


class Bench:
    """The inputs, the run that is left alone, and the disk."""

    def __init__(self, folder: Path) -> None:
        from tests.support.tiny_run import make_tiny, rows, write_rows

        self.tiny = make_tiny(folder / "inputs", dropout=0.2)
        write_rows(self.tiny.folder / "train.jsonl", [*rows(21), {"prompt": "too long", "completion": "x" * 200}])
        self.place, self.log = folder / "disk", folder / "log"
        (folder / "state").write_bytes(bytes(ctypes.sizeof(Disk)))
        with (folder / "state").open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self.disk = Disk.from_buffer(self._shared)
        self.disk.below = f"{self.place.resolve()}/".encode()
        os.environ["FULL_DISK"] = str(folder / "state")
        self.writes, self.whole = {}, {}
        for shape in SHAPES:
            code, told = self.train(Trial(shape, 0, "ENOSPC", False))
            if code:
                raise SystemExit(f"the run that is left alone ends with {code}: {told}")
            self.writes[shape] = int(self.disk.writes)
            self.whole[shape] = (folder / f"whole {shape}").resolve()
            (self.place / "runs/run").rename(self.whole[shape])

    def train(self, trial: Trial, *, again: bool = False) -> tuple[int | None, str]:
        """Run the command; its exit code (None: it did not end) and what it printed."""
        if not again:
            shutil.rmtree(self.place, ignore_errors=True)
            (self.place / "tmp").mkdir(parents=True)
        recipe = self.tiny.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self._recipe(trial.shape)))
        self.disk.writes, self.disk.error = 0, getattr(errno, trial.error)
        self.disk.full_at = 0 if again else trial.number
        environment = {**os.environ, "TMPDIR": str(self.place / "tmp")} if trial.everything else dict(os.environ)
        with self.log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardtune", "train", str(recipe)],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        self.disk.full_at = 0
        return code, self.log.read_text(errors="replace")

    def _recipe(self, shape: str) -> dict[str, object]:
        keys: dict[str, object] = {
            "runner__save_interval": SAVED_EVERY,
            "runner__max_epochs": 1,
            "runner__keep_last": 1,
            "runner__eval_interval": SAVED_EVERY,
            "runner__best__monitor": "eval/loss",
            "runner__logger__log_path": str(self.place / "runs"),
            "runner__logger__logger_backends": ["jsonl", "tensorboard", "timings"],
            "data__eval_data_paths": str(self.tiny.folder / "eval.jsonl"),
            "data__cache_dir": str(self.place / "cache"),
            "eval__generate": True,
            "eval__num_samples": 3,
            "eval__max_new_tokens": 4,
            **SHAPES[shape],
        }
        return self.tiny.recipe("run", **keys)

    def outcome(self, trial: Trial) -> tuple[str, str]:
        """What the command did on the full disk, and what is wrong with that or with the run in the end."""
        code, told = self.train(trial)
        run = self.place / "runs/run"
        message = re.findall(r"^(?:rank \d+: )?error: (.*)", told, re.MULTILINE)
        short = re.sub(r"/\S+", "…", message[-1]) if message else "went on without it"
        wrong = []
        if code is None:
            wrong.append("did not end")
        elif code not in (0, 2):
            wrong.append(f"exit code {code}")
        if "Traceback" in told:
            wrong.append("traceback: " + " | ".join(told.strip().splitlines()[-3:])[-300:])
        several = trial.everything and trial.shape == "two ranks"  # they cannot report to their launcher
        if bool(message) != (code != 0) or (len(message) > 1 and not several):
            wrong.append(f"{len(message)} messages")
        wrong += self._lost(run)
        again, further = self.train(trial, again=True)
        if again:
            return short, "; ".join([*wrong, f"the same command ends with {again}: {further.strip()[-600:]}"])
        wrong += self._differs(run, self.whole[trial.shape])
        return short, "; ".join(wrong)

    def _lost(self, run: Path) -> list[str]:
        """What was good and is not, after the run that failed."""
        from shardtune.checkpoint.checksums import directory_faults
        from shardtune.checkpoint.store import CheckpointStore
        from shardtune.training.loggers import metric_lines

        store = CheckpointStore(run / "checkpoints")
        wrong = [f"{name}: {fault}" for name, fault in store.faults().items()]
        latest = store.latest()
        if (run / "metrics.jsonl").exists() and latest is not None:
            steps = [int(line["step"] or 0) for line in metric_lines(run)]
            saved = int(latest.name.rpartition("_")[2])
            if steps[: saved - 1] != list(range(1, saved)):
                wrong.append(f"lines of metrics {steps} at the checkpoint of {saved}")
        if (run / "final").exists() and (faults := directory_faults(run / "final", content=True)):
            wrong.append(f"final/: {faults}")
        return wrong

    def _differs(self, run: Path, whole: Path) -> list[str]:
        from tests.support.tiny_run import assert_same_tensors, lines

        wrong = []
        for folder in (LAST, "final"):
            try:
                assert_same_tensors(whole / folder, run / folder)
            except (AssertionError, OSError) as error:
                wrong.append(f"{folder}: {error}")
        if lines(run) != lines(whole):
            wrong.append("other lines of metrics")
        names = {path.name for path in run.iterdir()} ^ {path.name for path in whole.iterdir()}
        names -= {"report.html"}  # `shardtune report` writes it, as a line of the run has said
        kept = [{path.name for path in (place / "checkpoints").iterdir()} for place in (run, whole)]
        names |= kept[1] - kept[0]  # the next save of the run, if there is one, removes one more
        if names:
            wrong.append(f"other files: {sorted(names)}")
        return wrong


def trials(writes: Mapping[str, int], every: int) -> list[Trial]:
    """All of them, spread over the writes; the error and the place of temporary files change from one to the next."""
    found = []
    for shape, number in writes.items():
        for index, at in enumerate(range(1, number + 1, EVERY[shape] * every)):
            error = "ENOSPC" if index % 2 else ERRORS[index // 2 % len(ERRORS)]
            found.append(Trial(shape, at, error, index % 3 == 2))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every N-th of these writes")
    parser.add_argument("--first", type=int, default=1, help="the first of these writes")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    from results import machine, table, write_section

    from tests.support import fork_server

    undo = fork_server.install()
    tried, ends, failed = Counter[str](), Counter[tuple[str, str]](), []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        print(bench.writes, flush=True)
        for trial in trials(bench.writes, options.every):
            if options.shape not in (None, trial.shape) or trial.number < options.first:
                continue
            end, wrong = bench.outcome(trial)
            tried[trial.shape] += 1
            ends[trial.shape, end] += 1
            print(json.dumps([trial.shape, trial.number, trial.error, trial.everything, end, wrong]), flush=True)
            failed += [f"{trial}: {wrong}"] if wrong else []
    undo()
    rows = [
        [shape, bench.writes[shape], tried[shape], tried[shape] - ends[shape, "went on without it"],
         ends[shape, "went on without it"]]
        for shape in tried
    ]  # fmt: skip
    text = "\n\n".join([
        machine(),
        table(["on", "writes of a run", "tried", "ended with a message", "went on without the file"], rows),
        f"{sum(tried.values()) - len(failed)} of {sum(tried.values())} trials ended as they should, and bitwise equal "
        "once there was room.",
    ])  # fmt: skip
    print(text)
    if failed:
        raise SystemExit("\n".join(failed))
    if options.save:
        write_section("full-disk", text)


def loaded() -> None:
    """Start anew with the library in front of libc."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "full_disk.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ, "LD_PRELOAD": str(library)}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    if "full_disk.so" in os.environ.get("LD_PRELOAD", ""):
        main()
    else:
        loaded()
