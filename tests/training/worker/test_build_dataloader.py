"""A worker's build_dataloader is called with the arguments that it accepts; what cannot be called is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.training.worker.build_dataloader import call_build_dataloader
from shardtune.training.worker.task import DataPaths
from tests.training.worker import test_base as own

PATHS = DataPaths(["a", "b"])


class Bare(own.Task):
    """As the guide prints the abstract method."""

    def build_dataloader(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().build_dataloader(list(self.cfg.data.train_data_paths or []))


class Strange(own.Task):
    def build_dataloader(self, paths: Any, split: Any, seed: Any) -> Any:  # pyright: ignore
        return super().build_dataloader(paths)


def test_as_many_arguments_as_it_accepts() -> None:
    def both(data_paths: list[str], eval_dataset: bool = False) -> object:
        return data_paths, eval_dataset

    def other_names(paths: list[str], is_eval: bool) -> object:
        return paths, is_eval

    for method in (both, other_names):
        assert call_build_dataloader(method, PATHS, eval_dataset=True) == (["a", "b"], True)
    assert call_build_dataloader(lambda paths: paths, PATHS, eval_dataset=True) == ["a", "b"]
    assert call_build_dataloader(lambda: 1, PATHS, eval_dataset=False) == 1
    with pytest.raises(ConfigError, match=r"build_dataloader\(\) takes no data_paths and eval_dataset, so it cannot"):
        call_build_dataloader(lambda: 1, PATHS, eval_dataset=True)


def given(folder: Path, kind: str, *overrides: str) -> Any:
    values = own.recipe(str(folder), max_steps=1).to_dict()
    values["actor"]["worker"] = f"{__file__}:{kind}"
    return load_recipe(values, overrides).to_dict()


def test_one_without_arguments_trains(tmp_path: Path) -> None:
    assert shardtune.train(given(tmp_path, "Bare", "data.eval_data_paths=null")).metrics["step"] == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Bare", "build_dataloader() takes no data_paths and eval_dataset, so it cannot load the evaluation rows"),
        ("Strange", "build_dataloader(paths, split, seed) takes other arguments than it is called with"),
    ],
)
def test_what_cannot_be_called_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, says: str
) -> None:
    monkeypatch.setattr("shardtune.run.ranks.run_ranks", None)  # whoever started ranks would call it
    for ranks in (1, 2):
        with pytest.raises(ConfigError) as error:
            shardtune.train(given(tmp_path, kind, f"runner.nproc_per_node={ranks}"))
        assert says in str(error.value)


def test_rows_that_are_tokenised_file_by_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache: by_file .* build_dataloader returns batches of its own"):
        shardtune.train(given(tmp_path, "Bare", "data.eval_data_paths=null", "data.cache=by_file"))
    assert not [*tmp_path.rglob("metrics.jsonl")]
