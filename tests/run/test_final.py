"""`final/` holds what the user's own loading code needs, and no failure after training withholds it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, CLIPImageProcessorPil, Qwen2ForCausalLM

import shardtune
from shardtune.errors import CheckpointError, ModelError
from shardtune.run.final import _compare, _finish
from shardtune.run.report.content import final_metrics
from shardtune.run.run import Run
from shardtune.run.stored_run import StoredRun
from tests.support.tiny_run import Tiny, make_tiny
from tests.training.worker import test_base as own

pytestmark = pytest.mark.lengthy


class Reader(shardtune.FSDPSftWorker):
    """A user's worker that reads the recipe's tokenizer directory itself, as the guides print it."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.text = AutoTokenizer.from_pretrained(cfg.actor.tokenizer.tokenizer_model)
        self.processor = CLIPImageProcessorPil(size={"shortest_edge": 20})

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> Any:
        ids = self.text(["say 1", "say 2", "say 3", "say 4"], return_tensors="pt")["input_ids"]
        rows: Any = [{"input_ids": row, "labels": row} for row in ids]
        return own.DataLoader(rows, batch_size=2), {"num_samples": 4}

    def get_train_model_output(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def get_eval_model_output(self, batch: Any) -> Any:
        return int((self.model(input_ids=batch["input_ids"]).logits.argmax(-1) >= 0).all(-1).sum())


class Fails(Reader):
    """Cannot be made again once a step is done."""

    def __init__(self, cfg: Any) -> None:
        if os.environ.get("TEST_FINAL_STEPPED"):
            raise ModelError("the codebook is missing", where="codes.pt", remedy="copy it")
        super().__init__(cfg)

    def run_training(self) -> dict[str, float]:
        os.environ["TEST_FINAL_STEPPED"] = "1"
        return super().run_training()


class Unsaved:
    """A processor that cannot be written."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        raise RuntimeError("no such codec")


class Holds(Reader):
    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.processor = Unsaved()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("final"), save_interval=-1)
    for name in ("preprocessor_config.json", "sentence_bert_config.json"):
        (made.folder / "model" / name).write_text(json.dumps({"base": True}))
    return made


def recipe(tiny: Tiny, kind: str, name: str, **changes: Any) -> dict[str, Any]:
    given = {
        "runner__max_steps": 1,
        "runner__device": "cpu",
        "actor__micro_batch_size": 2,
        "actor__global_batch_size": 4,
    }
    values = tiny.recipe(name, **given, actor__worker=f"{__file__}:{kind}", **changes)
    values["actor"]["tokenizer"] = {"tokenizer_model": str(tiny.folder / "model")}
    values["data"] = {"eval_data_paths": "made by the worker"}
    return values


@pytest.mark.parametrize("is_lora", [False, True])
def test_a_worker_that_reads_its_tokenizer_is_loaded_again(tiny: Tiny, is_lora: bool) -> None:
    lora = {"actor__model__is_lora": True} if is_lora else {}
    run = shardtune.train(recipe(tiny, "Reader", f"reader-{is_lora}", **lora))
    final = run.dir / "final"
    assert json.loads((final / "metrics.json").read_text())["eval/eval_accuracy"] == 1.0
    assert run.evaluate() == {"eval/eval_accuracy": 1.0}
    assert CLIPImageProcessorPil.from_pretrained(final).size["shortest_edge"] == 20  # the worker's, not the directory's
    assert AutoTokenizer.from_pretrained(final)("say")["input_ids"]
    assert (final / "sentence_bert_config.json").exists() is not is_lora
    if not is_lora:
        Qwen2ForCausalLM.from_pretrained(final)


def test_a_reload_that_fails_leaves_final_there(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FINAL_STEPPED", "")
    values = recipe(tiny, "Fails", "fails")
    with pytest.raises(ModelError) as error:
        shardtune.train(values)
    final = tiny.run("fails") / "final"
    assert f"{final} is written, but it cannot be loaded again and evaluated: the codebook is missing" in str(
        error.value
    )
    Qwen2ForCausalLM.from_pretrained(final)
    assert json.loads((final / "metrics.json").read_text())["step"] == 1
    monkeypatch.setenv("TEST_FINAL_STEPPED", "")
    run = shardtune.train(values)  # the same command evaluates it
    assert json.loads((run.dir / "final/metrics.json").read_text())["eval/eval_accuracy"] == 1.0


def test_what_cannot_be_saved_is_met_before_training(tiny: Tiny) -> None:
    with pytest.raises(
        CheckpointError, match="besides its weights cannot be saved: RuntimeError: no such codec"
    ) as error:
        shardtune.train(recipe(tiny, "Holds", "holds"))
    assert "Unsaved" in str(error.value)
    assert not tiny.run("holds").exists()


def test_metrics_without_an_evaluation_are_those_of_the_last_step(tiny: Tiny) -> None:
    """Also if the last step is none that is logged by its number."""
    run = shardtune.train(tiny.recipe("plain", runner__max_steps=3, runner__logger__log_interval=2))
    metrics = json.loads((run.dir / "FINAL" / "metrics.json").read_text())
    last = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics == last
    assert {"step", "epoch", "train/loss", "train/grad_norm", "train/learning_rate"} <= metrics.keys()
    assert metrics["step"] == 3


def test_losses_of_the_directory_that_are_not_those_of_training_are_reported(tmp_path: Path) -> None:
    """Of the last step alone, and by more than weights rounded to bf16 change them."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "eval/loss": 9.0}\n{"step": 3, "eval/loss": 2.0, "eval/a/loss": 1.0, "eval/small/loss": 0.001}\n'
    )
    for step, found, names in (
        (3, {"eval/loss": 1.0, "eval/a/loss": 1.005, "eval/accuracy": 0.5}, ["eval/loss of final/ is 1, and 2 in"]),
        (3, {"eval/loss": 2.01, "eval/a/loss": 1.1}, ["eval/a/loss of final/ is 1.1, and 1 in"]),
        (4, {"eval/loss": 1.0}, []),
        (3, {"eval/small/loss": 0.0012}, []),
    ):
        said: list[str] = []
        _compare(tmp_path, step, found, said.append)
        assert [line.partition(" training")[0] for line in said] == names


