"""What does a call of an engine cost beside its work? And how long does an engine of one rank take to start?

    python bench/engine.py [calls | work] [--calls 300] [--turns 5] [--save]

The method called returns a number and takes two; the time is from the call to the values of all ranks. Imports are not
counted in the start. `work` is what engine_work.py measures: generation, turns of engines, weights from one to another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_work
import torch
from results import machine, table, write_section
from transformers import Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn

WARM = 30
TARGET_MS, TARGET_START = 2.0, 1.0


class Small(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Answers at once."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters())

    def add(self, numbers: list[int], other: int) -> int:
        return sum(numbers) + other


def save_model(folder: Path) -> Path:
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def made(model: Path) -> TrainEngine:
    with init_empty_weights():
        return TrainEngine(Small.from_pretrained(model))


def starts(model: Path, turns: int) -> list[float]:
    """Seconds from the module's making to its first answer, in process."""
    found = []
    for _ in range(turns):
        began = time.perf_counter()
        made(model).build().add([1], 2)
        found.append(time.perf_counter() - began)
    return found


def overhead(engine: TrainEngine, calls: int) -> list[float]:
    """Milliseconds of each call."""
    found = []
    for number in range(WARM + calls):
        began = time.perf_counter()
        engine.add(NeedParallel([1, 2, 3, 4]), number)
        found.append(1000 * (time.perf_counter() - began))
    return found[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["calls", "work"], default="calls")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.what == "work":
        text = engine_work.measured(arguments.turns)
        print(text)
        if arguments.save:
            write_section("engine-work", text)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        shardtune.init("local")
        times = starts(model, arguments.turns)
        calls = {"in process, 1 rank": overhead(made(model).build(), arguments.calls)}
        with made(model).build(data_parallel_size=2) as engine:
            calls["processes of this machine, 2 ranks"] = overhead(engine, arguments.calls)
        shardtune.init("ray")
        for ranks in (1, 2):
            with made(model).build(data_parallel_size=ranks) as engine:
                calls[f"Ray, {ranks} rank{'s' if ranks > 1 else ''}"] = overhead(engine, arguments.calls)
    rows = [
        (name, f"{statistics.median(values):.2f}", f"{sorted(values)[int(0.95 * len(values))]:.2f}")
        for name, values in calls.items()
    ]
    text = "\n\n".join(
        [
            f"{machine()}.",
            table(("ranks", "median, ms", "95 % are below, ms"), rows),
            f"An engine of one rank in process: first answer after {statistics.median(times):.2f} s at the median, "
            f"{max(times):.2f} s at most (target: under {TARGET_START:g} s). Calls over Ray: target under "
            f"{TARGET_MS:g} ms at the median.",
        ]
    )
    print(text)
    if arguments.save:
        write_section("engine", text)


if __name__ == "__main__":
    main()
