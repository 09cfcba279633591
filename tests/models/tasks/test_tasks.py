"""Tasks by name: labels from the data, rows that cannot be used, LoRA, predictions, files beside the weights."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import normalizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    ByT5Tokenizer,
    CanineConfig,
    CanineTokenizer,
    GPT2Config,
    GPT2Model,
    HubertConfig,
    LlavaConfig,
    PreTrainedConfig,
    ViTConfig,
)

import shardtune
from shardtune.config import load_recipe
from shardtune.config.model_names import TASKS
from shardtune.data.cache import build_dataset
from shardtune.data.encoder import RowError
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.tasks import sentence_transformers_files
from shardtune.models.tasks.encoder import Cut, parts_of, require_tokens, shortened
from shardtune.models.tasks.metrics import F1_NAMES, entity_scores, f1_scores, ranking, spans
from shardtune.models.tasks.names import CLASSES
from shardtune.models.tasks.retrieval import ranks_of_right
from shardtune.models.tasks.seq2seq import Draws
from shardtune.models.tasks.task import TextTask
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.run.described_task import described_task, task_overrides
from shardtune.run.plain_model import load_run_or_model
from shardtune.run.plan.simulation import add_lora
from shardtune.run.predicting import predict
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.tiny_tasks import SIZES, rows, save_encoder, save_t5, save_tokenizer, write
from tests.support.workspace import run_cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    save_encoder(made / "encoder")
    save_t5(made / "t5")
    return made


def recipe(folder: Path, task: str, data: list[dict[str, Any]], name: str = "run", **model: Any) -> dict[str, Any]:
    file = write(folder / f"{task}-{name}.jsonl", data)
    logger = {"log_path": str(folder / "runs"), "experiment_name": f"{task}-{name}", "logger_backends": ["jsonl"]}
    return {
        "runner": {"max_steps": 2, "device": "cpu", "logger": logger},
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "model": {"model_type": task, "model_path": str(folder / ("t5" if task == "seq2seq" else "encoder")), **model},
        "data": {"train_data_paths": file, "max_length": 32, "num_workers": 0, "cache_dir": str(folder / "cache")},
    }


def task_of(values: dict[str, Any]) -> TextTask:
    found = find_adapter(load_recipe(values))
    assert isinstance(found, TextTask)
    return found


def test_every_name_has_a_class():
    assert TASKS.keys() == CLASSES.keys()


def test_labels_are_those_of_the_training_rows(folder: Path):
    kinds = {"words": ["no", "yes", "maybe"], "numbers": [10, 2, 1], "switches": [True, False], "mixed": ["1", 10, 1]}
    expected = {"words": ["maybe", "no", "yes"], "numbers": ["1", "2", "10"], "switches": ["0", "1"]}
    expected["mixed"] = ["1", "10"]  # a text that is a number has no output beside that number's
    for name, labels in kinds.items():
        data = [{"text": "a cat", "label": labels[number % len(labels)]} for number in range(6)]
        for _ in range(2):  # the second time from the cache
            task = task_of(recipe(folder, "sequence_classifier", data, name))
            assert task.found_options() == {"labels": expected[name]}
            assert task.config.id2label == dict(enumerate(expected[name]))


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("sequence_classifier", {"text": "a cat", "label": "odd"}, "the label 'odd' is not among .*: bad, fine, good"),
        ("sequence_classifier", {"text": "a cat"}, r"the row has no 'label' .*it has text.*\n.*\{text, label\}"),
        ("sequence_classifier", {"words": "a cat", "label": "bad"}, "no 'text'.*data.columns: {text: YOUR_COLUMN}"),
        ("sequence_classifier", {"text": "a cat", "label": ["bad"]}, "a list of labels; set model.options.multi_label"),
        ("sequence_classifier", {"text": 7, "label": "bad"}, "the text is 7, not a text"),
        ("regression", {"text": "a cat", "label": "much"}, "the label is 'much', not a number"),
        ("token_classifier", {"tokens": ["a", "cat"], "ner_tags": ["O"]}, "the row has 2 words and 1 labels"),
        ("embedding", {"query": "a", "positive": "b", "negatives": ["a"] * 3}, "3 hard negatives, .*room for 2"),
        ("reranker", {"query": "a", "positive": "b", "negatives": []}, "no negatives: their list is empty"),
        ("reranker", {"query": "a", "document": "b", "label": 3}, "the label is 3, not a number between 0 and 1"),
        ("seq2seq", {"source": "a cat"}, "the row has no 'target'"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_message(folder: Path, task: str, row: dict[str, Any], message: str):
    options = {"labels": ["bad", "fine", "good"]} if task == "sequence_classifier" else {}
    options |= {"labels": ["O", "B-X"]} if task == "token_classifier" else {}
    options |= {"negatives": 2} if task == "embedding" else {}
    encoder = task_of(recipe(folder, task, rows(task, 2), "bad", options=options)).encoder(with_prompts=False)
    with pytest.raises(Exception, match=f"(?s){message}"):
        encoder.encode(row)


def test_rows_without_labels_are_a_message_of_the_first(folder: Path):
    lists = [{"text": "a cat", "labels": ["x"]}, {"text": "a", "labels": ["y", "x"]}]
    with pytest.raises(DataError, match=r"(?s)a list of labels; set model.options.multi_label.*lists.jsonl: row 1"):
        task_of(recipe(folder, "sequence_classifier", lists, "lists")).build()
    several = recipe(folder, "sequence_classifier", lists, "lists", options={"multi_label": True})
    assert task_of(several).found_options() == {"labels": ["x", "y"]}  # of the same file
    with pytest.raises(DataError, match=r"the row has no 'label' .*it has text, stars"):
        task_of(recipe(folder, "sequence_classifier", [{"text": "a", "stars": 1}] * 2, "stars")).build()


def test_a_number_is_the_place_of_a_named_label(folder: Path):
    data = [{"tokens": ["a", "cat"], "ner_tags": [0, 2]}, {"tokens": ["dog"], "ner_tags": [1]}]
    task = task_of(recipe(folder, "token_classifier", data, "places", options={"labels": ["O", "B-X", "I-X"]}))
    assert task.encode(data[0]).fields["labels"].tolist() == [-100, 0, 2, -100]
    assert "f1" in task.set_metric_names
    with pytest.raises(RowError, match="the label '3' is not among"):
        task.encode({"tokens": ["dog"], "ner_tags": [3]})


def test_rows_are_encoded_again_with_another_tokenizer(folder: Path, tmp_path: Path):
    """One with new tokens, one whose file was edited, one in memory, which other processes have too."""
    shutil.copytree(folder / "encoder", tmp_path / "encoder")
    values = recipe(
        folder, "reranker", [{"query": "a", "document": "cat", "label": 1}], model_path=f"{tmp_path}/encoder"
    )
    task = task_of(values)
    task.loaded_config.pad_token_id = 1
    assert task.config.pad_token_id == 0  # the tokenizer's, by which users' batches are padded
    keys = [task.encoder(with_prompts=False).cache_key()]
    keys.append(task_of({**values, "tokenizer": {"new_tokens": ["<x>"]}}).encoder(with_prompts=False).cache_key())
    task.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    in_memory = find_adapter(load_recipe(values), tokenizer=task.tokenizer).encoder(with_prompts=False)
    keys.append(in_memory.cache_key())
    row = {"query": "A", "document": "CAT", "label": 1}
    elsewhere = pickle.loads(pickle.dumps(in_memory))
    assert elsewhere.encode(row).fields["input_ids"].tolist() == [[2, 4, 3, 12, 3]]
    assert elsewhere.cache_key() == keys[-1]
    file = tmp_path / "encoder" / "tokenizer.json"
    file.write_text(file.read_text().replace('"cat"', '"cow"'))
    keys.append(task_of(values).encoder(with_prompts=False).cache_key())
    assert len(set(keys)) == 4


def test_the_first_lines_name_the_columns_that_are_read(folder: Path):
    row = {"idx": 3, "question": "who", "sentence": "a cat", "label": "yes"}
    task = task_of(recipe(folder, "sequence_classifier", [row], "columns", options={"labels": ["no", "yes"]}))
    assert task.encoder(with_prompts=False).title(row) == "question + sentence + label (not read: idx)"
    assert task.encode(row).fields["input_ids"].tolist().count(3) == 2  # the ends of two texts


def test_columns_without_a_part_in_predictions_are_named(folder: Path, adapted: shardtune.Run):
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("sequence_classifier", {"text": "who", "text_b": "a cat", "label": 1, "note": None}, ["text_b"]),
        ("regression", {"sentence1": "who", "sentence2": "a cat", "id": 4}, ["id"]),
        ("token_classifier", {"text": "a cat", "id": 4}, ["id"]),
        ("token_classifier", {"text": "a cat", "tokens": ["a"], "ner_tags": ["O"]}, ["text"]),
        ("embedding", {"query": "who", "positive": "a cat", "score": 0.5}, ["positive"]),
        ("embedding", {"text": "who", "title": "a cat"}, ["title"]),
        ("reranker", {"query": "who", "text": "a cat", "document": "a dog"}, ["text"]),
        ("seq2seq", {"source": "who", "target": "a cat", "hint": "no"}, ["hint"]),
    ]
    for task, row, expected in cases:
        assert list(task_of(recipe(folder, task, rows(task, 2), "part")).without_part(row)) == expected
    said: list[str] = []
    given = [{"text": "red cat", "text_b": "a dog"}, {"text": "red", "prediction": "bad", "truncated": True}]
    _, found = adapted.predictions(given, prepared=True, report=said.append)
    assert said == ["columns that are not read for predictions: text_b, prediction, truncated"]
    assert (found["given_prediction"], found["given_truncated"]) == ("bad", True)
    assert found["prediction"]["label"] in ("bad", "fine", "good")
    assert "truncated" not in found


def test_columns_of_some_rows_that_are_not_read_are_named(folder: Path, tmp_path: Path):
    """Also those that the first row has not; a column of negatives that a row leaves empty is none."""
    row = {"query": "who", "positive": "a cat", "negative": "a dog"}
    data = [row, {**row, "margin": 0.5}, {**row, "negative": None}, {**row, "margin": 0.7}]
    made = load_recipe(recipe(folder, "embedding", data, "margin"))
    encoder = find_adapter(made).encoder(with_prompts=False)
    sources = resolve_sources(made.data.train_data_paths, made.data, name_format=encoder.title, report=lambda _: None)
    found = build_dataset(sources, encoder, cache_dir=str(tmp_path), num_workers=0)
    (line,) = found.report.lines()
    assert line.endswith("not read are keys that some rows have: margin (2 of 4, row 2)")


def test_a_cut_row_of_several_texts_is_reported_by_its_longest(folder: Path, tmp_path: Path):
    data = [{"query": "a cat", "positive": "a dog", "negatives": ["a red big cat cat cat", "a red"]} for _ in range(2)]
    values = recipe(folder, "embedding", data, "long")
    values["data"] |= {"max_length": 5}
    made = load_recipe(values)
    encoder = find_adapter(made).encoder(with_prompts=False)
    sources = resolve_sources(made.data.train_data_paths, made.data, name_format=encoder.title, report=lambda _: None)
    found = build_dataset(sources, encoder, cache_dir=str(tmp_path), num_workers=0)
    (line,) = found.report.lines()
    assert "negatives of length 8" in line


def test_a_word_without_a_token_keeps_its_place(folder: Path):
    values = recipe(folder, "token_classifier", rows("token_classifier", 3), "blank", options={"labels": ["O", "B-X"]})
    task = task_of(values)
    batch = task.collate([task.encode_input({"tokens": ["a", " ", "cat", "dog"]})], range(1), {})
    guesses = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0, 1, 0]])).float()
    (record,) = task.records({"logits": guesses}, batch)
    assert task.prediction(record) == {"labels": ["B-X", None, "O", "B-X"]}


def test_texts_of_a_task_are_not_split_and_not_empty(folder: Path):
    values = recipe(folder, "sequence_classifier", rows("sequence_classifier", 4), "split")
    values["data"] |= {"max_length": 4, "on_too_long": "split"}
    encoder = task_of(values).encoder(with_prompts=False)
    with pytest.raises(DataError, match="rows of a task are not split"):
        encoder.fit(encoder.encode({"text": "a red cat", "label": "bad"}))
    with pytest.raises(RowError, match="the text is empty"):
        require_tokens([])


def test_pairs_with_scores_train_an_embedding(folder: Path):
    draw = random.Random(0)
    data = [{"sentence1": "a cat", "sentence2": "a dog", "score": draw.choice([0, 1.5, 4.0])} for _ in range(6)]
    task: Any = task_of(recipe(folder, "embedding", data, "sts", options={"matryoshka": [8]}))
    samples = [task.encode(row) for row in data]
    batch = task.collate(samples, range(6), {})
    draws = torch.manual_seed(0)
    vectors = [torch.randn(6, 16, generator=draws, dtype=torch.float64) for _ in range(2)]
    outputs = {"query": vectors[0], "documents": vectors[1][:, None], "score": batch["score"]}
    terms = task.step_loss(outputs)
    for term, size in (("full", 16), ("size_8", 8)):
        cosines = torch.nn.functional.cosine_similarity(vectors[0][:, :size], vectors[1][:, :size]) / 0.05
        total = sum(
            float((cosines[i] - cosines[j]).exp())
            for i in range(6)
            for j in range(6)
            if data[i]["score"] < data[j]["score"]
        )
        assert float(terms[term].total) / terms[term].weight == pytest.approx(np.log1p(total), rel=1e-12)
    assert task.found_options()["loss"] == "cosent"
    idle = task_of(recipe(folder, "embedding", data, "idle", options={"negatives": 2, "mask_duplicates": False}))
    with pytest.raises(ConfigError, match="negatives: 2 and mask_duplicates: False is for queries with documents"):
        idle.found_options()
    assert "spearman/size_8" in task.set_metric_names
    records = task.records(outputs, batch)
    assert task.set_metrics(records).keys() == set(task.set_metric_names)
    with pytest.raises(RowError, match="the row has no 'label'"):
        task.encode({"query": "a", "positive": "b"})
    unscored = task_of(recipe(folder, "embedding", [{"query": "a", "positive": "b"}], "unscored"))
    with pytest.raises(RowError, match="the row has 'score', and the first training row has no score"):
        unscored.encode(data[0])


@pytest.mark.parametrize("config", [HubertConfig(), LlavaConfig(), ViTConfig()], ids=lambda config: config.model_type)
def test_models_that_read_no_text_alone_are_refused(folder: Path, tmp_path: Path, config: PreTrainedConfig):
    shutil.copytree(folder / "encoder", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    given = recipe(folder, "embedding", rows("embedding", 2), "deaf", model_path=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=f"a {config.model_type} model, which does not read text alone"):
        task_of(given).build()


def test_a_model_of_code_points_has_no_vocabulary_to_compare(folder: Path, tmp_path: Path):
    """CANINE: its config has no `vocab_size`, and any id has an embedding."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    CanineConfig(**sizes, num_hash_buckets=512, max_position_embeddings=64).save_pretrained(tmp_path)
    CanineTokenizer().save_pretrained(tmp_path)
    data = rows("sequence_classifier", 4)
    values = recipe(folder, "sequence_classifier", data, "canine", model_path=str(tmp_path), from_scratch=True)
    values["model"]["precision"] = "fp32"
    task = task_of(values)
    batch = task.collate([task.encode(data[0])], [0], {})
    assert task.loss(task.build(), batch).total.isfinite()


