"""Recordings of HDF5 and RLDS: rows are those of the same episodes in a LeRobot data set; faults name the episode."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest

from shardtune.data.action_statistics import source_statistics, to_json
from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import FrameOptions
from shardtune.data.robot.content import content_digest
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.robot.pictures import encode_image
from shardtune.data.robot.rlds import rlds_episodes
from shardtune.data.robot.tfrecord import example_features, read_records
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.data.robot.conftest import FramesEncoder, episode
from tests.data.robot.recorders import example, framed, write_aloha, write_rlds, write_robomimic

LENGTHS = (3, 66, *[1] * 9)


def episodes(lengths=LENGTHS, cameras=("top", "wrist")):
    return [episode(length, seed=seed, task=f"task {seed % 2}", cameras=cameras) for seed, length in enumerate(lengths)]


def jpeg(images):
    return [encode_image(image, "jpeg") for image in images]


@pytest.fixture(scope="module", params=["aloha", "aloha, encoded", "robomimic", "rlds"])
def recorded(request, tmp_path_factory):
    """A recording, and the same episodes as a LeRobot data set of the same name."""
    folder, whole = tmp_path_factory.mktemp("recorded"), episodes()
    stored = whole
    match request.param.partition(","):
        case "aloha", _, encoded:
            path = write_aloha(folder / "robot", whole, encoded=bool(encoded))
            if encoded:
                stored = [replace(one, images={name: jpeg(each) for name, each in one.images.items()}) for one in whole]
        case "robomimic", _, _:
            path = write_robomimic(folder / "robot.hdf5", whole)
        case _:
            path = write_rlds(folder / "robot", whole).parent
    name = "robot_set" if request.param == "rlds" else "robot"
    return path, write_lerobot(folder / "lerobot" / name, stored, fps=10)


class TestEqualToLeRobot:
    @pytest.mark.lengthy
    def test_rows(self, recorded, read):
        """Bit for bit, chunks, earlier frames, and the episodes' hashes, by which a share is held out."""
        found, wanted = (read(path, chunk=3, observations=3) for path in recorded)
        assert len(found) == len(wanted) == sum(LENGTHS)
        for one, other in zip(found, wanted, strict=True):
            assert one.digest == other.digest
            same(dict(one), dict(other))

    @pytest.mark.lengthy
    def test_statistics_and_cache(self, recorded, data):
        encoder, sets = FramesEncoder(2), []
        for path in (*recorded, recorded[0]):
            sources = resolve_sources(path, data, frames=encoder.frames, report=lambda text: None)
            statistics = to_json(source_statistics(sources, cache_dir=data.cache_dir))
            sets.append((statistics, build_dataset(sources, encoder, cache_dir=data.cache_dir)))
        (found, rows), (wanted, other_rows), (_, again) = sets
        for one in wanted.values():
            one["action"].pop("names", None)
        assert found == wanted
        assert len(rows) == len(other_rows) == sum(LENGTHS)
        for row in range(0, sum(LENGTHS), 9):
            same(dict(rows.row(row).fields), dict(other_rows.row(row).fields))
        assert again.fingerprint == rows.fingerprint