def test_scores_that_are_not_finite_are_null_in_files_and_nan_in_python(tmp_path: Path) -> None:
    """Strict parsers refuse the bare word NaN."""
    files = [tmp_path / "final" / "metrics.json", tmp_path / "manifest.json"]
    files[0].parent.mkdir()
    files[1].write_text("{}")
    (tmp_path / "config.yaml").write_text("{}")
    _finish(tmp_path, {"step": 3, "train/loss": None}, {"eval/loss": math.nan, "eval/perplexity": math.inf}, "")
    assert all("NaN" not in file.read_text() and "Infinity" not in file.read_text() for file in files)
    metrics = Run(tmp_path).metrics
    assert metrics["step"] == 3
    assert all(math.isnan(metrics[name]) for name in ("train/loss", "eval/loss", "eval/perplexity"))
    assert all(map(math.isnan, final_metrics(StoredRun.read(tmp_path)).values()))
    files[0].write_text('{"step": 3, "eval/loss": NaN}')  # as earlier versions wrote it
    assert math.isnan(Run(tmp_path).metrics["eval/loss"])


def test_weights_in_fp64_are_written_whole(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    keys = {"actor__model__precision": "fp64", "runner__final_dtype": "fp64", "runner__max_steps": 2}
    run = shardtune.train(tiny.recipe("wide", **keys))
    run.export(tmp_path / "exported", dtype="fp64")
    folders = run.dir / "final", tmp_path / "exported"
    final, exported = (Qwen2ForCausalLM.from_pretrained(folder, dtype="auto").state_dict() for folder in folders)
    with run.worker("latest") as worker:
        trained = {name: tensor.clone() for name, tensor in worker.inner_model.state_dict().items()}
        worker.release()
    for name, tensor in trained.items():
        assert final[name].dtype == torch.float64
        assert torch.equal(final[name], exported[name])
        assert torch.equal(final[name], tensor), name
    assert any(not torch.equal(tensor, tensor.float().double()) for tensor in final.values())
