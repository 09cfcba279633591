"""What a run is made from beside the values of its recipe: data, weights, code, objects; and what has changed of it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.atomic import write_json
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import read_training_state
from shardtune.config import Recipe
from shardtune.config.hub_name import split_revision
from shardtune.config.model_names import registered
from shardtune.config.paths import MODEL_KEYS, named_files
from shardtune.config.tree import get_value
from shardtune.config.user_code import code_hashes
from shardtune.data.cache_directory import cache_root, file_digest
from shardtune.data.sources.entries import named_sets
from shardtune.data.sources.fingerprint import OUTLINE, contents
from shardtune.data.sources.resolve import data_fingerprints
from shardtune.errors import CheckpointError, DataError
from shardtune.run.choose_worker import Objects
from shardtune.run.identity import MANIFEST, read_manifest
from shardtune.run.resume_check import ALLOWED, is_free

MODEL, MODEL_TYPE = "actor.model.model_path", "actor.model.model_type"
TOKENIZER, TEACHER = "actor.tokenizer.tokenizer_model", "actor.teacher.model_path"
TRAIN_DATA = "data.train_data_paths"
IN_MEMORY = "the object in memory"
NOT_COMPARED = "not compared"
KNOWN = "models_in_memory"
SAMPLED_VALUES = 4096
"""Values of each tensor of a model in memory that are hashed."""
OWN_CODE = ("shardtune.", "torch.", "transformers.", "builtins", "abc", "typing")

Inputs = dict[str, list[tuple[str, str]]]
"""By recipe key: the name and fingerprint of each file or object. As JSON the pairs are lists."""


def object_inputs(recipe: Recipe, objects: Objects) -> Inputs:
    """The fingerprints of a model and tokenizer in memory, which training will change."""
    found = Inputs()
    if objects.tokenizer is not None:
        found[TOKENIZER] = [(IN_MEMORY, _tokenizer_fingerprint(objects.tokenizer, recipe.actor.added_tokens))]
    if objects.model is not None:
        found[MODEL] = [(IN_MEMORY, model_fingerprint(objects.model))]
    return found


def run_inputs(recipe: Recipe, objects: Objects, in_memory: Inputs, *, whole: bool = False) -> Inputs:
    """The fingerprints of what a recipe names and of the objects in its place.

    Data files are hashed whole, once, those of `data.cache: by_file` by their outlines; of weights, files of up to
    1 MiB are hashed whole and others by samples. Files that rows refer to, and data sets that are named on the Hub, are
    left out; batches in memory are not compared.

    Args:
        recipe: of the run.
        objects: rows in memory.
        in_memory: from `object_inputs`.
        whole: hash those files whole, too.
    """
    tree, found = recipe.to_dict(), {key: list(pairs) for key, pairs in in_memory.items()}

    def add(key: str, name: str, content: str | None) -> None:
        if content is not None and not is_free(key):
            found.setdefault(key, []).append((name, content))

    for key, path in named_files(tree):
        for name, content in contents(Path(path)).items():
            add(key, str(Path(path) / name), content)
    for key in MODEL_KEYS:
        for name, content in _of_hub(get_value(tree, key)):
            add(key, name, content)
    for name, digest in code_hashes([plugin for plugin in recipe.plugins if not plugin.endswith(".py")]).items():
        add("plugins", name, digest)
    for thing in registered(recipe.actor.model.model_type):
        add(MODEL_TYPE, thing.__qualname__, _code_of(thing))
    root = cache_root(recipe.data.cache_dir)
    for key, given in (("train_data_paths", objects.train_data), ("eval_data_paths", objects.eval_data)):
        outlines = recipe.data.cache == "by_file" and key == "train_data_paths" and not whole
        for of_set, spec in named_sets(tree["data"][key] if given is None else given).items():
            named = (
                data_fingerprints(spec, root, outlines=outlines, quarantine=recipe.data.quarantine)
                if given is None
                else _of_object(spec, root)
            )
            for name, digest in named:
                add(f"data.{key}.{of_set}".rstrip("."), name, digest)
    return found


def _of_object(spec: object, root: Path) -> list[tuple[str, str | None]]:
    try:
        return data_fingerprints(spec, root)
    except DataError:  # no rows: a trainer of a user's own takes batches of tensors, or a loader
        return [(IN_MEMORY, NOT_COMPARED)]


def known_models(run_dir: Path | None, in_memory: Inputs) -> list[str]:
    """The fingerprints of all models in memory that a run was started with, or has trained so far, and of the given.

    A caller's model is trained in place, so the one that comes with the same command later is any of these.
    """
    before = [] if run_dir is None else read_manifest(run_dir).get(KNOWN, [])
    return list(dict.fromkeys([*before, *(content for _, content in in_memory.get(MODEL, []))]))


def record_models(run_dir: Path, in_memory: Inputs) -> None:
    """Add the caller's model, as training left it, to the manifest."""
    if MODEL in in_memory:
        write_json(run_dir / MANIFEST, {**read_manifest(run_dir), KNOWN: known_models(run_dir, in_memory)})


