"""What tokenising a million short chats costs, and opening the result.

    python bench/million_rows.py [--rows 1000000] [--workers 1 2] [--save]

Each build is a process of its own with an empty cache. Its memory is that of the process that writes the entry, without
mapped pages; its CPU seconds are those of all its processes, without the start. A tenth of the rows comes first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from audit import AnonymousMemory
from results import machine, table, write_section
from transformers import AutoTokenizer
from workload import make_inputs

from shardtune.config.schema import DataConfig
from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.loader.protocol import DataState
from shardtune.data.loader.step_loader import BatchMaker, Limits, StepLoader
from shardtune.data.sources.resolve import resolve_sources

WORDS = ["".join(parts) for parts in product("bdfgklmnprst", "aeiou", ("n", "r", "st", "lo", "mi", ""))]
STEP_ROWS = 1024
HEADS = ("rows", "`num_workers`", "rows per CPU second", "CPU seconds", "seconds", "MB beyond the start", "bytes a row")


def write_chats(file: Path, rows: int) -> None:
    """Chats of a question and an answer with 4 to 24 words each."""
    draw = random.Random(0)
    with file.open("w") as lines:
        for _ in range(rows):
            texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 24))) for _ in range(2)]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            lines.write(json.dumps({"messages": turns}) + "\n")


def opened(folder: Path, rows: int, workers: int) -> TokenDataset:
    """The rows, tokenised unless they are in the cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    encoder = ChatEncoder(tokenizer, load_template(None, tokenizer), max_length=512)
    data, cache = DataConfig(train_data_paths=str(folder / f"{rows}.jsonl")), folder / f"cache-{rows}-{workers}"
    sources = resolve_sources(data.train_data_paths, data, report=lambda _: None)
    return build_dataset(sources, encoder, cache_dir=cache, num_workers=workers, report=lambda _: None)


def built(folder: Path, rows: int, workers: int) -> list[str]:
    """A line about a build; in a process of its own."""
    memory, began, before = AnonymousMemory(), time.perf_counter(), sum(os.times()[:4])
    memory.start()
    opened(folder, rows, workers)
    memory.ended = True
    wall, busy = time.perf_counter() - began, sum(os.times()[:4]) - before
    size = sum(file.stat().st_size for file in folder.glob(f"cache-{rows}-{workers}/entries/*/*/*"))
    costs = f"{rows / busy:,.0f}", f"{busy:,.0f}", f"{wall:,.0f}", f"{(memory.peak - memory.first) / 1e6:.0f}"
    return [f"{rows:,}", str(workers), *costs, f"{size / rows:.0f}"]


def first_step(folder: Path, rows: int, workers: int) -> str:
    """The time to open a finished cache, and to its first step."""
    at = [time.perf_counter()]
    data = opened(folder, rows, workers)
    at.append(time.perf_counter())
    order = DataOrder([OrderSource("all", 0, len(data))], seed=1, global_batch_size=STEP_ROWS)
    step = StepLoader(data, order, BatchMaker(data, Limits(None, 8192))).step(DataState())
    at.append(time.perf_counter())
    return (
        f"- {rows:,} rows: tokenizer and cache open in {(at[1] - at[0]) * 1e3:.0f} ms, then the first step "
        f"({STEP_ROWS:,} rows, {step.num_tokens:,} tokens) in {(at[2] - at[1]) * 1e3:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="values of data.num_workers")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    few, many, start = arguments.rows // 10, arguments.rows, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder, questions = Path(name), Path(name) / "questions.jsonl"
        questions.write_text("\n".join(json.dumps({"question": " ".join(WORDS), "answer": word}) for word in WORDS))
        make_inputs(folder, questions, count=None, width=64, layers=1, vocabulary=1000, max_length=512)
        lines = []
        for rows in (few, many):
            write_chats(folder / f"{rows}.jsonl", rows)
        for rows, workers in ((few, 1), (few, 2), *((many, workers) for workers in arguments.workers)):
            with ProcessPoolExecutor(1, start) as pool:
                lines.append(pool.submit(built, folder, rows, workers).result())
            print(table(HEADS, lines[-1:]), flush=True)
        opening = [first_step(folder, rows, arguments.workers[-1]) for rows in (few, many)]
    text = f"{machine()}.\n\n{table(HEADS, lines)}\n\n" + "\n".join(opening)
    print(text)
    if arguments.save:
        write_section("million_rows", text)


if __name__ == "__main__":
    main()
