"""Words on the command line: Hydra's grammar, config groups, HALOs' names."""

import pytest

from shardtune.cli.words import split_words
from shardtune.config import load_recipe
from shardtune.config.overrides import GROUPS, PLAIN, options, plain_value, with_keys
from shardtune.config.recipe_config import as_dict_config
from shardtune.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("actor.optim.lr=3e-5", "actor.optim.lr", 3e-5),
        ("+actor.optim.lr=3e-5", "actor.optim.lr", 3e-5),
        ("++actor.optim.lr=1", "actor.optim.lr", 1.0),
        ("actor.optim.clip_grad=null", "actor.optim.clip_grad", None),
        ("runner.save_interval=epoch", "runner.save_interval", "epoch"),
        ("runner.overwrite=true", "runner.overwrite", True),
        ("runner.early_stop={enabled: false, mode: max}", "runner.early_stop.mode", "max"),
        (
            "runner.allow_changes=[actor.optim.lr,data.max_length]",
            "runner.allow_changes",
            ["actor.optim.lr", "data.max_length"],
        ),
        ("runner.logger.experiment_name='007'", "runner.logger.experiment_name", "007"),
        ("actor.optim.args.momentum=0.9", "actor.optim.args", {"momentum": 0.9}),
        ("+actor.model.options.a.b=[1,{c: x}]", "actor.model.options", {"a": {"b": [1, {"c": "x"}]}}),
        ("actor.fsdp_config.reduce='every micro-batch'", "actor.fsdp_config.reduce", "every"),
        (r'eval.answer_pattern="#### (-?[0-9]+)"', "eval.answer_pattern", "#### (-?[0-9]+)"),
        ("data.system_prompt=", None, None),
        ("lr=3e-5", "actor.optim.lr", 3e-5),
        ("n_epochs=3", "runner.max_epochs", 3),
        ("exp_name=mine", "runner.logger.experiment_name", "mine"),
        ("++cache_dir=/models", "runner.logger.log_path", "/models"),
        ("datasets=[org/name]", "data.train_data_paths", ["org/name"]),
        ("model.name_or_path=org/other", "actor.model.model_path", "org/other"),
        ("++model.batch_size=64", "actor.global_batch_size", 64),
        ("++model.use_peft=false", "actor.model.is_lora", False),
        ("++model.peft.lora_r=16", "actor.model.lora.r", 16),
        ("++model.peft.lora_alpha=32", "actor.model.lora.alpha", 32),
        ("++model.peft.lora_dropout=0", "actor.model.lora.dropout", 0),
        ("wandb.enabled=true", "runner.logger.logger_backends", ["jsonl", "tensorboard", "wandb"]),
        ("++wandb.enabled=false", "runner.logger.logger_backends", ["jsonl", "tensorboard"]),
    ],
)
def test_an_override_sets_its_key(load, override, key, expected):
    if key is None:
        with pytest.raises(ConfigError, match="system_prompt"):
            load(override)
        return
    recipe = load("eval.generate=false", override)
    value = as_dict_config(recipe)
    for part in key.split("."):
        value = value[part]
    assert value == expected
    assert recipe.where(key) == f"override {override}" or key == "data.train_data_paths" or "args" in key


