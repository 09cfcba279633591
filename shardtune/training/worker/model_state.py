"""A model on all ranks: built, sharded, filled with weights, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from shardtune.batch.seeds import seeded
from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.dcp import PendingSave
from shardtune.checkpoint.extra_state import extra_state, set_extra_state
from shardtune.checkpoint.hf_save import gather_full
from shardtune.checkpoint.quantized.read import holds_only
from shardtune.checkpoint.training_state import (
    STATE_FILE,
    has_average,
    load_training,
    load_weights_only,
    model_bytes,
    read_training_state,
    save_training,
    training_bytes,
)
from shardtune.config import Recipe
from shardtune.models.adapter import AdapterRoot, WeightSource
from shardtune.models.language_model import LanguageRoot
from shardtune.models.lora.attach import base_tensors, is_adapted
from shardtune.models.lora.config import head_of
from shardtune.models.lora.nf4 import coded_sizes
from shardtune.models.mixed_precision import cast_for_layers
from shardtune.models.new_tokens import check_frozen_rows, grow_embeddings
from shardtune.optim.build import build_optimizer, recipe_options
from shardtune.optim.named_class import same_states
from shardtune.parallel.direct_use import in_methods, own_methods
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.model_parallel import ModelParallel
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE, SUM_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard import shard_model
from shardtune.parallel.unfit_parameters import check_saved, check_shapes, check_trained
from shardtune.parallel.weights import Weights
from shardtune.training.build.frozen_mode import mode_notes
from shardtune.training.build.initial_weights import directory_of
from shardtune.training.build.lora import (
    adapt,
    begin_adapter,
    check_frozen,
    from_elsewhere,
    frozen_dtype,
    is_adapter,
    keeps_base,
    new_ids,
)
from shardtune.training.build.model import check_read_values, freeze, load_initial_weights, may_lack, share_values
from shardtune.training.build.unwritten import check_written, unwritten_is_nan
from shardtune.training.step import LossScale
from shardtune.training.utilisation import UNKNOWN, Utilisation, peak_flops
from shardtune.training.worker.averaged_weights import AveragedWeights
from shardtune.training.worker.finite_weights import FiniteWeights
from shardtune.training.worker.first_step import FirstStep
from shardtune.training.worker.left_out_weights import LeftOutWeights
from shardtune.training.worker.own_updates import OwnUpdates

EXTRA, OPTIMIZER_NAME, LEFT_OUT = "extra_state", "optimizer_name", "left_out"


class ModelSource(Protocol):
    """Builds a model; a `Task` is one."""

    @property
    def builds_by_class(self) -> bool: ...
    @property
    def new_parts(self) -> Sequence[str]: ...
    def inner_model(self, model: nn.Module) -> nn.Module: ...
    def initial_weights(self) -> WeightSource: ...
    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]: ...
    def set_execution(self, model: nn.Module) -> None: ...
    def build_again(self) -> nn.Module: ...
    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]: ...
    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel: ...


@final
class ModelState:
    """A model on all ranks with its weights, and its optimizer where it is trained; every rank makes one.

    Args:
        recipe: its `actor` section is read.
        ranks: of the run.
        source: builds the model.
        build: the root, its parameters on the meta device, or real: then training starts from them.
        tokenizer: whose new tokens the embeddings grow by.
        directory: an exported directory whose weights replace the initial ones.
        checkpoint: whose weights are loaded; None: the initial ones.
        training: whether to create an optimizer.

    Attributes:
        model: the sharded root.
        inner: the model inside it, by whose names checkpoints are written.
        weights: of the model.
        optimizer: over them; only for training.
        step: optimizer steps applied to the weights.
        in_step: whether `run_training` is computing one.
        has_stepped: whether there was a first step, and `check_first_step` after it.
        own_updates: of a user's `run_training` while it is called; None otherwise.
        notes_of_updates: lines that were reported of them.
        loss_scale: of fp16; None for any other precision.
        finite: refuses weights that are not finite.
        utilisation: if the peak of the devices is known.
        average: of the weights over the steps; None where none is kept.
        notes: on how the model was built.
    """

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        source: ModelSource,
        build: Callable[[], nn.Module],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        directory: Path | None = None,
        checkpoint: Path | None = None,
        training: bool = False,
    ) -> None:
        self._recipe = recipe
        self._ranks = ranks
        self._source = source
        self._tokenizer = tokenizer
        self._groups: list[dist.ProcessGroup | None] = []
        self._left_out = LeftOutWeights(recipe)
        self._first_step: FirstStep | None = None
        self.step = 0
        self.in_step = self.has_stepped = False
        self.own_updates: OwnUpdates | None = None
        self.notes_of_updates: set[str] = set()
        self.loss_scale = LossScale() if recipe.actor.model.precision == "fp16" else None
        self.utilisation: Utilisation | None = None
        self.average: AveragedWeights | None = None
        self.notes: list[str] = []
        with seeded(recipe.runner.seed), unwritten_is_nan():
            self.model: nn.Module = build()
        self.inner: nn.Module = source.inner_model(self.model)
        check_shapes(self.inner)
        self.notes += mode_notes(self.inner) if training else []
        source.set_execution(self.inner)
        if not isinstance(self.model, AdapterRoot):  # an adapter's root has its own way for models outside transformers
            cast_for_layers(self.inner, COMPUTE_DTYPE[recipe.actor.model.precision])
        check_written(self.inner, lambda name: directory is None and checkpoint is None)
        if directory is None and self._is_empty():
            self.notes += check_read_values(
                self.inner,
                source.initial_weights(),
                by_class=source.builds_by_class,
                from_scratch=recipe.actor.model.from_scratch,
            )
        self.weights: Weights = self._shard(directory, checkpoint, training)
        if ranks.mesh is not None:
            in_methods(self.inner, self.weights.whole.method, own_methods(self.inner))
            if isinstance(self.model, LanguageRoot):
                in_methods(self.model, lambda _: self.weights.whole.generating(), ["generate"])
        if checkpoint is not None:
            state = load_weights_only(checkpoint, self.weights)
            self._left_out.check(checkpoint, state.get(LEFT_OUT))
            set_extra_state(self.inner, state.get(EXTRA, {}))
            self._take_average(checkpoint)
            self.step = int(state["step"])
        elif directory is not None:
            self._read_training_state(directory)
        self.finite = FiniteWeights(self.weights, ranks, COMPUTE_DTYPE[recipe.actor.model.precision])
        origin = checkpoint or directory or recipe.actor.model.model_path or type(self.inner).__name__
        self.notes += self.finite.check_start(str(origin))
        if training:
            self._prepare_training()
        self.model.train(training)

    def _shard(self, directory: Path | None, checkpoint: Path | None, training: bool) -> Weights:
        """Shard the model and load its values."""
        actor = self._recipe.actor
        share_values(self.inner, self._ranks)
        parts = self._source.new_parts
        self.notes += adapt(self.inner, self._recipe, self._tokenizer, self._source.initial_weights, parts, self._new)
        freeze(self.inner, actor.model.freeze)
        check_frozen(self.inner, actor.model)
        appends = len(actor.added_tokens) > len(actor.tokenizer.new_tokens)
        self.notes += check_frozen_rows(self.inner, actor.added_tokens, predicted=appends)
        if training:
            check_saved(self.inner)
            check_trained(self.inner, actor.model.precision, on_ranks=self._ranks.world_size > 1)
        parallel = self._source.apply_model_parallel(self.inner, self._ranks)
        units, note = self._source.shard_units(self.inner)
        if note and self._ranks.world_size > 1:
            self.notes.append(note)
        if actor.fsdp_config.cpu_offload and self._ranks.world_size == 1:
            self.notes.append(
                "actor.fsdp_config.cpu_offload has no effect on one rank, where nothing is sharded; less memory is "
                "taken with actor.optim.state_dtype, precision: pure_bf16 and gradient_checkpointing"
            )
        make_weights = shard_model(
            self.model,
            units,
            self._ranks,
            actor.model.precision,
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            prefetch=actor.fsdp_config.prefetch,
            entry_points=self.model.entry_points if isinstance(self.model, AdapterRoot) else (),
            experts=parallel.experts,
            offload=actor.fsdp_config.cpu_offload,
            cast_inputs=False,
        )
        excluded = from_elsewhere(self.inner)
        if checkpoint is None or excluded:
            self._load_initial_weights(directory)
            if excluded:
                self._left_out.take(self.inner, excluded, self._ranks)
            begin_adapter(self.inner, actor.model, self._recipe.runner.seed)
            if excluded:
                self._left_out.take_with_adapter(self.inner, self._ranks)
        else:
            materialise(self.model, dtype=MASTER_DTYPE[actor.model.precision], device=self._ranks.device)
        return make_weights(
            self.inner,
            reduce_each=actor.fsdp_config.reduce == "every",
            excluded_from_checkpoint=excluded,
            partial=parallel.partial,
        )

    def _is_empty(self) -> bool:
        """Whether the model was built without memory."""
        return any(base.tensor.is_meta for base in base_tensors(self.inner))

    def _load_initial_weights(self, directory: Path | None) -> None:
        actor, empty = self._recipe.actor, self._is_empty()
        exported = None if is_adapted(self.inner) else directory
        with seeded(self._recipe.runner.seed):  # a user's function may draw what its files lack
            source = exported or (self._source.initial_weights() if empty else None)
        self.notes += load_initial_weights(
            source,
            self.inner,
            self.model,
            build=self._build_again,
            seed=self._recipe.runner.seed,
            dtype=MASTER_DTYPE[actor.model.precision],
            ranks=self._ranks,
            device=self._ranks.device,
            frozen=frozen_dtype(actor.model) or self._stored_dtype(source),
            grow=bool(actor.added_tokens),
            by_class=self._source.builds_by_class,
            may_lack=self._lacking(may_lack(self._source.new_parts) if exported is None else None),
        )

    def _stored_dtype(self, source: WeightSource) -> torch.dtype | None:
        """The dtype of the computation, if an adapter's base is loaded from files that hold nothing else.

        Every forward rounds frozen weights to that dtype, which loses nothing then; held so, they take half of the
        memory of fp32. Rank 0 reads the files' headers.
        """
        actor = self._recipe.actor
        dtype = COMPUTE_DTYPE[actor.model.precision]
        if not keeps_base(self.inner, actor) or not isinstance(source, str | Path):
            return None
        fits = self._ranks.broadcast(self._ranks.is_main and holds_only(directory_of(source), dtype))
        return dtype if fits else None

    def _new(self, missing: Sequence[str]) -> Collection[str]:
        return self._source.new_weights(self.inner, missing)

    def _lacking(
        self, parts: Callable[[Path, Sequence[str]], Collection[str]] | None
    ) -> Callable[[Path, Sequence[str]], Collection[str]]:
        """Which of some names a directory may lack: those of new parts, and those that the source begins anew."""

        def lacking(directory: Path, missing: Sequence[str]) -> Collection[str]:
            return {*self._new(missing), *(parts(directory, missing) if parts is not None else ())}

        return lacking

    def _take_average(self, checkpoint: Path) -> None:
        """Put the averaged weights of a checkpoint into the model, where the recipe evaluates them."""
        optim = self._recipe.actor.optim
        if optim.ema_decay is not None and optim.ema_use:
            average = AveragedWeights(self.weights, optim.ema_decay)
            average.load(checkpoint)
            average.swap()

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that the recipe evaluates and exports; every rank enters it."""
        uses = self.average is not None and self._recipe.actor.optim.ema_use
        return self.average.in_place() if self.average is not None and uses else nullcontext()

    def _build_again(self) -> nn.Module:
        model = self._source.build_again()
        grow_embeddings(model, new_ids(self._recipe, self._tokenizer))
        return model

    def _prepare_training(self) -> None:
        actor, weights = self._recipe.actor, self.weights
        beside = [name or type(self.inner).__name__ for name in extra_state(self.inner)]
        if beside:
            self.notes.append(
                f"checkpoints have the extra state of {', '.join(beside)} (get_extra_state); exports have parameters "
                "and buffers alone"
            )
        self.optimizer: torch.optim.Optimizer = build_optimizer(
            weights.begin_training(),
            actor.optim,
            weights.shapes,
            seed=self._recipe.runner.seed,
            starts=weights.starts,
            outer=outer_parameters(self.inner),
            shared=shared_names(self.inner),
        )
        if actor.optim.ema_decay is not None:
            self.average = AveragedWeights(weights, actor.optim.ema_decay)
            self.optimizer.register_step_post_hook(self.average.update)
        self.utilisation = Utilisation.known(
            self.inner, self._ranks.device, actor.model.precision, self._ranks.world_size, self.sizes()
        )
        if self.utilisation is None and peak_flops(self._ranks.device, actor.model.precision) is not None:
            self.notes.append(f"no perf/mfu: {UNKNOWN}")

    @property
    def dtypes(self) -> str:
        """A description of the dtypes of weights, computation and optimizer."""
        precision = self._recipe.actor.model.precision
        master, compute, sums = (
            str(kind[precision]).removeprefix("torch.") for kind in (MASTER_DTYPE, COMPUTE_DTYPE, SUM_DTYPE)
        )
        moments = {"fp32": sums, "bf16": "bfloat16", "int8": "8-bit"}[self._recipe.actor.optim.state_dtype]
        optimizer = " and optimizer" if moments == master else f", {moments} optimizer"
        rounded = ", rounded at random" if master != sums else ""
        return f"{master} weights{rounded}{optimizer}, {compute} compute, {sums} gradients"

    def sizes(self) -> dict[nn.Parameter, int]:
        """The number of weights that each parameter of the inner model represents, over all ranks."""
        parameters, coded = self.inner.named_parameters(), coded_sizes(self.inner)
        return {parameter: coded.get(parameter, self.weights.shapes[name].numel()) for name, parameter in parameters}

    def begin_first_step(self) -> None:
        """Before a first step, after all that `setup` does: every rank calls it."""
        self._left_out.begin_steps(self.weights, self._ranks)
        self._first_step = FirstStep(self.inner, self.weights)

    def begin_first_forwards(self) -> None:
        """Before the forwards of a first step of several micro-batches, and nothing else that changes buffers."""
        assert self._first_step is not None
        self._first_step.note_buffers()

    def watching_first_forwards(self) -> AbstractContextManager[None]:
        """Around a first `run_training` that updates the weights itself; see `FirstStep.watching_forwards`."""
        assert self._first_step is not None
        return self._first_step.watching_forwards(self.model, self.optimizer)

    def check_first_step(self, report: Callable[[str], None]) -> None:
        """After a first step; `FirstStep.check`, whose lines `report` receives."""
        assert self._first_step is not None
        self.has_stepped = True
        self._first_step.check(report, in_own_updates=self.own_updates is not None)
        self._first_step = None

    # Checkpoints.

    def checkpoint_state(self, report: Callable[[str], None], keeps: str = "") -> dict[str, object]:
        """The JSON part of the model's state in a checkpoint; every rank calls it.

        Args:
            report: receives a line, once, if frozen weights have changed, which no checkpoint holds.
            keeps: the class of a worker whose own methods may keep them all the same.
        """
        beside = extra_state(self.inner)
        return {
            "step": self.step,
            OPTIMIZER_NAME: self._recipe.actor.optim.name,
            "loss_scale": asdict(self.loss_scale) if self.loss_scale else None,
            "world_size": self._ranks.world_size,
            LEFT_OUT: self._left_out.record(report, keeps),
            "frozen": self.weights.frozen(),
            **({EXTRA: beside} if beside else {}),
        }

    def save(self, folder: Path, state: Mapping[str, object], *, background: bool) -> list[PendingSave]:
        """Write model, optimizer and `state` into a folder; every rank calls it.

        Args:
            folder: created here.
            state: the JSON part of the checkpoint.
            background: return once the tensors are copied; the caller waits for what is returned.
        """
        self.weights.refuse_added()
        with nullcontext() if self.average is None else self.average.apart():  # an evaluation may be stopped
            return self._save(folder, state, background)

    def _save(self, folder: Path, state: Mapping[str, object], background: bool) -> list[PendingSave]:
        average = None if self.average is None else self.average.checkpointed()
        if background and not self._groups:  # connections of their own, for the model, the optimizer and the average
            self._groups = [self._ranks.new_group() for _ in range(2 if average is None else 3)]
        return save_training(
            folder,
            self.weights,
            self.optimizer,
            state,
            ranks=self._ranks,
            average=average,
            background=self._groups if background else None,
        )

    def load(self, folder: Path, *, keeps: str = "") -> Mapping[str, object]:
        """Continue from a folder that `save` wrote, on any number of ranks; returns the JSON part.

        Moments of an optimizer of another class are not loaded (`moments_of`). An average of the weights that the
        folder does not have begins with its weights (`begins_average`).

        Args:
            folder: of the checkpoint.
            keeps: as in `checkpoint_state`.
        """
        from_recipe = recipe_options(self._recipe.actor.optim, self.optimizer)
        other = self.moments_of(folder) is not None
        if other:
            self.optimizer.state.clear()
        state = load_training(folder, self.weights, self.optimizer, from_recipe=from_recipe, without_moments=other)
        self._left_out.check(folder, state.get(LEFT_OUT), may_have_changed=bool(keeps))
        if self.average is not None and has_average(folder):
            self.average.load(folder)
        elif self.average is not None:
            self.average.begin()
        self.finite.check_loaded(folder)
        self.step = int(state["step"])
        if "frozen" in state:  # not in a checkpoint of an earlier version
            self.weights.freeze(state["frozen"])
        if self.loss_scale is not None and state["loss_scale"]:
            self.loss_scale = LossScale(**state["loss_scale"])
        set_extra_state(self.inner, state.get(EXTRA, {}))
        return state

    def begins_average(self, folder: Path) -> bool:
        """Whether the recipe keeps an average of the weights that a folder does not have."""
        return self.average is not None and not has_average(folder)

    def moments_of(self, folder: Path) -> str | None:
        """The optimizer whose moments a folder holds, if they are not those of the recipe's."""
        now = self._recipe.actor.optim.name
        saved = str(read_training_state(folder).get(OPTIMIZER_NAME, now))  # earlier versions recorded none
        return None if same_states(saved, now) else saved

    def _read_training_state(self, directory: Path) -> None:
        """What a run has recorded beside an exported directory.

        Raises:
            CheckpointError: the directory is an adapter on another base than it was trained on.
        """
        recorded = directory / "training_state" / STATE_FILE
        if not recorded.is_file():
            return
        state = read_json(recorded)
        if is_adapter(directory):
            self._left_out.check(directory, state.get(LEFT_OUT))
        set_extra_state(self.inner, state.get(EXTRA, {}))

    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint on all ranks together, before it is written."""
        average = 0 if self.average is None else self.average.bytes()
        return training_bytes(self.weights, self.optimizer) + average

    def model_bytes(self) -> int:
        """The size of the model's weights on all ranks together."""
        return model_bytes(self.weights)

    @torch.no_grad()
    def base_values(self) -> dict[str, torch.Tensor]:
        """The whole values that the model had before it was adapted, on the CPU, by its own names; all ranks call it.

        Shared parameters are under each of their names.
        """
        values: dict[str, torch.Tensor] = {}
        with self.weights.in_rows():
            tensors, names = self.weights.tensors(), dict[torch.Tensor, str]()
            for base in base_tensors(self.inner):
                first = names.setdefault(base.tensor, base.name)
                if first == base.name:
                    values[first] = gather_full(first, tensors[base.own_name].detach()).to("cpu", copy=True)
                else:
                    values[base.name] = values[first]
        return values


def shared_names(model: nn.Module) -> dict[str, str]:
    """Of parameters with several names, such as a head that is the embedding: the first name, by each further one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every if names[id(parameter)] != name}


def outer_parameters(model: nn.Module) -> set[str]:
    """The names of the parameters of embeddings, and of the head of a language model or classifier of transformers."""
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = head_of(model)
    if isinstance(head, nn.Module):
        modules += list(head.modules())
    outer = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in outer}
