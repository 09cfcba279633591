"""The tables name keys that exist, hold all keys of transformers, and answer for unknown keys."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import TrainingArguments

from shardtune.config import KEYS
from shardtune.config.foreign import rlinf, trl
from shardtune.config.foreign.hints import hint
from shardtune.config.foreign.launch_keys import PREFIXES, SHORT, SWITCHES, TABLES
from shardtune.config.foreign.rows import ROLES
from shardtune.config.foreign.table import By, Missing, NotNeeded, To
from shardtune.config.foreign.trainers import TRAINERS, recognise
from shardtune.config.keys import OTHER_NAMES
from shardtune.config.schema import DataEntry
from shardtune.data import messages
from shardtune.errors import ConfigError

OURS = re.compile(r"\b(?:runner|actor|data|eval)\.[a-z_]+(?:\.[a-z_0-9]+)*")
ENTRIES = [(word, name, entry) for word, known in TRAINERS.items() for name, entry in known.table.items()]
ENTRIES += [(word, name, entry) for word, table in TABLES.items() for name, entry in table.items()]
ENTRIES += [(rlinf.NAME, name, entry) for name, entry in rlinf.TABLE.items()]
ENTRIES += [("accelerate", name, entry) for name, entry in PREFIXES.items()]


def test_each_entry_names_keys_that_exist():
    for word, name, entry in ENTRIES:
        text = {To: lambda e: e.key, By: lambda e: e.line, NotNeeded: lambda e: e.why, Missing: lambda e: e.remedy}
        for key in OURS.findall(text[type(entry)](entry)):
            assert key in KEYS, f"{word}: {name} names {key}"
    assert len(ENTRIES) > 700


def test_no_name_stands_twice_in_a_table():
    """The second entry would replace the first one without a word."""
    found = []
    for file in sorted(Path(trl.__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        tables = [node.value for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and _is_table(node)]
        found += [file.stem] * bool(tables)
        for table in tables:
            names = Counter(name for name in _names(table))
            assert not [name for name, count in names.items() if count > 1], file.name
    assert {"trl", "axolotl_keys", "torchtitan_keys", "launch_keys"} <= {*found}


def _is_table(node: ast.AnnAssign) -> bool:
    return isinstance(node.annotation, ast.Name) and node.annotation.id == "Table" and isinstance(node.value, ast.Dict)


def _names(table: ast.Dict) -> Iterator[str]:
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant):
            yield str(key.value)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "each":
            yield from ast.literal_eval(value.args[0]).split()


def test_the_names_of_roles_are_those_that_rows_may_have():
    assert ROLES == messages.ROLES


def test_short_options_and_switches_of_launchers_are_in_their_tables():
    for word, table in TABLES.items():
        known = (*table, *PREFIXES) if word == "accelerate" else tuple(table)
        names = (*SHORT[word].values(), *(name for name in SWITCHES[word] if word != "python"))
        assert not [name for name in names if not name.startswith(known)]


def test_all_options_of_torchrun_are_known():
    from torch.distributed.run import get_args_parser

    names = {option for action in get_args_parser()._actions for option in action.option_strings if "--" in option}
    assert {name.removeprefix("--").replace("-", "_") for name in names} - {"help"} <= set(TABLES["torchrun"])


@pytest.mark.parametrize("word", ["trl", "llama-factory"])
def test_all_keys_of_transformers_are_known(word: str):
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not names - set(TRAINERS[word].table)


def test_an_entry_of_a_data_set_has_the_options_that_remedies_name():
    assert {"path", "weight", "split", "max_samples", "columns"} <= set(DataEntry.model_fields)


def test_names_that_are_suggested_elsewhere_lead_to_the_same_keys():
    for name, key in OTHER_NAMES.items():
        for known in TRAINERS.values():
            entry = known.table.get(name)
            if isinstance(entry, To):
                assert entry.key == key, name


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("load_in_4bit: true", "model.lora.base_dtype: nf4"),
        ("packing: true", "rows are always packed"),
        ("template: llama3", "data.chat_template: FILE.jinja"),
        ("push_to_hub: true", "runner.push_to_hub: OWNER/NAME"),
        ("dataset: a.jsonl", "data.train_data_paths: "),
        ("adapter: qlora", "model.is_lora: true"),
        ("learning_rate: 2.0e-4", "write optim.lr: 0.0002"),
        ("per_device_train_batch_size: 4", "write micro_batch_size: 4"),
        ("num_train_epochs: 3", "write runner.max_epochs: 3"),
        ("output_dir: out", "runner.logger.log_path: FOLDER"),
        ("max_seq_length: 99", "write data.max_length: 99"),
        ("lora_target_modules: [q_proj]", "model.lora.target_modules"),
        ("deepspeed: z.json", "FSDP2"),
        ("gradient_checkpointing: true", "write model.gradient_checkpointing: true"),
        ("actor: {load_in_8bit: true}", "there are no eight"),
        ("optim: adamw_torch", "write optim.name: AdamW (optim of"),
        ("optim: {optimizer: muon}", "write optim.name: Muon (optimizer of"),
        ("optim: {optimizer: adamw_8bit}", "write optim.name: AdamW, optim.state_dtype: int8 (optimizer of"),
        ("optim: {optimizer: sophia}", "did you mean optim.name? there is no sophia"),
        ("cluster: {num_nodes: 1}", "leave it out; cluster of RLinf"),
        ("actor: {fsdp_config: {mixed_precision: {param_dtype: bf16}}}", "write actor.model.precision: bf16"),
        ("actor: {optim: {total_training_steps: 6000}}", "follows from runner.max_epochs or runner.max_steps"),
    ],
)
def test_an_unknown_key_of_another_trainer_is_answered_with_the_line_to_write(load_text, given: str, remedy: str):
    with pytest.raises(ConfigError, match=r"unknown key|is a section") as error:
        load_text(f"data: {{train_data_paths: a.jsonl}}\n{given}")
    assert remedy in str(error.value)


def test_overrides_are_answered_too(load):
    with pytest.raises(ConfigError, match=r"write actor\.optim\.lr: 1 \(learning_rate of transformers\)"):
        load("actor.optim.learning_rate=1")


def test_a_section_in_the_wrong_place_is_no_key_of_another_trainer():
    assert hint("optim", {"lr": 1e-5}) is None
    assert hint("runer.seed") == hint("seed")
    assert hint("xyzzy") is None


def test_recipes_and_names_of_halos_are_not_taken_for_others():
    assert recognise({"actor": {}, "learning_rate": 1, "model_name_or_path": "x", "dataset_name": "y"}) is None
    assert recognise({"model": {"name_or_path": "x", "batch_size": 4}, "lr": 1e-4, "exp_name": "x"}) is None
    assert recognise({"model": {"model_type": "causal_lm"}, "seed": 1}) is None
    assert recognise({"learning_rate": 1e-4}) is None
    assert recognise({"training": {"steps": 1}, "model": {}, "optimizer": {}}) == "torchtitan"
