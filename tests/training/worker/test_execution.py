"""`actor.model.gradient_checkpointing` and `compile` also apply to a model that a worker's own method makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, LlamaConfig, LlamaModel, PreTrainedModel, PreTrainedTokenizerFast

from shardtune import FSDPSftWorker, get_model
from shardtune.config import load_recipe
from shardtune.errors import ModelError
from tests.support.dist.ranks import run_ranks

STEPS = 2


class Layer(nn.Module):
    """Counts how often it is computed."""

    computed = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.computed += 1
        return x + torch.dropout(self.linear(x).tanh(), 0.3, self.training)


class Tower(nn.Module):
    """Layers of one's own beside a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2}
        self.text = LlamaModel(LlamaConfig(vocab_size=7, num_hidden_layers=2, **sizes))
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.text.get_submodule("layers.0.self_attn.q_proj").register_forward_hook(self._count)
        self.texts = 0

    def _count(self, *_: object) -> None:
        self.texts += 1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.text(ids).last_hidden_state
        for layer in self.layers:
            x = layer(x)
        return x


class Worker(FSDPSftWorker):
    def model_provider_func(self) -> nn.Module:
        torch.manual_seed(1)
        return Tower().double()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        rows: Any = [{"ids": row} for row in torch.arange(24).reshape(8, 3) % 7]
        return DataLoader(rows, batch_size=2), {"num_samples": 8}

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        return self.model(batch["ids"]).square().mean()

    def get_eval_model_output(self, batch: Any) -> Any:
        return {"rows": (0.0, len(batch["ids"]))}


class Alone(Worker):
    def model_provider_func(self) -> nn.Module:
        return nn.Linear(4, 4).double()


def worker(kind: type[Worker] = Worker, *, offloads: bool = False, **model: Any) -> Worker:
    return kind(
        load_recipe(
            {
                "actor": {
                    "worker": f"{__file__}:{kind.__name__}",
                    "micro_batch_size": 2,
                    "global_batch_size": 8,
                    "model": {"precision": "fp64", **model},
                    "fsdp_config": {
                        "wrap": ["Layer", "LlamaDecoderLayer"] if kind is Worker else None,
                        "cpu_offload": offloads,
                    },
                    "optim": {"name": "SGD", "lr": 0.1, "weight_decay": 0.0},
                },
                "data": {"train_data_paths": "made by the worker"},
                "runner": {"device": "cpu", "max_steps": STEPS, "logger": {"log_path": "runs"}},
            }
        )
    )


def trained(choices: tuple[dict[str, Any], ...]) -> list[tuple[list[float], list[float], int, int]]:
    """The losses and norms of the steps, and how often the layers of each kind were computed, for each choice."""
    told = []
    for model in choices:
        made = worker(**model)
        made.setup()
        Layer.computed = 0
        steps = [made.run_training() for _ in range(STEPS)]
        tower = made.inner_model
        assert isinstance(tower, Tower)
        told.append(
            ([s["train/loss"] for s in steps], [s["train/grad_norm"] for s in steps], Layer.computed, tower.texts)
        )
        made.release()
    return told


CHOICES = ({}, {"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.lengthy)])
def test_checkpointing_computes_twice_and_changes_nothing(ranks: int) -> None:
    for plain, *others in run_ranks(trained, ranks, CHOICES) if ranks > 1 else [trained(CHOICES)]:
        micro_batches = STEPS * 4 // ranks
        assert plain[2:] == (3 * micro_batches, micro_batches)
        for losses, norms, layers, texts in others:
            assert (losses, norms) == plain[:2]
            assert (layers, texts) == (6 * micro_batches, 2 * micro_batches)


def offloading_notes() -> list[str]:
    """What is said of host memory."""
    made = worker(offloads=True)
    made.setup()
    notes = [note for note in made.notes if "cpu_offload" in note]
    made.release()
    return notes


def test_offloading_on_one_rank_is_said_to_have_no_effect() -> None:
    (note,) = offloading_notes()
    assert "cpu_offload has no effect on one rank" in note
    assert run_ranks(offloading_notes, 2) == [[], []]


def test_a_model_without_units_is_refused() -> None:
    made = worker(Alone, gradient_checkpointing=True)
    with pytest.raises(ModelError, match="Linear has no units whose activations could be computed again"):
        made.setup()


def test_get_model_applies_it_to_a_named_task(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_labels": 2}
    BertConfig(vocab_size=9, num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    made = Tokenizer(WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path)
    keys = {"model_path": str(tmp_path), "model_type": "sequence_classifier", "options": {"labels": ["a", "b"]}}
    for checkpointing in (False, True):
        model = get_model({**keys, "gradient_checkpointing": checkpointing})
        assert isinstance(model, PreTrainedModel)
        assert model.is_gradient_checkpointing == checkpointing
