"""Writing a model on all ranks as a directory for other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.checkpoint.companions import copy_companions
from shardtune.checkpoint.hf_save import (
    DiskDtype,
    Processor,
    disk_dtype,
    gather_full,
    save_config,
    save_pretrained,
    save_text_settings,
)
from shardtune.checkpoint.module_weights import save_plain
from shardtune.checkpoint.peft_directory import merging, save_adapter
from shardtune.checkpoint.weight_files import stored_dtype
from shardtune.config import Recipe
from shardtune.config.model_names import BUILT_IN, SENTENCE_TRANSFORMERS
from shardtune.errors import CheckpointError, ShardtuneError, disk_error
from shardtune.models.lora.attach import is_adapted
from shardtune.models.pretrained import GENERATION, settings_directory
from shardtune.models.vision.processors import lacks_video
from shardtune.parallel.precision import MASTER_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.model_state import ModelState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class TextParts:
    """The files of a model with text, besides its weights.

    Attributes:
        tokenizer: None without one.
        processor: what prepares images or other inputs.
        chat_template: that it was trained with; None: the tokenizer's.
        end_of_turn_ids: tokens that end an answer.
        files: further files by name: JSON, or bytes; settings of generation are added to those of the model.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    processor: Processor | None = None
    chat_template: str | None = None
    end_of_turn_ids: tuple[int, ...] = ()
    files: Mapping[str, object] = field(default_factory=dict)


@final
class ModelExport:
    """Writes a model as a directory; every rank makes one.

    Args:
        recipe: its `actor` section is read.
        ranks: of the run.
        state: the model.
        text: written beside the weights.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks, state: ModelState, text: TextParts) -> None:
        self._recipe = recipe
        self._ranks = ranks
        self._model, self._weights, self._finite = state.inner, state.weights, state.finite
        self._text = text

    def write(self, directory: Path, dtype: str, *, merge: bool = False) -> None:
        """Write the model as a directory that its own `from_pretrained` loads, or as one weight file.

        Args:
            directory: to write into.
            dtype: fp32 | bf16 | fp16 | fp64, or auto: that of the base model, otherwise that of training.
            merge: merge a low-rank adapter into the base model and write the whole model; otherwise only the adapter is
                written, in PEFT's format.
        """
        self._weights.refuse_added()
        only_adapter = is_adapted(self._model) and not merge
        if only_adapter:
            self._finite.check_written(directory, disk_dtype(self._model, DTYPES.get(dtype)), self._weights.trainable())
        else:
            self._finite.check_written(directory, self._on_disk(dtype))
        with self._weights.in_rows(), self._weights.in_full():
            if only_adapter:
                self._export_adapter(directory, dtype)
            else:
                self._export_model(directory, dtype)
        if self._ranks.is_main:
            self._write_files(directory)
            self._copy_companions(directory, adapter=only_adapter)

    def check(self, dtype: str) -> None:
        """Write everything of an export but the weights, into a folder that is removed, on the calling rank.

        Raises:
            CheckpointError: config, tokenizer or processor cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="shardtune-") as folder:
            path, model = Path(folder), self._model
            try:
                if isinstance(model, PreTrainedModel):
                    save_config(model, path, self._disk_dtype(dtype, model))
                self._save_text(path)
                self._write_files(path)
                self._copy_companions(path, adapter=is_adapted(model))
            except ShardtuneError:
                raise
            except Exception as error:  # a processor is a user's or a third party's code and may raise anything
                of_disk = disk_error(error)
                if of_disk is not None:
                    raise of_disk from error
                parts = (self._text.processor, self._text.tokenizer)
                kinds = [type(part).__name__ for part in parts if part is not None]
                raise CheckpointError(
                    f"what belongs to the model besides its weights cannot be saved: {type(error).__name__}: {error}",
                    where=", ".join([f"{type(model).__name__}.config", *kinds]),
                    remedy="let save_pretrained of each of them write into a directory; final/ needs it",
                ) from error

    def _write_files(self, directory: Path) -> None:
        for name, content in self._text.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                (directory / name).write_bytes(content)
            elif name == GENERATION and isinstance(content, Mapping) and (directory / name).is_file():
                write_json(directory / name, {**read_json(directory / name), **content})
            else:
                write_json(directory / name, content)

    def _copy_companions(self, directory: Path, *, adapter: bool) -> None:
        actor = self._recipe.actor
        own = actor.worker is not None or actor.model.adapter is not None or actor.model.model_type not in BUILT_IN
        found = [settings_directory(path) for path in (actor.tokenizer.tokenizer_model, actor.model.model_path)]
        copy_companions(
            list(dict.fromkeys(source for source in found if source is not None)),
            directory,
            tokenizer=self._text.tokenizer,
            has_processor=self._text.processor is not None,
            adapter=adapter,
            sentences=own or actor.model.model_type in SENTENCE_TRANSFORMERS,
            lacks_video=lacks_video(self._text.processor),
        )

    def _disk_dtype(self, dtype: str, model: PreTrainedModel) -> torch.dtype:
        """The dtype of the weights on disk; auto: that of the base model's directory, otherwise of the model made."""
        if dtype in DTYPES:
            return DTYPES[dtype]
        config = self._recipe.actor.model
        base = None if config.from_scratch else settings_directory(config.model_path)
        stored = stored_dtype(base) if base is not None else None
        made = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.float32
        return stored or made

    def _on_disk(self, dtype: str) -> DiskDtype:
        """The dtype on disk of each tensor of the model, written as a whole."""
        model = self._model
        return disk_dtype(
            model, self._disk_dtype(dtype, model) if isinstance(model, PreTrainedModel) else DTYPES.get(dtype)
        )

    def _export_adapter(self, directory: Path, dtype: str) -> None:
        config = self._recipe.actor.model
        in_memory = self._model.name_or_path if isinstance(self._model, PreTrainedModel) else ""
        base = None if config.from_scratch else config.model_path or in_memory or None
        save_adapter(self._model, directory, base=base, dtype=DTYPES.get(dtype), tensors=self._weights.tensors())
        if self._ranks.is_main:
            self._save_text(directory)

    def _export_model(self, directory: Path, dtype: str) -> None:
        model, tensors, gather, unties = self._model, self._weights.tensors(), gather_full, False
        if is_adapted(model):
            tensors, merge, unties = merging(model, MASTER_DTYPE[self._recipe.actor.model.precision])
            gather = self._finite.checked(merge, directory, self._on_disk(dtype))
        if not isinstance(model, PreTrainedModel):
            save_plain(model, directory, dtype=DTYPES.get(dtype), tensors=tensors, gather=gather)
            if self._ranks.is_main:
                self._save_text(directory)
            return
        save_pretrained(
            model,
            directory,
            dtype=self._disk_dtype(dtype, model),
            tokenizer=self._text.tokenizer,
            chat_template=self._text.chat_template,
            end_of_turn_ids=self._text.end_of_turn_ids,
            processor=self._text.processor,
            tensors=tensors,
            gather=gather,
            settings={"tie_word_embeddings": False} if unties else {},
        )

    def _save_text(self, directory: Path) -> None:
        text = self._text
        save_text_settings(
            self._model, directory, text.tokenizer, text.chat_template, text.end_of_turn_ids, text.processor
        )
