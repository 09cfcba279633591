"""The processor of a vision-language model: its tokenizer and image processor, by Pillow and without torchvision."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.utils import is_torchvision_available

from shardtune.data.encoder import RowError
from shardtune.data.images.derived import derived_class
from shardtune.data.images.placeholders import AppliedImages, ImageText
from shardtune.data.images.whole_rows import WholeRows
from shardtune.errors import ModelError
from shardtune.models.pretrained import MODEL_PATH, TRUST, TRUST_KEY, model_directory

GIVE_A_PROCESSOR = "give the directory of a vision-language model with its processor, as save_pretrained writes both"
INSTALL = "pip install 'shardtune[vlm]'"
_NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_IMAGES, _VIDEO = "image_processor", "video_processor"


class _NoVideo:
    """In the place of a video processor: every setting is None."""

    font = ""  # a file that Ernie 4.5-VL's processor copies where there is one

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _WithoutVideo(ProcessorMixin):
    """A base of processors without a video processor, which transformers builds with torchvision only."""

    video_processor = _NoVideo()

    def __init__(self, *args: object, **kwargs: object) -> None:
        named = dict(zip(super().get_attributes(), args, strict=False))  # classes pass their parts in any order
        super().__init__(**{key: part for key, part in {**named, **kwargs}.items() if key != _VIDEO})

    @classmethod
    def get_attributes(cls) -> list[str]:
        return [name for name in super().get_attributes() if name != _VIDEO]

    @classmethod
    def from_args_and_dict(
        cls, args: Sequence[object], processor_dict: Mapping[str, object], **kwargs: object
    ) -> ProcessorMixin:
        parts = dict(zip(cls.get_attributes(), args, strict=True))
        accepted = inspect.signature(cls.__init__).parameters.keys()
        settings = {key: value for key, value in {**processor_dict, **kwargs}.items() if key in accepted}
        return cls(**{**settings, **parts, _VIDEO: None})


def without_video(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor class without a video processor; one that has none anyway is returned unchanged.

    It is saved under the name of the original class, and loads what that one has saved.
    """
    takes_video = _VIDEO in inspect.signature(kind.__init__).parameters
    return derived_class(kind, _WithoutVideo) if takes_video else kind


def lacks_video(processor: object) -> bool:
    """Whether a processor is without its part for videos, so that what it saves lacks the settings of that part."""
    return isinstance(processor, _WithoutVideo)


def load_processor(path: str, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a directory or Hub name.

    Images are processed by Pillow wherever a class has a backend for it, so that pixels do not depend on which packages
    are installed; by torchvision where a class has no other.

    Raises:
        ModelError: there is none, or it cannot work without torchvision.
    """
    folder = model_directory(path)
    name = _class_name(folder) or PROCESSOR_MAPPING_NAMES.get(config.model_type)
    found = None if name is None else processor_class_from_name(name)
    if name is None or found is None:
        raise ModelError(
            f"{path} names no processor that transformers supports ({name or 'none at all'})",
            where=f"{MODEL_PATH}: {', '.join(_NAMED_IN)}",
            remedy=GIVE_A_PROCESSOR,
        )
    try:
        loaded: Any = without_video(found).from_pretrained(folder, trust_remote_code=trust_remote_code)
        if isinstance(loaded, ProcessorMixin) and _IMAGES in loaded.get_attributes():
            # `backend` in the call above would become the tokenizer's too, and be saved with it.
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=trust_remote_code)
            loaded.image_processor = images
    except Exception as error:  # a processor and its parts are third-party code and may raise anything
        raise _cannot_load(path, name, error) from error
    if not isinstance(loaded, ProcessorMixin):
        raise ModelError(f"{path} holds a tokenizer and no image processor", where=MODEL_PATH, remedy=GIVE_A_PROCESSOR)
    return loaded


def image_text(processor: ProcessorMixin) -> ImageText:
    """Applies the processor, after a check that rows encoded here equal its own output.

    Some processors put images into a text in other ways (PaliGemma moves them to the front and writes tokens
    around the text; Mllama masks the images of each token). Their rows would be silently wrong.

    Raises:
        ModelError: the processor is one of these.
    """
    kind = type(processor).__name__
    try:
        images = ImageText(processor)
        token, start = images.image_token, ""
        differing = _first_difference(images, f"a{token}b {token}c")
        if differing is not None:
            images.spaces_words = _first_difference(images, f"a{token} b {token} c") is None
            start = images.tokenizer.bos_token or ""  # as chat templates write it
            differing = _first_difference(images, f"{start}a{token}b {token}c")
        images.side_by_side = differing is not None or _first_difference(images, f"{start}a{token}{token}c") is None
    except (ModelError, AttributeError, KeyError, TypeError, IndexError, RowError) as error:
        raise _own_ways(kind, f"{type(error).__name__}: {error}") from error
    if differing is not None:
        raise _own_ways(kind, f"its {differing} for a text with two images is another than that of the parts")
    return images


def applied_images(processor: ProcessorMixin) -> AppliedImages:
    """Applies the processor to images by themselves where that is exact, and otherwise to each row as a whole.

    Raises:
        ModelError: its output can be followed in neither way.
    """
    try:
        return image_text(processor)
    except ModelError:
        pass
    try:
        return WholeRows(processor)
    except (RowError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise _own_ways(type(processor).__name__, str(error)) from error


def _first_difference(images: ImageText, text: str) -> str | None:
    """The first of a processor's tensors that differs from this package's for the same text with two images."""
    shown = [Image.new("RGB", size, (size[0], 90, 200)) for size in ((32, 32), (64, 40))]
    expanded = images.expand(text, [image.size for image in shown]).text
    ids = np.array(images.tokenizer(expanded, add_special_tokens=False)["input_ids"])
    pixels = images.of_tokens(ids, shown) if images.follows_tokens else images.pixels(shown)
    own = {"input_ids": torch.from_numpy(ids), **pixels}
    if images.token_types is not None:
        own[images.token_types] = torch.from_numpy(images.token_type_ids(ids))
    theirs = images.applied(images=[shown], text=[text], return_tensors="pt", add_special_tokens=False)
    for key in sorted({*own, *theirs} - {"attention_mask"}):
        if key not in own or key not in theirs or not torch.equal(own[key].flatten(), theirs[key].flatten()):
            return key
    return None


def _own_ways(kind: str, reason: str) -> ModelError:
    return ModelError(
        f"{kind} puts images and text together in a way that cannot be followed row by row ({reason})",
        where=MODEL_PATH,
        remedy="use a model of another family (docs/vision.md lists those that are tested), or an adapter of your own",
    )


def _class_name(folder: Path) -> str | None:
    for file in _NAMED_IN:
        if (folder / file).is_file():
            name = json.loads((folder / file).read_text(encoding="utf-8")).get("processor_class")
            if isinstance(name, str):
                return name
    return None


def _cannot_load(path: str, name: str, error: Exception) -> ModelError:
    reason = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    if "orchvision" in str(error) and not is_torchvision_available():
        what = f"the processor {name} of {path} works by torchvision alone, which is not installed: {reason}"
        remedy = "pip install torchvision, or use a model whose image processor works by Pillow (shardtune models)"
    elif isinstance(error, ImportError):
        what, remedy = f"the processor {name} of {path} needs a package that is missing: {reason}", INSTALL
    elif TRUST_KEY in str(error):
        what, remedy = f"the processor of {path} is custom code, which runs only with consent", TRUST
    else:
        what, remedy = f"the processor {name} of {path} cannot be loaded: {reason}", GIVE_A_PROCESSOR
    return ModelError(what, where=MODEL_PATH, remedy=remedy)
