"""Model FLOPs utilisation (MFU) of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.parallel.cost.experts import Experts
from shardtune.parallel.token_layers import input_embedding

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16 operations per second by the name of the device, from the vendors' data sheets."""

UNKNOWN = "it is not known how much of this model a token is multiplied with"
_STACKED = ".experts."
"""In the names of parameters of which each token is multiplied with a part."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak operations per second of a device, None if unknown."""
    if device.type != "cuda" or precision not in ("bf16", "pure_bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name.replace("-", " ").split()), None)


def _share(name: str, parameter: nn.Parameter, experts: Experts | None) -> float:
    """The part of a parameter that a token is multiplied with: of experts those that it is sent to."""
    if experts is None:
        return 1.0
    stacked = parameter.dim() == 3 and parameter.shape[0] == experts.number and parameter.shape[1] > 1  # no convolution
    return experts.mean / experts.number if stacked or _STACKED in name else 1.0


def train_flops_per_token(num_parameters: float, num_layers: int, width: int, mean_length: float) -> float:
    """Operations of forward and backward per token: 6 per parameter, and attention to half the row (PaLM, app. B).

    A frozen parameter has no weight gradient, so it counts for two thirds of a trained one.
    """
    return 6.0 * num_parameters + 6.0 * num_layers * width * mean_length


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Achieved operations per second, relative to the devices' peak.

    Attributes:
        parameters: that a token is multiplied with: of a mixture of experts those it is routed to, and of the
            embeddings only the head.
        layers: of the model.
        width: of its hidden states.
        peak: operations per second of all ranks' devices together.
    """

    parameters: float
    layers: int
    width: int
    peak: float

    @classmethod
    def known(
        cls,
        model: nn.Module,
        device: torch.device,
        precision: str,
        num_ranks: int,
        sizes: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> Utilisation | None:
        """For a model on `num_ranks` such devices; None if the peak of the device is unknown.

        Args:
            sizes: for quantized parameters, the number of weights that they encode.
        """
        peak = peak_flops(device, precision)
        return None if peak is None else cls.of_model(model, peak * num_ranks, sizes)

    @classmethod
    def of_model(
        cls, model: nn.Module, peak: float, sizes: Mapping[nn.Parameter, int] = MappingProxyType({})
    ) -> Utilisation | None:
        """For devices of a known peak; None if it is not known what of the model a token is multiplied with.

        Args:
            model: as it was built.
            peak: operations per second of all devices together.
            sizes: as for `known`.
        """
        table = input_embedding(model) if isinstance(model, PreTrainedModel) else None
        if not isinstance(model, PreTrainedModel) or table is None:
            return None
        text = model.config.get_text_config()
        facts = text.to_dict()
        try:
            experts = Experts.of(facts)
        except KeyError:
            return None
        if experts is None and any(_STACKED in name for name, _ in model.named_parameters()):
            return None
        tied = bool(facts.get("tie_word_embeddings"))
        embedding = {id(parameter) for parameter in table.parameters()}
        parameters = sum(
            sizes.get(parameter, parameter.numel())
            * _share(name, parameter, experts)
            * (1.0 if parameter.requires_grad else 2 / 3)
            for name, parameter in model.named_parameters()
            if tied or id(parameter) not in embedding
        )
        return cls(parameters, int(text.num_hidden_layers), int(text.hidden_size), peak)

    def of(self, tokens_per_second: float, mean_length: float) -> float:
        """The utilisation of a step, between 0 and 1."""
        per_token = train_flops_per_token(self.parameters, self.layers, self.width, mean_length)
        return tokens_per_second * per_token / self.peak
