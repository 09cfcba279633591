"""Train a tiny model of every architecture that transformers registers: `python bench/zoo.py`.

Of each decoder (`AutoModelForCausalLM`) and each image-text-to-text family (`AutoModelForImageTextToText`) a tiny model
is made from its config class and trained for four steps over ragged rows, as it trains by itself and one row at a time,
with its config's other settings, and in bf16. Losses, gradient norms, weights and logits of the reloaded `final/`,
greedy answers, and LoRA merged are compared with plain transformers (and PEFT). Rewrites the section `architectures` of
docs/benchmarks.md and the list behind `shardtune models`; ends with exit code 1 where one is wrong or crashes.

Each architecture has a process of its own, forked from one that has imported everything, with a limit of CPU seconds.
Results are lines of a file, so that the command goes on where it stopped; those of other versions of transformers do
not count, nor where torchvision is installed those without it, and the other way round. The section is that of an
environment without torchvision; with it the lines are printed alone. The list has, beside those of the section, the
architectures that are exact where torchvision is installed, if the file has their results.

    python bench/zoo.py                                # those that the file lacks
    python bench/zoo.py --only qwen3_next llava        # these again
    python bench/zoo.py --share 1/2                    # every second one, beside --share 2/2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import is_torchvision_available

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from tests.support.zoo import (  # noqa: E402
    BY_DOCUMENT,
    BY_LENGTH,
    CAUSAL,
    CRASHED,
    HOW,
    IMAGES,
    IMPOSSIBLE,
    ONE_ROW,
    PACKED,
    REFUSED,
    WRONG,
    Result,
    tried,
)

CPU_SECONDS, WALL_SECONDS = 90, 900
"""Limits of one architecture."""
LIST = ROOT / "shardtune" / "models" / "architectures.json"
RESULTS = ROOT / "build" / "zoo.jsonl"
HERE = {"transformers": transformers.__version__, "torchvision": is_torchvision_available()}
"""The packages that results depend on."""
INSTALLED = ", where torchvision is installed"
"""In the list, after the way in which an architecture trains there alone."""
FAMILIES = {CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, IMAGES: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
WHY = {
    "torchvision": "have processors that need torchvision, which is not installed here",
    "has a text of its own": "are encoders and decoders",
    "no causal language model": "are saved by transformers under a name that it does not load",
    "fails": "fail in transformers' own forward of what its processor makes",
    "row by row": "have processors whose output cannot be followed row by row",
}
"""What is in the way of those that are refused, by a part of the message."""
OTHERS = "for other reasons"
WAYS = (*HOW, REFUSED, IMPOSSIBLE, WRONG, CRASHED)
INTRODUCTION = """\
Every architecture that transformers registers for `AutoModelForCausalLM` and `AutoModelForImageTextToText`, tiny, from
its own config class, with noise on all weights: four steps of SGD over five ragged rows, against plain transformers,
one row at a time with eager attention. All of it is computed in fp64 *throughout*: where a model's own code chooses
float32 (norms, softmax, routers, rotary positions), both sides compute in float64 too, so that rounding hides nothing
and explains nothing (`fp64`: without that; `fp32`: the model's code takes nothing else). *Numbers* are losses and
gradient norms in micro-batches of two, packed where that is exact; *alone* with one row per micro-batch; *final* the
weights (relative to how far training moved them) and logits of the `final/` that plain transformers loads; *answers*
two greedy continuations, by shardtune in one batch; *LoRA* losses, norms, weights and logits with it merged, against
PEFT. Of decoders also: *otherwise*, with embeddings tied the other way, the router's balance loss and a sliding window
switched on, sharded by FSDP2 over a group of one rank and recomputed in the backward pass; *dropped*, with all of
attention dropped out, where the config has such a probability. *bf16* is the first loss in bf16, against fp64. All are
largest relative differences; exact is below 1e-6 (*final* 1e-5; *bf16* 0.05; in `fp64` 1e-4, in `fp32` 1e-2), and no
more rows may share a forward in bf16 than in fp64. In bf16 what transformers keeps in float32 stays so, and buffers do,
unless a model's code takes one dtype alone (XGLM, MiniMax, GPT-1, Kosmos-2): then they are bf16 where `from_pretrained`
has them so. The code of xLSTM meets two dtypes in plain transformers too, so it is refused in bf16, by a message that
names fp32. `shardtune models` lists the exact ones."""
HEADS = (
    "architecture", "trains", "numbers", "alone", "final", "answers", "LoRA", "otherwise", "dropped", "bf16", "why",
)  # fmt: skip

Key = tuple[str, str]


def families() -> list[Key]:
    return [(kind, family) for kind, names in FAMILIES.items() for family in sorted(names)]


def in_a_process(kind: str, family: str) -> Result:
    """The result of one architecture in a forked process; one that ends without a result has crashed."""
    read, write = os.pipe()
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        signal.alarm(WALL_SECONDS)
        result = tried(kind, family, folder)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(asdict(result)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder)
    if text:
        return Result(**json.loads(text))
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return Result(kind, family, IMPOSSIBLE, reason=f"its smallest form takes more than {CPU_SECONDS} s of a core")
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Result(kind, family, CRASHED, reason=f"its process ended by {ended}")


def stored(file: Path, here: Mapping[str, Any] = HERE) -> dict[Key, Result]:
    """The latest result of each architecture, of an environment."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    read: list[dict[str, Any]] = [json.loads(line) for line in lines]
    ours = [one["result"] for one in read if {"torchvision": False, **one, "result": None} == {**here, "result": None}]
    return {(one["kind"], one["family"]): Result(**one) for one in ours}


def sentence(results: Sequence[Result]) -> str:
    """How many there are of each, in words."""
    count = {way: sum(result.how == way for result in results) for way in WAYS}
    exact = sum(count[way] for way in HOW)
    why = Counter(
        next((words for part, words in WHY.items() if part in result.reason), OTHERS)
        for result in results
        if result.how == REFUSED
    )
    refused = "; ".join(f"{number} {words}" for words, number in why.most_common())
    return (
        f"Of {len(results)} architectures {exact} are exact: {count[PACKED]} pack rows; {count[BY_DOCUMENT]} pack them "
        "too, but layers with a state (linear attention, state spaces, short convolutions), whose kernels need a GPU, "
        f"run row by row; {count[BY_LENGTH]} train rows of one length together (encoders' code, attention of their own "
        f"or to chosen tokens, which receive no boundaries of rows); {count[ONE_ROW]} take one row at a time (whose "
        f"images cannot be joined). {count[REFUSED]} are refused before training ({refused}), {count[IMPOSSIBLE]} "
        f"cannot be made small or offline here, {count[WRONG]} are wrong and {count[CRASHED]} crash."
    )


def summary(results: Sequence[Result]) -> str:
    """How many architectures came out in each way, by kind."""
    ways = [way for way in WAYS if any(result.how == way for result in results) or way in (WRONG, CRASHED)]
    rows = [
        [kind, *(sum(result.kind == kind and result.how == way for result in results) for way in ways)]
        for kind in FAMILIES
    ]
    return table(("", *ways), rows)


def line(result: Result) -> list[str]:
    """A row of the table."""
    if result.how not in (*HOW, WRONG):
        return [result.family, result.how, *[""] * (len(HEADS) - 3), result.reason]
    numbers = [f"{number:.0e}" for number in (result.numbers, result.alone, result.final)]
    others = [
        reason or f"{number:.0e}"
        for number, reason in (
            (result.lora, result.lora_reason),
            (result.otherwise, result.otherwise_reason),
            (result.dropped, result.dropped_reason),
            (result.bf16, result.bf16_reason),
        )
    ]
    return [result.family, result.how, *numbers, result.answers or "-", *others, result.reason]


def write_down(results: Sequence[Result], installed: Sequence[Result]) -> None:
    """The section of docs/benchmarks.md, and the list of what trains.

    Args:
        results: of all architectures, without torchvision.
        installed: of any, where it is installed.
    """
    exact = [result for result in results if result.how in HOW]
    worst = max(exact, key=lambda result: result.largest)
    parts = [
        f"<details><summary>{kind}</summary>\n\n"
        f"{table(HEADS, [line(result) for result in results if result.kind == kind])}\n\n</details>"
        for kind in FAMILIES
    ]
    largest = f"Largest difference of an exact one, without *final*: {worst.largest:.0e} ({worst.family})."
    counted = f"{sentence(results)}\n\n{summary(results)}\n\n{largest}"
    write_section("architectures", "\n\n".join([INTRODUCTION, counted, *parts, f"{machine()}."]))
    known: dict[str, Any] = {"transformers": transformers.__version__}
    for kind in FAMILIES:
        ways = {how: [r.family for r in results if (r.kind, r.how) == (kind, how)] for how in HOW}
        without = {name for names in ways.values() for name in names}
        further = [r for r in installed if r.kind == kind and r.family not in without]
        ways |= {how + INSTALLED: [r.family for r in further if r.how == how] for how in HOW}
        known[kind] = {how: names for how, names in ways.items() if names}
    LIST.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", help="architectures to try, whatever the file has of them")
    options.add_argument("--kind", choices=FAMILIES, help="one kind alone")
    options.add_argument("--share", default="1/1", help="K/N: the K-th of N equal parts")
    options.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    given = options.parse_args()
    part, parts = map(int, given.share.split("/"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    found = stored(given.results)
    for place, (kind, family) in enumerate(families()):
        skipped = family not in given.only if given.only else (kind, family) in found or place % parts != part - 1
        if skipped or given.kind not in (None, kind):
            continue
        began = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        result = in_a_process(kind, family)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - began[1].ru_utime - began[1].ru_stime
        print(kind, *line(result), f"[{cpu:.1f} s CPU]", sep=" | ", flush=True)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**HERE, "result": asdict(result)}) + "\n")
    found = stored(given.results)
    results = [found[key] for key in families() if key in found]
    if len(results) == len(families()) and not HERE["torchvision"]:
        with_it = stored(given.results, {**HERE, "torchvision": True})
        write_down(results, [with_it[key] for key in families() if key in with_it])
    print(summary(results))
    return 1 if any(result.how in (WRONG, CRASHED) for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
