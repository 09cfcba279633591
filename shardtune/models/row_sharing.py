"""Which rows of a micro-batch share a forward of a language model, and with which attention it computes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from shardtune.batch import PackedBatch
from shardtune.errors import ModelError
from shardtune.models.adapter import cannot_share_sequences
from shardtune.models.attention_implementation import (
    AUTO,
    attention_name,
    set_attention,
    takes_boundaries,
    under_attention,
)
from shardtune.models.mixers import STATE, Mixers
from shardtune.models.packed_attention import DOCUMENTS
from shardtune.models.packing_limit import PackingLimit
from shardtune.models.packing_probe import WITHOUT_BOUNDARIES
from shardtune.models.sequence_part import SequencePart
from shardtune.parallel.sequence_parallel import TokenShare


class RowSharing:
    """The way in which rows share a forward.

    Rows are packed end to end where the model's code can keep them apart; the packing probe then switches off what is
    not exact. What is left is one of: rows packed; packed, each by itself in layers with a state; rows of one length as
    a batch; one row.

    Args:
        requested: the recipe's `attn_implementation`.
        limit: up to which length packing is exact; None: any.

    Attributes:
        packs: whether rows are packed.
        by_length: whether rows of one length are a batch.
        batches: whether they may be, as far as the adapter knows.
        attention: the implementation in training.
        mixes: whether layers carry a state from token to token.
        among_ranks: whether ranks share sequences.
        rings: whether these exchange keys and values instead of heads.
    """

    def __init__(self, requested: str, limit: PackingLimit | None) -> None:
        self.packs = self.by_length = self.mixes = self.among_ranks = self.rings = False
        self.batches = True
        self.attention = ""
        self._requested = requested
        self._limit = limit
        self._own_attention = ""
        self._mixers = Mixers()
        self._takes_places = False
        self._longest, self._proved = 0, False
        self._ranks: DeviceMesh | None = None

    def prepare(self, model: PreTrainedModel) -> None:
        """Choose the fastest way that the model's code allows, and set its attention."""
        takes = inspect.signature(model.base_model.forward).parameters
        keywords = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        self._own_attention = attention_name(model)
        self._takes_places = "position_ids" in takes
        self._mixers = Mixers.of(model)  # which need no positions
        self.mixes = len(self._mixers) > 0
        self.packs = keywords and (self._takes_places or self.mixes)
        self.attention = self._own_attention
        if self._requested == AUTO:
            replaceable = model._can_set_attn_implementation()
            self.packs = self.packs and (replaceable or self.mixes)
            self.attention = DOCUMENTS if self.packs and replaceable else self._own_attention
        set_attention(model, self.attention)

    def restore(self, model: nn.Module) -> None:
        """Undo `prepare`."""
        set_attention(model, self._own_attention)
        self._mixers.run_row_by_row(False)

    # -- what the packing probe switches off -------------------------------------------------------------------------

    @property
    def leaks(self) -> str:
        """Why packed rows cannot run through layers with a state together, as the layers show; empty if they may."""
        return WITHOUT_BOUNDARIES if self._mixers.without_boundaries else ""

    def mix_row_by_row(self) -> bool:
        """Let each packed row run through layers with a state by itself; returns whether the model has any."""
        self._mixers.run_row_by_row(self.mixes)
        return self.mixes

    def one_row_per_forward(self, model: nn.Module, why: str = "") -> None:
        """Stop packing: from now on each forward holds one row, with the model's own attention.

        Raises:
            ParallelError: ranks share sequences, which no attention but ours computes; names `why`.
        """
        if self.among_ranks:
            raise cannot_share_sequences(type(model).__name__, why or "its rows cannot be packed")
        self.packs, self.attention = False, self._own_attention
        self._mixers.run_row_by_row(False)
        set_attention(model, self.attention)

    def share_by_length(self, on: bool) -> bool:
        """Put rows of one length into a forward as a batch, without packing; returns whether that is possible."""
        self.by_length = on and self.batches and not self.packs
        return self.by_length

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """What is switched off within a `with` block is on again behind it."""
        before = self.packs, self.by_length, self.attention, self._mixers.row_by_row
        try:
            yield
        finally:
            self.packs, self.by_length, self.attention, row_by_row = before
            self._mixers.run_row_by_row(row_by_row)
            set_attention(model, self.attention)

    def prove(self) -> None:
        """Rows are packed, if they are, for good: the probe has compared them."""
        self._proved = self.packs

    # -- how long a packed row may be --------------------------------------------------------------------------------

    def check_longest(self, tokens: int, locate: Callable[[], str]) -> None:
        """Keep the length of the longest row, in tokens.

        Raises:
            ModelError: rows are packed for good, and this one is too long for that.
        """
        self._longest = max(self._longest, tokens)
        too_long = self.too_long if self._proved else ""
        if too_long and self._limit is not None:
            raise ModelError(
                f"{too_long}; rows of files that were read before are packed",
                where=locate(),
                remedy=f"lower data.max_length to {self._limit.tokens}",
            )

    @property
    def too_long(self) -> str:
        """Why the longest row cannot be packed; empty if it can."""
        limit = self._limit
        if limit is None or self._longest <= limit.tokens:
            return ""
        return f"{limit.reason}, and a row has {self._longest:,} tokens, more than {limit.tokens:,}"

    # -- ranks that share sequences ----------------------------------------------------------------------------------

    def check_sequences(self, model: nn.Module) -> None:
        """Refuse a model whose sequences ranks cannot share.

        Raises:
            ParallelError: attention is not ours, or layers carry a state.
        """
        if self.attention != DOCUMENTS:
            what = f"{type(model).__name__} with attn_implementation {self.attention}"
            raise cannot_share_sequences(what, "attention is not ours")
        if self.mixes:
            raise cannot_share_sequences(type(model).__name__, STATE.format(self._mixers.names))

    def share_sequences(self, model: nn.Module, ranks: DeviceMesh, *, rings: bool) -> None:
        """Divide the tokens of each forward among ranks.

        Args:
            model: the model.
            ranks: that share sequences.
            rings: whether they exchange keys and values instead of heads.

        Raises:
            ParallelError: a row is too long to be packed.
        """
        if self.too_long:
            raise cannot_share_sequences(type(model).__name__, self.too_long)
        self._ranks, self.among_ranks, self.rings = ranks, True, rings

    def part(self, batch: PackedBatch, positions: torch.Tensor) -> SequencePart:
        """This rank's part of a forward in which some tokens are requested, where ranks share sequences."""
        assert self._ranks is not None
        if self.rings:
            share = TokenShare.in_ring(batch.cu_seqlens.tolist(), self._ranks)
        else:
            share = TokenShare.of(len(batch.input_ids), self._ranks)
        return SequencePart.of(share, positions)

    # -- forwards ----------------------------------------------------------------------------------------------------

    def sequences(self, batch: PackedBatch) -> int:
        """Number of sequences of a forward of rows by length: 1, or the rows if all have the same length.

        3 rows of 7 tokens, packed into 21, become a batch [3, 7]; rows of 7, 7 and 6 tokens stay [1, 20].
        """
        rows = len(batch.document_weights)
        return rows if rows * batch.max_length == len(batch.input_ids) else 1

    def arguments(self, batch: PackedBatch, position_ids: torch.Tensor) -> dict[str, object]:
        """The arguments of a forward that keep its rows apart.

        Args:
            batch: the rows.
            position_ids: int64 [..., tokens of this rank].
        """
        found: dict[str, object] = {}
        if self.packs and self._takes_places:
            found["position_ids"] = position_ids.unsqueeze(-2)
        if self.packs and self.mixes:
            found |= self._mixers.pack(batch.cu_seqlens)
        if self.attention == DOCUMENTS or takes_boundaries(self.attention):
            found |= {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            found |= {"max_length_q": batch.max_length, "max_length_k": batch.max_length}
        return found

    @contextmanager
    def unpacked(self, model: nn.Module, attention: str | None = None) -> Iterator[None]:
        """Forwards of sequences that are not packed, uncompiled, within a `with` block.

        Args:
            model: the model.
            attention: an implementation of transformers; None: the model's own.
        """
        self._mixers.whole()
        with under_attention(model, attention or self._own_attention), torch.compiler.set_stance("force_eager"):
            yield
