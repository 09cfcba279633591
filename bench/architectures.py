"""Train a tiny model of every family that transformers registers: `python bench/architectures.py`.

Of each decoder (`AutoModelForCausalLM`) and each vision-language family (`AutoModelForImageTextToText`) a tiny model is
made from its config class, and trained for two steps of two micro-batches in fp64. Losses and gradient norms are
compared with those of plain transformers, one row at a time. Rewrites the section `architectures` of docs/benchmarks.md
and the list behind `shardtune models`; ends with exit code 1 where a family is wrong or crashes.

    python bench/architectures.py --results found.jsonl            # families that the file has are not tried again
    python bench/architectures.py --only qwen3_next llava          # these alone; nothing is rewritten
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from shardtune.config import load_recipe  # noqa: E402
from shardtune.errors import ShardtuneError  # noqa: E402
from shardtune.training.worker.adapter_worker import SFTWorker  # noqa: E402
from tests.support.dist.training import make_tokenizer, quiet, recipe  # noqa: E402
from tests.support.tiny_architectures import DECODERS, Impossible, shake, tiny_config  # noqa: E402
from tests.support.tiny_vision import ROWS_OF_IMAGES, VISION, image_rows, inputs_of, save_family  # noqa: E402

STEPS = 2
ROWS, MICRO_BATCH = 8, 4
LR = 0.05
WITHIN = {"fp64": 1e-4, "fp32": 1e-2}
"""Largest relative difference of an exact family: many compute norms and routers in float32 whatever the dtype."""
DTYPE = {"fp64": "float64", "fp32": "float32"}
UNCOMPUTABLE = "own forward of one row"
PACKED, BY_LENGTH, ONE_ROW = "packed", "rows of one length", "one row"
REFUSED, IMPOSSIBLE, WRONG, CRASHED = "refused", "not built here", "WRONG", "CRASHED"
HOW = (PACKED, BY_LENGTH, ONE_ROW)
LIST = ROOT / "shardtune" / "models" / "architectures.json"
INTRODUCTION = """\
Every family that transformers registers for `AutoModelForCausalLM` and `AutoModelForImageTextToText`, tiny, from its
own config class, with noise on all weights: two steps of SGD over eight rows in micro-batches of four, fp64 (fp32 where
a model's own code has no fp64). Losses and gradient norms against plain transformers, one row at a time with eager
attention; exact is a relative difference below 1e-4, as many models compute norms, routers and softmax in float32 in
any precision (1e-2 in fp32). `shardtune models` lists the exact ones."""
NEEDS_OTHER_ROWS = ("'pixel_values'", "the row has no image", "refuses it", "an image follows", "images; ")
HEADS = ("family", "trains", "largest difference", "notes")


@dataclass(frozen=True)
class Result:
    """What became of a family.

    Attributes:
        kind: causal_lm | vision_language.
        family: its `model_type`.
        how: packed, rows of one length or one row if its numbers are exact; else refused, not built here, wrong or
            crashed.
        difference: the largest relative difference of a loss or a gradient norm.
        reason: of a refusal, in words.
    """

    kind: str
    family: str
    how: str
    difference: float = 0.0
    reason: str = ""


def text_rows() -> list[dict[str, str]]:
    """Prompts and completions of three lengths, so that rows of one length can share a forward."""
    letters = "abcdefghijklmnopqrstuvw"
    lengths = [(5, 12), (4, 6), (6, 10), (7, 9)]
    return [
        {
            "prompt": "".join(letters[(number * 7 + place * place) % 23] for place in range(question)),
            "completion": "".join(letters[(number * 5 + place * 3 + place**3) % 23] for place in range(answer)),
        }
        for number in range(ROWS)
        for question, answer in lengths[number % 4 : number % 4 + 1]
    ]


def trained(model: nn.Module, rows: Sequence[Callable[[], tuple[torch.Tensor, torch.Tensor]]]) -> list[float]:
    """Loss and gradient norm of each step by plain torch and transformers, one row after the other.

    Args:
        rows: each gives its logits [tokens, vocabulary] and labels [tokens], -100 where there is no target.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    numbers = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for forward in rows:
            logits, labels = forward()
            loss = F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)
            loss.backward()
            total, count = total + float(loss), count + int((labels[1:] != -100).sum())
        gradients = [p.grad.div_(count) for p in model.parameters() if p.grad is not None]
        numbers += [total / count, float(torch.nn.utils.get_total_norm(gradients))]
        optimizer.step()
    return numbers


