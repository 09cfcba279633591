"""Damage a stopped run in 200 ways: each is found, and the run goes on from the newest sound checkpoint, bit for bit.

    python bench/damage.py [--every N] [--saves] [--save]

Every file of the newest checkpoint is flipped (one bit, at many places), emptied, cut, removed, and exchanged for the
same file of another step and of another run; then the run's own files are. With `--saves`: what checksums add to the
time of a save, and how fast a checkpoint is verified.
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
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402
from results import machine, table, write_section  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402

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
SAVED_MB = {16: 121, 64: 61, 256: 21}
"""Sizes of a rank's part, and how often each is saved in each way."""


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


def save_without_checksums(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As `dcp.save_tensors`, with torch's own files."""

    @contextlib.contextmanager
    def plain(files: dcp._SummedFiles, path: str, mode: str) -> Iterator[io.IOBase]:
        with FileSystem.create_stream(files, path, mode) as stream:
            yield stream
        files.sums[Path(path).name] = 0, ""

    with (
        mock.patch.object(dcp._SummedFiles, "create_stream", plain),
        mock.patch.object(dcp, "add_checksums"),
    ):
        dcp.save_tensors(folder, tensors)


def saves(folder: Path) -> list[list[str]]:
    """Per size: seconds of a save without and with checksums, by turns, and what they add to each pair; medians."""
    rows = []
    for size, times in SAVED_MB.items():
        tensors = {f"layer.{number}": torch.randn(size << 14) for number in range(16)}
        seconds: dict[str, list[float]] = {"with": [], "without": [], "read": []}
        ways = (("with", dcp.save_tensors), ("without", save_without_checksums))
        for number in range(times):
            for way, save in ways if number % 2 else ways[::-1]:
                began = time.perf_counter()
                save(folder / way, tensors)
                seconds[way].append(time.perf_counter() - began)
                if way == "with":
                    began = time.perf_counter()
                    for file in (folder / way).glob("*.safetensors"):
                        file_parts(file)
                    seconds["read"].append(time.perf_counter() - began)
                shutil.rmtree(folder / way)
        summed, plain, read = (median(seconds[way]) for way in ("with", "without", "read"))
        added = median(one / other for one, other in zip(seconds["with"], seconds["without"], strict=True)) - 1
        rows.append(
            [f"{size} MB", times, f"{plain * 1e3:.1f} ms", f"{summed * 1e3:.1f} ms", f"{added:+.1%}",
             f"{size / 1024 / read:.1f} GB/s"]
        )  # fmt: skip
    return rows


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    found = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(found, key=lambda mount: len(mount[0]))[1]


def measure_saves(*, save: bool) -> None:
    """The table of what checksums cost."""
    with tempfile.TemporaryDirectory() as folder:
        text = f"{machine()}; {file_system(Path(folder))}; medians\n\n" + table(
            ["size of a rank's part", "saves of each kind", "without checksums", "with", "difference", "verified at"],
            saves(Path(folder)),
        )
    print(text)
    if save:
        write_section("checksums", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every N-th damage")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    parser.add_argument("--saves", action="store_true", help="only measure what checksums cost")
    options = parser.parse_args()
    if options.saves:
        measure_saves(save=options.save)
        return
    tried, failed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
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
    ])  # fmt: skip
    print(text)
    if options.save:
        write_section("damage", text)


if __name__ == "__main__":
    main()
