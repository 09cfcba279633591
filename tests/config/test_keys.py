"""The schema's keys, the words for what they hold, the nearest to a wrong one, and the page made of them."""

from collections import Counter
from pathlib import Path

import pytest

from shardtune.config import ALIASES, KEYS, Recipe
from shardtune.config.halos import NAMES
from shardtune.config.keys import OTHER_NAMES, allowed, nearest
from shardtune.config.overrides import GROUPS
from shardtune.config.reference import page
from shardtune.config.schema import (
    ACTOR_KEYS,
    FORMER_KEYS,
    OTHER_KEYS,
    DataEntry,
    ModelConfig,
    ParameterGroup,
    short_key,
)
from shardtune.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("runer", "runner"),
        ("actor.lr", "actor.optim.lr"),
        ("lr", "actor.optim.lr"),
        ("actor.optim.learning_rate", "actor.optim.lr"),
        ("actor.optim.Learning_Rate", "actor.optim.lr"),
        ("optim", "actor.optim"),
        ("model.name_or_path", "actor.model.model_path"),
        ("data.max_len", "data.max_length"),
        ("data.max_seq_length", "data.max_length"),
        ("runner.log_path", "runner.logger.log_path"),
        ("actor.optim.warmup_steps", "actor.optim.lr_warmup_steps"),
        ("actor.warmup_style", "actor.optim.lr_scheduler"),
        ("data.eval_data_path", "data.eval_data_paths"),
        ("runner.num_train_epochs", "runner.max_epochs"),
        ("eval.macth", "eval.match"),
        ("data.enabled", "runner.early_stop.enabled"),
        ("n_epochs", "runner.max_epochs"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_key(wrong, right):
    assert nearest(wrong) == right


def test_a_key_like_no_other_lists_those_of_its_section(load_text):
    with pytest.raises(ConfigError, match=r"the keys of eval are: generate, max_new_tokens"):
        load_text("eval: {xyzzy: 1}")


def test_other_systems_names_lead_to_keys_that_exist_and_are_none_of_ours():
    assert set(ALIASES.values()) | set(OTHER_NAMES.values()) <= set(KEYS)
    assert not set(ALIASES) & set(KEYS)


def test_every_key_is_explained_in_a_sentence():
    entries = [*KEYS.values()]
    fields = {entry.name: entry.field for entry in entries} | dict(DataEntry.model_fields)
    for name, field in fields.items():
        assert field.description, name
        assert field.description[-1] in ".…", name
        assert allowed(field), name


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.optim.lr", "a number > 0"),
        ("actor.optim.adam_beta1", "a number >= 0 and < 1"),
        ("actor.optim.clip_grad", "a number > 0, or null"),
        ("actor.micro_batch_size", "a whole number >= 1, or null"),
        ("actor.optim.lr_scheduler", "constant, linear, cosine, wsd"),
        ("runner.save_interval", '-1, a whole number >= 1, or "epoch"'),
        ("data.transform", "file.py:name, or null"),
        ("data.shuffle", "true or false"),
        ("data.columns", "a mapping of text to text"),
        ("runner.best", "a mapping of monitor, mode"),
    ],
)
def test_what_is_allowed_in_words(key, words):
    assert allowed(KEYS[key].field) == words


def test_defaults_are_valid_values():
    assert Recipe.model_validate(Recipe().to_dict()) == Recipe()


def test_the_row_formats_of_an_entry_are_those_that_the_data_part_knows():
    from shardtune.data.row_formats import FORMATS_BY_NAME

    words = allowed(DataEntry.model_fields["format"])
    assert words == f"{', '.join(FORMATS_BY_NAME)}, or null"


def test_the_configuration_reference_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m shardtune.config.reference > docs/configuration.md"
    )


def test_the_configuration_reference_has_every_key():
    text = page()
    for name, entry in KEYS.items():
        whole = entry.section is not None or name in OTHER_KEYS
        assert f"`{short_key(name) if whole else name.rpartition('.')[2]}`" in text or name == "actor", name


TWO_PLACES = {
    "address": "a network address: of what its section is about",
    "columns": "the same, for one source",
    "lr": "the same, for some parameters",
    "mode": "the same, for another purpose: the direction of `monitor`",
    "model_path": "the same, for another model: the teacher's weights",
    "monitor": "the same, for another purpose: a metric that is watched",
    "name": "what its owner is called: an optimizer, a source of rows",
    "precision": "the same, for another model: the teacher's numbers",
    "scale": "the same, for another purpose: a range, by torchvision's name in two of its transforms",
    "temperature": "what logits are divided by: of sampled answers, or of both models in a distillation",
    "weight": "how much its owner counts: a source among others, the value head's loss beside that of actions",
    "weight_decay": "the same, for some parameters",
}
"""Names of keys in two sections, and why that is no second meaning."""


def test_a_name_has_one_meaning():
    """Neither two keys have one name, nor does a key have the former name of another one."""
    entries = {"optim.groups": ParameterGroup, "data.train_data_paths": DataEntry}
    names = [name for name in KEYS if name not in OTHER_KEYS]
    names += [f"{place}.{name}" for place, entry in entries.items() for name in entry.model_fields]
    last = Counter(name.rpartition(".")[2] for name in names)
    assert {name for name, count in last.items() if count > 1} == set(TWO_PLACES)
    former = {name.rpartition(".")[2] for name in FORMER_KEYS}
    assert former & set(last) == {"num_workers"}  # which is now the processes of `data` alone
    assert not [name for name in last if name.startswith("val_")]


def test_keys_at_the_top_are_no_others():
    """`actor.` may be left out because no other key, config group or name of HALOs means something else there."""
    assert not set(ACTOR_KEYS) & set(Recipe.model_fields)
    others = {name.partition(".")[0] for name in (*NAMES, *ALIASES)} | set(GROUPS)
    assert set(ACTOR_KEYS) & others == {"model", "loss"}  # which `is_actors` tells apart
    ours = {name for name in NAMES if name.partition(".")[0] == "model"}
    assert not {name.split(".")[1] for name in ours} & set(ModelConfig.model_fields)
