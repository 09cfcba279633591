"""Robot data in plain files: rows of frames become rows with the actions that follow."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.robot.pictures import encode_image
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.data.robot.conftest import FramesEncoder, pixels

WHITE = np.full((4, 4, 3), 255, np.uint8)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def frames(*lengths: int, **more):
    """Rows of episodes of these lengths; the action counts all frames."""
    total = 0
    for number, length in enumerate(lengths):
        for frame in range(length):
            yield {"episode_index": number, "frame_index": frame, "action": [float(total)], "task": "go", **more}
            total += 1


@pytest.fixture
def all_rows(data):
    """All rows of a file, with what is wrong with those that cannot be used."""

    def run(path, chunk=2, **entry):
        data.on_bad_row = "skip"
        (source,) = resolve_sources({"path": path, **entry}, data, frames=FrameOptions(chunk), report=lambda text: None)
        return [
            (number, row.reason if isinstance(row, RowError) else row) for number, row in source.rows(source.files[0])
        ]

    return run


def test_worked_example(tmp_path, read):
    rows = read(write(tmp_path / "rows.jsonl", frames(3, 2)), chunk=3)
    assert [row["actions"].ravel().tolist() for row in rows] == [[0, 1, 2], [1, 2, 2], [2, 2, 2], [3, 4, 4], [4, 4, 4]]
    assert [row["action_is_pad"].astype(int).tolist() for row in rows] == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 1],
        [0, 0, 1],
        [0, 1, 1],
    ]
    assert [(row["episode"], row["frame"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [row["dataset"] for row in rows] == ["rows"] * 5
    assert rows[0]["state"] is None
    assert rows[0]["images"] == {}


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_long_episodes(tmp_path, read, chunk):
    """Rows are given out before their episode is read to its end."""
    lengths = (200, 63, 64, 65, 1)
    rows = read(write(tmp_path / "rows.jsonl", frames(*lengths)), chunk=chunk, observations=3)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    ends = np.repeat(np.cumsum(lengths), lengths) - 1
    for place, row in enumerate(rows):
        expected = np.minimum(place + np.arange(chunk), ends[place])
        np.testing.assert_array_equal(row["actions"][:, 0], expected)
        np.testing.assert_array_equal(row["action_is_pad"], place + np.arange(chunk) > ends[place])
        assert [int(one["action"][0]) for one in row["earlier"]] == [
            max(place - 2, starts[place]),
            max(place - 1, starts[place]),
        ]
        assert [one["is_pad"] for one in row["earlier"]] == [place - 2 < starts[place], place - 1 < starts[place]]
    assert len(rows) == sum(lengths)


def test_mapped_columns(tmp_path, read):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "0.png").write_bytes(encode_image(WHITE, "png"))
    rows = [
        {"ep": name, "my_action": [1, 2], "proprio": 0.5, "say": "push", "cam0": "pictures/0.png", "other": 1}
        for name in ("left", "left", "right")
    ]
    columns = {"action": "my_action", "state": "proprio", "instruction": "say", "images.wrist": "cam0", "episode": "ep"}
    found = read({"path": write(tmp_path / "rows.jsonl", rows), "columns": columns}, chunk=2)
    assert [row["action_is_pad"].tolist() for row in found] == [[False, False], [False, True], [False, True]]
    assert [row["episode"] for row in found] == ["left", "left", "right"]
    assert found[0]["instruction"] == "push"
    assert found[0]["state"].tolist() == [0.5]
    assert found[0]["images"] == {"wrist": {"path": str(tmp_path / "pictures" / "0.png")}}


@pytest.mark.parametrize("given", [{}, {"task": None}, {"task": ""}])
def test_a_table_without_instructions_has_empty_ones(tmp_path, read, given):
    by_frame = [{"episode": 0, "action": [1.0], **given}, {"episode": 0, "action": [2.0], **given}]
    assert [row["instruction"] for row in read(write(tmp_path / "rows.jsonl", by_frame))] == ["", ""]
    whole = {"actions": [[1.0]], "action_is_pad": [False], **given}
    assert read(write(tmp_path / "whole.jsonl", [whole]), chunk=1)[0]["instruction"] == ""


def test_columns_that_are_not_read_are_named(tmp_path, data):
    said = []
    noted = {"timestamp": 0.1, "action_is_pad": [False], "image2": "a.png"}
    path = write(tmp_path / "a.jsonl", frames(2, **noted))
    resolve_sources(path, data, frames=FrameOptions(2), report=said.append)
    assert said[-1].endswith("; not read: timestamp, action_is_pad, image2")
    path = write(tmp_path / "c.jsonl", frames(2, reward=1.0))
    for options, end in ((FrameOptions(2), "; not read: reward"), (FrameOptions(2, 1, None, True, 0.5), "(a.jsonl)")):
        resolve_sources(path, data, frames=options, report=said.append)
        assert said[-1].endswith(end.replace("a.jsonl", str(path)))
    whole = {"task": "go", "actions": [[1.0]], "action_is_pad": [False], "action": [1.0]}
    resolve_sources(write(tmp_path / "b.jsonl", [whole]), data, frames=FrameOptions(1), report=said.append)
    assert said[-1].endswith("; not read: action")


def test_parquet_with_images_inside(tmp_path, read):
    rows = [
        {
            **row,
            "observation.images.top": {"bytes": encode_image(WHITE, "png"), "path": None},
            "observation.state": [1.0],
        }
        for row in frames(2, 3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read(str(tmp_path / "rows.parquet"))
    assert len(found) == 5
    np.testing.assert_array_equal(pixels(found[0]["images"]["top"]), WHITE)
    assert found[0]["state"].tolist() == [1.0]


def test_rows_that_hold_their_actions(tmp_path, read):
    rows = [
        {"actions": [[1, 2], [3, 4]], "task": "go", "action_is_pad": [False, True]},
        {"actions": [[5, 6], [7, 8]], "task": "go"},
    ]
    found = read(write(tmp_path / "rows.jsonl", rows), chunk=2)
    assert [row["actions"].tolist() for row in found] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert [row["action_is_pad"].tolist() for row in found] == [[False, True], [False, False]]
    with pytest.raises(DataError, match=r"the row has 2 actions, actor\.model\.action_chunks_len is 3"):
        read(str(tmp_path / "rows.jsonl"), chunk=3)


def plain(value):
    """Arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_a_frame_row_comes_back_as_it_was(tmp_path, read):
    """Rows as encoders get them can be kept in a file and read again."""
    pq.write_table(
        pa.Table.from_pylist(
            [
                {**row, "observation.images.top": encode_image(WHITE, "png"), "observation.state": [0.5]}
                for row in frames(3)
            ]
        ),
        tmp_path / "rows.parquet",
    )
    before = read(str(tmp_path / "rows.parquet"), chunk=2, observations=2)
    lists = [plain(row) for row in before]
    pq.write_table(pa.Table.from_pylist(lists), tmp_path / "kept.parquet")
    after = read(str(tmp_path / "kept.parquet"), chunk=2, observations=2)
    for one, other in zip(before, after, strict=True):
        assert list(one) == list(other)
        assert plain(one.pop("earlier")) == plain(other.pop("earlier"))
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
        assert one["dataset"] == "rows"