def changed_inputs(run_dir: Path, now: Inputs) -> dict[str, list[str]]:
    """How the inputs differ from those that the manifest of a run records, by recipe key; a sentence each."""
    manifest = read_manifest(run_dir)
    if "inputs" not in manifest:  # of an earlier version
        return {}
    recorded: Mapping[str, Sequence[Sequence[str]]] = manifest["inputs"]
    changes: dict[str, list[str]] = {}
    for key in dict.fromkeys([*recorded, *now]):
        before, current = recorded.get(key, []), now.get(key, [])
        if (found := _changes(before, current)) and not (
            key == MODEL and dict(current).get(IN_MEMORY) in manifest[KNOWN]
        ):
            changes[key] = found
    return changes


def _changes(recorded: Sequence[Sequence[str]], now: Sequence[tuple[str, str]]) -> list[str]:
    """How the files and objects of one key differ from the recorded ones; empty for the same, perhaps elsewhere."""
    if [content for _, content in recorded] == [content for _, content in now]:
        return []
    before, current = {name: content for name, content in recorded}, dict(now)  # noqa: C416
    found = [
        f"{name} {'has changed' if name in current else _lost(name)}"
        for name, content in before.items()
        if current.get(name) != content
    ]
    return [*found, *(f"{name} is new" for name in current if name not in before)] or ["reordered"]


def _lost(name: str) -> str:
    """How a file or object is missing: the recipe may name another one in its place."""
    return "is there, but no longer named" if Path(name).is_absolute() and Path(name).exists() else "is gone"


def check_same_teacher(run_dir: Path, recipe: Recipe) -> None:
    """Refuse to continue a run whose teacher has other files than the manifest records.

    The weights of the model come from the checkpoint; those of the teacher are read again.
    """
    path = recipe.actor.teacher.model_path
    recorded: Mapping[str, Sequence[Sequence[str]]] = read_manifest(run_dir).get("inputs", {})
    allowed = recipe.runner.allows(TEACHER)
    if path is None or TEACHER not in recorded or allowed:
        return
    found = contents(Path(path)).items() if Path(path).is_absolute() else ()
    now = [(str(Path(path) / name), content) for name, content in found] or _of_hub(path)
    if changed := _changes(recorded[TEACHER], now):
        raise CheckpointError(
            "the teacher is not the one that this run was trained with so far:\n    "
            + "\n    ".join(_shortened(changed)),
            where=str(run_dir),
            remedy="put it back, choose another runner.logger.experiment_name, or go on all the same with "
            f"{recipe.runner.allowing(TEACHER)}",
        )


