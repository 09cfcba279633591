"""Keys with and without `actor.`, under present and former names: in files, overrides, references and code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

import shardtune
from shardtune.config import KEYS, ActorConfig, LoraConfig, ModelConfig, Recipe, RunnerConfig, load_recipe
from shardtune.config.halos import in_names_of_halos
from shardtune.config.recipe_config import as_dict_config
from shardtune.config.schema import ACTOR_KEYS, FORMER_KEYS, present_key
from shardtune.errors import CheckpointError, ConfigError
from shardtune.models.get_model import IN_OTHER_SECTIONS, _section
from shardtune.run.dry_run import dry_run, preview
from shardtune.run.resume_check import check_changes

SHORT = """\
model: {model_path: org/model, options: {width: 3}}
optim: {lr: 2e-5, args: {amsgrad: true}}
loss: losses.py:mine
fsdp_config: {reduce: every}
global_batch_size: 8
tokenizer: {new_tokens: [<a>]}
data: {train_data_paths: a.jsonl}
runner: {logger: {experiment_name: one}}
"""
LONG = """\
actor:
  model: {model_path: org/model, options: {width: 3}}
  optim: {lr: 2e-5, args: {amsgrad: true}}
  loss: losses.py:mine
  fsdp_config: {reduce: every}
  global_batch_size: 8
  tokenizer: {new_tokens: [<a>]}
data: {train_data_paths: a.jsonl}
runner: {logger: {experiment_name: one}}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    def load(text: str, *overrides: str) -> Recipe:
        (tmp_path / "mine.yaml").write_text(text)
        return load_recipe(tmp_path / "mine.yaml", overrides, files_must_exist=False)

    return load


def refusal(load: Callable[..., Recipe], *given: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*given)
    return str(error.value)


def test_both_forms_are_the_same_recipe_and_are_stored_in_one(load: Callable[..., Recipe], tmp_path: Path) -> None:
    short, long = load(SHORT), load(LONG)
    assert short == long
    assert short.to_yaml() == long.to_yaml() == long.to_yaml(as_given=True)
    assert short.where("actor.optim.lr") == short.where("optim.lr") == f"{tmp_path}/mine.yaml:2"
    assert set(yaml.safe_load(short.to_yaml())) == set(Recipe.model_fields)
    assert check_changes(long, short, tmp_path) == ()
    again = load(short.to_yaml(as_given=True))  # as ranks get it: their messages name keys in the same way
    assert again == short
    assert again.spelling.of("actor.model.compile") == "model.compile"
    assert again.spelling.of("actor.micro_batch_size") == "micro_batch_size"  # model.micro_batch_size is null there
    stored = load(short.to_yaml())
    assert stored.spelling.of("actor.micro_batch_size") == "actor.micro_batch_size"
    line = 1 + next(n for n, text in enumerate(short.to_yaml().splitlines()) if text.startswith("  micro_batch_size:"))
    assert stored.where("micro_batch_size") == f"{tmp_path}/mine.yaml:{line}"
    assert (
        load_recipe(yaml.safe_load(SHORT), files_must_exist=False).optim
        == load_recipe(DictConfig(yaml.safe_load(LONG)), files_must_exist=False).optim
    )


def test_a_mixture_of_both_is_one_recipe(load: Callable[..., Recipe]) -> None:
    recipe = load(LONG + "optim: {min_lr: 1e-6, lr: 2e-5, args: {maximize: true}}\nmodel:\n")
    assert (recipe.optim.lr, recipe.optim.min_lr) == (2e-5, 1e-6)
    assert recipe.optim.args == {"amsgrad": True, "maximize": True}
    assert recipe.model.model_path == "org/model"


