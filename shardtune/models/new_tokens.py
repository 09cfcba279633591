"""Tokens that a recipe adds to the tokenizer, and the rows they need in the model's embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.config import LoraConfig
from shardtune.errors import ConfigError, counted
from shardtune.models.lora.config import is_frozen
from shardtune.parallel.token_layers import input_embedding

KEY = "actor.tokenizer.new_tokens"
_LOOKED_THROUGH = 1000
"""Rows in which new tokens are looked for; all of ten million would take longer to read than a start may."""
BIAS = "final_logits_bias"
"""A buffer [1, tokens] of BART and related models, added to their logits: 0 for new tokens, as in transformers."""


def add_new_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer, in place; tokens that it has already are left as they are."""
    if tokens:
        tokenizer.add_tokens(list(tokens))


def token_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    """The ids of tokens that were added."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


class Rows(Protocol):
    """Encoded rows of which any can be read."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Sample: ...


def notes_on_unseen(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], rows: Rows) -> list[str]:
    """A note on tokens that the first training rows do not have; none where all of them are found."""
    unseen, looked = dict(zip(token_ids(tokenizer, tokens), tokens, strict=True)), min(len(rows), _LOOKED_THROUGH)
    for index in range(looked):
        if not unseen:
            return []
        for number in np.intersect1d(rows.row(index).input_ids, list(unseen)):
            del unseen[int(number)]
    if not unseen:
        return []
    first = "" if looked == len(rows) else "first "
    shown = ", ".join(repr(token) for token in unseen.values())
    be, embedding = ("are", "their embeddings are") if len(unseen) > 1 else ("is", "its embedding is")
    return [
        f"tokenizer.new_tokens: {shown} {be} in none of the {first}{looked:,} training rows, and without a row "
        f"{embedding} not trained"
    ]


def grow_embeddings(model: nn.Module, ids: Sequence[int]) -> list[str]:
    """Enlarge the embedding and the head of a model of transformers where they lack rows for tokens with these ids.

    In a model in memory each new row is the mean of the others; on the meta device loading does that (`mean_rows`).

    Returns:
        A note for the user; empty for a model that has enough rows, or is none of transformers.
    """
    table = input_embedding(model) if isinstance(model, PreTrainedModel) else None
    if not ids or not isinstance(model, PreTrainedModel) or table is None:
        return []
    before, rows = int(table.get_parameter("weight").shape[0]), max(ids) + 1
    if rows <= before:
        return []
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for parameter in {id(p): p for module in _embeddings(model) for p in module.parameters()}.values():
            if not parameter.is_meta:
                parameter[before:] = parameter[:before].double().mean(0).to(parameter.dtype)
    return [f"{rows - before} rows more in the embedding, {rows} now, each at first the mean of the others"]


def check_frozen_rows(model: nn.Module, tokens: Sequence[str], *, predicted: bool) -> list[str]:
    """Notes on new tokens' rows that are not trained, once the recipe's `freeze` is applied.

    Args:
        model: whose embeddings are large enough.
        tokens: that the recipe adds.
        predicted: whether some of them are what the model answers with, as action tokens are.

    Raises:
        ConfigError: several tokens would be one and the same to the model.
    """
    if not tokens or not isinstance(model, PreTrainedModel):
        return []
    parts = {"embedding": input_embedding(model), "head": model.get_output_embeddings()}
    frozen = [name for name, part in parts.items() if part is not None and is_frozen(part)]
    what = f"actor.model.freeze keeps the rows of {len(tokens)} new token{'s' * (len(tokens) > 1)} from training"
    if len(tokens) > 1 and ("embedding" in frozen or ("head" in frozen and predicted)):
        raise ConfigError(
            f"{what} in the {frozen[0]}: rows that are added begin as the mean of the others, all alike, so the model "
            "could not tell these tokens apart",
            where=f"actor.model.freeze, {KEY}",
            remedy=f"leave the {' and the '.join(frozen)} out of freeze, or use actor.model.is_lora, which trains "
            "just these rows of them",
        )
    return [f"{what} in the {' and the '.join(frozen)}: they stay as they begin"] if frozen else []


