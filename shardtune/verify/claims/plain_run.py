"""A shortened run once more in plain PyTorch: which loss, which weights, and in which process.

A model of transformers is trained by `plain_loop.py` in a process of its own, which imports neither shardtune nor the
recipe's plugins. The loss of a user's own adapter or worker is called in this process, on the unsharded model, a row or
a batch at a time; optimizer, clipping and schedule are those of `plain_loop.py` too.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

from shardtune.batch import TOKENS, Batch, PackedBatch, Sample
from shardtune.batch.seeds import derive_seed, seed_generators, seeded
from shardtune.checkpoint.quantized.scheme import BITSANDBYTES, quantization_of
from shardtune.config import ModelConfig, Recipe
from shardtune.config.parameter_patterns import as_pattern
from shardtune.data.loader.protocol import DataState, MicroBatch
from shardtune.data.loader.step_loader import StepLoader
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.models.lora.attach import adapter_config, lora_layers, saved_whole
from shardtune.models.pretrained import load_config, model_directory
from shardtune.models.router_loss import RouterLoss
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.optim.named_class import is_of_torch, optimizer_class
from shardtune.parallel.buffers import statistical_norms
from shardtune.training.step import ROW_DRAWS
from shardtune.training.train_output import read_train_output
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import silent
from shardtune.verify.claims import plain_loop
from shardtune.verify.claims.dropout import drops, parts_drop, without_dropout
from shardtune.verify.claims.evidence import Evidence
from shardtune.verify.result import Failed, Skipped

Parts = list[tuple[list[MicroBatch], Mapping[str, float]]]
"""Of each step its rows or batches, and the sum of their weights by loss term."""
OWN = "shardtune."
PEFT_PREFIX = "base_model.model."
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What a plain run computed.

    Attributes:
        log: (loss, gradient norm) of each step.
        folder: of the trained weights after each step.
        prefix: of their names.
        rounds: whether the model's attention rounds to fp32 in any precision.
    """

    log: Sequence[tuple[float, float]]
    folder: Path
    prefix: str = ""
    rounds: bool = False

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """The trained weights after a step, by the names of checkpoints."""
        stored = load_file(self.folder / f"step_{step}.safetensors")
        return {name.removeprefix(self.prefix): tensor for name, tensor in stored.items()}