def test_an_encoder_decoder_embeds_nothing(folder: Path):
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        task_of(recipe(folder, "embedding", rows("embedding", 2), "t5", model_path=str(folder / "t5"))).build()


def test_a_loss_of_classes_is_refused_where_there_are_none(folder: Path):
    values = recipe(folder, "regression", rows("regression", 3), "smoothed")
    values["label_smoothing"] = 0.1
    with pytest.raises(ConfigError, match=r"label_smoothing \(0.1\) is for rows with one class each"):
        task_of(values).build()


def test_a_plan_trains_a_new_head_beside_lora(folder: Path, tmp_path: Path):
    """As training does, with the base's files and with its configuration alone."""
    (tmp_path / "config").mkdir()
    for file in (folder / "encoder").glob("*.json"):
        (tmp_path / "config" / file.name).write_bytes(file.read_bytes())
    data = rows("sequence_classifier", 12)
    for path in (folder / "encoder", tmp_path / "config"):
        task = task_of(recipe(folder, "sequence_classifier", data, "plan", model_path=str(path), is_lora=True))
        with init_empty_weights():
            model = task.build()
        add_lora(model, task.recipe, task)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        heads = {f"{name}.{kind}" for name in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")}
        assert {name for name in trained if "lora_" not in name} == heads
        assert len(trained) > len(heads)


def test_the_command_names_file_and_row(folder: Path):
    data = [*rows("sequence_classifier", 5), {"text": "a cat", "label": None}]
    values = recipe(folder, "sequence_classifier", data, "no-label")
    file = folder / "no-label.yaml"
    file.write_text(json.dumps(values))
    found = run_cli("train", str(file))
    assert found.code == 2
    assert "no-label.jsonl: row 6" in found.err
    assert ") is null" in found.err
    assert not (folder / "runs" / "sequence_classifier-no-label").exists()


def test_a_row_longer_than_the_positions_is_one_message(folder: Path):
    values = recipe(folder, "sequence_classifier", rows("sequence_classifier", 4), "long")
    values["data"]["max_length"] = 64
    encoder = task_of(values).encoder(with_prompts=False)
    with pytest.raises(DataError, match=r"42 tokens, .* has positions for 32"):
        encoder.fit(encoder.encode({"text": "cat " * 40, "label": "bad"}))


def test_a_row_longer_than_the_positions_of_gpt2_is_one_message(folder: Path):
    values = recipe(folder, "sequence_classifier", rows("sequence_classifier", 4), "long-gpt2")
    GPT2Model(GPT2Config(n_positions=32, n_embd=16, n_layer=1, n_head=2, **SIZES)).save_pretrained(folder / "gpt2")
    save_tokenizer(folder / "gpt2")
    values["model"]["model_path"], values["data"]["max_length"] = str(folder / "gpt2"), 64
    encoder = task_of(values).encoder(with_prompts=False)
    with pytest.raises(DataError, match=r"42 tokens, .* has positions for 32"):
        encoder.fit(encoder.encode({"text": "cat " * 40, "label": "bad"}))


@pytest.mark.lengthy
def test_texts_are_read_and_written_within_the_positions_of_bart(folder: Path):
    """A model that never ends by itself writes 16 tokens, of which three are marks; what was cut is said."""
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    inner = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16, "init_std": 0.2}
    config = BartConfig(
        d_model=16, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3, **sizes, **inner, **SIZES
    )
    bart = folder / "bart"
    model = BartForConditionalGeneration(config)
    model.final_logits_bias[:, 3] = -1e9
    model.generation_config.update(num_beams=4, min_length=3, decoder_start_token_id=None)
    model.save_pretrained(bart)
    save_tokenizer(bart, pair=False)
    options = {"num_beams": 1}
    values = recipe(folder, "seq2seq", rows("seq2seq", 4), "bart", model_path=str(bart), options=options)
    values["eval"] = {"max_new_tokens": 64}
    worker = SFTWorker(load_recipe(values), report=lambda _: None)
    worker.setup()
    short, long = predict(worker, [{"source": "a cat"}, {"source": "red cat " * 20}])
    worker.export(folder / "bart-final", "fp32")
    worker.release()
    generation = json.loads((folder / "bart-final" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["min_length"]) == (1, 3)
    assert generation["decoder_start_token_id"] == 2  # that of training
    assert "truncated" not in short
    assert long["truncated"]
    for one in (short, long):
        assert len(one["prediction"]["text"].split()) == 13


def test_a_tokenizer_that_ends_no_target_is_named(folder: Path, tmp_path: Path):
    values = recipe(folder, "seq2seq", rows("seq2seq", 2), "ended")
    assert not task_of(values).notes()
    shutil.copytree(folder / "t5", tmp_path / "t5")
    file = tmp_path / "t5" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    values["model"]["model_path"] = str(tmp_path / "t5")
    (note,) = task_of(values).notes()
    assert "appends no end token (eos_token_id 3) to a target" in note


@pytest.mark.parametrize(("source", "target"), [(12, 12), (12, 9), (9, 12), (2, 9), (9, 2)])
def test_source_and_target_are_cut_each_by_itself(folder: Path, source: int, target: int):
    values = recipe(folder, "seq2seq", rows("seq2seq", 2), "both-long")
    values["data"]["max_length"] = 6
    task: Any = task_of(values)
    row = {"source": "cat " * source, "target": "dog " * target}
    encoder = task.encoder(with_prompts=False)
    fields = encoder.fit(encoder.encode(row)).fields
    for name, text in (("input_ids", row["source"]), ("target", row["target"])):
        assert fields[name].tolist() == task.tokenizer(text, truncation=True, max_length=6)["input_ids"]


def test_a_text_that_is_cut_keeps_its_end():
    ids = np.array([[2, 7, 8, 9, 3], [2, 7, 3, -1, -1]])
    assert shortened(ids, ids, Cut(4, np.array([2, 3]))).tolist() == [[2, 7, 8, 3], [2, 7, 3, -1]]
    assert shortened(ids, ids, Cut(4, np.array([2, 3]), left=True)).tolist() == [[2, 8, 9, 3], [2, 7, 3, -1]]
    assert shortened(np.array([5, 6, 7]), np.array([5, 6, 7]), Cut(2, np.array([3]))).tolist() == [5, 6]
    twice = np.array([7, 8, 9, 3, 4])  # such as the end and the language of mBART
    assert shortened(twice, twice, Cut(4, np.array([3, 4]))).tolist() == [7, 8, 3, 4]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_pair_is_cut_as_transformers_cuts_it(folder: Path, side: str):
    """No text of a pair is lost; checked against the tokenizer's own cut, at every length of both."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "encoder", truncation_side=side)
    values = recipe(folder, "sequence_classifier", rows("sequence_classifier", 4), "pairs")
    values["data"]["max_length"] = 4
    task: Any = task_of(values)
    for first, second, most in itertools.product(range(1, 9), range(9), range(5, 12)):
        pair = (" ".join(["cat"] * first), " ".join(["dog"] * second))
        made = task.tokens(*pair)
        ids, kinds = np.asarray(made["input_ids"]), made["token_type_ids"]
        if len(ids) <= most:
            continue
        own = tokenizer([pair[0]], [pair[1]], truncation="longest_first", max_length=most, return_token_type_ids=True)
        for found, name in ((ids, "input_ids"), (kinds, "token_type_ids")):
            cut = shortened(found, ids, Cut.of(tokenizer, most), made["parts"])
            assert cut.tolist() == own[name][0]
    text = "cat dog [SEP] [SEP]"  # marks that are words of it
    made = task.tokens(text)
    cut = shortened(np.asarray(made["input_ids"]), np.asarray(made["input_ids"]), Cut.of(tokenizer, 4), made["parts"])
    assert cut.tolist() == tokenizer(text, truncation=True, max_length=4)["input_ids"]


def test_the_second_text_of_a_long_pair_is_read(folder: Path):
    values = recipe(folder, "reranker", rows("reranker", 4), "long-query")
    values["data"]["max_length"] = 8
    encoder: Any = task_of(values).encoder(with_prompts=False)
    row = {"query": "cat " * 20, "positive": "dog", "negatives": ["red dog", "dog " * 20]}
    sample = encoder.fit(pickle.loads(pickle.dumps(encoder)).encode(row))
    vocabulary = task_of(values).tokenizer.convert_ids_to_tokens
    texts = [" ".join(vocabulary([one for one in ids if one >= 0])) for ids in sample.fields["input_ids"].tolist()]
    assert texts == [
        "[CLS] cat cat cat cat [SEP] dog [SEP]",
        "[CLS] cat cat cat [SEP] red dog [SEP]",
        "[CLS] cat cat [SEP] dog dog dog [SEP]",
    ]
    assert "parts" not in sample.fields


def test_the_texts_of_a_pair_are_found_without_a_fast_tokenizer():
    tokenizer = ByT5Tokenizer()
    for pair in (("ab", "abc"), ("abab", "ab"), ("ab", ""), ("abcd", "bcde")):
        made = tokenizer([pair[0]], [pair[1]], verbose=False)
        parts = parts_of(tokenizer, pair, made)
        assert parts is not None
        ids = np.asarray(made["input_ids"][0])
        assert [tokenizer.decode(ids[parts == part]) for part in (1, 2)] == list(pair)
        assert set(ids[parts == 0].tolist()) <= {tokenizer.eos_token_id}
        for most in range(3, len(ids)):  # it gives the odd token to the first text
            own = tokenizer([pair[0]], [pair[1]], truncation=True, max_length=most, verbose=False)
            assert shortened(ids, ids, Cut.of(tokenizer, most), parts).tolist() == own["input_ids"][0]


def test_required_sizes_are_compared(folder: Path):
    data = [{"text": "a cat", "label": label} for label in ("x", "y", "x")]
    with pytest.raises(ConfigError, match=r"actor\.model\.hidden_size is 5, the model has 16"):
        task_of(recipe(folder, "sequence_classifier", data, "sizes", hidden_size=5))
    with pytest.raises(ConfigError, match="the model takes no images"):
        task_of(recipe(folder, "sequence_classifier", data, "sizes", image_size=[5, 5]))
    assert task_of(recipe(folder, "sequence_classifier", data, "sizes", hidden_size=16)).config.hidden_size == 16


def test_one_label_is_none(folder: Path):
    task = task_of(recipe(folder, "sequence_classifier", [{"text": "a", "label": "x"}] * 3, "single"))
    with pytest.raises(ConfigError, match="the training rows have one label: x"):
        task.build()


def test_sizes_of_matryoshka_are_checked(folder: Path):
    options = {"matryoshka": [8, 16]}
    with pytest.raises(ConfigError, match="a different number below 16, the width of the model"):
        task_of(recipe(folder, "embedding", rows("embedding", 3), "sizes", options=options)).build()


def test_entities_are_counted_as_conll_does():
    assert spans(["B-A", "I-A", "O", "I-B", "B-B", "S-A", "I-A"]) == {
        ("A", 0, 2), ("B", 3, 4), ("B", 4, 5), ("A", 5, 6), ("A", 6, 7),
    }  # fmt: skip
    targets, guesses = [["B-A", "I-A", "O"], ["B-B", "O"]], [["B-A", "O", "O"], ["B-B", "B-A"]]
    assert entity_scores(targets, guesses) == pytest.approx({"precision": 1 / 3, "recall": 1 / 2, "f1": 0.4})


def test_f1_of_two_classes_is_that_of_the_second():
    found = f1_scores(np.array([0, 1, 1, 1]), np.array([0, 1, 0, 0]), 2)
    assert found["f1"] == pytest.approx(0.5)
    assert found["f1_macro"] == pytest.approx((0.5 + 0.5) / 2)


def test_a_class_that_is_nowhere_is_not_in_the_means():
    from sklearn.metrics import f1_score  # here, as what it imports takes a second

    targets, guesses = np.array([0, 0, 2]), np.array([0, 2, 2])
    assert f1_scores(targets, guesses, 4)["f1_macro"] == pytest.approx(f1_score(targets, guesses, average="macro"))
    assert f1_scores(np.zeros(3, int), np.zeros(3, int), 2) | {"f1": 1.0} == dict.fromkeys((*F1_NAMES, "f1"), 1.0)
    assert f1_scores(np.zeros(3, int), np.zeros(3, int), 2)["f1"] == 0.0


def test_equal_scores_find_nothing(folder: Path):
    """A model that gives all documents the same score has the mean place, not the first; NaN is no place."""
    same, own = np.ones((5, 3)), np.arange(3)
    assert ranks_of_right(same[:3], same, own) == [3.0] * 3
    apart = np.array([[2.0], [1], [1], [0]])
    assert ranks_of_right(np.ones((3, 1)), apart, np.array([0, 2, 3])) == [1.0, 2.5, 4.0]
    broken = ranking(ranks_of_right(same[:3] * np.nan, same, own), (1, 10))
    assert np.isnan([*broken.values()]).all()
    task = task_of(recipe(folder, "reranker", rows("reranker", 2), "equal"))
    for scores, right, mrr in (([0.5] * 5, 1, 1 / 3), ([0.5] * 5, 2, 1 / 2), ([1, 0.5, 0.5, 0, 0], 1, 1.0)):
        labels = [1.0] * right + [0.0] * (5 - right)
        record = {"query": 1, "scores": scores, "labels": labels, "pairs": [(place,) for place in range(5)]}
        assert task.set_metrics([record])["mrr"] == pytest.approx(mrr)
    assert np.isnan(task.set_metrics([{**record, "scores": [np.nan] * 5}])["mrr"])


def test_the_loss_of_a_reranker_is_said(folder: Path) -> None:
    """That of its rows: with a label it is pointwise, also where the recipe names the other one."""
    labelled = [{"query": "a", "document": "b", "label": 1}, {"query": "a", "document": "c", "label": 0}]
    compared = [{"query": "a", "positive": "b", "negatives": ["c"]}]
    for name, data, options, wanted in (
        ("plain", labelled, {}, "loss: pointwise, binary cross-entropy of each document with its label"),
        (
            "other",
            labelled,
            {"loss": "listwise"},
            "listwise is for rows with negatives, and the first training row has",
        ),
        (
            "same",
            labelled,
            {"loss": "pointwise"},
            "loss: pointwise, binary cross-entropy of each document with its label",
        ),
        ("list", compared, {}, "loss: listwise, cross-entropy over the documents of a row"),
        ("each", compared, {"loss": "pointwise"}, "loss: pointwise, binary cross-entropy of each document"),
    ):
        (line,) = (
            line for line in task_of(recipe(folder, "reranker", data, name, options=options)).notes() if "loss" in line
        )
        assert wanted in line
        assert ("is for rows with negatives" in line) == (name == "other")


def test_several_labels_for_a_text(folder: Path):
    data = [{"text": "a cat", "labels": ["x", "y"]}, {"text": "a dog", "labels": []}, {"text": "a", "labels": ["z"]}]
    task: Any = task_of(recipe(folder, "sequence_classifier", data, "several", options={"multi_label": True}))
    samples = [task.encode(row) for row in data]
    assert [sample.fields["labels"].tolist() for sample in samples] == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    batch = task.collate(samples, range(3), {})
    logits = torch.tensor([[3.0, -1, -1], [-1, -1, -1], [-1, -1, 1]])
    records = task.records({"logits": logits}, batch)
    assert task.set_metrics(records)["accuracy"] == pytest.approx(2 / 3)
    assert task.prediction(records[0])["labels"] == ["x"]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    loss = task.loss_of({"logits": logits}, batch)
    assert isinstance(loss, shardtune.LossSum)
    assert float(loss.total) / loss.weight == pytest.approx(float(expected))
    task.outputs = lambda model, batch: {"logits": logits}
    (piece,) = task.predictions(torch.nn.Identity(), batch)  # for losses of the recipe, with the weight of the rows
    assert float(piece.weights.sum()) == loss.weight == sum(task.weights(sample)["loss"] for sample in samples)


def test_an_empty_second_text_is_one_of_a_pair(folder: Path):
    """As in a batch of pairs; of a single pair a tokenizer leaves it out."""
    task = task_of(recipe(folder, "reranker", [{"query": "a cat", "document": "", "label": 0}] * 2, "empty"))
    fields = task.encode_text({"query": "a cat", "document": ""})
    assert fields["input_ids"].tolist() == task.tokenizer(["a cat"], [""])["input_ids"] != [[2, 4, 12, 3]]
    assert fields["token_type_ids"].tolist() == [[0, 0, 0, 0, 1]]


def test_a_list_of_0_and_1_for_each_label_is_refused(folder: Path):
    for labels in ([0, 1, 1], [1.0, 0.0, 0.0], ["red", "red"]):
        data = [{"text": "a cat", "labels": labels}, {"text": "a dog", "labels": labels[:2]}] * 2
        values = recipe(folder, "sequence_classifier", data, "switches", options={"multi_label": True})
        values["model"]["options"]["labels"] = ["0", "1", "red"]
        with pytest.raises(RowError, match=r"is twice in (?s:.*)not 0 or 1 for each"):
            task_of(values).encode(data[0])


def test_minus_100_is_no_label(folder: Path):
    data = [{"tokens": ["red", "cat", "runs"], "ner_tags": [number % 2, "-100", -100.0]} for number in range(4)]
    task = task_of(recipe(folder, "token_classifier", data, "masked"))
    assert task.found_options() == {"labels": ["0", "1"]}
    assert task.encode(data[1]).fields["labels"].tolist() == [-100, 1, -100, -100, -100]
    data = [{"text": "a cat", "label": label} for label in (0, 1, "-100", 1)]
    task = task_of(recipe(folder, "sequence_classifier", data, "masked"))
    assert task.found_options() == {"labels": ["0", "1"]}
    with pytest.raises(RowError, match="the label is -100, which marks rows without one"):
        task.encode(data[2])


def test_a_document_twice_of_a_query_has_one_place_and_one_score(folder: Path):
    """Equal pairs in other batches have scores that differ by rounding, which would decide ranks."""
    data: Any = [{"query": "a", "positive": "cat", "negatives": ["red", "red", "cat"]}]
    data += [{"query": "a", "document": "cat", "label": 0}, {"query": "dog", "document": "red", "label": 0}]
    task = task_of(recipe(folder, "reranker", data, "again"))
    batch = task.collate([task.encode(row) for row in data], range(3), {})
    nothing = -torch.inf
    scores = torch.tensor([[1.0, 2.0, 2.5, 1.5], [3, nothing, nothing, nothing], [0, nothing, nothing, nothing]])
    records = task.records({"scores": scores}, batch)
    found = task.set_metrics(records)
    assert (found["mrr"], found["accuracy"]) == (0.5, 2 / 6)  # red is the only one above cat
    exact = task.records({"scores": torch.tensor([[1.0, 2, 2, 1], [1, *[nothing] * 3], [0, *[nothing] * 3]])}, batch)
    assert found["spearman"] == task.set_metrics(exact)["spearman"]
    assert task.prediction(records[0]) == {"scores": [1.0, 2.0, 2.5, 1.5]}


def test_a_target_without_a_first_token_is_one_message(folder: Path):
    task: Any = task_of(recipe(folder, "seq2seq", rows("seq2seq", 2), "no-start"))
    batch, model = task.collate([task.encode(row) for row in rows("seq2seq", 2)], range(2), {}), task.build()
    task.config.decoder_start_token_id = model.config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match=r"(?s)what a target begins from.*write decoder_start_token_id"):
        task.outputs(model, batch)


def test_answers_begin_from_the_token_of_training(folder: Path):
    """The directory has its own in generation_config.json, which the recipe's override does not reach."""
    values = recipe(folder, "seq2seq", rows("seq2seq", 2), "start")
    assert "generation_config.json" not in task_of(values).saved_files()
    values["model"]["config_overrides"] = {"decoder_start_token_id": 2}
    task: Any = task_of(values)
    batch, model = task.collate([task.encode(row) for row in rows("seq2seq", 2)], range(2), {}), task.build()
    model.generation_config.decoder_start_token_id = 0
    assert task.predicted_outputs(model, batch)["written"][:, 0].tolist() == [2, 2]
    assert task.saved_files()["generation_config.json"] == {"decoder_start_token_id": 2}


def test_sampled_answers_are_those_of_their_rows(folder: Path):
    """In any batch, and one for each row though the model's settings ask for two."""
    values = {**recipe(folder, "seq2seq", rows("seq2seq", 4), "drawn"), "eval": {"max_new_tokens": 6, "temperature": 2}}
    task: Any = task_of(values)
    samples, model = [task.encode(row) for row in rows("seq2seq", 4)], task.build()
    model.generation_config.update(do_sample=True, num_return_sequences=2, return_dict_in_generate=True, top_k=1)

    def written(*numbers: int) -> list[list[int]]:
        batch = task.collate([samples[number] for number in numbers], numbers, {})
        tokens = [row.tolist() for row in task.predicted_outputs(model, replace(batch, key=5))["written"]]
        return [row[: row.index(3, 1)] if 3 in row[1:] else row for row in tokens]

    together = written(0, 1, 2, 3)
    torch.manual_seed(1)
    assert together == written(0) + written(1, 3, 2)[:1] + written(2, 3)
    assert len({tuple(row) for row in together}) > 1


def test_answers_are_drawn_from_the_softmax(folder: Path):
    task: Any = task_of(recipe(folder, "seq2seq", rows("seq2seq", 2), "softmax"))
    batch = task.collate([task.encode(row) for row in rows("seq2seq", 2)], range(2), {})
    scores = torch.tensor([0.0, 1.0, 2.0])
    drawn = Draws(replace(batch, rows=tuple(range(9000))), 2.0)(torch.zeros(9000, 1).long(), scores.expand(9000, -1))
    shares = drawn.argmax(1).bincount() / 9000
    assert torch.allclose(shares, (scores / 2).softmax(0), atol=0.02)


def test_a_document_twice_in_a_step_is_no_wrong_answer(folder: Path):
    """With the same document in two rows, the other one is left out of the sum."""
    task: Any = task_of(recipe(folder, "embedding", [{"query": "a", "positive": "b"}] * 2, "twice"))
    vectors = torch.nn.functional.normalize(torch.randn(2, 16, generator=torch.manual_seed(0)), dim=-1)
    outputs = {
        "query": vectors, "documents": vectors[:, None].flip(0),
        "there": torch.ones(2, 1, dtype=torch.bool), "texts": torch.tensor([[5], [5]]),
    }  # fmt: skip
    assert float(task.step_loss(outputs)["loss"].total) == 0.0
    outputs["texts"] = torch.tensor([[5], [6]])
    assert float(task.step_loss(outputs)["loss"].total) > 0.1


def test_what_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    values = recipe(folder, "sequence_classifier", rows("sequence_classifier", 8), "absent")
    values["data"]["eval_split"] = 0.5
    task = task_of(values)
    assert "f1_macro" in task.set_metric_names
    assert task.notes() == ["labels: bad, fine, good"]
    monkeypatch.setattr("shardtune.models.tasks.metrics.find_spec", lambda name: None)
    assert list(task.set_metric_names) == ["accuracy"]
    note, _ = task.notes()
    assert "sklearn is not installed" in note
    assert "pip install 'shardtune[tasks]'" in note


def test_keys_of_answers_that_have_no_effect_are_refused(folder: Path):
    values = recipe(folder, "seq2seq", rows("seq2seq", 4), "keys")
    values["data"]["eval_split"] = 0.5
    values["eval"] = {"generate": True, "num_samples": 2}
    with pytest.raises(ConfigError, match="num_samples has no effect with model_type: seq2seq"):
        SFTWorker(load_recipe(values), report=lambda text: None)


@pytest.fixture(scope="module")
def adapted(folder: Path) -> shardtune.Run:
    """A classifier with LoRA; its training rows are gone afterwards."""
    data = rows("sequence_classifier", 12)
    values = recipe(folder, "sequence_classifier", data, "lora", precision="fp32", is_lora=True, lora={"r": 2})
    values["optim"] = {"lr": 0.05, "lr_scheduler": "constant", "lr_warmup_steps": 0}
    values["runner"]["save_interval"] = 2
    code = folder / "prepare.py"
    code.write_text(
        "def prepared(row):\n    return None if row['text'] == 'drop me' else {**row, 'said': row['text']}\n"
    )
    values["data"] |= {"transform": f"{code}:prepared", "columns": {"text": "said", "label": "label"}}
    run = shardtune.train(values)
    Path(values["data"]["train_data_paths"]).unlink()
    return run


SEEN = [{"text": "red cat"}, {"text": "a green dog runs"}, {"text": "who"}]


def scores_of(model: Any, directory: Path) -> list[Mapping[str, float]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = model(**tokenizer([row["text"] for row in SEEN], padding=True, return_tensors="pt")).logits
    return [dict(zip(["bad", "fine", "good"], each.softmax(-1).tolist(), strict=True)) for each in logits]


@pytest.mark.lengthy
def test_an_adapter_holds_the_head_and_loads_with_peft(folder: Path, adapted: shardtune.Run, tmp_path: Path):
    base = AutoModelForSequenceClassification.from_pretrained(folder / "encoder", num_labels=3)
    model = PeftModel.from_pretrained(base, adapted.dir / "final").eval()
    expected = scores_of(model, adapted.dir / "final")
    for checkpoint in ("final", "2"):
        found = [one["scores"] for one in adapted.predict(SEEN, checkpoint=checkpoint)]
        assert [pytest.approx(one, abs=1e-6) for one in expected] == found
    merged = AutoModelForSequenceClassification.from_pretrained(
        adapted.export(tmp_path / "merged", merge=True, check=False)
    )
    assert [pytest.approx(one, abs=1e-6) for one in expected] == scores_of(merged.eval(), tmp_path / "merged")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "\ud800 cat"}, r"U\+D800, half of a surrogate pair"),
        ({"text": None}, r"'text' \(the text\) is null"),
    ],
)
def test_a_row_that_no_prediction_is_for_is_named(
    adapted: shardtune.Run, tmp_path: Path, row: dict[str, Any], says: str
):
    file = write(tmp_path / "rows.jsonl", [{"text": "red cat"}, row])
    with pytest.raises(DataError, match=says) as found:
        [*adapted.predictions(file, prepared=True)]
    assert "rows.jsonl: row 2" in str(found.value.where)


