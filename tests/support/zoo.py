"""One architecture of transformers, tiny: trained, exported and answered by shardtune and by plain transformers."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from shardtune.batch import Prompt
from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.errors import ShardtuneError
from shardtune.evaluate.generate import Sampling
from shardtune.models.packing_probe import IN_HALF_ALONE, MIXED
from shardtune.parallel.ranks import Ranks, close_group, lay_out
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import make_tokenizer, quiet, recipe
from tests.support.float64 import Float64Throughout
from tests.support.tiny_architectures import DECODERS, SIZES, Impossible, shake, tiny_config
from tests.support.tiny_vision import ROWS_OF_IMAGES, VISION, image_rows, inputs_of, save_family

CAUSAL, IMAGES = "causal_lm", "vision_language"
STEPS, LORA_STEPS, OTHER_STEPS = 4, 2, 1
ROWS, MICRO_BATCH = 5, 2
LR = 1e-3
"""Small, as some tiny models multiply the rounding of a step thirtyfold in the next."""
NEW_TOKENS = 5
PROMPTS = (0, 2)
"""Rows of different lengths whose prompts are answered together."""
THROUGHOUT, FP64, FP32, BF16 = "fp64 throughout", "fp64", "fp32", "bf16"
"""How the numbers are computed: in float64 even where the model's code chooses float32; in float64 but for that; in
float32, where the model's code takes nothing else. In bf16 the first loss alone is compared."""
PRECISION = {THROUGHOUT: FP64, FP64: FP64, FP32: FP32}
"""As a recipe names it."""
LESS = {THROUGHOUT: FP64, FP64: FP32}
"""What is tried where a model cannot be computed."""
WITHIN = {THROUGHOUT: 1e-6, FP64: 1e-4, FP32: 1e-2}
"""Largest relative difference of an exact family: many compute norms and routers in float32 whatever the dtype."""
FINAL = {precision: 10 * within for precision, within in WITHIN.items()}
"""Likewise of the weights, relative to how far they have moved."""
WITHIN_BF16 = 0.05
"""Likewise of the first loss in bf16 from that in float64."""
DTYPE = {THROUGHOUT: torch.float64, FP64: torch.float64, FP32: torch.float32, BF16: torch.bfloat16}
ATTENTION_DROPOUT = (
    "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout_prob",
    "attention_dropout_prob", "attn_dropout_rate",
)  # fmt: skip
ROUTER_FACTOR = 0.5
"""Of a router's balance loss, so that it counts."""
NO_BALANCE = "has no balance loss for its routers"
UNCOMPUTABLE = "own forward of one row"
PACKED, BY_DOCUMENT, BY_LENGTH, ONE_ROW = "packed", "packed, mixers by row", "rows of one length", "one row"
REFUSED, IMPOSSIBLE, WRONG, CRASHED = "refused", "not built here", "WRONG", "CRASHED"
HOW = (PACKED, BY_DOCUMENT, BY_LENGTH, ONE_ROW)
NEEDS_OTHER_ROWS = ("'pixel_values'", "the row has no image", "refuses it", "an image follows", "images; ")
SAME, OTHER = "same", "OTHER"
OTHERWISE_LOADED = "transformers loads {} otherwise than it wrote it"


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
        otherwise: likewise of losses and gradient norms with other settings of the config (embeddings tied or not, the
            router's balance loss, windows), sharded over a group of one rank, and recomputed in the backward pass.
        dropped: likewise where dropout drops all of attention.
        bf16: of the first loss in bf16, from that in float64.
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
    otherwise: float = 0.0
    otherwise_reason: str = ""
    dropped: float = 0.0
    dropped_reason: str = ""
    bf16: float = 0.0
    bf16_reason: str = ""
    reason: str = ""

    @property
    def largest(self) -> float:
        """The largest difference of all but `final`, which is relative to how far training has moved each weight."""
        return max(self.numbers, self.alone, self.lora, self.otherwise, self.dropped)


# -- plain transformers ------------------------------------------------------------------------------------------------

Forward = Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]]
"""The logits [tokens, vocabulary] of a row, by a model, and its labels [tokens], -100 where there is no target."""
Further = Callable[[nn.Module], torch.Tensor]
"""What a model adds to the mean loss of a row, besides cross-entropy: its router's balance loss."""


