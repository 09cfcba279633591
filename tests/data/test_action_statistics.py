"""Statistics over all frames: numpy's own numbers on ragged episodes, kept in the cache, in OpenVLA's form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardtune.data import action_statistics
from shardtune.data.action_statistics import Vectors, compute, data_statistics, from_json, source_statistics, to_json
from shardtune.data.encoder import FrameOptions
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.data.robot.conftest import episode

# Wide, tiny, large, constant, of two values, and with many equal ones: ties and signs must not matter.
SCALES = np.array([1, 1e-30, 1e6, 0, 1, 3], np.float32)


def ragged(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(count)
    found = []
    for _ in range(count):
        values = random.normal(size=(int(random.integers(1, 60)), len(SCALES))).astype(np.float32) * SCALES
        values[:, 4] = np.sign(values[:, 4])
        values[:, 5] = np.round(values[:, 5])
        found.append(values)
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 10, 200])
def test_equal_to_numpy(count):
    episodes = ragged(count)
    whole = np.concatenate(episodes).astype(np.float64)

    def read():
        for number, values in enumerate(episodes):
            yield Vectors("robot", [number] * len(values), values, values[:, :2])

    found = compute(read)["robot"]
    for field, expected in ((found.action, whole), (found.state, whole[:, :2])):
        assert field.q01 == tuple(np.quantile(expected, 0.01, axis=0).tolist())
        assert field.q99 == tuple(np.quantile(expected, 0.99, axis=0).tolist())
        assert field.min == tuple(expected.min(0).tolist())
        assert field.max == tuple(expected.max(0).tolist())
        assert (np.abs(field.mean - expected.mean(0)) <= 1e-12 * expected.std(0)).all()
        np.testing.assert_allclose(field.std, expected.std(0), rtol=1e-12)
    assert (found.frames, found.episodes) == (len(whole), count)


def test_not_the_average_over_episodes():
    """What LeRobot's meta/stats.json has is something else, and so not what is used."""
    episodes = ragged(50)
    found = compute(lambda: (Vectors("robot", [0] * len(one), one, None) for one in episodes))["robot"]
    averaged = np.mean([np.quantile(one.astype(np.float64), 0.99, axis=0) for one in episodes], axis=0)
    assert abs(found.action.q99[0] - averaged[0]) > 0.1


@pytest.fixture
def of(data):
    """The statistics of what a recipe names."""

    def run(spec, **options):
        sources = resolve_sources(spec, data, frames=FrameOptions(3), report=lambda text: None)
        return source_statistics(sources, cache_dir=data.cache_dir, **options)

    return run


@pytest.fixture
def sets(tmp_path):
    """Two data sets, and the actions and states of each."""
    kept = {}
    for name, version in (("a", "v3.0"), ("b", "v2.1")):
        episodes = [episode(length, seed=ord(name) + length) for length in (5, 1, 30)]
        names = ["x", "y", "Left_Gripper.pos", "z"] if name == "a" else None
        write_lerobot(tmp_path / name, episodes, fps=5, version=version, action_names=names, file_mb=0)
        kept[name] = [np.concatenate([getattr(one, field) for one in episodes]) for field in ("actions", "state")]
    return tmp_path, kept


