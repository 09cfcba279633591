"""One architecture of transformers, tiny: trained, exported and answered by shardtune and by plain transformers."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from shardtune.batch import Prompt
from shardtune.config import load_recipe
from shardtune.errors import ShardtuneError
from shardtune.evaluate.generate import Sampling
from shardtune.models.packing_probe import MIXED
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import make_tokenizer, quiet, recipe
from tests.support.tiny_architectures import DECODERS, Impossible, shake, tiny_config
from tests.support.tiny_vision import ROWS_OF_IMAGES, VISION, image_rows, inputs_of, save_family

CAUSAL, IMAGES = "causal_lm", "vision_language"
STEPS, LORA_STEPS = 4, 2
ROWS, MICRO_BATCH = 5, 2
LR = 1e-3
"""Small, as some tiny models multiply the rounding of a step thirtyfold in the next."""
NEW_TOKENS = 5
PROMPTS = (0, 2)
"""Rows of different lengths whose prompts are answered together."""
WITHIN = {"fp64": 1e-4, "fp32": 1e-2}
"""Largest relative difference of an exact family: many compute norms and routers in float32 whatever the dtype."""
FINAL = {precision: 10 * within for precision, within in WITHIN.items()}
"""Likewise of the weights, relative to how far they have moved."""
DTYPE = {"fp64": torch.float64, "fp32": torch.float32}
UNCOMPUTABLE = "own forward of one row"
PACKED, BY_DOCUMENT, BY_LENGTH, ONE_ROW = "packed", "packed, mixers by row", "rows of one length", "one row"
REFUSED, IMPOSSIBLE, WRONG, CRASHED = "refused", "not built here", "WRONG", "CRASHED"
HOW = (PACKED, BY_DOCUMENT, BY_LENGTH, ONE_ROW)
NEEDS_OTHER_ROWS = ("'pixel_values'", "the row has no image", "refuses it", "an image follows", "images; ")
SAME, OTHER = "same", "OTHER"


@dataclass(frozen=True)
class Result:
    """What became of an architecture.

    Attributes:
        kind: causal_lm | vision_language.
        family: its `model_type`.
        how: packed, rows of one length or one row if its numbers are exact; else refused, not built here, wrong or
            crashed.
        numbers: the largest relative difference of a loss or a gradient norm, as it trains by itself.
        alone: likewise with one row per micro-batch.
        final: of the weights and logits of the reloaded `final/`.
        answers: whether greedy answers are the same.
        lora: of the losses of LoRA, and of the reloaded weights with it merged.
        lora_reason: why there is no such number.
        reason: of a refusal, in words; otherwise why it is not packed.
    """

    kind: str
    family: str
    how: str
    numbers: float = 0.0
    alone: float = 0.0
    final: float = 0.0
    answers: str = ""
    lora: float = 0.0
    lora_reason: str = ""
    reason: str = ""

    @property
    def largest(self) -> float:
        """The largest difference of all but `final`, which is relative to how far training has moved each weight."""
        return max(self.numbers, self.alone, self.lora)


# -- plain transformers ------------------------------------------------------------------------------------------------

Forward = Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]]
"""The logits [tokens, vocabulary] of a row, by a model, and its labels [tokens], -100 where there is no target."""


def trained(model: nn.Module, rows: Sequence[Forward], steps: int) -> list[float]:
    """Loss and gradient norm of each step by plain torch and transformers, one row after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    numbers = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for forward in rows:
            logits, labels = forward(model)
            loss = F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)
            loss.backward()
            total, count = total + float(loss.detach()), count + int((labels[1:] != -100).sum())
        gradients = [p.grad.div_(count) for p in parameters if p.grad is not None]
        numbers += [total / count, float(torch.nn.utils.get_total_norm(gradients))]
        optimizer.step()
    return numbers


def text_row(sample: Any) -> Forward:
    """A row of shardtune's own cache."""
    ids = torch.tensor(sample.input_ids, dtype=torch.long)
    labels = ids.masked_fill(torch.tensor(sample.loss_weights) == 0, -100)
    return lambda model: (model(input_ids=ids[None], use_cache=False).logits[0], labels)


def image_row(given: Mapping[str, torch.Tensor], labels: torch.Tensor, dtype: torch.dtype) -> Forward:
    """A row as the processor itself makes it."""
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
    return lambda model: (model(**cast, use_cache=False).logits[0, -len(labels) :], labels)  # GIT's begin with images'


