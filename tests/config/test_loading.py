"""Recipes from files and memory: defaults, types, places in messages, paths, and the way back."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardtune.config import Recipe, flatten, load_recipe
from shardtune.config.recipe_config import as_dict_config
from shardtune.errors import ConfigError

MINIMAL = {"actor": {"model": {"model_path": "org/model"}}, "data": {"train_data_paths": "train.jsonl"}}


def message(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


def test_a_recipe_that_says_only_what_is_required_gets_the_defaults(load):
    recipe = load()
    assert recipe.actor.optim.lr == 1e-5
    assert recipe.actor.global_batch_size == 32
    assert recipe.runner.logger.logger_backends == ["jsonl", "tensorboard"]
    assert recipe.runner.logger.experiment_name == "recipe"
    assert recipe.where("actor.optim.lr") is None
    assert recipe.where("actor.model.model_path").endswith("recipe.yaml:3")


def test_a_recipe_is_immutable(load):
    with pytest.raises(ValueError, match="frozen"):
        load().runner.max_epochs = 3


@pytest.mark.parametrize("make", [dict, OmegaConf.create], ids=["dict", "DictConfig"])
def test_a_mapping_works_like_a_file(make, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(make(MINIMAL), ["runner.logger.experiment_name=recipe"])
    assert recipe == load()
    assert load_recipe(make(MINIMAL)).runner.logger.experiment_name == "run"


def test_a_mapping_may_hold_paths_and_tuples(tmp_path):
    recipe = load_recipe(
        {"actor": {"model": {"model_path": tmp_path}}, "data": {"train_data_paths": (tmp_path / "a.jsonl",)}}
    )
    assert recipe.actor.model.model_path == str(tmp_path)
    assert recipe.data.train_data_paths == [str(tmp_path / "a.jsonl")]


def test_an_object_that_is_no_yaml_names_its_key():
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr: <object object .*is not allowed"):
        load_recipe({**MINIMAL, "actor": {"model": {"model_path": "m/m"}, "optim": {"lr": object()}}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-5", 1e-5), ("3E-4", 3e-4), ("1", 1.0), ("0.5", 0.5), ("'2e-5'", 2e-5), ("1.e-3", 1e-3)],
)
def test_numbers_as_people_write_them(load_text, text, expected):
    recipe = load_text(
        f"actor: {{model: {{model_path: m/m}}, optim: {{lr: {text}}}}}\ndata: {{train_data_paths: a.json}}"
    )
    assert recipe.actor.optim.lr == expected
    assert isinstance(recipe.actor.optim.lr, float)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("actor: {optim: {lr: abc}}", "actor.optim.lr: 'abc'"),
        ("actor: {optim: {lr: .inf}}", "actor.optim.lr: inf"),
        ("actor: {optim: {lr: .nan}}", "actor.optim.lr: nan"),
        (
            "actor: {optim: {lr: 1e60}}",
            "is not allowed (32-bit arithmetic needs 0 or",
        ),
        ("actor: {optim: {adam_eps: 1e-46}}", "actor.optim.adam_eps: 1e-46"),
        (
            "actor: {optim: {groups: [{pattern: a, weight_decay: 1.0e+31}]}}",
            "actor.optim.groups[0].weight_decay: 1e+31",
        ),
        ("actor: {optim: {args: {amsgrad: true, momentum: 1.0e+39}}}", "actor.optim.args: {'amsgrad': True"),
        ("actor: {optim: {lr: 1.0e+20, weight_decay: 1.0e+20}}", "the learning rate times the weight decay is 1e+40"),
        ("actor: {optim: {lr: true}}", "actor.optim.lr: true"),
        ("actor: {optim: {adam_beta2: 1.0}}", "actor.optim.adam_beta2: 1.0"),
        ("actor: {optim: {clip_grad: 0}}", "actor.optim.clip_grad: 0"),
        ("actor: {optim: {lr_scheduler: cosin}}", "actor.optim.lr_scheduler: 'cosin'"),
        ("actor: {optim: {decay_ratio: 0}}", "actor.optim.decay_ratio: 0"),
        ("actor: {optim: {groups: [{pattern: '(', lr: 1}]}}", "actor.optim.groups[0].pattern: '('"),
        ("actor: {model: {lora: {rank_pattern: {q_proj: 0}}}}", "remedy: allowed: a whole number >= 1"),
        ("actor: {global_batch_size: 2.5}", "actor.global_batch_size: 2.5"),
        ("actor: {global_batch_size: 32.0}", "actor.global_batch_size: 32.0"),
        ("actor: {micro_batch_size: -3}", "actor.micro_batch_size: -3"),
        ("actor: {micro_batch_size: '4'}", "actor.micro_batch_size: '4'"),
        ("actor: {model: {gradient_checkpointing: maybe}}", "actor.model.gradient_checkpointing: 'maybe'"),
        ("actor: {model: {adapter: my_model.py}}", "actor.model.adapter: 'my_model.py'"),
        ("actor: {model: {options: 3}}", "actor.model.options: 3"),
        ("actor: {fsdp_config: {wrap: []}}", "actor.fsdp_config.wrap: []"),
        ("runner: {max_epochs: 0}", "runner.max_epochs: 0"),
        ("runner: {keep_last: 0}", "runner.keep_last: 0"),
        ("runner: {save_interval: 0}", "runner.save_interval: 0"),
        ("runner: {save_interval: epochs}", "runner.save_interval: 'epochs'"),
        ("runner: {save_interval: true}", "runner.save_interval: true"),
        ("runner: {profile_steps: [12, 10]}", "runner.profile_steps: [12, 10]"),
        ("runner: {profile_steps: 10}", "runner.profile_steps: 10"),
        ("runner: {master_port: 70000}", "runner.master_port: 70000"),
        ("runner: {resume_dir: false}", "runner.resume_dir: false"),
        ("runner: {logger: {experiment_name: ../elsewhere}}", "runner.logger.experiment_name: '../elsewhere'"),
        ("runner: {logger: {experiment_name: 2024}}", "put it in quotes"),
        ("runner: {logger: {logger_backends: [jsonl, mlfow]}}", "runner.logger.logger_backends[1]: 'mlfow'"),
        ("runner: {logger: {logger_backends: [jsonl, jsonl]}}", "it names an entry twice"),
        ("data: {train_on: user}", "data.train_on: 'user'"),
        ("data: {eval_split: 1.0}", "data.eval_split: 1.0"),
        ("data: {train_data_paths: []}", "the list is empty"),
        ("data: {train_data_paths: [a.jsonl, 3]}", "3 is neither text nor an entry"),
        ("data: {train_data_paths: [a.jsonl, {path: b.jsonl, weight: 0}]}", "data.train_data_paths[1].weight: 0"),
        ("data: {train_data_paths: {path: b.jsonl, wieght: 2}}", "unknown key data.train_data_paths.wieght"),
        ("data: {train_data_paths: {weight: 2}}", "data.train_data_paths.path is required"),
        ("data: {train_data_paths: {math: a.jsonl}}", "unknown key data.train_data_paths.math"),
        ("data: {eval_data_paths: {a/b: a.jsonl}}", "a set's name is letters"),
        ("data: {columns: {question: 3}}", "data.columns.question: 3"),
        ("data: {transform: clean}", "data.transform: 'clean'"),
        ("eval: {answer_pattern: '####'}", "it has no group"),
        ("eval: {answer_pattern: '(('}", "it does not compile"),
        ("eval: {match: fuzzy}", "eval.match: 'fuzzy'"),
        ("eval: {temperature: -1}", "eval.temperature: -1"),
    ],
)
def test_a_wrong_value_names_key_value_and_line(load_text, line, key):
    with pytest.raises(ConfigError) as error:
        load_text(f"# a comment\n\n{line}\n")
    assert key in message(error)
    assert "mine.yaml:3" in message(error)
    assert "remedy" in message(error)


def test_all_mistakes_come_in_one_message(load_text):
    with pytest.raises(ConfigError) as error:
        load_text("runer: {}\nactor:\n  lr: 1\n  optim: {lr: abc}\ndata:\n  max_length: 1.5\n")
    for line, what in [
        (1, "unknown key runer"),
        (3, "unknown key actor.lr"),
        (4, "actor.optim.lr"),
        (6, "data.max_length"),
    ]:
        assert what in message(error)
        assert f"mine.yaml:{line}" in message(error)
    assert message(error).startswith("4 mistakes")


def test_an_unknown_key_does_not_hide_what_is_missing(load_text):
    with pytest.raises(ConfigError) as error:
        load_text("actor: {model: {path: m/m}}\ndata: {train_data_paths: a.json}")
    assert "did you mean actor.model.model_path?" in message(error)
    assert "actor.model.model_path is required" in message(error)


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "the recipe is empty", "mine.yaml"),
        ("# only a comment\n", "the recipe is empty", "mine.yaml"),
        ("\n- a\n- b\n", "this is a list", "mine.yaml:2"),
        ("train.jsonl\n", "this is a single value", "mine.yaml:1"),
        ("actor:\n  optim: {lr: 1\ndata: 3\n", "not valid YAML", "mine.yaml:3"),
        ("actor:\n\toptim: 3\n", "not valid YAML", "mine.yaml:2"),
        ("runner: {seed: 1}\nrunner: {seed: 2}\n", "duplicate key", "mine.yaml:2"),
        ("runner: {seed: 010}\n", "YAML reads 010 as 8, in base 8", "mine.yaml:1"),
        ("runner: {seed: 1:30}\n", "YAML reads 1:30 as 90, in base 60", "mine.yaml:1"),
        ("data: {template_kwargs: {time: 2:30.5}}\n", "YAML reads 2:30.5 as 150.5, in base 60", "mine.yaml:1"),
        ("actor.optim.lr: 3\n", "in a file a dot is written as a section: actor: {optim: {lr: …}}", "mine.yaml:1"),
        ("runner: 3\n", "runner is a section, not 3", "mine.yaml:1"),
        ("actor: [a]\n", "actor is a section, not [a]", "mine.yaml:1"),
        ("3: a\n", "3 is not the name of a key", "mine.yaml"),
    ],
)
def test_a_file_that_is_no_recipe(load_text, text, what, where):
    with pytest.raises(ConfigError) as error:
        load_text(text)
    assert what in message(error)
    assert where in message(error)


def test_a_file_that_cannot_be_read(tmp_path, recipe_path):
    with pytest.raises(ConfigError, match=r"no such recipe(.|\n)*missing\.yaml(.|\n)*holds: recipe\.yaml"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="this is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("actor: {é: 1}".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="not a int"):
        load_recipe(3)  # pyright: ignore[reportArgumentType]


def test_a_section_whose_keys_are_all_commented_out_says_nothing(load_text):
    recipe = load_text("runner:\n  # seed: 1\nactor: {model: {model_path: m/m}}\ndata: {train_data_paths: a.json}")
    assert recipe.runner.seed == 42


def test_references_are_resolved_against_the_whole_recipe(load, monkeypatch):
    monkeypatch.setenv("SHARDTUNE_TEST_ROOT", "/models")
    recipe = load(
        "runner.max_steps=7",
        "runner.save_interval=${runner.max_steps}",
        "actor.optim.min_lr=${actor.optim.lr}",
        "actor.optim.args={lr_again: '${actor.optim.lr}'}",
        "runner.logger.log_path=${oc.env:SHARDTUNE_TEST_ROOT}/runs",
    )
    assert recipe.runner.save_interval == 7
    assert recipe.actor.optim.min_lr == recipe.actor.optim.lr
    assert recipe.actor.optim.args == {"lr_again": 1e-5}
    assert recipe.runner.logger.log_path == "/models/runs"


@pytest.mark.parametrize("value", ["${runner.sede}", "${oc.env:SHARDTUNE_NOT_SET}", "???", "${runner.seed"])
def test_a_reference_to_nothing_names_its_key(load_text, value):
    with pytest.raises(ConfigError) as error:
        load_text(f"actor: {{model: {{model_path: '{value}'}}}}\ndata: {{train_data_paths: a.json}}")
    assert "actor.model.model_path" in message(error)
    assert "mine.yaml:1" in message(error)
    assert "required" not in message(error)


def test_merged_and_anchored_yaml_keeps_its_lines(load_text):
    with pytest.raises(ConfigError) as error:
        load_text("runner:\n  best: &watch\n    monitor: eval/loss\n    mood: min\n  early_stop:\n    <<: *watch\n")
    assert "runner.best.mood" in message(error)
    assert "runner.early_stop.mood" in message(error)
    assert message(error).count("mine.yaml:4") == 2


def test_paths_start_at_the_recipe_and_the_log_path_at_the_working_directory(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home / "models" / "tiny", home / "org" / "here", home / "rows", work):
        folder.mkdir(parents=True)
    for name in ("transform.py", "template.jinja", "plug.py", "model.py", "match.py"):
        (home / name).write_text("")
    (home / "r.yaml").write_text(
        "plugins: [plug.py, my_package.plugin]\n"
        "runner: {resume_dir: old/run/}\n"
        "actor:\n"
        "  model: {model_path: models/tiny, adapter: 'model.py:Model'}\n"
        "  tokenizer: {tokenizer_model: org/not-here}\n"
        "data:\n"
        "  train_data_paths: [a.jsonl, 'b/*.parquet', ./c, rows, org/here, org/name-v1.5, {path: ../d.csv.gz}, hf://x/y]\n"
        "  eval_data_paths: {math: e.jsonl, chat: [f.json, org/chat]}\n"
        "  transform: transform.py:clean\n"
        "  chat_template: template.jinja\n"
        "  cache_dir: ~/cache\n"
        "eval: {generate: false, match: 'match.py:same'}\n"
    )
    monkeypatch.chdir(work)
    recipe = load_recipe(os.path.relpath(home / "r.yaml"))
    at = f"{home}/"
    assert recipe.plugins == [at + "plug.py", "my_package.plugin"]
    assert recipe.runner.resume_dir == at + "old/run"
    assert recipe.runner.logger.log_path == str(work / "runs")
    assert recipe.actor.model.model_path == at + "models/tiny"
    assert recipe.actor.model.adapter == at + "model.py:Model"
    assert recipe.actor.tokenizer.tokenizer_model == "org/not-here"
    *paths, entry, url = recipe.data.train_data_paths
    assert paths == [at + "a.jsonl", at + "b/*.parquet", at + "c", at + "rows", at + "org/here", "org/name-v1.5"]
    assert (entry.path, url) == (str(tmp_path / "d.csv.gz"), "hf://x/y")
    assert recipe.data.eval_data_paths == {"math": at + "e.jsonl", "chat": [at + "f.json", "org/chat"]}
    assert recipe.data.transform == at + "transform.py:clean"
    assert recipe.data.chat_template == at + "template.jinja"
    assert recipe.data.cache_dir == str(Path("~/cache").expanduser())
    assert recipe.eval.match == at + "match.py:same"


@pytest.mark.parametrize(
    "override",
    [
        "actor.model.model_path=./nowhere",
        "actor.model.adapter=nowhere.py:Model",
        "data.chat_template=nowhere.jinja",
        "data.transform=nowhere.py:clean",
        "eval.match=nowhere.py:same",
        "plugins=[nowhere.py]",
    ],
)
def test_a_named_file_that_is_missing_is_an_error_unless_told(load, override):
    with pytest.raises(ConfigError) as error:
        load("eval.generate=false", override)
    key, _, _ = override.partition("=")
    assert message(error).startswith(f"{key}: there is no ")
    assert override in message(error)
    load("eval.generate=false", override, files_must_exist=False)


def test_the_resolved_recipe_reads_back_the_same(load, recipe_path, tmp_path):
    recipe = load(
        "actor.optim.groups=[{pattern: embed, lr: 1e-6}]",
        "actor.optim.args={momentum: 0.9, nested: {a: [1, null]}}",
        "data.eval_data_paths={math: [{path: a.jsonl, max_samples: 5}], chat: b.jsonl}",
        "runner.val_check_interval=epoch",
        "runner.logger.experiment_name='1e-5'",
        "actor.global_batch_tokens=4096",
    )
    assert recipe.actor.global_batch_size is None
    written = tmp_path / "run" / "config.yaml"
    written.parent.mkdir()
    written.write_text(recipe.to_yaml())
    for source in (written, recipe.to_dict(), as_dict_config(recipe)):
        back = load_recipe(source)
        assert back == recipe
        assert back.to_yaml() == recipe.to_yaml()
    seed_line = written.read_text().splitlines().index("  seed: 42") + 1
    assert load_recipe(written).where("runner.seed") == f"{written}:{seed_line}"
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != load_recipe(recipe_path)


@pytest.mark.parametrize(
    "prompt", ["${runner.seed}", r"\${x}", "a\\ ${ b", "'${' \"${\"", "C:\\dir\\${x} \\", "true", "01"]
)
def test_text_that_looks_like_something_else_reads_back_as_text(load, tmp_path, prompt):
    recipe = load()
    values = recipe.to_dict()
    values["data"]["system_prompt"] = prompt
    odd = Recipe.model_validate(values)
    (tmp_path / "odd.yaml").write_text(odd.to_yaml())
    assert load_recipe(tmp_path / "odd.yaml").data.system_prompt == prompt
    assert as_dict_config(odd).data.system_prompt == prompt


def test_what_is_in_memory_need_not_be_named():
    keys = ("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths")
    recipe = load_recipe({"eval": {"generate": True}}, in_memory=keys)
    assert recipe.actor.model.model_path is None
    with pytest.raises(ConfigError, match="needs evaluation data"):
        load_recipe({"eval": {"generate": True}}, in_memory=keys[:2])
    with pytest.raises(ConfigError, match=r"^model\.model_path is required"):
        load_recipe({}, in_memory=keys[1:])


def test_flatten_gives_dotted_keys():
    tree = {"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None}
    assert flatten(tree) == {"a.b": 1, "a.c.d": [1, {"e": 2}], "f": {}, "g": None}


def test_importing_the_config_leaves_the_heavy_parts_out():
    code = "import sys; import shardtune.config; print(*{'torch', 'hydra', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_recipe_that_a_program_wrote_as_json_keeps_its_emoji(tmp_path: Path) -> None:
    data = {"train_data_paths": ["a.jsonl"], "system_prompt": "🙂 é \u2028"}
    values = {"actor": {"model": {"model_path": "org/model"}}, "data": data}
    (tmp_path / "mine.json").write_text(json.dumps(values))
    recipe = load_recipe(tmp_path / "mine.json")
    assert recipe.data.system_prompt == "🙂 é \u2028"
    (tmp_path / "stored.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "stored.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a, b]: 1", "a key is a word, not a list or mapping"),
        ("actor: {? {a: b} : 1}", "a key is a word, not a list or mapping"),
        ("{" * 1000, "nested more than 50 levels deep"),
        ("- " * 100_000, "nested more than 50 levels deep"),  # by libyaml the process would end
        ("runner: " + "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
        ("actor: &a {model: *a}", "an anchor (&) that holds its own alias (*)"),
        ("a: &a [1, 1]\n" + "".join(f"b{n}: &b{n} [*a, *{f'b{n - 1}' if n else 'a'}, 1]\n" for n in range(3)), "key a"),
        (
            "\n".join(["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]),
            "100,000 values",
        ),
        (f"runner: {{seed: {'9' * 5000}}}", "4300 digits"),
        (f"runner: {{max_steps: {'9' * 30}}}", "the number has more than 64 bits"),
        ("runner: {logger: {experiment_name: " + "x" * 300 + "}}", "no file system has such a name"),
        ("runner: {logger: {log_path: ~nosuchuser/runs}}", "runner.logger.log_path: ~nosuchuser/runs cannot be a path"),
        (f"data: {{cache_dir: {'x' * 300}}}", "data.cache_dir: xxx"),
        ('data: {train_data_paths: "a\\0b.jsonl"}', "it holds a zero byte"),
        ("actor: {parallel: {tensor: 9223372036854775807}}", "a whole number >= 1 and <= 1000000"),
        (
            "actor: {parallel: {tensor: 999983, sequence: 999979, expert: 999961}}",
            "the nearest that fits is sequence 1",
        ),
    ],
)
def test_what_no_loader_expects_is_one_message(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    model = ["actor.model.model_path=org/model", "data.eval_data_paths=b.jsonl"]
    model += [] if "train_data_paths" in text else ["data.train_data_paths=a.jsonl"]
    with pytest.raises(ConfigError) as told:
        load_recipe(tmp_path / "mine.yaml", model)
    assert says in str(told.value)
    assert len(str(told.value)) < 6000


@pytest.mark.parametrize("value", ["[" * 500, "9" * 5000, "{a: " * 60 + "}" * 60])
def test_an_override_that_no_parser_expects_is_one_message(value: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: ") as told:
        load_recipe({}, [f"actor.optim.args={value}"])
    assert len(str(told.value)) < 1000


def test_paths_in_the_options_of_ready_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start at the recipe, typed ones at the working directory; names and other models' options stay."""
    here, elsewhere = tmp_path / "recipes", tmp_path / "typed"
    for folder in (here / "vlm", elsewhere / "vlm", here / "gemma_2b"):
        folder.mkdir(parents=True)
    (here / "data.jsonl").write_text("{}")
    monkeypatch.chdir(elsewhere)

    def option(kind: str, name: str, value: str, *overrides: str, **model: str) -> object:
        model = {"model_type": kind, "options": {name: value}, **model}  # pyright: ignore[reportAssignmentType]
        (here / "recipe.yaml").write_text(
            json.dumps({"global_batch_size": 1, "model": model, "data": {"train_data_paths": "data.jsonl"}})
        )
        return load_recipe(here / "recipe.yaml", list(overrides)).actor.model.options[name]

    assert option("smolvla", "vlm_model_name", "vlm") == str(here / "vlm")
    assert option("smolvla", "vlm_model_name", "org/name") == "org/name"
    typed = "model.options.vlm_model_name=vlm"
    assert option("smolvla", "vlm_model_name", "org/name", typed) == str(elsewhere / "vlm")
    assert option("pi0", "paligemma_variant", "gemma_2b") == "gemma_2b"
    with pytest.raises(ConfigError, match=r"pretrained_backbone_weights: there is no .*recipes/net.pth"):
        option("act", "pretrained_backbone_weights", "./net.pth")
    (here / "own.py").write_text("class Own: pass")
    assert option("act", "vlm_model_name", "vlm", adapter="own.py:Own") == "vlm"
