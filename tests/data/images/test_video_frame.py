"""Frames of videos: the right one at each time, whichever way one goes through the file."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.images.images import read_image
from shardtune.data.images.video_frame import read_frame
from shardtune.data.robot.images import decode_frame
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.data.robot.conftest import FramesEncoder, episode

av = pytest.importorskip("av")
FPS = 10


def shade(frame: int) -> int:
    """The brightness of a frame: apart enough to be told after compression."""
    return 8 + frame * 6


CODECS = ("mpeg4", "libx264", "libsvtav1")
"""The second stores frames in another order than they are shown in, the third (AV1) is what LeRobot writes."""


def write_video(path: Path, frames: int, *, first: int = 0, fps: int = FPS, keys: int = 12, codec="mpeg4") -> None:
    """Frames of one shade each; a key frame now and then, so that seeking has to decode on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        finest = {"crf": "1"} if codec == "libsvtav1" else {"qmin": "1", "qmax": "2"}
        stream = container.add_stream(codec, rate=fps, options={"g": str(keys), **finest})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for frame in range(frames):
            pixels = np.full((64, 96, 3), shade(first + frame), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    if codec == "libsvtav1" and hasattr(os, "sched_setscheduler"):
        # For root this encoder makes the process a real-time one, before which all others on the machine wait.
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def seen(image) -> int:
    """Which frame of `write_video` an image is."""
    return round((float(np.asarray(image).mean()) - 8) / 6)


def _frame_of(path: str, frame: int) -> int:
    return seen(read_frame(path, frame / FPS))


@pytest.fixture(params=CODECS)
def video(request, tmp_path):
    write_video(tmp_path / "a.mp4", 30, codec=request.param)
    return str(tmp_path / "a.mp4")


class TestReadFrame:
    @pytest.mark.parametrize("order", [range(30), range(29, -1, -1), [0, 29, 13, 12, 11, 13, 13, 1, 28, 27, 5]])
    def test_any_order(self, video, order):
        for frame in order:
            assert seen(read_frame(video, frame / FPS)) == frame

    @pytest.mark.parametrize("shift", [-0.45, -0.2, 0.2, 0.45])
    def test_nearest_within_half_a_frame(self, video, shift):
        for frame in (1, 7, 11, 12, 13, 28):
            assert seen(read_frame(video, (frame + shift) / FPS)) == frame

    def test_time_stamps_in_single_precision(self, video):
        for frame in range(30):
            assert seen(read_frame(video, float(np.float32(frame / FPS)))) == frame

    @pytest.mark.parametrize("seconds", [3.0, 100.0, -0.1])
    def test_behind_the_end(self, video, seconds):
        with pytest.raises(RowError, match="no frame at"):
            read_frame(video, seconds)
        assert seen(read_frame(video, 2.9)) == 29

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({}, "no seconds"),
            ({"seconds": None}, "no seconds"),
            ({"seconds": float("nan")}, "nan, not a number of seconds"),
            ({"seconds": "soon"}, "'soon', not a number of seconds"),
            ({"seconds": 1.0, "fps": 2}, r"'fps' \(2\), which is not read: a frame has video and seconds alone"),
            ({"video": None, "path": "a.png", "seconds": 1.0}, "seconds and no video"),
        ],
    )
    def test_an_image_of_a_video_has_its_time(self, video, given, why):
        with pytest.raises(RowError, match=why):
            read_image({"video": video, **given}, Path())

    @pytest.mark.lengthy
    def test_threads(self, video):
        """Several at once in one file, each its own way."""
        orders = [range(30), range(29, -1, -1), [*range(0, 30, 7)] * 4]

        def follow(order) -> bool:
            return all(seen(read_frame(video, frame / FPS)) == frame for _ in range(3) for frame in order)

        with ThreadPoolExecutor(len(orders)) as pool:
            assert all(pool.map(follow, orders))

    @pytest.mark.lengthy
    def test_processes(self, video):
        """A process that forks while a file is open reads for itself."""
        assert seen(read_frame(video, 1.0)) == 10
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            there = pool.map(_frame_of, [video] * 30, range(29, -1, -1))
            assert [seen(read_frame(video, frame / FPS)) for frame in range(30)] == list(range(30))
            assert list(there) == list(range(29, -1, -1))

    def test_no_threads_of_its_own(self, video):
        before = psutil.Process().num_threads()
        assert seen(read_frame(video, 1.0)) == 10
        assert psutil.Process().num_threads() == before

    def test_size_and_mode(self, video):
        image = read_frame(video, 0.0)
        assert (image.size, image.mode) == ((96, 64), "RGB")

    def test_more_files_than_stay_open(self, tmp_path):
        paths = [tmp_path / f"{number}.mp4" for number in range(20)]
        for number, path in enumerate(paths):
            write_video(path, 2, first=number)
        for _ in range(2):
            assert [seen(read_frame(str(path), 0.1)) for path in paths] == list(range(1, 21))

    @pytest.mark.parametrize("content", [b"", b"no video at all", None])
    def test_no_video(self, tmp_path, content):
        path = tmp_path / "torn.mp4"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(RowError, match=r"torn\.mp4"):
            read_frame(str(path), 0.0)

    def test_cut_off(self, video):
        path = Path(video)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(RowError, match=r"a\.mp4"):
            read_frame(video, 0.0)


