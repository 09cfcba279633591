"""The oracle: a vision-language model trained by plain PyTorch and transformers, one row after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from shardtune.models.vision.processors import load_processor

IGNORED = -100


@dataclass(frozen=True)
class Trained:
    """Loss and gradient norm of each step, and the weights in the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def encoded(
    processor: Any, row: dict[str, Any], folder: Path, **options: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs for a row alone, by the processor itself, and its labels: what the assistant says.

    Args:
        **options: of the processor's call.
    """
    text, images = "", [Image.open(folder / name).convert("RGB") for name in row.get("images", [])]
    spans: list[tuple[int, int]] = []
    chat = [{"role": "user", "content": [{"type": "image"}]}]
    shown = processor.tokenizer.apply_chat_template(chat, tokenize=False)
    opened = shown.split("user\n")[1].split("<|im_end|>")[0]  # what this family's template writes for an image
    for turn in row["messages"]:
        text += f"<|im_start|>{turn['role']}\n"
        start = len(text)
        text += turn["content"].replace("<image>", opened) + "<|im_end|>"
        if turn["role"] == "assistant":
            spans.append((start, len(text)))
        text += "\n"
    given = {"images": [images]} if images else {}
    inputs = processor(text=[text], return_tensors="pt", **given, **options)
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    for start, stop in spans:
        first, last = (_tokens(processor, text, place, images) for place in (start, stop))
        labels[0, first:last] = inputs["input_ids"][0, first:last]
    return {key: value for key, value in inputs.items() if key != "attention_mask"}, labels


def encoded_whole(
    processor: Any,
    row: dict[str, Any],
    folder: Path,
    *,
    placed: bool = True,
    nested: bool = True,
    suffix: bool = False,
    strips: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `encoded`, of a row with its images in the first turn, by one call of a processor that writes around a text.

    Tokens of bytes do not depend on their neighbours, so targets are found from the row's end.

    Args:
        placed: the text has an image token for each image.
        nested: images are given by row.
        suffix: the processor takes the text from the first answer on by itself.
        strips: it leaves out white space at the end.
    """
    images = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    text, spans = "", []
    for turn in row["messages"]:
        text += f"<|im_start|>{turn['role']}\n"
        start = len(text)
        text += turn["content"].replace("<image>", processor.image_token if placed else "") + "<|im_end|>"
        if turn["role"] == "assistant":
            spans.append((start, len(text)))
        text += "\n"
    split = spans[0][0]
    given = {"text": [text[:split]], "suffix": [text[split:]]} if suffix else {"text": [text]}
    if images:
        given["images"] = [images] if nested else images
    inputs = processor(return_tensors="pt", **given)
    ids = inputs["input_ids"]
    closes = int(ids[0, -1]) != processor.tokenizer("\n")["input_ids"][-1]
    end = ids.shape[1] + 1 if strips else ids.shape[1] - closes
    labels = torch.full_like(ids, IGNORED)
    for start, stop in spans:
        first, last = (
            end - len(processor.tokenizer(text[place:], add_special_tokens=False)["input_ids"])
            for place in (start, stop)
        )
        labels[0, first:last] = ids[0, first:last]
    return {key: value for key, value in inputs.items() if key not in ("attention_mask", "labels")}, labels


def _tokens(processor: Any, text: str, place: int, images: list[Image.Image]) -> int:
    """Tokens before a character of a text with images."""
    made = {}
    if len(images) > 1:  # what an image becomes may depend on how many the row has
        made = processor(text=[text], images=[images], return_tensors="pt", return_text_replacement_offsets=True)
    if "text_replacement_offsets" not in made:
        given = _images(images, text[:place], processor)
        return len(processor(text=[text[:place]], return_tensors="pt", **given)["input_ids"][0])
    instead = iter([part["replacement"] for part in made["text_replacement_offsets"][0]])
    pieces = text[:place].split(processor.image_token)
    expanded = pieces[0] + "".join(next(instead) + piece for piece in pieces[1:])
    return len(processor.tokenizer(expanded)["input_ids"])


def _images(images: list[Image.Image], text: str, processor: Any) -> dict[str, Any]:
    count = text.count(processor.image_token)
    return {"images": [images[:count]]} if count else {}


def train(
    directory: Path,
    rows: Sequence[dict[str, Any]],
    steps: Sequence[Sequence[int]],
    *,
    lr: float,
    dtype: torch.dtype,
    trained: str = "",
    teacher: Path | None = None,
) -> Trained:
    """SGD with momentum on the exact token mean of each step's rows, each row by itself.

    Args:
        trained: the part of the names of what is trained; "": everything is.
        teacher: the loss is KL(teacher || model) instead of cross-entropy.
    """
    config = AutoConfig.from_pretrained(directory)
    processor = load_processor(str(directory), config)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype).train()
    other = None if teacher is None else AutoModelForImageTextToText.from_pretrained(teacher, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        made = [encoded(processor, rows[row], directory.parent) for row in step]
        weight = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in made)
        total = 0.0
        for inputs, labels in made:
            cast = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
            logits = model(**cast, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum") / weight
            if other is not None:
                with torch.no_grad():
                    theirs = other(**cast, use_cache=False).logits[0, :-1]
                at = labels[0, 1:] != IGNORED
                q, p = (each[at].log_softmax(-1) for each in (logits, theirs))
                loss = F.kl_div(q, p, log_target=True, reduction="sum") / weight
            if loss.requires_grad:  # a row without images has no gradient for what reads them
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
    return Trained(losses, norms, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
