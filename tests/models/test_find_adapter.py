"""From `actor.model` to config, tokenizer and adapter; what is wrong with them is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPVisionConfig, GPT2Config, LlamaConfig, LlavaConfig

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.config import ModelConfig, load_recipe
from shardtune.errors import ConfigError, ModelError, ShardtuneError
from shardtune.models import pretrained
from shardtune.models.find_adapter import causal_lm, find_adapter, known_architectures
from shardtune.models.get_model import get_model
from shardtune.models.pretrained import load_config, load_tokenizer, model_directory
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.workspace import make_model, make_tokenizer, make_workspace, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(259).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def config(path: Path | str, **values: Any) -> ModelConfig:
    return ModelConfig(model_path=str(path), **values)


def test_overrides_reach_the_model(folder: Path) -> None:
    assert load_config(config(folder, config_overrides={"attention_dropout": 0.25})).attention_dropout == 0.25
    assert load_config(config(folder), {"rms_norm_eps": 0.5}).rms_norm_eps == 0.5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"atention_dropout": 0.1}, "did you mean attention_dropout"),
        ({"zzz": 0.1}, "it has .*vocab_size"),
        ({"hidden_size": 33}, r"hidden size \(33\)"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(folder: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(config(folder, config_overrides=overrides))
    assert caught.value.where == "actor.model.config_overrides"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model of several parts."""
    path = tmp_path_factory.mktemp("llava")
    LlavaConfig(text_config=LlamaConfig(), vision_config=CLIPVisionConfig()).save_pretrained(path)
    return path


def test_overrides_reach_each_part_of_a_model(llava: Path) -> None:
    """A setting of the whole, of the language model, of both, and of another part under its name."""
    overrides = {
        "vision_feature_layer": -1, "rms_norm_eps": 0.5, "tie_word_embeddings": True,
        "vision_config": {"attention_dropout": 0.25},
    }  # fmt: skip
    made = load_config(config(llava, config_overrides=overrides))
    assert isinstance(made, LlavaConfig)
    text = made.get_text_config()
    assert made.vision_feature_layer == -1
    assert text.to_dict()["rms_norm_eps"] == 0.5
    assert (made.tie_word_embeddings, text.to_dict()["tie_word_embeddings"]) == (True, True)
    assert made.to_dict()["vision_config"]["attention_dropout"] == 0.25


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"vision_feature_layr": -1}, "did you mean vision_feature_layer"),
        ({"vision_feature_layer": "x"}, "vision_feature_layer.*expected int"),
        ({"vision_config": {"atention_dropout": 0.1}}, "vision_config.atention_dropout is not a setting of CLIPVision"),
        ({"vision_config": 3}, "vision_config = 3: it is a part of the model"),
    ],
)
def test_overrides_that_do_not_fit_a_part_are_refused(llava: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(config(llava, config_overrides=overrides))
    assert caught.value.where == "actor.model.config_overrides"


class Own(Adapter):
    """Reads one of the keys of sizes."""

    reads = ("actor.model.hidden_size",)

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def encode(self, row: Any) -> Sample:
        return Sample(fields={"x": np.array(row["x"], np.float32)})

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), float(len(batch["x"])))


def test_sizes_are_for_adapters_that_read_them() -> None:
    def found(**model: Any) -> Adapter:
        data = {"train_data_paths": "rows.jsonl"}
        values = {"actor": {"model": {"adapter": f"{__file__}:Own", "from_scratch": True, **model}}, "data": data}
        return find_adapter(load_recipe(values, files_must_exist=False))

    assert isinstance(found(hidden_size=5), Adapter)
    for key, value in (("vocab_size", 5), ("image_size", [5, 5])):
        with pytest.raises(ConfigError, match=f"actor.model.{key}: the adapter Own does not read it"):
            found(**{key: value})


