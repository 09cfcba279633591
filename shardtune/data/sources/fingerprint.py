"""Fingerprints of files and directories: exact for rows, from samples for what may be too large to be read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardtune.data.cache_directory import file_digest
from shardtune.data.robot.hdf5 import SUFFIXES
from shardtune.data.row_files import kind_of
from shardtune.data.sources.found_files import files_below, fixed_part, matching, same_file
from shardtune.data.sources.hub import CARD, card_header, configured_folder

WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed whole by `contents`."""
SAMPLES, SAMPLE_BYTES = 128, 4096
"""Of a larger file, the number and size of the evenly spaced pieces that are hashed."""
SAMPLED_FILES = 1024
"""Of a directory with more files, as many, evenly chosen by name, are opened."""
OUTLINE_PIECES = 3
_HEADER_BYTES = 100_000_000
_NO_CONTENT = (".md",)
_NO_FOLDERS = ("__pycache__",)


OUTLINE = "outline "
"""Before what `outlines` gives."""


def fingerprints(paths: Sequence[str], root: Path, without: Path | None = None) -> list[dict[str, str | None]]:
    """Each path with a hash of its content: of a file, or of all files in a directory or that a pattern matches.

    Files of rows are read whole, once, and any others in a directory (images, videos) as by `contents`; so are all of
    them where a directory holds more than `SAMPLED_FILES`. `directory:configuration` has the hash of the directory. A
    path that is none of these (a name on a hub) has no hash: only the task can resolve it.

    Args:
        paths: as the recipe names them.
        root: of the cache, which remembers the hashes of files that have not changed.
        without: a file that is none of them, wherever it lies.
    """
    found: list[dict[str, str | None]] = []
    for path in paths:
        try:
            key = _key(Path(path), root, without)
        except OSError as error:
            key = f"unreadable ({error.strerror})"
        found.append({"file": path, "rows": None, "key": key})
    return found


def _key(path: Path, root: Path, without: Path | None) -> str | None:
    path = configured_folder(str(path)) or path
    if path.is_file():
        return file_digest(path, root)
    if path.is_dir():
        names = sorted(_names(path, without))
        rows = [name for name in names if _is_data(name)]
        if len(rows) > SAMPLED_FILES:
            return _joined(contents(path, without, links=True) | _card(path))
        others = _some([name for name in names if not _is_data(name)])
        exact = {name: file_digest(path / name, root) for name in rows}
        return _joined({"": _listed(names), **exact, **{name: _sampled(path / name) for name in others}, **_card(path)})
    exact = {name: file_digest(match, root) for name, match in _matching(path, without).items()}
    return _joined(exact) if exact else None


def outline(path: Path, without: Path | None = None) -> str | None:
    """A hash of the name, size, and first, middle and last bytes of each file that a path names; None if there is none.

    It reads `OUTLINE_PIECES` pieces of `SAMPLE_BYTES` of a file, whatever its size. Of other files in a directory than
    those of rows at most `SAMPLED_FILES` count, and `without` counts nowhere.
    """
    path = configured_folder(str(path)) or path
    if path.is_file():
        return OUTLINE + _pieces(path, OUTLINE_PIECES)
    card: dict[str, str] = {}
    if path.is_dir():
        names = sorted(_names(path, without))
        others = _some([name for name in names if not _is_data(name)])
        found, card = {name: path / name for name in (*filter(_is_data, names), *others)}, _card(path)
    else:
        found = _matching(path, without)
    pieces = {name: _pieces(file, OUTLINE_PIECES) for name, file in found.items()}
    return OUTLINE + _joined(pieces | card) if found else None


def _matching(pattern: Path, without: Path | None) -> dict[str, Path]:
    """The files that a pattern matches by their paths below its folders without a wildcard, so that these may move."""
    base = fixed_part(str(pattern))
    return {str(file.relative_to(base)): file for file in _others(matching(str(pattern)).files, without)}


def _others(files: Iterable[Path], without: Path | None) -> Iterator[Path]:
    """The files but one."""
    for file in files:
        if without is None or not same_file(file, without):
            yield file


def _card(folder: Path) -> dict[str, str]:
    """A hash of the configurations that a directory's card names, under its name; nothing without such a card."""
    header = card_header(folder)
    return {} if header is None else {CARD: hashlib.blake2b(header.encode(), digest_size=20).hexdigest()}


def _is_data(name: str) -> bool:
    """Whether a file holds rows or a recording."""
    return kind_of(Path(name)) is not None or name.lower().endswith(SUFFIXES) or ".tfrecord-" in name


def _joined(found: dict[str, str]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for name, content in sorted(found.items()):
        digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()


def contents(path: Path, without: Path | None = None, *, links: bool = False) -> dict[str, str]:
    """The size and a hash of each file at a path, in time that does not grow with their size.

    A file of up to `WHOLE_BYTES` is hashed whole; of a larger one the beginning, with the header of a safetensors file,
    and `SAMPLES` pieces. Hidden files and Markdown are left out, and of a directory `without`; links to directories are
    followed only with `links`, as one beside a model may lead to anything.

    Returns:
        By name relative to the path, "" for the path itself: of a directory or a pattern the number of its files and a
        hash of their names.
    """
    path = configured_folder(str(path)) or path
    try:
        if path.is_file():
            return {"": _sampled(path)}
        if path.is_dir():
            names = sorted(_names(path, without, links=links))
            return {"": _listed(names), **{name: _sampled(path / name) for name in _some(names)}}
        files = [str(match) for match in matching(str(path)).files]
        if files:
            return {"": _listed(files), **{name: _sampled(Path(name)) for name in _some(files)}}
    except OSError as error:
        return {"": f"unreadable ({error.strerror})"}
    return {"": "missing"}


def _names(folder: Path, without: Path | None, *, links: bool = True) -> Iterator[str]:
    """The files below a folder that count, by relative path: none of a run or of a data cache that lies in it."""
    below = files_below(folder, lambda name: name.startswith(".") or name in _NO_FOLDERS, links=links)
    for file in _others(below.files, without):
        if not file.name.endswith(_NO_CONTENT):
            yield str(file.relative_to(folder))


def _some(names: Sequence[str]) -> Sequence[str]:
    """All names, or of too many an even choice."""
    step = max(1, -(-len(names) // SAMPLED_FILES))
    return names[::step]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names):,} files, names {hashlib.blake2b(chr(0).join(names).encode(), digest_size=6).hexdigest()}"


def _pieces(path: Path, number: int) -> str:
    """The size of a file and a hash of so many evenly spaced pieces of it."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for piece in range(number):
            file.seek(max(0, size - SAMPLE_BYTES) * piece // (number - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size:,} bytes, content {digest.hexdigest()}"


def _sampled(path: Path) -> str:
    """The size of a file and a hash of it or of its samples."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            header = file.read(8)
            more = int.from_bytes(header, "little") if path.suffix == ".safetensors" else SAMPLE_BYTES
            digest.update(header + file.read(min(more, _HEADER_BYTES)))
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"{size:,} bytes, content {digest.hexdigest()}"
