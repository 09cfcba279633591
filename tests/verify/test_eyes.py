"""The kit finds nothing wrong with models that see and models that act."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.evaluate.environments.point2d import Point2d
from shardtune.evaluate.environments.scripted import demonstrations
from shardtune.verify.adapter import verify_adapter
from tests.support.dist.training import quiet
from tests.support.vision import save_image_rows, save_vision_model


def rows_that(does: str, folder: Path) -> Path:
    if does == "sees":
        return save_image_rows(folder, 8)[0]
    write_lerobot(folder / "episodes", demonstrations(Point2d(image_size=28), 2), fps=10)
    return folder / "episodes"


@pytest.mark.parametrize(
    ("does", "kind"),
    [
        pytest.param("sees", "vision_language", marks=pytest.mark.slow),
        pytest.param("acts", "vision_language_action", marks=pytest.mark.slow),
    ],
)
@pytest.mark.lengthy
def test_the_kit_finds_nothing_wrong(does: str, kind: str, tmp_path: Path) -> None:
    """In this process alone; fresh processes and ranks have tests of their own."""
    recipe = {
        "actor": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "model": {"model_type": kind, "model_path": str(save_vision_model("llava", tmp_path / "model"))},
        },
        "data": {"train_data_paths": str(rows_that(does, tmp_path)), "cache_dir": str(tmp_path / "cache")},
    }
    (tmp_path / "recipe.yaml").write_text(OmegaConf.to_yaml(recipe))
    report = verify_adapter(tmp_path / "recipe.yaml", processes=False, report=quiet)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert sum(result.outcome == "passed" for result in report.results) >= 12