class PlainSide:
    """The plain run of a recipe: what is built and loaded for it in this process.

    Args:
        recipe: shortened, on one rank.
        folder: for its files.
        make_worker: maps a recipe to its worker.
    """

    def __init__(self, recipe: Recipe, folder: Path, make_worker: Callable[..., FSDPSftWorker]) -> None:
        self.recipe, self._folder, self._make_worker = recipe, folder, make_worker

    @cached_property
    def worker(self) -> FSDPSftWorker:
        """The recipe's worker with its model, on which nothing has been trained."""
        worker = self._make_worker(self.recipe, report=silent)
        worker.report = silent
        worker.setup()
        return worker

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of its model; None for a user's worker without one."""
        return self.worker.adapter if isinstance(self.worker, SFTWorker) else None

    @property
    def numbers_rows(self) -> bool:
        """Whether the package's own loader deals the rows; otherwise batches are the user's."""
        return isinstance(self.worker.loader, StepLoader)

    @cached_property
    def by_transformers(self) -> bool:
        """Whether transformers (and PEFT) build this model and compute its loss, without code of the user's."""
        worker, adapter = self.worker, self.adapter
        lora, plain = self.recipe.actor.model.lora, True
        if self.recipe.actor.model.is_lora:
            tokens = self.recipe.actor.added_tokens
            plain = lora.load_from is None and lora.init in (True, "gaussian", "orthogonal", False) and not tokens
            plain = plain and not (lora.target_parameters or lora.peft)
            plain = plain and not saved_whole(adapter_config(worker.inner_model))
        return (
            plain
            and isinstance(adapter, CausalLM)
            and isinstance(worker, SFTWorker)
            and adapter.value_loss is None
            and adapter.builds_by_class
            and type(adapter).__module__.startswith(OWN)
            and type(adapter.config).__module__.startswith("transformers.")
            and _is_own(type(worker))
            and self.numbers_rows
        )

    def check_ranks(self, number: int) -> None:
        """Refuse a number of ranks over which the user's loader cannot be spread."""
        if isinstance(self.worker.loader, BatchLoader):
            self.worker.loader.check_ranks(number)

    @property
    def how(self) -> str:
        """What computes its loss, for a sentence."""
        kind = type(self.worker.inner_model).__name__
        if self.by_transformers:
            return f"{kind} of transformers{' with PEFT' if self.recipe.actor.model.is_lora else ''}, a row per forward"
        if isinstance(self.adapter, WholeStepAdapter):
            return f"the loss of {type(self.adapter).__name__}, all rows of a step at once"
        if self.adapter is not None and _is_own(type(self.worker)):
            return f"the loss of {type(self.adapter).__name__}, a row per forward"
        unit = "row" if self.numbers_rows else "batch"
        return f"get_train_model_output of {type(self.worker).__name__}, a {unit} per forward"

    def refuse_without_fp64(self) -> None:
        """Refuse a loss that cannot be computed in fp64.

        Raises:
            Skipped: with the reason.
        """
        if self.by_transformers:
            return
        try:
            self._sample()
        except RuntimeError as error:
            if not plain_loop.MIXED_DTYPES.search(str(error)):
                raise
            raise Skipped(
                "the loss cannot be computed in fp64, in which numbers are compared: "
                f"{plain_loop.first_line(error)}; let what "
                "is computed take the model's dtype: x.to(next(self.model.parameters()).dtype)"
            ) from error

    def drops(self) -> bool:
        """Whether training drops something that no setting of the recipe switches off."""
        worker = self.worker
        if drops(worker.model) or parts_drop(self.adapter):
            return True
        return not self.by_transformers and self._sample() != self._sample(1)

    def refuse_what_is_random(self) -> None:
        """Refuse a model or a loss whose numbers depend on the cut of a step.

        Raises:
            Skipped: with the reason.
        """
        norms = [
            name
            for name, norm in statistical_norms(self.worker.inner_model).items()
            if any(parameter.requires_grad for parameter in norm.parameters())
        ]
        if norms:
            raise Skipped(
                f"{len(norms)} batch norms ({norms[0]}, …) normalise each micro-batch by itself, so there is no row by "
                "row (nn.GroupNorm and nn.LayerNorm do not)"
            )
        if self.by_transformers:
            return
        with without_dropout(self.worker.model):
            first = self._sample()
            if first == self._sample(1):
                return
            if first != self._sample():
                raise Skipped(
                    "the loss of one row differs from call to call with the same seed, so it depends on the layout: "
                    "forwards change what it is computed from (a buffer, as spectral_norm does), or draw from a "
                    "generator of their own"
                )
            raise Skipped(
                "the loss draws random numbers from torch, numpy or Python, so it depends on the layout; to make it a "
                "function of the row, draw by batch.randn_like and batch.rand_like (in a worker: self.row_draws(rows))"
            )

    def _sample(self, seed: int = 0) -> dict[str, float]:
        """The loss of the first row or batch, by term."""
        step = next(iter(islice(self.worker.loader.steps(DataState()), 1)))
        part: MicroBatch = step.micro_batches[0]
        if isinstance(self.adapter, WholeStepAdapter):
            with seeded(seed):
                (part,), _ = self._whole_step(self.adapter, step.rows.tolist())
        elif self.numbers_rows:
            part = self._row(int(step.rows[0]), DataState(seed))
        seed_generators(derive_seed(seed, 0, 0, 0, "verify"))
        return {term: total.item() for term, total in self._losses(part, 0).items()}

    # The run.

    def run(self, evidence: Evidence, *, name: str, precision: str = "fp64", noise: float = 0.0) -> PlainRun:
        """Train the steps that a run recorded.

        Args:
            evidence: of the run.
            name: of the folder of its files.
            precision: of the computation, for a model of transformers: fp64 or bf16.
            noise: the relative size of random errors of the initial weights.
        """
        folder = self._folder / name
        folder.mkdir()
        rows = [list(step.rows) for step in evidence.steps]
        if self.by_transformers:
            return self._apart(rows, folder, precision, noise)
        model = self.worker.inner_model
        log = []
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters() if noise else ()):
                draws = torch.Generator().manual_seed(number)
                parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype))
        with without_dropout(model):
            for loss, norm in plain_loop.train(model, self._parts(evidence), self._settings(precision), self._losses):
                log.append((loss, norm))
                trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
                save_file(trained, folder / f"step_{len(log)}.safetensors")
        del self.worker  # trained by now
        return PlainRun(log, folder)

    def _row(self, row: int, state: DataState | None = None) -> Batch:
        """A row alone; what its adapter's `collate` draws follows from `state`."""
        loader = self.worker.loader
        assert isinstance(loader, StepLoader)
        return loader.alone(row, state)

    def _parts(self, evidence: Evidence) -> Parts:
        adapter = self.adapter
        rows = [list(step.rows) for step in evidence.steps]
        if not self.numbers_rows:
            return self._own_batches([step.loader_steps for step in evidence.steps])
        if isinstance(adapter, WholeStepAdapter):
            return [self._whole_step(adapter, step) for step in rows]
        return [_weighed([self._row(row) for row in step]) for step in rows]

    def _own_batches(self, counts: Sequence[int | None]) -> Parts:
        """The batches of the user's loader, of so many of its steps for each update."""
        made, parts = self.worker.loader.steps(DataState()), []
        for count in counts:
            if count is None:
                raise Skipped(
                    "the worker's run_training takes a part of a step's batches for one update, and how many batches "
                    "a step has depends on the ranks: take all of them (global_batch_size rows) from self.data_iter"
                )
            steps = list(islice(made, count))
            parts.append(_weighed([batch for step in steps for batch in step.micro_batches if batch.counts]))
        return parts

    def _whole_step(self, adapter: WholeStepAdapter, rows: Sequence[int]) -> tuple[list[MicroBatch], dict[str, float]]:
        """All rows of a step as one batch."""
        weights = _weighed([self._row(row) for row in rows])[1]
        return [adapter.collate([self._encoded(row) for row in rows], rows, weights)], weights

    def _encoded(self, row: int) -> Sample:
        """A row as it is trained on."""
        assert isinstance(self.worker, SFTWorker)
        assert self.worker.prepared.train is not None
        return self.worker.prepared.train.row(row)

    def _losses(self, part: MicroBatch, done: int) -> dict[str, torch.Tensor]:
        """The sums of a row's or a batch's loss by term, by the user's own method."""
        worker, adapter, seed = self.worker, self.adapter, self.recipe.runner.seed
        worker.state.step = done
        if isinstance(part, Batch):
            part = replace(part, key=derive_seed(seed, done, ROW_DRAWS))
        if isinstance(adapter, WholeStepAdapter):
            assert isinstance(part, Batch)
            found = adapter.loss(worker.inner_model, part)
        else:
            found = worker.get_train_model_output(with_names(part.fields) if isinstance(part, UserBatch) else part)
        return {term: loss.total for term, loss in read_train_output(found, part)[0].items()}

    def _settings(self, precision: str) -> dict[str, Any]:
        """The recipe's settings as `plain_loop.py` takes them."""
        actor, optim = self.recipe.actor, self.recipe.actor.optim
        accepted = inspect.signature(optimizer_class(optim.name)).parameters
        adam: dict[str, object] = {}
        if "betas" in accepted and is_of_torch(optim.name):
            adam = {"betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_eps}
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in optim.args.items()}
        groups = [(as_pattern(group.pattern), group.lr, group.weight_decay) for group in optim.groups]
        own = {"arguments": {**adam, **arguments}, "groups": groups, "decays": "weight_decay" in accepted}
        return {
            "precision": precision,
            "horizon": self.recipe.runner.max_steps,
            "prefix": "",
            "optim": {**optim.model_dump(exclude={"args", "groups"}), **own},
            "loss": actor.loss,
            "label_smoothing": actor.label_smoothing,
            "z_loss": actor.z_loss,
        }

    # A model of transformers, in a process of its own.

    def _apart(self, steps: Sequence[Sequence[int]], folder: Path, precision: str, noise: float) -> PlainRun:
        job = self._job(steps, folder, precision, noise)
        torch.save(job, folder / "job.pt")
        run_alone(folder / "job.pt", folder)
        found = json.loads((folder / "log.json").read_text())
        log = [(loss, norm) for loss, norm in found["steps"]]
        return PlainRun(log, folder, job["prefix"], rounds=found["attention"] == "eager")

    def _job(self, steps: Sequence[Sequence[int]], folder: Path, precision: str, noise: float) -> dict[str, Any]:
        adapter, model = self.adapter, self.worker.inner_model
        assert isinstance(adapter, CausalLM)
        actor = self.recipe.actor
        quantized = _save_config(actor.model, folder / "config")
        router = RouterLoss.of(adapter.config)
        lora = _peft_arguments(model, self.recipe) if actor.model.is_lora else {}
        drawn = _drawn(model, self.recipe)
        if drawn:
            save_file(drawn, folder / "drawn.safetensors")
        rows = {row: self._plain_row(adapter, row) for step in steps for row in step}
        sums = [sum(float(rows[row]["weights"][1:].sum()) for row in step) for step in steps]
        beside = [{"balance": float(len(step))} if router.factor else {} for step in steps]
        assert actor.model.model_path is not None
        return {
            **self._settings(precision),
            "auto": adapter.auto_class,
            "model": str(model_directory(actor.model.model_path)),
            "config": str(folder / "config"),
            "quantized": quantized,
            "trust_remote_code": actor.model.trust_remote_code,
            "from_scratch": actor.model.from_scratch,
            "vocabulary": _rows_of_embedding(model) if actor.added_tokens else 0,
            "drawn": str(folder / "drawn.safetensors") if drawn else "",
            "noise": noise,
            "lora": lora,
            "prefix": PEFT_PREFIX if lora else "",
            "freeze": [as_pattern(pattern) for pattern in actor.model.freeze],
            "balance": router.factor,
            "experts_per_token": router.experts_per_token,
            "rows": rows,
            "steps": [(list(s), {TOKENS: w, **b}) for s, w, b in zip(steps, sums, beside, strict=True)],
        }

    def _plain_row(self, adapter: CausalLM, row: int) -> dict[str, Any]:
        sample = self._encoded(row)
        inputs: Mapping[str, torch.Tensor] = {}
        if sample.fields:
            batch = adapter.collate([sample], [row], {})
            assert isinstance(batch, PackedBatch)
            inputs = adapter.further_inputs(batch)
        return {
            "input_ids": torch.from_numpy(sample.input_ids.astype(np.int64)),
            "weights": torch.from_numpy(sample.loss_weights.astype(np.float64)),
            "inputs": dict(inputs),
        }


