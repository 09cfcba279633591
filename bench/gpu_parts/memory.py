"""Part d: memory as `shardtune plan` computes it, against what a run allocates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_parts.contender import PURE
from gpu_parts.records import FAIL, PASS, Check, Facts, Part, Setting
from gpu_parts.shapes import Case, recipe_of
from shardtune.config import load_recipe
from shardtune.training.resident_memory import resident_peak
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
"""Seconds that a plan may take beyond the steps."""
LEAST, MOST = 0.95, 1.15
"""Of planned / measured. The plan has the fullest micro-batch, which the first two steps may lack."""
CASES: Mapping[str, tuple[Case, Mapping[str, Any]]] = {
    "0.6B full 2k": (Case("0.6B", False, 2048), {}),
    "0.6B full 8k, checkpointed": (Case("0.6B", False, 8192), {"actor__model__gradient_checkpointing": True}),
    "0.6B full 8k": (Case("0.6B", False, 8192), {}),
    "1.7B full 2k, pure bf16": (Case("1.7B", False, 2048), PURE),
    "1.7B LoRA 8k": (Case("1.7B", True, 8192), {}),
    "8B LoRA 2k": (Case("8B", True, 2048), {}),
    "8B LoRA 2k, NF4": (Case("8B", True, 2048), {"actor__model__lora__base_dtype": "nf4"}),
    "mixture 5B full 2k": (Case("mixture 5B", False, 2048), {}),
    "Gemma 2 2B LoRA 8k": (Case("Gemma 2 2B", True, 8192), {}),
}


def planned(setting: Setting, name: str) -> Facts:
    """Two steps, and beside them `shardtune plan` in a process of its own; nothing is saved, as disks may be small."""
    case, changes = CASES[name]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())
    case = Case(case.model, case.lora, 128) if setting.small else case
    changes = {key: 256 if "tokens" in key and setting.small else value for key, value in changes.items()}
    recipe = recipe_of(case, setting, runner__max_steps=2, **changes)
    recipe["runner"]["logger"]["experiment_name"] = f"memory-{slug}"
    file = setting.work("memory") / f"{slug}.json"
    file.write_text(json.dumps(recipe))
    file = file.rename(file.with_suffix(".yaml"))  # JSON is YAML
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardtune", "plan", str(file), "--json", f"runner.device={setting.device}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        measured = peak_of_two_steps(file, setting)
        output, reports = process.communicate(timeout=PATIENCE)
    (setting.folder / f"memory-{slug}.log").write_text(output + reports)
    plan = json.loads(output)["peak"] if process.returncode == 0 else None
    if plan is None:
        return {"verdict": FAIL, "note": f"exit code {process.returncode}: {(output + reports).strip()[-200:]}"}
    ratio = plan / measured
    close = LEAST <= ratio <= MOST or setting.small
    facts = {"measured GB": measured / 1e9, "planned GB": plan / 1e9, "planned / measured": ratio}
    return {**facts, "verdict": PASS if close else FAIL}


def peak_of_two_steps(file: Path, setting: Setting) -> float:
    """Bytes that torch has allocated on the GPU at most; on a CPU those of the process, for a trial of the bench."""
    on_gpu = setting.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    worker = SFTWorker(load_recipe(file), report=quiet)
    worker.setup()
    for _ in range(2):
        worker.run_training()
    worker.release()
    return float(torch.cuda.max_memory_allocated() if on_gpu else resident_peak() or 1)


def checks(setting: Setting) -> Sequence[Check]:
    names = list(CASES)[:2] if setting.small else list(CASES)
    return [Check(name, partial(planned, name=name), 60.0) for name in names]


PART = Part(
    "Memory: the plan against torch.cuda.max_memory_allocated",
    checks,
    ("measured GB", "planned GB", "planned / measured"),
    f"bf16 with weights and states in fp32, random weights, two steps. Planned / measured from {LEAST} to {MOST}: a "
    "plan has the fullest micro-batch that the data can make, which the first two steps may lack.",
)
