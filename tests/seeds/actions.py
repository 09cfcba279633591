"""The samples of a guide for action models, as it prints them, and what is changed so that they run.

The guide is that of RLinf for models of Hugging Face under FSDP; its classes are a stranger's. Changes:

- `YourBaseModel` is imported from the stranger's package: `transformers` has no class of that name;
- `ValueHead` is imported from `shardtune`: there is no `rlinf` here;
- the two functions are registered by a decorator: the guide's author edits the system's own source;
- `hidden_size` and `image_size` are those of a small model;
- `attn_implementation` is `sdpa` where the package flash-attn or a GPU is missing, as transformers then refuses the
  printed one (which a test compares);
- names that the samples use and do not define are given in front of them: imports, and `torch_dtype_from_precision`;
- around the printed YAML there are the keys that it lacks: `plugins`, data, `tokenizer.tokenizer_model` and
  `model.model_path`, which the printed functions read, and what a test varies: `precision: fp64` for equal numbers.

All else stays as it is printed, the places of the files and the import between them included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers.utils import is_flash_attn_2_available

from tests.seeds.guide import Change, changed
from tests.support.foreign_action import forget
from tests.support.registry import nothing_registered

CONFIG = """\
def get_model_config_and_processor(cfg: DictConfig):
    if cfg.model.model_type == "your_model_type":
        from your_package.configuration import YourModelConfig
        from your_package.processing import YourImageProcessor, YourProcessor

        AutoConfig.register("your_model", YourModelConfig)
        AutoImageProcessor.register(YourModelConfig, YourImageProcessor)
        AutoProcessor.register(YourModelConfig, YourProcessor)

        model_config = AutoConfig.from_pretrained(
            cfg.tokenizer.tokenizer_model
        )
        image_processor = YourImageProcessor.from_pretrained(
            cfg.tokenizer.tokenizer_model,
            trust_remote_code=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            cfg.tokenizer.tokenizer_model,
            trust_remote_code=True,
            padding_side="left"
        )
        input_processor = YourProcessor.from_pretrained(
            cfg.tokenizer.tokenizer_model,
            tokenizer=tokenizer,
            image_processor=image_processor,
            trust_remote_code=True
        )

    return model_config, input_processor
"""
MODEL = """\
from transformers import YourBaseModel
from rlinf.models.embodiment.modules.value_head import ValueHead

class YourModelForRLActionPrediction(YourBaseModel):
    def __init__(self, config, hidden_size, unnorm_key, action_dim):
        super().__init__(config)
        self._init_logits_processor()
        action_norm_stats = self.get_action_stats(unnorm_key)
        self.min_action = np.array(action_norm_stats["q01"])
        self.max_action = np.array(action_norm_stats["q99"])
        self.value_head = ValueHead(hidden_size)
        self.action_dim = action_dim

    def _init_logits_processor(self):
        self.logits_processors = LogitsProcessorList()
        self.logits_processors.append(
            YourLogitsProcessor(self.config.n_action_bins)
        )

    @torch.no_grad()
    def predict_action_batch(
        self, input_ids=None, attention_mask=None, pixel_values=None,
        do_sample=True, **kwargs
    ):
        generated = self.generate(
            input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
            do_sample=do_sample,
            logits_processor=self.logits_processors,
            **kwargs
        )
        sequences = generated.sequences
        actions = sequences[:, -self.action_dim:]
        logits = torch.stack(generated.logits, dim=1)
        if hasattr(self, "value_head"):
            values = self.value_head(generated.hidden_states)
        else:
            values = torch.zeros_like(logits[..., :1])
        return actions, sequences, logits, values
"""
GET_MODEL = """\
def get_model(cfg: DictConfig, override_config_kwargs=None):
    torch_dtype = torch_dtype_from_precision(cfg.precision)
    model_path = cfg.model_path
    if cfg.model_type == "your_model_type":
        from .embodiment.your_model_action_model import (
            YourModelForRLActionPrediction
        )
        model = YourModelForRLActionPrediction.from_pretrained(
            model_path,
            torch_dtype=torch_dtype,
            hidden_size=cfg.hidden_size,
            unnorm_key=cfg.unnorm_key,
            action_dim=cfg.action_token_len,
            attn_implementation=cfg.attn_implementation,
            low_cpu_mem_usage=cfg.low_cpu_mem_usage,
            trust_remote_code=cfg.trust_remote_code,
        )

    if cfg.is_lora:
        # 在此添加 LoRA 支持
        pass

    return model