def plain_text(model: Any, rows: Sequence[Any]) -> list[float]:
    """The numbers of plain transformers over the samples of shardtune's own cache."""

    def forward(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(sample.input_ids).long()
        labels = ids.masked_fill(torch.from_numpy(sample.loss_weights) == 0, -100)
        return model(input_ids=ids[None], use_cache=False).logits[0], labels

    return trained(model, [lambda sample=sample: forward(sample) for sample in rows])


def plain_images(model: Any, inputs: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> list[float]:
    """The numbers of plain transformers over what the processor itself makes of each row."""

    def forward(given: dict[str, torch.Tensor], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cast = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given.items()}
        return model(**cast, use_cache=False).logits[0, -len(labels) :], labels  # GIT's begin with its images'

    return trained(model, [lambda given=given, labels=labels: forward(given, labels) for given, labels in inputs])


def values_for(model: Path, rows: Path, precision: str) -> dict[str, Any]:
    optim = {"name": "SGD", "lr": LR, "clip_grad": None, "weight_decay": 0.0, "lr_scheduler": "constant"}
    made = recipe(
        model, rows, runner__max_steps=STEPS, actor__micro_batch_size=MICRO_BATCH, actor__global_batch_size=ROWS,
        actor__model__precision=precision,
    )  # fmt: skip
    made["actor"]["optim"] = optim
    return made


def by_shardtune(values: dict[str, Any]) -> tuple[str, list[str], list[float], list[Any]]:
    """How shardtune trains a recipe, its notes, its numbers, and the rows."""
    worker = SFTWorker(load_recipe(values), report=quiet)
    try:
        worker.setup()
        numbers = []
        while not worker.finished:
            metrics = worker.run_training()
            numbers += [metrics["train/loss"], metrics["train/grad_norm"]]
        adapter, rows = worker.adapter, worker.prepared.train
        assert rows is not None
        how = PACKED if adapter.rows_share_forwards else BY_LENGTH if adapter.rows_of_one_length else ONE_ROW
        return how, worker.notes, numbers, [rows.row(index) for index in range(len(rows))]
    finally:
        worker.release()


def loaded(auto: Any, folder: Path, precision: str) -> Any:
    """The saved model as plain transformers trains it, experts without a kernel that takes no fp64."""
    model = auto.from_pretrained(folder, dtype=getattr(torch, DTYPE[precision]), attn_implementation="eager").train()
    if precision == "fp64" and model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")
    return model


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


Attempt = tuple[str, list[str], list[float], Callable[[], list[float]]]


def try_decoder(family: str, folder: Path, precision: str) -> Attempt:
    with building():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(tiny_config(family, DECODERS.get(family, {})))
        shake(model)
        make_tokenizer().save_pretrained(folder)
        model.save_pretrained(folder)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in text_rows()))
    how, notes, numbers, rows = by_shardtune(values_for(folder, file, precision))
    return how, notes, numbers, lambda: plain_text(loaded(AutoModelForCausalLM, folder, precision), rows)


def try_vision(family: str, folder: Path, precision: str, kind: str = ROWS_OF_IMAGES[0]) -> Attempt:
    with building():
        save_family(family, folder)
    file, rows = image_rows(folder, ROWS, kind)
    values = values_for(folder, file, precision)
    values["actor"]["model"]["model_type"] = "vision_language"
    how, notes, numbers, _ = by_shardtune(values)
    auto = AutoModelForImageTextToText
    return how, notes, numbers, lambda: plain_images(loaded(auto, folder, precision), inputs_of(folder, rows))


