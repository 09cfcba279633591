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

from gpu_parts.records import FAIL, PASS, Check, Facts, Part, Setting
from gpu_parts.shapes import Case, recipe_of

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"memory of rank 0 after 2 steps: ([\d.,]+) (GB|MB) .*?; ([\d.,]+) (GB|MB) planned", re.DOTALL)
LEAST, MOST = 0.95, 1.15
"""Of planned / measured. The plan has the fullest micro-batch, which the first two steps may lack."""
CASES: Mapping[str, tuple[Case, Mapping[str, Any]]] = {
    "0.6B full 2k": (Case("0.6B", False, 2048), {}),
    "0.6B full 8k, checkpointed": (Case("0.6B", False, 8192), {"actor__model__gradient_checkpointing": True}),
    "0.6B full 8k": (Case("0.6B", False, 8192), {}),
    "1.7B LoRA 8k": (Case("1.7B", True, 8192), {}),
    "8B LoRA 2k": (Case("8B", True, 2048), {}),
    "8B LoRA 2k, NF4": (Case("8B", True, 2048), {"actor__model__lora__base_dtype": "nf4"}),
    "mixture 5B full 2k": (Case("mixture 5B", False, 2048), {}),
    "Gemma 2 2B LoRA 8k": (Case("Gemma 2 2B", True, 8192), {}),
}


def _gigabytes(number: str, unit: str) -> float:
    return float(number.replace(",", "")) / (1.0 if unit == "GB" else 1000.0)


def planned(setting: Setting, name: str) -> Facts:
    """Two steps of `shardtune train`, and the line that it prints after them."""
    case, changes = CASES[name]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())
    case = Case(case.model, case.lora, 128) if setting.small else case
    changes = {key: 256 if "tokens" in key and setting.small else value for key, value in changes.items()}
    recipe = recipe_of(case, setting, runner__max_steps=2, **changes)
    recipe["runner"]["logger"]["experiment_name"] = f"memory-{slug}"
    recipe["runner"]["overwrite"] = True
    file = setting.work("memory") / f"{slug}.json"
    file.write_text(json.dumps(recipe))
    file = file.rename(file.with_suffix(".yaml"))  # JSON is YAML
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "400"}
    command = [sys.executable, "-m", "shardtune", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    (setting.folder / f"memory-{slug}.log").write_text(done.stdout + done.stderr)
    found = LINE.search(done.stdout + done.stderr)
    if done.returncode or found is None:
        text = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return {"verdict": FAIL, "note": f"exit code {done.returncode}: {text[-1][:200] if text else ''}"}
    measured, plan = _gigabytes(found[1], found[2]), _gigabytes(found[3], found[4])
    ratio = plan / measured
    close = LEAST <= ratio <= MOST or setting.small
    facts = {"measured GB": measured, "planned GB": plan, "planned / measured": ratio}
    return {**facts, "verdict": PASS if close else FAIL}


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