def test_overrides_win_over_the_recipe_and_later_ones_over_earlier(load_text):
    text = """
actor: {model: {model_path: m/m}, optim: {lr: 1e-4, args: {momentum: 0.9, nesterov: true}}}
data: {train_data_paths: {path: a.jsonl, weight: 2}}
"""
    recipe = load_text(
        text,
        "actor.optim.lr=2e-4",
        "actor.optim.lr=3e-4",
        "actor.optim.args={momentum: 0.5}",
        "data.train_data_paths={path: b.jsonl}",
    )
    assert recipe.actor.optim.lr == 3e-4
    assert recipe.actor.optim.args == {"momentum": 0.5, "nesterov": True}
    assert recipe.data.train_data_paths.weight == 1.0  # a source is replaced whole


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.lr=1", "did you mean actor.optim.lr?"),
        ("actor.optim.learning_rate=1", "did you mean actor.optim.lr?"),
        ("runer.seed=1", "did you mean runner?"),
        ("model.foo=1", "unknown key model.foo"),
        ("actor.optim.lr=abc", "actor.optim.lr: 'abc' is not allowed"),
        ("runner.save_interval=null", "leave it out for its default, -1; allowed: -1, a whole number >= 1"),
        ("actor.optim.lr=null", "actor.optim.lr: null is not allowed"),
        ("actor.optim.lr.x=1", "actor.optim.lr: {'x': 1} is not allowed"),
        ("actor=3", "actor is a section, not 3"),
        ("~actor.optim.lr", "deletes a key"),
        ("actor.optim.lr=1,2", "gives several values"),
        ("actor.optim.lr=range(1,3)", "gives several values"),
        ("actor.optim.lr@x=1", "names a package"),
        ("actor.optim.lr", "is not an override"),
        ("actor.optim.lr==1", "cannot be read"),
        ("runner.logger.experiment_name=a=b", """inside: 'runner.logger.experiment_name="a=b"'"""),
        ("tokenizer.new_tokens=[<a>, <b>]", """inside: 'tokenizer.new_tokens=["<a>","<b>"]'"""),
        ("data.train_data_paths[0].weight=3", "names an entry of a list by its number"),
        (
            "data.train_data_paths=[{path: a.jsonl, wieght: 3}]",
            "did you mean weight? the keys of such an entry are",
        ),
        ("data.train_data_paths.weight=3", "is train.jsonl, which has no weight"),
        ("data.system_prompt=be (brief", "cannot be read"),
        ("wandb.enabled=maybe", "wandb.enabled: maybe is not allowed"),
        ("lr=abc", "actor.optim.lr: 'abc' is not allowed"),
        ("model=lama", "did you mean llama?"),
        ("loss=dpo", "the config group loss has no 'dpo'"),
        ("loss=destil", "did you mean distill? there are: sft, dft, distill, or a function of yours"),
        ("model=[llama,qwen]", "the config group model has no ['llama', 'qwen']"),
        ("datasets=[ultrachatt]", "did you mean ultrachat?"),
    ],
)
def test_a_wrong_override_is_quoted(load, override, expected):
    with pytest.raises(ConfigError) as error:
        load(override)
    assert expected in str(error.value)
    assert override in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [
        (["lr=1e-5", "actor.optim.lr=1e-5"], "actor.optim.lr"),
        (["runner.max_epochs=2", "n_epochs=2"], "runner.max_epochs"),
        (["datasets=[a.jsonl]", "data.train_data_paths=b.jsonl"], "data.train_data_paths"),
        (["eval_every=64", "runner.val_check_interval=2"], "runner.val_check_interval"),
        (["wandb.enabled=true", "runner.logger.logger_backends=[jsonl]"], "runner.logger.logger_backends"),
    ],
)
def test_both_names_of_a_key_are_an_error(load, overrides, ours):
    with pytest.raises(ConfigError, match="two names of") as error:
        load(*overrides)
    assert ours in str(error.value)
    assert all(override in str(error.value) for override in overrides)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optim.lr=1 optim.lr=2", ["optim.lr=1 is replaced by optim.lr=2, which comes after it"]),
        ("lr=1 lr=2", ["lr=1 is replaced by lr=2, which comes after it"]),
        ("optim={lr:1} optim.lr=2", ["optim={lr:1} is replaced by optim.lr=2, which comes after it"]),
        ("optim.lr=2 optim=null", ["optim.lr=2 is replaced by optim=null, which comes after it"]),
        (
            "optim.args={a:1} optim.args.a=2",
            ["optim.args={a:1} is replaced by optim.args.a=2, which comes after it"],
        ),
        ("datasets=[a] datasets=[b]", ["datasets=[a] is replaced by datasets=[b], which comes after it"]),
        ("data=a.jsonl data=b.jsonl", ["data=a.jsonl is replaced by data=b.jsonl, which comes after it"]),
        ("optim.lr=1 optim.lr=1", []),
        ("optim.lr=1 optim.adam_eps=2", []),
        ("optim=null optim.lr=2", []),
        ("optim.args={a:1} optim.args={b:2}", []),
        ("model=llama model.model_path=some/where", []),
        ("lr=1 actor.optim.lr=2", []),  # an error
    ],
)
def test_words_that_later_ones_replace_are_named(words, said, capsys):
    texts = words.split()
    assert split_words(["recipe.yaml", *texts]) == ("recipe.yaml", texts)
    assert capsys.readouterr().err.splitlines() == said


