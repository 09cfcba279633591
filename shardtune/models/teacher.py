"""The teacher of a recipe that distils: its adapter, checked against the model's before anything is started."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.config.stored_recipe import stored_recipe
from shardtune.errors import ConfigError, ShardtuneError, counted
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.models.find_adapter import find_adapter
from shardtune.models.pretrained import load_tokenizer, settings_directory
from shardtune.models.vision.vision_language import VisionLanguage
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.parallel.ranks import num_ranks

KEY = "actor.teacher.model_path"
VISION = "vision_language"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a run, with the teacher as its model, in the same layout of ranks."""
    values, teacher = recipe.to_dict(), recipe.actor.teacher
    plain, model = Recipe().to_dict(), recipe.actor.model
    values["actor"]["model"] = {
        **plain["actor"]["model"],
        "model_path": teacher.model_path,
        "precision": teacher.precision or model.precision,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
        "model_type": model.model_type,
    }
    processor = recipe.actor.tokenizer.tokenizer_model or model.model_path
    own = model.model_type != VISION or _tokenizer_directory(recipe) is not None
    for key in ("loss", "teacher", "tokenizer", "neftune_alpha", "label_smoothing", "z_loss"):
        values["actor"][key] = plain["actor"][key]
    if not own:
        values["actor"]["tokenizer"]["tokenizer_model"] = processor
    values["actor"]["optim"] = plain["actor"]["optim"]
    values["data"]["eval_split"] = plain["data"]["eval_split"]
    return stored_recipe(values)


def find_teacher(recipe: Recipe, adapter: Adapter) -> CausalLM:
    """The adapter of a recipe's teacher.

    Args:
        recipe: of the run, with `actor.loss: distill`.
        adapter: of the model that is trained.

    Raises:
        ConfigError: the model is no language model, the teacher cannot be read, or has another vocabulary or other
            inputs for images.
    """
    with_images = type(adapter) is VisionLanguage
    plain = isinstance(adapter, CausalLM) and type(adapter).further_inputs is CausalLM.further_inputs
    if not isinstance(adapter, CausalLM) or not (plain or with_images):
        raise ConfigError(
            f"actor.loss: distill is for causal language models and vision-language models; {type(adapter).__name__} "
            "is none",
            where=recipe.where("actor.loss") or "actor.loss",
            remedy="leave it out, and compute the teacher in the loss of your own adapter",
        )
    path = recipe.actor.teacher.model_path
    where = recipe.where(KEY) or KEY
    try:
        own = _tokenizer(recipe)
        teacher = find_adapter(teacher_recipe(recipe), tokenizer=None if with_images else own or adapter.tokenizer)
    except ShardtuneError as error:
        raise ConfigError(f"the teacher {path}: {error.what}", where=where, remedy=error.remedy) from error
    assert isinstance(teacher, CausalLM)
    if isinstance(adapter, VisionLanguage):
        _require_images_of(recipe, adapter, teacher)
    difference = _difference(adapter.tokenizer, own, teacher.vocabulary) if own is not None else ""
    sizes = adapter.vocabulary, teacher.vocabulary
    layout = Layout.of(recipe.actor, num_ranks(recipe.runner))
    tensor = layout.tensor
    if adapter.rings(layout) != teacher.rings(layout):
        raise ConfigError(
            f"the heads of the model and those of the teacher {path} need different ways to share sequences among "
            f"{layout.sequence} ranks",
            where="actor.parallel.sequence_method",
            remedy="set actor.parallel.sequence_method: ring",
        )
    told = f"the model has {sizes[0]:,} logits, the teacher {sizes[1]:,}"
    if not difference and sizes[0] != sizes[1] and own is None:
        difference = told
    top_k = recipe.actor.teacher.top_k or 0
    if not difference and sizes[0] != sizes[1] and tensor > 1 and not top_k:
        raise ConfigError(
            f"{told} ({path}), and ranks that share matrices compare parts of one size",
            where="actor.parallel.tensor",
            remedy="leave it out, or set actor.teacher.top_k",
        )
    if top_k > min(sizes):
        raise ConfigError(
            f"actor.teacher.top_k: {top_k} is more than the {min(sizes):,} tokens that there are",
            where=recipe.where("actor.teacher.top_k"),
            remedy="lower it; some 50 hold nearly all of the probability",
        )
    if difference:
        raise ConfigError(
            f"the teacher {path} has another vocabulary than the model: {difference}",
            where=where,
            remedy="take a teacher of the same family of models, whose tokenizer is the same",
        )
    return teacher


def _require_images_of(recipe: Recipe, adapter: VisionLanguage, teacher: CausalLM) -> None:
    """Refuse a teacher that does not take the inputs for images as they are made for the model."""
    path, precision = recipe.actor.teacher.model_path, recipe.actor.teacher.precision
    kinds = [each.config.model_type for each in (adapter, teacher)]
    what = ""
    if not isinstance(teacher, VisionLanguage) or kinds[0] != kinds[1]:
        what = f"is of type {kinds[1]}, the model of type {kinds[0]}"
    elif teacher.images.cache_key() != adapter.images.cache_key():
        what = "has another processor than the model"
    if what:
        raise ConfigError(
            f"the teacher {path} {what}, and both read the same images and text",
            where=recipe.where(KEY) or KEY,
            remedy="take a teacher of the same family of models, whose processor is the same",
        )
    own = recipe.actor.model.precision
    if precision is not None and COMPUTE_DTYPE[precision] != COMPUTE_DTYPE[own]:
        raise ConfigError(
            f"actor.teacher.precision: {precision}, and images are prepared once, in actor.model.precision: {own}",
            where=recipe.where("actor.teacher.precision") or "actor.teacher.precision",
            remedy="leave it out",
        )


def _tokenizer_directory(recipe: Recipe) -> Path | None:
    """The teacher's directory, if it has a tokenizer."""
    folder = settings_directory(recipe.actor.teacher.model_path)
    has_one = folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)
    return folder if has_one else None


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The teacher's own; None where its directory has none."""
    folder = _tokenizer_directory(recipe)
    if folder is None:
        return None
    return load_tokenizer(str(folder), trust_remote_code=recipe.actor.model.trust_remote_code)


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, rows: int) -> str:
    """The first token that the teacher does not know by the model's number; "" where it knows all of them.

    Tokens that one of the two has beyond the other's vocabulary do no harm while the teacher has `rows` for them.
    """
    first, second = ours.get_vocab(), theirs.get_vocab()
    named = {number: token for token, number in second.items()}
    different = sorted(
        token
        for token, number in first.items()
        if second.get(token, number) != number or named.get(number, token) != token or number >= rows
    )
    if not different:
        return ""
    token = different[0]
    theirs_is = f"{second[token]} of the teacher" if token in second else "none of the teacher"
    if token not in second and first[token] in named:
        theirs_is = f"{named[first[token]]!r} of the teacher"
    differ = f"{counted(len(different), 'token')} {'differs' if len(different) == 1 else 'differ'}"
    return f"{differ}, as {token!r}, whose number is {first[token]}, and {theirs_is}"


def unknown_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> list[str]:
    """A note on the tokens that a teacher has not been trained with; none if it has been with all of them."""
    found = sorted(ours.get_vocab().keys() - theirs.get_vocab().keys())
    if not found:
        return []
    return [f"teacher: its tokenizer lacks {', '.join(map(repr, found[:3]))}{', …' if len(found) > 3 else ''}"]