def run_alone(job: Path, folder: Path) -> None:
    """Run `plain_loop.py` in a process that knows nothing of shardtune.

    Raises:
        Skipped: transformers cannot train the model, for one of the reasons that `plain_loop.py` names.
        Failed: it ended otherwise, so that nothing was compared.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(Path(plain_loop.__file__)), str(job), str(folder)],
        capture_output=True,
        check=False,
        text=True,
        errors="replace",
    )
    if not done.returncode:
        return
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a message"]
    if done.returncode == plain_loop.UNABLE:
        raise Skipped(f"transformers alone cannot train this model, one row per forward: {lines[-1]}")
    raise Failed(
        "\n".join([f"nothing was compared: the plain loop ended with {lines[-1]}", *lines[-LAST_LINES:-1]]),
        where=plain_loop.__file__,
        remedy="a signal that ends it is a lack of memory; anything else is no fault of the recipe: please report it "
        "with these lines and the output of shardtune env",
    )


def _is_own(kind: type[FSDPSftWorker]) -> bool:
    """Whether a worker's loss and model are those of the package."""
    written = {
        name
        for base in kind.__mro__
        if issubclass(base, FSDPSftWorker) and not base.__module__.startswith(OWN)
        for name in vars(base)
    }
    computing = {"model_provider_func", "get_train_model_output", "get_batch_metrics", "run_training"}
    return issubclass(kind, SFTWorker) and not written & computing


