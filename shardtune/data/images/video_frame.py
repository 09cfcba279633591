"""Single frames out of video files, by time."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from shardtune.data.encoder import RowError
from shardtune.errors import DataError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL import Image

_OPEN_FILES = 16
# Up to this far ahead, decoding on is cheaper than seeking to the previous key frame.
_AHEAD_SECONDS = 0.5


def read_frame(path: str, seconds: float) -> Image.Image:
    """The frame shown `seconds` after the beginning of a video, in RGB.

    It is the frame nearest in time, which must not be farther than half the distance of two frames.
    Files stay open, a few per thread; reading forwards does not seek.

    Raises:
        RowError: the file cannot be decoded there, or has no frame at that time.
        DataError: PyAV is not installed.
    """
    require_av()
    from av.error import FFmpegError

    try:
        return _opened(path).frame(seconds)
    except (FFmpegError, OSError) as error:
        _open.files.pop(path, None)
        raise RowError(f"the video {path} cannot be decoded at {seconds:.3f} s: {error}") from error


def video_seconds(path: str) -> float | None:
    """How long a video is; None for a file that does not state it or cannot be read, which reading a frame reports."""
    require_av()
    import av
    from av.error import FFmpegError

    try:
        with av.open(path, options={"protocol_whitelist": "file"}) as container:
            stream = container.streams.video[0]
            if stream.duration is None or stream.time_base is None:
                return None if container.duration is None else container.duration / av.time_base
            return float(stream.duration * stream.time_base)
    except (FFmpegError, OSError, IndexError):
        return None


def require_av() -> None:
    """Raises `DataError` where videos cannot be read."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise DataError(
            "the data holds videos, and PyAV, which reads them, is not installed",
            remedy="pip install 'shardtune[video]'",
        ) from error


@dataclass(slots=True)
class _Video:
    """An open file: its position and the last decoded frame."""

    path: str
    container: InputContainer
    stream: VideoStream
    time_base: Fraction
    start: float
    half: float
    frames: Iterator[VideoFrame] = field(default_factory=lambda: iter(()))
    last: tuple[float, VideoFrame] | None = None

    @classmethod
    def open(cls, path: str) -> _Video:
        import av

        # A playlist names other files; none is fetched from the network.
        container = av.open(path, options={"protocol_whitelist": "file"})
        if not container.streams.video:
            container.close()
            raise RowError(f"the file {path} holds no video")
        stream = container.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1  # threads do not survive a fork
        rate = stream.average_rate or stream.guessed_rate
        if stream.time_base is None or not rate:
            container.close()
            raise RowError(f"the video {path} has no frame rate")
        start = float((stream.start_time or 0) * stream.time_base)
        return cls(path, container, stream, stream.time_base, start, 0.5 / float(rate))

    def frame(self, seconds: float) -> Image.Image:
        if self.last is None or not self.last[0] - self.half <= seconds < self.last[0] + _AHEAD_SECONDS:
            self._seek(seconds)
        # Time stamps are stored as float32 and files count in ticks: a little more than half is still the nearest.
        reach = self.half * 1.02
        while self.last is not None and self.last[0] < seconds - self.half:
            if not self._advance():
                break
        if self.last is None or abs(self.last[0] - seconds) > reach:
            near = "it has no frame there" if self.last is None else f"the nearest is at {self.last[0]:.3f} s"
            raise RowError(f"the video {self.path} has no frame at {seconds:.3f} s: {near}")
        return self.last[1].to_image(threads=1)  # otherwise each frame starts as many as there are cores

    def _seek(self, seconds: float) -> None:
        ticks = int((max(seconds - self.half, 0.0) + self.start) / self.time_base)
        self.container.seek(ticks, stream=self.stream, backward=True)
        self.frames, self.last = self.container.decode(self.stream), None
        self._advance()

    def _advance(self) -> bool:
        """Decodes the next frame; False at the end of the file."""
        frame = next(self.frames, None)
        if frame is None:
            return False
        if frame.time is None:
            raise RowError(f"the video {self.path} has a frame without a time stamp")
        self.last = (frame.time - self.start, frame)
        return True


class _Open(threading.local):
    """The files that a thread has open: training and evaluation read in separate threads."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.files: OrderedDict[str, _Video] = OrderedDict()
        self.inherited: list[object] = []

    def here(self) -> OrderedDict[str, _Video]:
        """The files that this process has opened. Inherited ones are kept, but neither read nor closed: a fork shares
        their position with the parent, and closing waits for threads that do not exist in the fork."""
        if self.process != os.getpid():
            self.inherited.append(self.files)
            self.process, self.files = os.getpid(), OrderedDict()
        return self.files


_open = _Open()


def _opened(path: str) -> _Video:
    files = _open.here()
    if path not in files:
        files[path] = _Video.open(path)
        while len(files) > _OPEN_FILES:
            files.popitem(last=False)[1].container.close()
    files.move_to_end(path)
    return files[path]
