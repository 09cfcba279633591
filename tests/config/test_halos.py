"""HALOs' own configuration, as its Hydra composes it: each key translated, reported or refused with the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from shardtune.config import Recipe, load_recipe
from shardtune.config.halos import NAMES, in_names_of_halos
from shardtune.errors import ConfigError

COMPOSED = """
seed: 1
exp_name: mine
train_datasets: [ultrachat]
test_datasets: [ultrachat]
debug: false
wandb: {enabled: false, entity: null, project: halos}
cache_dir: /models
local_run_dir: ${cache_dir}/${exp_name}
do_first_eval: true
minimum_log_interval_secs: 1.0
intermediate_checkpoints: true
trainer: BasicTrainer
lr: 2.0e-5
n_epochs: 3
n_examples: null
n_eval_examples: 256
eval_every: 1024
save_every: 5120
step_scheduler_with_optimizer: false
optimizer: RMSprop
weight_decay: 0.02
beta1: 0.8
beta2: 0.95
eps: 1.0e-5
warmup: 0.1
template_tokens: []
log_epsilon_P: -1.0
log_epsilon_R: 1.5
online: false
cache_reference_logprobs: false
humanline: false
frac_unique_desirable: 1.0
loss: {name: sft, trainer: SFTTrainer, dataloader: SFTDataLoader, use_reference_model: false, sync_reference: false}
model:
  name_or_path: org/llama
  tokenizer_name_or_path: null
  load_from: null
  from_checkpoint: null
  block_name: LlamaDecoderLayer
  policy_dtype: bfloat16
  reference_dtype: bfloat16
  max_grad_norm: 5.0
  max_length: 1024
  max_prompt_length: 512
  activation_checkpointing: true
  batch_size: 64
  microbatch_size: null
  gradient_accumulation_steps: 1
  eval_batch_size: 32
  eval_microbatch_size: null
  v_head_max_grad_norm: 0.1
  reward_model: {path: null, model_class: AutoModelForBradleyTerry, dtype: float32, attn_implementation: eager}
  attn_implementation: eager
  use_peft: false
  load_lora_from: null
  peft: {lora_r: 64, lora_alpha: 256, lora_dropout: 0.05, target_modules: all-linear}