def loaded(auto: Any, folder: Path, precision: str) -> Any:
    """A saved model as plain transformers trains it, experts without a kernel that takes no fp64; all its weights are
    in its files."""
    model, found = auto.from_pretrained(
        folder, dtype=DTYPE[precision], attn_implementation="eager", output_loading_info=True
    )
    lost = {key: found[key] for key in ("missing_keys", "mismatched_keys") if found[key]}
    if lost:
        raise AssertionError(f"{folder.name}: {lost}")
    if precision == "fp64" and model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")
    return model.train()


@torch.no_grad()
def apart(got: nn.Module, expected: nn.Module, before: nn.Module, row: Forward) -> float:
    """The largest difference of two models' weights, relative to how far training has moved each, and of their logits
    of a row, relative to the largest. Weights that the model keeps in float32 are rounded."""
    tensors, first = got.state_dict(), before.state_dict()
    wanted, moved, away = expected.state_dict(), {}, {}
    for name, value in wanted.items():
        if value.is_floating_point() and value.numel():
            rounding = 2 * torch.finfo(value.dtype).eps * float(value.abs().max())
            moved[name] = float((value.double() - first[name].double()).abs().max())
            away[name] = float((tensors[name].double() - value.double()).abs().max()) - rounding
    least = max(moved.values()) * 1e-2
    weights = max(away[name] / max(by, least) for name, by in moved.items())
    (ours, _), (theirs, _) = row(got.eval()), row(expected.eval())
    return max(weights, float((ours - theirs).abs().max() / theirs.abs().max()))


def relative(got: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(got, expected, strict=True))


@torch.no_grad()
def answer(model: Any, given: Mapping[str, torch.Tensor], count: int) -> list[int]:
    """The greedy continuation of a prompt by plain transformers, of exactly `count` tokens."""
    made = model.eval().generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return made[0, given["input_ids"].shape[1] :].tolist()


def prompt_of(given: Mapping[str, torch.Tensor], labels: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A row's inputs up to its last answer."""
    targets = (labels != -100).int()
    start = int((targets.diff() == 1).nonzero()[-1]) + 1
    of_tokens = given["input_ids"].shape
    cut = {key: value[:, :start] if value.shape[:2] == of_tokens else value for key, value in given.items()}
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in cut.items()}


# -- shardtune ---------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What shardtune made of a recipe."""

    how: str = ""
    notes: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    answers: list[list[int]] | Exception = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    prepared: Any = None


def by_shardtune(
    values: dict[str, Any], *, prepared: Any = None, final: Path | None = None, adapter: Path | None = None
) -> Trained:
    """Train a recipe.

    Args:
        values: the recipe.
        prepared: its rows, encoded.
        final: where the model is written; LoRA is merged. There are answers then.
        adapter: where LoRA is written before the first step.
    """
    worker = SFTWorker(load_recipe(values), prepared=prepared, report=quiet)
    made = Trained(prepared=worker.prepared)
    try:
        worker.setup()
        if adapter is not None:
            worker.export(adapter, "fp64")
        while not worker.finished:
            metrics = worker.run_training()
            made.numbers += [metrics["train/loss"], metrics["train/grad_norm"]]
        rows, described = worker.prepared.train, worker.adapter
        assert rows is not None
        made.samples = [rows.row(index) for index in range(len(rows))]
        made.notes = worker.notes
        packed = BY_DOCUMENT if any(MIXED in note for note in worker.notes) else PACKED
        made.how = packed if described.rows_share_forwards else BY_LENGTH if described.rows_of_one_length else ONE_ROW
        if final is not None:
            worker.export(final, "fp64", merge=adapter is not None)
            if adapter is None:
                asked = next(iter(worker.prepared.evals.values()))
                samples = [asked.row(number) for number in PROMPTS]
                prompts = [Prompt(one.prompt_ids, one.fields) for one in samples if one.prompt_ids is not None]
                try:
                    made.answers = worker.generator().continuations(prompts, Sampling(max_new_tokens=NEW_TOKENS))
                except Exception as error:  # which counts if plain transformers can answer
                    made.answers = error
        return made
    finally:
        worker.release()


def values_for(kind: str, model: Path, rows: Path, precision: str) -> dict[str, Any]:
    optim = {"name": "SGD", "lr": LR, "clip_grad": None, "weight_decay": 0.0, "lr_scheduler": "constant"}
    made = recipe(
        model, rows, runner__max_steps=STEPS, actor__micro_batch_size=MICRO_BATCH, actor__global_batch_size=ROWS,
        actor__model__precision=precision, actor__model__model_type=kind, data__eval_data_paths=str(rows),
        eval__generate=True,
    )  # fmt: skip
    made["actor"]["optim"] = optim
    return made


