"""The layers of a model of transformers that have an entry for each token."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The layer that embeds tokens; None for a model that names none, or a bare parameter in its place (Perceiver)."""
    try:
        found: object = model.get_input_embeddings()
    except RuntimeError:  # of a class that does not say which of its modules it is
        return None
    return found if isinstance(found, nn.Module) else None
