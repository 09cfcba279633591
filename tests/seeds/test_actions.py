"""The guide for action models: config and processor, the model, its YAML, and training up to `final/`.

The model, the processor and the worker are a stranger's, built as OpenVLA is. `tests/seeds/actions.py` lists what is
not as it is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from PIL import Image
from transformers import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

import shardtune
from shardtune.config import ModelConfig, Recipe, load_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError, ModelError
from shardtune.models.check_sizes import check_sizes
from tests.seeds.actions import overrides, registering_anew, write_guide
from tests.support.foreign_action import KEY, PLAIN, save_plain, statistics, write_frames, your_package
from tests.support.foreign_worker import WORKER
from tests.support.registry import nothing_registered
from tests.support.tiny_run import lines

LORA = ("actor.model.is_lora=true", "actor.model.lora.r=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("guide")
    with your_package(made, PLAIN):
        save_plain(made / "model")
        write_frames(made / "frames.jsonl")
        write_guide(made)
        (made / "your_worker.py").write_text(WORKER)
        yield made


@pytest.fixture(autouse=True)
def _registry(folder: Path) -> Iterator[None]:
    with registering_anew(folder):
        yield


def recipe(folder: Path, *given: str) -> Recipe:
    found = load_recipe(folder / "recipe.yaml", [f"data.train_data_paths={folder / 'frames.jsonl'}", *given])
    import_plugins(found.plugins)
    return found


def inputs(processor: Any) -> dict[str, torch.Tensor]:
    pictures = [Image.fromarray(np.full((20, 30, 3), shade, np.uint8)) for shade in (30, 200)]
    return processor(["In: go\nOut:", "In: pick up the cup\nOut:"], pictures, padding=True)


@pytest.mark.lengthy
def test_the_whole_guide(folder: Path) -> None:
    recipe(folder)
    cfg: Any = OmegaConf.load(folder / "recipe.yaml")  # as it is printed, model: at the top
    config, found = shardtune.get_model_config_and_processor(cfg)
    processor: Any = found
    assert type(config).__module__ == "your_package.modeling"
    assert type(processor).__name__ == "YourProcessor"
    assert processor.tokenizer.padding_side == "left"

    model: Any = shardtune.get_model(cfg.model)
    assert type(model).__name__ == "YourModelForRLActionPrediction"
    assert model.dtype == torch.bfloat16
    assert model.min_action.tolist() == statistics()["action"]["q01"]

    given = inputs(processor)
    actions, sequences, logits, values = model.predict_action_batch(**given, do_sample=False, max_new_tokens=7)
    assert actions.equal(sequences[:, -7:])
    assert sequences.shape == (2, given["input_ids"].shape[1] + 7)
    assert logits.shape == (2, 7, 32000)
    assert values.shape == (2, 7, 1)
    assert torch.isfinite(values).all()
    assert values.abs().max() > 0
    assert (actions >= 31744).all()
    drawn = [model.predict_action_batch(**given, max_new_tokens=7)[0] for _ in range(2)]
    assert len({tuple(row) for one in drawn for row in one.tolist()}) > 2


@pytest.mark.lengthy
@pytest.mark.parametrize("lora", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_recipe_to_final(folder: Path, lora: tuple[str, ...]) -> None:
    """By a worker of one's own that predicts actions, on one rank and on two, with two micro-batches each."""
    worker, name = f"actor.worker={folder / 'your_worker.py'}:YourWorker", "lora" if lora else "full"
    run = shardtune.train(folder / "recipe.yaml", *overrides(folder, name, [worker, *lora]))
    two = [worker, *lora, "runner.nproc_per_node=2"]
    on_two = shardtune.train(folder / "recipe.yaml", *overrides(folder, f"{name}-2", two))
    for one, other in zip(lines(run.dir), lines(on_two.dir), strict=True):
        compared = {key for key in one if key.startswith(("train/", "eval/"))}
        assert {key: other[key] for key in compared} == pytest.approx({key: one[key] for key in compared}, rel=1e-10)
    measured = {key: value for key, value in lines(run.dir)[-1].items() if key.startswith("eval/")}
    assert measured.keys() == {"eval/right", "eval/logit", "eval/value"}
    final = json.loads((run.dir / "final/metrics.json").read_text())
    assert {key: final[key] for key in measured} == pytest.approx(measured)

    ours = recipe(folder, "actor.model.precision=fp64")
    first: Any = shardtune.get_model(ours.actor.model)
    _, processor = shardtune.get_model_config_and_processor(ours.actor)
    given = inputs(processor)
    untrained = first.predict_action_batch(**given, do_sample=False, max_new_tokens=7)[2]
    if lora:
        loaded: Any = PeftModel.from_pretrained(first, str(run.dir / "final")).base_model.model
        assert type(loaded.value_head).__name__ == "ModulesToSaveWrapper"  # no file of the base has it
    else:
        _reads_alone(run.dir / "final")
        found = recipe(folder, "actor.model.precision=fp64", f"actor.model.model_path={run.dir / 'final'}")
        loaded = shardtune.get_model(found.actor.model)
        head, idle = first.value_head.state_dict(), "vision_tower.2.up.weight"
        assert loaded.value_head.state_dict().keys() == head.keys()
        assert loaded.state_dict()[idle].equal(first.state_dict()[idle])  # no gradient, and no decay without one
    trained = loaded.predict_action_batch(**given, do_sample=False, max_new_tokens=7)[2:]
    assert not torch.equal(trained[0], untrained)

    if not lora:
        return
    target = run.export(folder / "merged", merge=True)
    found = recipe(folder, "actor.model.precision=fp64", f"actor.model.model_path={target}")
    merged: Any = shardtune.get_model(found.actor.model)
    _, _, logits, values = merged.predict_action_batch(**given, do_sample=False, max_new_tokens=7)
    torch.testing.assert_close((logits, values), trained)


