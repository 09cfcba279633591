"""LeRobot data sets: what is written is read frame for frame, and what others wrote in the published layouts too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.robot.episode import Episode
from shardtune.data.robot.images import decode_frame
from shardtune.data.robot.lerobot import open_lerobot
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.robot.pictures import encode_image
from shardtune.data.robot.representation import Representation
from shardtune.data.sources.other_frames import check_masks, notes_on_other_frames
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import Source
from shardtune.errors import ConfigError, DataError
from tests.data.robot.conftest import FramesEncoder, episode, pixels

VERSIONS = ("v3.0", "v2.1")
LENGTHS = (3, 150, 1, 64)


@pytest.fixture(params=VERSIONS)
def written(request, tmp_path):
    """A data set and what was written into it; in several files for version 3.0."""
    episodes = [episode(length, seed=seed, task=f"task {seed % 2}") for seed, length in enumerate(LENGTHS)]
    return write_lerobot(tmp_path / "robot", episodes, fps=10, version=request.param, file_mb=0), episodes


class TestRoundTrip:
    @pytest.mark.lengthy
    def test_frame_for_frame(self, written, read):
        folder, episodes = written
        rows = iter(read(folder, chunk=3, observations=3))
        for number, one in enumerate(episodes):
            for frame in range(len(one)):
                row = next(rows)
                assert (row["episode"], row["frame"], row["instruction"]) == (number, frame, one.task)
                assert row["dataset"] == "robot"
                assert list(row["images"]) == ["top", "wrist"]
                for camera, images in one.images.items():
                    np.testing.assert_array_equal(decode_frame(row["images"][camera]), images[frame])
                np.testing.assert_array_equal(row["state"], one.state[frame])
                following = [min(frame + step, len(one) - 1) for step in range(3)]
                np.testing.assert_array_equal(row["actions"], one.actions[following])
                assert row["action_is_pad"].tolist() == [frame + step >= len(one) for step in range(3)]
                for back, before in zip((2, 1), row["earlier"], strict=True):
                    place = max(0, frame - back)
                    assert before["is_pad"] == (frame < back)
                    np.testing.assert_array_equal(pixels(before["images"]["top"]), one.images["top"][place])
                    np.testing.assert_array_equal(before["state"], one.state[place])
                    np.testing.assert_array_equal(before["action"], one.actions[place])
        assert next(rows, None) is None

    def test_numbers_count_frames_from_1(self, written, data):
        (source,) = resolve_sources(written[0], data, frames=FrameOptions(), report=lambda text: None)
        numbers = [number for number, _ in source.rows(source.files[0])]
        assert numbers == list(range(1, sum(LENGTHS) + 1))

    def test_episodes_of_a_file_in_any_order(self, tmp_path, read):
        """As data sets that were merged have them: no chunk of actions goes on into the next episode."""
        made = [episode(length, seed=length, cameras=("top",), task=f"task {length}") for length in (4, 2, 3)]
        folder = write_lerobot(tmp_path / "robot", made, fps=10)

        def by_place():
            rows = read(folder, chunk=3, observations=2)
            return {(row["episode"], row["frame"]): repr(sorted(row.items())) for row in rows}

        before, (file,) = by_place(), folder.glob("data/*/*.parquet")
        table = pq.read_table(file)
        index = table["episode_index"].to_numpy()
        pq.write_table(table.take(np.concatenate([np.flatnonzero(index == number) for number in (2, 0, 1)])), file)
        assert by_place() == before

    def test_types(self, written, read):
        row = read(written[0], chunk=2)[0]
        assert (row["actions"].dtype, row["actions"].shape) == (np.float32, (2, 4))
        assert (row["state"].dtype, row["state"].shape) == (np.float32, (3,))
        assert (row["action_is_pad"].dtype, row["action_is_pad"].shape) == (bool, (2,))

    def test_all_frames_of_an_episode_have_one_digest(self, written, read):
        digests: dict[int, set[int]] = {}
        for row in read(written[0]):
            digests.setdefault(row["episode"], set()).add(row.digest)
        assert [len(one) for one in digests.values()] == [1] * len(LENGTHS)
        assert len(set.union(*digests.values())) == len(LENGTHS)

    def test_one_dimension_no_state_no_image(self, tmp_path, read):
        one = Episode({}, None, np.array([[1.0], [2.0]], np.float32), "go")
        write_lerobot(tmp_path / "small", [one], fps=5)
        rows = read(tmp_path / "small", chunk=2)
        assert [row["actions"].tolist() for row in rows] == [[[1.0], [2.0]], [[2.0], [2.0]]]
        assert [(row["state"], row["images"]) for row in rows] == [(None, {})] * 2

    def test_worked_example(self, tmp_path, read):
        """Two episodes of 3 and 2 frames, chunks of 4."""
        actions = [np.array([[1], [2], [3]], np.float32), np.array([[7], [8]], np.float32)]
        write_lerobot(tmp_path / "two", [Episode({}, None, one, "go") for one in actions], fps=5)
        rows = read(tmp_path / "two", chunk=4)
        assert [row["actions"].ravel().tolist() for row in rows] == [
            [1, 2, 3, 3],
            [2, 3, 3, 3],
            [3, 3, 3, 3],
            [7, 8, 8, 8],
            [8, 8, 8, 8],
        ]
        assert [row["action_is_pad"].astype(int).tolist() for row in rows] == [
            [0, 0, 0, 1],
            [0, 0, 1, 1],
            [0, 1, 1, 1],
            [0, 0, 1, 1],
            [0, 1, 1, 1],
        ]

    def test_jpeg(self, tmp_path, read):
        write_lerobot(tmp_path / "jpeg", [episode(2)], fps=5, image_form="jpeg")
        assert read(tmp_path / "jpeg")[0]["images"]["top"]["bytes"].startswith(b"\xff\xd8")


class TestWriter:
    def test_encoded_images_are_stored_as_they_came(self, tmp_path, read):
        whole = episode(3, cameras=("top",))
        jpeg = [encode_image(image, "jpeg") for image in whole.images["top"]]
        (tmp_path / "1.jpg").write_bytes(jpeg[1])
        given = [jpeg[0], tmp_path / "1.jpg", {"bytes": jpeg[2], "path": None}]
        one = replace(whole, images={"top": given, "wrist": episode(3).images["wrist"]})
        rows = read(write_lerobot(tmp_path / "robot", [one], fps=10))
        assert [row["images"]["top"]["bytes"] for row in rows] == jpeg
        info = json.loads((tmp_path / "robot" / "meta" / "info.json").read_text())
        assert info["features"]["observation.images.top"]["shape"] == [6, 8, 3]
        stats = json.loads((tmp_path / "robot" / "meta" / "stats.json").read_text())
        pixels = np.stack([decode_frame({"bytes": content}) for content in jpeg]) / 255
        np.testing.assert_allclose(np.ravel(stats["observation.images.top"]["mean"]), pixels.mean((0, 1, 2)), rtol=1e-6)
        again = Episode({"top": [row["images"]["top"] for row in rows]}, one.state, one.actions, one.task)
        copied = read(write_lerobot(tmp_path / "copy", [again], fps=10))
        assert [row["images"]["top"]["bytes"] for row in copied] == jpeg

    @pytest.mark.parametrize("name", ["a.npz", "a.npy"])
    def test_files_of_arrays_are_refused_with_the_way_out(self, tmp_path, data, name):
        (tmp_path / name).write_bytes(b"arrays")
        for spec in (tmp_path / name, tmp_path):
            with pytest.raises(DataError, match="with write_lerobot, one Episode"):
                resolve_sources(spec, data, frames=FrameOptions(), report=lambda text: None)

    @pytest.mark.parametrize(
        ("images", "message"),
        [
            ([b"", b""], "(?s)it is empty.*camera 'top', frame 0"),
            (["no.png", "no.png"], "(?s)no.png does not exist.*camera 'top', frame 0"),
            ([b"1"], "1 image for 2 frames"),
            ([encode_image(np.zeros((2, size, 3), np.uint8), "png") for size in (3, 4)], "4 x 2, the first one 3 x 2"),
        ],
    )
    def test_encoded_images_that_cannot_be_used(self, tmp_path, images, message):
        with pytest.raises(DataError, match=message):
            write_lerobot(tmp_path / "robot", [replace(episode(2), images={"top": images})], fps=10)
        assert not (tmp_path / "robot").exists()

    def test_the_datasets_library_loads_it(self, written):
        import datasets

        folder, episodes = written
        files = sorted(str(file) for file in folder.rglob("data/**/*.parquet"))
        assert len(files) == len(LENGTHS)
        loaded = datasets.Dataset.from_parquet(files, cache_dir=str(folder / "hf"))
        assert isinstance(loaded.features["observation.images.top"], datasets.Image)
        np.testing.assert_array_equal(np.asarray(loaded[3]["observation.images.top"]), episodes[1].images["top"][0])
        np.testing.assert_array_equal(np.float32(loaded[3]["action"]), episodes[1].actions[0])

    def test_meta_of_version_3(self, tmp_path):
        folder = write_lerobot(tmp_path / "robot", [episode(2, task="a"), episode(5, task="b")], fps=10)
        info = json.loads((folder / "meta" / "info.json").read_text())
        assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v3.0", 2, 7)
        assert info["features"]["observation.images.top"]["shape"] == [6, 8, 3]
        tasks = pd.read_parquet(folder / "meta" / "tasks.parquet")
        assert tasks.index.tolist() == ["a", "b"]
        assert tasks["task_index"].tolist() == [0, 1]
        listed = pd.read_parquet(folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        assert listed["dataset_from_index"].tolist() == [0, 2]
        assert listed["dataset_to_index"].tolist() == [2, 7]
        assert pq.ParquetFile(folder / "data" / "chunk-000" / "file-000.parquet").num_row_groups == 2

    def test_statistics_of_all_frames(self, written):
        folder, episodes = written
        stats = json.loads((folder / "meta" / "stats.json").read_text())["action"]
        actions = np.concatenate([one.actions for one in episodes]).astype(np.float64)
        np.testing.assert_allclose(stats["mean"], actions.mean(0), rtol=1e-12)
        np.testing.assert_allclose(stats["std"], actions.std(0), rtol=1e-12)
        assert stats["count"] == [len(actions)]

    def test_an_existing_directory_is_left_alone(self, tmp_path):
        (tmp_path / "robot").mkdir()
        with pytest.raises(DataError, match="the directory exists"):
            write_lerobot(tmp_path / "robot", [episode(2)], fps=10)

    @pytest.mark.parametrize("version", VERSIONS)
    def test_nothing_appears_when_episodes_fail(self, tmp_path, version):
        def failing():
            yield episode(2)
            raise RuntimeError("the robot fell")

        with pytest.raises(RuntimeError):
            write_lerobot(tmp_path / "robot", failing(), fps=10, version=version)
        assert list(tmp_path.iterdir()) == []

    def test_episodes_of_other_cameras(self, tmp_path):
        with pytest.raises(DataError, match="episode 1"):
            write_lerobot(tmp_path / "robot", [episode(2), episode(2, cameras=("top",))], fps=10)
        with pytest.raises(DataError, match="no episode"):
            write_lerobot(tmp_path / "robot", [], fps=10)

    def test_one_episode_at_a_time(self, tmp_path):
        """The next episode is asked for when the one before is on disk."""
        sizes = []

        def counted():
            for seed in range(3):
                files = (tmp_path).rglob("*.parquet")
                sizes.append(len(list(files)))
                yield episode(2, seed=seed)

        write_lerobot(tmp_path / "robot", counted(), fps=10, version="v2.1")
        assert sizes == [0, 1, 2]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"actions": np.zeros((0, 4), np.float32)}, "no frame"),
            ({"actions": np.zeros((2, 4))}, "float64"),
            ({"actions": np.array([[1, np.nan], [0, 0]], np.float32)}, "frame 0 holds"),
            ({"state": np.zeros((3, 4), np.float32)}, r"float32 \[3, 4\]"),
            ({"images": {"top": np.zeros((2, 3, 6, 8), np.uint8)}}, "camera 'top'"),
        ],
    )
    def test_bad_episodes(self, changes, message):
        good = {"images": {}, "state": None, "actions": np.zeros((2, 4), np.float32), "task": "go"}
        with pytest.raises(DataError, match=message):
            Episode(**(good | changes))


# -- as others write them ------------------------------------------------------------------------------------------


def write_json_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def foreign(tmp_path):
    """A data set of version 2.1, made by hand after the published layout, two episodes of two frames."""
    folder = tmp_path / "xarm"
    (folder / "meta").mkdir(parents=True)
    vector = {"dtype": "float32", "shape": [2]}
    scalar = {"shape": [1], "names": None}
    info = {
        "codebase_version": "v2.1",
        "robot_type": "unknown",
        "total_episodes": 2,
        "total_frames": 4,
        "total_tasks": 2,
        "total_videos": 0,
        "total_chunks": 2,
        "chunks_size": 1,
        "fps": 15,
        "splits": {"train": "0:2"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": {
            "observation.image": {"dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channel"]},
            "observation.state": {**vector, "names": {"motors": ["motor_0", "motor_1"]}},
            "action": {**vector, "names": {"motors": ["motor_0", "gripper"]}},
            "episode_index": {"dtype": "int64", **scalar},
            "frame_index": {"dtype": "int64", **scalar},
            "timestamp": {"dtype": "float32", **scalar},
            "next.reward": {"dtype": "float32", **scalar},
            "next.done": {"dtype": "bool", **scalar},
            "index": {"dtype": "int64", **scalar},
            "task_index": {"dtype": "int64", **scalar},
        },
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    write_json_lines(
        folder / "meta" / "tasks.jsonl", [{"task_index": 0, "task": "lift"}, {"task_index": 1, "task": "put"}]
    )
    write_json_lines(
        folder / "meta" / "episodes.jsonl",
        [{"episode_index": 0, "tasks": ["put"], "length": 2}, {"episode_index": 1, "tasks": ["lift"], "length": 2}],
    )
    stats = {"action": {"min": [0, 0], "max": [1, 1], "mean": [0, 0], "std": [1, 1], "count": [2]}}
    write_json_lines(
        folder / "meta" / "episodes_stats.jsonl", [{"episode_index": one, "stats": stats} for one in range(2)]
    )
    for one in range(2):
        frames = [
            {
                "observation.image": {"bytes": encode_image(colour(one, frame), "png"), "path": f"frame_{frame}.png"},
                "observation.state": [one + 0.5, float(frame)],
                "action": [one * 10.0 + frame, -1.0],
                "episode_index": one,
                "frame_index": frame,
                "timestamp": frame / 15,
                "next.reward": 0.0,
                "next.done": frame == 1,
                "index": one * 2 + frame,
                "task_index": 1 - one,
            }
            for frame in range(2)
        ]
        table = pa.Table.from_pylist(frames)  # lists of variable length in float64, as some converters leave them
        path = folder / "data" / f"chunk-{one:03d}" / f"episode_{one:06d}.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(table, path)
    return folder


def colour(one: int, frame: int) -> np.ndarray:
    return np.full((6, 8, 3), 50 * one + 100 * frame, np.uint8)


def change_info(folder: Path, **changes) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestForeign:
    def test_version_2_1_by_hand(self, foreign, read):
        rows = read(foreign, chunk=2)
        assert [row["actions"][:, 0].tolist() for row in rows] == [[0, 1], [1, 1], [10, 11], [11, 11]]
        assert [row["action_is_pad"].tolist() for row in rows] == [[False, False], [False, True]] * 2
        assert [row["instruction"] for row in rows] == ["put", "put", "lift", "lift"]
        assert [row["state"].tolist() for row in rows] == [[0.5, 0], [0.5, 1], [1.5, 0], [1.5, 1]]
        assert [pixels(row["images"]["image"])[0, 0, 0] for row in rows] == [0, 100, 50, 150]
        assert open_lerobot(foreign).names("action") == ["motor_0", "gripper"]

    def test_version_2_0(self, foreign, read):
        (foreign / "meta" / "episodes_stats.jsonl").unlink()  # of version 2.1
        change_info(foreign, codebase_version="v2.0")
        assert len(read(foreign)) == 4

    def test_version_3_0_by_hand(self, foreign, tmp_path, read):
        """The same frames joined in one file, with the lists as tables: the task's text is the index of its table."""
        folder = tmp_path / "joined"
        (folder / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        (folder / "data" / "chunk-000").mkdir(parents=True)
        tables = [pq.read_table(file) for file in sorted(foreign.rglob("data/*/*.parquet"))]
        pq.write_table(pa.concat_tables(tables), folder / "data" / "chunk-000" / "file-000.parquet")
        pd.DataFrame({"task_index": [0, 1]}, index=["lift", "put"]).to_parquet(folder / "meta" / "tasks.parquet")
        listed = [
            {
                "episode_index": one,
                "tasks": [["put", "lift"][one]],
                "length": 2,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": 2 * one,
                "dataset_to_index": 2 * one + 2,
                "stats/action/mean": [0.0, 0.0],
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            for one in range(2)
        ]
        pq.write_table(pa.Table.from_pylist(listed), folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        info = json.loads((foreign / "meta" / "info.json").read_text()) | {"codebase_version": "v3.0"}
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        (folder / "meta" / "info.json").write_text(json.dumps(info))
        before, after = read(foreign, chunk=3), read(folder, chunk=3)
        assert [(row["episode"], row["frame"], row["instruction"]) for row in after] == [
            (row["episode"], row["frame"], row["instruction"]) for row in before
        ]
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one["actions"], other["actions"])
            assert one["images"]["image"] == other["images"]["image"]

    def test_splits(self, foreign, read):
        change_info(foreign, splits={"train": "0:1", "test": "1:2"})
        assert {row["episode"] for row in read(foreign)} == {0}
        assert {row["episode"] for row in read(foreign, purpose="eval")} == {1}
        assert {row["episode"] for row in read({"path": str(foreign), "split": "test"})} == {1}
        with pytest.raises(DataError, match="no split 'val'"):
            read({"path": str(foreign), "split": "val"})
        change_info(foreign, splits={"train": "0:1"})
        assert {row["episode"] for row in read(foreign)} == {0}

    @pytest.mark.parametrize("split", ["0,2", "0:50%", "0:-1", [0, 2], 2])
    def test_splits_that_are_no_ranges(self, foreign, read, split):
        change_info(foreign, splits={"train": split})
        with pytest.raises(DataError, match=r"the split 'train' is .* not a range of episodes"):
            read(foreign)

    def test_columns(self, foreign, read):
        columns = {"images.front": "observation.image", "action": "observation.state", "state": "action"}
        row = read({"path": str(foreign), "columns": columns})[1]
        assert list(row["images"]) == ["front"]
        assert (row["actions"].tolist(), row["state"].tolist()) == ([[0.5, 1]], [1, -1])

    @pytest.mark.parametrize("info", [{"info": {"is_depth_map": True}}, {"video_info": {"video.is_depth_map": True}}])
    def test_maps_of_depth_are_no_cameras(self, foreign, data, read, info):
        features = json.loads((foreign / "meta" / "info.json").read_text())["features"]
        features["observation.image"] |= info
        features["observation.effort"] = features["observation.state"]
        change_info(foreign, features=features)
        assert [row["images"] for row in read(foreign)] == [{}] * 4
        lines: list[str] = []
        resolve_sources(str(foreign), data, frames=FrameOptions(), report=lines.append)
        assert lines[0].endswith("; not read: next.reward, next.done, observation.effort")
        assert "not read are observation.image (maps of depth" in lines[1]
        with pytest.raises(DataError, match="no images in colour"):
            read({"path": str(foreign), "columns": {"images.top": "observation.image"}})

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"images.front": "observation.images.front"}, "'observation.images.front', which is no column"),
            ({"images.front": "action"}, "holds float32, no images in colour"),
            ({"question": "action"}, "'question', which robot data do not have"),
        ],
    )
    def test_wrong_columns(self, foreign, read, columns, message):
        with pytest.raises(DataError, match=message):
            read({"path": str(foreign), "columns": columns})

    def test_data_set_of_the_hub(self, foreign, data, read, monkeypatch):
        """As the Hub's client leaves it in its cache, without a network."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        stored = Path(data.cache_dir) / "hub" / "datasets--arms--xarm"
        revision = "0" * 40
        (stored / "refs").mkdir(parents=True)
        (stored / "refs" / "main").write_text(revision)
        shutil.copytree(foreign, stored / "snapshots" / revision)
        rows = read("arms/xarm", chunk=2)
        assert len(rows) == 4
        assert {row["dataset"] for row in rows} == {"xarm"}
        with pytest.raises(DataError, match="cannot be loaded"):
            read("arms/other")

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (["x", "gripper"], ["x", "gripper"]),
            ({"motors": ["x", "gripper"]}, ["x", "gripper"]),
            ({"arm": ["x"], "hand": ["gripper"]}, ["x", "gripper"]),
            ({"gripper": 1, "x": 0}, ["x", "gripper"]),
            (None, None),
            (["dim"], None),
        ],
    )
    def test_names(self, foreign, names, expected):
        features = json.loads((foreign / "meta" / "info.json").read_text())["features"]
        features["action"]["names"] = names
        change_info(foreign, features=features)
        assert open_lerobot(foreign).names("action") == expected


# -- bad data ------------------------------------------------------------------------------------------------------


def change_frame(folder: Path, one: int, frame: int, **values) -> None:
    path = folder / "data" / f"chunk-{one:03d}" / f"episode_{one:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[frame] |= {name.replace("__", "."): value for name, value in values.items()}
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


class TestBadData:
    @pytest.fixture
    def build(self, data):
        def run(spec, chunk=2, on_bad_row="fail"):
            data.on_bad_row = on_bad_row
            encoder = FramesEncoder(chunk)
            sources = resolve_sources(spec, data, frames=encoder.frames, report=lambda text: None)
            return build_dataset(sources, encoder, cache_dir=data.cache_dir, on_bad_row=on_bad_row)

        return run

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_action_that_is_no_number(self, foreign, build, value):
        change_frame(foreign, 1, 1, action=[value, 0.0])
        with pytest.raises(
            DataError, match=r"episode 1, frame 0 \(data/chunk-001/episode_000001.parquet\): 1 frames on"
        ):
            build(foreign)
        kept = build(foreign, on_bad_row="skip")
        assert len(kept) == 2  # both frames of the episode look at it
        assert kept.report.count("bad") == 2
        assert len(build(foreign, chunk=1, on_bad_row="skip")) == 3

    def test_state_that_is_no_number(self, foreign, build):
        change_frame(foreign, 0, 1, observation__state=[0.0, float("nan")])
        with pytest.raises(DataError, match="episode 0, frame 1"):
            build(foreign)
        assert len(build(foreign, on_bad_row="skip")) == 3

    def test_truncated_image(self, foreign, build):
        whole = encode_image(episode(1).images["top"][0], "png")
        change_frame(foreign, 0, 1, observation__image={"bytes": whole[: len(whole) // 2], "path": None})
        with pytest.raises(DataError, match="row 2") as caught:
            build(foreign)
        assert "episode 0, frame 1 (data/chunk-000/episode_000000.parquet)" in str(caught.value)
        assert "torn" in str(caught.value)
        assert len(build(foreign, on_bad_row="skip")) == 3

    def test_missing_image_file(self, foreign, build):
        change_frame(foreign, 0, 0, observation__image={"bytes": None, "path": "images/a.png"})
        with pytest.raises(DataError, match=r"camera 'image': the image file images/a\.png is missing"):
            build(foreign)

    def test_image_files(self, foreign, read):
        (foreign / "images").mkdir()
        (foreign / "images" / "a.png").write_bytes(encode_image(colour(0, 0), "png"))
        change_frame(foreign, 0, 0, observation__image={"bytes": None, "path": "images/a.png"})
        assert read(foreign)[0]["images"]["image"] == {"path": str(foreign / "images" / "a.png")}

    def test_episode_without_a_frame(self, foreign, build):
        path = foreign / "data" / "chunk-000" / "episode_000000.parquet"
        pq.write_table(pq.read_table(path).slice(0, 0), path)
        listed = (foreign / "meta" / "episodes.jsonl").read_text().replace('"length": 2', '"length": 0', 1)
        (foreign / "meta" / "episodes.jsonl").write_text(listed)
        with pytest.raises(DataError, match="episode 0 has no frame"):
            build(foreign)
        assert len(build(foreign, on_bad_row="skip")) == 2

    def test_missing_frames(self, foreign, read):
        path = foreign / "data" / "chunk-001" / "episode_000001.parquet"
        pq.write_table(pq.read_table(path).slice(0, 1), path)
        with pytest.raises(DataError, match="episode 1 has 1 frames here and 2 by meta/"):
            read(foreign)

    def test_frames_out_of_order(self, foreign, read):
        change_frame(foreign, 0, 0, frame_index=1)
        with pytest.raises(DataError, match="the frames of episode 0 are not in order"):
            read(foreign)

    def test_missing_file(self, foreign, read):
        (foreign / "data" / "chunk-001" / "episode_000001.parquet").unlink()
        with pytest.raises(DataError, match="episode 1 should be"):
            read(foreign)

    def test_torn_file(self, foreign, read):
        path = foreign / "data" / "chunk-001" / "episode_000001.parquet"
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            read(foreign)

    @pytest.mark.parametrize("column", ["action", "observation.image", "task_index", "episode_index"])
    def test_missing_column(self, foreign, read, column):
        path = foreign / "data" / "chunk-000" / "episode_000000.parquet"
        pq.write_table(pq.read_table(path).drop_columns([column]), path)
        with pytest.raises(DataError, match=f"the column '{column}' is missing"):
            read(foreign)

    def test_wrong_type(self, foreign, read):
        path = foreign / "data" / "chunk-000" / "episode_000000.parquet"
        table = pq.read_table(path)
        place = table.schema.get_field_index("action")
        pq.write_table(table.set_column(place, "action", pa.array(["left", "right"])), path)
        with pytest.raises(DataError, match="'action' holds string, not vectors of numbers"):
            read(foreign)

    def test_ragged_actions(self, foreign, read):
        change_frame(foreign, 0, 1, action=[1.0, 2.0, 3.0])
        with pytest.raises(DataError, match="3 values in row 2, 2 before"):
            read(foreign)

    def test_unknown_task(self, foreign, read):
        change_frame(foreign, 0, 1, task_index=7)
        with pytest.raises(DataError, match="task_index 7"):
            read(foreign)

    @pytest.mark.parametrize("version", ["v1.6", "v4.0", None])
    def test_other_versions(self, foreign, read, version):
        change_info(foreign, codebase_version=version)
        with pytest.raises(DataError, match=f"the version {version}, which is not read"):
            read(foreign)

    def test_torn_meta(self, foreign, read):
        (foreign / "meta" / "tasks.jsonl").unlink()
        with pytest.raises(DataError, match="cannot be read"):
            read(foreign)
        (foreign / "meta" / "info.json").write_text("{")
        with pytest.raises(DataError, match="cannot be read as JSON"):
            read(foreign)

    def test_a_model_of_texts(self, foreign, data):
        with pytest.raises(DataError, match="robot data set") as caught:
            resolve_sources(foreign, data)
        assert "vision_language_action" in str(caught.value)


class TestCache:
    @pytest.fixture
    def build(self, data):
        def run(spec, chunk=2, workers=0):
            encoder = FramesEncoder(chunk)
            sources = resolve_sources(spec, data, frames=encoder.frames, report=lambda text: None)
            return build_dataset(sources, encoder, cache_dir=data.cache_dir, num_workers=workers)

        return run

    @pytest.mark.lengthy
    def test_the_key_holds_the_chunk(self, written, build):
        first = build(written[0])
        assert build(written[0]).fingerprint == first.fingerprint
        other = build(written[0], chunk=3)
        assert other.fingerprint != first.fingerprint
        assert other.row(0).fields["actions"].shape == (3, 4)

    def test_the_key_holds_the_content(self, foreign, build):
        first = build(foreign)
        change_frame(foreign, 0, 0, action=[5.0, 5.0])
        second = build(foreign)
        assert second.fingerprint != first.fingerprint
        assert second.row(0).fields["actions"][0].tolist() == [5, 5]

    def test_the_place_does_not_matter_where_images_are_inside(self, foreign, build, tmp_path):
        first = build(foreign)
        shutil.move(foreign, tmp_path / "elsewhere" / "xarm")
        assert build(tmp_path / "elsewhere" / "xarm").fingerprint == first.fingerprint

    @pytest.mark.lengthy
    def test_processes_share_the_work(self, written, build, monkeypatch, data, tmp_path):
        alone = build(written[0], chunk=3)
        monkeypatch.setattr("shardtune.data.cache.build._SMALL_FILE", 0)
        data.cache_dir = str(tmp_path / "other")
        shared = build(written[0], chunk=3, workers=2)
        assert shared.fingerprint == alone.fingerprint
        for row in range(0, len(alone), 7):
            for name, values in alone.row(row).fields.items():
                np.testing.assert_array_equal(shared.row(row).fields[name], values)

    def test_mixed_sets_have_weights_and_keys(self, tmp_path, build):
        write_lerobot(tmp_path / "a", [episode(6)], fps=5)
        write_lerobot(tmp_path / "b", [episode(9)], fps=5, version="v2.1")
        mixed = build([{"path": str(tmp_path / "a"), "weight": 2.0}, {"path": str(tmp_path / "b"), "name": "other"}])
        assert [(span.name, span.start, span.stop, span.weight) for span in mixed.sources] == [
            ("a", 0, 6, 2.0),
            ("other", 6, 15, 1.0),
        ]
        for span in mixed.sources:
            names = {mixed.row(row).fields["dataset"].tobytes().decode() for row in range(span.start, span.stop)}
            assert names == {span.name}

    def test_a_share_for_evaluation_holds_whole_episodes(self, tmp_path, build):
        write_lerobot(tmp_path / "a", [episode(4, seed=seed, task=str(seed)) for seed in range(30)], fps=5)
        train, held_out = build(tmp_path / "a").split_by_hash(0.3)
        sides = [
            {part.row(row).fields["instruction"].tobytes() for row in range(len(part))} for part in (train, held_out)
        ]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 30

    def test_a_row_error_has_a_place(self, foreign, data):
        change_frame(foreign, 0, 0, action=[float("nan"), 0.0])
        data.on_bad_row = "skip"
        (source,) = resolve_sources(foreign, data, frames=FrameOptions(), report=lambda text: None)
        errors = [row for _, row in source.rows(source.files[0]) if isinstance(row, RowError)]
        assert [error.reason for error in errors] == [
            "episode 0, frame 0 (data/chunk-000/episode_000000.parquet): the action is [nan, 0.0]"
        ]


def test_data_sets_whose_numbers_mean_other_things_are_named(tmp_path: Path, data) -> None:
    """Dimensions in another order, or frames at another rate, were mixed without a word."""
    names = {"one": ["x", "y", "z", "grip"], "two": ["grip", "y", "z", "x"], "three": ["x", "y", "z", "grip"]}
    for number, (name, dimensions) in enumerate(names.items()):
        rate = 30 if name == "three" else 10
        write_lerobot(tmp_path / name, [episode(3, seed=number)], fps=rate, action_names=dimensions)
    sources = resolve_sources([*map(tmp_path.joinpath, names)], data, frames=FrameOptions(), report=lambda text: None)
    assert [note.replace(f"{tmp_path}/", "") for note in notes_on_other_frames(sources)] == [
        "two: dimension 0 of its action is grip, in one x (2 of 4 names differ): dimensions are taken by their places, "
        "and data.transform may order them",
        "three: it has 30 frames a second, one 10: the same number of actions is another time",
    ]


def test_a_list_of_episodes_that_is_not_complete_is_refused(foreign) -> None:
    """One that lacks episodes, or has one twice, as two copies of one file give."""
    change_info(foreign, total_episodes=3)
    with pytest.raises(DataError, match="total_episodes is 3, and meta/ lists 2 episodes") as error:
        open_lerobot(foreign)
    assert "write total_episodes: 2" in str(error.value.remedy)
    change_info(foreign, total_episodes=2)
    file = foreign / "meta" / "episodes.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match="meta/ lists episode 0 more than once"):
        open_lerobot(foreign)


def test_a_vector_that_is_null_is_named(written, read) -> None:
    folder, _ = written
    file = sorted(folder.glob("data/**/*.parquet"))[1]
    table = pq.read_table(file)
    at, values = table.schema.get_field_index("action"), table["action"].to_pylist()
    values[1] = None
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), file)
    with pytest.raises(DataError, match="the column 'action' is null in row 2"):
        list(read(folder))


def test_an_episode_of_another_shape_is_described(tmp_path) -> None:
    odd = replace(episode(2), images={"top": np.zeros((2, 4, 6, 3), np.uint8)})
    with pytest.raises(DataError, match=r"it has the cameras top of 4 x 6 \(height x width\), actions of \d numbers"):
        write_lerobot(tmp_path / "robot", [episode(3), odd], fps=10)


def test_a_mask_by_names_keeps_the_same_dimensions_where_statistics_are_shared(tmp_path: Path, data) -> None:
    """Held-out rows were relative in other dimensions than the model whose loss they measure."""
    for name, dimensions in {"one": ["x", "y", "z", "grip"], "two": ["grip", "x", "y", "z"]}.items():
        felt = replace(episode(3), state=np.zeros((3, 4), np.float32))
        write_lerobot(tmp_path / name, [felt], fps=10, action_names=dimensions)

    def sources(held_out: str, mask: dict[str, bool] | list[bool]) -> list[Source]:
        frames = FrameOptions(representation=Representation.of("relative", mask))
        specs = [str(tmp_path / "one"), {"path": str(tmp_path / "two"), "name": held_out}]
        return [one for spec in specs for one in resolve_sources(spec, data, frames=frames, report=lambda text: None)]

    with pytest.raises(ConfigError, match=r"it keeps \[0\] absolute in .*two, and \[3\] in .*one, whose statistics"):
        check_masks(sources("one", {"grip": False}))
    check_masks(sources("two", {"grip": False}))  # by statistics of their own
    check_masks(sources("one", [True, True, True, False]))


def test_rates_of_frames_that_cannot_be_compared(tmp_path: Path, data) -> None:
    """One without `fps` was mixed with others without a word; one in words ended in a traceback."""
    for number, name in enumerate(["one", "two"]):
        write_lerobot(tmp_path / name, [episode(3, seed=number)], fps=10)
    sources = resolve_sources(
        [tmp_path / "one", tmp_path / "two"], data, frames=FrameOptions(), report=lambda text: None
    )
    assert list(notes_on_other_frames(sources)) == []
    info = tmp_path / "two" / "meta" / "info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps({**content, "fps": None}))
    (note,) = notes_on_other_frames(sources)
    assert "has no fps in meta/info.json, " in note
    info.write_text(json.dumps({**content, "fps": "30"}))
    with pytest.raises(DataError, match="fps is '30', not a number of frames a second"):
        list(notes_on_other_frames(sources))
