"""Episodes written as other recorders do: ALOHA's and robomimic's HDF5 files, and RLDS by the protobuf library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shardtune.data.robot.episode import Episode
from shardtune.data.robot.pictures import encode_image


def write_aloha(folder: Path, episodes: Sequence[Episode], *, encoded: bool = False) -> Path:
    """One file per episode; encoded images are JPEG files filled up with zeros."""
    folder.mkdir()
    for number, one in enumerate(episodes):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = True
            file.attrs["task"] = one.task
            file["action"] = one.actions.astype(np.float64)
            file["observations/qpos"] = one.state
            file["observations/qvel"] = np.zeros_like(one.state)
            for camera, images in one.images.items():
                file[f"observations/images/{camera}"] = padded(images) if encoded else images
    return folder


def write_robomimic(path: Path, episodes: Sequence[Episode], masks: Mapping[str, Sequence[int]] | None = None) -> Path:
    """One file for all episodes; the next observations stand beside each, the instruction in JSON."""
    with h5py.File(path, "w") as file:
        for number, one in enumerate(episodes):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["ep_meta"] = json.dumps({"lang": one.task})
            demo["actions"] = one.actions
            demo["states"] = np.zeros((len(one), 9))
            names = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
            parts = dict(zip(names, np.split(one.state, [1, 2], axis=1), strict=True))
            for name, values in {**parts, **one.images}.items():
                demo[f"obs/{name}"] = values
                demo[f"next_obs/{name}"] = values
        for name, chosen in (masks or {}).items():
            file[f"mask/{name}"] = np.array([f"demo_{number}" for number in chosen], dtype="S")
    return path


def write_rlds(
    folder: Path, episodes: Sequence[Episode], *, files: int = 2, split: str = "train", **facts: Any
) -> Path:
    """As tensorflow_datasets writes it; the wrist's images are a tensor of pixels, the others PNG files."""
    folder = folder / "1.0.0"
    folder.mkdir(parents=True, exist_ok=True)
    shares = np.array_split(np.arange(len(episodes)), files)
    for number, share in enumerate(shares):
        content = b"".join(framed(example(steps(episodes[one]))) for one in share)
        (folder / f"robot_set-{split}.tfrecord-{number:05d}-of-{files:05d}").write_bytes(content)
    first = episodes[0]
    observation = {
        camera: tensor(images.shape[1:], "uint8") if camera == "wrist" else image(images.shape[1:])
        for camera, images in first.images.items()
    }
    observation["state"] = tensor(first.state.shape[1:], "float32")
    features = {
        "action": tensor(first.actions.shape[1:], "float32"),
        "observation": {"featuresDict": {"features": observation}},
        "language_instruction": {"text": {}},
        "is_first": {"tensor": {"shape": {}, "dtype": "bool", "encoding": "none"}},
    }
    whole = {
        "steps": {"sequence": {"feature": {"featuresDict": {"features": features}}, "length": "-1"}},
        "episode_metadata": {"featuresDict": {"features": {"file_path": {"text": {}}}}},
    }
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": whole}}))
    lengths = [str(len(share)) for share in shares]
    info = {"name": "robot_set", "splits": [{"name": split, "shardLengths": lengths}], **facts}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def padded(images: np.ndarray) -> np.ndarray:
    """uint8 [frames, longest]."""
    files = [np.frombuffer(encode_image(image, "jpeg"), np.uint8) for image in images]
    longest = max(map(len, files))
    return np.stack([np.pad(file, (0, longest - len(file))) for file in files])


def tensor(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    return {"tensor": {"shape": {"dimensions": [str(one) for one in shape]}, "dtype": dtype, "encoding": "none"}}


def image(shape: Sequence[int]) -> dict[str, Any]:
    dimensions = [str(one) for one in shape]
    return {"image": {"shape": {"dimensions": dimensions}, "dtype": "uint8", "encodingFormat": "png"}}


def steps(one: Episode) -> dict[str, Any]:
    """The features of an episode, flat."""
    shown = {
        f"steps/observation/{camera}": images if camera == "wrist" else [encode_image(each, "png") for each in images]
        for camera, images in one.images.items()
    }
    return {
        "steps/action": one.actions,
        "steps/observation/state": one.state,
        "steps/language_instruction": [one.task.encode()] * len(one),
        "steps/is_first": np.arange(len(one)) == 0,
        "episode_metadata/file_path": [b"a/b"],
        **shown,
    }


def example(features: Mapping[str, Any]) -> bytes:
    """A serialised `tf.train.Example`: lists of bytes, floats, integers."""
    message = _EXAMPLE()
    for name, values in features.items():
        feature = message.features.feature[name]
        if isinstance(values, list):
            feature.bytes_list.value.extend(values)
        elif values.dtype.kind == "f":
            feature.float_list.value.extend(values.ravel().tolist())
        else:
            feature.int64_list.value.extend(values.ravel().astype(int).tolist())
    return message.SerializeToString()


def framed(record: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = len(record).to_bytes(8, "little")
    return length + _masked(length) + record + _masked(record)


def _masked(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)).to_bytes(4, "little")


def _example_class() -> Any:
    """`tf.train.Example` from its published definition."""
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shardtune_test_example.proto", package="t", syntax="proto3")
    lists = {"BytesList": kind.TYPE_BYTES, "FloatList": kind.TYPE_FLOAT, "Int64List": kind.TYPE_INT64}
    for name, type_ in lists.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=kind.LABEL_REPEATED, type=type_)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(lists, 1):
        field = {"BytesList": "bytes_list", "FloatList": "float_list", "Int64List": "int64_list"}[name]
        one = feature.field.add(name=field, number=number, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE)
        one.type_name, one.oneof_index = f".t.{name}", 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_STRING)
    entry.field.add(name="value", number=2, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE, type_name=".t.Feature")
    features.field.add(
        name="feature",
        number=1,
        label=kind.LABEL_REPEATED,
        type=kind.TYPE_MESSAGE,
        type_name=".t.Features.FeatureEntry",
    )
    whole = file.message_type.add(name="Example").field.add(
        name="features", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE
    )
    whole.type_name = ".t.Features"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


_EXAMPLE = _example_class()