def with_videos(folder: Path, version: str, lengths: list[int]) -> None:
    """Turns the camera of a written data set into videos: joined in one file in 3.0, one per episode in 2.1."""
    column = "observation.images.top"
    info = json.loads((folder / "meta" / "info.json").read_text())
    info["features"][column] |= {"dtype": "video", "info": {"video.fps": FPS, "video.codec": "mpeg4"}}
    if version == "v3.0":
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        write_video(folder / "videos" / column / "chunk-000" / "file-000.mp4", sum(lengths))
        path = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
        listed = pq.read_table(path).to_pylist()
        for row in listed:
            row |= {f"videos/{column}/chunk_index": 0, f"videos/{column}/file_index": 0}
            row[f"videos/{column}/from_timestamp"] = row["dataset_from_index"] / FPS
            row[f"videos/{column}/to_timestamp"] = row["dataset_to_index"] / FPS
        pq.write_table(pa.Table.from_pylist(listed), path)
    else:
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        for number, length in enumerate(lengths):
            write_video(
                folder / "videos" / "chunk-000" / column / f"episode_{number:06d}.mp4",
                length,
                first=sum(lengths[:number]),
            )
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    for file in folder.rglob("data/*/*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns([column]), file)


class TestDataSets:
    LENGTHS = (7, 1, 20)

    @pytest.fixture(params=["v3.0", "v2.1"])
    def folder(self, request, tmp_path):
        episodes = [episode(length, seed=length, cameras=("top", "wrist")) for length in self.LENGTHS]
        folder = write_lerobot(tmp_path / "robot", episodes, fps=FPS, version=request.param)
        with_videos(folder, request.param, list(self.LENGTHS))
        return folder

    def test_frame_for_frame(self, folder, read):
        rows = read(folder, chunk=2)
        assert [list(row["images"]) for row in rows] == [["top", "wrist"]] * sum(self.LENGTHS)
        assert [seen(read_image(row["images"]["top"], Path("/")).read()) for row in rows] == list(range(28))
        last = rows[-1]["images"]["top"]
        np.testing.assert_array_equal(decode_frame(last), np.asarray(read_image(last, Path("/")).read()))
        with pytest.raises(RowError, match="has no frame at 99"):
            decode_frame({**last, "seconds": 99.0})
        assert all("bytes" in row["images"]["wrist"] for row in rows)

    def test_missing_file(self, folder, data):
        video = min(folder.rglob("*.mp4"))
        video.unlink()
        data.on_bad_row = "skip"
        encoder = FramesEncoder()

        def build(on_bad_row):
            sources = resolve_sources(folder, data, frames=encoder.frames, report=lambda text: None)
            return build_dataset(sources, encoder, cache_dir=data.cache_dir, on_bad_row=on_bad_row)

        if video.name == "file-000.mp4":
            with pytest.raises(DataError, match="is missing"):
                build("fail")
        else:
            assert len(build("skip")) == 21  # all but the first episode

    def test_a_video_longer_than_its_episode(self, folder, data):
        """Its frames may be those of another time, so the episode's frames are bad rows; one more frame is none."""
        (source,) = resolve_sources(folder, data, frames=FrameOptions(), report=lambda text: None)

        def bad():
            return [str(row) for _, row in source.rows(source.files[0]) if isinstance(row, RowError)]

        assert bad() == []
        listed = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
        for more in (1, 4):
            if listed.is_file():
                rows = pq.read_table(listed).to_pylist()
                rows[0]["videos/observation.images.top/to_timestamp"] = (7 + more) / FPS
                pq.write_table(pa.Table.from_pylist(rows), listed)
            else:
                write_video(min(folder.rglob("*.mp4")), 7 + more)
            found = bad()
            assert len(found) == (7 if more > 1 else 0)
        assert found[0].startswith("episode 0, frame 0 (")
        assert f"goes on for {4 / FPS:.2f} s after the episode's last frame" in found[0]

    @pytest.mark.lengthy
    def test_other_videos_are_other_rows(self, folder, data):
        encoder = FramesEncoder()

        def fingerprint():
            sources = resolve_sources(folder, data, frames=encoder.frames, report=lambda text: None)
            return build_dataset(sources, encoder, cache_dir=data.cache_dir).fingerprint

        before = fingerprint()
        assert fingerprint() == before
        video = min(folder.rglob("*.mp4"))
        write_video(video, 28 if video.name == "file-000.mp4" else 7, first=1, keys=5)
        assert fingerprint() != before

    def test_without_pyav(self, folder, data, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "av", None)
        with pytest.raises(DataError, match="PyAV") as caught:
            resolve_sources(folder, data, frames=FrameOptions(), report=lambda text: None)
        assert "shardtune[video]" in str(caught.value)