def test_rows_in_memory(read):
    rows = [
        {
            **row,
            "action": np.float32([row["action"][0], 1]),
            "observation.state": np.arange(2),
            "observation.images.top": WHITE,
        }
        for row in frames(2, 2)
    ]
    found = read(rows, chunk=2)
    assert [row["actions"].tolist() for row in found] == [
        [[0, 1], [1, 1]],
        [[1, 1]] * 2,
        [[2, 1], [3, 1]],
        [[3, 1]] * 2,
    ]
    assert found[0]["state"].tolist() == [0, 1]
    np.testing.assert_array_equal(pixels(found[0]["images"]["top"]), WHITE)
    with pytest.raises(DataError, match="not bytes or base64 text"):
        read([{**row, "observation.images.top": {"bytes": "?"}} for row in frames(1)])


class TestBadRows:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"action": [float("nan")]}, "the action is [nan], not finite numbers in a list"),
            ({"action": "left"}, "the action is 'left', not numbers"),
            ({"action": [1.0, 2.0]}, "the action has 2 dimensions, those before have 1"),
            ({"action": []}, "not finite numbers"),
            ({"task": 7}, "the instruction is 7, not text"),
            ({"frame_index": 0}, "the frame 0 does not come after 1"),
            ({"frame_index": 2.5}, "the frame is 2.5, not a whole number"),
            ({"state": [1.0, 2.0]}, "the state has 2 dimensions, those before have 1"),
        ],
    )
    def test_in_the_middle(self, tmp_path, all_rows, changed, message):
        rows = list(frames(4, 1, state=[0.0]))
        rows[2] |= changed
        found = all_rows(write(tmp_path / "rows.jsonl", rows))
        assert [number for number, _ in found] == [1, 2, 3, 4, 5]
        assert [isinstance(row, str) for _, row in found] == [False, True, True, False, False]
        assert message in found[2][1]
        assert found[2][1].startswith("episode 0, frame 2: ")
        assert found[1][1].startswith("episode 0, frame 1: 1 row on, ")

    def test_a_frame_that_is_missing(self, tmp_path, all_rows):
        rows = [{**row, "frame_index": float(row["frame_index"])} for row in frames(6)]  # as pandas may write them
        del rows[3:5]
        found = all_rows(write(tmp_path / "rows.jsonl", rows), chunk=2)
        assert [isinstance(row, str) for _, row in found] == [False, False, True, False]
        assert found[2][1].startswith("episode 0, frame 2: frame 3 is missing, the next one is 5")

    @pytest.mark.parametrize("column", ["action", "episode_index"])
    def test_missing_column(self, tmp_path, read, column):
        rows = [{key: value for key, value in row.items() if key != column} for row in frames(2)]
        with pytest.raises(DataError, match=r"row 1\b"):
            read(write(tmp_path / "rows.jsonl", rows))

    def test_broken_line(self, tmp_path, all_rows):
        path = tmp_path / "rows.jsonl"
        write(path, frames(3))
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], "{", *lines[1:]]))
        found = all_rows(str(path), chunk=1)
        assert [isinstance(row, str) for _, row in found] == [False, True, False, False]
        assert "broken JSON" in found[1][1]

    def test_missing_image(self, tmp_path, read):
        rows = list(frames(2, **{"observation.images.top": "top.png"}))
        with pytest.raises(DataError, match=r"the image file top\.png is missing"):
            read(write(tmp_path / "rows.jsonl", rows))

    def test_episodes_that_do_not_stand_together(self, tmp_path, read):
        rows = [*frames(1, 1), *frames(1)]
        with pytest.raises(DataError, match="the rows of episode 0 are not consecutive") as caught:
            read(write(tmp_path / "rows.jsonl", rows))
        assert "row 3" in str(caught.value)

    def test_columns_that_are_not_there(self, tmp_path, read):
        path = write(tmp_path / "rows.jsonl", frames(2))
        with pytest.raises(DataError, match="names 'velocity', which is no column"):
            read({"path": path, "columns": {"action": "velocity"}})
        with pytest.raises(DataError, match="'question', which robot data do not have"):
            read({"path": path, "columns": {"question": "task"}})

    def test_a_format_of_texts(self, tmp_path, read):
        with pytest.raises(DataError, match="'messages' is for text"):
            read({"path": write(tmp_path / "rows.jsonl", frames(2)), "format": "messages"})


