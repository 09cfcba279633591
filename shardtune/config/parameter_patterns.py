"""Names for the parts of vision-language models that are the same in every model family."""

from __future__ import annotations

PARTS = {
    "vision_tower": r"(^|\.)(vision_tower|visual|vision_model|vision_encoder|image_tower|vision_backbone)\."
    r"(?!merger\.|deepstack_merger_list\.)",
    "projector": r"(^|\.)(multi_modal_projector|mm_projector|projector|connector|"
    r"visual\.merger|visual\.deepstack_merger_list)\.",
    "language_model": r"(^|\.)(language_model|text_model)\.|(^|\.)lm_head\.",
}
"""For each part, a regular expression that matches the names of its parameters only."""


def as_pattern(text: str) -> str:
    """The regular expression of a recipe's name pattern: a part's, or the pattern itself."""
    return PARTS.get(text, text)