@pytest.mark.lengthy
def test_rows_are_read_as_in_training(adapted: shardtune.Run, tmp_path: Path):
    """`data.transform` and `data.columns` of the recipe; rows without targets may lack a column."""
    expected = adapted.predict(SEEN[:1])
    assert adapted.predict(SEEN[:1], prepared=True) == expected
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match=r"torch\.autocast of this process"):
        assert adapted.predict(SEEN[:1]) == expected
    with pytest.raises(DataError, match=r"data\.transform drops 1 of 2 rows"):
        adapted.predict([SEEN[0], {"text": "drop me"}])
    file = write(tmp_path / "rows.jsonl", [{"text": "drop me"}, {"text": "red cat", "number": 3}])
    printed = run_cli("predict", str(adapted.dir), "--file", file)
    assert [json.loads(line) for line in printed.out.splitlines()] == [
        {"text": "red cat", "number": 3, "prediction": expected[0]}
    ]
    assert "predict: 1 row is left out: data.transform drops it" in printed.err
    assert json.loads(run_cli("predict", str(adapted.dir), "drop me").out)["text"] == "drop me"
    write(tmp_path / "rows.jsonl", [{"number": 3}])
    failed = run_cli("predict", str(adapted.dir), "--file", file)
    assert failed.code == 2
    assert "data.transform raised KeyError: 'text'" in failed.err
    assert "rows.jsonl: row 1" in failed.err