"""
SMALL: dict[str, Any] = {
    "lr": 1e-4,
    "n_epochs": 2,
    "datasets": ["a.jsonl"],
    "model": {"name_or_path": "org/x", "batch_size": 8},
}


def composed() -> DictConfig:
    return DictConfig(OmegaConf.create(COMPOSED))


def test_a_composed_configuration_is_a_recipe():
    recipe = load_recipe(composed())
    runner, actor = recipe.runner, recipe.actor
    data: Any = recipe.data
    assert (runner.seed, runner.max_epochs, runner.max_steps, runner.eval_before_training) == (1, 3, -1, True)
    assert (runner.val_check_interval, runner.save_interval) == (16, 16)  # 1,024 rows in steps of 64
    logger = runner.logger
    assert (logger.log_path, logger.experiment_name, logger.project_name) == ("/models", "mine", "halos")
    assert logger.logger_backends == ["jsonl", "tensorboard"]
    assert (actor.worker, actor.global_batch_size) == ("sft_trainer", 64)
    optim = actor.optim
    assert (optim.lr, optim.name, optim.lr_warmup_steps_ratio, optim.clip_grad) == (2e-5, "RMSprop", 0.1, 5.0)
    assert (optim.weight_decay, optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (0.02, 0.8, 0.95, 1e-5)
    model = actor.model
    assert (model.model_path, model.precision, model.attn_implementation) == ("org/llama", "bf16", "eager")
    assert (model.gradient_checkpointing, model.is_lora, actor.fsdp_config.wrap) == (True, False, ["LlamaDecoderLayer"])
    assert data.max_length == 1024
    (train,), (test,) = data.train_data_paths, data.eval_data_paths
    assert (train.path, train.split) == ("HuggingFaceH4/ultrachat_200k", "train_sft")
    assert (test.path, test.split, test.max_samples) == ("HuggingFaceH4/ultrachat_200k", "test_sft", 256)
    told = "\n".join(recipe.notes)
    for name in (
        *("minimum_log_interval_secs", "model.max_prompt_length", "model.peft.lora_r", "model.reference_dtype"),
        *("save_every", "step_scheduler_with_optimizer", "log_epsilon_P", "model.reward_model.model_class"),
    ):
        assert name in told
    assert "data.max_length" in told
    one_name = composed()
    one_name.datasets = one_name.pop("train_datasets")
    del one_name["test_datasets"]
    assert load_recipe(one_name).data == data  # the test split of the training data


def test_training_and_test_data_under_their_own_names():
    given = {"train_datasets": ["a.jsonl", "gsm8k"], "test_datasets": ["b.jsonl", "gsm8k"], "n_eval_examples": 7}
    small = {name: value for name, value in SMALL.items() if name != "datasets"}
    words = ["train_datasets=[a.jsonl,gsm8k]", "test_datasets=[b.jsonl,gsm8k]", "n_eval_examples=7"]
    for data in (load_recipe({**small, **given}, files_must_exist=False).data,
                 load_recipe(small, words, files_must_exist=False).data):  # fmt: skip
        train, test = [entry(one) for one in data.train_data_paths or ()], data.eval_data_paths
        assert train == [(str(Path.cwd() / "a.jsonl"), None, None), ("openai/gsm8k", "train", None)]
        assert [entry(one) for one in test or ()] == [
            *((str(Path.cwd() / "b.jsonl"), None, 7), ("openai/gsm8k", "test", 7)),
        ]


def entry(one: Any) -> tuple[str, str | None, int | None]:
    return (one, None, None) if isinstance(one, str) else (one.path, one.split, one.max_samples)


@pytest.mark.lengthy
def test_every_value_of_it_is_used_or_reported():
    """Another value of any key changes the recipe or what is reported, or is refused by that name."""
    whole = load_recipe(composed())
    for name in NAMES:
        config = composed()
        value = OmegaConf.select(config, name)
        if value is None or OmegaConf.is_config(value):
            continue
        OmegaConf.update(config, name, changed(value), force_add=True)
        outcome = attempt(config)
        if isinstance(outcome, str):
            assert any(key in outcome for key in (name, "runner.", "model.", "optim.")), name
        else:
            assert outcome != whole or any(name in note for note in outcome.notes), name


def changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "fp8"
    return value * 7 if isinstance(value, int) else float(str(value)) / 2


def attempt(config: DictConfig) -> Recipe | str:
    """The recipe, or the refusal's text."""
    try:
        return load_recipe(config)
    except ConfigError as error:
        return str(error)


def test_lora_and_later_overrides_count():
    recipe = load_recipe(composed(), ["model.use_peft=true", "eval_every=2048", "actor.model.lora.dropout=0"])
    lora = recipe.actor.model.lora
    assert (recipe.actor.model.is_lora, lora.r, lora.alpha, lora.dropout) == (True, 64, 256, 0)
    assert recipe.runner.val_check_interval == 32
    assert recipe.where("runner.val_check_interval") == "override eval_every=2048"
    assert load_recipe(composed(), ["runner.val_check_interval=5"]).runner.val_check_interval == 5
    assert not any("peft" in note for note in recipe.notes)


def test_a_small_configuration_and_its_defaults():
    recipe = load_recipe(SMALL)
    assert (recipe.actor.optim.lr, recipe.runner.max_epochs, recipe.actor.global_batch_size) == (1e-4, 2, 8)
    assert recipe.actor.worker is None
    assert recipe.data.eval_data_paths is None
    assert load_recipe({**SMALL, "warmup_steps": 150}).actor.optim.lr_warmup_steps == 150
    sft = load_recipe({key: value for key, value in SMALL.items() if key != "lr"} | {"loss": "sft"})
    assert (sft.actor.worker, sft.actor.optim.lr) == ("sft_trainer", 5e-6)


