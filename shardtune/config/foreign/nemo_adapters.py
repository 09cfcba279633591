"""LoRA of NeMo Automodel, and which parts of a model are frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.nemo_sections import NAME, OF_NEMO, count, left
from shardtune.config.foreign.values import as_number, is_on, listed, number

EXCLUDED = "actor.model.lora.exclude_modules"
PARTS = {"freeze_vision_tower": "vision|visual|image_encoder", "freeze_language_model": "language|text|llm"}
"""The words by which each key finds its parts, in names of modules in any case."""
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj"),
    *("gate_up_proj", "lm_head", "fc1", "fc2"),
)
"""Names that models give whole: no other module ends in one of them."""


def adapters(c: Conversion, *, base_dtype: str) -> None:
    """LoRA by its `PeftConfig`; `base_dtype` is that of the weights there."""
    if not c.has("peft"):
        c.not_needed(
            "four bits are for the frozen base of an adapter", *(n for n in c.given if left(c, n, "quantization"))
        )
        return
    kind = str(c.get("peft._target_", f"{OF_NEMO}PeftConfig"))
    c.put("actor.model.is_lora", True, "peft._target_", comment="peft")
    if not (kind.startswith(OF_NEMO) and kind.endswith("PeftConfig")):
        c.missing("LoRA is what the recipe has; actor.model.lora.peft takes PEFT's other adapters", "peft._target_")
    rank, alpha, dropout = "peft.dim", "peft.alpha", "peft.dropout"
    c.put("actor.model.lora.r", count(c, rank) or 8, rank, comment=rules.origin(c, rank))
    c.put("actor.model.lora.alpha", as_number(c.get(alpha, 32)), alpha, comment=rules.origin(c, alpha))
    c.put("actor.model.lora.dropout", as_number(c.get(dropout, 0.0)), dropout, comment=rules.origin(c, dropout))
    c.put("actor.model.lora.use_dora", is_on(c.get("peft.use_dora")), "peft.use_dora")
    if number(c.get(dropout, 0)) and c.get("peft.dropout_position", "post") == "post":
        c.notes.append(f"{NAME} drops out what the adapter gives, here its inputs are dropped out, as in PEFT")
    c.notes.append(
        "A of an adapter begins otherwise (peft.lora_A_init: xavier there, PEFT's own draws here); B is 0 in both"
    )
    _targets(c)
    _base(c, base_dtype)
    c.missing("actor.model.lora.rank_pattern gives experts a rank of their own", "peft.moe_rank_scaling")
    c.not_needed("it changes no number, or is in the notes below", *(n for n in c.given if left(c, n, "peft")))


def _base(c: Conversion, dtype: str) -> None:
    """The frozen weights, in four bits by its section `quantization`."""
    four, kind = is_on(c.get("quantization.load_in_4bit")), "quantization.bnb_4bit_quant_type"
    base = "nf4" if four else "bf16" if dtype == "bf16" else "auto"
    c.put("actor.model.lora.base_dtype", base, "quantization.load_in_4bit", comment="the frozen weights")
    if is_on(c.get("quantization.load_in_8bit")):
        c.missing("there are no eight bits: actor.model.lora.base_dtype: nf4", "quantization.load_in_8bit")
    if four and str(c.get(kind, "nf4")) != "nf4":
        c.missing("four bits are nf4 here", kind)
    c.not_needed(
        "the scales of NF4 blocks are stored as docs/lora.md has it",
        *(n for n in c.given if left(c, n, "quantization")),
    )


def _targets(c: Conversion) -> None:
    """Which modules get LoRA: `*` of its patterns is any text of a module's full name."""
    every, names, without = "peft.match_all_linear", "peft.target_modules", "peft.exclude_modules"
    targets, excluded = [[str(one) for one in listed(c.get(key))] for key in (names, without)]
    if is_on(c.get(every)) or targets == ["*"] or (excluded and not targets):
        name = every if is_on(c.get(every)) else names if targets else without
        c.put("actor.model.lora.target_modules", "all-linear", name, comment=name)
        if not any(re.fullmatch(_regex(one), "lm_head") for one in excluded):
            c.notes.append(f"all-linear leaves the head out, which {name} does not: write lm_head into a list")
    else:
        c.put("actor.model.lora.target_modules", _modules(targets or ["*_proj"]), names, comment=rules.origin(c, names))
    if excluded:
        c.put(EXCLUDED, _modules(excluded), without)
    for pattern in (*targets, *excluded):
        if re.search(r"[1-9]\d*\.\*", pattern):
            c.notes.append(f"{pattern}: layers.1.* is layers 10 to 19 as well for {NAME}; here it is that layer alone")
    c.not_needed("the modules are named", every)


def _modules(patterns: Sequence[str]) -> object:
    """Names, where each pattern is one (`*.q_proj`, `lm_head`); otherwise one regular expression of full names."""
    names = [pattern.removeprefix("*.") for pattern in patterns]
    names = [name.removeprefix("*") if name.removeprefix("*") in PROJECTIONS else name for name in names]
    if all(re.fullmatch(r"\w+", name) for name in names):
        return names
    return "|".join(_regex(pattern) for pattern in patterns)


def _regex(pattern: str) -> str:
    """A pattern as a regular expression of full names; without `*` it is the end of one."""
    if "*" not in pattern:
        return rf"(.*\.)?{re.escape(pattern)}"
    if pattern.startswith("*.") and "*" not in pattern[2:]:
        return rf"(.*\.)?{re.escape(pattern[2:])}"
    return ".*".join(re.escape(part) for part in pattern.split("*"))


def frozen(c: Conversion, *, has_images: bool) -> None:
    """Which parts of a model with images are not trained; by default the vision tower."""
    section = c.get("freeze_config")
    if not isinstance(section, Mapping):
        return
    if not has_images:
        why = "its recipes for text do not read it"
        c.not_needed(why, *(n for n in c.given if n == "freeze_config" or n.startswith("freeze_config.")))
        return
    on = {key: is_on(section.get(key, key == "freeze_vision_tower")) for key in PARTS}
    names = [f"freeze_config.{key}" for key, is_frozen in on.items() if is_frozen]
    c.not_needed("the part is trained, as it is here", *(f"freeze_config.{key}" for key in on if not on[key]))
    words = "|".join(PARTS[key] for key in PARTS if on[key])
    if not words:
        return
    if not c.has("peft"):
        parts = [rf"(?i:({PARTS[key]}).*\.)" for key in PARTS if on[key]]
        c.put(
            "actor.model.freeze", parts, *names, comment="freeze_config: parts by these words in their names, as there"
        )
        return
    excluded = [_regex(str(one)) for one in listed(c.get("peft.exclude_modules"))]
    c.put(EXCLUDED, "|".join([*excluded, f"(?i:.*({words}).*)"]), *names, comment="freeze_config, and exclude_modules")
