"""Compare LoRA, rsLoRA and DoRA with PEFT in the flat script over 20 steps, at several layouts: `python bench/lora.py`.

Rewrites the section `lora` of docs/benchmarks.md; ends with exit code 1 where a difference is too large.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from tests.support.dist.parity import EXACT  # noqa: E402
from tests.support.dist.ranks import run_ranks  # noqa: E402
from tests.support.dist.training import Trace, flat_script, recipe, run_recipes, save_model, save_rows  # noqa: E402

ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "LoRA on the head": {"target_modules": ["q_proj", "v_proj", "lm_head"]},
}
LAYOUTS = ((1, 8), (1, 1), (2, 4), (4, 2))
KINDS = ("dense", "mistral")
INTRODUCTION = f"""\
20 steps of 8 ragged rows in fp64 with AdamW and active clipping, r = 4, alpha = 6: shardtune, from an adapter that PEFT
made, against PEFT's model in the loop of `examples/flat_sft.py`. Largest differences (losses and norms relative where
above 1); limit {EXACT:g}."""


def make_adapter(model: Path, directory: Path, changes: dict[str, Any]) -> Path:
    """An adapter whose second factor is not zero, as PEFT saves it."""
    torch.manual_seed(11)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False, **changes},
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    peft.get_peft_model(base, config, autocast_adapter_dtype=False).save_pretrained(str(directory))
    return directory


def flat_run(model: Path, rows: Path, adapter: Path) -> Trace:
    """PEFT's model in the flat script."""
    flat = flat_script()
    settings = {"lr": 1e-2, "clip": 0.5, "schedule": "linear", "warmup": 3, "precision": "fp64"}
    settings_given = [f"--{key}={value}" for key, value in settings.items()]
    args = flat.arguments("--model", str(model), "--data", str(rows), *settings_given)
    made = peft.PeftModel.from_pretrained(
        flat.load_model(args), str(adapter), is_trainable=True, autocast_adapter_dtype=False
    ).double()
    trace = Trace()
    for loss, norm in flat.train(made, flat.read_rows(rows, AutoTokenizer.from_pretrained(model)), args):
        trace.losses.append(loss)
        trace.norms.append(norm)
    inner = made.base_model.model
    trace.weights = {name: p.detach() for name, p in inner.named_parameters() if p.requires_grad}
    return trace


def our_recipe(model: Path, rows: Path, adapter: Path, per_forward: int) -> dict[str, Any]:
    made = recipe(model, rows, actor__micro_batch_size=per_forward, actor__model__precision="fp64")
    made["actor"]["model"] |= {"is_lora": True, "lora": {"adapter_path": str(adapter)}}
    return made


def apart(run: Trace, flat: Trace) -> list[float]:
    """The largest differences of losses, norms and adapters."""
    pairs = [zip(run.losses, flat.losses, strict=True), zip(run.norms, flat.norms, strict=True)]
    numbers = [max(abs(a - b) / max(1.0, abs(b)) for a, b in pair) for pair in pairs]
    return [*numbers, max(float((run.weights[name] - tensor).abs().max()) for name, tensor in flat.weights.items())]


def main() -> int:
    began = time.perf_counter()
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = save_rows(folder / "rows.jsonl")
        models = {kind: save_model(kind, folder / kind) for kind in KINDS}
        cases = [(kind, title) for kind in KINDS for title in ADAPTERS]
        adapters = {
            (kind, title): make_adapter(models[kind], folder / f"{kind} {title}", ADAPTERS[title])
            for kind, title in cases
        }
        flats = {case: flat_run(models[case[0]], rows, adapters[case]) for case in cases}
        for ranks, per_forward in LAYOUTS:
            recipes = [our_recipe(models[case[0]], rows, adapters[case], per_forward) for case in cases]
            traces = run_recipes(recipes) if ranks == 1 else run_ranks(run_recipes, ranks, recipes, timeout=900)[0]
            for case, trace in zip(cases, traces, strict=True):
                numbers = apart(trace, flats[case])
                lines.append([*case, f"{ranks} x {per_forward}", *(f"{number:.1e}" for number in numbers)])
                if not max(numbers) < EXACT:
                    broken.append(" ".join(lines[-1]))
    text = table(("model", "adapter", "ranks x rows", "loss", "gradient norm", "adapter's weights"), lines)
    seconds = time.perf_counter() - began
    verdict = "\n".join(broken) or f"{len(lines)} runs in {seconds:.0f} s, all within their limits"
    print(f"{text}\n{verdict}")
    write_section("lora", f"{INTRODUCTION}\n\n{text}\n\n{verdict}. {machine()}.")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