def test_a_directory_without_a_run_is_evaluated_as_its_task(adapted: shardtune.Run, tmp_path: Path):
    model = str(adapted.export(tmp_path / "merged", merge=True, check=False))
    labels = [one["label"] for one in adapted.predict(SEEN)]
    data = write(tmp_path / "rows.jsonl", [{**row, "label": name} for row, name in zip(SEEN, labels, strict=True)])
    for words in ([model], [f"--model={model}"]):
        printed = run_cli("eval", *words, f"data.eval_data_paths={data}", "model.precision=fp32")
        assert json.loads(printed.out)["eval/accuracy"] == 1.0
    assert task_overrides(model, [])[:2] == [
        "actor.model.model_type=sequence_classifier",
        'actor.model.options.labels=["bad", "fine", "good"]',
    ]
    assert task_overrides(model, ["model.model_type=reranker"]) == []


@pytest.mark.lengthy
def test_a_directory_without_a_run_predicts(folder: Path, adapted: shardtune.Run, tmp_path: Path):
    merged, adapter = (adapted.export(tmp_path / name, merge=name == "merged", check=False) for name in ("merged", "a"))
    expected = adapted.predict(SEEN)
    assert json.loads((adapter / "task.json").read_text())["options"] == {"labels": ["bad", "fine", "good"]}
    assert ", id2label={0: 'bad', 1: 'fine', 2: 'good'})" in (adapter / "README.md").read_text()
    for directory in (merged, adapter):
        printed = run_cli("predict", str(directory), "red cat", "a green dog runs").out
        found = [json.loads(line) for line in printed.splitlines()]
        assert [one["text"] for one in found] == ["red cat", "a green dog runs"]
        for one, other in zip(found, expected, strict=False):
            assert one["prediction"]["scores"] == pytest.approx(other["scores"], abs=1e-6)
    (merged / "task.json").unlink()  # as of any classifier of transformers
    (found,) = load_run_or_model(merged).predictions([{"text": "red cat " * 99}])
    assert found["truncated"]