def trained(model: nn.Module, rows: Sequence[Forward], steps: int, further: Sequence[Further] = ()) -> list[float]:
    """Loss and gradient norm of each step by plain torch and transformers, one row after the other; what is added to
    each row's loss is averaged over rows."""
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
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        balance = 0.0
        for add in further:
            added = add(model) / len(rows)
            added.backward()
            balance += float(added.detach())
        gradients = [p.grad for p in parameters if p.grad is not None]
        numbers += [total / count + balance, float(torch.nn.utils.get_total_norm(gradients))]
        optimizer.step()
    return numbers


def text_row(sample: Any) -> Forward:
    """A row of shardtune's own cache."""
    ids = torch.tensor(sample.input_ids, dtype=torch.long)
    labels = ids.masked_fill(torch.tensor(sample.loss_weights) == 0, -100)
    return lambda model: (model(input_ids=ids[None], use_cache=False).logits[0], labels)


def balance_of(sample: Any) -> Further:
    """What transformers adds to the loss of a row of text for its routers."""
    ids = torch.tensor(sample.input_ids, dtype=torch.long)[None]

    def added(model: Any) -> torch.Tensor:
        whole, plain = (
            model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=on) for on in (True, False)
        )
        return whole.loss - plain.loss

    return added


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
    if DTYPE[precision] is torch.float64 and model.config._experts_implementation is not None:
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


def final_apart(
    auto: Any, folder: Path, expected: Any, before: nn.Module, row: Forward, precision: str
) -> tuple[float, str]:
    """How far a written directory is from a model of plain transformers, and a note.

    What plain transformers loads may differ from what it wrote: Youtu's class sets the embedding of the padding token
    to zero at each load. The model is then taken as plain transformers writes and loads it itself.
    """
    reloaded = loaded(auto, folder, precision)
    away = apart(reloaded, expected, before, row)
    if away < FINAL[precision]:
        return away, ""
    expected.save_pretrained(folder / "plain")
    again = loaded(auto, folder / "plain", precision)
    changes = changed_tensors(again, expected)
    if not changes:
        return away, ""
    return apart(reloaded, again, before, row), OTHERWISE_LOADED.format(changes)


def changed_tensors(got: nn.Module, expected: nn.Module) -> str:
    """The names of the tensors of a model that differ from another's."""
    first, other = got.state_dict(), expected.state_dict()
    return ", ".join(name for name, value in other.items() if not torch.equal(first[name], value))


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
    values: dict[str, Any],
    *,
    prepared: Any = None,
    final: Path | None = None,
    adapter: Path | None = None,
    sharded: bool = False,
) -> Trained:
    """Train a recipe.

    Args:
        values: the recipe.
        prepared: its rows, encoded.
        final: where the model is written; LoRA is merged. There are answers then.
        adapter: where LoRA is written before the first step.
        sharded: with FSDP2 over a group of this process alone.
    """
    if sharded:
        with one_rank(), patch("shardtune.training.worker.base.join_ranks", one_rank_of_group):
            return by_shardtune(values, prepared=prepared, final=final, adapter=adapter)
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


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        close_group()


def one_rank_of_group(*_: object) -> Ranks:
    """The only rank of the open group, with a mesh: what is sharded is a DTensor there as with many."""
    return lay_out(Layout(), 0, torch.device("cpu"))