def test_keys_that_are_added_to_a_command_replace_its_own():
    command = ["train", "recipe.yaml", "+runner.nproc_per_node=2", "exp_name=a", "optim.lr=1"]
    added = ["runner.nproc_per_node=1", "runner.logger.experiment_name=b"]
    assert with_keys(command, added) == ["train", "recipe.yaml", "optim.lr=1", *added]


def test_the_wandb_switch_works_on_the_recipes_own_backends(load_text):
    text = (
        "runner: {logger: {logger_backends: [%s]}}\nactor: {model: {model_path: m/m}}\ndata: {train_data_paths: a.json}"
    )
    on = load_text(text % "jsonl", "wandb.enabled=true")
    off = load_text(text % "wandb, jsonl", "wandb.enabled=false")
    assert on.runner.logger.logger_backends == ["jsonl", "wandb"]
    assert off.runner.logger.logger_backends == ["jsonl"]


HALOS_SFT = [
    "loss=sft",
    "model=llama",
    "datasets=[ultrachat]",
    "exp_name=llama3-8B-sft",
    "++cache_dir=/models",
    "++model.name_or_path=meta-llama/Meta-Llama-3-8B",
]


def test_the_sft_command_of_halos_runs_without_a_recipe():
    recipe = load_recipe(None, HALOS_SFT)
    assert recipe.runner.task_type == "sft"
    assert recipe.actor.model.model_path == "meta-llama/Meta-Llama-3-8B"
    assert recipe.runner.logger.log_path == "/models"
    assert recipe.runner.logger.experiment_name == "llama3-8B-sft"
    (source,) = recipe.data.train_data_paths
    assert (source.path, source.split) == ("HuggingFaceH4/ultrachat_200k", "train_sft")


def test_the_lora_command_of_halos_runs_without_a_recipe():
    words = [*HALOS_SFT, "++model.use_peft=true", "++model.peft.lora_r=64", "++model.peft.lora_alpha=256"]
    model = load_recipe(None, words).actor.model
    assert (model.is_lora, model.lora.r, model.lora.alpha) == (True, 64, 256.0)


def test_groups_name_the_run_and_go_over_the_recipe(load):
    assert load_recipe(None, ["loss=sft", "model=qwen", "datasets=[gsm8k]"]).runner.logger.experiment_name == "sft-qwen"
    recipe = load("model=mistral", "datasets=[gsm8k,./mine,alpaca,{path: x.jsonl, weight: 2}]")
    assert recipe.runner.logger.experiment_name == "recipe"
    assert recipe.actor.model.model_path == "mistralai/Mistral-7B-Instruct-v0.3"
    gsm8k, mine, alpaca, entry = recipe.data.train_data_paths
    assert (gsm8k.path, gsm8k.name) == ("openai/gsm8k", "main")
    assert mine.startswith("/")
    assert mine.endswith("/mine")
    assert (alpaca.path, entry.weight) == ("tatsu-lab/alpaca", 2)


@pytest.mark.parametrize("group", ["loss", "model"])
def test_every_choice_of_a_group_is_a_valid_recipe(load, group):
    assert options(group)
    for option in options(group):
        assert load(f"{group}={option}").where("actor.model.model_path" if group == "model" else "runner.task_type")