def _reads_alone(final: Path) -> None:
    names = {file.name for file in final.iterdir()}
    assert {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"} <= names


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
    assert found.where("actor.model.vocab_size") == f"{folder / 'recipe.yaml'}:12"
    over = recipe(folder, "actor.micro_batch_size=4", "actor.eval_micro_batch_size=2").actor
    assert (over.micro_batch_size, over.eval_micro_batch_size) == (4, 2)
    assert recipe(folder, "actor.micro_batch_size=1").actor.micro_batch_size == 1


@pytest.mark.lengthy
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


@pytest.mark.lengthy
def test_sizes_that_cannot_be_compared(folder: Path) -> None:
    """A config with names of its own, and image processors that make or refuse something else."""

    class Config(PreTrainedConfig):
        width = 24

    check_sizes(ModelConfig(vocab_size=320, hidden_size=32), Config())
    _, processor = shardtune.get_model_config_and_processor(recipe(folder).actor)
    images: Any = processor.image_processor
    given = ModelConfig(image_size=[28, 28])
    check_sizes(given, Config(), images=images)

    class Renamed(type(images)):
        def __call__(self, images: Any, **_: Any) -> Any:
            return {"picture": super().__call__(images)["pixel_values"]}

    with pytest.raises(ConfigError, match="cannot be compared, the images become picture"):
        check_sizes(given, Config(), images=Renamed())
    with pytest.raises(ModelError, match="YourImageProcessor refuses an image of 28 x 28: "):
        check_sizes(given, Config(), images=type(images)(side=-1))


def test_an_action_that_is_not_the_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="action_token_len is 6, the actions of your_action_key have 7"):
        shardtune.get_model(recipe(folder, "actor.model.action_token_len=6").actor.model)
    monkeypatch.setattr("shardtune.run.ranks.run_ranks", None)  # refused before ranks are started
    worker = f"actor.worker={folder / 'your_worker.py'}:YourWorker"
    given = overrides(folder, "wrong", ["actor.model.action_token_len=6", worker, "runner.nproc_per_node=2"])
    with pytest.raises(ConfigError, match="action_token_len is 6, the actions of your_action_key have 7"):
        shardtune.train(folder / "recipe.yaml", *given)


def test_attention_that_is_not_there(folder: Path) -> None:
    found = recipe(folder, "actor.model.attn_implementation=auto")
    model: Any = shardtune.get_model(found.actor.model)
    assert model.config._attn_implementation == "sdpa"
    names = {"attn_implementation=nonsense": "nonsense cannot be used: "}
    if not is_flash_attn_2_available():
        names["attn_implementation=flash_attention_2"] = "flash_attention_2 cannot be used: FlashAttention2"
    for override, message in names.items():
        with pytest.raises(ModelError, match=message) as refused:
            shardtune.get_model(recipe(folder, f"actor.model.{override}").actor.model)
        assert refused.value.where == "actor.model.attn_implementation"


def test_sections_with_a_mistake(folder: Path) -> None:
    recipe(folder)
    cfg: Any = OmegaConf.merge(OmegaConf.load(folder / "recipe.yaml"), {"model": {"hiden_size": 16}})
    with pytest.raises(ConfigError, match=r"actor.model.hiden_size: Extra inputs are not permitted"):
        shardtune.get_model(cfg.model)
    with pytest.raises(ConfigError, match=r"hidden_size"):
        shardtune.get_model_config_and_processor(cfg)


@pytest.mark.lengthy
def test_rows_of_a_processor_without_places_for_images(folder: Path) -> None:
    with pytest.raises(ConfigError, match="YourProcessor has no image_token"):
        shardtune.train(folder / "recipe.yaml", *overrides(folder, "no-worker", []))


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
