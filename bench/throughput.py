"""Tokens per second, peak memory and start-up of shardtune, of the flat script's step and of TRL, as ratios in one run.

Each contender is a process of its own that trains the same rows, of the same length limit, with the same model and
precision. They take turns: a contender trains a few steps while the others wait, so that a machine whose speed drifts
slows all alike. Reported are medians over the turns and the ratios of turns that lie next to each other.

    python bench/throughput.py --data gsm8k_train.jsonl [--precision fp32|bf16] [--turns 7]

`products` is no trainer: it computes the matrix products of a step alone, forward and backward, of linear layers and
head, in the same precision and of the mean number of tokens. What a trainer reaches of its speed is the share of the
machine's peak, with attention, norms, the optimizer and everything else counted as time lost. On a processor without
instructions for bf16 they are computed in fp32, which is its peak in bf16 too.

TRL runs as a user would configure it: its defaults (completion-only loss on prompt-completion rows), once without and
once with `packing=True`; `gradient_checkpointing=False` too, so that nobody has to guess what that costs. It needs
`pip install -c constraints.txt trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section
from workload import make_inputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROWS_PER_STEP = 8  # TRL's default batch
MAX_LENGTH = 1024  # TRL's default, too
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CONTENDERS = ("shardtune", "shardtune-compiled", "flat", "trl", "trl-no-checkpointing", "trl-packing", "products")


class Turns:
    """One contender's side of taking turns: `step_done` after each step; waits for its turn where one is over."""

    def __init__(self, steps: int, clock: str) -> None:
        self._steps = steps
        self._clock = CLOCKS[clock]
        self._done = 0
        self._tokens = 0.0
        self._began = self._clock()
        self._first = True

    def step_done(self, tokens: float) -> None:
        self._done += 1
        self._tokens += tokens
        if self._first:  # the first step is start-up
            self._report({"started": time.time()})
            self._first = False
        elif self._done >= self._steps:
            self._report({"tokens": self._tokens, "seconds": self._clock() - self._began})
        else:
            return
        if not sys.stdin.readline().strip():
            os._exit(0)
        self._done, self._tokens, self._began = 0, 0.0, self._clock()

    def _report(self, what: dict[str, float]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print("@" + json.dumps({**what, "peak_gb": peak}), flush=True)


def recipe(folder: Path, precision: str, **model: Any) -> dict[str, Any]:
    return {
        "runner": {"logger": {"log_path": str(folder / "runs"), "experiment_name": "bench"}, "max_epochs": 1000},
        "actor": {
            "micro_batch_size": ROWS_PER_STEP,
            "global_batch_size": ROWS_PER_STEP,
            "model": {"model_path": str(folder / "model"), "precision": precision, **model},
            "optim": {"lr": 2.0e-5, "lr_scheduler": "linear", "weight_decay": 0.0, "args": {"fused": True}},
        },
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "max_length": MAX_LENGTH,
            "cache_dir": str(folder / "cache"),
        },
    }


def run_shardtune(folder: Path, precision: str, turns: Turns, **model: Any) -> None:
    from shardtune import SFTRunner, SFTWorker
    from shardtune.config import load_recipe

    loaded = load_recipe(recipe(folder, precision, **model))
    worker = SFTWorker(loaded, report=lambda text: None)

    class Watch:
        def started(self, step: int, total_steps: int) -> None: ...
        def evaluated(self, step: int, metrics: Any) -> None: ...
        def saved(self, step: int, path: Path) -> None: ...
        def log(self, text: str) -> None: ...
        def finished(self) -> None: ...
        def stepped(self, step: int, metrics: Any) -> None:
            turns.step_done(metrics["train/tokens"])

    SFTRunner(loaded, worker, observer=Watch()).run()


