"""A worker of a stranger's over frames of an action model: prompts, images and actions as tokens, by its own code."""

WORKER = """\
import json
from pathlib import Path

import torch
from PIL import Image
from shardtune import FSDPSftWorker
from torch.utils.data import DataLoader
from transformers import AutoTokenizer


class YourWorker(FSDPSftWorker):
    def __init__(self, cfg):
        super().__init__(cfg)
        self._data_epoch = 0
        self._data_iter_offset = 0
        self.text = AutoTokenizer.from_pretrained(cfg.actor.tokenizer.tokenizer_model, padding_side="left")

    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = [
            json.loads(line) | {"folder": Path(path).parent}
            for path in data_paths
            for line in Path(path).read_text().splitlines()
        ]
        model = self.cfg.actor.model
        size = model.val_micro_batch_size if eval_dataset else model.micro_batch_size

        def collate(batch):
            images = [Image.open(row["folder"] / row["observation.image"]) for row in batch]
            made = self.processor(
                text=[f"<image>{row['instruction']}" for row in batch], images=images, padding=True
            )
            prompts = torch.tensor(made["input_ids"])
            actions = torch.tensor([[31999 - int((a + 1) / 2 * 255) for a in row["action"]] for row in batch])
            ids = torch.cat([prompts, actions], dim=1)
            mask = torch.cat([torch.tensor(made["attention_mask"]), torch.ones_like(actions)], dim=1)
            labels = torch.cat([torch.full_like(prompts, -100), actions], dim=1)
            pixels = torch.stack([torch.as_tensor(image) for image in made["pixel_values"]])
            return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}

        return DataLoader(rows, batch_size=size, collate_fn=collate), {"num_samples": len(rows)}

    def forward_of(self, batch):
        pixels = batch["pixel_values"].to(self.device, next(self.model.parameters()).dtype)
        return self.model(**{**batch, "pixel_values": pixels})

    def get_train_model_output(self, batch):
        return self.forward_of(batch).loss

    def get_eval_model_output(self, batch):
        guesses = self.forward_of(batch).logits[:, -8:-1].argmax(-1)
        return int((guesses == batch["labels"][:, -7:]).all(-1).sum())
"""