@pytest.mark.lengthy
def test_a_trained_classifier_is_trained_on(folder: Path, adapted: shardtune.Run, tmp_path: Path):
    """Its head and the order of its labels are kept; other labels are refused."""
    trained = adapted.export(tmp_path / "merged", merge=True, check=False)
    data = [{"text": "a cat", "label": label} for label in ("good", "fine")] * 3
    values = recipe(folder, "sequence_classifier", data, "further", model_path=str(trained))
    task = task_of(values)
    assert task.config.id2label == {0: "bad", 1: "fine", 2: "good"}
    other = recipe(
        folder, "sequence_classifier", [{"text": "a", "label": "good"}, {"text": "a", "label": "new"}], "new"
    )
    other["model"]["model_path"] = str(trained)
    headless = recipe(folder, "regression", rows("regression", 2), "headless", model_path=str(trained))
    with pytest.raises(ConfigError, match="has a head of 3 outputs, this regression has 1"):
        task_of(headless).build()
    given = {**other, "model": {**other["model"], "options": {"labels": ["good", "bad", "fine"]}}}
    with pytest.raises(ConfigError, match=r"labels = \['good', 'bad', 'fine'\]; those of the classifier"):
        task_of(given).build()
    with pytest.raises(ConfigError, match=r"the label 'new'; those of the classifier in .* are bad, fine, good"):
        task_of(other).build()


