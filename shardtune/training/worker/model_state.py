"""A model in training on all ranks: built, sharded, saved, loaded and handed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from shardtune.checkpoint.base_weights import fingerprint
from shardtune.checkpoint.dcp import PendingSave
from shardtune.checkpoint.hf_save import gather_full, save_pretrained, save_text_settings
from shardtune.checkpoint.module_weights import save_plain
from shardtune.checkpoint.peft_directory import merging, save_adapter
from shardtune.checkpoint.training_state import (
    load_training,
    load_weights_only,
    model_bytes,
    save_training,
    training_bytes,
)
from shardtune.config import Recipe, load_recipe
from shardtune.config.model_names import registered_function
from shardtune.errors import CheckpointError
from shardtune.models.adapter import AdapterRoot, WeightSource, cannot_share_sequences
from shardtune.models.find_adapter import get_model
from shardtune.models.lora.attach import base_tensors, is_adapted
from shardtune.models.lora.nf4 import coded_sizes
from shardtune.models.new_tokens import grow_embeddings
from shardtune.models.options import NoOptions, read_options
from shardtune.optim.build import build_optimizer, check_optimizer
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE, MASTER_DTYPE, Weights
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel
from shardtune.parallel.ranks import Ranks, join_ranks, num_ranks
from shardtune.parallel.shard import shard_model
from shardtune.parallel.shard_units import choose_units
from shardtune.training.build.initial_weights import seeded
from shardtune.training.build.lora import adapt, begin_adapter, from_elsewhere, frozen_dtype, is_adapter, new_ids
from shardtune.training.build.model import freeze, load_initial_weights, share_values
from shardtune.training.step import LossScale
from shardtune.training.utilisation import Utilisation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class TrainedModel:
    """A model on all ranks with its weights and optimizer; what the task is, a worker adds.

    Args:
        cfg: the recipe, validated and resolved.
    """

    Options: ClassVar[type[BaseModel] | None] = NoOptions

    def __init__(self, cfg: DictConfig | Recipe) -> None:
        self.recipe: Recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        self.cfg: DictConfig = self.recipe.as_dict_config()
        self.options: Any = self._read_options()
        check_optimizer(self.recipe.actor.optim, num_ranks(self.recipe.runner))
        self.ranks: Ranks = join_ranks(self.recipe.runner.device, self.recipe.actor)
        self.device: torch.device = self.ranks.device
        self.amp_context: AbstractContextManager[None] = nullcontext()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.processor: ProcessorMixin | None = None
        self.chat_template: str | None = None
        self.end_of_turn_ids: Sequence[int] = ()
        self.step = 0
        self.skipped_steps = 0
        self.notes: list[str] = []
        self.report: Callable[[str], None] = print if self.ranks.is_main else silent
        self.weights_directory: Path | None = None  # one that `export` wrote, instead of the initial weights
        self._loss_scale = LossScale() if self.recipe.actor.model.precision == "fp16" else None
        self._groups: list[dist.ProcessGroup | None] = []

    def _read_options(self) -> Any:
        """`actor.model.options`, as the class declares them; as they are where a registered function reads them."""
        model, kind = self.recipe.actor.model, type(self).Options
        if kind is NoOptions and registered_function(model.model_type) is not None:
            return model.options
        return None if kind is None else read_options(kind, self.recipe)

    # What a subclass may say of its model.

    def model_provider_func(self) -> nn.Module:
        """The model, its parameters on the meta device, or real: then they are where training starts."""
        return get_model(self.cfg.actor.model)

    def initial_weights(self) -> WeightSource:
        """Where training starts, for a model without weights: by default `actor.model.model_path`."""
        config = self.recipe.actor.model
        return None if config.from_scratch else config.model_path

    def build_again(self) -> nn.Module:
        """The inner model with real weights, where they are those of its own constructor."""
        return self.model_provider_func()

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered as one."""
        return choose_units(model, wrap=self.recipe.actor.fsdp_config.wrap)[0]

    def apply_model_parallel(self, model: nn.Module) -> ModelParallel:
        """Spread the inner model over the ranks that work on the same rows (tensor, expert), before it is sharded."""
        if self.ranks.layout.sequence > 1:
            raise cannot_share_sequences(type(self).__name__, "it makes its batches itself")
        declared = model if isinstance(model, PreTrainedModel) else None
        plans = ({}, {}) if declared is None else (declared.tp_plan, declared.ep_plan)
        return apply_model_parallel(model, *plans, self.ranks, None)

    def inner_model(self) -> nn.Module:
        """The model inside `self.model`, whose names checkpoints use."""
        return self.model

    def probe_assumptions(self) -> None:
        """Prove what the task relies on, once the weights are there; by default nothing."""

    def restore_model(self) -> None:
        """Undo what the task changed in the model besides its weights; by default nothing."""

    @property
    def dtypes(self) -> str:
        """What weights, computation and optimizer are held in, in words."""
        precision = self.recipe.actor.model.precision
        master, compute = (str(kind[precision]).removeprefix("torch.") for kind in (MASTER_DTYPE, COMPUTE_DTYPE))
        kept = {"fp32": master, "bf16": "bfloat16", "int8": "8-bit"}[self.recipe.actor.optim.state_dtype]
        optimizer = " and optimizer" if kept == master else f", {kept} optimizer"
        return f"{master} weights{optimizer}, {compute} compute, {master} gradients"

    # Building.

    def build_for_training(self) -> None:
        """The sharded model with the weights that training starts from, and its optimizer; every rank calls it."""
        self._build()
        self._fill(None)
        actor = self.recipe.actor
        self.optimizer = build_optimizer(
            self.weights.trainable(),
            actor.optim,
            self.weights.shapes,
            seed=self.recipe.runner.seed,
            starts=self.weights.starts,
        )
        self._utilisation = Utilisation.known(
            self.inner_model(),
            self.device,
            actor.model.precision,
            self.ranks.world_size,
            self.sizes(),
        )
        self.model.train()
        self.probe_assumptions()

    def build_for_evaluation(self, checkpoint: Path | None) -> None:
        """The sharded model with the weights of a checkpoint, or with those that training would start from."""
        self._build()
        self._fill(checkpoint)
        self.model.eval()
        self.probe_assumptions()

    def sizes(self) -> dict[nn.Parameter, int]:
        """How many weights each parameter of the inner model stands for, on all ranks together."""
        parameters, coded = self.inner_model().named_parameters(), coded_sizes(self.inner_model())
        return {parameter: coded.get(parameter, self.weights.shapes[name].numel()) for name, parameter in parameters}

    def _build(self) -> None:
        actor = self.recipe.actor
        with seeded(self.recipe.runner.seed):
            self.model: nn.Module = self.model_provider_func()
        inner = self.inner_model()
        share_values(inner, self.ranks)
        self.notes += adapt(inner, self.recipe, self.tokenizer, self.initial_weights)
        freeze(inner, actor.model.freeze)
        self._model_parallel = self.apply_model_parallel(inner)
        self._make_weights = shard_model(
            self.model,
            self.shard_units(inner),
            self.ranks,
            actor.model.precision,
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            prefetch=actor.fsdp_config.prefetch,
            entry_points=self.model.entry_points if isinstance(self.model, AdapterRoot) else (),
            experts=self._model_parallel.experts,
            offload=actor.fsdp_config.cpu_offload,
        )

    def _fill(self, checkpoint: Path | None) -> None:
        """Give the model its weights."""
        actor = self.recipe.actor
        dtype = MASTER_DTYPE[actor.model.precision]
        inner = self.inner_model()
        left_out = from_elsewhere(inner)
        self._excluded_from_checkpoint: dict[str, str] = {}
        if checkpoint is None or left_out:
            empty = any(base.tensor.is_meta for base in base_tensors(inner))
            directory = None if is_adapted(inner) else self.weights_directory
            self.notes += load_initial_weights(
                directory or (self.initial_weights() if empty else None),
                inner,
                self.model,
                build=self._build_again,
                seed=self.recipe.runner.seed,
                dtype=dtype,
                ranks=self.ranks,
                device=self.device,
                frozen=frozen_dtype(actor.model),
                grow=bool(actor.added_tokens),
            )
            if left_out:
                form = f"{actor.model.lora.base_dtype} {frozen_dtype(actor.model)}"
                self._excluded_from_checkpoint = {"form": form, "hash": fingerprint(inner, left_out, self.ranks)}
            begin_adapter(inner, actor.model, self.recipe.runner.seed)
        else:
            materialise(self.model, dtype=dtype, device=self.device)
        self.weights: Weights = self._make_weights(
            inner,
            reduce_each=actor.fsdp_config.reduce == "every",
            excluded_from_checkpoint=left_out,
            partial=self._model_parallel.partial,
        )
        if checkpoint is not None:
            state = self.load_model(checkpoint)
            self._check_left_out(checkpoint, state)
            self.step = int(state["step"])

    def _build_again(self) -> nn.Module:
        model = self.build_again()
        grow_embeddings(model, new_ids(self.recipe, self.tokenizer))
        return model

    def release(self) -> None:
        """Let go of model and optimizer; the worker is of no more use.

        A model that its caller holds too is whole again: in full precision, and as it was but for what it has learned.
        """
        if "weights" in vars(self):
            self.weights.restore_model()
            self.restore_model()
        for name in {"model", "weights", "optimizer"} & vars(self).keys():
            delattr(self, name)

    # Checkpoints.

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as JSON; all ranks call it."""
        return {
            "step": self.step,
            "skipped_steps": self.skipped_steps,
            "loss_scale": asdict(self._loss_scale) if self._loss_scale else None,
            "world_size": self.ranks.world_size,
            "left_out": self._excluded_from_checkpoint,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Stand where `training_state` was taken; all ranks call it."""
        self.step = int(state["step"])
        self.skipped_steps = int(state["skipped_steps"])
        if self._loss_scale is not None and state["loss_scale"]:
            self._loss_scale = LossScale(**state["loss_scale"])

    def save_checkpoint(self, path: str | Path, step: int, *, background: bool = False) -> list[PendingSave]:
        """Write model, optimizer and state into a folder; every rank calls it.

        Args:
            path: the folder.
            step: optimizer steps done.
            background: return once the tensors are copied; the caller waits for what is returned.
        """
        return save_training(
            Path(path),
            self.weights,
            self.optimizer,
            {**self.training_state(), "step": step},
            writes_state=self.ranks.is_main,
            background=self._saving_groups() if background else None,
        )

    def _saving_groups(self) -> list[dist.ProcessGroup | None]:
        """Connections for saving in the background, one set for the model and one for the optimizer."""
        if not self._groups:
            self._groups = [self.ranks.new_group(), self.ranks.new_group()]
        return self._groups

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from a folder that `save_checkpoint` wrote, on any number of ranks; returns its step."""
        state = load_training(Path(path), self.weights, self.optimizer)
        self._check_left_out(Path(path), state)
        self.restore_state(state)
        return self.step

    def _check_left_out(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Refuse to put trained weights on other frozen ones than those they were trained with."""
        stored, key = state.get("left_out") or {}, "actor.model.model_path"
        comparable = stored.get("form") == self._excluded_from_checkpoint.get("form")
        allowed = any(f"{key}.".startswith(f"{name}.") for name in self.recipe.runner.allow_changes)
        if not comparable or stored == self._excluded_from_checkpoint or allowed:
            return
        raise CheckpointError(
            "the frozen weights, which checkpoints leave out, are not those that this checkpoint was trained with: "
            f"what is read from {self.recipe.actor.model.model_path or 'the model'} has changed",
            where=str(checkpoint),
            remedy=f"put the base model back, or go on all the same with runner.allow_changes=[{key}]",
        )

    def load_model(self, path: str | Path) -> dict[str, Any]:
        """Take the model's weights from a checkpoint, and nothing else; returns the checkpoint's state."""
        return load_weights_only(Path(path), self.weights)

    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint on all ranks together, before it is written."""
        return training_bytes(self.weights, self.optimizer)

    def model_bytes(self) -> int:
        """The size of the model's weights on all ranks together."""
        return model_bytes(self.weights)

    # Handing on.

    def export(self, directory: Path, dtype: str, *, merge: bool = False) -> None:
        """Write the model as it stands as a directory that its own `from_pretrained` loads, or as one weight file.

        Args:
            directory: to write into.
            dtype: fp32 | bf16 | fp16 | fp64, or auto: that of the base model, otherwise that of training.
            merge: write a model with an adapter as the whole model that both are; else the adapter alone is written,
                as PEFT has it.
        """
        with self.weights.in_rows():
            self._export(directory, dtype, merge=merge)

    def _export(self, directory: Path, dtype: str, *, merge: bool) -> None:
        model, tensors = self.inner_model(), self.weights.tensors()
        gather, settings = gather_full, {}
        chosen = None if dtype == "auto" else DTYPES[dtype]
        text = (self.tokenizer, self.chat_template, self.end_of_turn_ids, self.processor)
        if is_adapted(model) and not merge:
            config = self.recipe.actor.model
            in_memory = model.name_or_path if isinstance(model, PreTrainedModel) else ""
            base = None if config.from_scratch else config.model_path or in_memory or None
            save_adapter(model, directory, base=base, dtype=chosen, tensors=tensors)
            if self.ranks.is_main:
                save_text_settings(model, directory, *text)
            return
        if is_adapted(model):
            tensors, gather, unties = merging(model, MASTER_DTYPE[self.recipe.actor.model.precision])
            settings = {"tie_word_embeddings": False} if unties else {}
        if not isinstance(model, PreTrainedModel):
            save_plain(model, directory, dtype=chosen, tensors=tensors, gather=gather)
            return
        own = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.float32
        save_pretrained(
            model,
            directory,
            dtype=chosen or own,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            end_of_turn_ids=self.end_of_turn_ids,
            processor=self.processor,
            tensors=tensors,
            gather=gather,
            settings=settings,
        )


