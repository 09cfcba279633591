"""Videos of episodes, as GIF (Pillow) or MP4 (PyAV, the `[video]` extra)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from shardtune.errors import ConfigError

GREEN, RED = (30, 160, 60), (200, 40, 40)
SECONDS_OF_LAST = 1


@dataclass(slots=True)
class Film:
    """The frames of one episode, uint8 [H, W, 3] each, all of one size."""

    frames: list[np.ndarray] = field(default_factory=list)

    def add(self, frame: np.ndarray) -> None:
        """One more frame.

        Raises:
            ConfigError: it is no image, or its size is not that of the first.
        """
        fine = isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3
        if not fine or (self.frames and frame.shape != self.frames[0].shape):
            is_array = isinstance(frame, np.ndarray)
            kind = f"{frame.dtype} {list(frame.shape)}" if is_array else f"a {type(frame).__name__}"
            first = f" after {list(self.frames[0].shape)}" if self.frames else ""
            raise ConfigError(
                f"a frame of a video is {kind}{first}",
                where="eval.environment: render",
                remedy="give uint8 [H, W, 3], of one size in an episode; or eval.videos: 0",
            )
        self.frames.append(frame.copy())


def check_format(video_format: str) -> None:
    """Refuse a format that cannot be written here."""
    if video_format != "mp4":
        return
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "PyAV, which writes MP4 files, is not installed",
            where="eval.video_format = mp4",
            remedy="pip install 'shardtune[video]', or choose gif",
        ) from error


def keep_film(film: Film, file: Path, frames_per_second: int, *, success: bool) -> None:
    """Write a video; its last frame, with a green or red border, is shown for a second.

    Args:
        film: at least one frame.
        file: ends with .gif or .mp4.
        frames_per_second: of the video.
        success: whether the episode succeeded.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(frame) for frame in film.frames]
    last = pictures[-1].copy()
    width = max(1, min(last.size) // 32)
    edge = (0, 0, last.width - 1, last.height - 1)
    ImageDraw.Draw(last).rectangle(edge, outline=GREEN if success else RED, width=width)
    if file.suffix == ".gif":
        _write_gif([*pictures, last], file, frames_per_second)
    else:
        _write_mp4([*pictures, *[last] * (SECONDS_OF_LAST * frames_per_second)], file, frames_per_second)


def _write_gif(pictures: list[Image.Image], file: Path, frames_per_second: int) -> None:
    duration = [round(1000 / frames_per_second)] * (len(pictures) - 1) + [1000 * SECONDS_OF_LAST]
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=duration, loop=0)


def _write_mp4(pictures: list[Image.Image], file: Path, frames_per_second: int) -> None:
    import av
    from av.video.frame import VideoFrame

    width, height = (size + size % 2 for size in pictures[0].size)  # H.264 needs even sizes
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(frames_per_second))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            padded = np.zeros((height, width, 3), np.uint8)
            padded[: picture.height, : picture.width] = np.asarray(picture)
            container.mux(stream.encode(VideoFrame.from_ndarray(padded, format="rgb24")))
        container.mux(stream.encode())
