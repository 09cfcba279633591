"""Data sets of other trainers: no key of one is lost, and what is trained of its rows is what they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted
from tests.config.foreign.conftest import value

TRAIN, EVAL, TRAIN_ON = "data.train_data_paths", "data.eval_data_paths", "data.train_on"


def kinds(found: Converted, prefix: str) -> dict[str, Kind]:
    """What became of the keys whose names begin so, by the rest of the name."""
    outcomes = found.conversion.outcomes
    return {name.removeprefix(prefix): one.kind for name, one in outcomes.items() if name.startswith(prefix)}


# -- mixtures of alignment-handbook and open-r1 ------------------------------------------------------------------------


def test_a_mixture_beside_the_keys_of_trl_becomes_entries(of, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 40)
    sets = [{"id": "rows.jsonl", "split": "train", "columns": ["text"], "weight": 0.5, "seeed": 1}]
    found = of("trl", dataset_name=None, dataset_mixture={"datasets": sets, "seed": 0, "test_split_size": 5})
    assert value(found, TRAIN) == {"path": "rows.jsonl", "weight": 0.5}
    assert value(found, "data.eval_split") == 5 / 20
    assert kinds(found, "dataset_mixture.datasets[0].")["seeed"] is Kind.UNKNOWN
    assert kinds(found, "dataset_mixture.datasets[0].")["columns"] is Kind.NOT_NEEDED
    sets += [{"id": "me/rows", "config": "en", "split": "test[:9]", "weight": 1.0}]
    found = of("trl", dataset_mixture={"datasets": sets, "test_split_size": 5}, chat_template="{{ messages }}")
    more = {"path": "me/rows", "name": "en", "split": "test", "max_samples": 9}
    assert value(found, TRAIN) == [{"path": "rows.jsonl", "weight": 0.5}, more]
    assert kinds(found, "dataset_mixture.")["test_split_size"] is Kind.MISSING  # the rows of the Hub are not counted
    assert kinds(found, "chat_template") == {"": Kind.MISSING}
    splits = {"dataset_splits": ["train_sft", "test_sft"], "eval_strategy": "epoch"}
    found = of("trl", dataset_name=None, dataset_mixer={"me/rows": 0.5, "you/rows": 1}, **splits)
    assert value(found, TRAIN) == [
        {"path": "me/rows", "split": "train_sft", "weight": 0.5},
        {"path": "you/rows", "split": "train_sft"},
    ]
    assert value(found, EVAL) == [{"path": f"{who}/rows", "split": "test_sft"} for who in ("me", "you")]


# -- torchtune ---------------------------------------------------------------------------------------------------------


def tuned(builder: str, **given: Any) -> dict[str, Any]:
    return {"_component_": f"torchtune.datasets.{builder}", **given}


def test_each_key_of_a_data_set_of_torchtune_is_read_or_said(of):
    chat = tuned("chat_dataset", source="me/rows", conversation_style="openai", conversation_column="turns")
    more = {"soruce": "x", "filter_fn": "f", "num_proc": 4, "revision": "main", "masking_strategy": None, "add_eos": 1}
    found = of("torchtune", dataset={**chat, **more})
    assert kinds(found, "dataset.") == {
        "_component_": Kind.TRANSLATED,
        "source": Kind.TRANSLATED,
        "conversation_style": Kind.NOT_NEEDED,
        "conversation_column": Kind.TRANSLATED,
        "soruce": Kind.UNKNOWN,
        "filter_fn": Kind.MISSING,
        "num_proc": Kind.NOT_NEEDED,
        "revision": Kind.MISSING,
        "masking_strategy": Kind.DEFAULT,
        "add_eos": Kind.UNKNOWN,
    }
    assert "did you mean source?" in found.report
    assert value(found, TRAIN) == {"path": "me/rows", "columns": {"messages": "turns"}}
    other = of("torchtune", dataset=tuned("my_dataset", source="me/rows", knob=1, train_on_input=True))
    assert kinds(other, "dataset.") == {
        "_component_": Kind.MISSING,
        "source": Kind.TRANSLATED,
        "knob": Kind.MISSING,
        "train_on_input": Kind.MISSING,
    }
    styled = of("torchtune", dataset={**chat, "conversation_style": "mine"})
    assert kinds(styled, "dataset.")["conversation_style"] is Kind.MISSING


@pytest.mark.parametrize(
    ("builder", "given", "train_on", "kind"),
    [
        ("chat_dataset", {"masking_strategy": "train_on_last"}, "last_assistant", Kind.TRANSLATED),
        ("chat_dataset", {"masking_strategy": "train_on_all"}, "all", Kind.TRANSLATED),
        ("chat_dataset", {"masking_strategy": "train_on_assistant"}, "absent", Kind.DEFAULT),
        ("alpaca_dataset", {"masking_strategy": "train_on_assistant"}, "absent", Kind.DEFAULT),
        ("chat_dataset", {"masking_strategy": "train_on_some"}, "absent", Kind.MISSING),
        ("chat_dataset", {"masking_strategy": "train_on_all", "train_on_input": False}, "absent", Kind.NOT_NEEDED),
    ],
)
def test_the_masking_strategy_is_what_is_trained(of, builder: str, given: dict[str, Any], train_on: str, kind: Kind):
    found = of("torchtune", dataset=tuned(builder, source="me/rows", **given))
    assert value(found, TRAIN_ON) == train_on
    assert kinds(found, "dataset.")["masking_strategy"] is kind
    assert "does not load" not in found.report


@pytest.mark.parametrize(
    ("builder", "given", "expected"),
    [
        ("instruct_dataset", {}, {"path": "me/rows", "columns": {"instruction": "input"}}),
        (
            "instruct_dataset",
            {"column_map": {"input": "q", "output": "a"}},
            {"path": "me/rows", "columns": {"instruction": "q", "output": "a"}},
        ),
        ("text_completion_dataset", {"column": "body"}, {"path": "me/rows", "columns": {"text": "body"}}),
        (
            "slimorca_dataset",
            {"column_map": {"conversations": "c"}},
            {"path": "me/rows", "columns": {"conversations": "c"}},
        ),
        ("chat_dataset", {"split": "train[:50]"}, {"path": "me/rows", "max_samples": 50}),
        ("chat_dataset", {"split": "train[:95%]"}, "me/rows"),
        ("chat_dataset", {"split": "train+test"}, "me/rows"),
        ("chat_dataset", {"split": "test[5:]"}, {"path": "me/rows", "split": "test"}),
    ],
)
def test_data_sets_of_torchtune_become_entries(of, builder: str, given: dict[str, Any], expected: object):
    found = of("torchtune", dataset=tuned(builder, source="me/rows", **given))
    assert value(found, TRAIN) == expected
    if given.get("split", "train[:50]") != "train[:50]":
        assert kinds(found, "dataset.")["split"] is Kind.MISSING


@pytest.mark.parametrize(
    ("training", "test", "share"),
    [
        ("train[:95%]", "train[95%:]", 0.05),
        ("train[0%:90%]", "train[90%:100%]", 0.1),
        ("train[:95%]", "train[90%:]", "absent"),
        ("train[:95%]", "test[95%:]", "absent"),
    ],
)
def test_two_parts_of_one_split_are_rows_and_rows_held_out(of, training: str, test: str, share: object):
    sets = [tuned("chat_dataset", source="me/rows", split=split) for split in (training, test)]
    found = of("torchtune", dataset=sets[0], dataset_val=sets[1])
    assert value(found, "data.eval_split") == share
    assert (value(found, EVAL) == "absent") == (share != "absent")
    kind = Kind.MISSING if share == "absent" else Kind.TRANSLATED
    assert (kinds(found, "dataset.")["split"], kinds(found, "dataset_val.")["split"]) == (kind, kind)
    other = of("torchtune", dataset=sets[0], dataset_val={**sets[1], "source": "you/rows"})
    assert value(other, "data.eval_split") == "absent"


def test_plain_text_of_torchtune_ends_and_is_packed_as_here_or_that_is_said(of):
    text = tuned("text_completion_dataset", source="me/rows", packed=True)
    found = of("torchtune", dataset={**text, "add_eos": False, "split_across_pack": True})
    assert kinds(found, "dataset.")["add_eos"] is kinds(found, "dataset.")["split_across_pack"] is Kind.MISSING
    found = of("torchtune", dataset={**text, "add_eos": True, "split_across_pack": False})
    assert kinds(found, "dataset.")["add_eos"] is kinds(found, "dataset.")["split_across_pack"] is Kind.DEFAULT
    assert "torchtune cuts a text at the end of a packed sequence" in of("torchtune", dataset=text).report


def test_packed_data_sets_of_a_list_are_counted_in_tokens(of):
    sets = [tuned("chat_dataset", source=f"me/{name}", packed=True) for name in "ab"]
    tokenizer = {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 512}
    found = of("torchtune", world_size=2, dataset=sets, tokenizer=tokenizer, batch_size=3)
    assert value(found, "actor.global_batch_tokens") == 3 * 2 * 512
    assert value(found, "actor.global_batch_size") == "absent"
    assert kinds(found, "dataset[1].")["packed"] is Kind.TRANSLATED
    assert value(found, TRAIN) == ["me/a", "me/b"]
    mixed = of("torchtune", dataset=[sets[0], tuned("chat_dataset", source="me/b")])
    assert "refuses packed data sets beside others" in mixed.report


def test_where_data_sets_of_torchtune_differ_nothing_is_trained_that_one_leaves_out(of):
    sets = [
        tuned("chat_dataset", source="me/a", train_on_input=True),
        tuned("chat_dataset", source="me/b", train_on_input=False),
        tuned("alpaca_dataset"),
        tuned("text_completion_dataset", source="me/c"),
    ]
    found = of("torchtune", dataset=sets, dataset_val=[tuned("chat_dataset", source="me/d", train_on_input=True)])
    assert value(found, TRAIN_ON) == "absent"  # assistant
    assert kinds(found, "dataset[0].")["train_on_input"] is Kind.MISSING
    assert kinds(found, "dataset[1].")["train_on_input"] is Kind.DEFAULT
    assert kinds(found, "dataset_val[0].")["train_on_input"] is Kind.MISSING
    assert "torchtune trains prompts and answers of dataset[2]" in " ".join(found.report.split())
    assert value(found, EVAL) == {"path": "me/d", "split": "train"}  # not the test split, which is the default here
    last = of("torchtune", dataset=[sets[1], tuned("chat_dataset", source="me/a", masking_strategy="train_on_last")])
    assert value(last, TRAIN_ON) == "last_assistant"
    assert kinds(last, "dataset[0].")["train_on_input"] is Kind.MISSING
    assert value(of("torchtune", dataset=[sets[0], sets[0]]), TRAIN_ON) == "all"
    assert value(of("torchtune", dataset=sets[3]), TRAIN_ON) == "all"


def test_the_files_of_a_split_are_those_of_the_split(of):
    files = {"train": "a.jsonl", "validation": "b.jsonl"}
    found = of("torchtune", dataset=tuned("chat_dataset", source="json", data_files=files, split="train"))
    assert value(found, TRAIN) == "a.jsonl"
    mixture = [{"path": "json", "data_files": files, "split": "validation"}]
    assert value(of("trl", datasets=mixture), TRAIN) == "b.jsonl"


# -- TRL ---------------------------------------------------------------------------------------------------------------


def test_two_parts_of_one_split_of_trl_are_one_share(of):
    """All rows were trained, those of the evaluation too, as a remark at the end of the recipe said."""
    splits = {"dataset_train_split": "train_sft[:95%]", "dataset_test_split": "train_sft[95%:]"}
    found = of("trl", **splits, eval_strategy="epoch")
    assert value(found, TRAIN) == {"path": "org/rows", "split": "train_sft"}
    assert (value(found, EVAL), value(found, "data.eval_split")) == ("absent", 0.05)
    assert {found.conversion.outcomes[name].kind for name in splits} == {Kind.TRANSLATED}
    assert "does not load" not in found.report
    found = of("trl", **splits)  # without evaluation nothing says that the rest is held out
    assert found.conversion.outcomes["dataset_train_split"].kind is Kind.MISSING


def test_parts_of_splits_of_trl_are_said(of):
    splits = {"dataset_train_split": "train[:90%]", "dataset_test_split": "train[95%:]", "eval_strategy": "epoch"}
    found = of("trl", **splits)
    assert (value(found, TRAIN), value(found, EVAL)) == ("org/rows", {"path": "org/rows", "split": "train"})
    assert {found.conversion.outcomes[name].kind for name in list(splits)[:2]} == {Kind.MISSING}
    mixture = of("trl", datasets=[{"path": "org/rows", "split": "train[:5%]", "colums": ["a"], "columns": ["text"]}])
    assert kinds(mixture, "datasets[0].") == {
        "path": Kind.TRANSLATED,
        "split": Kind.MISSING,
        "colums": Kind.UNKNOWN,
        "columns": Kind.NOT_NEEDED,
    }


@pytest.mark.parametrize(
    ("trainer", "given", "name"),
    [
        ("axolotl", {"datasets": [{"path": "rows.jsonl", "type": "chat_template"}]}, "val_set_size"),
        ("llama-factory", {"dataset": "own", "dataset_dir": "."}, "val_size"),
    ],
)
def test_a_number_of_rows_is_a_share_where_they_can_be_counted(
    of, tmp_path: Path, trainer: str, given: dict[str, Any], name: str
):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n' * 400)
    columns = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "rows.jsonl", **columns}}))
    found = of(trainer, **given, **{name: 100})
    assert value(found, "data.eval_split") == 0.25
    assert found.conversion.outcomes[name].kind is Kind.TRANSLATED
    too_many = of(trainer, **given, **{name: 400})
    assert value(too_many, "data.eval_split") == "absent"
    assert too_many.conversion.outcomes[name].kind is Kind.MISSING


# -- Axolotl -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"roles_to_train": ["assistant"]}, Kind.TRANSLATED),
        ({"roles_to_train": ["gpt"]}, Kind.TRANSLATED),
        ({"roles_to_train": ["agent"], "roles": {"assistant": ["agent"]}}, Kind.TRANSLATED),
        ({"roles_to_train": None}, Kind.DEFAULT),
        ({"roles_to_train": ["assistant", "tool"]}, Kind.MISSING),
        ({"roles_to_train": ["user", "assistant"]}, Kind.MISSING),
        ({"roles_to_train": ["user"]}, Kind.MISSING),
        ({"roles_to_train": ["function_call"]}, Kind.MISSING),
        ({"roles_to_train": []}, Kind.MISSING),
    ],
)
@pytest.mark.parametrize("section", ["datasets", "test_datasets"])
def test_the_roles_to_train_are_the_assistant_or_have_a_remedy(of, section: str, given: dict[str, Any], kind: Kind):
    found = of("axolotl", **{section: [{"path": "org/rows", "type": "chat_template", **given}]})
    assert value(found, TRAIN_ON) == "absent"  # assistant
    assert kinds(found, f"{section}[0].")["roles_to_train"] is kind
    everything = of("axolotl", train_on_inputs=True, datasets=[{"path": "org/rows", "type": "chat_template", **given}])
    assert value(everything, TRAIN_ON) == "all"
    assert kinds(everything, "datasets[0].")["roles_to_train"] in (Kind.NOT_NEEDED, Kind.DEFAULT)


def test_the_names_of_roles_of_axolotl_are_known_or_have_a_remedy(of):
    roles = {"user": ["human", "customer"], "assistant": ["gpt", "bot"], "tool": ["assistant"], "ipython": ["tool"]}
    found = of("axolotl", datasets=[{"path": "org/rows", "type": "chat_template", "roles": roles}])
    assert kinds(found, "datasets[0].roles.") == {
        "user": Kind.MISSING,
        "assistant": Kind.NOT_NEEDED,
        "tool": Kind.MISSING,
        "ipython": Kind.MISSING,
    }
    assert "customer: data.transform" in found.report


def test_the_templates_of_evaluation_data_of_axolotl_are_said(of):
    found = of("axolotl", test_datasets=[{"path": "org/rows", "type": "chat_template", "chat_template": "alpaca"}])
    assert kinds(found, "test_datasets[0].")["chat_template"] is Kind.MISSING
    assert value(found, EVAL) == {"path": "org/rows", "split": "train"}


# -- LLaMA-Factory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def factory(of, tmp_path: Path):
    """Convert a data set that dataset_info.json describes so."""

    def make(described: dict[str, Any], **given: Any) -> Converted:
        (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": described}))
        (tmp_path / "rows.jsonl").write_text("{}")
        return of("llama-factory", **{"dataset": "mine", "dataset_dir": ".", **given})

    return make


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "text"}, "rows.jsonl"),
        ({"prompt": "body"}, {"path": "rows.jsonl", "columns": {"text": "body"}}),
        (None, {"path": "rows.jsonl", "columns": {"text": "instruction"}}),
    ],
)
def test_pretraining_of_llama_factory_reads_text_and_trains_all_of_it(factory, columns: object, expected: object):
    described = {"file_name": "rows.jsonl", **({"columns": columns} if columns else {})}
    found = factory(described, stage="pt", cutoff_len=64)
    assert value(found, TRAIN) == expected
    assert value(found, "data.on_too_long") == "split"
    assert value(found, TRAIN_ON) == "all"
    assert "does not load" not in found.report
    assert value(factory(described, stage="pt", packing=False), "data.on_too_long") == "absent"
    joined = factory({"file_name": "rows.jsonl", "columns": {"prompt": "a", "query": "b"}}, stage="pt")
    assert kinds(joined, "dataset_info.json mine.columns.")["query"] is Kind.MISSING


@pytest.mark.parametrize(
    ("num_samples", "max_samples", "expected"), [(1000, 100, 100), (50, 100, 50), (None, 100, 100), (7, None, 7)]
)
def test_the_smaller_number_of_samples_counts(factory, num_samples: object, max_samples: object, expected: int):
    found = factory({"file_name": "rows.jsonl", "num_samples": num_samples}, max_samples=max_samples)
    assert value(found, TRAIN) == {"path": "rows.jsonl", "max_samples": expected}


def test_the_path_of_a_file_in_dataset_info_may_be_absolute(factory, tmp_path: Path):
    found = factory({"file_name": str(tmp_path / "rows.jsonl")}, dataset_dir=str(tmp_path))
    assert value(found, TRAIN) == "rows.jsonl"


def test_each_key_of_dataset_info_is_read_or_said(factory):
    described = {
        "file_name": "rows.jsonl",
        "ms_hub_url": "me/rows",
        "formatting": "sharegpt",
        "ranking": True,
        "folder": "a",
        "split": "train[:5%]",
        "knob": 1,
        "columns": {"messages": "turns", "videos": "v", "system": "system", "query": "q", "knob": "k"},
        "tags": {
            "role_tag": "speaker",
            "content_tag": "content",
            "user_tag": "customer",
            "assistant_tag": "gpt",
            "function_tag": "call",
            "observation_tag": "observation",
            "system_tag": None,
        },
    }
    found = factory(described)
    assert set(found.conversion.outcomes) == set(found.conversion.given)
    assert kinds(found, "dataset_info.json mine.") == {
        "file_name": Kind.TRANSLATED,
        "ms_hub_url": Kind.NOT_NEEDED,
        "formatting": Kind.NOT_NEEDED,
        "ranking": Kind.MISSING,
        "folder": Kind.MISSING,
        "split": Kind.MISSING,
        "knob": Kind.UNKNOWN,
        "columns.messages": Kind.TRANSLATED,
        "columns.videos": Kind.MISSING,
        "columns.system": Kind.DEFAULT,
        "columns.query": Kind.NOT_NEEDED,
        "columns.knob": Kind.UNKNOWN,
        "tags.role_tag": Kind.MISSING,
        "tags.content_tag": Kind.NOT_NEEDED,
        "tags.user_tag": Kind.MISSING,
        "tags.assistant_tag": Kind.NOT_NEEDED,
        "tags.function_tag": Kind.MISSING,
        "tags.observation_tag": Kind.NOT_NEEDED,
        "tags.system_tag": Kind.DEFAULT,
    }
    assert value(found, TRAIN) == {"path": "rows.jsonl", "columns": {"conversations": "turns"}}
    elsewhere = factory({"ms_hub_url": "me/rows"})
    assert kinds(elsewhere, "dataset_info.json mine.")["ms_hub_url"] is Kind.MISSING
    assert elsewhere.conversion.outcomes["dataset"].kind is Kind.MISSING


@pytest.mark.parametrize(
    ("given", "expected", "kind"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}, Kind.TRANSLATED),
        ({"enable_thinking": True}, "absent", Kind.DEFAULT),
        ({"enable_thinking": None}, "absent", Kind.MISSING),
        ({"enable_thinking": False, "template": "chatml"}, "absent", Kind.NOT_NEEDED),
        ({"enable_thinking": False, "stage": "pt"}, "absent", Kind.NOT_NEEDED),
    ],
)
def test_thinking_is_a_value_of_the_chat_template(of, given: dict[str, Any], expected: object, kind: Kind):
    found = of("llama-factory", **given)
    assert value(found, "data.template_kwargs") == expected
    assert found.conversion.outcomes["enable_thinking"].kind is kind


@pytest.mark.parametrize(
    ("given", "name", "kind", "says"),
    [
        ({"split_special_tokens": True}, "split_special_tokens", Kind.MISSING, "is read as that token"),
        ({"split_special_tokens": False}, "split_special_tokens", Kind.DEFAULT, "so it is here"),
        ({"new_special_tokens_config": "t.yaml"}, "new_special_tokens_config", Kind.MISSING, "the mean of the others"),
        ({"add_tokens": "<a>", "init_special_tokens": "desc_init"}, "init_special_tokens", Kind.MISSING, "the mean"),
        ({"init_special_tokens": "desc_init"}, "init_special_tokens", Kind.NOT_NEEDED, "no new tokens"),
        ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss", Kind.MISSING, "no padding is trained"),
        ({"ignore_pad_token_for_loss": True}, "ignore_pad_token_for_loss", Kind.DEFAULT, "so it is here"),
    ],
)
def test_keys_of_tokens_say_what_is_true(of, given: dict[str, Any], name: str, kind: Kind, says: str):
    outcome = of("llama-factory", **given).conversion.outcomes[name]
    assert (outcome.kind, says in outcome.text) == (kind, True)


def test_names_of_tokens_of_older_files_of_axolotl_are_said(of):
    found = of("axolotl", tokens={"pad_token": "<pad>"}, special_tokens={"additional_special_tokens": ["<a>"]})
    assert value(found, "actor.tokenizer.new_tokens") == ["<a>"]
    assert kinds(found, "tokens") == {".pad_token": Kind.MISSING}


def test_tokens_of_a_file_replace_those_of_the_key(of):
    found = of("llama-factory", new_special_tokens_config="t.yaml", add_special_tokens="<a>", add_tokens="<b>")
    assert value(found, "actor.tokenizer.new_tokens") == ["<b>"]
    assert found.conversion.outcomes["add_special_tokens"].kind is Kind.NOT_NEEDED


def test_a_broken_dataset_info_is_an_error(of, tmp_path: Path):
    from shardtune.errors import ConfigError

    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dataset_info\.json cannot be read"):
        of("llama-factory", dataset="mine", dataset_dir=".")


# -- Teachers and eight bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "divergence"),
    [("ForwardKLLoss", "absent"), ("ReverseKLWithChunkedOutputLoss", "reverse_kl"), ("SymmetricKLLoss", "absent")],
)
def test_a_teacher_of_torchtune_is_distilled(of, loss: str, divergence: str):
    teacher = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "org/large"}
    given = {"teacher_model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "teacher_checkpointer": teacher}
    found = of("torchtune", **given, kd_loss={"_component_": f"torchtune.modules.loss.{loss}"}, kd_ratio=0.25)
    assert value(found, "actor.loss") == "distill"
    assert value(found, "actor.teacher.model_path") == "org/large"
    assert value(found, "actor.teacher.ce_share") == 0.75
    assert value(found, "actor.teacher.divergence") == divergence
    kind = found.conversion.outcomes["kd_loss._component_"].kind
    assert kind is (
        Kind.MISSING if loss == "SymmetricKLLoss" else Kind.DEFAULT if divergence == "absent" else Kind.TRANSLATED
    )
    assert "does not load" not in found.report


def test_fp8_of_torchtune_is_that_of_torchao(of):
    found = of("torchtune", enable_fp8_training=True, fp8_recipe_name="rowwise")
    assert value(found, "actor.model.fp8.scaling") == "rowwise"
    assert value(of("torchtune", enable_fp8_training=True), "actor.model.fp8.scaling") == "tensorwise"
    assert value(of("torchtune", enable_fp8_training=False), "actor.model.fp8.scaling") == "absent"


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({"mix_strategy": "interleave_under", "interleave_probs": "0.75,0.25"}, [0.75, None]),
        ({"mix_strategy": "interleave_over", "interleave_probs": [0.75, 0.25]}, [None, 1.33333]),
        ({"mix_strategy": "interleave_under"}, [0.25, None]),
        ({"mix_strategy": "interleave_over", "max_samples": 3}, [None, 1.5]),
        ({"mix_strategy": "interleave_under", "interleave_probs": [0.75]}, None),
        ({"mix_strategy": "interleave_once"}, None),
        ({"mix_strategy": "concat"}, [None, None]),
    ],
)
def test_interleaved_data_sets_get_the_weights_of_their_shares(
    of, tmp_path: Path, given: dict[str, Any], weights: list[float | None] | None
):
    rows = [{"instruction": "a", "output": "b"}] * 8
    (tmp_path / "many.json").write_text(json.dumps(rows))
    (tmp_path / "few.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows[:2]))
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({name.split(".")[0]: {"file_name": name} for name in ("many.json", "few.jsonl")})
    )
    found = of("llama-factory", dataset="many,few", dataset_dir=".", **given)
    entries = value(found, TRAIN)
    assert isinstance(entries, list)
    assert [one.get("weight") if isinstance(one, dict) else None for one in entries] == (weights or [None, None])
    assert (kinds(found, "mix_")["strategy"] is Kind.MISSING) == (weights is None)
    assert kinds(found, "interleave_").get("probs") in (kinds(found, "mix_")["strategy"], None)
    assert "does not load" not in found.report


def test_a_link_beside_the_recipe_stays_the_link(of, tmp_path: Path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "v2.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.jsonl").symlink_to("elsewhere/deep/v2.jsonl")
    (tmp_path / "folder").symlink_to("elsewhere/deep")
    entries = value(of("axolotl", datasets=[{"path": "rows.jsonl", "type": "completion"}]), TRAIN)
    assert entries == "rows.jsonl"
    for path, expected in (
        ("folder/v2.jsonl", "folder/v2.jsonl"),
        ("folder/../deep/v2.jsonl", "elsewhere/deep/v2.jsonl"),
    ):
        assert value(of("axolotl", datasets=[{"path": path, "type": "completion"}]), TRAIN) == expected


def test_files_of_a_split_that_is_not_read_are_said(of):
    files = {"train": "a.jsonl", "test": "b.jsonl"}
    found = of("trl", dataset_name=None, datasets=[{"path": "json", "data_files": files}], early_stopping_patience=3)
    assert value(found, TRAIN) == "a.jsonl"
    assert kinds(found, "datasets[0].data_files.") == {"train": Kind.TRANSLATED, "test": Kind.MISSING}
    assert "the nearest key here is runner.early_stop.patience" in found.report
    tuned_files = of("torchtune", dataset=tuned("chat_dataset", source="json", data_files=files, split="test"))
    assert value(tuned_files, TRAIN) == "b.jsonl"
    assert kinds(tuned_files, "dataset.data_files.") == {"train": Kind.MISSING, "test": Kind.TRANSLATED}