def growing(model: nn.Module) -> dict[torch.Tensor, int]:
    """The tensors of a model that have an entry per token, with their dimension of tokens."""
    if not isinstance(model, PreTrainedModel):
        return {}
    biases = {buffer: 1 for name, buffer in model.named_buffers(recurse=False) if name == BIAS}
    return biases | {parameter: 0 for module in _embeddings(model) for parameter in module.parameters()}


StoredRows = list[int] | dict[str, list[int]] | None
"""PEFT's `trainable_token_indices`: of the input embedding, or by the name of the embedding or head."""


def check_known(stored: StoredRows, tokenizer: PreTrainedTokenizerBase | None, config: LoraConfig) -> None:
    """Refuse a stored adapter that trains rows of tokens which the tokenizer does not have.

    Args:
        stored: the adapter's `trainable_token_indices`.
        tokenizer: with the recipe's new tokens.
        config: names the adapter, for messages.

    Raises:
        ConfigError: no row has such a token, and the model may have no embedding of it.
    """
    if tokenizer is None or not stored:
        return
    highest = max(tokenizer.get_vocab().values())
    rows = {row for ids in (stored.values() if isinstance(stored, dict) else [stored]) for row in ids}
    if unknown := sorted(row for row in rows if row > highest):
        raise ConfigError(
            f"the adapter in {config.load_from} trains embeddings of {counted(len(unknown), 'token')} that the "
            f"tokenizer does not have (ids {_first(unknown)}); its own go up to {highest}",
            where=f"{KEY}, actor.model.lora.load_from",
            remedy=f"give {KEY} as the adapter was trained with, in the same order",
        )


def _first(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:3]))}{', …' if len(ids) > 3 else ''}"


def check_rows(stored: StoredRows, needed: Mapping[str, Sequence[int]], config: LoraConfig) -> None:
    """Refuse a stored adapter that does not train the rows of all new tokens.

    Args:
        stored: the adapter's `trainable_token_indices`.
        needed: rows, by the name of the embedding or head.
        config: names the adapter, for messages.

    Raises:
        ConfigError: some rows are missing, and would never be trained.
    """
    rows = {"": stored} if isinstance(stored, list) else stored or {}  # a list is for the input embedding
    known = {row for ids in rows.values() for row in ids}
    missing = sorted({row for ids in needed.values() for row in ids} - known)
    if missing:
        raise ConfigError(
            f"the adapter in {config.load_from} trains no embeddings of {len(missing)} of the new tokens "
            f"(ids {_first(missing)})",
            where=f"{KEY}, actor.model.lora.load_from",
            remedy="merge that adapter (shardtune export --merge) and start a fresh one over the result, or leave the "
            "tokens out",
        )


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    found = (input_embedding(model), model.get_output_embeddings())
    return [module for module in found if module is not None]


def trained_rows(model: nn.Module, ids: Sequence[int], trained_in_full: set[nn.Module]) -> dict[str, list[int]]:
    """The rows that an adapter trains, by module: PEFT's `trainable_token_indices`.

    Raises:
        ConfigError: the model has no known embedding, or a head that PEFT cannot train by rows.
    """
    if not ids:
        return {}
    if not isinstance(model, PreTrainedModel) or input_embedding(model) is None:
        raise ConfigError(
            f"which embedding of {type(model).__name__} has the new tokens' rows is not known",
            where=f"{KEY}, actor.model.is_lora",
            remedy="leave new_tokens out and name the embedding in actor.model.lora.modules_to_save",
        )
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is not None and head not in trained_in_full:
        raise ConfigError(
            f"the head of {type(model).__name__} has a bias, which PEFT leaves out when it trains rows of it",
            where=f"{KEY}, actor.model.is_lora",
            remedy="name the head in actor.model.lora.modules_to_save",
        )
    found: dict[str, list[int]] = {}
    weights: list[nn.Parameter] = []
    for module in _embeddings(model):
        weight = module.get_parameter("weight")
        tied = any(weight is other for other in weights)  # PEFT trains one set of rows for both
        weights.append(weight)
        if module not in trained_in_full and not tied:
            name = next(name for name, other in model.named_modules() if other is module)
            found[name] = list(ids)
    return found