def test_every_data_set_of_the_group_is_a_valid_source(load):
    names = options("datasets")
    sources = load(f"datasets=[{','.join(names)}]").data.train_data_paths
    assert [source.path for source in sources] == [
        load(f"datasets={name}").data.train_data_paths[0].path for name in names
    ]
    assert all(source.path.count("/") == 1 for source in sources)


def test_without_recipe_and_groups_there_is_nothing_to_run():
    with pytest.raises(ConfigError, match="there is no recipe"):
        load_recipe(None, ["actor.optim.lr=1"])
    with pytest.raises(ConfigError, match=r"data\.train_data_paths is required"):
        load_recipe(None, ["model=llama"])


def test_a_hydra_application_that_calls_us_keeps_its_own_state(load, tmp_path):
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert load("model=llama").actor.model.model_path.startswith("meta-llama/")
        assert compose("theirs") == {"a": 1}
    assert not GlobalHydra.instance().is_initialized()
    assert load(*(f"{group}={options(group)[0]}" for group in GROUPS)).runner.task_type == "sft"


def test_named_sets_are_set_one_by_one(load, load_text):
    sets = load("data.eval_data_paths.a=a.jsonl", "data.eval_data_paths.b=b.jsonl").data.eval_data_paths
    assert {name: path.rpartition("/")[2] for name, path in sets.items()} == {"a": "a.jsonl", "b": "b.jsonl"}
    text = "{actor: {model: {model_path: m/m}}, data: {train_data_paths: t.jsonl, eval_data_paths: {a: a.jsonl}}}"
    assert set(load_text(text, "data.eval_data_paths.b=b.jsonl").data.eval_data_paths) == {"a", "b"}
    assert set(load_text(text, "data.eval_data_paths={b: b.jsonl}").data.eval_data_paths) == {"b"}
    one = text.replace("{a: a.jsonl}", "a.jsonl")
    with pytest.raises(ConfigError, match=r"data.eval_data_paths is a.jsonl, which has no b"):
        load_text(one, "data.eval_data_paths.b=b.jsonl")
    entry = text.replace("t.jsonl", "{path: t.jsonl, max_samples: 3}")
    source = load_text(entry, "data.train_data_paths.weight=2").data.train_data_paths
    assert (source.weight, source.max_samples) == (2.0, 3)


PLAIN_VALUES = (
    "true False NULL null/x true.x -0 0 17 -3 1.50 0.10 3e-5 1E5 1e+5 -1.5e3 a a/b /a/b.jsonl a-b a.b a_1 e3 E5 infx "
    "nan.x a.. a/1.50 a/00 a-1_0"
)
OTHER_VALUES = "000 1e 007e2 00.5 1_000 .5 1. nan -inf 12345678901234567890 [a] a,b 'a' ${a} a=b"


def test_plain_values_are_what_hydra_makes_of_them(load, monkeypatch):
    """They are read without Hydra, whose import takes time; what is not plain is left to it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for text in [f"{key}={value}" for key in ("a", "++a_b.c1") for value in PLAIN_VALUES.split()]:
        plain, parsed = PLAIN.fullmatch(text), parser.parse_override(text)
        assert plain is not None
        assert (parsed.key_or_group, parsed.package) == (plain["key"].lstrip("+"), None)
        made = plain_value(plain["value"])
        assert (type(made), made) == (type(parsed.value()), parsed.value())
    below_home = PLAIN.fullmatch("a=~/b.jsonl")  # which no shell expands behind a key with dots; Hydra does not take it
    assert below_home is not None
    assert plain_value(below_home["value"]) == "~/b.jsonl"
    assert not [value for value in OTHER_VALUES.split() if PLAIN.fullmatch(f"a={value}")]
    monkeypatch.setattr("shardtune.config.overrides._parser", None)
    assert load("++optim.lr=3e-5", "runner.logger.log_path=/a/b-1.5").actor.optim.lr == 3e-5