def run_flat(folder: Path, precision: str, turns: Turns) -> None:
    """Plain PyTorch, the same arithmetic: rows end to end, one attention call per row, head on targets."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    bounds: list[int] = []

    def per_row(module, query, key, value, mask, scaling=None, dropout=0.0, **_):
        parts = zip(*(tensor.split(bounds, dim=2) for tensor in (query, key, value)), strict=True)
        grouped = query.shape[1] != key.shape[1]
        out = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            for q, k, v in parts
        ]
        return torch.cat(out, dim=2).transpose(1, 2), None

    AttentionInterface.register("per_row", per_row)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="per_row")
    half = precision == "bf16"
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    if half:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    trained = masters if half else list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.0, fused=True)
    rows = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], return_dict=False)[:MAX_LENGTH]
        rows.append((whole, len(prompt)))
    model.train()
    order = np.random.default_rng(0).permutation(len(rows))
    while True:
        for start in range(0, len(order) - ROWS_PER_STEP, ROWS_PER_STEP):
            chosen = [rows[index] for index in order[start : start + ROWS_PER_STEP]]
            bounds[:] = [len(ids) for ids, _ in chosen]
            ids = torch.tensor([token for ids, _ in chosen for token in ids])
            positions = torch.cat([torch.arange(length) for length in bounds])
            offset, where = 0, []
            for tokens, prompt in chosen:
                where.append(torch.arange(offset + prompt - 1, offset + len(tokens) - 2))
                offset += len(tokens)
            targets = torch.cat(where)
            hidden = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0][0]
            logits = model.lm_head(hidden[targets]).float()
            (F.cross_entropy(logits, ids[targets + 1], reduction="sum") / len(targets)).backward()
            if half:
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    master.grad, parameter.grad = parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if half:
                with torch.no_grad():
                    for master, parameter in zip(masters, model.parameters(), strict=True):
                        parameter.copy_(master)
            turns.step_done(len(ids))


def run_trl(folder: Path, precision: str, turns: Turns, **options: Any) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    class Watch(TrainerCallback):
        seen = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.step_done(counted[0])
            counted[0] = 0.0

    counted = [0.0]

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            counted[0] += float(mask.sum() if mask is not None else inputs["input_ids"].numel())
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        bf16=precision == "bf16",
        use_cpu=True,
        num_train_epochs=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_length=MAX_LENGTH,
        learning_rate=2e-5,
        model_init_kwargs={"dtype": "float32"},
        **options,
    )
    trainer = Counting(
        model=str(folder / "model"), args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[Watch()]
    )
    trainer.train()


def run_products(folder: Path, precision: str, turns: Turns) -> None:
    """Of each linear layer of a step its output, its input's gradient and its weight's gradient."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from shardtune.parallel.torch_private.operations import half_is_native

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    wholes, prompts = [], []
    for line in (folder / "rows.jsonl").read_text().splitlines()[:400]:
        row = json.loads(line)
        prompts.append(len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)))
        wholes.append(len(tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], return_dict=False)))
    tokens = round(ROWS_PER_STEP * statistics.mean(wholes))
    targets = tokens - round(ROWS_PER_STEP * statistics.mean(prompts))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    sizes = [(targets if layer is head else tokens, *layer.weight.shape) for layer in layers]
    dtype = torch.bfloat16 if precision == "bf16" and half_is_native(torch.bfloat16) else torch.float32
    weights = {(n, k): torch.randn(n, k).to(dtype) for _, n, k in sizes}
    inputs = {(m, k): torch.randn(m, k).to(dtype) for m, _, k in sizes}
    outputs = {(m, n): torch.randn(m, n).to(dtype) for m, n, _ in sizes}
    while True:
        for m, n, k in sizes:
            x, grad, weight = inputs[m, k], outputs[m, n], weights[n, k]
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)
        turns.step_done(tokens)


RUN: dict[str, Callable[[Path, str, Turns], None]] = {
    "shardtune": run_shardtune,
    "shardtune-compiled": lambda folder, precision, turns: run_shardtune(folder, precision, turns, compile=True),
    "flat": run_flat,
    "trl": run_trl,
    "trl-no-checkpointing": lambda folder, precision, turns: run_trl(
        folder, precision, turns, gradient_checkpointing=False
    ),
    "trl-packing": lambda folder, precision, turns: run_trl(folder, precision, turns, packing=True),
    "products": run_products,
}


