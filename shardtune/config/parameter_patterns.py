"""Parts of models that have eyes, by names that mean the same in every family."""

from __future__ import annotations

PARTS = {
    "vision_tower": r"(^|\.)(vision_tower|visual|vision_model|vision_encoder|image_tower|vision_backbone)\."
    r"(?!merger\.|deepstack_merger_list\.)",
    "projector": r"(^|\.)(multi_modal_projector|mm_projector|projector|connector|"
    r"visual\.merger|visual\.deepstack_merger_list)\.",
    "language_model": r"(^|\.)(language_model|text_model)\.|(^|\.)lm_head\.",
}
"""Part to a regular expression that its parameters' names match, and no other part's."""


def as_pattern(text: str) -> str:
    """The regular expression that a recipe's name pattern stands for: a part's, or the pattern itself."""
    return PARTS.get(text, text)
