"""What is used of PEFT, which is imported with the first adapter: it takes 24 MB and a fifth of a second."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig as LoraConfig
    from peft import PeftConfig as PeftConfig
    from peft import PeftModel as PeftModel
    from peft import TaskType as TaskType
    from peft import get_peft_model_state_dict as get_peft_model_state_dict
    from peft import inject_adapter_in_model as inject_adapter_in_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.lora import LoraLayer as LoraLayer
    from peft.tuners.lora.layer import Linear as Linear
    from peft.tuners.lora.layer import MultiheadAttention as MultiheadAttention
    from peft.tuners.lora.layer import ParamWrapper as ParamWrapper
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer as TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner as BaseTuner
    from peft.tuners.tuners_utils import BaseTunerLayer as BaseTunerLayer
    from peft.tuners.tuners_utils import check_target_module_exists as check_target_module_exists
    from peft.utils.other import AuxiliaryTrainingWrapper as AuxiliaryTrainingWrapper
    from peft.utils.other import TrainableTokensWrapper as TrainableTokensWrapper
    from peft.utils.other import get_pattern_key as get_pattern_key
    from peft.utils.peft_types import PeftType as PeftType
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as convert_peft_adapter_state_dict_for_transformers,
    )
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers as convert_peft_config_for_transformers,
    )

_HOMES = {
    "peft": (
        "LoraConfig",
        "PeftConfig",
        "PeftModel",
        "TaskType",
        "get_peft_model_state_dict",
        "inject_adapter_in_model",
    ),
    "peft.mapping": ("PEFT_TYPE_TO_CONFIG_MAPPING", "PEFT_TYPE_TO_TUNER_MAPPING"),
    "peft.tuners.lora": ("LoraLayer",),
    "peft.tuners.lora.layer": ("Linear", "MultiheadAttention", "ParamWrapper"),
    "peft.tuners.trainable_tokens.layer": ("TrainableTokensLayer",),
    "peft.tuners.tuners_utils": ("BaseTuner", "BaseTunerLayer", "check_target_module_exists"),
    "peft.utils.other": ("AuxiliaryTrainingWrapper", "TrainableTokensWrapper", "get_pattern_key"),
    "peft.utils.peft_types": ("PeftType",),
    "peft.utils.transformers_weight_conversion": (
        "convert_peft_adapter_state_dict_for_transformers",
        "convert_peft_config_for_transformers",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def is_imported() -> bool:
    """Whether PEFT is imported; until then no module is one of its classes."""
    return "peft" in sys.modules


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(name)
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