@pytest.mark.parametrize(
    ("text", "both", "lines"),
    [
        (
            LONG + "optim: {lr: 1}",
            "optim.lr and actor.optim.lr are the same key, with two values: 1 and 2e-05",
            (10, 3),
        ),
        (LONG + "global_batch_size: 9", "global_batch_size and actor.global_batch_size are the same key", (10, 6)),
        (
            "runner:\n  val_check_interval: 3\n  eval_interval: 4\n" + LONG.replace("runner:", "eval: {} #"),
            "runner.val_check_interval and runner.eval_interval are the same key, with two values: 3 and 4",
            (2, 3),
        ),
        (
            SHORT.replace("org/model,", "org/model, micro_batch_size: 3,") + "micro_batch_size: 5",
            "actor.model.micro_batch_size and actor.micro_batch_size are the same key, with two values: 3 and 5",
            (1, 9),
        ),
    ],
)
def test_two_values_for_one_key_are_one_error_that_names_both_places(
    load: Callable[..., Recipe], tmp_path: Path, text: str, both: str, lines: tuple[int, int]
) -> None:
    text = refusal(load, text, "data.eval_split=0.1")
    assert both in text
    assert ", ".join(f"{tmp_path}/mine.yaml:{line}" for line in lines) in text
    assert "mistakes" not in text


@pytest.mark.parametrize("text", [SHORT, LONG])
@pytest.mark.parametrize("prefix", ["", "actor."])
def test_overrides_of_both_forms_go_over_both(load: Callable[..., Recipe], text: str, prefix: str) -> None:
    words = ["optim.lr=1e-3", "model.options.width=4", "optim.args={momentum: 0.5}", "loss=null", "micro_batch_size=7"]
    words += ["optim={min_lr: 1e-6}", "model={compile: true}"]
    recipe = load(text, *(prefix + word for word in words))
    assert (recipe.actor.optim.lr, recipe.actor.optim.min_lr, recipe.actor.loss) == (1e-3, 1e-6, None)
    assert recipe.actor.model.options == {"width": 4}
    assert recipe.actor.optim.args == {"amsgrad": True, "momentum": 0.5}
    assert (recipe.actor.model.compile, recipe.actor.micro_batch_size) == (True, 7)
    assert recipe.where("optim.lr") == f"override {prefix}optim.lr=1e-3"
    assert load(text, "optim.lr=1", "actor.optim.lr=1").optim.lr == 1


def test_one_command_line_gives_a_key_one_value(load: Callable[..., Recipe]) -> None:
    text = refusal(load, SHORT, "optim.lr=1e-3", "actor.optim.lr=1e-4")
    assert "optim.lr and actor.optim.lr are two names of actor.optim.lr, given as 0.001 and 0.0001" in text
    assert "overrides optim.lr=1e-3 and actor.optim.lr=1e-4" in text


def test_config_groups_and_halos_keep_their_names(load: Callable[..., Recipe]) -> None:
    recipe = load(SHORT, "model=qwen", "loss=sft", "model.batch_size=16", "model.precision=fp32", "lr=1e-3")
    assert (recipe.model.model_path, recipe.worker, recipe.global_batch_size) == ("Qwen/Qwen3-8B", "sft_trainer", 16)
    assert (recipe.model.precision, recipe.optim.lr) == ("fp32", 1e-3)
    both = load("model: {name_or_path: org/x, batch_size: 4, compile: true}\ndata: {train_data_paths: a.jsonl}")
    assert (both.model.model_path, both.global_batch_size, both.model.compile) == ("org/x", 4, True)
    assert "or a function of yours, file.py:function" in refusal(load, SHORT, "loss=sfd")
    config = in_names_of_halos(recipe)
    assert (config.optim.lr, config.lr, config.model.precision, config.model.batch_size) == (1e-3, 1e-3, "fp32", 16)
    assert "batch_size" not in config.actor.model


