"""A model that computes a padded row otherwise gives each row the numbers that it has alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    FNetConfig,
    FNetModel,
    FunnelConfig,
    FunnelModel,
    PreTrainedModel,
    XLNetConfig,
    XLNetModel,
)

import shardtune
from shardtune.batch import Batch
from shardtune.models.tasks.padding_probe import padding_changes
from shardtune.models.tasks.task import ONE_LENGTH, PADDED_TEXTS
from shardtune.run.plain_model import load_run_or_model
from tests.support.plain_tasks import LABELS
from tests.support.tiny_tasks import SIZES, rows, save_tokenizer, write

PLAIN: dict[str, Any] = {
    "sequence_classifier": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
}


def made(kind: str) -> PreTrainedModel:
    """A tiny encoder without a mask (FNet), with pooled neighbours (Funnel), that reads its last position (XLNet)."""
    torch.manual_seed(0)
    if kind == "fnet":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
        return FNetModel(FNetConfig(**sizes, **SIZES, initializer_range=0.3, hidden_dropout_prob=0.0)).double()
    if kind == "funnel":
        sizes = {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24}
        return FunnelModel(FunnelConfig(**sizes, **SIZES, initializer_range=0.3, initializer_std=0.3)).double()
    return XLNetModel(XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=24, **SIZES, initializer_range=0.3))


def trained(folder: Path, kind: str, task: str, *, evaluates: bool = True) -> shardtune.Run:
    made(kind).save_pretrained(folder / kind)
    save_tokenizer(folder / kind)
    return shardtune.train(
        {
            "runner": {"max_steps": 2, "device": "cpu", "logger": {"log_path": str(folder), "experiment_name": "run"}},
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optim": {"lr": 1e-2},
            "model": {
                "model_type": task, "model_path": str(folder / kind),
                "precision": "fp32" if kind == "xlnet" else "fp64",
            },
            "data": {
                "train_data_paths": write(folder / "train.jsonl", rows(task, 24)), "max_length": 32, "num_workers": 0,
                "eval_data_paths": write(folder / "eval.jsonl", rows(task, 11, 1)) if evaluates else None,
                "cache_dir": str(folder / "cache"),
            },
        }
    )  # fmt: skip


@torch.no_grad()
def alone(directory: Path, task: str, row: dict[str, Any]) -> torch.Tensor:
    """The logits of a row by plain transformers."""
    model, tokenizer = PLAIN[task].from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    text = row.get("text", row.get("tokens"))
    return model(**tokenizer(text, is_split_into_words="tokens" in row, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("kind", ["fnet", "xlnet"])
def test_loss_and_predictions_are_those_of_rows_alone(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    task = "sequence_classifier"
    run = trained(tmp_path, kind, task)
    assert ONE_LENGTH[:40] in capfd.readouterr().err
    final, losses = run.dir / "final", []
    for row in rows(task, 11, 1):
        losses.append(-float(alone(final, task, row).double().log_softmax(-1)[LABELS.index(row["label"])]))
    close = 1e-12 if kind == "fnet" else 1e-6
    assert run.metrics["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=close)
    asked = [{"text": row["text"]} for row in rows(task, 9, 2)]
    for source in (run, load_run_or_model(shutil.copytree(final, tmp_path / "copy"))):
        for row, found in zip(asked, source.predict(asked), strict=True):
            expected = alone(final, task, row).double().softmax(-1)
            assert [found["scores"][label] for label in LABELS] == pytest.approx(expected.tolist(), abs=close)


def test_words_of_a_pooling_model_have_the_labels_of_their_row_alone(tmp_path: Path) -> None:
    run = trained(tmp_path, "funnel", "token_classifier")
    names = json.loads((run.dir / "final" / "config.json").read_text())["id2label"]
    asked = [{"tokens": row["tokens"]} for row in rows("token_classifier", 12, 2)]
    for row, found in zip(asked, run.predict(asked), strict=True):
        guesses = alone(run.dir / "final", "token_classifier", row).argmax(-1)[1:-1]  # without the two marks
        assert found["labels"] == [names[str(int(number))] for number in guesses]


def test_rows_of_several_texts_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "fnet", "reranker")
    assert PADDED_TEXTS[:40] in capfd.readouterr().err


def test_a_model_that_computes_no_other_length_trains_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a probe cannot compute is no reason not to train."""
    compute = FNetModel.forward

    def limited(model: FNetModel, input_ids: torch.Tensor, **arguments: Any) -> Any:
        if len(input_ids) == 1:
            raise ValueError("a row has no other beside it")
        return compute(model, input_ids, **arguments)

    monkeypatch.setattr(FNetModel, "forward", limited)
    trained(tmp_path, "fnet", "sequence_classifier", evaluates=False)
    assert "was not compared, as it computes no shortened row: ValueError: a row has no" in " ".join(
        capfd.readouterr().err.split()
    )


@pytest.mark.parametrize(("length", "shortest"), [(8, 7), (7, 6), (4, None)])
def test_an_even_and_an_odd_number_of_tokens_are_compared(length: int, shortest: int | None) -> None:
    """Neighbours are pooled in pairs: of 8 tokens each has its own, of 7 the last one has padding beside it."""
    lengths: list[int] = []

    def pooled(batch: Batch) -> dict[str, torch.Tensor]:
        tokens = batch["input_ids"].double()
        lengths.append(tokens.shape[-1])
        return {"pairs": F.avg_pool1d(tokens, 2, ceil_mode=True, count_include_pad=False)}

    batch = Batch(rows=(0,), fields={"input_ids": torch.arange(1, length + 1)[None]})
    changes = padding_changes(pooled, batch, {"input_ids": -1}, most=None, dtype=torch.float64)
    assert changes is (shortest is not None)
    assert min(lengths) == (shortest or length)