def check_finished(run_dir: Path, recipe: Recipe, objects: Objects) -> list[str]:
    """Refuse the result of a finished run for inputs that it was not made from; returns notes on the permitted ones."""
    refused, notes = list[str](), list[str]()
    keys, recorded = list[str](), read_manifest(run_dir).get("inputs", {}).get(TRAIN_DATA, [])
    whole = any(content is not None and not content.startswith(OUTLINE) for _, content in recorded)
    now = run_inputs(recipe, objects, object_inputs(recipe, objects), whole=whole)
    for key, pairs in now.items():
        if (IN_MEMORY, NOT_COMPARED) in pairs:
            notes.append(f"{key}: batches in memory are not compared with those that the run was trained on")
    changed = changed_inputs(run_dir, now)
    if recipe.data.cache == "by_file" and (found := _changed_files(run_dir, cache_root(recipe.data.cache_dir))):
        changed[TRAIN_DATA] = found
    for key, changes in changed.items():
        lines = [f"{key}: {change}" for change in _shortened(changes)]
        if recipe.runner.allows(key):
            notes += [f"{line} ({ALLOWED})" for line in lines]
        else:
            refused += lines
            keys.append(key)
    if refused:
        raise CheckpointError(
            "the run is finished, and what it was made from has changed since:\n    " + "\n    ".join(refused),
            where=str(run_dir),
            remedy=(
                "choose another runner.logger.experiment_name to train on what is there now, or start over with "
                "runner.overwrite=true; the old result is left as it is: load it with shardtune.load_run, or accept it "
                f"with {recipe.runner.allowing(*keys)}"
            ),
        )
    return notes


def _changed_files(run_dir: Path, root: Path) -> list[str]:
    """The data files that have changed since the last checkpoint of a run, of those that were read and hashed.

    A file with the time stamp of then is the same, and one that is no longer there may have been moved.
    """
    last = CheckpointStore(run_dir / "checkpoints").latest()
    found = list[str]()
    for record in [] if last is None else read_training_state(last)["data_files"]:
        file, content = Path(record["file"]), record.get("content")
        if content is None or not file.is_file() or file.stat().st_mtime_ns == record["changed"]:
            continue
        if file_digest(file, root) != content:
            found.append(f"{file} has changed")
    return found


def input_notes(run_dir: Path, now: Inputs) -> list[str]:
    """Notes on what has changed since a run was last started, besides its training rows (`check_same_data`)."""
    changes = changed_inputs(run_dir, now)
    return [
        f"{key}: {change} since this run was started"
        for key, found in changes.items()
        if key != TRAIN_DATA
        for change in _shortened([one for one in found if not one.startswith(IN_MEMORY)])
    ]


def _shortened(changes: Sequence[str]) -> list[str]:
    return [*changes[:4], *([f"and {len(changes) - 4} more"] if len(changes) > 4 else [])]


def _of_hub(name: object) -> list[tuple[str, str]]:
    """A Hub model or tokenizer that is on this machine, with its commit; empty for a directory."""
    if not isinstance(name, str) or Path(name).is_absolute():
        return []
    repository, revision = split_revision(name)
    for file in ("config.json", "tokenizer_config.json"):
        found = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(found, str):
            return [(name, Path(found).parent.name)]
    return []


def _code_of(thing: type | Callable[..., object]) -> str | None:
    """A hash of the source of a user's function, or class with its bases; None where it cannot be read."""
    kinds = inspect.getmro(thing) if isinstance(thing, type) else [thing]
    try:
        texts = [inspect.getsource(kind) for kind in kinds if not f"{kind.__module__}.".startswith(OWN_CODE)]
    except (OSError, TypeError):
        return None
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, added: Sequence[str]) -> str:
    """A hash of a tokenizer's vocabulary, special tokens and template, without the tokens that the recipe adds."""
    vocabulary = sorted(item for item in tokenizer.get_vocab().items() if item[0] not in added)
    parts = [vocabulary, sorted(tokenizer.special_tokens_map.items(), key=str), tokenizer.chat_template]
    return hashlib.blake2b(str(parts).encode(), digest_size=16).hexdigest()


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel) -> str:
    """A hash of the names, shapes and sampled values of a model's tensors; the dtype has no part in it.

    Of a sharded model each tensor is gathered in turn; every rank calls it then.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        values = whole.detach().reshape(-1)
        sample = values[:: max(1, len(values) // SAMPLED_VALUES)].to("cpu")
        kept = sample.double() if sample.is_floating_point() else sample.to(torch.int64)
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + kept.numpy().tobytes())
    return digest.hexdigest()
