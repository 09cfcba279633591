"""`shardtune config explain`: every key, group and former name, and the nearest to a wrong one."""

from __future__ import annotations

import re

import pytest
import yaml

from shardtune.config import ALIASES, KEYS, Recipe
from shardtune.config.explain import EXAMPLES, example, explain, groups
from shardtune.config.keys import OTHER_NAMES
from shardtune.config.schema import ACTOR, FORMER_KEYS, OTHER_KEYS, short_key
from shardtune.config.tree import set_value
from shardtune.errors import ConfigError
from tests.support.workspace import run_cli


def test_a_key_is_explained_under_every_name() -> None:
    said = explain("optim.lr")
    assert said.splitlines() == [
        "optim.lr",
        "  type        a number > 0",
        "  default     1e-05",
        "  meaning     The peak learning rate.",
        "  example     optim: {lr: 1e-05}",
        "              shardtune train recipe.yaml optim.lr=1e-05",
        "  in full     actor.optim.lr, which means the same",
        "  in HALOs    lr",
        "  documented  docs/configuration.md, `optim`",
    ]
    assert explain("actor.optim.lr") == said
    assert explain("lr").splitlines()[0] == "lr is another name, which works too, of optim.lr"
    assert explain("learning_rate").splitlines()[0] == "learning_rate is another system's name of optim.lr"
    assert explain("decay_ratio").splitlines()[0] == "decay_ratio is short for optim.decay_ratio"
    assert explain("val_set_size").splitlines()[0] == (
        "there is no key val_set_size; write data.eval_split: SHARE (val_set_size of Axolotl)"
    )
    assert "write model.is_lora: true and model.lora" in explain("load_in_4bit")
    former = "is a former name, which goes on working, of runner.eval_interval"
    for name in ("runner.val_check_interval", "val_check_interval"):
        assert explain(name).splitlines()[0] == f"{name} {former}"
    assert "formerly    runner.val_check_interval" in explain("runner.eval_interval")
    assert "in rows instead of steps" in explain("eval_every")
    assert explain("optim.args.momentum").splitlines()[0] == "optim.args.momentum is below optim.args"
    assert explain("optim.groups.lr").startswith("lr, in an entry of optim.groups\n")


def test_a_group_lists_its_keys() -> None:
    said = explain("optim")
    assert said.startswith("optim: Optimizer and learning rate.\n")
    assert "  optim.min_lr " in said
    assert re.search(r"runner\.logger\.prometheus +a group of keys", explain("runner.logger"))
    assert "  fsdp_config " in groups()
    assert "global_batch_size" in groups().splitlines()[-2]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("optim.rl", "optim.lr"),
        ("global_batch", "global_batch_size"),
        ("monitor", "runner.early_stop.monitor, runner.best.monitor"),
        ("runner.lr", "optim.lr"),
        ("model.precison", "model.precision"),
        ("optim.lr.x", "optim.lr"),
        ("sample_packing", "rows are always packed"),
        ("xyzzyx", "docs/configuration.md"),
        ("", "docs/configuration.md"),
    ],
)
def test_a_wrong_key_gives_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match="there is no key") as error:
        explain(wrong)
    assert near in str(error.value)


def test_every_name_is_explained_with_a_valid_example() -> None:
    for name in (*KEYS, *OTHER_KEYS, *ALIASES, *OTHER_NAMES, *FORMER_KEYS):
        assert explain(name)
        assert explain(short_key(name))
    values = Recipe().to_dict()
    for name, entry in KEYS.items():
        if entry.section is None and name not in OTHER_KEYS:
            assert example(name) != "null", name
            assert example(name) not in ("[]", "{}"), name
            set_value(values, name, yaml.safe_load(example(name)) if name in EXAMPLES else example_value(name))
    Recipe.model_validate(values)
    assert set(EXAMPLES) <= set(KEYS)


def example_value(name: str) -> object:
    return KEYS[name].field.get_default(call_default_factory=True, validated_data={})


def test_the_command() -> None:
    told = run_cli("config", "explain", "optim.lr")
    assert (told.code, told.out.rstrip()) == (0, explain("optim.lr"))
    assert run_cli("config", "explain").out.rstrip() == groups()
    assert run_cli("config").code == 0
    wrong = run_cli("config", "explain", "optim.rl")
    assert wrong.code == 2
    assert "the nearest are: optim.lr" in wrong.err
    assert ACTOR not in groups()