def values_for(kind: str, model: Path, rows: Path, precision: str) -> dict[str, Any]:
    optim = {"name": "SGD", "lr": LR, "clip_grad": None, "weight_decay": 0.0, "lr_scheduler": "constant"}
    made = recipe(
        model, rows, runner__max_steps=STEPS, actor__micro_batch_size=MICRO_BATCH, actor__global_batch_size=ROWS,
        actor__model__precision=PRECISION[precision], actor__model__model_type=kind, data__eval_data_paths=str(rows),
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


def one_line(error: Exception, place: Path | None = None) -> str:
    """The beginning of a message, without the name of the directory where it happened."""
    text = str(error) if place is None else str(error).replace(str(place), "its directory")
    return " ".join(text.replace("|", "/").split())[:220]


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


def otherwise(config: PreTrainedConfig) -> dict[str, Any]:
    """Other settings that checkpoints of a family have: of ties, routers and windows."""
    values = config.to_dict()
    made: dict[str, Any] = {}
    if "tie_word_embeddings" in values:
        made["tie_word_embeddings"] = not values["tie_word_embeddings"]
    if "output_router_logits" in values:
        made["output_router_logits"] = True
        made |= {key: ROUTER_FACTOR for key in ("router_aux_loss_coef", "aux_loss_coef") if key in values}
    kinds = values.get("layer_types")
    if kinds and set(kinds) == {"full_attention"} and "sliding_window" in values:
        made |= {"layer_types": ["sliding_attention", *kinds[1:]], "sliding_window": SIZES["sliding_window"]}
        made |= {"use_sliding_window": True} if "use_sliding_window" in values else {}
    return made


def without_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings with which dropout of attention weights drops all of them, in training alone: nothing is drawn."""
    return {key: 1.0 for key in config.to_dict() if key in ATTENTION_DROPOUT}


@dataclass(frozen=True)
class Material:
    """A tiny model on disk and its rows.

    Attributes:
        auto: the class of transformers that loads it.
        values: the recipe.
        rows: gives the rows of plain transformers, from those of shardtune.
        prompts: likewise what is answered; None: answers are not compared.
        note: about the model's files.
    """

    auto: Any
    values: dict[str, Any]
    rows: Callable[[Trained], list[Forward]]
    prompts: Callable[[Trained], list[dict[str, torch.Tensor]]] | None
    note: str = ""


def settle(model: nn.Module, folder: Path) -> str:
    """Let a directory hold what plain transformers loads from it; returns the names of tensors that this changes."""
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception:  # shardtune's refusal of a part of a larger model is its result
        return ""
    altered = changed_tensors(read, model)
    if altered:
        read.save_pretrained(folder)
    return altered


def decoder(family: str, folder: Path, precision: str, changes: Mapping[str, Any] | None = None) -> Material:
    with building():
        torch.manual_seed(1)
        own = {**DECODERS.get(family, {}), **(changes or {})}
        model: Any = AutoModelForCausalLM.from_config(tiny_config(family, own))
        shake(model)
        make_tokenizer().save_pretrained(folder)
        model.save_pretrained(folder)
    altered = settle(model, folder)
    note = OTHERWISE_LOADED.format(altered) if altered else ""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in text_rows()))

    def prompts(made: Trained) -> list[dict[str, torch.Tensor]]:
        asked = next(iter(made.prepared.evals.values()))
        return [{"input_ids": torch.from_numpy(asked.row(number).prompt_ids).long()[None]} for number in PROMPTS]

    values = values_for(CAUSAL, folder, file, precision)
    return Material(AutoModelForCausalLM, values, lambda made: [text_row(one) for one in made.samples], prompts, note)


def with_images(family: str, folder: Path, precision: str, kind: str) -> Material:
    with building():
        save_family(family, folder)
    file, rows = image_rows(folder, ROWS, kind)
    dtype = DTYPE[precision]
    found: list[Any] = []

    def made() -> list[Any]:
        if not found:  # in a thread, where float32 stays so: processors by torchvision compute with torch
            with ThreadPoolExecutor(1) as thread:
                found.extend(thread.submit(inputs_of, folder, rows).result())
        return found

    def prompts(_: Trained) -> list[dict[str, torch.Tensor]]:
        return [prompt_of(given, labels, dtype) for given, labels in map(made().__getitem__, PROMPTS)]

    return Material(
        AutoModelForImageTextToText,
        values_for(IMAGES, folder, file, precision),
        lambda _: [image_row(given, labels, dtype) for given, labels in made()],
        None if "whole" in VISION.get(family, {}) else prompts,
    )


def compared(
    material: Material, family: str, folder: Path, precision: str, *, thorough: bool
) -> tuple[Result, Trained]:
    """One architecture, by shardtune and by plain transformers, and what shardtune has made of it; thorough: one row
    at a time and with LoRA too."""
    kind, auto, values = material.values["actor"]["model"]["model_type"], material.auto, material.values
    ours = by_shardtune(values, final=folder / "final")
    start, model = loaded(auto, folder, precision), loaded(auto, folder, precision)
    rows = material.rows(ours)
    expected = trained(model, rows, STEPS)
    if not all(math.isfinite(number) for number in expected):
        raise Impossible("plain transformers computes no finite numbers at small sizes")
    notes = [*ours.notes, *([precision] if precision != THROUGHOUT else [])]
    result = Result(kind, family, ours.how, relative(ours.numbers, expected), reason="; ".join(notes))
    final, note = final_apart(auto, folder / "final", model, start, rows[0], precision)
    result = replace(
        result, final=final, reason="; ".join(dict.fromkeys(filter(None, [material.note, result.reason, note])))
    )
    if material.prompts is not None:
        result = replace(result, answers=same_answers(model, material.prompts(ours), ours.answers))
    if not thorough:
        return result, ours
    alone = by_shardtune(changed(values, actor={"micro_batch_size": 1}), prepared=ours.prepared)
    result = replace(result, alone=relative(alone.numbers, expected))
    return with_lora(result, material, ours, rows, folder, precision), ours


def in_other_ways(family: str, folder: Path, precision: str) -> dict[str, Any]:
    """What becomes of a decoder with its config's other settings, and with attention dropped."""
    config = AutoConfig.from_pretrained(folder)
    found: dict[str, Any] = {}
    for name, changes in (("otherwise", otherwise(config)), ("dropped", without_attention(config))):
        if not changes:
            continue
        if config.model_type != family:  # a decoder made from the config of a larger model is saved with its own part
            changes = {f"text_config.{key}": value for key, value in changes.items()}
        try:
            found[name] = with_settings(family, changes, folder / name, precision)
        except Impossible:
            found[f"{name}_reason"] = "-"
        except Exception as error:  # whatever a model's code raises, or shardtune refuses
            found |= without_balance(name, error, family, changes, folder / f"{name}-plain", precision)
    return found


def without_balance(
    name: str, error: Exception, family: str, changes: Mapping[str, Any], folder: Path, precision: str
) -> dict[str, Any]:
    """The same where a router's balance loss is refused because the class of transformers has none; of any other error
    the message."""
    fewer = {key: value for key, value in changes.items() if not key.endswith("output_router_logits")}
    if NO_BALANCE not in str(error):
        return {f"{name}_reason": f"{type(error).__name__}: {one_line(error)}"}
    away = with_settings(family, fewer, folder, precision)
    return {name: away, f"{name}_reason": f"{away:.0e} (a balance loss is refused: the class has none)"}


def in_bf16(material: Material, exact: Trained) -> dict[str, Any]:
    """The relative difference of the first loss in bf16, or why there is none."""
    values = changed(material.values, runner={"max_steps": 1}, actor={"model": {"precision": "bf16"}})
    try:
        ours = by_shardtune(values, prepared=exact.prepared)
        if HOW.index(ours.how) < HOW.index(exact.how):
            return {"bf16": math.inf, "bf16_reason": f"{ours.how}, which is not exact"}
        away = relative(ours.numbers[:1], exact.numbers[:1])
        slower = [ours.how] if ours.how != exact.how else []
        unseen = [note for note in ours.notes if note == IN_HALF_ALONE]
        return {"bf16": away, "bf16_reason": "; ".join([f"{away:.0e}", *slower, *unseen]) if slower or unseen else ""}
    except Exception as error:  # whatever a model's code raises, or shardtune refuses
        return {"bf16_reason": f"{type(error).__name__}: {one_line(error)}"}


def with_settings(family: str, changes: Mapping[str, Any], folder: Path, precision: str) -> float:
    """The largest relative difference of losses and gradient norms with changes of the config; sharded over a group of
    one rank, and recomputed in the backward pass where the model can."""
    with throughout(precision):
        material = decoder(family, folder, precision, changes)
        start = loaded(material.auto, folder, precision)
        model = {"gradient_checkpointing": start.supports_gradient_checkpointing}
        values = changed(material.values, runner={"max_steps": OTHER_STEPS}, actor={"model": model})
        ours = by_shardtune(values, sharded=True)
        balanced = any(key.endswith("output_router_logits") for key in changes)
        routers = [balance_of(one) for one in ours.samples] if balanced else []
        return relative(ours.numbers, trained(start, material.rows(ours), OTHER_STEPS, routers))


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
    away, _ = final_apart(auto, merged, joined, loaded(auto, folder, precision), rows[0], precision)
    reloaded = loaded(auto, merged, precision)
    with torch.no_grad():
        inside, _ = rows[0](reloaded.eval())
    merging = float((inside - beside).abs().max() / beside.abs().max())
    return replace(result, lora=max(relative(ours.numbers, expected), away, merging))


def throughout(precision: str) -> AbstractContextManager[object]:
    """The context to compute in."""
    return Float64Throughout() if precision == THROUGHOUT else nullcontext()


def tried(
    kind: str, family: str, folder: Path, precision: str = THROUGHOUT, rows_of: str = "", *, thorough: bool = True
) -> Result:
    """One architecture's result, whatever it raises; in a lesser precision where plain transformers cannot compute it,
    and with fewer kinds of rows where plain transformers takes no others."""
    rows_of = rows_of or ROWS_OF_IMAGES[-1 if "whole" in VISION.get(family, {}) else 0]
    fewer = dict(pairwise(ROWS_OF_IMAGES)).get(rows_of) if kind == IMAGES else None
    place = folder / f"{precision}-{rows_of}".replace(" ", "-")
    place.mkdir()

    def again(error: Exception) -> Result | None:
        if fewer and any(what in str(error) for what in NEEDS_OTHER_ROWS):
            return tried(kind, family, folder, precision, fewer, thorough=thorough)
        refused = isinstance(error, ShardtuneError)
        if precision in LESS and (UNCOMPUTABLE in str(error) if refused else isinstance(error, RuntimeError)):
            return tried(kind, family, folder, LESS[precision], rows_of, thorough=thorough)
        return None

    try:
        with throughout(precision):
            if kind == CAUSAL:
                material = decoder(family, place, precision)
            else:
                material = with_images(family, place, precision, rows_of)
            result, exact = compared(material, family, place, precision, thorough=thorough)
    except Impossible as error:
        return Result(kind, family, IMPOSSIBLE, reason=str(error))
    except ShardtuneError as error:
        reason = one_line(error, place)
        return again(error) or Result(kind, family, REFUSED, reason=reason)
    except (RuntimeError, TypeError, ValueError) as error:
        return again(error) or crashed(kind, family, error)
    except Exception as error:
        return crashed(kind, family, error)
    if kind == IMAGES and rows_of != ROWS_OF_IMAGES[0]:
        result = replace(result, reason=f"{result.reason} ({rows_of})".strip())
    if thorough:
        result = replace(result, **in_bf16(material, exact))
    if thorough and kind == CAUSAL:
        result = replace(result, **in_other_ways(family, place, precision))
    same_numbers = result.largest < WITHIN[precision] and result.final < FINAL[precision]
    if same_numbers and result.answers != OTHER and result.bf16 < WITHIN_BF16:
        return result
    return replace(result, how=WRONG, reason=f"{result.how}: {result.reason}")


def crashed(kind: str, family: str, error: Exception) -> Result:
    """The exception, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])
    return Result(kind, family, CRASHED, reason=f"{type(error).__name__}: {one_line(error)} ({places})")