def _weighed(batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
    """Batches, and the sums of their weights by term."""
    terms = {term for batch in batches for term in batch.weights}
    return list(batches), {term: sum(batch.weights.get(term, 0.0) for batch in batches) for term in terms}


def _peft_arguments(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """The arguments of PEFT's LoraConfig: the recipe's, for the modules that a run has adapted."""
    lora, made = recipe.actor.model.lora, adapter_config(model)
    assert isinstance(made, LoraConfig)
    return {
        "r": lora.r,
        "rank_pattern": made.rank_pattern,
        "alpha_pattern": made.alpha_pattern,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "target_modules": "|".join(re.escape(name) for name, _ in lora_layers(model)),
    }


def _save_config(config: ModelConfig, folder: Path) -> bool:
    """Write a model's config, with which transformers dequantises its weights; whether they are quantised.

    Raises:
        Skipped: transformers does not dequantise them while loading.
    """
    assert config.model_path is not None
    found = load_config(config)  # the run's own may have grown by new tokens
    quantization = None if config.from_scratch else quantization_of(model_directory(config.model_path))
    if quantization is not None and quantization.format == BITSANDBYTES:
        raise Skipped(
            "transformers alone keeps weights of bitsandbytes quantised: give plain weights in model.model_path to "
            "compare with it"
        )
    if quantization is not None:
        found.quantization_config = {**quantization.settings, "dequantize": True}
    found.save_pretrained(folder)
    return quantization is not None


def _drawn(model: nn.Module, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The initial values that a run draws by its seed and no file has: of a model from scratch, LoRA, new tokens."""
    actor = recipe.actor
    everything = actor.model.from_scratch or bool(actor.added_tokens)
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if everything or (actor.model.is_lora and parameter.requires_grad)
    }


def _rows_of_embedding(model: nn.Module) -> int:
    found = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    return int(found.weight.shape[0])