def test_numbers_of_rows_are_numbers_of_steps():
    config = {**SMALL, "eval_every": 16, "intermediate_checkpoints": True, "n_examples": 100, "n_epochs": None}
    recipe = load_recipe(config, ["data.eval_split=0.1"])
    runner = recipe.runner
    assert (runner.val_check_interval, runner.save_interval, runner.max_steps, runner.max_epochs) == (2, 2, 13, -1)
    in_memory = load_recipe({**SMALL, "eval_every": 16, "n_eval_examples": 4}, in_memory=["data.eval_data_paths"])
    assert in_memory.runner.val_check_interval == 2
    assert "n_eval_examples" in in_memory.notes[0]


def test_weights_from_another_directory_keep_the_tokenizer():
    model = {"batch_size": 8, "name_or_path": "org/x", "load_from": "/models/x"}
    recipe = load_recipe({**SMALL, "model": model}, files_must_exist=False)
    assert (recipe.actor.model.model_path, recipe.actor.tokenizer.tokenizer_model) == ("/models/x", "org/x")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": "dpo"}, "the config group loss has no 'dpo'"),
        ({"loss": {"name": "dpo"}}, r"loss.name: dpo is not available here(.|\n)*get_batch_metrics"),
        (
            {"eval_every": 17},
            r"eval_every: 17 is not a whole number of steps of 8 rows(.|\n)*runner.eval_interval",
        ),
        ({"eval_every": 16}, "needs evaluation data, and there is none"),
        ({"n_eval_examples": 16}, "n_eval_examples: 16 needs evaluation data"),
        ({"n_eval_examples": 16, "data": {"eval_data_paths": {"a": "a.jsonl"}}}, "is for a plain list of evaluation"),
        ({"test_datasets": ["alpaca"]}, r"alpaca has no test split(.|\n)*data.eval_split"),
        ({"train_datasets": ["a.jsonl"]}, "train_datasets and datasets are two names of one key"),
        ({"intermediate_checkpoints": True}, r"intermediate_checkpoints: true needs eval_every(.|\n)*save_interval"),
        ({"debug": True}, r"debug: true is not available here(.|\n)*--dry-run"),
        ({"mode": "sample"}, "shardtune generate"),
        ({"human_prefix": "Human:"}, "data.chat_template"),
        ({"exp_name": "???"}, r"exp_name: \?\?\? is required"),
        ({"wandb": {"entity": "me"}}, "WANDB_ENTITY"),
        ({"wandb": {"enabled": False, "projekt": "x"}}, r"unknown key wandb.projekt(.|\n)*did you mean wandb.project"),
        ({"model": {**SMALL["model"], "batch": 4}}, r"unknown key model.batch\b(.|\n)*did you mean model.batch_size"),
        ({"model": {**SMALL["model"], "gradient_accumulation_steps": 2}}, "multiply model.batch_size"),
        ({"model": {**SMALL["model"], "from_checkpoint": "x"}}, "runner.resume_dir"),
        ({"actor": {"optim": {"lr": 1}}}, "lr and actor.optim.lr are two names of one key"),
        ({"data": {"train_data_paths": "x"}}, "datasets and data.train_data_paths are two names"),
        ({"eval_every": 16, "runner": {"val_check_interval": 3}}, "eval_every and runner.val_check_interval are two"),
        ({"local_run_dir": "/elsewhere"}, "local_run_dir: /elsewhere is not cache_dir/exp_name"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_use(changes: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        load_recipe({**SMALL, **changes})


def test_a_recipe_under_halos_names():
    config = in_names_of_halos(load_recipe(composed()))
    assert (config.lr, config.n_epochs, config.model.batch_size, config.exp_name) == (2e-5, 3, 64, "mine")
    assert (config.model.policy_dtype, config.model.block_name) == ("bfloat16", "LlamaDecoderLayer")
    assert config.wandb.enabled is False
    assert (config.eval_every, config.n_examples, config.intermediate_checkpoints) == (1024, None, True)
    assert (config.local_run_dir, config.debug, config.loss.name) == ("/models/mine", False, "sft")
    assert (config.model.gradient_accumulation_steps, config.warmup, config.beta2) == (1, 0.1, 0.95)
    assert config.actor.optim.lr == 2e-5


def test_a_section_with_the_keys_of_other_systems_is_not_halos():
    with pytest.raises(ConfigError) as error:
        load_recipe({"model": {"model_type": "causal_lm", "attn_implementation": "eager"}})
    assert "model.model_type" not in str(error.value)
