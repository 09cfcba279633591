"""A worker of a stranger's over frames of an action model: prompts, images and actions as tokens, by its own code."""

WORKER = """\
import json
from pathlib import Path

import torch
from PIL import Image
from shardtune import FSDPSftWorker
from torch.utils.data import DataLoader


class YourWorker(FSDPSftWorker):
    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = [
            json.loads(line) | {"folder": Path(path).parent}
            for path in data_paths
            for line in Path(path).read_text().splitlines()
        ]
        model = self.cfg.actor.model
        size = model.val_micro_batch_size if eval_dataset else model.micro_batch_size
        return DataLoader(rows, batch_size=size, collate_fn=self.collate), {"num_samples": len(rows)}

    def collate(self, rows):
        images = [Image.open(row["folder"] / row["observation.image"]) for row in rows]
        made = self.processor(text=[f"{row['instruction']}?" for row in rows], images=images)
        prompts = made["input_ids"]
        actions = torch.tensor([[31999 - int((a + 1) / 2 * 255) for a in row["action"]] for row in rows])
        return {
            "input_ids": torch.cat([prompts, actions], dim=1),
            "attention_mask": torch.cat([made["attention_mask"], torch.ones_like(actions)], dim=1),
            "labels": torch.cat([torch.full_like(prompts, -100), actions], dim=1),
            "pixel_values": made["pixel_values"],
        }

    def get_train_model_output(self, batch):
        with self.amp_context:
            return self.model(**batch).loss

    def get_eval_model_output(self, batch):
        length = self.model.action_dim
        prompts = {name: batch[name][:, :-length] for name in ("input_ids", "attention_mask")}
        actions, sequences, logits, values = self.model.predict_action_batch(
            **prompts, pixel_values=batch["pixel_values"], do_sample=False, max_new_tokens=length
        )
        right = actions == batch["labels"][:, -length:]
        chosen = logits.gather(2, actions[..., None]).double().sum()
        return {
            "right": (int(right.sum()), right.numel()),
            "logit": (float(chosen), right.numel()),
            "value": (float(values.double().sum()), values.numel()),
        }
"""