class TestSources:
    def test_each_under_its_own_key(self, sets, of):
        folder, kept = sets
        found = of(
            [{"path": str(folder / "a"), "weight": 2.0, "max_samples": 3}, {"path": str(folder / "b"), "name": "other"}]
        )
        assert list(found) == ["a", "other"]
        for one, (actions, state) in zip(found.values(), kept.values(), strict=True):
            assert one.action.q99 == tuple(np.quantile(actions.astype(np.float64), 0.99, axis=0).tolist())
            assert one.state.q01 == tuple(np.quantile(state.astype(np.float64), 0.01, axis=0).tolist())
            assert (one.frames, one.episodes) == (36, 3)

    @pytest.mark.lengthy
    def test_one_rule_for_all_sources(self, of, data, tmp_path):
        """A data set with names, without, transformed, and the same as a table: switches alone stay as they are."""
        random = np.random.default_rng(0)
        closed = np.zeros(400, np.float32)
        closed[7] = 1  # so rarely that both quantiles are 0
        columns = [random.normal(size=400), closed, 100 * closed, random.uniform(0, 100, 400), np.full(400, 0.5)]
        actions = np.stack(columns, 1).astype(np.float32)
        one = replace(episode(400, dims=(5, 1)), actions=actions, images={})
        names = ["x", "gripper", "left_gripper.pos", "gripper.pos", "z"]
        write_lerobot(tmp_path / "set", [one], fps=5, action_names=names)
        write_lerobot(tmp_path / "plain" / "set", [one], fps=5)
        states = one.state.tolist()
        rows = [
            {"episode": 0, "task": one.task, "action": action, "state": state}
            for action, state in zip(actions.tolist(), states, strict=True)
        ]
        (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "same.py").write_text("def same(row):\n    return row\n")
        found = [of(str(tmp_path / path))["set"].action for path in ("set", "plain/set", "set.jsonl")]
        data.transform = f"{tmp_path / 'same.py'}:same"
        found.append(of(str(tmp_path / "set"))["set"].action)
        assert [one.names for one in found] == [tuple(names), None, None, tuple(names)]
        for action in found:
            assert replace(action, names=None) == replace(found[0], names=None)
        assert found[0].mask == (True, False, True, True, True)
        assert (found[0].q01[1:3], found[0].q99[1:3]) == ((0.0, 0.0), (1.0, 100.0)), "the range in place of quantiles"
        assert (found[0].q01[4], found[0].q99[4]) == (0.5, 0.5)

    def test_differing_dimensions_name_file_and_episode(self, tmp_path, of):
        for name, size in (("a", 7), ("b", 6)):
            row = {"action": [0.5] * size, "state": [0.0], "task": "go", "frame_index": 0, "episode_index": name * 3}
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(
            DataError, match=r"the actions of .* 6 dimensions here and 7 in .*a\.jsonl: episode aaa"
        ) as caught:
            of(str(tmp_path / "*.jsonl"))
        assert str(caught.value.where).endswith("b.jsonl: episode bbb")

    @pytest.mark.lengthy
    def test_computed_once_unless_damaged(self, sets, of, data, monkeypatch):
        folder, _ = sets
        first = of(str(folder / "a"))
        with monkeypatch.context() as patch:
            patch.setattr(action_statistics, "compute", None)
            assert of(str(folder / "a")) == first
        (file,) = (Path(data.cache_dir) / "statistics").glob("*.json")
        written = file.read_text()
        for damaged in (written.replace('"num_transitions": 36', '"num_transitions": 37'), "[1]", written[:40]):
            file.write_text(damaged)
            assert of(str(folder / "a")) == first, "it is computed anew"
            assert file.read_text() == written

    def test_other_content_is_computed_anew(self, sets, of):
        folder, _ = sets
        first = of(str(folder / "a"))
        write_lerobot(folder / "c", [episode(4)], fps=5)
        (folder / "a").rename(folder / "old")
        (folder / "c").rename(folder / "a")
        assert of(str(folder / "a")) != first

    def test_no_image_is_read(self, sets, of, monkeypatch):
        folder, _ = sets
        sources = []

        def refuse(*_):
            raise AssertionError

        found = resolve_sources(
            str(folder / "a"),
            type(
                "D", (), {"columns": {}, "transform": None, "cache_dir": None, "on_bad_row": "fail", "quarantine": None}
            )(),
            frames=FrameOptions(),
            report=sources.append,
        )
        monkeypatch.setattr("shardtune.data.robot.frames.image_record", refuse)
        assert source_statistics(found, cache_dir=folder / "cache")["a"].frames == 36

    def test_transformed(self, sets, of, data, tmp_path):
        folder, kept = sets
        (tmp_path / "double.py").write_text(
            "def double(row):\n"
            "    return None if row['frame'] == 0 else {**row, 'actions': (row['actions'] * 2).tolist()}\n"
        )
        data.transform = f"{tmp_path / 'double.py'}:double"
        found = of(str(folder / "b"))["b"]
        actions = np.delete(kept["b"][0], [0, 5, 6], axis=0).astype(np.float64) * 2
        assert found.action.q99 == tuple(np.quantile(actions, 0.99, axis=0).tolist())
        assert found.frames == 33

    def test_rows_of_plain_files(self, tmp_path, of):
        rows = [
            {"episode_index": n // 4, "action": [float(n), 1.0], "task": "go", "observation.state": [n / 2]}
            for n in range(10)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = of(str(tmp_path / "rows.jsonl"))["rows"]
        assert found.action.q99 == tuple(np.quantile([[n, 1.0] for n in range(10)], 0.99, axis=0).tolist())
        assert found.state.max == (4.5,)
        assert (found.frames, found.episodes) == (10, 3)

    @pytest.mark.parametrize("kind", ["lerobot", "jsonl"])
    def test_what_is_no_number(self, tmp_path, of, data, kind):
        actions = [1.0, 2.0, float("nan"), 3.0]
        if kind == "lerobot":
            import pyarrow.parquet as pq

            path = write_lerobot(tmp_path / "set", [replace(episode(4, dims=(0, 1)), images={})], fps=5)
            (file,) = path.rglob("data/*/*.parquet")
            table = pq.read_table(file)
            pq.write_table(table.set_column(0, table.schema.field("action"), [np.float32(actions)]), file)
        else:
            path = tmp_path / "set.jsonl"
            path.write_text("".join(json.dumps({"episode": 0, "task": "go", "action": one}) + "\n" for one in actions))
        data.on_bad_row = "skip"
        with pytest.raises(DataError, match=r"the action \[nan\] is not finite" if kind == "lerobot" else "nan"):
            of(str(path))
        found = of(str(path), on_bad_row="skip")["set"]
        assert found.action.max == (3.0,)
        assert found.frames == 3  # that a chunk of three reaches the bad frame has no part in it

    def test_rows_that_hold_their_actions_count_with_the_first(self, tmp_path, data):
        lines = [json.dumps({"instruction": "go", "actions": [[one], [one + 7.0]]}) for one in (1.0, 2.0, 6.0)]
        (tmp_path / "set.jsonl").write_text("\n".join(lines))
        found = data_statistics(str(tmp_path / "set.jsonl"), data, frames=FrameOptions(2))["set"]
        assert (found.frames, found.action.max) == (3, (6.0,))

    def test_a_transform_sees_the_chunk(self, tmp_path, data):
        """So what it leaves out, and the cached statistics, depend on its length."""
        lines = [json.dumps({"episode": 0, "task": "go", "action": [one]}) for one in (1.0, 2.0, 5.0, 3.0)]
        (tmp_path / "set.jsonl").write_text("\n".join(lines))
        code = "def small(row):\n    return row if row['actions'].max() < 5 else None\n"
        (tmp_path / "small.py").write_text(code)
        data.transform = f"{tmp_path}/small.py:small"
        found = [
            data_statistics(str(tmp_path / "set.jsonl"), data, frames=FrameOptions(chunk))["set"].frames
            for chunk in (1, 2, 3)
        ]
        assert found == [3, 2, 1]


class TestJson:
    def test_openvla_form(self, sets, of):
        folder, _ = sets
        content = json.loads(json.dumps(to_json(of(str(folder / "a")))))
        assert list(content) == ["a"]
        assert set(content["a"]) == {"action", "proprio", "num_transitions", "num_trajectories"}
        assert set(content["a"]["action"]) == {"mean", "std", "min", "max", "q01", "q99", "mask", "names"}
        assert content["a"]["action"]["names"] == ["x", "y", "Left_Gripper.pos", "z"]
        assert from_json(content) == of(str(folder / "a"))

    @pytest.mark.parametrize(
        ("action", "message"),
        [
            (None, "no statistics of actions"),
            ({"mean": [0.0]}, "'std' is None, not 1 numbers"),
            ({"mean": [], "std": []}, "not some numbers"),
        ],
    )
    def test_other_files(self, action, message):
        with pytest.raises(DataError, match=message):
            from_json({"robot": {"action": action}})

    def test_without_mask_all_are_normalised(self):
        field = {name: [0.0, 1.0] for name in ("mean", "std", "min", "max", "q01", "q99")}
        assert from_json({"robot": {"action": field}})["robot"].action.mask == (True, True)
