"""From a recipe to tokenised rows: done once, before any process group exists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.data.cache import build_dataset
from shardtune.data.chat import ChatEncoder
from shardtune.data.dataset import TokenDataset
from shardtune.data.sources import named_sets, resolve_sources
from shardtune.data.template import load_template
from shardtune.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What a run trains on and is measured by.

    Attributes:
        encoder: turns rows into tokens.
        train: the training rows; None where only evaluation is wanted.
        evals: the evaluation sets by name; "" is a single set without one.
        template: the chat template's text, None where the tokenizer has none and none is given.
    """

    encoder: ChatEncoder
    train: TokenDataset | None
    evals: Mapping[str, TokenDataset]
    template: str | None

    def files(self) -> list[dict[str, Any]]:
        """What the training rows come from: each file with its rows and a hash of their content and encoding."""
        return [] if self.train is None else self.train.files

    def describe(self) -> dict[str, Any]:
        """The data's fingerprints, for the manifest."""
        template = self.template or ""
        return {
            "train": self.files(),
            "train_fingerprint": None if self.train is None else self.train.fingerprint,
            "evaluation_fingerprints": {name: rows.fingerprint for name, rows in self.evals.items()},
            "template_hash": hashlib.sha256(template.encode()).hexdigest() if template else None,
        }


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_data: Any = None,
    eval_data: Any = None,
    training: bool = True,
    say: Callable[[str], None],
) -> PreparedData:
    """Tokenise what the recipe names, or find it tokenised.

    Args:
        recipe: its `data` and `eval` sections are read.
        tokenizer: of the model.
        train_data: rows in memory instead of `data.train_data_paths`.
        eval_data: rows in memory, or named sets of them, instead of `data.eval_data_paths`.
        training: whether the training rows are wanted.
        say: told what is found.
    """
    data = recipe.data
    template = load_template(data.chat_template, tokenizer)

    def encoder(with_prompts: bool) -> ChatEncoder:
        return ChatEncoder(
            tokenizer,
            template,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            max_length=data.max_length,
            on_too_long=data.on_too_long,
            with_prompts=with_prompts,
        )

    def build(spec: Any, purpose: Any, with_prompts: bool) -> TokenDataset:
        sources = resolve_sources(spec, data, purpose=purpose, say=say)
        built = build_dataset(
            sources,
            encoder(with_prompts),
            cache_dir=data.cache_dir,
            num_workers=data.num_workers,
            on_bad_row=data.on_bad_row,
            max_bad_rows=data.max_bad_rows,
            say=say,
        )
        for line in built.report.lines():
            say(f"data: {line}")
        return built

    train_spec = data.train_data_paths if train_data is None else train_data
    eval_spec = data.eval_data_paths if eval_data is None else eval_data
    splits = data.eval_split > 0 and eval_spec is None
    train, evals = None, {}
    if training or splits:
        if train_spec is None:
            raise ConfigError("data.train_data_paths is not set", remedy="name a file, directory, glob or Hub name")
        train = build(train_spec, "train", splits and recipe.eval.generate)
        if splits:
            train, held_out = train.split_by_hash(data.eval_split)
            evals[""] = held_out
        _require_rows(train, "data.train_data_paths", train_spec)
    for name, spec in named_sets(eval_spec).items() if eval_spec is not None else ():
        evals[name] = build(spec, "eval", recipe.eval.generate)
    for name, rows in evals.items():
        _require_rows(rows, f"data.eval_data_paths{': ' + name if name else ''}", eval_spec)
    return PreparedData(encoder(recipe.eval.generate), train, evals, template)


def _require_rows(rows: TokenDataset, where: str, spec: Any) -> None:
    if not len(rows):
        raise DataError(
            "no row with a trained token is left",
            where=f"{where}{'' if not isinstance(spec, str) else ' = ' + spec}",
            remedy="shardtune data preview shows what becomes of the rows",
        )


class WeighedRows:
    """Tokenised rows with every loss term of a model: those in the index, and those that weigh each row alike.

    Args:
        rows: the tokenised rows.
        terms: as `Adapter.terms` gives them.
    """

    def __init__(self, rows: TokenDataset, terms: Mapping[str, float | None]) -> None:
        self._rows = rows
        stored = rows.term_weights
        self._weights = {
            name: stored[name] if value is None else np.broadcast_to(np.float64(value), len(rows))
            for name, value in terms.items()
        }

    @property
    def lengths(self) -> np.ndarray:
        return self._rows.lengths

    @property
    def term_weights(self) -> Mapping[str, np.ndarray]:
        return self._weights

    def row(self, index: int) -> Sample:
        return self._rows.row(index)
