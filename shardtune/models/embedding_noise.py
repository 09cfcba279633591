"""NEFTune: uniform noise on the embeddings of tokens, in training (arXiv:2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardtune.batch import PackedBatch
from shardtune.models.sequence_part import SequencePart

NAME = "neftune"


@contextmanager
def embedding_noise(
    embeddings: nn.Module, batch: PackedBatch, alpha: float, part: SequencePart | None
) -> Iterator[None]:
    """Inside, a forward of these embeddings for a micro-batch adds noise to what they return.

    The numbers of a token lie in -a to a, where a = alpha / sqrt(tokens of its row * width). They are functions of the
    run's seed, the step, the row, the token's place in it and the dimension: the same on any ranks, in any micro-batch,
    and after a resume.

    Args:
        embeddings: maps tokens to [..., tokens, width].
        batch: of the forward.
        alpha: the scale of the noise.
        part: the tokens of this rank, where ranks share sequences; None: all.
    """
    lengths = batch.cu_seqlens.diff().long()
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(batch.input_ids)
    )
    starts, length = batch.cu_seqlens[:-1].long(), lengths[document]
    places = torch.arange(len(document), device=lengths.device) - starts[document]  # positions may be of several axes
    if part is not None:
        document, places = part.cut(document), part.cut(places)
        length = part.cut(length).clamp_(min=1)  # filled up with zeros to one size on all ranks
    draws = batch.draws

    def add(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        flat = output.reshape(-1, output.shape[-1])
        noise = draws.rand_tokens(NAME, flat, document, places).mul_(2).sub_(1)
        size = alpha / (length * flat.shape[-1]).to(noise.dtype).sqrt()
        return output + (noise * size[:, None]).to(output.dtype).view_as(output)

    handle = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
