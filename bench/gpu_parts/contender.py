"""One contender in a process of its own: `python -m gpu_parts.contender NAME CASE.json`.

It imports what it needs, waits for a line on its standard input, and trains a case in turns: after its first steps, and
then after each turn, it prints what it measured and waits for a line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_parts.records import Setting
from gpu_parts.shapes import MICRO_BATCHES, Case, checkpointed, config_of, recipe_of, save_rows, save_shape

CONTENDERS = (
    "shardtune", "shardtune, fused by torch", "shardtune with Liger", "shardtune compiled", "shardtune in pure bf16",
    "TRL", "TRL with Liger", "TRL with FlashAttention",
)  # fmt: skip
OF_ALL_WEIGHTS = ("shardtune in pure bf16",)
"""Those that have nothing to compare where an adapter is trained."""
PURE: Mapping[str, Any] = {"actor__model__precision": "pure_bf16", "actor__optim__state_dtype": "int8"}
NEEDED = {
    "shardtune with Liger": ("liger_kernel",), "TRL": ("trl",), "TRL with Liger": ("trl", "liger_kernel"),
    "TRL with FlashAttention": ("trl", "flash_attn"),
}  # fmt: skip
WARM = 2
"""Steps before the first turn."""


def missing(name: str) -> list[str]:
    """The packages that a contender needs and that cannot be imported."""
    return [package for package in NEEDED.get(name, ()) if importlib.util.find_spec(package) is None]


class Turns:
    """Counts tokens of steps and reports after each turn; `step_done` ends the process when the referee is gone."""

    def __init__(self, setting: Setting, steps: int) -> None:
        self._cuda = setting.device == "cuda"
        self._steps = steps
        self._done, self._tokens, self._warm = 0, 0.0, False
        self._began = time.perf_counter()

    def report(self, what: str) -> None:
        """A line in the contender's log: how long its start takes, and what of it."""
        print(f"{what} after {time.perf_counter() - self._began:.1f} s", file=sys.stderr, flush=True)

    def step_done(self, tokens: float) -> None:
        self._done += 1
        self._tokens += tokens
        if not self._warm:
            self.report(f"step {self._done}")
        if self._done < (self._steps if self._warm else WARM):
            return
        if self._cuda:
            torch.cuda.synchronize()
        seconds, self._warm = time.perf_counter() - self._began, True
        peak = torch.cuda.max_memory_allocated() / 1e9 if self._cuda else 0.0
        print("@" + json.dumps({"tokens": self._tokens, "seconds": seconds, "peak_gb": peak}), flush=True)
        if not sys.stdin.readline().strip():
            raise SystemExit(0)
        self._done, self._tokens, self._began = 0, 0.0, time.perf_counter()


def run_shardtune(case: Case, setting: Setting, turns: Turns, **changes: Any) -> None:
    from shardtune.config import load_recipe
    from shardtune.training.worker.adapter_worker import SFTWorker
    from tests.support.dist.training import quiet

    worker = SFTWorker(load_recipe(recipe_of(case, setting, **changes)), report=quiet)
    worker.setup()
    turns.report("model built")
    while True:
        before, metrics = worker.step, worker.run_training()
        if worker.step == before:
            raise RuntimeError(
                f"a step changed nothing: loss {metrics['train/loss']}, norm {metrics['train/grad_norm']}"
            )
        turns.step_done(metrics["train/tokens"])


def own_attention(case: Case, setting: Setting) -> str:
    """SDPA; transformers has none with soft caps."""
    if not case.model.startswith("Gemma 2"):
        return "sdpa"
    return "flex_attention" if setting.device == "cuda" else "eager"


def run_trl(case: Case, setting: Setting, turns: Turns, attention: str | None = None, **options: Any) -> None:
    """Packed rows, weights and states in bf16: the fastest way that it has."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    config = config_of(case.model, setting.small)
    rows = save_rows(case.length, setting).read_text().splitlines()
    counted = [0.0]

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.step_done(counted[0])
            counted[0] = 0.0

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counted[0] += inputs["input_ids"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

    dtype = torch.bfloat16
    with torch.device(setting.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention or own_attention(case, setting)
        )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if case.lora else None
    arguments = SFTConfig(
        output_dir=str(setting.work("trl")), bf16=True, use_cpu=setting.device == "cpu", num_train_epochs=10_000,
        save_strategy="no", report_to="none", disable_tqdm=True, max_length=case.length, learning_rate=1e-5,
        lr_scheduler_type="constant", packing=True, per_device_train_batch_size=1, optim="adamw_torch_fused",
        gradient_accumulation_steps=MICRO_BATCHES, gradient_checkpointing=checkpointed(case), logging_steps=1000,
        dataloader_pin_memory=True, **options,
    )  # fmt: skip
    trainer = Counting(
        model=model, args=arguments, train_dataset=Dataset.from_list([json.loads(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(save_shape(case.model, setting)), peft_config=lora,
        callbacks=[Watch()],
    )  # fmt: skip
    turns.report("model built")
    trainer.train()


RUN: dict[str, Callable[[Case, Setting, Turns], None]] = {
    "shardtune": run_shardtune,
    "shardtune, fused by torch": lambda *given: run_shardtune(*given, actor__model__kernels={"source": "torch"}),
    "shardtune with Liger": lambda *given: run_shardtune(*given, actor__model__kernels={"source": "liger"}),
    "shardtune compiled": lambda *given: run_shardtune(*given, actor__model__compile=True),
    "shardtune in pure bf16": lambda *given: run_shardtune(*given, **PURE),
    "TRL": run_trl,
    "TRL with Liger": lambda *given: run_trl(*given, use_liger_kernel=True),
    "TRL with FlashAttention": lambda *given: run_trl(*given, attention="flash_attention_2"),
}


def main() -> None:
    name, file = sys.argv[1:]
    for module in ("trl", "peft") if name.startswith("TRL") else ("shardtune.training.worker.adapter_worker",):
        importlib.import_module(module)
    if not sys.stdin.readline().strip():  # the others may still have the GPU
        return
    given = json.loads(Path(file).read_text())
    case, setting = Case(**given["case"]), Setting(given["device"], given["small"], Path(given["folder"]))
    RUN[name](case, setting, Turns(setting, given["steps"]))


if __name__ == "__main__":
    main()
