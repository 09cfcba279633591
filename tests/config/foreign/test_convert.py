"""Whole configurations of eight trainers as recipes: no key is lost, and what is written loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config import load_recipe
from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.convert import convert
from shardtune.config.foreign.trainers import TRAINERS
from shardtune.config.foreign.written import recipe_text
from shardtune.errors import ConfigError
from tests.config.foreign.conftest import FILES, SMALLEST, SOURCES, value
from tests.support.workspace import run_cli


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_an_outcome_and_the_recipe_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(SOURCES)
    target = tmp_path / "recipe.yaml"
    found = convert(CommandLine(Path(name)), to=target)
    conversion = found.conversion
    assert conversion.trainer == FILES[name]
    assert set(conversion.outcomes) == set(conversion.given)
    assert all(f"{key}: " in found.report for key in conversion.given)
    target.write_text(found.recipe)
    recipe = load_recipe(target, files_must_exist=False)
    given = {key: line.value for key, line in conversion.lines.items()}
    assert recipe.actor.optim.lr == given.get("actor.optim.lr", 1e-5)
    assert recipe.data.max_length == given["data.max_length"] == 64
    assert str(recipe.data.train_data_paths).count(str(SOURCES / "rows.jsonl")) == 1  # found from another folder
    assert "does not load" not in found.report
    left = [key for key, one in conversion.outcomes.items() if one.kind in (Kind.MISSING, Kind.UNKNOWN)]
    assert all(f"# {key}: " in found.recipe for key in left)
    assert left == {
        "trl.yaml": ["learnin_rate"],
        "axolotl.yaml": ["plugins"],
        "torchtitan.toml": ["model.name", "model.flavor"],
    }.get(name, [])


def test_the_recipe_is_read_as_it_is_meant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(SOURCES)
    lines = convert(CommandLine(Path("axolotl.yaml")), world_size=4).conversion.lines
    assert {key: line.value for key, line in lines.items() if key.startswith(("actor", "data"))} == {
        "actor.micro_batch_size": None,
        "actor.max_tokens_per_micro_batch": 128,
        "actor.global_batch_tokens": 2 * 2 * 4 * 64,
        "actor.model.model_path": "./model",
        "actor.model.gradient_checkpointing": True,
        "actor.model.is_lora": True,
        "actor.model.lora.r": 4,
        "actor.model.lora.alpha": 8,
        "actor.model.lora.base_dtype": "nf4",
        "actor.optim.lr": 2e-4,
        "actor.optim.state_dtype": "int8",
        "actor.optim.min_lr": pytest.approx(2e-5),
        "actor.optim.lr_warmup_steps": 2,
        "actor.optim.lr_warmup_from_zero": True,
        "data.train_data_paths": "rows.jsonl",
        "data.eval_split": 0.2,
        "data.max_length": 64,
        "data.on_too_long": "drop",
        "data.cache_dir": "prepared",
    }


@pytest.mark.parametrize("trainer", SMALLEST)
def test_the_fewest_keys_are_enough_and_an_empty_value_is_the_default(of, trainer: str):
    section = {"torchtitan": "debug", "verl": "engine"}.get(trainer)
    found = of(trainer, **({section: {"seed": None}} if section else {"seed": None}))
    assert "still to be given" not in found.report
    assert "does not load" not in found.report
    (seed,) = (one for name, one in found.conversion.outcomes.items() if name.endswith("seed"))
    assert seed.kind is Kind.DEFAULT


@pytest.mark.parametrize(
    ("trainer", "changes", "what"),
    [
        ("trl", {"beta": 0.1}, r"beta: 0\.1"),
        ("trl", {"reward_funcs": ["accuracy"]}, "reward_funcs"),
        ("axolotl", {"rl": "dpo"}, "rl: dpo"),
        ("axolotl", {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "masked tokens"),
        ("torchtune", {"optimizer": None, "dataset": None, "tasks": ["x"]}, "does not train"),
        ("llama-factory", {"stage": "dpo"}, "stage: dpo"),
        ("llama-factory", {"peft_config": {"name": "lora"}}, "v1 trainer"),
        ("torchtune", {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "DPOLoss"),
        ("nemo", {"recipe": "TrainEagle3Recipe"}, "TrainEagle3Recipe"),
        ("torchtitan", {"model": {"name": "flux"}}, "draws images"),
        ("ms-swift", {"rlhf_type": "dpo"}, "rlhf_type: dpo"),
        ("ms-swift", {"mcore_model": "x", "micro_batch_size": 1}, "for Megatron"),
        ("verl", {"actor_rollout_ref": {"model": {"path": "x"}}}, "verl with actor_rollout_ref"),
        ("nemo", {"recipe": {"_target_": "nemo_automodel.recipes.retrieval.TrainBiEncoderRecipe"}}, "embedding or"),
    ],
)
def test_what_is_no_fine_tuning_is_refused(of, trainer: str, changes: dict[str, object], what: str):
    with pytest.raises(ConfigError, match=what):
        of(trainer, **changes)


def test_the_command_writes_reports_and_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text("model_name_or_path: org/model\ndataset_name: org/rows\nfoo_bar: 1\n")
    refused = run_cli("convert", "sft.yaml", "--world-size", "2", "-o", "new/recipe.yaml")
    assert (refused.code, "there is no folder new" in refused.err) == (2, True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    done = run_cli("convert", "sft.yaml", "--world-size", "2", "-o", "new/recipe.yaml")
    assert done.code == 0
    assert "foo_bar: 1  ->  no key of TRL" in done.out
    assert load_recipe(tmp_path / "new" / "recipe.yaml", files_must_exist=False).actor.global_batch_size == 16
    again = run_cli("convert", "sft.yaml", "-o", "new/recipe.yaml")
    assert (again.code, "exists already" in again.err) == (2, True)
    printed = run_cli("convert", "sft.yaml")
    assert printed.out.startswith("# sft.yaml, a configuration of TRL")
    assert "translated:" in printed.err
    whole = run_cli("train", "sft.yaml")
    assert (whole.code, "shardtune convert sft.yaml" in whole.err) == (2, True)
    (tmp_path / "titan.toml").write_text("[training]\nsteps = 1\n")
    toml = run_cli("train", "titan.toml")
    assert (toml.code, "shardtune convert titan.toml" in toml.err) == (2, True)


def test_a_file_of_no_known_trainer_is_refused(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("a: 1\nb: 2\n")
    with pytest.raises(
        ConfigError,
        match=r"not recognised(.|\n)*--from trl, axolotl, .*, torchtitan, verl, halos or rlinf",
    ):
        convert(CommandLine(tmp_path / "x.yaml"))
    for keys, says in (("distributed_type: FSDP", "accelerate"), ("zero_optimization: {stage: 3}", "DeepSpeed")):
        (tmp_path / "x.yaml").write_text(f"{keys}\nb: 2\n")
        with pytest.raises(ConfigError, match=f"a file of {says}(.|\n)*shardtune convert .*x.yaml"):
            convert(CommandLine(tmp_path / "x.yaml"))
    for keys, says in (
        ("exp_name: ???\nn_epochs: 1\nlocal_run_dir: '${exp_name}'", r"value is \?\?\?(.|\n)*defaults"),
        ("model: org/model\ndataset: [org/rows]\nmicro_batch_size: 1\nfinetune: true", "for Megatron"),
        ("model: org/model\npeft_config: {name: lora, export_dir: x}", "llamafactory-cli export"),
        ("model_name_or_path: org/model\ntemplate: a\nexport_dir: x\nexport_size: 5", "llamafactory-cli export"),
        ("model: org/model\ntrain_dataset: rows.yaml\nlearning_rate: 1e-4\nbf16: false", "v1 trainer"),
    ):
        (tmp_path / "x.yaml").write_text(f"{keys}\n")
        with pytest.raises(ConfigError, match=says):
            convert(CommandLine(tmp_path / "x.yaml"))
    (tmp_path / "x.toml").write_text("[training]\nsteps = x\n")
    with pytest.raises(ConfigError, match=r"no TOML(.|\n)*x.toml"):
        convert(CommandLine(tmp_path / "x.toml"))
    with pytest.raises(ConfigError, match="titan is not a known trainer"):
        convert(CommandLine(tmp_path / "x.yaml"), "titan")


def test_the_tokens_of_a_packed_step_and_the_rows_of_another(of):
    packed = of("trl", world_size=2, packing=True, max_length=512, per_device_train_batch_size=3)
    assert value(packed, "actor.global_batch_tokens") == 3 * 2 * 512
    assert value(packed, "actor.global_batch_size") == "absent"
    plain = of("trl", world_size=2, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert value(plain, "actor.global_batch_size") == 30


ODD: list[Any] = [None, "x", "", -1, 2.5, [], ["a", {"b": 2}], {"a": {"b": [1]}}, float("nan"), 1e400, True]


@pytest.mark.parametrize("word", TRAINERS)
def test_no_value_of_any_key_is_lost_or_breaks_the_conversion(word: str):
    known = TRAINERS[word]
    for number, name in enumerate(known.table):
        outer, _, inner = name.partition(".")
        value = ODD[number % len(ODD)]
        c = Conversion(known.name, {**SMALLEST[word], outer: {inner: value} if inner else value}, Path(), Path())
        try:
            known.convert(c)
        except ConfigError:  # rl, stage: no supervised fine-tuning
            continue
        c.translate(known.table)
        assert set(c.outcomes) == set(c.given), name
        if number % 20 == 0:
            yaml.safe_load(recipe_text(c, "x"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}, "vision_language"),
        ({"architectures": ["Gemma3ForCausalLM"], "vision_config": {}}, "absent"),
        ({"architectures": ["LlamaForCausalLM"]}, "absent"),
    ],
)
@pytest.mark.parametrize("trainer", ["trl", "llama-factory"])
def test_the_model_type_is_that_of_the_models_config(
    of, tmp_path: Path, trainer: str, config: dict[str, Any], expected: str
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found = of(trainer, model_name_or_path="model")
    assert value(found, "actor.model.model_type") == expected
    assert "model_type" not in found.report.partition("differences")[2]
    assert "set model.model_type: vision_language" in of(trainer).recipe  # org/model is not at hand


def test_times_per_epoch_are_said_to_become_once(of):
    found = of("axolotl", saves_per_epoch=4)
    assert value(found, "runner.save_interval") == "epoch"
    assert "saves_per_epoch: 4; epoch is once, see the end" in " ".join(found.recipe.split())
    assert found.conversion.outcomes["saves_per_epoch"].kind is Kind.MISSING


def test_names_of_data_sets_without_a_file_are_listed(of):
    found = of("llama-factory", dataset="identity,rows.jsonl,me/rows,alpaca", dataset_dir="data")
    outcome = found.conversion.outcomes["dataset"]
    assert outcome.kind is Kind.MISSING
    assert "the file or the name on the Hub for identity, alpaca (run" in outcome.text
    assert (
        "identity" not in of("llama-factory", dataset="identity", dataset_dir="ONLINE").report.partition("no count")[2]
    )


@pytest.mark.parametrize(
    ("name", "token", "shown"),
    [
        ("hub_token", "${oc.env:HF_TOKEN}", "${oc.env:HF_TOKEN}"),
        ("hub_token", "${HF_TOKEN}", "${oc.env:HF_TOKEN}"),  # as NeMo's own files have it
        ("hub_token", "${oc.env:OF_NOBODY}", "${oc.env:OF_NOBODY}"),
        ("run_name", "x ${oc.env:MY_LOGIN} ${oc.env:OF_NOBODY}", "x ${oc.env:MY_LOGIN} ${oc.env:OF_NOBODY}"),
        ("hub_token", "${oc.env:MY_LOGIN,nobody}", "${oc.env:MY_LOGIN,nobody}"),
        ("hub_token", "hf_0123", "***"),
        ("wandb_api_key", "0123456789abcdef", "***"),
    ],
)
def test_a_token_is_neither_shown_nor_written(of, name: str, token: str, shown: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "my-secret-12345")
    monkeypatch.setenv("MY_LOGIN", "me")
    monkeypatch.delenv("OF_NOBODY", raising=False)
    found = of("trl", **{name: token})
    assert "my-secret" not in found.recipe + found.report
    assert "0123" not in found.recipe + found.report
    assert f"{name}: {shown}  ->" in found.report
    assert "eos_token: <|im_end|>" in of("trl", eos_token="<|im_end|>").report


def test_a_value_of_the_environment_is_in_the_recipe_where_it_is_set(of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RATE", "0.125")
    found = of("trl", learning_rate="${oc.env:MY_RATE}")
    assert "lr: 0.125" in found.recipe
    assert "learning_rate: ${oc.env:MY_RATE}  ->" in found.report


def test_a_file_that_is_not_there_has_its_nearest_or_what_is_converted(tmp_path: Path) -> None:
    (tmp_path / "train_config.yaml").touch()
    misspelt = run_cli("convert", str(tmp_path / "train_confg.yaml"))
    assert (misspelt.code, "did you mean" in misspelt.err) == (2, True)
    assert "train_config.yaml" in misspelt.err
    of_python = run_cli("convert", "torchrun", "-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_8b")
    assert (of_python.code, "configurations in Python are not converted" in of_python.err) == (2, True)
