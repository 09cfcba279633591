"""Damage a stopped run in 200 ways: each is found, and the run goes on from the newest sound checkpoint, bit for bit.

    python bench/damage.py [--every N] [--save]

Every file of the newest checkpoint is flipped (one bit, at many places), emptied, cut, removed, and exchanged for the
same file of another step and of another run; then the run's own files are. Also measured: the share of a save's time
that its checksums take, and how fast a checkpoint is verified.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402
from results import machine, table, write_section  # noqa: E402

import shardtune  # noqa: E402
from shardtune.checkpoint import dcp  # noqa: E402
from shardtune.data.checksum import file_parts  # noqa: E402
from shardtune.errors import Interrupted  # noqa: E402
from tests.support.tiny_run import (  # noqa: E402
    Tiny,
    assert_same_tensors,
    flip_bit,
    lines,
    make_tiny,
    signal_after,
)

STEPS, STOPPED = 8, 6
DAMAGES = 200
KEYS = {"actor__model__is_lora": True}
SAVED_MB = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to spoil a run.

    Attributes:
        file: which, below the run directory.
        how: in words, for the table.
        apply: spoils the file at a path.
    """

    file: str
    how: str
    apply: Callable[[Path], object]


def make_runs(folder: Path) -> Tiny:
    """`whole`; `stopped`, after step 6; `other`, the same recipe with another seed."""
    tiny = make_tiny(folder, dropout=0.2)
    shardtune.train(tiny.recipe("whole", **KEYS))
    shardtune.train(tiny.recipe("other", runner__seed=7, **KEYS))
    with signal_after(STOPPED), contextlib.suppress(Interrupted):
        shardtune.train(tiny.recipe("stopped", **KEYS))
    return tiny


def damages(tiny: Tiny) -> Iterator[Damage]:
    """All of them, `DAMAGES` in number: what is not said below are flips, dealt out to the files of the checkpoint."""
    newest, before, other = (
        tiny.run(run) / f"checkpoints/global_step_{step}"
        for run, step in (("stopped", STOPPED), ("stopped", STOPPED - 1), ("other", STOPPED))
    )
    names = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    fixed: list[Damage] = []
    for name in names:
        inside = newest.relative_to(tiny.run("stopped")).as_posix() + f"/{name}"
        fixed.append(Damage(inside, "emptied", lambda path: path.write_bytes(b"")))
        fixed.append(Damage(inside, "cut", lambda path: os.truncate(path, path.stat().st_size // 2)))
        fixed.append(Damage(inside, "removed", Path.unlink))
        for which, source in (("another step's", before / name), ("another run's", other / name)):
            if source.read_bytes() != (newest / name).read_bytes():
                fixed.append(
                    Damage(inside, f"exchanged for {which}", lambda path, at=source: shutil.copyfile(at, path))
                )
    for name in ("manifest.json", "config.yaml"):
        fixed.append(Damage(name, "removed", Path.unlink))
        fixed.append(Damage(name, "emptied", lambda path: path.write_bytes(b"")))
    flips = DAMAGES - len(fixed)
    for number in range(flips):
        name = names[number % len(names)]
        place = (number // len(names) + 0.5) / (flips // len(names) + 1)
        inside = newest.relative_to(tiny.run("stopped")).as_posix() + f"/{name}"
        spoil = lambda path, place=place, bit=number % 8: flip_bit(path, place, bit)  # noqa: E731
        fixed.append(Damage(inside, "one bit flipped", spoil))
    yield from fixed


def outcome(tiny: Tiny, damage: Damage) -> str:
    """Spoil a copy of the stopped run and continue it; what is wrong with the outcome, "" for nothing."""
    run = tiny.run("trial")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(tiny.run("stopped"), run, symlinks=True)
    damage.apply(run / damage.file)
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        shardtune.train(tiny.recipe("trial", **KEYS))
    lost = not damage.file.startswith("checkpoints/")
    if lost and "its copy in" not in told.getvalue():
        return "not said"
    if not lost and f"passed over the checkpoint global_step_{STOPPED}" not in told.getvalue():
        return "not found"
    if f"continuing after step {STOPPED if lost else STOPPED - 1}" not in told.getvalue():
        return "not continued from the newest sound one"
    last = f"checkpoints/global_step_{STEPS}"
    try:
        assert_same_tensors(tiny.run("whole") / last, run / last)
        assert lines(run) == lines(tiny.run("whole"))
    except AssertionError as error:
        return str(error)
    return ""


def saves(folder: Path) -> list[list[str]]:
    """Per size: seconds of a save, and the share of its checksums; medians of five."""
    rows = []
    for size in SAVED_MB:
        tensors = {f"layer.{number}": torch.randn(size << 14) for number in range(16)}
        taken: list[tuple[float, float, float]] = []
        originals, spent = (dcp.checksum, dcp.add_checksums), [0.0]

        def timed(original: Callable[..., Any], spent: list[float] = spent) -> Callable[..., Any]:
            def call(*arguments: object) -> object:
                began = time.perf_counter()
                found = original(*arguments)
                spent[0] += time.perf_counter() - began
                return found

            return call

        dcp.checksum, dcp.add_checksums = map(timed, originals)
        try:
            for number in range(5):
                spent[0], began = 0.0, time.perf_counter()
                dcp.save_tensors(folder / str(number), tensors)
                whole = time.perf_counter() - began
                began = time.perf_counter()
                for file in (folder / str(number)).glob("*.safetensors"):
                    file_parts(file)
                taken.append((spent[0] / whole, whole, time.perf_counter() - began))
                shutil.rmtree(folder / str(number))
        finally:
            dcp.checksum, dcp.add_checksums = originals
        share, whole, read = (sorted(column)[2] for column in zip(*taken, strict=True))
        rows.append([f"{size} MB", f"{whole:.2f} s", f"{share:.1%}", f"{size / 1024 / read:.1f} GB/s"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every N-th damage")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    tried, failed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        sizes = saves(Path(folder))
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            tiny = make_runs(Path(folder) / "runs-of-bench")
        for number, damage in enumerate(damages(tiny)):
            if number % options.every:
                continue
            wrong = outcome(tiny, damage)
            kind = (
                damage.file.rpartition(f"global_step_{STOPPED}/")[2].rpartition("/shard")[0] or Path(damage.file).name
            )
            tried[kind, damage.how] += 1
            if wrong:
                failed[kind, damage.how] += 1
                print(f"{damage.file} {damage.how}: {wrong}", flush=True)
    hows = list(dict.fromkeys(how for _, how in tried))
    kinds = list(dict.fromkeys(kind for kind, _ in tried))
    rows = [[kind, *(tried[kind, how] or "" for how in hows)] for kind in kinds]
    text = "\n\n".join([
        machine(),
        table(["file", *hows], rows),
        f"{sum(tried.values())} damages, {sum(tried.values()) - sum(failed.values())} found; each of these runs went "
        "on from the newest sound checkpoint and ended with the same bits as the run that was left alone.",
        table(["size of a rank's part", "save", "of it checksums", "verified at"], sizes),
    ])  # fmt: skip
    print(text)
    if options.save:
        write_section("damage", text)


if __name__ == "__main__":
    main()
