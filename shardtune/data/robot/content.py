"""The content of a data file or of robot data as one hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from shardtune.data.cache_directory import file_digest, files_digest
from shardtune.data.robot.lerobot import is_lerobot, open_lerobot
from shardtune.data.robot.recordings import recording_files


def content_digest(path: Path, root: Path, part: str = "") -> str:
    """The hash of a file's bytes, or of all files that a robot data set consists of; remembered in the cache.

    Of videos the size and the time of the last change count: they may be larger than what can be read before each run.
    Rows name their frames by the place of the file, so that place counts, too, where there are videos or image files.
    """
    if not is_lerobot(path):
        files = recording_files(path, part)
        if files == [path]:
            return file_digest(path, root)
        return files_digest(path if path.is_dir() else path.parent, files, root)
    described = open_lerobot(path)
    meta = [file for file in sorted((path / "meta").rglob("*")) if file.is_file()]
    data = [path / file for file in described.data_files]
    content: list[object] = [[str(file.relative_to(path)), file_digest(file, root)] for file in (*meta, *data)]
    videos = [path / file for file in described.video_files]
    for video in (video for video in videos if video.is_file()):
        status = video.stat()
        content.append([str(video.relative_to(path)), status.st_size, status.st_mtime_ns])
    if videos or (path / "images").is_dir():
        content.append(str(path.absolute()))
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=20).hexdigest()
