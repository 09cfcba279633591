"""How long do an engine's generation, turns of engines, and weights from one to another take, beside the plain way?

    python bench/engine.py work [--turns 5] [--save]

Both ways of a pair run one after the other, `--turns` times; the ratio is the median over pairs. Generation on several
ranks is compared with as many processes of plain transformers side by side, each of which answers its part of the rows.
Its answers are those of plain transformers, which is checked.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from results import machine, table
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn

SIZES = {"2 layers of 64": (64, 2), "8 layers of 512": (512, 8)}
ROWS = [[(7 * row + 3 * place) % 250 + 1 for place in range(16)] for row in range(8)]
ANSWER: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32, "pad_token_id": 0}
LAYOUTS = ((1, "fsdp2"), (2, "fsdp2"), (2, "fsdp1"), (2, "ddp"))


class Policy(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)

    def rollout(self, rows: list[list[int]]) -> list[list[int]]:
        return self.generate(torch.tensor(rows), **ANSWER).tolist()

    def step(self, rows: list[list[int]]) -> None:
        self(torch.tensor(rows)).logits.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def score(self, rows: list[list[int]]) -> float:
        with torch.no_grad():
            return self(torch.tensor(rows)).logits.mean().item()

    @torch.no_grad()
    def take_file(self, file: str) -> None:
        state = torch.load(file)
        for name, parameter in self.named_parameters():
            sharded = isinstance(parameter, DTensor)
            whole = state[name]
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements) if sharded else whole)


def save_model(folder: str, size: str) -> int:
    """The number of parameters of the model that is written."""
    hidden, layers = SIZES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def make(folder: str, executor: Any = "fsdp2") -> Any:
    with init_empty_weights():
        return TrainEngine(Policy.from_pretrained(folder), executor)


def answer_plainly(folder: str) -> None:
    """A process of plain transformers: rows on a line of the input, answers on a line of the output."""
    torch.set_num_threads(1)
    model: Any = Qwen2ForCausalLM.from_pretrained(folder).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(model.generate(torch.tensor(json.loads(line)), **ANSWER).tolist()), flush=True)


@contextmanager
def plain_processes(folder: str, number: int) -> Iterator[Callable[[], list[list[int]]]]:
    command = [sys.executable, __file__, folder]
    pipe = subprocess.PIPE
    started: list[Any] = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) for _ in range(number)
    ]
    assert all(process.stdout.readline() == "ready\n" for process in started)
    each = len(ROWS) // number

    def answers() -> list[list[int]]:
        for place, process in enumerate(started):
            process.stdin.write(json.dumps(ROWS[place * each : (place + 1) * each]) + "\n")
            process.stdin.flush()
        return [row for process in started for row in json.loads(process.stdout.readline())]

    yield answers
    for process in started:
        process.stdin.close()
        process.wait()


def answers_of(engine: Any) -> list[list[int]]:
    return [row for part in engine.rollout(NeedParallel(ROWS)) for row in part]


def paired(plain: Callable[[], object], ours: Callable[[], object], turns: int) -> tuple[str, str, str]:
    """Medians of both in seconds, and of their ratio with its range."""
    times: list[tuple[float, float]] = []
    for way in (plain, ours):
        way()
    for _ in range(turns):
        began = time.perf_counter()
        plain()
        between = time.perf_counter()
        ours()
        times.append((between - began, time.perf_counter() - between))
    ratios = [mine / other for other, mine in times]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    other, mine = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{other:.3f}", f"{mine:.3f}", spread


def generation(folder: str, size: str, turns: int) -> Iterator[tuple[str, ...]]:
    for ranks, executor in LAYOUTS:
        engine = make(folder, executor).build(data_parallel_size=ranks).eval()
        with engine, plain_processes(folder, ranks) as plain:
            ours = partial(answers_of, engine)
            assert ours() == plain(), "the answers differ"
            yield "generation, beside plain transformers", size, f"{ranks}, {executor}", *paired(plain, ours, turns)


def turn_taking(folder: str, size: str, turns: int) -> Iterator[tuple[str, ...]]:
    for ranks in (1, 2):
        pairs = []
        for take_turns in (False, True):
            first = make(folder).build(data_parallel_size=ranks)
            pairs.append((first, make(folder).build(colocate_with=first, take_turns=take_turns)))

        def call(pair: tuple[Any, Any]) -> None:
            pair[0].step(NeedParallel(ROWS))
            pair[1].score(NeedParallel(ROWS))

        together, in_turns = (lambda pair=pair: call(pair) for pair in pairs)
        yield "a step and a score in turns, beside without", size, f"{ranks}, fsdp2", *paired(together, in_turns, turns)
        for pair in pairs:
            for engine in reversed(pair):
                engine.close()


def pushing(folder: str, size: str, turns: int) -> Iterator[tuple[str, ...]]:
    for source_ranks, executor in ((2, "fsdp2"), (2, "fsdp1"), (1, "fsdp2")):
        target = make(folder).build(data_parallel_size=2)
        options = {"colocate_with": target, "take_turns": False} if source_ranks == 2 else {}
        source = make(folder, executor).build(**options)
        with target, source, tempfile.NamedTemporaryFile() as file:

            def by_hand(source: Any = source, target: Any = target, file: Any = file) -> None:
                torch.save(dict(source.named_tensors()), file.name)
                target.take_file(file.name)

            pushed = partial(source.push_weights, target)
            ranks = f"{source_ranks}, {executor} to 2, fsdp2{' on the same ranks' if source_ranks == 2 else ''}"
            yield "push_weights, beside a file by hand", size, ranks, *paired(by_hand, pushed, turns)


def measured(turns: int) -> str:
    shardtune.init("local", device="cpu")
    rows: list[tuple[str, ...]] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            named = f"{size}, {save_model(folder, size) / 1e6:.1f} M"
            for part in (generation, turn_taking, pushing):
                for row in part(folder, named, turns):
                    print(*row, sep=" | ", flush=True)
                    rows.append(row)
    heads = ("what", "model", "ranks", "plain, s", "engine, s", "ratio: median (range)")
    return f"{machine()}; {turns} pairs each.\n\n{table(heads, rows)}"


if __name__ == "__main__":
    answer_plainly(sys.argv[1])