class Contender:
    """A contender's process, seen from the referee."""

    def __init__(self, name: str, folder: Path, precision: str, steps: int, threads: int, clock: str) -> None:
        self.name = name
        self._began = time.time()
        command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--precision", precision]
        self._log = open(folder / f"{name}.log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--steps", str(steps), "--clock", clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.startup = self._answer()["started"] - self._began
        self.rates: list[float] = []
        self.peak = 0.0

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"{self.name} ended early:\n{Path(self._log.name).read_text()[-3000:]}")

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak = answer["peak_gb"]
        return answer["tokens"] / answer["seconds"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL rows with question and answer (GSM8K)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps of one turn")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--clock", default="wall", choices=list(CLOCKS), help="cpu: with one thread, on a machine that others use too"
    )
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        RUN[arguments.contender](arguments.folder, arguments.precision, Turns(arguments.steps, arguments.clock))
        return
    if arguments.data is None:
        parser.error("--data is needed: GSM8K's train.jsonl, or any rows with question and answer")
    with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
        folder = Path(name)
        make_inputs(
            folder,
            arguments.data,
            count=arguments.rows,
            width=arguments.width,
            layers=arguments.layers,
            vocabulary=arguments.vocabulary,
            max_length=MAX_LENGTH,
        )
        contenders = []
        for contender in arguments.only:  # one after the other: start-up is measured, too
            settings = (arguments.precision, arguments.steps, arguments.threads, arguments.clock)
            contenders.append(Contender(contender, folder, *settings))
            contenders[-1].turn()  # warm-up, not counted
            print(f"{contender}: started in {contenders[-1].startup:.1f} s", file=sys.stderr, flush=True)
        for _ in range(arguments.turns):
            for contender in contenders:
                contender.rates.append(contender.turn())
        for contender in contenders:
            contender.end()
    report(contenders, arguments)


def report(contenders: list[Contender], arguments: argparse.Namespace) -> None:
    first = contenders[0]
    rows = []
    for contender in contenders:
        ratios = [a / b for a, b in zip(first.rates, contender.rates, strict=True)]
        rows.append(
            [
                contender.name,
                f"{statistics.median(contender.rates):,.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{contender.peak:.2f}",
                f"{first.peak / contender.peak:.2f}",
                f"{contender.startup:.1f}",
                f"{first.startup / contender.startup:.2f}",
            ]
        )
    heads = ["", "tokens/s", f"{first.name} is faster by", "peak GB", "memory ratio", "start-up s", "start-up ratio"]
    of_cpu = ", seconds of CPU" if arguments.clock == "cpu" else ""
    threads = f"{arguments.threads} thread{'s' if arguments.threads > 1 else ''}{of_cpu}"
    text = (
        f"{machine()}; {threads}; Qwen2 {arguments.layers} x {arguments.width}, vocabulary "
        f"{arguments.vocabulary:,}, {arguments.precision}; {ROWS_PER_STEP} rows a step, at most {MAX_LENGTH} tokens; "
        f"medians of {arguments.turns} turns of {arguments.steps} steps each, in turn.\n\n" + table(heads, rows)
    )
    peak = next((contender for contender in contenders if contender.name == "products"), None)
    if peak is not None:
        shares = []
        for contender in contenders[: contenders.index(peak)]:
            found = [own / alone for own, alone in zip(contender.rates, peak.rates, strict=True)]
            shares.append(f"{contender.name} {statistics.median(found):.0%} ({min(found):.0%} to {max(found):.0%})")
        text += f"\n\nOf the speed of its matrix products alone, in neighbouring turns: {', '.join(shares)}."
    print(text)
    if arguments.save:
        write_section(f"throughput-{arguments.precision}-{arguments.vocabulary}", text)


if __name__ == "__main__":
    main()