@pytest.mark.parametrize(
    "model", [{"from_scratch": True}, {"config_overrides": {"rms_norm_eps": 0.5}}, {"attn_implementation": "eager"}]
)
def test_a_model_in_memory_is_trained_as_it_is(folder: Path, model: dict[str, Any]) -> None:
    """Keys of how a model is built were accepted beside it, and did nothing."""
    values = {"actor": {"model": {"model_path": str(folder), **model}}, "data": {"train_data_paths": "rows.jsonl"}}
    recipe = load_recipe(values, files_must_exist=False)
    assert find_adapter(recipe)
    with pytest.raises(ConfigError, match=f"actor.model.{next(iter(model))} has no effect on a model in memory"):
        find_adapter(recipe, model=make_model(259))


def test_the_model_stands_on_meta_and_returns_a_loss(folder: Path) -> None:
    model = get_model({"model_path": str(folder)})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {str(b.device) for b in model.buffers()} == {"cpu"}
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    assert model.to_empty(device="meta")(input_ids=ids, labels=ids).loss.shape == ()


def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"^the config of .* is custom code, which runs only with consent") as error:
        causal_lm(config(tmp_path))
    assert "trust_remote_code=true" in error.value.remedy
    assert not (tmp_path / "ran").exists()
    (tmp_path / "code.py").write_text("import not_installed_here\n")
    with pytest.raises(ModelError, match=r"cannot be imported: .*not_installed_here"):
        causal_lm(config(tmp_path, trust_remote_code=True))


def test_code_of_a_tokenizer_is_not_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"^the tokenizer of .* is custom code, which runs only with consent") as error:
        load_tokenizer(str(tmp_path))
    assert "trust_remote_code=true" in error.value.remedy
    assert not (tmp_path / "ran").exists()


def test_a_hub_name_is_fetched_once_weights_and_settings_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(folder)

    monkeypatch.setattr(pretrained, "snapshot_download", fetch)
    assert model_directory("org/model") == folder
    assert asked == [
        ("org/model", {"revision": None, "allow_patterns": [*pretrained.SETTINGS, *pretrained.TERMS, "*.safetensors"]})
    ]
    assert model_directory(str(folder)) == folder
    assert len(asked) == 1


def test_a_hub_name_that_cannot_be_fetched_is_told() -> None:
    with pytest.raises(ModelError, match=r"(?s)org/never-heard-of.*Hub.*give a directory"):
        model_directory("org/never-heard-of")


def test_rows_may_not_be_longer_than_learned_positions(tmp_path: Path) -> None:
    """GPT-2 calls its positions n_positions, and reads past its table without them."""
    work = make_workspace(tmp_path / "work")
    sizes = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=48, bos_token_id=0, eos_token_id=0)
    sizes.save_pretrained(work / "model")
    recipe = load_recipe(work / "recipe.yaml", ["actor.model.from_scratch=true"])
    with pytest.raises(ModelError, match=r"(?s)the model takes 48 \(n_positions\).*train.jsonl.*max_length to 48"):
        SFTWorker(recipe, report=lambda text: None)
    short = load_recipe(work / "recipe.yaml", ["actor.model.from_scratch=true", "data.max_length=48"])
    assert SFTWorker(short, report=lambda text: None, train_data=rows(2)).prepared.train is not None


def test_architectures_are_listed_by_how_they_have_been_seen_to_train() -> None:
    text, vision = known_architectures()["causal_lm"], known_architectures()["vision_language"]
    assert {"llama", "qwen3_moe", "gemma3_text", "mistral"} <= set(text["packed"])
    assert {"stablelm", "llama4_text"} <= set(text["rows of one length"])
    assert {"llava", "qwen2_5_vl", "idefics3"} <= set(vision["packed"])
    assert {"lfm2_vl", "mistral3"} <= set(vision["packed, where torchvision is installed"])
    listed = [name for found in (text, vision) for names in found.values() for name in names]
    assert not {"florence2", "pix2struct", "vision-encoder-decoder"} & set(listed)


def test_no_path_is_an_error() -> None:
    with pytest.raises(ShardtuneError, match=r"model_path is not set"):
        load_config(ModelConfig())
