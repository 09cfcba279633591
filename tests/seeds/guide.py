"""The samples of a guide for adding a model, as it prints them, and what is changed so that they run.

The guide is that of RLinf for fine-tuning with FSDP and Hugging Face models. What differs from the print, each place a
`Change` below that names it and its reason; all else stays as it is printed:

- `from rlinf…` is `from shardtune import …`: another package. What the filled blanks use is imported beside it.
- `class SupportedModel(Enum)`: `Enum` is `shardtune.SupportedModel`. The print edits the Enum in the system's source,
  here a file of the reader's adds to it.
- The blanks (`...`, comments in place of code) are filled: rows, collate function and loader of the reader's own, the
  guide's own sample for training, and an evaluation that generates answers.
- The model, which the guide takes for granted, stands in the same file: `MY_NEW_MODEL` of transformers' classes without
  a cache, `PLAIN`, a module of torch's alone that returns an object of a plain class.
- Paths are those of the test. `plugins: […]` above the YAML names the file: the print adds it to the system's source.
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
        dataset = Sums(data_paths, self.tokenizer)
        # 3) Return data_loader and data_config(dict)
        data_loader = DataLoader(
            dataset,
            batch_size=self.cfg.actor.micro_batch_size,
            shuffle=not eval_dataset,
            drop_last=not eval_dataset,
            collate_fn=collate_prompts if eval_dataset else collate,
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
        inputs = {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}
        length = max(map(len, batch["answers"]))
        written = self.model.generate(**inputs, min_new_tokens=length, max_new_tokens=length, do_sample=False)
        # 2) Compare with ground truth
        given = batch["input_ids"].shape[1]
        answers = [[token for token in row if token] for row in written[:, given:].tolist()]
        # 3) Return number of correct samples
        correct = sum(answer == wanted for answer, wanted in zip(answers, batch["answers"]))
""",
    "a blank",
)
MY_NEW_MODEL = """\
class MyNewModelConfig(PreTrainedConfig):
    model_type = "my_new_model"

    def __init__(self, vocab_size=272, width=8, num_hidden_layers=2, **kwargs):
        self.vocab_size, self.width, self.num_hidden_layers = vocab_size, width, num_hidden_layers
        super().__init__(**kwargs)


class MyNewLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        return x + self.out(F.scaled_dot_product_attention(*self.mix(self.norm(x)).chunk(3, -1), attn_mask=mask))


class MyNewModel(PreTrainedModel, GenerationMixin):
    config_class = MyNewModelConfig
    _no_split_modules = ["MyNewLayer"]

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(MyNewLayer(config.width) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        x, length = self.embed(input_ids), input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            mask = mask & attention_mask[:, None].bool() | torch.eye(length, dtype=torch.bool, device=x.device)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register("my_new_model", MyNewModelConfig, exist_ok=True)
AutoModelForCausalLM.register(MyNewModelConfig, MyNewModel, exist_ok=True)
"""
DATA = """\
class Sums(Dataset):
    def __init__(self, paths, tokenizer):
        rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
        self.rows = [[tokenizer(row[name])["input_ids"] for name in ("question", "answer")] for row in rows]
        self.rows = [(question, [*answer, tokenizer.eos_token_id]) for question, answer in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def padded(rows, filler, left=False):
    width = max(map(len, rows))
    fillers = [[filler] * (width - len(row)) for row in rows]
    return torch.tensor([[*fill, *row] if left else [*row, *fill] for row, fill in zip(rows, fillers)])


def collate(rows):
    whole = [question + answer for question, answer in rows]
    labels = [[-100] * len(question) + answer for question, answer in rows]
    mask = padded([[1] * len(row) for row in whole], 0)
    return {"input_ids": padded(whole, 0), "attention_mask": mask, "labels": padded(labels, -100)}


def collate_prompts(rows):
    questions, answers = zip(*rows)
    mask = padded([[1] * len(question) for question in questions], 0, left=True)
    return {"input_ids": padded(questions, 0, left=True), "attention_mask": mask, "answers": answers}
"""
IMPORTS = Change(
    "from rlinf.workers.sft.fsdp_sft_worker import FSDPSftWorker\n",
    f"""\
from shardtune import FSDPSftWorker, SupportedModel as Enum, register_model
import json
from pathlib import Path
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


{MY_NEW_MODEL}

{DATA}
""",
    "names of imports, those that the blanks need, and the reader's own model and data set",
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
    return MyNewModel.from_pretrained(cfg.model_path)

{CLASS}""",
        "by a function that makes the model",
    ),
}
PLAIN = Change(
    f"""\
{CLASS}    def __init__(self, cfg: DictConfig):
        super().__init__(cfg)
""",
    f"""\
class Output:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(272, 8), nn.Linear(8, 272)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.embed(input_ids).tanh())
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@register_model("my_module")
{CLASS}    def __init__(self, cfg: DictConfig):
        super().__init__(cfg)

    def model_provider_func(self):
        return MyModule()
""",
    "a model that is not of transformers; the guide names the method, and what it has to return",
)


def changed(text: str, changes: tuple[Change, ...]) -> str:
    """A sample with its changes; each place has to be there, once."""
    for change in changes:
        assert text.count(change.printed) == 1, change
        text = text.replace(change.printed, change.here)
    return text