def tried(kind: str, family: str, precision: str = "fp64", rows_of: str = "") -> Result:
    """One family's result, whatever it raises; in fp32 where plain transformers has no fp64 for it, and with fewer
    kinds of rows where plain transformers takes no others."""
    rows_of = rows_of or ROWS_OF_IMAGES[-1 if "whole" in VISION.get(family, {}) else 0]
    attempt: Callable[..., Attempt] = try_decoder if kind == "causal_lm" else partial(try_vision, kind=rows_of)
    fewer = dict(pairwise(ROWS_OF_IMAGES)).get(rows_of) if kind == "vision_language" else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            how, notes, numbers, plain = attempt(family, Path(folder), precision)
            try:
                expected = plain()
            except RuntimeError:
                if precision == "fp64":
                    return tried(kind, family, "fp32", rows_of)
                raise
            except (TypeError, ValueError) as error:
                if fewer and any(what in str(error) for what in NEEDS_OTHER_ROWS):
                    return tried(kind, family, precision, fewer)
                raise
        except Impossible as error:
            return Result(kind, family, IMPOSSIBLE, reason=str(error))
        except ShardtuneError as error:
            if precision == "fp64" and UNCOMPUTABLE in str(error):
                return tried(kind, family, "fp32", rows_of)
            if fewer and any(what in str(error) for what in NEEDS_OTHER_ROWS):
                return tried(kind, family, precision, fewer)
            return Result(kind, family, REFUSED, reason=one_line(error).replace(folder, "its directory"))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {one_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
            return Result(kind, family, CRASHED, reason=what)
    if not all(math.isfinite(number) for number in expected):
        return Result(kind, family, IMPOSSIBLE, reason="plain transformers computes no finite numbers at small sizes")
    apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(numbers, expected, strict=True))
    within = apart < WITHIN[precision]
    reason = (
        "; ".join(notes)
        + (" (fp32)" if precision == "fp32" else "")
        + (f" ({rows_of})" if kind == "vision_language" and rows_of != ROWS_OF_IMAGES[0] else "")
    )
    return Result(kind, family, how if within else WRONG, apart, reason if within else f"{how}: {reason}")


def families() -> list[tuple[str, str]]:
    named = {
        "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "vision_language": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return [(kind, family) for kind, names in named.items() for family in sorted(names)]


def summary(results: Sequence[Result]) -> str:
    """How many families came out in each way, by kind."""
    ways = (*HOW, REFUSED, IMPOSSIBLE, WRONG, CRASHED)
    rows = [
        [kind, *(sum(result.kind == kind and result.how == way for result in results) for way in ways)]
        for kind in ("causal_lm", "vision_language")
    ]
    return table(("", *ways), rows)


def write_down(results: Sequence[Result]) -> None:
    """The section of docs/benchmarks.md, and the list of what trains."""
    lines = [
        [f"{result.family}", result.how, f"{result.difference:.0e}" if result.how in HOW else "", result.reason]
        for result in results
        if result.kind == "vision_language" or result.how != PACKED
    ]
    packed = [result.family for result in results if result.kind == "causal_lm" and result.how == PACKED]
    worst = max(result.difference for result in results if result.how in HOW)
    text = (
        f"{INTRODUCTION}\n\n{summary(results)}\n\nLargest relative difference of an exact family: {worst:.0e}. "
        f"Decoders that are packed: {', '.join(packed)}.\n\n<details><summary>All others, and the vision-language "
        f"families</summary>\n\n{table(HEADS, lines)}\n\n</details>\n\n{machine()}."
    )
    write_section("architectures", text)
    trained: dict[str, Any] = {"transformers": transformers.__version__}
    for kind in ("causal_lm", "vision_language"):
        ways = {how: [r.family for r in results if (r.kind, r.how) == (kind, how)] for how in HOW}
        trained[kind] = {how: names for how, names in ways.items() if names}
    LIST.write_text(json.dumps(trained, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", help="families to try")
    options.add_argument("--kind", help="causal_lm or vision_language alone")
    options.add_argument("--results", type=Path, help="a file that results are added to, and read from")
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = given.results.read_text().splitlines() if given.results and given.results.exists() else []
    found = {(result.kind, result.family): result for result in (Result(**json.loads(line)) for line in lines)}
    wanted = [(kind, name) for kind, name in families() if given.kind in (None, kind)]
    for kind, family in wanted:
        if (kind, family) in found or (given.only and family not in given.only):
            continue
        began = time.perf_counter()
        result = found[kind, family] = tried(kind, family)
        seconds = time.perf_counter() - began
        print(f"{kind} {family}: {result.how} {result.difference:.1e} {result.reason} [{seconds:.1f} s]", flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    results = [found[key] for key in families() if key in found]
    bad = [result for result in results if result.how in (WRONG, CRASHED)]
    if len(results) == len(families()):
        write_down(results)
    print(summary(results))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
