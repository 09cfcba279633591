"""Models of transformers that take images and text and generate text."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

from shardtune.batch import LossSum, PackedBatch, Prompt, Sample
from shardtune.config import DataConfig
from shardtune.config.parameter_patterns import PARTS
from shardtune.config.rank_layout import Layout
from shardtune.data.cache_directory import cache_root
from shardtune.data.chat.template import load_template
from shardtune.data.images.augmentation import RowAugmentation
from shardtune.data.images.chat_encoder import IMAGE_STOP, ImageChatEncoder
from shardtune.data.images.images import (
    ENDS,
    PROMPT_IMAGES,
    PROMPT_TEXT,
    ROW_TEXT,
    SUFFIX_START,
    ImageKind,
    StoredImage,
    from_fields,
    read_image,
    to_fields,
)
from shardtune.data.images.pixel_bytes import TABLE
from shardtune.data.images.pixel_cache import PixelCache, PixelReader, pixel_key
from shardtune.data.images.placeholders import BLANK, AppliedImages, ImageText
from shardtune.data.images.whole_row_encoder import WholeRowEncoder
from shardtune.data.images.whole_rows import WholeRows
from shardtune.data.loader.packing import pack
from shardtune.data.loader.step_loader import Companion
from shardtune.errors import ConfigError, ModelError
from shardtune.models.adapter import AdapterRoot, cannot_share_sequences
from shardtune.models.causal_lm import CausalLM
from shardtune.models.language_model import LanguageRoot
from shardtune.models.lora.attach import base_tensors
from shardtune.models.vision.processors import applied_images
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.model_parallel import ModelParallel
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.parallel.ranks import Ranks

ZERO_PROJECTOR = (
    "its projector is all zeros, so images change nothing until it is trained, and packing cannot be proved"
)
MM_TYPES = "mm_token_type_ids"
_KNOWN_ROPE = {MM_TYPES, "image_grid_thw"}
"""What `get_rope_index` takes where it is the one of Qwen-VL, for which a run of image tokens is an image."""
NO_IMAGES = (
    "leave out rows without images, raise actor.global_batch_size until each step has one, or train parts of the "
    "language model too"
)
LOOKED_AT = 32
"""Tokens at a row's end whose logits have to change with its images."""


@runtime_checkable
class HasRopeIndex(Protocol):
    """A model with three-dimensional positions, computed from its config alone: Qwen-VL and related."""

    get_rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]]


