"""What of a mixture of experts a token is multiplied with, by its config, is what its forward computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardtune.parallel.cost.experts import Experts
from shardtune.training.utilisation import Utilisation
from tests.support.chosen import slow_except
from tests.support.tiny_architectures import DECODERS, tiny_config

TOKENS = 12
NAMED_OTHERWISE = ("aria_text", "bailing_hybrid", "deepseek_v3", "ernie4_5_moe", "gemma4_text", "hunyuan_v1_moe")
"""Those whose configs have other names than `num_experts` and `num_experts_per_tok`."""
FURTHER = (
    "afmoe", "axk1", "axk2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v32", "deepseek_v4", "dots1",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hy_v3", "hy_v4", "inkling2_text", "inkling_text", "jamba", "jetmoe",
    "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "solar_open",
)  # fmt: skip
DIFFERENT = ("deepseek_v4", "gpt_oss", "jetmoe", "minimax_m3_vl_text", "nemotron_h", "qwen3_moe")
"""Some of the further ones: experts of one matrix, in attention, beside shared ones, and in some layers alone."""
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
}


def built(family: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family, {**DECODERS.get(family, {}), **OWN.get(family, {})})
    model: Any = AutoModelForCausalLM.from_config(config)
    if model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def computed(model: Any) -> float:
    """The parameters that a token is multiplied with in experts, by the operations of a forward of some tokens."""
    stacked = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if is_expert(name, parameter)}
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    counts = counter.get_flop_counts()
    return sum(sum(counts[f"{type(model).__name__}.{name}"].values()) for name in stacked) / (2 * TOKENS)


def is_expert(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 3 and parameter.shape[0] == 4 and "conv" not in name


@pytest.mark.parametrize("family", slow_except([*NAMED_OTHERWISE, *FURTHER], *NAMED_OTHERWISE, *DIFFERENT))
def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to(family: str) -> None:
    model = built(family)
    found = Utilisation.of_model(model, 1.0)
    assert found is not None
    text = model.config.get_text_config().to_dict()
    looked_up = [] if text.get("tie_word_embeddings") else [id(p) for p in model.get_input_embeddings().parameters()]
    others = {name: p for name, p in model.named_parameters() if not is_expert(name, p) and id(p) not in looked_up}
    biases = sum(p.numel() for name, p in others.items() if ".experts." in name) / 2  # of the experts that are met
    whole = sum(p.numel() for name, p in others.items() if ".experts." not in name)
    assert found.parameters == pytest.approx(
        whole + biases + computed(model), rel=1e-4
    )  # biases that are not trained count less
    assert computed(model) > 0


def test_what_is_not_known_is_not_guessed() -> None:
    """Of LongCat's experts some compute nothing; how many a token meets is the router's choice."""
    assert Utilisation.of_model(built("longcat_flash"), 1.0) is None
    model = built("qwen3_moe")
    model.config.num_local_experts = 0
    assert Utilisation.of_model(model, 1.0) is None


def test_experts_of_a_config() -> None:
    assert Experts.of({"num_experts": 8, "moe_topk": [1, 2, 4], "num_hidden_layers": 2}) == Experts(8, (1, 2))
    assert Experts(8, (1, 2)).mean == 1.5
    assert Experts.of({"num_experts": 16384, "num_experts_per_tok": 64, "is_moe": False}) is None
    assert Experts.of({"num_local_experts": 0, "num_experts_per_tok": 2}) is None
    with pytest.raises(KeyError, match="moe_topk"):
        Experts.of({"n_routed_experts": 8})
