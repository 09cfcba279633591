"""What a run leaves is compared with what plain transformers and PEFT read, and each kind of difference is named."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardtune
from shardtune.run.facts import facts
from shardtune.verify.claims import plain_reader
from shardtune.verify.claims.export import compared
from shardtune.verify.result import Failed
from tests.support import fork_server
from tests.support.robot import save_episodes
from tests.support.tiny_run import make_tiny
from tests.support.tiny_tasks import rows, save_encoder, write
from tests.support.vision import save_vision_model

Part = dict[str, Any]
Both = tuple[Part, Part]


def read(directory: Path, folder: Path) -> Both:
    """What a run's model gives, and what a process without this package reads."""
    folder.mkdir()
    facts.main(directory, folder)
    with fork_server.own_starts():
        command = [sys.executable, "-P", plain_reader.__file__, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / facts.OWN), torch.load(folder / "plain.pt")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("export")
    tiny = make_tiny(folder, save_interval=-1)
    recipe = tiny.recipe("adapted", actor__model__is_lora=True, actor__model__lora__r=4, runner__max_steps=1)
    return read(shardtune.train(recipe).dir, folder / "facts")


def changed(part: Part, *keys: str | int, value: object) -> None:
    place: Any = part
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


def test_what_an_adapter_leaves_is_the_trained_model(adapted: Both) -> None:
    text = compared(*adapted)
    assert text.startswith(
        "final/, an exported directory, one with the adapter merged, loaded by transformers and PEFT"
    )
    for words in (
        "28 tensors of the adapter bit by bit",
        "27 tensors bit by bit",
        "logits on 4 rows",
        "4 greedy answers",
    ):
        assert words in text, text
    assert "texts and 6 rendered conversations alike" in text
    assert "not compared" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: changed(found, "merged", "tensors", "model.norm.weight", value=("float32", "")), "other bits"),
        (lambda found: changed(found, "merged", "tensors", "other", value=("float32", "")), "lacks other"),
        (lambda found: changed(found, "exported", "merge", value=(0.1, "q_proj")), "those that PEFT merges"),
        (lambda found: found["final"]["logits"][1].add_(0.01), "other logits on row 2"),
        (lambda found: changed(found, "final", "logits", 0, value=torch.zeros(1, 2)), "other logits on row 1"),
        (lambda found: changed(found, "merged", "answers", 0, value=([1], 0.3)), "answers prompt 1 otherwise"),
        (lambda found: changed(found, "merged", "shapes", value={"up": ((2, 3), (3, 2))}), "up in the shape [2, 3]"),
        (lambda found: changed(found, "merged", "stops", value=[0]), "does not stop at token 2"),
        (lambda found: changed(found, "final", "stops", value=[2, 40]), "stops at token 40 too"),
        (lambda found: changed(found, "final", "text", "special", "eos_token", value='"<pad>"'), "special token: eos"),
        (lambda found: changed(found, "final", "text", "template", value="{{ 1 }}"), "another chat template"),
        (lambda found: changed(found, "final", "text", "ids", 0, value=[1]), "splits text 1 into other tokens"),
        (lambda found: changed(found, "final", "text", "conversations", 1, value="?"), "at character 0 '<|im_start|>"),
    ],
)  # fmt: skip
def test_each_difference_is_named(adapted: Both, change: Callable[[Part], None], words: str) -> None:
    own, found = copy.deepcopy(adapted)
    change(found)
    with pytest.raises(Failed) as failure:
        compared(own, found)
    assert words in failure.value.what


def test_equally_likely_tokens_may_both_be_the_answer(adapted: Both) -> None:
    own, found = copy.deepcopy(adapted)
    tokens, _ = found["merged"]["answers"][0]
    changed(found, "merged", "answers", 0, value=([*tokens[:-1], 0], 1e-7))
    assert "4 greedy answers alike" in compared(own, found)


def test_a_directory_that_the_run_cannot_load_is_named(adapted: Both) -> None:
    own, found = copy.deepcopy(adapted)
    own["unusable"] = "lm_head.weight is missing"
    with pytest.raises(Failed, match="cannot be loaded by shardtune: lm_head"):
        compared(own, found)


def test_a_directory_is_read_by_the_backend_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes torchvision's where it is installed, whose pixels are others."""
    loaded, images = SimpleNamespace(image_processor=None), object()
    monkeypatch.setattr(plain_reader.AutoProcessor, "from_pretrained", lambda _: loaded)
    monkeypatch.setattr(plain_reader.AutoImageProcessor, "from_pretrained", lambda _, backend: images)
    assert plain_reader.inputs_of(tmp_path, [], tmp_path) == []
    assert loaded.image_processor is images


def test_a_processor_that_makes_no_pixels_is_not_said_to_be_alike(adapted: Both) -> None:
    own, plain = copy.deepcopy(adapted)
    own["inputs"] = [{"input_ids": torch.ones(1, 3), "pixel_values": torch.ones(2)}]
    for part in plain.values():
        part["inputs"] = [{"input_ids": torch.ones(1, 3)}]
    text = compared(own, plain)
    assert "rows with images alike" not in text
    assert "not compared: the processor's inputs, as final/ makes no pixel_values" in text


def test_other_names_of_classes_are_named(adapted: Both) -> None:
    own, found = copy.deepcopy(adapted)
    own["directories"]["final"]["labels"], found["final"]["labels"] = {0: "bad", 1: "good"}, {0: "good", 1: "bad"}
    with pytest.raises(Failed, match=r"final/ calls class 0 'good', which is 'bad' in training"):
        compared(own, found)


@pytest.mark.lengthy
def test_names_of_classes_are_read_on_both_sides(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model")
    write(tmp_path / "rows.jsonl", rows("sequence_classifier", 12))
    model = {"model_path": str(tmp_path / "model"), "model_type": "sequence_classifier", "precision": "fp32"}
    recipe = {
        "actor": {"global_batch_size": 6, "micro_batch_size": 6, "model": model},
        "data": {"train_data_paths": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")},
        "runner": {"max_steps": 1, "device": "cpu", "logger": {"log_path": str(tmp_path / "runs")}},
    }
    own, found = read(shardtune.train(recipe).dir, tmp_path / "facts")
    assert "tensors bit by bit" in compared(own, found)
    labels = found["final"]["labels"]
    labels[0], labels[1] = labels[1], labels[0]
    with pytest.raises(Failed, match=r"final/ calls class 0 '.*', which is '.*' in training"):
        compared(own, found)


@pytest.mark.lengthy
def test_a_policy_with_action_tokens_is_read_by_frames(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    save_episodes(tmp_path / "train", 2)
    keys = {"action_tokens": "appended", "num_action_bins": 16, "action_chunks_len": 2}
    model = {"model_path": str(tmp_path / "model"), "model_type": "vision_language_action", "precision": "fp32", **keys}
    recipe = {
        "runner": {"max_steps": 1, "logger": {"log_path": str(tmp_path), "experiment_name": "acts"}},
        "actor": {"global_batch_size": 2, "micro_batch_size": 2, "model": model},
        "data": {
            "train_data_paths": str(tmp_path / "train"), "cache_dir": str(tmp_path / "cache"), "num_workers": 0,
        },
    }  # fmt: skip
    (tmp_path / "facts").mkdir()
    own, job = facts.facts(shardtune.train(recipe), tmp_path / "facts")
    assert own["notes"] == ["the rendered prompts and the processor's inputs of rows, which are frames of robot data"]
    assert (own["inputs"], job["images"]) == ([], [])
