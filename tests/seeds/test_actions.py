"""The guide for action models: config and processor, the model, its YAML, on a small OpenVLA directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

import shardtune
from shardtune.config import Recipe, load_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError
from shardtune.models.action.openvla import OpenVLAConfig
from shardtune.models.action.openvla_processor import PrismaticProcessor
from tests.seeds.actions import (
    CONFIG,
    CONFIG_CHANGES,
    GET_MODEL,
    GET_MODEL_CHANGES,
    IMPORTS,
    MODEL,
    MODEL_CHANGES,
    RECIPE,
    RECIPE_CHANGES,
)
from tests.seeds.guide import changed
from tests.support.registry import nothing_registered
from tests.support.tiny_openvla import STATISTICS, save_openvla

KEY = "your_action_key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in OpenVLA's format with one data set, and the samples as a plugin."""
    made = tmp_path_factory.mktemp("seed")
    save_openvla(made / "model")
    file = made / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "norm_stats": {KEY: STATISTICS["bridge_orig"]}}))
    samples = (changed(CONFIG, CONFIG_CHANGES), changed(MODEL, MODEL_CHANGES), changed(GET_MODEL, GET_MODEL_CHANGES))
    (made / "your_model.py").write_text(IMPORTS + "\n\n".join(samples))
    return made


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """What the sample registers with transformers is gone afterwards."""
    kept = [(mapping, dict(mapping._extra_content)) for mapping in (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING)]
    with nothing_registered():
        yield
    CONFIG_MAPPING._extra_content.pop("openvla", None)
    for mapping, content in kept:
        mapping._extra_content = content


def recipe(folder: Path, *overrides: str, text: str = "") -> Recipe:
    printed = yaml.safe_load(text or changed(RECIPE, RECIPE_CHANGES))
    values = {
        "plugins": [str(folder / "your_model.py")],
        "actor": {**printed, "tokenizer": {"tokenizer_model": str(folder / "model")}},
    }
    given = [f"actor.model.model_path={folder / 'model'}", f"data.train_data_paths={folder}", *overrides]
    found = load_recipe(values, given)
    import_plugins(found.plugins)
    return found


def test_the_whole_guide(folder: Path) -> None:
    actor = recipe(folder).as_dict_config().actor
    config, processor = shardtune.get_model_config_and_processor(actor)
    assert isinstance(config, OpenVLAConfig)
    assert isinstance(processor, PrismaticProcessor)
    assert processor.tokenizer.padding_side == "left"

    model: Any = shardtune.get_model(actor.model)
    assert type(model).__name__ == "YourModelForRLActionPrediction"
    assert model.dtype == torch.bfloat16
    assert model.min_action.tolist() == STATISTICS["bridge_orig"]["action"]["q01"]

    pictures = [Image.fromarray(np.full((20, 30, 3), shade, np.uint8)) for shade in (30, 200)]
    given = processor(["In: go\nOut:", "In: pick up the cup\nOut:"], pictures, padding=True)
    actions, sequences, logits, values = model.predict_action_batch(**given, do_sample=False, max_new_tokens=7)
    assert actions.shape == (2, 1, 7)
    assert sequences.shape == (2, given["input_ids"].shape[1] + 7)
    assert logits.shape == (2, 7, 32064)
    assert values.shape == (2, 7, 1)
    assert torch.isfinite(values).all()
    assert values.abs().max() > 0
    assert ((sequences[:, -7:] >= 31744) & (sequences[:, -7:] < 32000)).all()
    low, high = model.min_action[:6], model.max_action[:6]
    assert ((actions[:, 0, :6].numpy() >= low - 1e-6) & (actions[:, 0, :6].numpy() <= high + 1e-6)).all()
    drawn = [model.predict_action_batch(**given, max_new_tokens=7)[1] for _ in range(4)]
    assert len({tuple(row) for one in drawn for row in one[:, -7:].tolist()}) > 2


def test_each_key_has_its_meaning(folder: Path) -> None:
    found = recipe(folder)
    assert (found.actor.micro_batch_size, found.actor.eval_micro_batch_size) == (1, 8)
    assert (found.actor.model.micro_batch_size, found.actor.model.val_micro_batch_size) == (None, None)
    again = load_recipe(found.to_dict())
    assert (again.actor.micro_batch_size, again.actor.eval_micro_batch_size) == (1, 8)
    model = found.actor.model
    assert (model.action_token_len, model.action_chunks_len, model.unnorm_key) == (7, 1, KEY)
    assert model.low_cpu_mem_usage
    assert model.trust_remote_code
    with pytest.raises(ConfigError, match=r"actor.model.micro_batch_size \(1\) and actor.micro_batch_size \(4\)"):
        recipe(folder, "actor.micro_batch_size=4")
    with pytest.raises(ConfigError, match=r"val_micro_batch_size.*actor.eval_micro_batch_size \(4\)"):
        recipe(folder, "actor.eval_micro_batch_size=4")
    assert recipe(folder, "actor.micro_batch_size=1").actor.micro_batch_size == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.model.vocab_size=32064", "vocab_size is 32064, the model has 32000"),
        ("actor.model.hidden_size=4096", "hidden_size is 4096, the model has 16"),
        ("actor.model.image_size=[224,224]", r"image_size is \[224, 224\], the model has \[28, 28\]"),
    ],
)
def test_sizes_that_are_not_the_models(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shardtune.get_model_config_and_processor(recipe(folder, override).actor)


def test_an_action_that_is_not_the_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="action_token_len is 6, the actions of your_action_key have 7"):
        shardtune.get_model(recipe(folder, "actor.model.action_token_len=6").actor.model)
    with pytest.raises(ConfigError, match="'mine'; there are of: your_action_key"):
        shardtune.get_model(recipe(folder, "actor.model.unnorm_key=mine").actor.model)


def test_a_name_without_such_a_function(folder: Path) -> None:
    found = recipe(folder)
    with nothing_registered():
        shardtune.register_model("your_model_type")(lambda cfg: None)
        with pytest.raises(ConfigError, match="no function is registered that gives config and processor"):
            shardtune.get_model_config_and_processor(found.actor)
        shardtune.register_model("your_model_type", gives="config_and_processor")(lambda cfg: 3)
        with pytest.raises(ConfigError, match="returned int, not a config and a processor"):
            shardtune.get_model_config_and_processor(found.actor)
        with pytest.raises(ConfigError, match="gives='config_and_processor' does not go with the adapter"):
            shardtune.register_model("other", gives="config_and_processor")(_an_adapter())


def _an_adapter() -> type[Any]:
    class Mine(shardtune.Adapter):
        def build(self) -> Any: ...
        def encode(self, row: Any) -> Any: ...
        def loss(self, model: Any, batch: Any) -> Any: ...

    return Mine


def test_the_systems_own_names_need_no_function(folder: Path) -> None:
    values = {"actor.model.model_type": "vision_language_action", "actor.model.trust_remote_code": "false"}
    found = recipe(folder, *(f"{key}={value}" for key, value in values.items()))
    config, processor = shardtune.get_model_config_and_processor(found.actor)
    assert isinstance(config, OpenVLAConfig)
    assert isinstance(processor, PrismaticProcessor)
    model: Any = shardtune.get_model(found.actor.model)
    assert model.action_settings.unnorm_key == KEY
    assert next(model.parameters()).is_meta
    with pytest.raises(ConfigError, match="hidden_size is 4096"):
        shardtune.get_model_config_and_processor({"model": {**found.actor.model.model_dump(), "hidden_size": 4096}})
