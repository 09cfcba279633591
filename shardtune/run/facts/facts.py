"""What the last checkpoint's model of a run gives: bits, logits, answers, tokens, rendered conversations.

Run as a program: `python -m shardtune.run.facts.facts RUN FOLDER`. It exports that checkpoint into `FOLDER` and writes
`own.pt`, what its model gives, and `job.pt`, what a program without this package is to read:
`shardtune/verify/claims/plain_reader.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from shardtune.batch import PackedBatch, Prompt, Sample
from shardtune.checkpoint.export_check import round_adapter, to_compare, way_of
from shardtune.checkpoint.export_check_process import ADAPTED_LOGITS, LOGITS, MODEL, num_embeddings
from shardtune.checkpoint.hf_save import disk_dtype, stop_tokens
from shardtune.checkpoint.weight_files import stored_dtype
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Row, frames_of
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.errors import DataError, ShardtuneError
from shardtune.evaluate.generate import Sampling
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.causal_lm import CausalLM
from shardtune.models.generation_settings import own_settings
from shardtune.models.language_model import LanguageRoot
from shardtune.models.lora.attach import is_adapted
from shardtune.models.lora.config import CONFIG_FILE
from shardtune.models.lora.init import changes_base
from shardtune.models.vision.vision_language import VisionLanguage
from shardtune.run.facts.rows import first_rows
from shardtune.run.facts.texts import UNUSUAL, conversations, image_texts, strings, text_facts
from shardtune.run.facts.weights import described, loaded_otherwise, shared_names, stored_dtypes
from shardtune.run.identity import FINAL
from shardtune.run.run import NO_EVALUATION, Run
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker

OWN, JOB = "own.pt", "job.pt"
EXPORTED, MERGED = "exported", "merged"
CAUSAL, VISION, CLASS, IN_FILES = "causal_lm", "vision_language", "model", "files"
"""What of a directory is read: a language model, one with images, another model of transformers, or files."""
ROWS = 4
"""So many rows are compared, and as many answers."""
LONGEST, LAST = 256, 64
"""Of a row of text so many tokens at most; logits are compared at so many at its end."""
NEW_TOKENS = 16
Part = dict[str, Any]
"""Tensors, texts and numbers by name, as torch.save writes them."""
Inputs = dict[str, torch.Tensor]


def main(run_directory: Path, folder: Path) -> None:
    """Export a run, and write what its model gives and what is to be read."""
    own, job = facts(Run(run_directory, trained_here=True), folder)
    torch.save(own, folder / OWN)
    torch.save(job, folder / JOB)


def facts(run: Run, folder: Path) -> tuple[Part, Part]:
    """What the model of a finished run gives, and what is to be read.

    Args:
        run: finished.
        folder: for exported directories and images.
    """
    places = _export(run, folder)
    worker, notes = _worker(run, "latest"), list[str]()
    adapter = worker.adapter if isinstance(worker, SFTWorker) else None
    encoder = adapter.encoder(with_prompts=True) if isinstance(adapter, CausalLM) else None
    rows: list[tuple[Row, Sample]] = []
    if isinstance(encoder, ChatEncoder):
        try:
            rows = first_rows(run.recipe, encoder, ROWS)
        except DataError as error:
            notes.append(f"rows of the recipe: its worker reads them itself ({error.what})")
    own: Part = {"notes": notes, "stops": list(worker.end_of_turn_ids), "may_stop": _stops(worker), "directories": {}}
    job: Part = {"stops": own["stops"], "last": LAST, "new_tokens": NEW_TOKENS, "dtype": _dtype(run), "directories": {}}
    job["base"] = run.recipe.actor.model.model_path
    written = rows if encoder is None or frames_of(encoder) is None else []
    if rows and not written:
        notes.append("the rendered prompts and the processor's inputs of rows, which are frames of robot data")
    texts = strings([row for row, _ in rows])
    own["text"], job["text"] = _text(worker, encoder, written, texts, notes)
    inputs = [_inputs(adapter, sample) for _, sample in rows] if isinstance(adapter, CausalLM) else []
    shown = image_texts(encoder, written, folder) if isinstance(encoder, ImageChatEncoder) else []
    own["inputs"], job["images"] = [inputs[number] for number, *_ in shown], [(text, files) for _, text, files in shown]
    merges = MERGED in places and not changes_base(worker.inner_model)
    job["merged"] = str(places[MERGED]) if merges else None
    speaks = _kind(worker, places[FINAL]) in (CAUSAL, VISION)
    del worker
    own["unusable"] = None
    try:
        job["prompts"] = list(_answers(run, [sample for _, sample in rows])) if speaks else []
    except ShardtuneError as error:
        job["prompts"], own["unusable"] = [], error.what
    own["answers"] = [answer for _, answer in job["prompts"]]
    for name, place in places.items():
        own["directories"][name], job["directories"][name] = _directory(_worker(run, "latest"), place, inputs, notes)
    return own, job


def _export(run: Run, folder: Path) -> dict[str, Path]:
    """The directories: `final/`, and those that are exported from the last checkpoint."""
    places = {FINAL: run.dir / FINAL, EXPORTED: run.export(folder / EXPORTED, checkpoint="latest", check=False)}
    if run.recipe.actor.model.is_lora:
        # In full precision, where a wrong scale of a small change shows.
        dtype = "auto" if run.recipe.actor.model.precision == "fp64" else "fp32"
        places[MERGED] = run.export(folder / MERGED, checkpoint="latest", dtype=dtype, merge=True, check=False)
    return places


def _worker(run: Run, checkpoint: str) -> FSDPSftWorker:
    """The model of a checkpoint, in full precision."""
    exactly = [f"actor.model.precision={'fp64' if _dtype(run) == 'float64' else 'fp32'}"]
    if run.recipe.actor.model.is_lora:
        exactly.append("actor.model.lora.base_dtype=auto")
    return run.worker(checkpoint, *NO_EVALUATION, *exactly)


def _stops(worker: FSDPSftWorker) -> list[int]:
    """All tokens at which what is exported may stop: those that end a turn, and the base model's."""
    model = worker.inner_model
    generation = own_settings(model)  # None of a classifier
    known = None if generation is None else generation.eos_token_id
    return stop_tokens(known, worker.tokenizer, worker.end_of_turn_ids)


