"""Names for the parts of vision-language models that are the same in every model family."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_TOWERS = (
    "vision_tower|visual|vision_model|vision_encoder|image_tower|video_tower|vision_backbone|high_res_vision_model"
)
_IN_TOWERS = "merger|merger_list|deepstack_merger_list|patch_merger|connector"
"""Projectors that some families have as a part of their tower."""
_PROJECTORS = (
    "multi_modal_projector|mm_projector|projector|connector|layerwise_projectors|spatial_projectors|aligner|"
    "vision_projection|visual_projection|language_projection|image_to_text_projection|high_res_vision_proj|"
    "high_res_vision_neck|qformer|resampler_model|embed_vision|vision_embed_tokens|visual_embeddings_table"
)
_VECTORS = "image_newline|view_separator|query_tokens|high_res_vision_alpha"
"""Parameters between projector and language model."""
_HEAD = r"(^|\.)lm_head\."
PARTS = {
    "vision_tower": rf"(^|\.)({_TOWERS})\.(?!({_IN_TOWERS})\.)",
    "projector": rf"(^|\.)({_PROJECTORS})\.|(^|\.)({_VECTORS})$|((^|\.)({_TOWERS})\.|^model\.|^)({_IN_TOWERS})\.|"
    r"^(model\.)?vision_adapter\.",
    "language_model": rf"(^|\.)(language_model|text_model|text_decoder)\.|{_HEAD}|"
    r"^model\.(embed_tokens|layers|gated_cross_attn_layers|norm)\.",
}
"""For each part, a regular expression that matches the names of its parameters only."""


SIGNS = re.compile(r"[\\()\[\]{}|^$*+?]")
"""What a regular expression has, and no name of a module."""


def is_pattern(targets: str | Sequence[str]) -> bool:
    """Whether `target_modules` is a regular expression for whole names, and no name."""
    return isinstance(targets, str) and SIGNS.search(targets) is not None


def as_pattern(text: str) -> str:
    """The regular expression of a recipe's name pattern: a part's, or the pattern itself."""
    return PARTS.get(text, text)


def matching(text: str, names: Iterable[str]) -> list[str]:
    """The names that a recipe's name pattern matches.

    A head alone is no language model: of a model whose other parts have names that are not known, nothing is matched.
    """
    found = [name for name in names if re.search(as_pattern(text), name)]
    is_head = text == "language_model" and all(re.search(_HEAD, name) for name in found)
    return [] if is_head else found


def remedy_of(text: str, names: Sequence[str]) -> str:
    """What to write instead of a pattern that matches none of some names: the nearest part or module, or such names."""
    split = [name.split(".") for name in names]
    modules = dict.fromkeys(".".join(parts[:end]) for parts in split for end in range(1, len(parts)))
    words = [*PARTS, *modules, *dict.fromkeys(word for module in modules for word in module.split("."))]
    near = [word for word in difflib.get_close_matches(text, words, n=3, cutoff=0.75) if matching(word, names)]
    return (f"did you mean {near[0]}? " if near else "") + f"names look like {', '.join(names[:3])}"
