"""What grows with ranks and with rows: set-up and a step of up to 1,024 ranks, orders of up to 100 million rows.

    python bench/many_ranks.py [--save]

Rank 0 of each number of ranks runs here alone, over torch's fake process group: it makes its groups, builds and shards
the model, and computes a step without memory (`shardtune plan`). What the network would take is not in these times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from results import machine, table, write_section  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from workload import make_inputs  # noqa: E402

from shardtune.config.rank_layout import Layout  # noqa: E402
from shardtune.data.loader.order import DataOrder, OrderSource  # noqa: E402
from shardtune.data.loader.packing import deal  # noqa: E402
from shardtune.run.plan.plan import planner  # noqa: E402
from shardtune.run.plan.simulation import ranks_of  # noqa: E402

RANKS = (8, 64, 256, 1024)
ROWS_OF_RANK = 16
TENSORS = 300
"""Of a checkpoint: as many as a model of 28 layers has."""


def timed(compute: Callable[[], object], turns: int = 3) -> float:
    """The median of the seconds that it takes."""
    taken = []
    for _ in range(turns):
        began = time.perf_counter()
        compute()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def open_layout(layout: Layout) -> None:
    with ranks_of(layout):
        pass


def by_ranks(folder: Path) -> list[list[str]]:
    """Rows of the table, one per number of ranks."""
    generator = np.random.default_rng(0)
    found = []
    for number in RANKS:
        plan = planner(
            str(folder / "recipe.yaml"),
            [f"actor.global_batch_size={ROWS_OF_RANK * number}", "actor.micro_batch_size=4"],
            ranks=number,
            report=lambda _: None,
        )
        lengths = generator.integers(50, 1000, ROWS_OF_RANK * number)
        one = timed(lambda number=number: open_layout(Layout(1, number)))
        two = timed(lambda number=number: open_layout(Layout(number // 8, 8)))
        step = timed(plan.plan, 1)
        dealt = timed(lambda lengths=lengths, number=number: deal(lengths, number, max_rows=4, max_tokens=None))
        headers = timed(lambda number=number: read_headers(folder / "parts", number), 1)
        found.append([f"{number:,}", *(f"{each:.3f}" for each in (one, two, step, dealt, headers))])
    return found


def read_headers(folder: Path, number: int) -> None:
    """What a rank reads of every other one's files before it loads its own part of a checkpoint."""
    for rank in range(number):
        with safe_open(str(folder / f"{rank}.safetensors"), "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                file.get_slice(name).get_shape()


def write_parts(folder: Path) -> None:
    folder.mkdir()
    part = {f"model.layers.{number}.weight": torch.zeros(4, 8) for number in range(TENSORS)}
    for rank in range(max(RANKS)):
        save_file(part, str(folder / f"{rank}.safetensors"))


def by_rows() -> list[list[str]]:
    """Seconds for the rows of a step anywhere in an epoch, and for the position of a continued run."""
    found = []
    for rows in (10**6, 10**7, 10**8):
        order = DataOrder([OrderSource("all", 0, rows, 1.0)], seed=1, global_batch_size=1024)
        place = rows // 2
        taken = timed(lambda order=order, place=place: order.rows(3, place, place + 1024), 5)
        found.append([f"{rows:,}", f"{1e3 * taken:.2f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        questions = [{"question": f"What comes after {number}?", "answer": f"{number + 1}"} for number in range(200)]
        data = folder / "questions.jsonl"
        data.write_text("\n".join(map(json.dumps, questions)) + "\n")
        make_inputs(folder, data, count=None, width=64, layers=4, vocabulary=400, max_length=128)
        recipe = {
            "actor": {"model": {"model_path": str(folder / "model"), "precision": "bf16"}},
            "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")},
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        write_parts(folder / "parts")
        ranks, rows = by_ranks(folder), by_rows()
    head = ["ranks", "groups, sharded", "groups, sharded by 8", "set-up and a step", "dealing its rows", "headers read"]
    text = (
        f"{machine()}. Seconds of rank 0, {ROWS_OF_RANK} rows to a rank; a model of 4 layers; files of {TENSORS} "
        "tensors.\n\n" + table(head, ranks) + "\n\n" + table(["rows", "order of a step of 1,024 rows, ms"], rows)
    )
    print(text)
    if arguments.save:
        write_section("many_ranks", text)


if __name__ == "__main__":
    main()