def _dtype(run: Run) -> str:
    return "float64" if run.recipe.actor.model.precision == "fp64" else "float32"


def _text(
    worker: FSDPSftWorker,
    encoder: object,
    rows: Sequence[tuple[Row, Sample]],
    further: Iterable[str],
    notes: list[str],
) -> tuple[Part | None, Part | None]:
    """What the tokenizer and the template give, and the texts and conversations; None without a tokenizer."""
    if worker.tokenizer is None:
        return None, None
    chats = conversations(encoder, rows, notes) if isinstance(encoder, ChatEncoder) else []
    rendered = [chat.pop("text") for chat in chats]
    texts = [*UNUSUAL, *further, *rendered]
    found = text_facts(worker.tokenizer, texts, worker.chat_template)
    return {**found, "conversations": rendered}, {"texts": texts, "conversations": chats}


def _inputs(adapter: CausalLM, sample: Sample) -> Inputs:
    """The inputs of the model's own forward for a row alone."""
    if not sample.fields:
        return {"input_ids": torch.from_numpy(sample.input_ids[:LONGEST]).long()[None]}
    batch = adapter.collate([sample], [0], {})
    assert isinstance(batch, PackedBatch)
    return {"input_ids": batch.input_ids[None], **adapter.further_inputs(batch)}


