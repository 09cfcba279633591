"""What grows with ranks and with rows: set-up and a step of up to 1,024 ranks, orders of up to 100 million rows.

    python bench/many_ranks.py [--save]

Rank 0 of each number of ranks runs here alone, over torch's fake process group: it makes its groups, builds and shards
the model, and computes a step without memory (`shardtune plan`). It loads its part of a checkpoint of all ranks, whose
files are real, and plans a save from what every rank would send. What the network would take is not in these times.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
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
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlan  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from workload import make_inputs  # noqa: E402

from shardtune.checkpoint.checksums import add_checksums  # noqa: E402
from shardtune.checkpoint.dcp import load_tensors  # noqa: E402
from shardtune.checkpoint.save_plan import Parts, PartsPlanner, WrittenFile  # noqa: E402
from shardtune.checkpoint.store import CheckpointStore  # noqa: E402
from shardtune.checkpoint.tensor_index import INDEX, TensorIndex  # noqa: E402
from shardtune.checkpoint.verified import damage  # noqa: E402
from shardtune.config.rank_layout import Layout  # noqa: E402
from shardtune.data.checksum import checksum  # noqa: E402
from shardtune.data.loader.order import DataOrder, OrderSource  # noqa: E402
from shardtune.data.loader.packing import deal  # noqa: E402
from shardtune.run.plan.plan import planner  # noqa: E402
from shardtune.run.plan.simulation import ranks_of  # noqa: E402
from tests.support.opened_files import opened_in  # noqa: E402

RANKS = (8, 64, 256, 1024)
ROWS_OF_RANK = 16
TENSORS = [f"model.layers.{number}.weight" for number in range(300)]
"""Of a checkpoint: as many as a model of 28 layers has; its optimizer's state has two or three for each."""
PART = (4, 8)
"""The shape of a rank's part of a tensor."""


def timed(compute: Callable[[], object], turns: int = 3) -> float:
    """The median of the seconds of a processor that it takes; others use the machine too."""
    taken = []
    for _ in range(turns):
        began = time.process_time()
        compute()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def open_layout(layout: Layout) -> None:
    with ranks_of(layout):
        pass


def by_ranks(folder: Path) -> list[list[str]]:
    """Rows of the table of a start, one per number of ranks."""
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
        found.append([f"{number:,}", *(f"{each:.3f}" for each in (one, two, step, dealt))])
    return found


def loads_by_ranks(folder: Path) -> list[list[str]]:
    """Rows of the table of loading, one per number of ranks."""
    write_parts(folder / "parts")
    found = []
    for number in RANKS:
        parts = folder / f"parts-{number}"
        parts.mkdir()
        for name in map(file_name, range(number)):
            os.link(folder / "parts" / name, parts / name)
        by_headers, opened_without = loading(parts, number)
        text = TensorIndex.of(parts).to_text()
        (parts / INDEX).write_text(text)
        by_index, opened = loading(parts, number)
        times, files = (f"{by_headers:.2f}", f"{by_index:.3f}"), (f"{opened_without:,}", f"{opened:,}")
        found.append([f"{number:,}", *times, *files, f"{len(text) / 1000:.0f} kB"])
    return found


def saves_by_ranks(folder: Path) -> list[list[str]]:
    """Rows of the table of saving, one per number of ranks."""
    return [
        [
            f"{number:,}",
            f"{planning(number):.3f}",
            *(f"{each:.3f}" for each in committing(folder / str(number), number)),
        ]
        for number in RANKS
    ]


def committing(folder: Path, number: int) -> tuple[float, float]:
    """Seconds in which rank 0 commits a checkpoint and removes the oldest of four, and verifies its share of one."""
    store, taken = CheckpointStore(folder, keep_last=3), 0.0
    for step in range(1, 5):
        temporary = store.begin(step)
        for part in ("model", "optimizer"):
            (temporary / part).mkdir()
            for rank in range(number):
                (temporary / part / file_name(rank)).write_bytes(b"tensors")
            sums = {file_name(rank): [(7, checksum(b"tensors"))] for rank in range(number)}
            add_checksums(temporary / part, sums)
        taken = timed(lambda temporary=temporary, step=step: store.commit(temporary, step, {}), 1)
    return taken, timed(lambda: damage(store.path(4), 0, number), 1)


def loading(folder: Path, number: int) -> tuple[float, int]:
    """Seconds in which rank 0 loads its part, and the files that it opens."""
    with ranks_of(Layout(1, number)) as ranks:
        tensors: dict[str, torch.Tensor] = {
            name: DTensor.from_local(torch.zeros(PART), ranks.shard_mesh, [Shard(0)]) for name in TENSORS
        }
        with opened_in(folder) as opened:
            taken = timed(lambda: load_tensors(folder, tensors), 1)
    assert all(bool((tensor.to_local() == 1).all()) for tensor in tensors.values() if isinstance(tensor, DTensor))
    return taken, len(opened)


def planning(number: int) -> float:
    """Seconds in which rank 0 decides what each rank writes, and makes the index of it."""
    rows, width = PART
    planner = PartsPlanner()
    planner.set_up_planner({name: torch.empty(rows * number, width, device="meta") for name in TENSORS}, None, True)
    tensors = np.arange(len(TENSORS))
    received = []
    for rank in range(number):
        places = np.tile([0, rank * rows, 0, rows, width], (len(TENSORS), 1))
        places[:, 0] = tensors
        received.append(pickle.dumps(SavePlan([], planner_data=Parts("", places))))
    files = [[WrittenFile(file_name(rank), 1, "", tensors)] for rank in range(number)]

    def plan() -> None:
        sent, _ = planner.create_global_plan([pickle.loads(each) for each in received])
        for each in sent:
            pickle.dumps(each)
        planner.index(files).to_text()

    return timed(plan, 1)


def file_name(rank: int) -> str:
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def write_parts(folder: Path) -> None:
    """The files that all ranks write into a checkpoint, ones on rank 0."""
    folder.mkdir()
    for rank in range(max(RANKS)):
        part = dict.fromkeys(TENSORS, torch.full(PART, rank + 1.0))
        begins = json.dumps({name: {"saved_offsets": [PART[0] * rank, 0]} for name in TENSORS})
        part = {name: tensor.clone() for name, tensor in part.items()}
        save_file(part, str(folder / file_name(rank)), {"DCP_SHARDING_INFO": begins})


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
        ranks, loads, saves, rows = (
            by_ranks(folder),
            loads_by_ranks(folder),
            saves_by_ranks(folder / "saves"),
            by_rows(),
        )
    start = ["ranks", "groups, sharded", "groups, sharded by 8", "set-up and a step", "dealing its rows"]
    load = ["ranks", "loading without index", "loading", "files opened without index", "files opened", "index"]
    save = ["ranks", "planning a save", "committing it", "verifying a share"]
    text = "\n\n".join([
        f"{machine()}. Seconds of rank 0's processor, {ROWS_OF_RANK} rows to a rank; a model of 4 layers.",
        table(start, ranks),
        f"A checkpoint's folder of {len(TENSORS)} tensors, with a file of each rank:",
        table(load, loads),
        "A checkpoint of two such folders; its files are small, so that this is what depends on their number:",
        table(save, saves),
        table(["rows", "order of a step of 1,024 rows, ms"], rows),
    ])  # fmt: skip
    print(text)
    if arguments.save:
        write_section("many_ranks", text)


if __name__ == "__main__":
    main()