def changed(values: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """The recipe with other values: `actor={...}`, at any depth."""
    made = dict(values)
    for key, value in sections.items():
        made[key] = changed(made.get(key, {}), **value) if isinstance(value, Mapping) else value
    return made


# -- one architecture --------------------------------------------------------------------------------------------------


@contextmanager
def building() -> Iterator[None]:
    """Whatever making a tiny model raises is no result about training it."""
    try:
        yield
    except Impossible:
        raise
    except Exception as error:
        raise Impossible(f"{type(error).__name__}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).replace("|", "/").split())[:220]


def text_rows() -> list[dict[str, str]]:
    """Prompts and completions of three lengths, so that some rows of one length can share a forward."""
    letters = "abcdefghijklmnopqrstuvw"
    lengths = [(5, 12), (4, 6), (6, 10), (5, 12), (4, 6)]
    return [
        {
            "prompt": "".join(letters[(number * 7 + place * place) % 23] for place in range(question)),
            "completion": "".join(letters[(number * 5 + place * 3 + place**3) % 23] for place in range(reply)),
        }
        for number, (question, reply) in enumerate(lengths)
    ]


@dataclass(frozen=True)
class Material:
    """A tiny model on disk and its rows.

    Attributes:
        auto: the class of transformers that loads it.
        values: the recipe.
        rows: gives the rows of plain transformers, from those of shardtune.
        prompts: likewise what is answered; None: answers are not compared.
    """

    auto: Any
    values: dict[str, Any]
    rows: Callable[[Trained], list[Forward]]
    prompts: Callable[[Trained], list[dict[str, torch.Tensor]]] | None


def decoder(family: str, folder: Path, precision: str) -> Material:
    with building():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(tiny_config(family, DECODERS.get(family, {})))
        shake(model)
        make_tokenizer().save_pretrained(folder)
        model.save_pretrained(folder)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in text_rows()))

    def prompts(made: Trained) -> list[dict[str, torch.Tensor]]:
        asked = next(iter(made.prepared.evals.values()))
        return [{"input_ids": torch.from_numpy(asked.row(number).prompt_ids).long()[None]} for number in PROMPTS]

    values = values_for(CAUSAL, folder, file, precision)
    return Material(AutoModelForCausalLM, values, lambda made: [text_row(one) for one in made.samples], prompts)


def with_images(family: str, folder: Path, precision: str, kind: str) -> Material:
    with building():
        save_family(family, folder)
    file, rows = image_rows(folder, ROWS, kind)
    dtype = DTYPE[precision]
    found: list[Any] = []

    def made() -> list[Any]:
        found.extend(() if found else inputs_of(folder, rows))
        return found

    def prompts(_: Trained) -> list[dict[str, torch.Tensor]]:
        return [prompt_of(given, labels, dtype) for given, labels in map(made().__getitem__, PROMPTS)]

    return Material(
        AutoModelForImageTextToText,
        values_for(IMAGES, folder, file, precision),
        lambda _: [image_row(given, labels, dtype) for given, labels in made()],
        None if "whole" in VISION.get(family, {}) else prompts,
    )


def compared(material: Material, family: str, folder: Path, precision: str, *, thorough: bool) -> Result:
    """One architecture, by shardtune and by plain transformers; thorough: one row at a time and with LoRA too."""
    kind, auto, values = material.values["actor"]["model"]["model_type"], material.auto, material.values
    ours = by_shardtune(values, final=folder / "final")
    start, model = loaded(auto, folder, precision), loaded(auto, folder, precision)
    rows = material.rows(ours)
    expected = trained(model, rows, STEPS)
    if not all(math.isfinite(number) for number in expected):
        raise Impossible("plain transformers computes no finite numbers at small sizes")
    notes = [*ours.notes, *(["fp32"] if precision == "fp32" else [])]
    result = Result(kind, family, ours.how, relative(ours.numbers, expected), reason="; ".join(notes))
    reloaded = loaded(auto, folder / "final", precision)
    result = replace(result, final=apart(reloaded, model, start, rows[0]))
    if material.prompts is not None:
        result = replace(result, answers=same_answers(model, material.prompts(ours), ours.answers))
    if not thorough:
        return result
    alone = by_shardtune(changed(values, actor={"micro_batch_size": 1}), prepared=ours.prepared)
    result = replace(result, alone=relative(alone.numbers, expected))
    return with_lora(result, material, ours, rows, folder, precision)


