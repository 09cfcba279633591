"""The samples of a guide for adding a model, as it prints them, and what is changed so that they run.

The guide is that of RLinf for fine-tuning with FSDP and Hugging Face models. A change is listed with its reason: names
of imports, the blanks (`...`, comments in place of code), and paths. All else stays as it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

WORKER = """\
from typing import Any
import torch
from omegaconf import DictConfig
from rlinf.workers.sft.fsdp_sft_worker import FSDPSftWorker

class FSDPMyModelSftWorker(FSDPSftWorker):
    def __init__(self, cfg: DictConfig):
        super().__init__(cfg)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False):
        # 1) Build dataset
        # 3) Return data_loader and data_config(dict)
        ...
        return data_loader, {"num_samples": len(dataset)}

    def get_train_model_output(self, batch: dict[str, Any]):
        # Core training logic
        # Return loss (Tensor)
        ...
        return loss

    def get_eval_model_output(self, batch: dict[str, Any]):
        # Core evaluation logic
        # Return number of correct samples in current batch (int)
        ...
        return correct_count
"""
TRAIN = """\
def get_train_model_output(self, batch):
    input_ids = batch["input_ids"].to(self.device)
    attention_mask = batch["attention_mask"].to(self.device)
    labels = batch["labels"].to(self.device)

    with self.amp_context:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
        )
    return outputs.loss
"""
EVALUATE = """\
def get_eval_model_output(self, batch):
    # 1) Generate prediction
    # 2) Compare with ground truth
    # 3) Return number of correct samples
    return correct
"""
ENUM = """\
class SupportedModel(Enum):
    ...
    MY_NEW_MODEL_SFT = ("my_new_model", "sft")
"""
MODEL = """\
actor:
  model:
    model_type: "my_new_model"
    model_path: "/path/to/your/model"
"""
RECIPE = """\
runner:
  task_type: sft
  max_epochs: 5
  val_check_interval: -1
  save_interval: -1

actor:
  training_backend: fsdp
  micro_batch_size: 2
  global_batch_size: 32
  model:
    model_type: my_new_model
    model_path: /path/to/model

data:
  train_data_paths: /path/to/train_path
  eval_data_paths: /path/to/eval_path
"""
PROVIDER = "model = get_model(self.cfg.actor.model)"
LOOP = """\
batch = next(self.data_iter)
losses = self.get_train_model_output(batch)
"""
ABSTRACT = """\
@abstractmethod
def build_dataloader(self):
    raise {error}
@abstractmethod
def get_train_model_output(self, batch: dict[str, Any]):
    raise {error}
@abstractmethod
def get_eval_model_output(self, batch: dict[str, Any]):
    raise {error}
"""


@dataclass(frozen=True)
class Change:
    """One place of a sample that is not as printed."""

    printed: str
    here: str
    why: str


FILL_DATA = Change(
    """\
        # 1) Build dataset
        # 3) Return data_loader and data_config(dict)
        ...
""",
    """\
        # 1) Build dataset
        dataset = [json.loads(line) for path in data_paths for line in Path(path).read_text().splitlines()]

        def collate(rows):
            prompts = [self.tokenizer(row["prompt"] + " ")["input_ids"] for row in rows]
            answers = [self.tokenizer(row["completion"])["input_ids"] for row in rows]
            length = max(len(prompt + answer) for prompt, answer in zip(prompts, answers))
            ids = torch.zeros(len(rows), length, dtype=torch.int64)
            mask, labels = ids.clone(), ids - 100
            for n, (prompt, answer) in enumerate(zip(prompts, answers)):
                size = len(prompt + answer)
                ids[n, :size] = torch.tensor(prompt + answer)
                mask[n, :size] = 1
                labels[n, len(prompt) : size] = ids[n, len(prompt) : size]
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}

        # 3) Return data_loader and data_config(dict)
        data_loader = DataLoader(
            dataset, batch_size=self.cfg.actor.micro_batch_size, shuffle=not eval_dataset, collate_fn=collate
        )
""",
    "a blank",
)
FILL_TRAIN = Change(
    """\
    def get_train_model_output(self, batch: dict[str, Any]):
        # Core training logic
        # Return loss (Tensor)
        ...
        return loss
""",
    indent(TRAIN, "    "),
    "a blank, for which the guide has a sample of its own",
)
FILL_EVALUATION = Change(
    """\
    def get_eval_model_output(self, batch: dict[str, Any]):
        # Core evaluation logic
        # Return number of correct samples in current batch (int)
        ...
        return correct_count
""",
    indent(EVALUATE, "    "),
    "a blank, for which the guide has a sample of its own",
)
FILL_COMPARISON = Change(
    """\
        # 1) Generate prediction
        # 2) Compare with ground truth
        # 3) Return number of correct samples
""",
    """\
        # 1) Generate prediction
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        # 2) Compare with ground truth
        wanted = batch["labels"][:, 1:]
        right = (logits[:, :-1].argmax(-1) == wanted) & (wanted >= 0)
        # 3) Return number of correct samples
        correct = int(right.any(-1).sum())
""",
    "a blank",
)
IMPORTS = Change(
    "from rlinf.workers.sft.fsdp_sft_worker import FSDPSftWorker\n",
    """\
from shardtune import FSDPSftWorker, SupportedModel as Enum, register_model
import json
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
""",
    "names of imports, and those that the blanks need",
)
FILE = (IMPORTS, FILL_DATA, FILL_TRAIN, FILL_EVALUATION, FILL_COMPARISON)

CLASS = "class FSDPMyModelSftWorker(FSDPSftWorker):\n"
REGISTERED = {
    # As the guide prints it, which adds to an Enum; here a subclass of it adds.
    "enum": Change(CLASS, f"{ENUM}\n{CLASS}", "the guide's own sample"),
    "decorator": Change(CLASS, f'@register_model("my_new_model", category="sft")\n{CLASS}', "by a decorator"),
    "function": Change(
        CLASS,
        f"""\
@register_model("my_new_model")
def my_new_model(cfg):
    return AutoModelForCausalLM.from_pretrained(cfg.model_path)

{CLASS}""",
        "by a function that makes the model",
    ),
}


def changed(text: str, changes: tuple[Change, ...]) -> str:
    """A sample with its changes; each place has to be there, once."""
    for change in changes:
        assert text.count(change.printed) == 1, change
        text = text.replace(change.printed, change.here)
    return text
