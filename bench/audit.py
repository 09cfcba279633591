"""Time, memory and what is found in an audit of many rows: `python bench/audit.py` (`--rows N`: another size).

Rows of about 200 random tokens (common ones more often), of which 1 % repeat an earlier one exactly and 1 % with one
token changed; of 10,000 evaluation rows 1 % are in training, with one token changed. Rewrites the section `audit` of
docs/benchmarks.md; ends with exit code 1 where less than 98 % of what is planted is found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from shardtune.data.audit.audit import Options, audit  # noqa: E402
from shardtune.data.cache.dataset import Part, TokenDataset  # noqa: E402
from shardtune.data.cache.entry import EncodedRows, Entry, EntryWriter, Tally  # noqa: E402
from shardtune.data.chat.encoder import ChatEncoder  # noqa: E402
from shardtune.data.prepare import PreparedData  # noqa: E402
from tests.support.tiny_run import CHATML, make_tokenizer  # noqa: E402

SIZES = (100_000, 1_000_000)
HELD_OUT, CHUNK, SHARE, FOUND = 10_000, 10_000, 100, 0.98
VOCABULARY = 32_000


class AnonymousMemory(threading.Thread):
    """The peak of this process's own memory, without the pages of mapped files; sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self._now()
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.peak = max(self.peak, self._now())
            time.sleep(0.01)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def chunk(draw: np.random.Generator, rows: int) -> list[np.ndarray]:
    """Rows, of which each hundredth repeats the one before it, and the next one nearly so."""
    lengths = draw.integers(100, 301, rows)
    tokens = (VOCABULARY * draw.random(int(lengths.sum())) ** 3).astype(np.int32)
    made = np.split(tokens, np.cumsum(lengths)[:-1])
    for place in range(2, rows, SHARE):
        made[place] = made[place - 1]
        made[place + 1] = changed(made[place - 2])
    return made


def changed(tokens: np.ndarray) -> np.ndarray:
    other = tokens.copy()
    other[len(other) // 3] = VOCABULARY
    return other


def write(folder: Path, chunks: Iterator[list[np.ndarray]]) -> TokenDataset:
    """Rows as a cache entry, in which the second half of each row is trained."""
    folder.mkdir()
    writer = EntryWriter(folder)
    number = 0
    for rows in chunks:
        lengths = np.array([len(row) for row in rows])
        empty, none = np.empty(0, np.int64), np.zeros(len(rows), np.int64)
        halves = np.stack([lengths // 2, lengths - lengths // 2], axis=1)
        texts = {f"{name}s": empty for name in ("prompt", "reference", "question")}
        counts = {f"{name}_counts": none for name in ("prompt", "reference", "question")}
        arrays = {
            "tokens": np.concatenate(rows),
            "token_counts": lengths,
            "lengths": lengths.astype(np.int32),
            "run_values": np.tile(np.array([0, 1], np.float32), len(rows)),
            "run_lengths": halves.reshape(-1).astype(np.int32),
            "run_counts": np.full(len(rows), 2),
            "numbers": np.arange(number, number + len(rows)),
            "hashes": np.arange(number, number + len(rows)).astype(np.uint64),
            **texts,
            **counts,
        }
        number += len(rows)
        tally = Tally(rows=len(rows), kept=len(rows))
        writer.add(EncodedRows(arrays, {"ce": halves[:, 1].astype(np.float64)}, {}, tally))
    writer.finish({})
    return TokenDataset([Part(Entry(folder), "rows", folder.name)], {"rows": 1.0})


def measure(folder: Path, rows: int) -> tuple[tuple[object, ...], float]:
    """A line of the table, and the smallest share of what is planted that was found."""
    draw, kept = np.random.default_rng(0), list[np.ndarray]()

    def training() -> Iterator[list[np.ndarray]]:
        for start in range(0, rows, CHUNK):
            made = chunk(draw, CHUNK)
            if start < HELD_OUT:
                kept.extend(made[10::SHARE][: HELD_OUT // SHARE])
            yield made

    train = write(folder / f"train{rows}", training())
    held_out = [one for one in chunk(np.random.default_rng(1), HELD_OUT) if len(one)]
    held_out[7::SHARE] = [changed(one) for one in kept[: len(held_out[7::SHARE])]]
    evaluation = write(folder / f"eval{rows}", iter([held_out]))
    prepared = PreparedData(ChatEncoder(make_tokenizer(), CHATML), train, {"": evaluation})
    memory = AnonymousMemory()
    memory.start()
    began = time.perf_counter()
    found = audit(prepared, Options(examples=0), None, lambda _: None)
    seconds = time.perf_counter() - began
    memory.ended = True
    planted, kinds = rows // SHARE, found.sets["train"].total.kinds
    shares = [kinds["duplicates"] / planted, kinds["near_duplicates"] / planted]
    shares.append(found.contamination["eval"].total.count / len(held_out[7::SHARE]))
    tokens = found.sets["train"].total.tokens
    line = (
        f"{rows:,}",
        f"{tokens / 1e6:,.0f}",
        f"{seconds:,.1f}",
        f"{tokens / seconds / 1e6:,.1f}",
        f"{(memory.peak - memory.first) / 1e6:,.0f}",
        *(f"{share:.1%}" for share in shares),
    )
    print(*line, flush=True)
    return line, min(shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES)
    sizes = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(Path(folder), rows) for rows in sizes]
    heads = (
        "rows",
        "million tokens",
        "seconds",
        "million tokens/s",
        "memory, MB",
        "duplicates found",
        "near",
        "in eval",
    )
    kept = all(least >= FOUND for _, least in results)
    text = f"{table(heads, [line for line, _ in results])}\n\n"
    text += f"{'Within the limit' if kept else 'BELOW THE LIMIT'} of {FOUND:.0%} of what is planted. {machine()}."
    write_section("audit", text)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