def _answers(run: Run, samples: Sequence[Sample]) -> Iterator[tuple[Inputs, list[int]]]:
    """Prompts as the inputs of `generate`, and the greedy answers of `final/`, one by one."""
    worker = _worker(run, "final")
    assert isinstance(worker, SFTWorker)
    generator, root = worker.generator(), worker.root
    assert isinstance(root, LanguageRoot)
    for sample in samples:
        tokens = sample.input_ids[:NEW_TOKENS] if sample.prompt_ids is None else sample.prompt_ids
        prompt = Prompt(tokens, sample.fields)
        (answer,) = generator.continuations([prompt], Sampling(NEW_TOKENS))
        further = root.prompt_inputs([prompt], len(tokens))
        yield {"input_ids": torch.from_numpy(tokens).long()[None], **further}, answer


def _kind(worker: FSDPSftWorker, place: Path) -> str:
    """What of a directory is read."""
    way, name = way_of(worker.inner_model, place), type(worker.inner_model).__name__
    if way in (LOGITS, ADAPTED_LOGITS):
        return CAUSAL
    adapter = worker.adapter if isinstance(worker, SFTWorker) else None
    sees = isinstance(adapter, VisionLanguage) and not isinstance(adapter, ActingAdapter)
    known = sees and name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    if known and (way == MODEL or _has_base(place)):
        return VISION
    return CLASS if way == MODEL else IN_FILES


def _has_base(place: Path) -> bool:
    """Whether an adapter's directory names its base model."""
    file = place / CONFIG_FILE
    return file.is_file() and bool(json.loads(file.read_text()).get("base_model_name_or_path"))


@torch.no_grad()
def _directory(worker: FSDPSftWorker, place: Path, inputs: Sequence[Inputs], notes: list[str]) -> tuple[Part, Part]:
    """What a model gives, rounded as it is in a directory; and what of that directory is to be read."""
    worker.weights.restore_model()
    kind, model = _kind(worker, place), worker.inner_model.cpu().eval()
    adapted, only_adapter = is_adapted(model), (place / CONFIG_FILE).is_file()
    own: Part = {
        "kind": kind,
        "adapter": only_adapter,
        "reordered": adapted and (not only_adapter or changes_base(model)),
    }
    if kind == IN_FILES or only_adapter:
        own |= _files(model, place, notes)
    else:
        own["tensors"] = described(to_compare(model, place), disk_dtype(model, stored_dtype(place)))
        own["shared"] = None if adapted else shared_names(model)
    if kind == CLASS and isinstance(model, PreTrainedModel):
        own["labels"] = dict(model.config.id2label or {})
    rows = list(inputs)
    if kind in (CAUSAL, VISION):
        assert isinstance(model, PreTrainedModel)
        if only_adapter:
            round_adapter(model, place)
        elif not adapted:
            on_disk = disk_dtype(model, stored_dtype(place))
            for name, parameter in model.named_parameters():  # buffers keep their dtype
                parameter.data = parameter.data.to(on_disk(name, parameter))
        model.set_attn_implementation("eager")
        rows = rows or [{"input_ids": (torch.arange(LAST) * 7919 % num_embeddings(model))[None]}]
        own["logits"] = [model(**row, use_cache=False).logits[0, -LAST:].clone() for row in rows]
    return own, {"path": str(place), "kind": kind, "adapter": only_adapter and kind != IN_FILES, "rows": rows}


def _files(model: nn.Module, place: Path, notes: list[str]) -> Part:
    """What the files of a directory hold."""
    if (place / CONFIG_FILE).is_file() and not _has_base(place):
        notes.append("logits and answers of the adapter: its base model was made in the run and is in no file")
    tensors, stored = to_compare(model, place), stored_dtypes(place)
    if not tensors:
        notes.append("the adapter's tensors: it began as a part of the base weights, and is saved as the change")
        return {"tensors": None}
    own: Part = {"tensors": described(tensors, lambda name, tensor: stored.get(name, tensor.dtype))}
    if not is_adapted(model) and not isinstance(model, PreTrainedModel):
        own["loaded_otherwise"] = loaded_otherwise(model, place)
    return own


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ShardtuneError as error:
        sys.exit(str(error))
