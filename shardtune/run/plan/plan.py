"""The plan of a recipe: parameters, memory of a rank, tokens, steps, time, and whether it fits."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardtune.checkpoint.quantized.scheme import quantization_of
from shardtune.config import Recipe, load_recipe
from shardtune.config.model_names import BUILT_IN, POLICIES, TASKS
from shardtune.config.rank_layout import Layout
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.models.find_adapter import causal_lm, find_adapter
from shardtune.models.pretrained import has_tokenizer, settings_directory
from shardtune.parallel.cost.memory import memory as by_formula
from shardtune.parallel.cost.shape import ModelShape, Setting
from shardtune.parallel.cost.shape import Work as FormulaWork
from shardtune.parallel.cost.time import Machine
from shardtune.parallel.ranks import num_ranks
from shardtune.run.choose_worker import worker_class
from shardtune.run.plan.known_shapes import KnownShapes
from shardtune.run.plan.rows import Given, Rows, Work, rows_of
from shardtune.run.plan.simulation import LASTING, Parameters, Simulated, count_parameters, simulate, with_trained_parts
from shardtune.training.utilisation import UNKNOWN
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.sft_trainer import SFTTrainer

CONTEXT = 0.5e9
"""Bytes that a CUDA context takes, an estimate; as many again for NCCL where there are several ranks."""
GAPS = 0.05
"""Of what is allocated on a GPU: memory that the allocator holds and cannot use, an estimate."""
INTERPRETER = 0.6e9
"""Bytes of a process with torch before its model is built, an estimate."""
PEAK_FLOPS = Machine().flops


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run is planned for.

    Attributes:
        num_ranks: of the run.
        on_cuda: whether each has a GPU.
        memory: bytes of a GPU, or on CPUs of this machine; None: unknown.
    """

    num_ranks: int
    on_cuda: bool
    memory: float | None


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a run is taken to be.

    Attributes:
        tokens_per_second: of all ranks.
        source: in words.
    """

    tokens_per_second: float
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe needs.

    Attributes:
        hardware: it is planned for.
        layout: of the ranks.
        work: of them.
        parameters: of the model.
        memory: bytes of the fullest rank by category, at the fullest moment of a step; None: unknown.
        host: bytes in host memory besides, with `fsdp_config.cpu_offload`.
        reserve: bytes besides, an estimate.
        rate: None: unknown.
        notes: on how it was made.
    """

    hardware: Hardware
    layout: Layout
    work: Work
    parameters: Parameters
    memory: Mapping[str, float] | None
    host: float
    reserve: float
    rate: Rate | None
    notes: Sequence[str]

    @property
    def peak(self) -> float | None:
        """Bytes of a rank, without the reserve."""
        return None if self.memory is None else sum(self.memory.values())

    @property
    def needed(self) -> float | None:
        """Bytes of a rank, with the reserve."""
        return None if self.peak is None else self.peak + self.reserve

    @property
    def available(self) -> float | None:
        """Bytes that a rank may use."""
        memory = self.hardware.memory
        return memory if memory is None or self.hardware.on_cuda else memory / self.hardware.num_ranks

    @property
    def fits(self) -> bool | None:
        """Whether a rank's memory is enough; None: unknown."""
        if self.needed is None or self.available is None:
            return None
        return self.needed <= self.available

    @property
    def step_seconds(self) -> float | None:
        return None if self.rate is None else self.work.step_tokens / self.rate.tokens_per_second

    @property
    def seconds(self) -> float | None:
        """Of all steps."""
        if self.rate is None or self.work.tokens is None:
            return None
        return self.work.tokens / self.rate.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """As JSON; bytes, seconds."""
        return {
            "ranks": self.hardware.num_ranks,
            "device": "cuda" if self.hardware.on_cuda else "cpu",
            "layout": str(self.layout),
            "parameters": self.parameters.total,
            "trained": self.parameters.trained,
            "memory": None if self.memory is None else {name: round(size) for name, size in self.memory.items()},
            "peak": self.peak,
            "host": self.host,
            "reserve_estimate": self.reserve,
            "needed": self.needed,
            "available": self.available,
            "fits": self.fits,
            "rows": self.work.source,
            "micro_batch_tokens": self.work.micro_batch_tokens,
            "micro_batches": self.work.micro_batches,
            "step_tokens": self.work.step_tokens,
            "steps": self.work.steps,
            "tokens": self.work.tokens,
            "tokens_per_second": None if self.rate is None else self.rate.tokens_per_second,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans a recipe, and changes of it on the same rows and hardware.

    Attributes:
        source: the recipe's file, or what is given in its place.
        overrides: of its keys.
        recipe: it, loaded.
        hardware: to plan for.
        rows: the work of a recipe.
        speed: what the rate follows from.
        known: shapes that were computed for earlier plans.
    """

    source: str | None
    overrides: Sequence[str]
    recipe: Recipe
    hardware: Hardware
    rows: Rows
    speed: Speed
    known: KnownShapes = field(default_factory=KnownShapes)

    def plan(self, changes: Sequence[str] = ()) -> Plan:
        """The plan of the recipe with further overrides.

        Raises:
            ShardtuneError: the recipe is wrong, or this number of ranks does not fit its layout.
        """
        recipe = load(self.source, [*self.overrides, *changes]) if changes else self.recipe
        with recipe.spelling.in_errors():
            return self._plan(recipe)

    def _plan(self, recipe: Recipe) -> Plan:
        adapter = adapter_of(recipe)
        hardware = self.hardware
        layout = Layout.of(recipe.actor, hardware.num_ranks)
        adapter.check_layout(layout)
        work = self.rows(recipe, adapter, layout)
        found, notes = measured(recipe, adapter, layout, work, on_cuda=hardware.on_cuda, known=self.known)
        notes = [*work.notes, *notes, *_of_quantized(recipe), *_of_fast_parts(recipe)]
        peak = sum(found.memory.values()) if found.memory else 0.0
        reserve = INTERPRETER
        if hardware.on_cuda:
            reserve = CONTEXT * (1 if hardware.num_ranks == 1 else 2) + GAPS * peak
        rate = self.speed.rate(found.parameters, work, hardware)
        if rate is None and self.speed.mfu is not None:
            notes.append(f"--mfu gives no time: {UNKNOWN}")
        memory = found.memory or None
        return Plan(hardware, layout, work, found.parameters, memory, found.host, reserve, rate, notes)


@dataclass(frozen=True, slots=True)
class Speed:
    """What the rate of a run is computed from; at most one is given.

    Attributes:
        tokens_per_second: of all ranks.
        run: a run directory, whose median is taken.
        mfu: share of the devices' peak.
        flops: peak of a device, operations per second.
    """

    tokens_per_second: float | None = None
    run: Path | None = None
    mfu: float | None = None
    flops: float = PEAK_FLOPS

    def rate(self, parameters: Parameters, work: Work, hardware: Hardware) -> Rate | None:
        """The rate of a run; None where nothing is given that it follows from."""
        if self.tokens_per_second is not None:
            return Rate(self.tokens_per_second, "as given")
        if self.run is not None:
            return Rate(measured_rate(self.run), f"median of {self.run.name}")
        if self.mfu is None or parameters.use is None:
            return None
        peak = self.flops * hardware.num_ranks
        # `use` is for a peak of one operation per second, so what it returns are the operations of a token.
        operations = parameters.use.of(1.0, work.mean_length)
        return Rate(self.mfu * peak / operations, f"{self.mfu:.0%} of {self.flops / 1e12:,.0f} TFLOP/s per rank")


def measured_rate(run: Path) -> float:
    """The median of a run's tokens per second, over all of its logged steps but the first.

    Raises:
        ConfigError: it has none.
    """
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    measured = [json.loads(line) for line in lines]
    names = ("perf/tokens_per_second", "perf/samples_per_second")  # a sample without tokens counts as one
    rates = [line[name] for line in measured for name in names if line.get(name) is not None]
    if not rates:
        raise ConfigError(
            f"{run} has no measured rate", where="--rate-from", remedy="give the directory of a run that has steps"
        )
    return statistics.median(rates[1:] or rates)


def load(source: str | None, overrides: Sequence[str]) -> Recipe:
    """A recipe, or what stands for one: a directory with a `config.json`; its files and rows may be absent."""
    if source is not None:
        path = Path(source)
        if path.name == "config.json":
            path = path.parent
        if (path / "config.json").is_file():
            source, overrides = None, [f"actor.model.model_path={path.absolute()}", *overrides]
    return load_recipe(source, overrides, in_memory=["data.train_data_paths"], files_must_exist=False)


def adapter_of(recipe: Recipe) -> Adapter:
    """The adapter of a recipe's model; a language model's needs no tokenizer, unless tokens are added to it."""
    config = recipe.actor.model
    own = config.adapter is not None or config.model_type not in BUILT_IN or config.model_type in {**POLICIES, **TASKS}
    with_images = config.model_type in ("vision_language", "vision_language_action")
    if own or with_images or recipe.actor.added_tokens or has_tokenizer(recipe):
        return find_adapter(recipe)
    return causal_lm(config, wrap=recipe.actor.fsdp_config.wrap, data=recipe.data)


def planner(
    source: str | None,
    overrides: Sequence[str],
    *,
    ranks: int | None = None,
    memory: float | None = None,
    given: Given = Given(),  # noqa: B008 (it is frozen)
    speed: Speed = Speed(),
    report: Callable[[str], None] = print,
) -> Planner:
    """A planner of a recipe.

    Args:
        source: a recipe's file, a directory with a `config.json`, or None.
        overrides: of keys.
        ranks: GPUs; None: the ranks of the recipe.
        memory: bytes of a GPU; on CPUs, and where it is None, that of this machine.
        given: sizes in place of data.
        speed: what the time follows from.
        report: receives lines on the data.

    Raises:
        ConfigError: the recipe is driven by a worker that makes its own batches.
    """
    recipe = load(source, overrides)
    with recipe.spelling.in_errors():
        import_plugins(recipe.plugins)
        kind = worker_class(recipe)
        if not issubclass(kind, SFTWorker) or issubclass(kind, SFTTrainer):
            raise ConfigError(
                f"{kind.__name__} makes its own batches, whose size no plan can know",
                where="actor.worker" if recipe.actor.worker else "actor.model.model_type",
                remedy="shardtune train RECIPE --dry-run computes a step; perf/peak_memory_gb is what it took",
            )
        device = recipe.runner.device
        on_cuda = device == "cuda" or (device == "auto" and (ranks is not None or torch.cuda.is_available()))
        hardware = Hardware(ranks or num_ranks(recipe.runner), on_cuda, memory or memory_here(on_cuda))
        rows = rows_of(recipe, adapter_of(recipe), given, report)
    return Planner(source, overrides, recipe, hardware, rows, speed)


def memory_here(on_cuda: bool) -> float | None:
    """Bytes of this machine's first GPU, or of its memory."""
    if not on_cuda:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank, however it was found.

    Attributes:
        parameters: of the model.
        memory: bytes by category; empty: unknown.
        host: bytes in host memory.
    """

    parameters: Parameters
    memory: Mapping[str, float]
    host: float


def measured(
    recipe: Recipe, adapter: Adapter, layout: Layout, work: Work, *, on_cuda: bool, known: KnownShapes
) -> tuple[Memory, list[str]]:
    """The memory of a rank by a step without memory, where that fails by formulas, otherwise unknown."""
    try:
        found: Simulated = simulate(
            recipe, adapter, layout, work.batches, work.micro_batches, on_cuda=on_cuda, known=known
        )
    except ShardtuneError:
        raise
    except Exception as problem:
        why = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        return _estimated(recipe, adapter, layout, work, why)
    return Memory(found.parameters, found.memory, found.host), []


def _of_quantized(recipe: Recipe) -> list[str]:
    """A note on a base whose weights are quantised on disk.

    Raises:
        ModelError: they cannot be read.
    """
    config = recipe.actor.model
    directory = None if config.from_scratch else settings_directory(config.model_path)
    quantization = None if directory is None else quantization_of(directory)
    if quantization is None:
        return []
    kept = "in NF4" if config.is_lora and config.lora.base_dtype == "nf4" else "whole"
    return [f"the weights are quantised ({quantization.format}), and dequantised while they are read: held {kept}"]


def _of_fast_parts(recipe: Recipe) -> list[str]:
    """Notes on parts of other libraries: the memory is that of the model's own modules."""
    model, notes = recipe.actor.model, []
    if model.kernels.source is not None:
        notes.append(
            f"model.kernels.source: {model.kernels.source}: planned with the model's own modules, whose activations "
            "take at least as much"
        )
    if model.fp8.scaling is not None:
        notes.append(
            f"model.fp8.scaling: {model.fp8.scaling}: planned as in {model.precision}; weights and activations are "
            "kept so, and rounded to FP8 for each product, one layer at a time"
        )
    return notes


def _estimated(recipe: Recipe, adapter: Adapter, layout: Layout, work: Work, why: str) -> tuple[Memory, list[str]]:
    """The memory by the formulas of `parallel.cost`, which hold for decoders, or none."""
    parameters = count_parameters(with_trained_parts(recipe, adapter))
    unknown = [f"the step cannot be computed without memory ({why})"]
    shape = shape_of(adapter)
    if shape is None or parameters.trained != parameters.total or work.micro_batch_tokens is None:
        return Memory(parameters, {}, 0.0), [*unknown, "so its memory is unknown"]
    found = by_formula(shape, setting_of(recipe, layout), formula_work(work))
    parts = {
        LASTING[0]: found.weights,
        LASTING[3]: found.moments,
        "gradients": found.gradients,
        "gathered weights": found.gathered,
        "unreduced gradients, backward pass": found.unreduced,
        "activations": found.activations,
    }
    return Memory(parameters, {name: size for name, size in parts.items() if size}, found.host), [
        *unknown,
        "so its memory is that of the formulas in docs/scaling.md",
    ]


def shape_of(adapter: Adapter) -> ModelShape | None:
    """The sizes of a decoder; None for another model."""
    if not isinstance(adapter, CausalLM):
        return None
    try:
        return ModelShape.of(adapter.config.get_text_config().to_dict())
    except KeyError:
        return None


def setting_of(recipe: Recipe, layout: Layout) -> Setting:
    """The keys that the formulas read."""
    actor = recipe.actor
    fsdp = actor.fsdp_config
    return Setting(
        layout=layout,
        precision=actor.model.precision,
        reduce=fsdp.reduce,
        reshard_after_forward=fsdp.reshard_after_forward,
        prefetch=fsdp.prefetch,
        gradient_checkpointing=actor.model.gradient_checkpointing,
        cpu_offload=fsdp.cpu_offload,
        state_dtype=actor.optim.state_dtype,
    )


def formula_work(work: Work) -> FormulaWork:
    """The work of a rank, as the formulas take it."""
    tokens = float(work.micro_batch_tokens or 0)
    targets = sum(math.fsum(batch.weights.values()) for batch in work.batches[:1])
    return FormulaWork(tokens, work.micro_batches, min(tokens, targets), work.mean_length)