def same_answers(model: Any, prompts: list[dict[str, torch.Tensor]], ours: list[list[int]] | Exception) -> str:
    """Whether the greedy answers are those of plain transformers."""
    counts = [NEW_TOKENS] * len(prompts) if isinstance(ours, Exception) else [len(tokens) for tokens in ours]
    try:
        theirs = [answer(model, given, count) for given, count in zip(prompts, counts, strict=True)]
    except Exception as error:  # a model's own code may raise anything
        return f"none: {type(error).__name__} in transformers"
    if isinstance(ours, Exception):
        raise ours
    return SAME if theirs == ours else OTHER


def with_lora(
    result: Result, material: Material, full: Trained, rows: list[Forward], folder: Path, precision: str
) -> Result:
    """The result with what LoRA gives, beside PEFT in a plain loop."""
    auto, begun, merged = material.auto, folder / "adapter", folder / "merged"
    lora = {"actor": {"model": {"is_lora": True, "lora": {"r": 2, "alpha": 1.0, "init": False}}}}
    values = changed(material.values, runner={"max_steps": LORA_STEPS}, **lora)
    try:
        ours = by_shardtune(values, prepared=full.prepared, final=merged, adapter=begun)
    except ShardtuneError as error:
        return replace(result, lora_reason=one_line(error))
    base = loaded(auto, folder, precision)
    try:
        tuned: Any = peft.PeftModel.from_pretrained(
            base, str(begun), is_trainable=True, autocast_adapter_dtype=False
        ).train()
        expected = trained(tuned, rows, LORA_STEPS)
        with torch.no_grad():
            beside, _ = rows[0](tuned.eval())
        joined = tuned.merge_and_unload()
    except Exception as error:  # PEFT may raise anything for a model that it does not know
        return replace(result, lora_reason=f"PEFT: {type(error).__name__}: {one_line(error)}")
    reloaded = loaded(auto, merged, precision)
    away = apart(reloaded, joined, loaded(auto, folder, precision), rows[0])
    with torch.no_grad():
        inside, _ = rows[0](reloaded.eval())
    merging = float((inside - beside).abs().max() / beside.abs().max())
    return replace(result, lora=max(relative(ours.numbers, expected), away, merging))


def tried(
    kind: str, family: str, folder: Path, precision: str = "fp64", rows_of: str = "", *, thorough: bool = True
) -> Result:
    """One architecture's result, whatever it raises; in fp32 where plain transformers has no fp64 for it, and with
    fewer kinds of rows where plain transformers takes no others."""
    rows_of = rows_of or ROWS_OF_IMAGES[-1 if "whole" in VISION.get(family, {}) else 0]
    fewer = dict(pairwise(ROWS_OF_IMAGES)).get(rows_of) if kind == IMAGES else None
    place = folder / f"{precision}-{rows_of.replace(' ', '-')}"
    place.mkdir()

    def again(error: Exception) -> Result | None:
        if fewer and any(what in str(error) for what in NEEDS_OTHER_ROWS):
            return tried(kind, family, folder, precision, fewer, thorough=thorough)
        refused = isinstance(error, ShardtuneError)
        if precision == "fp64" and (UNCOMPUTABLE in str(error) if refused else isinstance(error, RuntimeError)):
            return tried(kind, family, folder, "fp32", rows_of, thorough=thorough)
        return None

    try:
        if kind == CAUSAL:
            material = decoder(family, place, precision)
        else:
            material = with_images(family, place, precision, rows_of)
        result = compared(material, family, place, precision, thorough=thorough)
    except Impossible as error:
        return Result(kind, family, IMPOSSIBLE, reason=str(error))
    except ShardtuneError as error:
        reason = one_line(error).replace(str(place), "its directory")
        return again(error) or Result(kind, family, REFUSED, reason=reason)
    except (RuntimeError, TypeError, ValueError) as error:
        return again(error) or crashed(kind, family, error)
    except Exception as error:
        return crashed(kind, family, error)
    if kind == IMAGES and rows_of != ROWS_OF_IMAGES[0]:
        result = replace(result, reason=f"{result.reason} ({rows_of})".strip())
    if result.largest < WITHIN[precision] and result.final < FINAL[precision] and result.answers != OTHER:
        return result
    return replace(result, how=WRONG, reason=f"{result.how}: {result.reason}")


def crashed(kind: str, family: str, error: Exception) -> Result:
    """The exception, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])
    return Result(kind, family, CRASHED, reason=f"{type(error).__name__}: {one_line(error)} ({places})")
