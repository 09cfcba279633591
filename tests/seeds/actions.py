"""The samples of a guide for action models, as it prints them, and what is changed so that they run.

The guide is that of RLinf for models of Hugging Face under FSDP. A change is listed with its reason: names of imports,
what the print leaves out (blanks, paths), sizes of the small model of the test, and faults of the print. All else stays
as it is printed.
"""

from __future__ import annotations

from tests.seeds.guide import Change

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
import numpy as np
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, LogitsProcessorList

from shardtune import register_model
from shardtune.models.action.policy import ActionLogits
from shardtune.models.action.tokens import ActionTokens, Bins
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE

torch_dtype_from_precision = COMPUTE_DTYPE.__getitem__


class YourLogitsProcessor(ActionLogits):
    def __init__(self, n_action_bins):
        super().__init__(ActionTokens(32000, Bins(n_action_bins)))

"""
"""What the samples use and do not define."""

CONFIG_CHANGES = (
    Change(
        "        from your_package.configuration import YourModelConfig\n",
        "        from shardtune.models.action.openvla import OpenVLAConfig as YourModelConfig\n",
        "names of imports",
    ),
    Change(
        "        from your_package.processing import YourImageProcessor, YourProcessor\n",
        "        from shardtune.models.action.openvla_processor import PrismaticImageProcessor as YourImageProcessor\n"
        "        from shardtune.models.action.openvla_processor import PrismaticProcessor as YourProcessor\n",
        "names of imports",
    ),
    Change(
        'AutoConfig.register("your_model", YourModelConfig)',
        'AutoConfig.register("openvla", YourModelConfig)',
        "the name that the directory's config.json has",
    ),
    Change(
        "def get_model_config_and_processor(",
        '@register_model("your_model_type", gives="config_and_processor")\ndef get_model_config_and_processor(',
        "the guide's author edits the system's own source; a user registers the function",
    ),
)
MODEL_CHANGES = (
    Change(
        "from transformers import YourBaseModel\n",
        "from shardtune.models.action.openvla import OpenVLAForActionPrediction as YourBaseModel\n",
        "names of imports",
    ),
    Change(
        "from rlinf.models.embodiment.modules.value_head import ValueHead\n",
        "from shardtune import ValueHead\n",
        "names of imports",
    ),
    Change(
        "actions = sequences[:, -self.action_dim:]",
        "actions = self.decode_actions(sequences[:, -self.action_dim:])",
        "a fault of the print: token ids are no actions",
    ),
)
GET_MODEL_CHANGES = (
    Change(
        """\
        from .embodiment.your_model_action_model import (
            YourModelForRLActionPrediction
        )
""",
        "",
        "names of imports: the class stands in the same file",
    ),
    Change(
        "def get_model(",
        '@register_model("your_model_type")\ndef get_model(',
        "the guide's author edits the system's own source; a user registers the function",
    ),
)
RECIPE_CHANGES = (
    Change("hidden_size: 4096", "hidden_size: 16", "the small model's size"),
    Change("image_size: [224, 224]", "image_size: [28, 28]", "the small model's size"),
    Change('"flash_attention_2"', '"sdpa"', "there is no GPU"),
)