def test_encoded(tmp_path, data, monkeypatch):
    """Through the cache, in one process and in several; the transform sees frames and may leave some out."""
    (tmp_path / "third.py").write_text("def third(row):\n    return row if row['frame'] % 3 == 0 else None\n")
    data.transform = f"{tmp_path / 'third.py'}:third"
    path = write(tmp_path / "rows.jsonl", frames(100, 50))
    encoder = FramesEncoder(2)

    def build(workers):
        data.cache_dir = str(tmp_path / f"cache{workers}")
        sources = resolve_sources(path, data, frames=encoder.frames, report=lambda text: None)
        return build_dataset(sources, encoder, cache_dir=data.cache_dir, num_workers=workers)

    alone = build(0)
    monkeypatch.setattr("shardtune.data.cache.build._SMALL_FILE", 0)
    shared = build(2)
    assert len(alone) == len(shared) == 34 + 17
    assert alone.report.count("filtered") == 150 - 51
    for row in range(len(alone)):
        np.testing.assert_array_equal(alone.row(row).fields["actions"], shared.row(row).fields["actions"])
    assert [alone.locate(row) for row in (0, 1, 50)] == [f"{path}:1", f"{path}:4", f"{path}:149"]


class TestReturns:
    """`row["return"]`, for a value head."""

    def test_rewards_until_the_end_of_an_episode(self, tmp_path, data):
        rows = list(frames(3, 2))
        for row, reward in zip(rows, [1.0, 0.0, 2.0, 4.0, 1.0], strict=True):
            row["reward"] = reward
        assert self.found(tmp_path, data, rows, discount=0.5) == [1.5, 1.0, 2.0, 4.5, 1.0]
        rows[1]["reward"] = None
        reasons = self.found(tmp_path, data, rows, discount=0.5)
        assert "frame 1: the reward is None" in reasons[1]
        assert reasons[2:] == [2.0, 4.5, 1.0]
        del rows[1]
        rows[0]["action"] = rows[1]["action"] = [0.0]
        assert "frame 1 is missing" in self.found(tmp_path, data, rows, discount=0.5)[0]
        alone = self.found(tmp_path, data, rows, chunk=1, discount=0.5)
        assert "the return is nan" in alone[0]
        assert alone[1:] == [2.0, 4.5, 1.0]

    def test_long_episodes_are_whole(self, tmp_path, data):
        rows = [{**row, "reward": 1.0} for row in frames(150)]
        assert self.found(tmp_path, data, rows, discount=1.0) == list(range(150, 0, -1))

    def test_returns_as_they_are(self, tmp_path, data):
        rows = [{**row, "return": 0.5 * row["frame_index"]} for row in frames(2)]
        assert self.found(tmp_path, data, rows) == [0.0, 0.5]
        assert self.found(tmp_path, data, [{**row, "return": [1.0, 2.0]} for row in frames(1)] + rows[1:])[0] == (
            "episode 0, frame 0: the return has 2 numbers, it is one"
        )
        whole = [{"actions": [[0.0], [1.0]], "task": "go", "return": 3.0}]
        assert self.found(tmp_path, data, whole) == [3.0]
        data.on_bad_row = "fail"
        with pytest.raises(DataError, match="the rewards after it are not known: give one row per frame"):
            self.found(tmp_path, data, whole, discount=1.0)

    def found(self, tmp_path, data, rows, chunk=2, **options):
        path = write(tmp_path / "rows.jsonl", rows)
        data.on_bad_row = "skip" if data.on_bad_row == "skip" or len(rows) > 1 else "fail"
        chosen = FrameOptions(chunk, returns=True, **options)
        (source,) = resolve_sources(path, data, frames=chosen, report=lambda text: None)
        return [row.reason if isinstance(row, RowError) else row["return"] for _, row in source.rows(source.files[0])]


def test_columns_that_only_later_rows_have_are_named(tmp_path, data):
    """Those of all rows of the first file are named with the source, before rows are encoded."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(first, [*frames(2, note="x"), *[{**row, "episode_index": 1, "cam": "0.png"} for row in frames(2, note="x")]])
    write(second, frames(2, note="x", top="0.png"))
    write(tmp_path / "c.jsonl", frames(2, note="x", top="0.png"))  # all rows, as in the second: named once
    sources = resolve_sources(
        {"path": str(tmp_path / "*.jsonl")}, data, frames=FrameOptions(1), report=lambda text: None
    )
    lines = build_dataset(sources, FramesEncoder(), cache_dir=tmp_path / "cache").report.lines()
    assert list(lines) == [
        f"{first}: not read are keys that some rows have: cam (2 of 4, row 3)",
        f"{second}: not read are keys that some rows have: top (2 of 2, row 1)",
    ]