"""
RECIPE = """\
model:
  model_type: "your_model_type"
  action_token_len: 7
  action_chunks_len: 1
  unnorm_key: your_action_key
  micro_batch_size: 1
  val_micro_batch_size: 8
  precision: "bf16"
  vocab_size: 32000
  hidden_size: 4096
  image_size: [224, 224]
  is_lora: False
  attn_implementation: "flash_attention_2"
  low_cpu_mem_usage: True
  trust_remote_code: True
"""

IMPORTS = """\
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

from shardtune import register_model

torch_dtype_from_precision = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}.__getitem__


"""
MODEL_IMPORTS = """\
import numpy as np
import torch
from transformers import LogitsProcessorList
from your_package.modeling import YourLogitsProcessor

"""
"""What the samples use and do not define."""

EDITED = "the guide's author edits the system's own source; a user registers the function"
CONFIG_CHANGES = (
    Change(
        "def get_model_config_and_processor(",
        '@register_model("your_model_type", gives="config_and_processor")\ndef get_model_config_and_processor(',
        EDITED,
    ),
)
MODEL_CHANGES = (
    Change("from transformers import YourBaseModel", "from your_package.modeling import YourBaseModel", "its place"),
    Change("from rlinf.models.embodiment.modules.value_head import", "from shardtune import", "its place"),
)
GET_MODEL_CHANGES = (Change("def get_model(", '@register_model("your_model_type")\ndef get_model(', EDITED),)
SIZES = (
    Change("hidden_size: 4096", "hidden_size: 16", "the small model's size"),
    Change("image_size: [224, 224]", "image_size: [28, 28]", "the small model's size"),
)
NO_FLASH = (Change('"flash_attention_2"', '"sdpa"', "there is no flash-attn, or no GPU"),)
RECIPE_CHANGES = SIZES if is_flash_attn_2_available() else SIZES + NO_FLASH


def write_guide(folder: Path) -> None:
    """The printed files: `your_models`, a package for `plugins`, and `recipe.yaml`, its model in `model/`."""
    package = folder / "your_models"
    (package / "embodiment").mkdir(parents=True)
    (package / "embodiment" / "__init__.py").write_text("")
    functions = (changed(CONFIG, CONFIG_CHANGES), changed(GET_MODEL, GET_MODEL_CHANGES))
    (package / "__init__.py").write_text(IMPORTS + "\n\n".join(functions))
    model = MODEL_IMPORTS + changed(MODEL, MODEL_CHANGES)
    (package / "embodiment" / "your_model_action_model.py").write_text(model)
    lacking = f"plugins: [your_models]\ntokenizer:\n  tokenizer_model: {folder / 'model'}\n"
    recipe = changed(RECIPE, RECIPE_CHANGES) + f"  model_path: {folder / 'model'}\n"
    (folder / "recipe.yaml").write_text(lacking + recipe)


@contextmanager
def registering_anew(folder: Path) -> Iterator[None]:
    """Inside, nothing is registered yet, and processes that are started find the packages of a folder."""
    forget("your_models")
    with pytest.MonkeyPatch.context() as patch, nothing_registered():
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield


def overrides(folder: Path, name: str, others: Sequence[str]) -> list[str]:
    """The keys of a short run over the rows of a folder."""
    frames = folder / "frames.jsonl"
    return [
        *(f"data.train_data_paths={frames}", f"data.eval_data_paths={frames}", f"data.cache_dir={folder / 'cache'}"),
        *(f"runner.logger.log_path={folder / 'runs'}", f"runner.logger.experiment_name={name}"),
        *("runner.logger.logger_backends=[jsonl]", "runner.device=cpu", "runner.max_steps=2"),
        *("actor.global_batch_size=4", "actor.optim.lr=1e-3", "data.num_workers=0", "actor.model.precision=fp64"),
        *others,
    ]
