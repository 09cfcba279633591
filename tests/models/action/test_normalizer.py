"""The normalisation of states, actions and images: its formulas, masks and form on disk, and what depends on it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardtune
from shardtune.config import load_recipe
from shardtune.data.action_statistics import data_statistics
from shardtune.data.encoder import FrameOptions
from shardtune.errors import ConfigError, DataError
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.action.normalizer import NEEDS, Normalizer, Scale
from shardtune.models.find_adapter import find_adapter
from tests.support.robot import save_episodes

VALUES = np.random.default_rng(0).normal(size=(5, 2, 3)) * [1.0, 30.0, 0.0] + [0.0, 50.0, 7.0]
STATISTICS = {
    "mean": [0.1, 40.0, 7.0],
    "std": [0.9, 25.0, 0.0],
    "min": [-3.0, -10.0, 7.0],
    "max": [2.5, 110.0, 7.0],
    "q01": [-2.0, 0.0, 7.0],
    "q99": [2.0, 100.0, 7.0],
}


def formula(mode: str, x: Any, s: dict[str, Any]) -> Any:
    """LeRobot's, written out."""
    if mode == "MEAN_STD":
        return (x - s["mean"]) / (s["std"] + 1e-8)
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "IDENTITY": ("min", "max")}[mode]
    if mode == "IDENTITY":
        return x
    wide = s[high] - s[low]
    wide[wide == 0] = 1e-8
    return 2 * (x - s[low]) / wide - 1


@pytest.mark.parametrize("mode", NEEDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_formulas(mode: str, dtype: type) -> None:
    scale = Scale.of(mode.lower(), STATISTICS)
    values = VALUES.astype(dtype)
    expected = formula(mode, values.astype(np.float64), {name: np.array(one) for name, one in STATISTICS.items()})
    found, tensor = scale.normalise(values), scale.normalise(torch.from_numpy(values))
    assert found.dtype == dtype == tensor.numpy().dtype
    close = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found, expected, rtol=close, atol=close)
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=close, atol=close)
    for back in (scale.unnormalise(found), scale.unnormalise(tensor).numpy()):
        np.testing.assert_allclose(back, values, rtol=1e-6, atol=1e-5)  # MEAN_STD adds 1e-8 in one direction only
    again = Scale.from_json(json.loads(json.dumps(scale.to_json())))
    assert np.array_equal(again.normalise(values), found)
    assert scale.normalise(values.astype(np.float16)).dtype == np.float32
    assert scale.unnormalise(tensor.to(torch.bfloat16)).dtype == torch.float32


def test_a_dimension_that_the_mask_excludes_stays_as_it_is() -> None:
    normalizer = Normalizer.of({"action": STATISTICS}, {"ACTION": "MIN_MAX"}, action_mask=[True, False, True])
    for values in (VALUES, torch.from_numpy(VALUES)):
        found = normalizer.actions.normalise(values)
        back = normalizer.actions.unnormalise(found)
        for array in map(np.asarray, (found, back)):
            assert np.array_equal(array[..., 1], VALUES[..., 1])
        assert not np.isclose(np.asarray(found)[..., 0], VALUES[..., 0]).any()
    again = Normalizer.from_json(json.loads(json.dumps(normalizer.to_json())))
    assert again.digest == normalizer.digest != Normalizer.of({"action": STATISTICS}, {"ACTION": "MIN_MAX"}).digest
    assert np.array_equal(again.actions.normalise(VALUES), normalizer.actions.normalise(VALUES))


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES"])
def test_constant_dimensions_are_named(mode: str) -> None:
    section = {"mean": [0.5, 1.0, 2.0], "std": [0.0, 1.0, 0.0], "min": [0.5, 0.0, 2.0], "max": [0.5, 2.0, 2.0]}
    section |= {"q01": section["min"], "q99": section["max"]}
    made = Normalizer.of(
        {"action": section, "proprio": section}, {"ACTION": mode, "STATE": mode}, state_mask=[False] * 3
    )
    (line,) = made.constant()
    assert line.startswith("dimensions 0, 2 of the actions are constant (the first: 0.5): what differs from that")
    assert line.endswith("divided by 1e-08")
    assert abs(made.actions.normalise(np.array([0.6, 1.0, 2.0]))[0]) > 1e6
    assert Normalizer.of({"action": section}, {}).constant() == []


