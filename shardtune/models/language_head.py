"""The head of a language model: what enters it, the transform of its logits, the model's own way through it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from shardtune.batch import PackedBatch
from shardtune.models.loss import IDENTITY, LogitTransform, accumulation_dtype, chunk_rows
from shardtune.models.sequence_part import SequencePart
from shardtune.models.user_metrics import Prediction


@dataclass(frozen=True, slots=True)
class AtHead:
    """A forward up to the model's head.

    Attributes:
        hidden: [requested tokens of this rank, width], the head's input; the logits where there is no head left.
        head: the head, or None.
        transform: of the head's output; IDENTITY where there is no head left.
        routers: [tokens of this rank, experts] of each layer; empty without a balance loss.
        part: the tokens of this rank, where ranks share sequences; None: all.
        values: [requested tokens], of a value head that is trained; None without one.
    """

    hidden: torch.Tensor
    head: nn.Module | None
    transform: LogitTransform
    routers: tuple[torch.Tensor, ...]
    part: SequencePart | None
    values: torch.Tensor | None = None

    @property
    def logits(self) -> torch.Tensor:
        """[requested tokens of this rank, vocabulary], computed at once."""
        return self.logits_from(self.hidden)

    def logits_from(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary]: of other hidden states [tokens, width], or of some of these."""
        return hidden if self.head is None else self.transform(self.head(hidden))


def own_forward(
    model: nn.Module,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    arguments: Mapping[str, object],
    *,
    leads: bool = False,
) -> tuple[ModelOutput, torch.Tensor]:
    """The outputs of a model's own forward, and its logits [positions, vocabulary].

    Args:
        model: the model.
        sequences: int64 [rows, tokens].
        positions: int64 [positions], of all rows end to end.
        arguments: of the forward besides.
        leads: there may be logits of other positions before those of the tokens (GIT's of an image).
    """
    takes = inspect.signature(model.forward).parameters
    if "logits_to_keep" in takes and len(sequences) == 1 and not leads:
        outputs = model(input_ids=sequences, use_cache=False, logits_to_keep=positions, **arguments)
        return outputs, outputs.logits[0]
    outputs = model(input_ids=sequences, use_cache=False, **arguments)
    logits = outputs.logits[:, -sequences.shape[1] :] if leads else outputs.logits
    return outputs, logits.flatten(0, 1).index_select(0, positions)


def target_predictions(at: AtHead, batch: PackedBatch, vocabulary: int) -> Iterator[Prediction]:
    """The logits at the targets, in chunks of the loss's size."""
    hidden = at.hidden if at.part is None else at.part.gather(at.hidden)
    size = chunk_rows(hidden.device, vocabulary)
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        logits = at.logits_from(hidden[rows])
        yield Prediction(logits.to(accumulation_dtype(logits.dtype)), batch.targets[rows], batch.target_weights[rows])


def declared_transform(config: PreTrainedConfig) -> LogitTransform:
    """The transform of the logits that the model's config declares; the packing probe checks it."""
    values = config.get_text_config().to_dict()
    scale = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
    softcap = values.get("final_logit_softcapping")
    return LogitTransform(scale, softcap) if scale != 1.0 or softcap else IDENTITY
