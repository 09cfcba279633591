"""The example with videos: a row's frames are those of its clip, in order, and become the row's images."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from shardtune.data.images.images import read_image
from tests.support.workspace import quietly, run_cli

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "video"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setattr(sys, "argv", ["make_data.py", "--out", str(folder), "--rows", "6"])
        runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")
    return folder


def test_frames_show_which_way_the_disc_moves(made: Path):
    frames = runpy.run_path(str(FOLDER / "frames.py"))["frames"]
    for line in (made / "train.jsonl").read_text().splitlines():
        row = frames(json.loads(line))
        assert row["question"].count("<image>") == len(row["images"]) == 4
        pixels = [np.asarray(read_image(image, made).read()).astype(int) for image in row["images"]]
        centres = np.array([np.argwhere(np.abs(one - 165).sum(2) > 90).mean(0) for one in pixels])
        (down, right) = centres[-1] - centres[0]
        way = ("down" if down > 0 else "up") if abs(down) > abs(right) else ("right" if right > 0 else "left")
        assert way == row["answer"]


def test_what_else_a_row_has_stays_in_it():
    frames = runpy.run_path(str(FOLDER / "frames.py"))["frames"]
    assert frames({"question": "two?", "answer": "two"}) == {"question": "two?", "answer": "two"}
    for value, why in ((["a.png"], "not the name of a file"), ({"path": "a.mp4"}, "not the name of a file")):
        with pytest.raises(ValueError, match=why):
            frames({"video": value, "question": "what?"})
    with pytest.raises(ValueError, match="a video and images"):
        frames({"video": "a.mp4", "question": "what?", "images": ["a.png"]})


def test_a_container_that_states_its_length_alone(made: Path, tmp_path: Path):
    other = tmp_path / "a.mkv"
    with av.open(str(made / "train-0.mp4")) as source, av.open(str(other), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    row = runpy.run_path(str(FOLDER / "frames.py"))["frames"]({"video": str(other), "question": "what?", "fps": 2})
    assert row["fps"] == 2
    assert [image["seconds"] for image in row["images"]] == pytest.approx([0.25, 0.75, 1.25, 1.75])


@pytest.mark.slow
def test_the_recipe_trains_on_them(made: Path):
    paths = [f"{key}={made}/{name}" for key, name in (
        ("model.model_path", "model"), ("data.train_data_paths", "train.jsonl"),
        ("data.eval_data_paths", "heldout.jsonl"), ("data.cache_dir", "cache"), ("runner.logger.log_path", "runs"),
    )]  # fmt: skip
    found = run_cli("train", str(FOLDER / "recipe.yaml"), *paths, "runner.max_steps=1", "data.num_workers=0")
    assert found.code == 0, found.err