def test_images_are_normalised_by_channel() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)
    own = {"mean": [0.1, 0.2, 0.3], "std": [[[0.5]], [[0.5]], [[0.25]]]}
    normalizer = Normalizer.of({"images.wrist": own}, {"VISUAL": "MEAN_STD"})
    for values in (pixels, torch.from_numpy(pixels), torch.from_numpy(pixels).float() / 255):
        found = normalizer.images.normalise(values)
        assert np.allclose(found[0, 2, 1, 1], (pixels[0, 2, 1, 1] / 255 - 0.406) / 0.225, atol=1e-6)
        assert normalizer.camera("top").normalise(values)[1, 0, 0, 0] == found[1, 0, 0, 0]
        assert np.allclose(
            normalizer.camera("wrist").normalise(values)[0, 2, 1, 1], (pixels[0, 2, 1, 1] / 255 - 0.3) / 0.25
        )
    assert Normalizer.of({}, {"VISUAL": "MIN_MAX"}).images.normalise(pixels).min() == pytest.approx(
        pixels.min() / 127.5 - 1
    )


@pytest.mark.parametrize(
    ("mapping", "statistics", "what"),
    [
        ({"ACTION": "ZSCORE"}, STATISTICS, "no normalisation 'ZSCORE'"),
        ({"ENV": "MIN_MAX"}, STATISTICS, "no 'ENV' to normalise"),
        ({"ACTION": "QUANTILES"}, {"mean": [0.0], "std": [1.0]}, "QUANTILES needs q01 and q99, .* have mean, std"),
        ({"ACTION": "MIN_MAX"}, {**STATISTICS, "max": [0.0]}, "different shapes"),
        ({"ACTION": "MIN_MAX"}, {"min": [0.0, 2.0], "max": [1.0, 1.0]}, "dimension 1: max is 1.0, min is 2.0"),
        ({"ACTION": "MEAN_STD"}, {"mean": [0.0], "std": [float("nan")]}, "std is .* finite numbers"),
    ],
)
def test_what_cannot_be_used_is_refused(mapping: dict[str, str], statistics: dict[str, Any], what: str) -> None:
    with pytest.raises((ConfigError, DataError), match=what):
        Normalizer.of({"action": statistics}, mapping)


