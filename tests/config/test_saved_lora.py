"""The keys of `actor.model.lora`: which go together, and what an adapter that is started from has to say."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardtune.config import load_recipe
from shardtune.errors import ConfigError

STORED = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 12,
    "lora_dropout": 0.1,
    "target_modules": ["v_proj", "q_proj"],
    "target_parameters": None,
    "use_rslora": True,
    "use_dora": False,
    "modules_to_save": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {},
}
LORA = "actor.model.is_lora=true"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "adapter_config.json").write_text(json.dumps(STORED))
    return tmp_path / "before"


def test_an_adapter_that_is_started_from_says_what_it_is(load, stored: Path) -> None:
    lora = load(LORA, f"actor.model.lora.adapter_path={stored}", "actor.model.lora.dropout=0.3").actor.model.lora
    assert (lora.r, lora.alpha, lora.use_rslora, lora.use_dora) == (8, 12.0, True, False)
    assert lora.target_modules == ["q_proj", "v_proj"]
    assert (lora.target_parameters, lora.modules_to_save) == ([], [])
    assert (lora.exclude_modules, lora.layers_to_transform, lora.layers_pattern) == ([], None, [])
    assert (lora.rank_pattern, lora.alpha_pattern) == ({"q_proj": 4}, {})
    assert lora.dropout == 0.3, "how much is dropped is free"


def test_the_resolved_recipe_loads_again_also_without_the_adapter(load, stored: Path) -> None:
    recipe = load(LORA, f"actor.model.lora.adapter_path={stored}")
    assert load_recipe(recipe.to_dict()) == recipe
    (stored / "adapter_config.json").unlink()
    assert load_recipe(recipe.to_dict(), files_must_exist=False) == recipe


@pytest.mark.parametrize(
    "given",
    [
        "r=16",
        "alpha=13",
        "target_modules=[q_proj]",
        "use_dora=true",
        "use_rslora=false",
        "layers_to_transform=[0]",
        "rank_pattern.q_proj=8",
    ],
)
def test_keys_that_say_otherwise_than_the_adapter_are_refused(load, stored: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=r"but the adapter in .*before has") as error:
        load(LORA, f"actor.model.lora.adapter_path={stored}", f"actor.model.lora.{given}")
    assert f"where:  override actor.model.lora.{given}" in str(error.value)


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        ("target_modules=[up, out]", True),
        ("target_modules=all-linear", True),
        ("target_modules='.*(up|out)'", True),
        ("modules_to_save=[head]", True),
        ("target_modules=[up]", False),
        ("target_modules=[up, out, down]", False),
        ("target_modules='.*up'", False),
        ("modules_to_save=[head, norm]", False),
    ],
)
def test_modules_that_are_stored_by_full_names_may_be_named_as_in_the_first_recipe(
    load, stored: Path, given: str, *, agrees: bool
) -> None:
    """The same recipe goes on from its own adapter."""
    names = {"target_modules": ["blocks.0.up", "blocks.1.up", "out"], "modules_to_save": ["model.head"]}
    (stored / "adapter_config.json").write_text(json.dumps(STORED | names))
    with nullcontext() if agrees else pytest.raises(ConfigError, match=r"but the adapter in .*before has"):
        load(LORA, f"actor.model.lora.load_from={stored}", f"actor.model.lora.{given}")


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        ("{q_proj: 4, '.*_proj': 3}", True),
        ("{'.*_proj': 3}", False),
        ("{'.*_proj': 3, q_proj: 4}", False),
        ("{q_proj: 4}", False),
        ("{q_proj: 4, '.*_proj': 2}", False),
        ("{q_proj: 4, '.*_proj': 3, other: 3}", False),
    ],
)
def test_patterns_whose_order_matters_may_be_as_in_the_first_recipe(
    load_text, stored: Path, given: str, *, agrees: bool
) -> None:
    """They are stored as full names, as PEFT sorts patterns."""
    names = ["layers.0.q_proj", "layers.0.v_proj"]
    ranks = {r"^layers\.0\.q_proj": 4, r"^layers\.0\.v_proj": 3}
    (stored / "adapter_config.json").write_text(json.dumps(STORED | {"target_modules": names, "rank_pattern": ranks}))
    base = "model_path: owner/name, is_lora: true"
    with nullcontext() if agrees else pytest.raises(ConfigError, match=r"but the adapter in .*before has"):
        load_text(
            f"model: {{{base}, lora: {{load_from: {stored}, rank_pattern: {given}}}}}\n"
            "data: {train_data_paths: owner/rows}\n"
        )


def test_a_pattern_that_does_not_compile_is_refused_beside_an_adapter_too(load, stored: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        load(LORA, f"actor.model.lora.load_from={stored}", "actor.model.lora.target_modules='(up'")


def test_an_adapter_that_is_not_there_is_refused(load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json is not there"):
        load(LORA, f"actor.model.lora.adapter_path={tmp_path}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["init=orthogonal", "r=5"], "needs an even r"),
        (["init=eva"], "needs a pass over data"),
        (["init=loftq"], "needs the kernels of bitsandbytes"),
        (["init=best"], "not one of PEFT's initialisers"),
        (["init=mica", "use_dora=true"], "needs adapters without DoRA"),
        (["init=pissa", "base_dtype=nf4"], "would round the remaining base weights again"),
        (["init=pissa", "target_parameters=[experts.down_proj]"], "linear layers"),
        (["target_parameters=[experts.down_proj]", "dropout=0.1"], "PEFT has none for them"),
        (["target_parameters=[experts.down_proj]", "use_dora=true"], "PEFT has none for them"),
        (["init=orthogonal", "rank_pattern.q_proj=5"], "needs even ranks in rank_pattern"),
        (["layers_pattern=[layers]"], "needs layers_to_transform"),
        (["layers_to_transform=[0]", "target_parameters=[experts.down_proj]"], "needs no target_parameters"),
        (["layers_to_transform=[-1]"], "a whole number >= 0, or a list of them"),
        (["exclude_modules='q_(proj'"], "does not compile"),
        (["rank_pattern.q_proj=0"], "rank_pattern"),
        (["alpha_pattern.q_proj=0"], "alpha_pattern"),
        (["target_modules=[]"], "needs target_parameters, if it is empty"),
        (["base_dtype=bf16"], "needs precision: bf16"),
        (["base_dtype=bf16"], "base_dtype: auto, or change the other"),
    ],
)
def test_what_does_not_go_together_is_refused(load, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(LORA, "actor.model.precision=fp32", *(f"actor.model.lora.{key}" for key in keys))
    assert message in str(error.value)


def test_the_other_names_of_peft_are_known(load) -> None:
    for init in ("gaussian", "pissa", "pissa_niter_16", "olora", "mica", "orthogonal", "true", "false"):
        assert str(load(LORA, f"actor.model.lora.init={init}").actor.model.lora.init).lower() == init


def test_keys_of_an_adapter_without_one_are_refused(load) -> None:
    with pytest.raises(ConfigError, match=r"has no effect with actor\.model\.is_lora: false"):
        load("actor.model.lora.alpha=3")
