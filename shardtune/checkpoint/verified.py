"""Verifies checkpoints against their checksums before they are loaded, each file by one of the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardtune.checkpoint.checksums import CHECKSUMS, read_checksums, share
from shardtune.checkpoint.safetensors_file import read_header
from shardtune.checkpoint.state_file import StateFile, fault_of
from shardtune.data.checksum import Parts, content_fault, size_fault
from shardtune.errors import CheckpointError, ShardtuneError
from shardtune.parallel.ranks import Ranks

_SHOWN = 3
THREADS = 4


def damage(checkpoint: Path, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """The damaged files of a checkpoint, with what is wrong; empty for a sound one.

    Every file is looked at and read once, by one rank: a rank's own shards by that rank, if as many ranks wrote it, so
    that they are in its host's memory when it loads them. Checkpoints of earlier versions have no checksums; of these,
    the headers of tensor files and the JSON files are read.

    Args:
        checkpoint: its folder.
        rank: which part of the files to read.
        num_ranks: how many parts there are.
    """
    fault = fault_of(checkpoint, sizes=False)
    if fault is not None:
        return {checkpoint.name: fault}
    known = StateFile.read(checkpoint)
    check = content_fault if known.has_checksums else _unreadable
    return _faults(checkpoint, share(known.files, rank, num_ranks), check)


def damaged_file(checkpoint: Path, name: str) -> str | None:
    """What is wrong with one file of a checkpoint; None if it is sound, or if the checkpoint does not list it."""
    known = StateFile.read(checkpoint)
    check = content_fault if known.has_checksums else _unreadable
    return check(checkpoint / name, known.files[name]) if name in known.files else None


def damage_on_ranks(checkpoint: Path, ranks: Ranks) -> dict[str, str]:
    """As `damage`, the work divided among the ranks, all of which call it and have the same result."""
    return _gathered(damage(checkpoint, ranks.rank, ranks.world_size), ranks)


def directory_damage(folder: Path, ranks: Ranks) -> dict[str, str]:
    """As `directory_faults`, contents included, the work divided among the ranks; all call it."""
    try:
        files = read_checksums(folder) or {}
    except CheckpointError as problem:
        files, mine = {}, {CHECKSUMS: problem.what}
    else:
        mine = _faults(folder, share(files, ranks.rank, ranks.world_size), content_fault)
    return _gathered(mine, ranks)


def _gathered(mine: dict[str, str], ranks: Ranks) -> dict[str, str]:
    found: dict[str, str] = {}
    for of_rank in ranks.gather(mine):
        found |= of_rank
    return found


def _faults(folder: Path, files: Mapping[str, Parts], check: Callable[[Path, Parts], str | None]) -> dict[str, str]:
    """The damaged files, several read at a time: disks and the hash work beside Python."""
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = pool.map(lambda name: check(folder / name, files[name]), files)
        return {name: fault for name, fault in zip(files, wrong, strict=True) if fault is not None}


def sound_first(candidates: Sequence[Path], ranks: Ranks, report: Callable[[str], None]) -> list[Path]:
    """The candidates from the first sound one on; all ranks call it and agree.

    Args:
        candidates: newest first, at least one.
        ranks: of the run.
        report: receives a line for each checkpoint that is passed over, and one for a checkpoint without checksums.

    Raises:
        CheckpointError: none is sound; names each with its fault.
    """
    faults: dict[str, str] = {}
    for number, checkpoint in enumerate(candidates):
        found = damage_on_ranks(checkpoint, ranks)
        if not found:
            if not StateFile.read(checkpoint).has_checksums:
                report(f"{checkpoint.name} was saved by an earlier version and has no checksums: it is not verified")
            return list(candidates[number:])
        faults[checkpoint.name] = described(found)
        report(f"passed over the checkpoint {checkpoint.name}: {faults[checkpoint.name]}")
    raise none_is_sound(candidates[0].parent, faults)


def none_is_sound(folder: Path, faults: Mapping[str, str]) -> CheckpointError:
    """The error for a run of which no checkpoint can be loaded: it does not begin again unasked."""
    lines = [f"{name}: {fault}" for name, fault in faults.items()]
    return CheckpointError(
        "no checkpoint of the run can be loaded:\n    " + "\n    ".join(lines),
        where=str(folder),
        remedy="put back one of them from a copy, or start over: runner.overwrite=true moves the run aside, another "
        "runner.logger.experiment_name leaves it as it is",
    )


def require_sound(found: Mapping[str, str], where: Path, remedy: str) -> None:
    """Refuse a directory with damaged files.

    Raises:
        CheckpointError: there are any.
    """
    if found:
        raise CheckpointError(f"{where.name} is damaged: {described(found)}", where=str(where), remedy=remedy)


def described(found: Mapping[str, str]) -> str:
    """Damaged files as one line."""
    shown = [f"{name} {fault}" for name, fault in sorted(found.items())]
    more = f"; and {len(shown) - _SHOWN} more files" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more


def _unreadable(file: Path, parts: Parts) -> str | None:
    """What is wrong with a file that has no checksum, as far as its form shows it."""
    fault = size_fault(file, parts)
    if fault is not None:
        return fault
    try:
        if file.suffix == ".safetensors":
            read_header(file, CheckpointError)
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, ShardtuneError) as problem:
        return f"cannot be read: {problem.what if isinstance(problem, ShardtuneError) else problem}"
    return None
