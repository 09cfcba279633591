"""Part c: tokens a second, utilisation and peak memory beside TRL, in turns of one run."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_parts.contender import CONTENDERS, OF_ALL_WEIGHTS, missing
from gpu_parts.records import FAIL, SKIP, Check, Facts, Part, Setting
from gpu_parts.shapes import Case, config_of, lengths
from shardtune.training.utilisation import Utilisation, peak_flops

BENCH = Path(__file__).resolve().parent.parent
STEPS, TURNS = 2, 3
START_SECONDS = 150.0


def alone(case: Case) -> bool:
    """Whether a contender needs most of a GPU: each has a check of its own, so that a call that ends keeps some."""
    return not case.lora and case.model in ("4B", "8B", "mixture 5B")


def together(case: Case, setting: Setting, contenders: int) -> bool:
    """Whether all contenders fit on a GPU at the same time and take turns; otherwise they run in succession."""
    if setting.device == "cpu" or case.model == "0.6B" or (case.model == "1.7B" and case.lora):
        return True
    roomy = torch.cuda.get_device_properties(0).total_memory > 130e9
    return roomy and (case.lora or (case.model in ("1.7B", "Gemma 2 2B") and contenders <= 2))


class Contender:
    """A contender's process, from the referee's side: it imports what it needs, builds its model, and takes turns."""

    def __init__(self, name: str, case: Case, setting: Setting, threads: int) -> None:
        self.name, self.rates, self.peak = name, [], 0.0
        slug = f"{case}-{name}".replace(" ", "-")
        given = setting.work("contenders") / f"{slug}.json"
        facts = {"case": vars(case), "device": setting.device, "small": setting.small, "folder": str(setting.folder)}
        steps = 1 if case.model in ("4B", "8B") else STEPS
        given.write_text(json.dumps({**facts, "steps": 2 if setting.small else steps}))
        self._log = given.with_suffix(".log")
        path = os.pathsep.join([str(BENCH.parent), str(BENCH), os.environ.get("PYTHONPATH", "")])
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_parts.contender", name, str(given)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip

    def begin(self) -> None:
        """Let it build its model and do its first steps, as soon as it has imported what it needs."""
        self._go()

    def ready(self) -> None:
        """Wait for these."""
        self._answer(START_SECONDS)

    def turn(self) -> None:
        self._go()
        found = self._answer(START_SECONDS)
        self.rates.append(found["tokens"] / found["seconds"])
        self.peak = found["peak_gb"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def _answer(self, seconds: float) -> dict[str, float]:
        """Raises RuntimeError: it ended, or took longer."""
        assert self._process.stdout is not None
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                if line.startswith("@"):
                    return json.loads(line[1:])
        finally:
            alarm.cancel()
        self._process.wait()
        lines = [line for line in self._log.read_text().splitlines() if line.strip()]
        raise RuntimeError(lines[-1][:160] if lines else f"no answer within {seconds:.0f} s")


def _spawned(names: Sequence[str], case: Case, setting: Setting, lines: list[Facts]) -> list[Contender]:
    """The processes of those that have the packages they need."""
    spawned: list[Contender] = []
    # More threads than cores would wait for each other, actively, while models are drawn.
    threads = max(1, (os.cpu_count() or 1) // (len(names) if together(case, setting, len(names)) else 1))
    for name in names:
        if absent := missing(name):
            lines.append({"contender": name, "verdict": SKIP, "note": f"{', '.join(absent)} is missing"})
        else:
            spawned.append(Contender(name, case, setting, threads))
    return spawned


def _started(contenders: Sequence[Contender], lines: list[Facts]) -> list[Contender]:
    """Those of the contenders that have done their first steps, which they do side by side."""
    running: list[Contender] = []
    for contender in contenders:
        contender.begin()
    for contender in contenders:
        try:
            contender.ready()
            running.append(contender)
        except RuntimeError as error:
            verdict = FAIL if contender.name.startswith("shardtune") else SKIP
            lines.append({"contender": contender.name, "verdict": verdict, "note": str(error)})
            contender.end()
    return running


def _turn(contender: Contender, lines: list[Facts]) -> bool:
    try:
        contender.turn()
    except RuntimeError as error:
        lines.append({"contender": contender.name, "verdict": FAIL, "note": str(error)})
        contender.end()
        return False
    return True


def measure(setting: Setting, case: Case, names: Sequence[str]) -> list[Facts]:
    """A line for each contender, with the ratio of turns that lie next to each other."""
    lines: list[Facts] = []
    turns = 1 if setting.small else TURNS
    done: list[Contender] = []
    spawned = _spawned(names, case, setting, lines)
    for group in [spawned] if together(case, setting, len(spawned)) else [[each] for each in spawned]:
        running = _started(group, lines)
        for _ in range(turns):
            running = [contender for contender in running if _turn(contender, lines)]
        for contender in running:
            contender.end()
        done += running
    utilisation = _utilisation(case, setting)
    first = next((contender for contender in done if contender.name == "shardtune"), None)
    for contender in done:
        rate = statistics.median(contender.rates)
        facts: dict[str, Any] = {"contender": contender.name, "tokens/s": rate, "peak GB": contender.peak or None}
        if utilisation is not None:
            facts["MFU"] = utilisation.of(rate, statistics.mean(lengths(case.length, 512)))
        if first is not None and contender is not first:
            ratios = [own / other for own, other in zip(first.rates, contender.rates, strict=True)]
            facts["shardtune is faster by"] = statistics.median(ratios)
        lines.append(facts)
    return lines


def _utilisation(case: Case, setting: Setting) -> Utilisation | None:
    """From the model on the meta device, of whose parameters LoRA trains few."""
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    peak = peak_flops(device, "bf16")
    if peak is None:
        return None
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config_of(case.model, setting.small))
    model.requires_grad_(not case.lora)
    return Utilisation.of_model(model, peak)


def _part(model: str, lora: bool) -> Part:
    def checks(setting: Setting) -> Sequence[Check]:
        sizes = (128,) if setting.small else (2048, 8192)
        among = ("shardtune", "shardtune in pure bf16", "TRL") if setting.small else CONTENDERS
        fitting = [name for name in among if not lora or name not in OF_ALL_WEIGHTS]
        names = [name for name in fitting if re.search(setting.contenders, name)]
        cases = [Case(model, lora, size) for size in sizes]
        if alone(cases[0]):
            return [
                Check(f"{case}, {name}", partial(measure, case=case, names=[name]), 70.0)
                for case in cases
                for name in names
            ]
        return [Check(str(case), partial(measure, case=case, names=names), 100.0) for case in cases]

    way = "LoRA of rank 16 on all linear layers" if lora else "all weights trained"
    return Part(
        f"Throughput: {model}, {way}",
        checks,
        ("contender", "tokens/s", "MFU", "peak GB", "shardtune is faster by", "seconds"),
        "Random weights and ragged rows of random tokens, packed, four micro-batches of one maximal length to a step; "
        "bf16 with weights and states in fp32 (shardtune; 8B full: states in 8 bits), weights in bf16 and states in 8 "
        "bits (shardtune in pure bf16), bf16 for all (TRL, packing, fused AdamW). Medians of turns.",
    )


def parts() -> dict[str, Part]:
    """By name, the most informative first."""
    models = [("1.7B", False), ("8B", True), ("0.6B", False), ("4B", False), ("8B", False), ("0.6B", True)]
    models += [("1.7B", True), ("4B", True), ("mixture 5B", False), ("Gemma 2 2B", False)]
    return {
        f"speed-{model.replace(' ', '-')}-{'lora' if lora else 'full'}": _part(model, lora) for model, lora in models
    }