class VisionLanguage(CausalLM):
    """A vision-language model of transformers, trained on packed rows of text and images.

    Tokens are handled as by `CausalLM`: end to end, documents apart, the head at supervised positions in chunks. Images
    are read and processed where micro-batches are made, in processes of the loader; all of a micro-batch go
    through the vision tower together. Where only the processor itself can put text and images together, and where its
    inputs for images depend on the text around them, each forward holds one row. No rows without images are beside
    rows with images there, nor in any model that is not packed: the model computes these in another way.

    Args:
        config: the model's config.
        processor: the model's.
        settings: as for `CausalLM`.
    """

    _auto = AutoModelForImageTextToText
    _kind = "vision-language model"

    def __init__(self, config: PreTrainedConfig, processor: ProcessorMixin, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.images = self._image_text(processor)
        if isinstance(self.images, ImageText):
            self.images.needs_gaps = _finds_images_by_runs(config)
            if self.images.token_types is None:
                self.images.token_types = _unreturned_types(config, processor)
        self._leads = self.images.outside_text
        self.sharing.batches = not self.images.one_row
        self._reader = PixelReader(self.images, _kept_pixels(self.images, self._data))
        self._needs_image = _needs_image(config)
        self.take_tokenizer(self.images.tokenizer)
        self._rope: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self._blank: Sample | None = None

    def _image_text(self, processor: ProcessorMixin) -> AppliedImages:
        return applied_images(processor)

    @property
    def processor(self) -> ProcessorMixin:
        """Saved beside the weights."""
        return self.images.processor

    @property
    def prepares_in_processes(self) -> bool:
        """Images are decoded in separate processes."""
        return True

    def build(self) -> PreTrainedModel:
        model = super().build()
        # A method that is called in another way (Qwen Omni, MiniCPM-V 4.7) is left to the model, which calls it itself.
        inner = model.base_model
        takes = set(inspect.signature(inner.get_rope_index).parameters) if isinstance(inner, HasRopeIndex) else set()
        known = takes >= _KNOWN_ROPE
        if self.images.one_row or (takes and not known):
            self.sharing.one_row_per_forward(model)
        elif known:
            with init_empty_weights():
                empty: Any = type(model.base_model)(model.base_model.config)
            self._rope = empty.get_rope_index
        return model

    def may_be_idle(self, name: str) -> bool:
        """Some models (LLaVA) use an earlier layer of the vision tower, so its last layers may be idle."""
        return re.search(PARTS["vision_tower"], name) is not None

    def check_layout(self, layout: Layout) -> None:
        if layout.sequence > 1:
            raise cannot_share_sequences("a vision-language model", "its images belong to whole rows")
        super().check_layout(layout)

    def encoder(self, *, with_prompts: bool) -> ImageChatEncoder:
        template = load_template(self._data.chat_template, self.tokenizer)
        kind = WholeRowEncoder if isinstance(self.images, WholeRows) else ImageChatEncoder
        return kind(
            self.images,
            template,
            with_prompts=with_prompts,
            needs_image=self._needs_image,
            image_hosts=self._data.image_hosts,
            **self._encoding,
        )

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
        """Rows end to end, with the pixels of all their images, in order."""
        batch = pack(samples, rows, weights)
        stored = [image for sample in samples if sample.fields for image in from_fields(sample.fields)]
        counts = [len(sample.fields[ENDS]) if sample.fields else 0 for sample in samples]
        if self.images.one_row:
            return replace(batch, fields=self._of_row(samples[0].fields, batch.input_ids.numpy(), stored))
        fields = self._fields(batch.input_ids.numpy(), stored, counts)
        rope = self._rope
        if rope is None:
            return replace(batch, fields=fields)
        places = self._rope_positions(rope, batch, fields, counts)
        return replace(batch, fields=fields, position_ids=torch.cat([batch.position_ids[None], places]))

    def augmented(self, sample: Sample, augment: RowAugmentation) -> Sample:
        """The images of a row changed, each by draws of its own place in the row."""
        if not sample.fields or not len(sample.fields[ENDS]):
            return sample
        images = [
            replace(image, kind=ImageKind.PIXELS, content=augment(np.asarray(image.read()), str(place)).tobytes())
            for place, image in enumerate(from_fields(sample.fields))
        ]
        fields = to_fields(images, int(sample.fields[PROMPT_IMAGES]))
        return replace(sample, fields={**sample.fields, **fields})

    def _fields(
        self, input_ids: np.ndarray, stored: Sequence[StoredImage], counts: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        fields = _cast(self._reader.inputs(stored, counts) if stored else {}, self._precision)
        if self.images.token_types is not None:
            fields[self.images.token_types] = torch.from_numpy(self.images.token_type_ids(input_ids))
        return fields

    def _of_row(
        self, fields: Mapping[str, np.ndarray], input_ids: np.ndarray, stored: Sequence[StoredImage]
    ) -> dict[str, torch.Tensor]:
        return _cast(self.images.of_row(fields, input_ids, [image.read() for image in stored]), self._precision)

    def _rope_positions(
        self,
        rope: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        batch: PackedBatch,
        fields: Mapping[str, torch.Tensor],
        counts: Sequence[int],
    ) -> torch.Tensor:
        """int64 [3, tokens]: where each token is in time, height and width, from 0 in each document."""
        types = torch.from_numpy(self.images.token_type_ids(batch.input_ids.numpy()))
        grid, places, num_images = fields.get("image_grid_thw"), [], 0
        ends = batch.cu_seqlens.tolist()
        for start, stop, count in zip(ends[:-1], ends[1:], counts, strict=True):
            kinds = types[start:stop]
            own = None if grid is None or not count else grid[num_images : num_images + count]
            found, _ = rope(batch.input_ids[None, start:stop], mm_token_type_ids=kinds[None], image_grid_thw=own)
            places.append(found[:, 0])
            num_images += count
        return torch.cat(places, dim=1)

    def further_inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        types = self.images.token_types
        rows = self.sharing.sequences(batch) if self.sharing.by_length else 1
        fields = self.images.numbers(batch.fields)
        return {name: value.view(rows, -1) if name == types else value for name, value in fields.items()}

    # -- ranks with and without images -----------------------------------------------------------------------------

    @property
    def _nothing_joins(self) -> bool:
        """Whether no row can be lengthened by a blank image: a model that cannot keep rows apart in one sequence may
        compute a row in another way where more tokens follow (one that selects keys breaks ties by their number)."""
        return self.images.one_row or not self.sharing.packs

    def companion(self) -> Companion | None:
        return Companion(None if self._nothing_joins else self._blank_row(), ENDS)

    def filler(self, sample: Sample) -> Sample:
        """A row without a target, with images where the others of its micro-batch have some."""
        if self._nothing_joins:
            return replace(sample, loss_weights=np.zeros_like(sample.loss_weights))
        return super().filler(sample)

    def _blank_row(self) -> Sample:
        """A blank image without a target."""
        if self._blank is None:
            blank = _encoded(Image.new("RGB", BLANK))
            text = self.images.expand(self.images.image_token, [blank.size]).text
            ids = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            fields = {**to_fields([blank], 0), IMAGE_STOP: np.array(len(ids), np.int32)}
            self._blank = Sample(ids, np.zeros(len(ids), np.float32), fields=fields)
        return self._blank

    def without_graph(self, model: nn.Module, batch: PackedBatch, losses: dict[str, LossSum]) -> dict[str, LossSum]:
        """The losses of rows without images where only parts that read images are trained.

        Where nothing can join such rows, others of the step may have images: the losses get a graph that no parameter
        is in, so that the gradient is zero, and the backward pass is one for FSDP too.

        Raises:
            ModelError: no row of the step has an image, or the rows have images.
        """
        if batch.fields.keys() - {self.images.token_types}:
            return super().without_graph(model, batch, losses)
        if self._nothing_joins:
            nothing = torch.zeros((), device=batch.input_ids.device, requires_grad=True)
            return {name: LossSum(loss.total + nothing, loss.weight) for name, loss in losses.items()}
        raise ModelError(
            "no row of this step has an image, and nothing is trained but parts that read images, so there is no "
            "gradient",
            where="actor.model.freeze, actor.model.lora",
            remedy=NO_IMAGES,
        )

    def companion_prompt(self, prompts: Sequence[Prompt]) -> Prompt | None:
        if self.images.one_row or not any(len(_prompt_images(prompt)) for prompt in prompts):
            return None
        blank = self._blank_row()
        return Prompt(blank.input_ids, {**blank.fields, PROMPT_IMAGES: np.array(1, np.int32)})

    def prompts_apart(self, prompt: Prompt) -> bool | None:
        return len(_prompt_images(prompt)) > 0 if self.images.one_row else None

    def prompt_inputs(self, prompts: Sequence[Prompt], longest: int) -> Mapping[str, torch.Tensor]:
        if self.images.one_row:
            (prompt,) = prompts
            text = {ROW_TEXT: prompt.fields[PROMPT_TEXT], SUFFIX_START: -1} if PROMPT_TEXT in prompt.fields else {}
            return self._of_row({**prompt.fields, **text}, np.asarray(prompt.tokens), _prompt_images(prompt))
        images = [_prompt_images(prompt) for prompt in prompts]
        stored, counts = [image for row in images for image in row], [len(row) for row in images]
        tokens = np.full((len(prompts), longest), -1, np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt.tokens) :] = prompt.tokens
        return self.images.numbers(self._fields(tokens, stored, counts))

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        self.check_layout(ranks.layout)
        return super().apply_model_parallel(model, ranks)

    # -- probes ----------------------------------------------------------------------------------------------------

    def probe_assumptions(
        self, root: AdapterRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Prove that packing is exact, and that the content of an image changes the predictions after it."""
        assert isinstance(root, LanguageRoot)
        zero_projector = _has_zero_projector(root.model)
        if zero_projector and self.sharing.packs:
            # All images have the same features so far, so many wrong attention patterns would give the same result.
            self.sharing.one_row_per_forward(root.model, ZERO_PROJECTOR)
        notes = super().probe_assumptions(root, samples, device, dtype)
        if zero_projector:
            return [ZERO_PROJECTOR, *notes]
        with_images = next((sample for sample in samples if len(sample.fields[ENDS])), None)
        if with_images is not None and not self._uses_images(root, with_images, device):
            raise ModelError(
                "swapping the images of a row does not change the predictions after them: the model ignores images",
                where=f"{type(root.model).__name__}: image tokens, pixels",
                remedy="check that the processor is the model's own (its image token, its image size)",
            )
        return notes

    @torch.no_grad()
    def _uses_images(self, root: LanguageRoot, sample: Sample, device: torch.device) -> bool:
        """Whether noise in place of a row's images changes the logits of any of its last tokens."""
        batch = self.collate([sample], [0], {})
        random = np.random.default_rng(0)
        sizes = [image.size for image in from_fields(sample.fields)]
        others = [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
        ids = batch.input_ids.numpy()
        made = self.images.of_row(sample.fields, ids, others) if self.images.one_row else self.images.pixels(others)
        swapped = {**batch.fields, **_cast(made, self._precision)}
        last = torch.arange(max(0, sample.length - LOOKED_AT), sample.length, device=device)
        was_training = root.training
        root.eval()
        before = root.logits(batch.to(device), last)
        after = root.logits(replace(batch, fields=swapped).to(device), last)
        root.train(was_training)
        return not torch.equal(before, after)

    def shortened(self, sample: Sample, most: int) -> Sample:
        if self.images.one_row:
            return sample
        return super().shortened(sample, max(most, int(sample.fields[IMAGE_STOP])))

    def changed(self, sample: Sample) -> Sample:
        """The row with other text around the same images."""
        words = np.flatnonzero(self.images.token_type_ids(sample.input_ids) == 0)
        ids = sample.input_ids.copy()
        if not len(sample.fields[ENDS]):
            return super().changed(sample)
        ids[words] = np.roll(ids[words], 1)
        return replace(sample, input_ids=ids)


def _has_zero_projector(model: nn.Module) -> bool:
    """Whether a matrix of the projector is zero, as in an untrained Gemma 3; what LoRA adds does not count."""
    named = [(base.name, base.tensor) for base in base_tensors(model) if base.layer is None and base.tensor.ndim > 1]
    matrices = [tensor for name, tensor in named if re.search(PARTS["projector"], name) and "query_tokens" not in name]
    return any(not tensor.any() for tensor in matrices)


def _cast(fields: Mapping[str, torch.Tensor], precision: str) -> dict[str, torch.Tensor]:
    """Pixels, or the values that their bytes stand for, in the dtype of the computation, which a model's first layer
    may take alone (Chameleon), and all numbers of a proof in float64; otherwise unchanged."""
    dtype = COMPUTE_DTYPE[precision]

    def is_cast(name: str, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and (precision == "fp64" or "pixel_values" in name or name == TABLE)

    return {name: tensor.to(dtype) if is_cast(name, tensor) else tensor for name, tensor in fields.items()}


def _needs_image(config: PreTrainedConfig) -> bool:
    """Whether the forward of a config's model cannot be called without pixels (BLIP)."""
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    pixels = None if kind is None else inspect.signature(kind.forward).parameters.get("pixel_values")
    return pixels is not None and pixels.default is pixels.empty


def _finds_images_by_runs(config: PreTrainedConfig) -> bool:
    """Whether the positions of a config's model count each run of image tokens as one image (Qwen-VL)."""
    kind: Any = MODEL_MAPPING.get(type(config), None)
    if "get_rope_index" not in dir(kind):
        return False
    return set(inspect.signature(kind.get_rope_index).parameters) >= _KNOWN_ROPE


def _unreturned_types(config: PreTrainedConfig, processor: ProcessorMixin) -> str | None:
    """The kinds of tokens, if a model takes them and its processor names, but does not return them (Cosmos 3 Edge)."""
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    taken = kind is not None and MM_TYPES in inspect.signature(kind.forward).parameters
    return MM_TYPES if taken and MM_TYPES in processor.model_input_names else None


def _kept_pixels(images: AppliedImages, data: DataConfig) -> PixelCache | None:
    if not data.keep_pixels:
        return None
    if images.pixel_bytes is None or not isinstance(images, ImageText):
        raise ConfigError(
            f"data.keep_pixels: the images of {type(images.processor).__name__} cannot be kept one by one as bytes: "
            "its output for several images differs from that for each of them, rescaled and normalised",
            where="data.keep_pixels",
            remedy="leave it out",
        )
    return PixelCache(cache_root(data.cache_dir), pixel_key(images.pixel_settings()))


def _encoded(image: Image.Image) -> StoredImage:
    content = io.BytesIO()
    image.save(content, "PNG")
    return read_image(content.getvalue(), Path())


def _prompt_images(prompt: Prompt) -> list[StoredImage]:
    """The images of a prompt, without those of the row's later turns."""
    return from_fields(prompt.fields)[: int(prompt.fields[PROMPT_IMAGES])] if prompt.fields else []
