"""A model that acts, in a user's worker: training, `generate` and methods of its class, on 2 ranks as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune import FSDPSftWorker, ValueHead
from shardtune.config import load_recipe
from shardtune.models.action.openvla import OpenVLA
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_openvla import HIDDEN, save_openvla

CASES = (("fsdp", False), ("ddp", True))
PROMPT, ACTION = 6, 3


class Acting(OpenVLA):
    """A method as the guide for action models prints it, and one that uses weights directly."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value_head = ValueHead(HIDDEN)
        self.gain = nn.Parameter(torch.empty(HIDDEN))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:  # which `from_pretrained` calls for what the directory does not have
            nn.init.constant_(self.gain, 1.5)

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        pixel_values: Any = None,
        do_sample: bool = True,
        **kwargs: Any,
    ) -> Any:
        generated = self.generate(
            input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
            do_sample=do_sample,
            **kwargs,
        )
        sequences = generated.sequences
        logits = torch.stack(generated.logits, dim=1)
        return sequences[:, -ACTION:], sequences, logits, self.value_head(generated.hidden_states)

    def likeness(self, input_ids: torch.Tensor) -> torch.Tensor:
        words = self.get_input_embeddings()(input_ids).mean(1) * self.gain
        return (words @ self.get_output_embeddings().weight.T).amax(1)


def data() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number in range(8):
        words = torch.randint(300, 400, (PROMPT - 1,), generator=draw)
        ids = torch.cat([torch.tensor([1]), words, torch.randint(31744, 32000, (ACTION,), generator=draw)])
        labels = ids.clone()
        labels[: PROMPT + number % 2] = -100
        image = torch.randn(6, 28, 28, generator=draw, dtype=torch.float64)
        rows.append({"input_ids": ids, "labels": labels, "pixel_values": image})
    return rows


class Worker(FSDPSftWorker):
    def model_provider_func(self) -> nn.Module:
        return Acting.from_pretrained(self.cfg.actor.model.model_path, dtype=torch.float64)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> Any:
        rows: Any = data()[: 6 if eval_dataset else 8]  # three batches for two ranks
        return DataLoader(rows, batch_size=2), {"num_samples": len(rows)}

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        model: Any = self.model
        outputs = model(**{name: batch[name] for name in ("input_ids", "labels", "pixel_values")})
        return outputs.loss

    def get_eval_model_output(self, batch: Any) -> Any:
        model: Any = self.model
        ids = batch["input_ids"][:, :PROMPT]
        given = {"pixel_values": batch["pixel_values"], "do_sample": False}
        ending = int(batch["input_ids"][0, 1]) % 2 + 1  # answers of the ranks have different lengths
        ids_only = model.generate(ids, max_new_tokens=ACTION * ending, min_new_tokens=1, **given)
        actions, _, logits, values = model.predict_action_batch(
            ids, max_new_tokens=ACTION, min_new_tokens=ACTION, **given
        )
        size = float(len(ids))
        found = {
            "ids": ids_only,
            "actions": actions,
            "logits": logits,
            "values": values,
            "likeness": model.likeness(ids),
        }
        return {name: (float(tensor.double().abs().sum()), size) for name, tensor in found.items()}


def numbers(folder: str, backend: str, lora: bool) -> list[float]:
    adapter = {"is_lora": True, "lora": {"r": 4, "alpha": 4}} if lora else {}
    recipe = load_recipe(
        {
            "actor": {
                "training_backend": backend,
                "worker": f"{__file__}:Worker",
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "model": {"model_path": folder, "precision": "fp64", **adapter},
                "optim": {"name": "SGD", "lr": 0.01, "clip_grad": None, "lr_scheduler": "constant"},
            },
            "data": {"train_data_paths": folder, "eval_data_paths": folder},
            "runner": {"device": "cpu", "max_epochs": 2, "logger": {"log_path": f"{folder}/runs"}},
        }
    )
    worker = Worker(recipe)
    worker.setup()
    first = worker.run_training()
    acted = worker.run_eval()  # by trained weights, and before a step that it must not disturb
    second = worker.run_training()
    worker.release()
    taken = [step[name] for step in (first, second) for name in ("train/loss", "train/grad_norm")]
    return [*taken, *(acted[name] for name in sorted(acted))]


def all_numbers(folder: str) -> list[list[float]]:
    return [numbers(folder, *case) for case in CASES]


@pytest.mark.lengthy
def test_training_and_acting_are_those_of_one_rank(tmp_path: Path) -> None:
    save_openvla(tmp_path)
    expected = {lora: numbers(str(tmp_path), "fsdp", lora) for lora in (False, True)}
    for found in run_ranks(all_numbers, 2, str(tmp_path), timeout=200):
        for (backend, lora), told in zip(CASES, found, strict=True):
            assert told == pytest.approx(expected[lora], rel=1e-12), backend
