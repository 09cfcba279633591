"""Data files elsewhere, by fsspec (`s3://`, `gs://`, `https://`, …): each is copied into the cache once per version."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs

from shardtune.data.cache_directory import cache_error, cache_folder, writable
from shardtune.data.file_lock import FileLock
from shardtune.data.row_files import SUPPORTED, is_description, kind_of
from shardtune.data.sources.hub import Selection, choose_files, some_of
from shardtune.errors import DataError
from shardtune.launch.progress import PROGRESS

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://.+")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_CREDENTIALS = {
    "s3fs": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for another server",
    "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS",
    "adlfs": "AZURE_STORAGE_CONNECTION_STRING",
}
_OF_VERSION = (
    *("etag", "content-md5", "digest", "last-modified", "lastmodified", "last_modified", "mtime", "updated"),
    *("md5hash", "crc32c", "generation", "versionid", "blob_id", "created", "content_hash"),
)
"""What file systems have of a file that changes with its content, in lower case."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A copy of a remote file.

    Attributes:
        path: in the cache.
        label: the URL without user, password and query.
    """

    path: Path
    label: str


def is_remote(spec: str) -> bool:
    """Whether a data path is a URL."""
    return _URL.fullmatch(spec) is not None


def remote_files(spec: str, selection: Selection, root: Path, report: Callable[[str], None]) -> list[RemoteFile]:
    """The files that a URL names: one, those that a pattern matches, or the data files of a directory, in order.

    Args:
        spec: the URL.
        selection: of a directory whose file names name splits.
        root: of the cache.
        report: receives a line for each file that is copied, and one on files of other splits.

    Raises:
        DataError: the package for such URLs is not installed, or the files cannot be read.
    """
    shown = _shown(spec)
    scheme = spec.partition("://")[0].lower()
    package = _PACKAGES.get(scheme)
    try:
        system, path = url_to_fs(spec)
    except ImportError as error:
        raise DataError(
            f"{scheme}:// needs a package that is not installed: {error}",
            where=f"data: {shown}",
            remedy=f"pip install {package or 'the package of fsspec for it'}, or copy the files here",
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{scheme}:// is not known", where=f"data: {shown}", remedy=f"one of {known}") from error
    try:
        system.invalidate_cache()
        return [_copied(system, one, spec, root, report) for one in _chosen(system, path, spec, selection, report)]
    except DataError:
        raise
    except Exception as error:  # each file system has exceptions of its own
        given = f" (credentials come from the environment: {_CREDENTIALS[package]})" if package in _CREDENTIALS else ""
        raise DataError(
            f"the remote data cannot be read: {type(error).__name__}: {error}".rstrip(": "),
            where=f"data: {shown}",
            remedy=f"check the URL, the network and your access{given}",
        ) from error


def _shown(url: str) -> str:
    """A URL without what may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _chosen(system: Any, path: str, spec: str, selection: Selection, report: Callable[[str], None]) -> Sequence[str]:
    is_web = spec.lower().startswith(("http://", "https://"))
    if "*" in path or (not is_web and re.search(r"[?\[]", path)):
        found = [one for one in sorted(system.glob(path)) if not system.isdir(one)]
        if not found:
            raise DataError(f"nothing matches {_shown(spec)}", where="data", remedy="check the pattern")
        return found
    if is_web or not system.isdir(path):
        return [path]
    folder = Path(path)
    files = [Path(one) for one in sorted(system.find(path))]
    seen = [one for one in files if kind_of(one) and not _is_hidden(one.relative_to(folder))]
    data = [one for one in seen if not is_description(one)]
    if out := [one.name for one in seen if is_description(one)]:
        report(f"data: left out of {_shown(spec)}, as descriptions of data sets: {some_of(out)}")
    if not data:
        raise DataError("the directory holds no data file", where=_shown(spec), remedy=f"files named {SUPPORTED}")
    return [str(one) for one in choose_files(data, folder, selection, report)]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _copied(system: Any, path: str, spec: str, root: Path, report: Callable[[str], None]) -> RemoteFile:
    """The copy of a file; made if there is none of its present version, by one process at a time."""
    label, about = _shown(str(system.unstrip_protocol(path))), system.info(path)
    name = PurePosixPath(urlsplit(label).path).name or "data"
    version = {key: str(about[key]) for key in sorted(about) if key.lower() in _OF_VERSION and about[key]}
    named = json.dumps([label, urlsplit(path).query, about.get("size"), version or uuid.uuid4().hex])
    folder = root / "remote" / hashlib.blake2b(named.encode(), digest_size=20).hexdigest()
    copy = folder / name
    if copy.is_file():
        return RemoteFile(copy, label)
    writable(folder)
    lock = FileLock(cache_folder(root, "locks") / folder.name)

    def is_there(holder: str, seconds: float) -> bool:
        PROGRESS.beats += 1  # the other one is watched where it works
        return copy.is_file()

    try:
        if lock.acquire(is_there) and not copy.is_file():
            _fetch(system, path, copy, about, label, report)
    finally:
        lock.release()
    return RemoteFile(copy, label)


def _fetch(
    system: Any, path: str, copy: Path, about: Mapping[str, Any], label: str, report: Callable[[str], None]
) -> None:
    size = about.get("size")
    report(f"data: copying {label}" + (f" ({size:,} bytes)" if isinstance(size, int) else "") + f" to {copy.parent}")
    partial = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}.tmp")
    try:
        system.get_file(path, str(partial))
        got = partial.stat().st_size
        if isinstance(size, int) and got != size:
            raise DataError(
                f"only {got:,} of {size:,} bytes came", where=label, remedy="start again; the file may be changing"
            )
        partial.replace(copy)
    except OSError as error:
        if error.filename is not None and str(error.filename) == str(partial):
            raise cache_error(error, copy.parent) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