def same(found, wanted):
    """Equal values of equal types, through containers."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
    if isinstance(wanted, dict | list):
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            same(found[key], wanted[key])
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


def test_content_is_known_without_reading_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("shardtune.data.cache_directory._SETTLED_SECONDS", -1.0)
    root, folder = tmp_path / "cache", write_aloha(tmp_path / "robot", episodes((2, 1)))
    first = content_digest(folder, root)
    with monkeypatch.context() as patch:
        patch.setattr("shardtune.data.cache_directory.file_digest", None)
        assert content_digest(folder, root) == first
    moved = folder.rename(tmp_path / "moved")
    assert content_digest(moved, root) == first
    with h5py.File(moved / "episode_1.hdf5", "a") as file:
        file["action"][0, 0] = 5
    assert content_digest(moved, root) != first
    shard = write_rlds(tmp_path / "set", episodes((1,)), files=1) / "robot_set-train.tfrecord-00000-of-00001"
    first = content_digest(shard, root)
    (shard.parent / "features.json").write_text("{} ")
    assert content_digest(shard, root) != first


def title(spec, data):
    """What is said of the data."""
    said = []
    resolve_sources(spec, data, frames=FrameOptions(), report=said.append)
    return said


class TestHdf5:
    @pytest.fixture
    def demos(self, tmp_path):
        return write_robomimic(tmp_path / "demos.hdf5", episodes((2, 1, 1, 3)), {"train": (0, 3), "valid": (1,)})

    def test_splits_are_those_of_mask(self, demos, read, tmp_path):
        assert [(row["episode"], row["frame"]) for row in read(demos)] == [(0, 0), (0, 1), (3, 0), (3, 1), (3, 2)]
        assert [row["episode"] for row in read(demos, purpose="eval")] == [1]
        assert [row["episode"] for row in read({"path": str(demos), "split": "valid"})] == [1]
        with pytest.raises(DataError, match="there is no split 'half'"):
            read({"path": str(demos), "split": "half"})
        with pytest.raises(DataError, match="a file has no splits, so there is no 'half'"):
            read({"path": str(write_robomimic(tmp_path / "whole.h5", episodes((1,)))), "split": "half"})
        with h5py.File(demos, "a") as file:
            file["mask/few"] = np.array(["demo_2", "demo_9"], dtype="S")
        with pytest.raises(DataError, match="mask/few names demo_9, which is not there"):
            read({"path": str(demos), "split": "few"})

    def test_columns_by_name(self, demos, read, data):
        assert "data: demos: action: actions, state: obs/robot0_eef_pos + obs/robot0_eef_quat" in title(demos, data)[1]
        assert title(demos, data)[1].endswith("; not read: states")
        data.columns = {
            "action": "states + /actions",
            "state": "obs/robot0_eef_quat",
            "instruction": "lang",
            "images.hand": "obs/wrist",
        }
        first = read(demos)[0]
        whole = episodes((2,))[0]
        assert (list(first["images"]), first["instruction"]) == (["hand"], "task 0")
        np.testing.assert_array_equal(first["actions"][0], [*[0] * 9, *whole.actions[0]])
        np.testing.assert_array_equal(first["state"], whole.state[0, 1:2])
        for columns, message in (
            (
                {"action": "actions + speed"},
                r"names 'actions \+ speed', which is no column.*\n.*demos.hdf5: data/demo_0",
            ),
            ({"images.top": "actions"}, "'actions', named for the camera 'top', holds no images in colour"),
            ({"episode": "actions"}, "data.columns has 'episode', which robot data do not have"),
            ({"action": "speed"}, "there is no action: neither the file nor its groups"),
        ):
            data.columns = columns
            with pytest.raises(DataError, match=message):
                read(demos)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"obs/wrist": None}, r"the cameras are top here and top, wrist in \S+demos.hdf5: data/demo_0"),
            ({"actions": np.zeros((3, 5))}, r"the actions have 5 dimensions here and 4 in \S+demos.hdf5: data/demo_0"),
            ({"obs/robot0_eef_quat": np.zeros((3, 2))}, "the state has 4 dimensions here and 3 in"),
            ({"obs/robot0_eef_quat": np.zeros((2, 1))}, "obs/robot0_eef_quat has 2 frames, obs/robot0_eef_pos 3"),
            ({"obs/top": np.zeros((2, 6, 8, 3), np.uint8)}, "obs/top has 2 frames, the action 3"),
            ({"actions": np.array(["a", "b", "c"], dtype="S")}, r"actions holds \|S1 \[3\], not a number or a vector"),
            ({"actions": None}, "there is no action: no column action or actions"),
        ],
    )
    def test_episodes_that_differ(self, demos, read, change, message):
        with h5py.File(demos, "a") as file:
            for name, values in change.items():
                del file[f"data/demo_3/{name}"]
                if values is not None:
                    file[f"data/demo_3/{name}"] = values
        with pytest.raises(DataError, match=message) as caught:
            read(demos)
        assert "demos.hdf5: data/demo_3" in str(caught.value)

    def test_one_observation_more_and_no_instruction(self, tmp_path, read):
        """As environments record them: one file, groups at its top, the observation after the last action too."""
        with h5py.File(tmp_path / "env.h5", "w") as file:
            file["traj_0/actions"] = np.zeros((2, 1), np.float32)
            file["traj_0/obs/state"] = np.arange(3.0)
        rows = read(tmp_path / "env.h5")
        assert [row["state"].tolist() for row in rows] == [[0], [1]]
        assert [(row["instruction"], row["images"]) for row in rows] == [("", {})] * 2

    def test_returns_are_those_of_rewards(self, tmp_path, data):
        path = write_robomimic(tmp_path / "demos.hdf5", episodes((3,)))
        frames = FrameOptions(returns=True, discount=0.5)
        with pytest.raises(DataError, match=r"(?s)there are no rewards.*demo_0"):
            resolve_sources(path, data, frames=frames, report=lambda text: None)
        with h5py.File(path, "a") as file:
            file["data/demo_0/rewards"] = np.array([1.0, 0.0, 2.0])
        (source,) = resolve_sources(path, data, frames=frames, report=lambda text: None)
        assert [row["return"] for _, row in source.rows(source.files[0])] == [1.5, 1.0, 2.0]

    def test_only_what_is_used_is_read(self, tmp_path, data, monkeypatch):
        folder = write_aloha(tmp_path / "robot", episodes((40, 2)))
        (folder / "episode_1.hdf5").write_bytes(b"torn")
        (source,) = resolve_sources(
            {"path": str(folder), "max_samples": 3}, data, frames=FrameOptions(), report=lambda text: None
        )
        monkeypatch.setattr("shardtune.data.robot.recorded._CHUNK_BYTES", 1000)
        chunk = next(source.chunks(source.files[0]))
        assert chunk.pictures.num_rows == 1000 // (2 * 6 * 8 * 3)
        assert len(build_dataset([source], FramesEncoder(), cache_dir=data.cache_dir)) == 3
        with pytest.raises(DataError, match=r"(?s)cannot be read as HDF5.*episode_1.hdf5"):
            list(source.rows(source.files[0]))

    def test_bad_frames_are_bad_rows(self, tmp_path, data):
        folder = write_aloha(tmp_path / "robot", episodes((3, 2)), encoded=True)
        with h5py.File(folder / "episode_1.hdf5", "a") as file:
            file["action"][1] = np.nan
            file["observations/images/top"][0, 20:] = 0
        encoder = FramesEncoder()
        (source,) = resolve_sources(folder, data, frames=encoder.frames, report=lambda text: None)
        with pytest.raises(DataError, match=r"(?s)episode 1, frame 0 \(\S+episode_1.hdf5\): image .* row 4"):
            build_dataset([source], encoder, cache_dir=data.cache_dir)
        assert len(build_dataset([source], encoder, cache_dir=data.cache_dir, on_bad_row="skip")) == 3

    def test_several_files_by_a_pattern(self, tmp_path, read, data):
        folder = write_aloha(tmp_path / "robot", [episode(2)] * 2)
        rows = read(str(folder / "*.hdf5"))
        assert len({row.digest for row in rows}) == 2
        sources = resolve_sources(str(folder / "*.hdf5"), data, frames=FrameOptions(), report=lambda text: None)
        assert next(iter(source_statistics(sources, cache_dir=data.cache_dir).values())).episodes == 2

    def test_what_cannot_be_read(self, demos, read, data, monkeypatch):
        with pytest.raises(DataError, match=r"this is a robot data set \(HDF5\)"):
            resolve_sources(demos, data)
        monkeypatch.setitem(sys.modules, "h5py", None)
        with pytest.raises(DataError, match=r"h5py, which reads them.*\n.*pip install 'shardtune\[recordings\]'"):
            read(demos)


class TestRlds:
    @pytest.fixture
    def folder(self, tmp_path):
        return write_rlds(tmp_path / "set", episodes((2, 3, 1)))

    def test_splits_versions_and_files(self, tmp_path, folder, read, data):
        (tmp_path / "set" / "0.9.0").mkdir()
        (tmp_path / "set" / "0.9.0" / "features.json").write_text("{}")
        info = json.loads((folder / "dataset_info.json").read_text())
        info["splits"].append({"name": "val", "shardLengths": ["1"]})
        write_rlds(tmp_path / "set", episodes((4,)), files=1, split="val")
        (folder / "dataset_info.json").write_text(json.dumps(info))
        assert [row["episode"] for row in read(tmp_path / "set")] == [0, 0, 1, 1, 1, 2]
        assert len(read(folder, purpose="eval")) == len(read({"path": str(folder), "split": "val"})) == 4
        assert len(read(folder / "robot_set-train.tfrecord-00000-of-00002")) == 5
        assert len(read(str(folder / "*-train.tfrecord-*"))) == 6
        assert "action: action, state: observation/state, instruction: language_instruction" in title(folder, data)[1]

    @pytest.mark.parametrize("where", ["length", "image", "end", "number"])
    def test_damage(self, folder, read, where):
        file = folder / "robot_set-train.tfrecord-00001-of-00002"
        content = bytearray(file.read_bytes())
        match where:
            case "length":
                content[0] ^= 1
                message = "the record at byte 0 is torn or damaged: its length"
            case "image":
                content[content.index(b"PNG") + 20] ^= 1
                message = "its content does not match its checksum"
            case "end":
                del content[-5:]
                message = "the file ends within it"
            case "number":
                content += bytes(content)
                message = "the file has 2 episodes and, by dataset_info.json, 1"
        file.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read(folder)
        assert file.name in str(caught.value)
        if where == "image":  # actions and states alone are read for statistics
            assert [one.numbers("action").shape for one in rlds_episodes(folder, "train", check=False)][2] == (1, 4)

    def test_what_cannot_be_read(self, tmp_path, folder, read, data, monkeypatch):
        with pytest.raises(DataError, match=r"this is a robot data set \(RLDS\)"):
            resolve_sources(folder, data)
        shard = folder / "robot_set-train.tfrecord-00001-of-00002"
        content = shard.read_bytes()
        shard.unlink()
        with pytest.raises(DataError, match="of the 2 files of the split train, number 1 is missing"):
            read(folder)
        shard.write_bytes(framed(b"no example"))
        with pytest.raises(DataError, match=r"(?s)is no tf.train.Example.*record 1, episode 2"):
            read(folder)
        (tmp_path / "a.tfrecord").write_bytes(content)
        with pytest.raises(DataError, match=r"(?s)the kind of the file a.tfrecord is.*beside the features.json"):
            read(tmp_path / "a.tfrecord")
        shard.write_bytes(content)
        described = json.loads((folder / "features.json").read_text())
        steps = described["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
        steps["action"]["tensor"]["shape"]["dimensions"] = ["3"]
        (folder / "features.json").write_text(json.dumps(described))
        with pytest.raises(DataError, match=r"(?s)action is not float32 \[3\] per frame.*episode 0"):
            read(folder)
        (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": {}}}))
        with pytest.raises(DataError, match="the data set has no steps"):
            read(folder)
        (folder / "features.json").write_text(json.dumps(described))
        shard.rename(folder / "robot_set-train.array_record-00001-of-00002")
        with pytest.raises(DataError, match="stored as array_record, which is not read"):
            read(folder)
        shutil.rmtree(folder)
        folder = write_rlds(tmp_path / "set", episodes((2,)), files=1)
        monkeypatch.setitem(sys.modules, "google_crc32c", None)
        with pytest.raises(DataError, match=r"google-crc32c.*\n.*pip install 'shardtune\[recordings\]'"):
            read(folder)

    def test_values_are_those_of_the_protobuf_library(self, tmp_path):
        numbers = np.array([0, 1, -1, 127, 128, 300, 2**63 - 1, -(2**63)])
        floats = np.array([0.1, -np.inf, 1e-40], np.float32)
        content = example({"i": numbers, "f": floats, "b": [b"", b"ab"], "none": []})
        (tmp_path / "x").write_bytes(framed(content) + framed(b""))
        (record, _), (empty, share) = read_records(tmp_path / "x")
        found = example_features(record)
        np.testing.assert_array_equal(found["i"].numbers(), numbers)
        np.testing.assert_array_equal(found["f"].numbers(), floats)
        assert [bytes(one) for one in found["b"].byte_strings()] == [b"", b"ab"]
        assert found["none"].byte_strings() == []
        assert (example_features(empty), share) == ({}, 1.0)
        for cut in range(1, len(content), 3):  # a torn message is a fault or fewer features, and nothing else
            with suppress(ValueError):
                [
                    one.numbers() if one.kind > 1 else one.byte_strings()
                    for one in example_features(record[:cut]).values()
                ]