def over_directory(recipe: Recipe, directory: Path) -> Recipe:
    """The same recipe, over the configuration and tokenizer of a directory that `export` wrote, where they are in it.

    A module of the user's own has neither; its weights alone come from there (`TrainedModel.weights_directory`).
    """
    values = recipe.to_dict()
    model, tokenizer = values["actor"]["model"], values["actor"]["tokenizer"]
    if is_adapter(directory):
        # What the adapter says of itself holds, so it is not given here; the base model stays.
        model["lora"] = {"adapter_path": str(directory), "base_dtype": model["lora"]["base_dtype"]}
        if (directory / "tokenizer_config.json").is_file():
            tokenizer["tokenizer_model"] = str(directory)
            values["data"]["chat_template"] = None
    elif not (directory / "config.json").is_file():
        return recipe
    else:
        model |= {"model_path": str(directory), "from_scratch": False, "config_overrides": {}}
        tokenizer["tokenizer_model"] = None
        values["data"]["chat_template"] = None
    in_memory = ["actor.model.model_path", "data.train_data_paths"]
    in_memory += ["data.eval_data_paths"] if not recipe.data.eval_split else []
    return load_recipe(values, in_memory=in_memory, files_must_exist=False)


def silent(text: str) -> None:
    """What ranks other than the first say."""