def test_missing_and_differing_values_are_refused() -> None:
    normalizer = Normalizer.of({"action": STATISTICS}, {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"})
    with pytest.raises(DataError, match="have no state"):
        _ = normalizer.state
    missing: Any = None  # the state of an observation without one
    with pytest.raises(DataError, match="no values to normalise: a state, or an action, is None"):
        normalizer.actions.normalise(missing)
    with pytest.raises(DataError, match=r"shape \[2\] do not have the 3 dimensions"):
        normalizer.actions.normalise([1.0, 2.0])


# -- in an adapter -------------------------------------------------------------------------------------------------

PUSHING = Path(__file__).parents[2] / "support" / "pushing.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("normalised")
    save_episodes(made / "light")
    save_episodes(made / "other", 3, seed=9)
    return made


def recipe(folder: Path, name: str = "run", **model: Any) -> dict[str, Any]:
    return {
        "runner": {
            "max_steps": 2,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optim": {"lr": 5e-3},
            "model": {"adapter": f"{PUSHING}:Pushing", "precision": "fp32", **model},
        },
        "data": {
            "train_data_paths": str(folder / "light"),
            "eval_data_paths": str(folder / "other"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }


def adapter_of(values: dict[str, Any], *overrides: str) -> ActingAdapter:
    found = find_adapter(load_recipe(values, overrides))
    assert isinstance(found, ActingAdapter)
    return found


@pytest.mark.lengthy
def test_an_adapter_has_the_statistics_of_its_rows(folder: Path) -> None:
    adapter = adapter_of(recipe(folder))
    whole = data_statistics(str(folder / "light"), adapter.recipe.data, FrameOptions(2))["light"]
    assert whole.state is not None
    found = adapter.normalizer
    assert found.actions.statistics["max"].tolist() == list(whole.action.max)
    assert found.state.statistics["std"].tolist() == list(whole.state.std)
    assert found.mapping == {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    chosen = adapter_of(recipe(folder, normalization_mapping={"STATE": "IDENTITY"})).normalizer
    assert (chosen.state.mode, chosen.actions.mode) == ("IDENTITY", "MIN_MAX")
    with pytest.raises(ConfigError, match="no action statistics of 'lite'; there are of: light"):
        _ = adapter_of(recipe(folder), "actor.model.unnorm_key=lite").normalizer
    two = recipe(folder)
    two["data"]["train_data_paths"] = [str(folder / "light"), str(folder / "other")]
    both = adapter_of(two)
    assert set(both.normalizers) == {"light", "other"}
    with pytest.raises(ConfigError, match="statistics of 2 datasets: light, other"):
        _ = both.normalizer
    assert adapter_of(two, "actor.model.unnorm_key=other").normalizer.digest == both.normalizers["other"].digest


def test_other_statistics_are_other_rows(folder: Path, tmp_path: Path) -> None:
    """The key of the cache changes with a file of statistics; other processes encode by the same ones."""
    content = {"robot": {"action": STATISTICS, "proprio": {name: one[:2] for name, one in STATISTICS.items()}}}
    keys, values = [], np.array([[0.0, 50.0, 7.0]] * 2)
    for high in (110.0, 120.0):
        content["robot"]["action"]["max"] = [2.5, high, 7.0]
        (tmp_path / "statistics.json").write_text(json.dumps(content))
        adapter = adapter_of(recipe(folder, action_statistics=str(tmp_path / "statistics.json")))
        encoder = adapter.encoder(with_prompts=False)
        keys.append(encoder.cache_key())
        (tmp_path / "statistics.json").write_text("{}")
        there = pickle.loads(pickle.dumps(encoder))
        sample = there.encode({"state": np.zeros(2), "actions": values})
        assert sample.fields["actions"][0, 1] == pytest.approx(2 * 60 / (high + 10) - 1)
    assert keys[0] != keys[1]
    with pytest.raises(DataError, match="holds no statistics"):
        _ = adapter_of(recipe(folder, action_statistics=str(tmp_path / "statistics.json"))).normalizer


def test_a_files_own_masks_are_kept(folder: Path, tmp_path: Path) -> None:
    content = {"robot": {"action": {**STATISTICS, "mask": [True, False, True]}, "proprio": STATISTICS}}
    (tmp_path / "statistics.json").write_text(json.dumps(content))
    found = adapter_of(recipe(folder, action_statistics=str(tmp_path / "statistics.json"))).normalizer
    assert found.actions.mask is not None
    assert found.actions.mask.tolist() == [True, False, True]
    assert found.state.mask is None


@pytest.mark.lengthy
def test_the_trained_model_has_its_normalizer_beside_it(folder: Path) -> None:
    run = shardtune.train(recipe(folder, "saved"))
    saved = json.loads((run.dir / "final" / "normalizer.json").read_text())
    trained = adapter_of(recipe(folder)).normalizer
    assert Normalizer.from_json(saved["light"]).digest == trained.digest
    other = {"light": {**saved["light"], "state": {"mode": "IDENTITY"}}}
    (run.dir / "final" / "normalizer.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="STATE is normalised by IDENTITY in the file, and by MEAN_STD"):
        run.evaluate()
