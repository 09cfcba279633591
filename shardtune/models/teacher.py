"""The teacher of a recipe that distils: its adapter, checked against the model's before anything is started."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.config.stored_recipe import stored_recipe
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.models.find_adapter import find_adapter
from shardtune.models.pretrained import load_tokenizer, settings_directory
from shardtune.parallel.ranks import num_ranks

KEY = "actor.teacher.model_path"
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
    }
    for key in ("loss", "teacher", "tokenizer", "neftune_alpha", "label_smoothing", "z_loss"):
        values["actor"][key] = plain["actor"][key]
    values["actor"]["optim"] = plain["actor"]["optim"]
    values["data"]["eval_split"] = plain["data"]["eval_split"]
    return stored_recipe(values)


def find_teacher(recipe: Recipe, adapter: Adapter) -> CausalLM:
    """The adapter of a recipe's teacher.

    Args:
        recipe: of the run, with `actor.loss: distill`.
        adapter: of the model that is trained.

    Raises:
        ConfigError: the model is no causal language model, the teacher cannot be read, or has another vocabulary.
    """
    if not isinstance(adapter, CausalLM) or type(adapter).further_inputs is not CausalLM.further_inputs:
        raise ConfigError(
            f"actor.loss: distill is for causal language models; {type(adapter).__name__} is none",
            where=recipe.where("actor.loss") or "actor.loss",
            remedy="leave it out, and compute the teacher in the loss of your own adapter",
        )
    path = recipe.actor.teacher.model_path
    where = recipe.where(KEY) or KEY
    try:
        own = _tokenizer(recipe)
        teacher = find_adapter(teacher_recipe(recipe), tokenizer=own or adapter.tokenizer)
    except ShardtuneError as error:
        raise ConfigError(f"the teacher {path}: {error.what}", where=where, remedy=error.remedy) from error
    assert isinstance(teacher, CausalLM)
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
    if not difference and sizes[0] != sizes[1] and (own is None or tensor > 1):
        difference = f"the model has {sizes[0]:,} logits, the teacher {sizes[1]:,}"
    if (top_k := recipe.actor.teacher.top_k or 0) > min(sizes):
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


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The teacher's own; None where its directory has none."""
    path = recipe.actor.teacher.model_path
    folder = settings_directory(path)
    if folder is None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
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
    return f"{len(different):,} tokens differ, as {token!r}, whose number is {first[token]}, and {theirs_is}"


def unknown_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> list[str]:
    """A note on the tokens that a teacher has not been trained with; none if it has been with all of them."""
    found = sorted(ours.get_vocab().keys() - theirs.get_vocab().keys())
    if not found:
        return []
    return [f"teacher: its tokenizer lacks {', '.join(map(repr, found[:3]))}{', …' if len(found) > 3 else ''}"]
