"""Frames of robot data that an adapter is tried on survive being kept in a file."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from shardtune.config import load_recipe
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.sources.resolve import resolve_sources
from shardtune.verify.rows import WANTED, keep_rows, kept_rows, rows_for
from tests.data.robot.conftest import FramesEncoder, episode


def test_frames_are_kept_and_read_again(tmp_path):
    write_lerobot(tmp_path / "robot", [episode(9), episode(20, seed=1)], fps=5)
    content = {"actor": {"model": {"model_path": "m"}}, "data": {"train_data_paths": str(tmp_path / "robot")}}
    recipe = load_recipe(
        content, ["runner.logger.experiment_name=x", f"data.cache_dir={tmp_path / 'cache'}"], files_must_exist=False
    )
    encoder = FramesEncoder(chunk=3)
    rows = rows_for(SimpleNamespace(encoder=lambda with_prompts: encoder), recipe)
    assert len(rows) == WANTED
    file = keep_rows(rows, tmp_path)
    (source,) = resolve_sources(file, recipe.data, frames=encoder.frames, report=lambda text: None)
    trained = [row for _, row in source.rows(source.files[0])]
    for row, kept, again in zip(rows, kept_rows(file), trained, strict=True):
        fields = encoder.encode(row).fields
        assert fields["dataset"].tobytes() == b"robot"
        for other in (kept, again):
            for name, values in encoder.encode(other).fields.items():
                np.testing.assert_array_equal(values, fields[name])