def test_references_name_keys_in_both_forms_and_by_former_names(
    load: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART", "3")
    text = LONG.replace("{reduce", "{prefetch: '${global_batch_size}', reduce")
    recipe = load(
        text,
        "optim.min_lr=${oc.select:optim.lr}",
        "runner.save_interval=${runner.val_check_interval}",
        "runner.eval_interval=${optim.lr_warmup_steps}",
        "optim.lr_warmup_steps=${oc.env:PART}",
        "data.eval_split=0.1",
    )
    assert (recipe.fsdp_config.prefetch, recipe.optim.min_lr) == (8, 2e-5)
    assert (recipe.runner.save_interval, recipe.runner.eval_interval) == (3, 3)
    stored = load(recipe.to_yaml())
    assert stored == recipe
    assert stored.references["actor.optim.lr_warmup_steps"] == "${oc.env:PART}"
    assert stored.references["runner.save_interval"] == "${runner.val_check_interval}"


@pytest.mark.parametrize(
    ("given", "value", "expected"),
    [
        ("runner.seed=${oc.env:GIVEN,7}", None, 7),
        ("runner.seed=${oc.env:GIVEN}", "11", 11),
        ("optim.lr=${oc.env:GIVEN}", "0.003", 0.003),
        ("optim.clip_grad=${oc.env:GIVEN}", "null", None),
        ("data.shuffle=${oc.env:GIVEN}", "false", False),
        ("runner.eval_interval=${oc.env:GIVEN}", "epoch", "epoch"),
        ("runner.save_interval=${oc.env:GIVEN}", "20", 20),
        ("model.gradient_checkpointing=${oc.env:GIVEN}", "true", True),
        ("runner.logger.project_name=${oc.env:GIVEN}", "007", "007"),
        ("runner.logger.logger_backends=${oc.env:GIVEN}", "[jsonl]", ["jsonl"]),
        ("runner.profile_steps=['${oc.env:GIVEN}',9]", "8", [8, 9]),
        ("model.vocab_size=1${oc.env:GIVEN}", "00", 100),
    ],
)
def test_the_schema_decides_the_type_of_what_a_reference_gives(
    load: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, given: str, value: str | None, expected: object
) -> None:
    monkeypatch.delenv("GIVEN", raising=False)
    if value is not None:
        monkeypatch.setenv("GIVEN", value)
    recipe = load(SHORT, given, "data.eval_split=0.1")
    found: Any = recipe
    for part in given.partition("=")[0].split("."):
        found = getattr(found, part)
    assert (found, type(found)) == (expected, type(expected))
    assert load(recipe.to_yaml()) == recipe


def test_what_is_no_value_of_the_type_is_refused_as_it_was_read(
    load: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "2.5")
    assert "runner.seed: 2.5 is not allowed" in refusal(load, SHORT, "runner.seed=${oc.env:GIVEN}")
    monkeypatch.setenv("GIVEN", "[" * 100)
    assert "runner.seed: '[[[" in refusal(load, SHORT, "runner.seed=${oc.env:GIVEN}")
    assert "runner.seed: '7' is not allowed" in refusal(load, SHORT, "runner.seed='7'")
    sources = load(SHORT, "data.train_data_paths=[{path: a.jsonl, weight: '${oc.env:WEIGHT,2}'}]").data.train_data_paths
    assert isinstance(sources, list)
    assert getattr(sources[0], "weight", None) == 2.0


@pytest.mark.parametrize(
    ("text", "override", "named"),
    [
        (SHORT, "optim.lr=0", "optim.lr: 0 is not allowed"),
        (SHORT, "actor.optim.lr=0", "actor.optim.lr: 0 is not allowed"),
        (LONG, "optim.lr=0", "optim.lr: 0 is not allowed"),
        (SHORT.replace("2e-5", "abc"), "", "optim.lr: 'abc' is not allowed"),
        (LONG.replace("2e-5", "abc"), "", "actor.optim.lr: 'abc' is not allowed"),
        (SHORT, "optim.learning_rate=1", "unknown key optim.learning_rate"),
        (SHORT, "optim.learning_rate=1", "did you mean optim.lr?"),
        (SHORT, "optm.lr=1", "did you mean optim?"),
        (SHORT, "global_batch=1", "did you mean global_batch_size?"),
        (SHORT, "xyzzy=1", "the keys at the top are: plugins, runner, actor, data, eval, training_backend"),
        (SHORT, "optim=3", "optim is a section, not 3"),
        (SHORT, "optim.decay_ratio=0.2", "optim.decay_ratio has no effect with optim.lr_scheduler: cosine"),
        (LONG, "actor.optim.decay_ratio=0.2", "has no effect with actor.optim.lr_scheduler: cosine"),
        (SHORT, "runner.val_check_interval=0", "runner.val_check_interval: 0 is not allowed"),
        (SHORT, "runner.eval_interval=3", "runner.eval_interval: 3 needs evaluation data"),
        (SHORT, "runner.val_check_interval=3", "runner.val_check_interval: 3 needs evaluation data"),
        (SHORT, "runner.min_workers=3", "runner.min_workers (3) has no effect with runner.max_restarts: 0"),
        (SHORT, "model.lora.r=4", "model.lora.r has no effect with model.is_lora: false"),
    ],
)
def test_messages_name_keys_as_they_were_given(
    load: Callable[..., Recipe], text: str, override: str, named: str
) -> None:
    said = refusal(load, text, *([override] if override else []))
    assert named in said.replace("\n", " ")
    assert "actor." in said or "actor." not in named
    assert ("actor." in named) or not said.startswith("actor.")


def test_former_names_give_the_present_keys_and_one_note(load: Callable[..., Recipe]) -> None:
    words = ["runner.val_check_interval=4", "data.eval_split=0.1", "model.is_lora=true", "model.lora.adapter_path=x"]
    recipe = load(SHORT, *words)
    assert recipe.runner.eval_interval == recipe.runner.val_check_interval == 4
    assert str(recipe.model.lora.load_from).endswith("/x")
    (note,) = recipe.notes
    assert "runner.val_check_interval is now runner.eval_interval" in note
    assert "model.lora.adapter_path is now model.lora.load_from" in note
    assert not load(recipe.to_yaml()).notes
    assert FORMER_KEYS.keys().isdisjoint(KEYS)
    assert set(FORMER_KEYS.values()) <= set(KEYS)
    ray = load(SHORT, "runner={launcher: ray, num_workers: 2, ray: {cpus_per_worker: 3}}").runner
    assert (ray.num_ranks, ray.num_workers, ray.ray.cpus_per_rank, ray.ray.cpus_per_worker) == (2, 2, 3, 3)


def test_a_run_of_the_former_names_is_continued(load: Callable[..., Recipe], tmp_path: Path) -> None:
    """What an earlier version stored: the long form, former names, and null at the alternative places."""
    recipe = load(SHORT, "runner.eval_interval=4", "data.eval_split=0.1")
    stored = yaml.safe_load(recipe.to_yaml())
    for theirs, ours in FORMER_KEYS.items():
        *sections, name = ours.split(".")
        section = stored
        for part in sections:
            section = section[part]
        section[theirs.rpartition(".")[2]] = section.pop(name)
    old = load(yaml.safe_dump(stored))
    assert old == recipe
    assert check_changes(old, load(SHORT, "runner.val_check_interval=9", "data.eval_split=0.1"), tmp_path) == ()
    now = load(SHORT, "optim.lr=1", "runner.eval_interval=4", "data.eval_split=0.1")
    with pytest.raises(CheckpointError, match=r"optim\.lr: 2e-05 -> 1\.0") as error, now.spelling.in_errors():
        check_changes(old, now, tmp_path)
    assert "runner.allow_changes=[optim.lr]" in str(error.value)
    for name in ("optim.lr", "actor.optim.lr", "optim"):
        allowed = load(SHORT, "optim.lr=1", "data.eval_split=0.1", f"runner.allow_changes=[{name}]")
        assert "allowed by runner.allow_changes" in check_changes(old, allowed, tmp_path)[0]
    key = "actor.model.from_scratch"
    other = load(SHORT, f"{key}=true", "data.eval_split=0.1", f"runner.allow_changes=[{key}]")
    (note,) = check_changes(old, other, tmp_path)
    assert note.endswith("(allowed by runner.allow_changes; trained weights are those of the checkpoint)")


def test_allowed_changes_name_keys(load_text: Callable[..., Recipe]) -> None:
    text = "model: {model_path: org/model}\ndata: {train_data_paths: a.jsonl}\nrunner: {allow_changes: [%s]}"
    assert "did you mean optim.lr?" in refusal(load_text, text % "optim.learning_rate")
    for name in ("optim", "model.options.width", "data.train_data_paths", "runner.val_check_interval"):
        load_text(text % name)


def test_code_reads_a_config_in_both_forms(load: Callable[..., Recipe]) -> None:
    recipe = load(SHORT, "micro_batch_size=3", "runner.eval_interval=5", "data.eval_split=0.1")
    for cfg in (made := as_dict_config(recipe), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert cfg.optim.lr == cfg["optim"]["lr"] == cfg.get("optim").lr == cfg.actor.optim.lr == 2e-5
        assert cfg.micro_batch_size == cfg.model.micro_batch_size == cfg.actor.micro_batch_size == 3
        assert OmegaConf.select(cfg, "model.options.width") == 3
        assert cfg.runner.val_check_interval == cfg.runner.eval_interval == 5
        assert "optim" in cfg
        assert "optm" not in cfg
        assert set(cfg) == set(Recipe.model_fields)
        assert cfg.get("optm") is None
    assert load_recipe(made) is recipe
    made.optim.lr = 1e-4
    made.global_batch_size = 16
    made.micro_batch_size = 4  # model.micro_batch_size is still 3
    made.runner.val_check_interval = 6
    changed = load_recipe(made, files_must_exist=False)
    assert (changed.optim.lr, changed.global_batch_size, changed.micro_batch_size) == (1e-4, 16, 4)
    assert changed.runner.eval_interval == 6
    assert (changed.where("runner.eval_interval"), changed.where("micro_batch_size")) == ("recipe", "recipe")
    assert "mine.yaml:1" in str(changed.where("model.model_path"))
    made.optim.lr = 0
    with pytest.raises(ConfigError, match=r"^optim\.lr: 0 is not allowed"):
        load_recipe(made, files_must_exist=False)


def test_every_key_of_actor_is_an_attribute_of_the_recipe(load: Callable[..., Recipe]) -> None:
    recipe = load(SHORT)
    for name in ACTOR_KEYS:
        assert name not in Recipe.model_fields
        assert getattr(recipe, name) is getattr(recipe.actor, name)
        assert present_key(name) == f"actor.{name}"


def test_sections_that_code_passes_may_have_former_names(load: Callable[..., Recipe]) -> None:
    assert RunnerConfig.model_validate({"val_check_interval": 3}).eval_interval == 3
    with pytest.raises(ValueError, match="adapter_path and load_from are two names of one key"):
        LoraConfig.model_validate({"adapter_path": "a", "load_from": "b"})
    cfg = as_dict_config(load(SHORT, "model.is_lora=true"))
    cfg.model.lora.adapter_path = "somewhere"
    assert _section(ModelConfig, cfg.actor.model, "actor.model").lora.load_from == "somewhere"
    for given in ({"model": {"model_path": "org/x"}}, {"actor": {"model": {"model_path": "org/x"}}}):
        assert _section(ModelConfig, given, "actor.model").model_path == "org/x"
        assert _section(ActorConfig, given, "actor").model.model_path == "org/x"
    assert load_recipe(cfg, in_memory=IN_OTHER_SECTIONS, files_must_exist=False).model.lora.load_from


def test_errors_after_loading_name_keys_as_they_were_given(tmp_path: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(SHORT.replace("org/model", "org/model, model_type: nosuch"))
    values |= {"loss": None, "runner": {"logger": {"log_path": str(tmp_path)}}}
    short = {name: values.pop(name) for name in ACTOR_KEYS if name in values}
    for command in (shardtune.train, dry_run, preview):
        with pytest.raises(ConfigError, match=r"^model\.model_type = nosuch is not known") as error:
            command({**values, **short})
        assert error.value.where == "model.model_type"
        with pytest.raises(ConfigError, match=r"^actor\.model\.model_type = nosuch is not known"):
            command({**values, "actor": short})
    assert not list(tmp_path.iterdir())