@pytest.mark.lengthy
def test_an_embedding_model_is_a_directory_of_sentence_transformers(folder: Path, tmp_path: Path):
    options = {"query_prompt": "query: ", "pooling": "cls"}
    run = shardtune.train(recipe(folder, "embedding", rows("embedding", 8), "files", options=options, precision="fp32"))
    final = run.dir / "final"
    modules = json.loads((final / "modules.json").read_text())
    assert [one["path"] for one in modules] == ["", "1_Pooling", "2_Normalize"]
    assert json.loads((final / "1_Pooling" / "config.json").read_text())["pooling_mode_cls_token"] is True
    assert json.loads((final / "config_sentence_transformers.json").read_text())["prompts"]["query"] == "query: "
    further = task_of(recipe(folder, "embedding", rows("embedding", 3), "from-files", model_path=str(final)))
    assert (further.options.pooling, further.options.normalize, further.options.query_prompt) == (
        "cls",
        True,
        "query: ",
    )
    query, document = run.predict([{"query": "red cat"}, {"text": "red cat"}])
    assert np.linalg.norm(query["embedding"]) == pytest.approx(1, abs=1e-5)
    assert query != document


def sentences(folder: Path, **settings: Any) -> Path:
    """The files of sentence-transformers, with mean pooling."""
    (folder / "1_Pooling").mkdir(parents=True)
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def test_what_a_directory_of_sentence_transformers_sets_is_used_and_stays(folder: Path, tmp_path: Path):
    given = {"query": "q: ", "passage": "p: ", "sts": "s: "}
    base = sentences(tmp_path / "base", prompts=given, default_prompt_name="query")
    shutil.copytree(folder / "encoder", base, dirs_exist_ok=True)
    task = task_of(recipe(folder, "embedding", rows("embedding", 3), "prompts", model_path=str(base)))
    assert task.notes()[-1] == "vectors: pooling mean, of length 1, 'q: ' before queries, 'p: ' before documents"
    written = task.saved_files()["config_sentence_transformers.json"]
    assert written == {
        "prompts": {**given, "document": "p: "}, "default_prompt_name": "query", "similarity_fn_name": "cosine",
    }  # fmt: skip
    by_dot = sentences(tmp_path / "dot", similarity_fn_name="dot")
    assert sentence_transformers_files.options_of(by_dot)["normalize"] is False
    pairs = sentences(tmp_path / "pairs", model_type="CrossEncoder")
    scoring = BertConfig(architectures=["BertForSequenceClassification"])
    scoring.num_labels = 1
    assert described_task(pairs, scoring) == {"model_type": "reranker"}
    (base / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match=r"small letters \(do_lower_case\), and its tokenizer does not"):
        task_of(recipe(folder, "embedding", rows("embedding", 3), "lower", model_path=str(base))).build()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "1_Pooling/config.json",
            '{"pooling_mode": "cls", "include_prompt": false}',
            "leaves the tokens of prompts out",
        ),
        ("1_Pooling/config.json", "{", "cannot be read"),
        ("modules.json", '{"a": 1}', "has a dict, not a list"),
        ("modules.json", '[{"idx": 0}]', "does not list modules"),
        ("config_sentence_transformers.json", '{"prompts": {"query": 3}}', "has the prompts {'query': 3}"),
        ("config_sentence_transformers.json", '{"truncate_dim": 8}', "cuts vectors to truncate_dim: 8"),
        ("config_sentence_transformers.json", '{"similarity_fn_name": "euclidean"}', "compares vectors by euclidean"),
    ],
)
def test_what_would_not_be_trained_of_it_is_one_message(tmp_path: Path, file: str, content: str, message: str):
    base = sentences(tmp_path / "base")
    (base / file).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        sentence_transformers_files.options_of(base)
    assert caught.value.where == str(base / file)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_sentence_transformers_gives_the_same_vectors(folder: Path, pooling: str):
    from sentence_transformers import SentenceTransformer

    options = {"query_prompt": "what ", "pooling": pooling}
    values = recipe(folder, "embedding", rows("embedding", 8), pooling, options=options, precision="fp32")
    run = shardtune.train(values)
    query, document = run.predict([{"query": "red cat"}, {"text": "red cat"}])
    loaded = SentenceTransformer(str(run.dir / "final"))
    np.testing.assert_allclose(loaded.encode(["red cat"], prompt_name="query")[0], query["embedding"], atol=1e-6)
    np.testing.assert_allclose(loaded.encode(["red cat"])[0], document["embedding"], atol=1e-6)
    loaded.save(str(folder / f"saved-{pooling}"))
    found = sentence_transformers_files.options_of(folder / f"saved-{pooling}")
    assert found == {"pooling": pooling, "normalize": True, "query_prompt": "what "}


@pytest.mark.slow
def test_cross_encoder_gives_the_same_scores(folder: Path):
    from sentence_transformers import CrossEncoder

    data = [{"query": "a cat", "document": "red", "label": 1}, {"query": "a dog", "document": "blue tree", "label": 0}]
    run = shardtune.train(recipe(folder, "reranker", data * 4, "cross", precision="fp32"))
    expected = [one["score"] for one in run.predict([{**row, "label": None} for row in data])]
    pairs = [(row["query"], row["document"]) for row in data]
    found = CrossEncoder(str(run.dir / "final")).predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(found, expected, atol=1e-6)
