"""Tasks of a worker: the source of the model, the rows and the evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from shardtune.batch import Metric
from shardtune.data.cache.by_file import TrainingRows
from shardtune.data.loader.protocol import MicroBatch, Step
from shardtune.models.adapter import WeightSource
from shardtune.parallel.model_parallel import ModelParallel
from shardtune.parallel.ranks import Ranks
from shardtune.training.bad_rows import BadPart
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import Accumulate, accumulate
from shardtune.training.worker.run_context import silent


class DataPaths(list[str]):
    """The paths of training rows or of one evaluation set.

    Attributes:
        name: of the evaluation set; "" for the training rows and for a single set without a name.
    """

    def __init__(self, paths: Iterable[str], name: str = "") -> None:
        super().__init__(paths)
        self.name = name


@dataclass(frozen=True, slots=True)
class UserMethods:
    """The methods of a worker that a user may override, bound to the worker.

    Attributes:
        model_provider_func: creates the model.
        get_train_model_output: maps a micro-batch to its loss.
        get_eval_model_output: maps a batch to its metrics.
    """

    model_provider_func: Callable[[], nn.Module]
    get_train_model_output: Callable[..., object]
    get_eval_model_output: Callable[..., object]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The context of an evaluation.

    Attributes:
        model: the sharded root, in evaluation mode.
        ranks: over which sums are taken.
        step: optimizer steps done.
        poll: called before each batch, by all ranks alike.
        report: receives lines for the user.
        samples_dir: where answers are written; None: nowhere.
        episodes_dir: where episodes are written; None: nowhere.
        before_training: whether it is the one before the first step of a run, whose answers need no explanation.
    """

    model: nn.Module
    ranks: Ranks
    step: int
    poll: Callable[[], None]
    report: Callable[[str], None]
    samples_dir: Path | None = None
    episodes_dir: Path | None = None
    before_training: bool = False

    @property
    def device(self) -> torch.device:
        return self.ranks.device


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation set.

    Attributes:
        metrics: by name; logged below `eval/`.
        named: metrics that are logged under their own names.
        samples: answers, where the task generates any.
    """

    metrics: Mapping[str, float]
    named: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, object]] = ()


class Task(ABC):
    """A worker's model, rows and evaluation. The forms: `AdapterTask`, `PaddedTask`, `UserTask`.

    The loss of a micro-batch is the worker's `get_train_model_output`, which users override.
    """

    # The model.

    @abstractmethod
    def inner_model(self, model: nn.Module) -> nn.Module:
        """The model inside the sharded root, by whose names checkpoints are written."""

    @abstractmethod
    def set_execution(self, model: nn.Module) -> None:
        """Apply `actor.model.gradient_checkpointing` and `actor.model.compile` to the inner model."""

    @abstractmethod
    def initial_weights(self) -> WeightSource:
        """The initial weights of a model built without memory; None: from the module's own constructor."""

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]:
        """Which tensors may begin as the model's class initialises them, of those that its files lack."""
        return ()

    @property
    @abstractmethod
    def builds_by_class(self) -> bool:
        """Whether building makes a model of transformers from its config alone (see `load_initial_weights`)."""

    @property
    def has_users_loss(self) -> bool:
        """Whether the loss is computed by a user's code, where the worker does not change it."""
        return True

    def may_be_idle(self, name: str) -> bool:
        """Whether a trained parameter may have no gradient, see `Adapter.may_be_idle`."""
        return False

    @property
    def new_parts(self) -> Sequence[str]:
        """Submodules that the initial weights may lack, see `Adapter.new_parts`."""
        return ()

    @abstractmethod
    def build_again(self) -> nn.Module:
        """The inner model with real weights, if they come from its constructor."""

    @abstractmethod
    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        """The modules of the inner model that are gathered as one, and a note on how they were chosen."""

    @abstractmethod
    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        """Divide the inner model among the ranks that work on the same rows, before it is sharded."""

    def probe_assumptions(
        self, model: nn.Module, device: torch.device, report: Callable[[str], None] = silent
    ) -> list[str]:
        """Verify the task's assumptions about the model, once its weights are loaded; returns notes."""
        return []

    def probe_loss(self, model: nn.Module, device: torch.device) -> list[str]:
        """Try the loss of a user's adapter on two rows; returns notes."""
        return []

    def build_teacher(self, model: nn.Module, ranks: Ranks, report: Callable[[str], None]) -> list[str]:
        """Build the frozen model that the loss compares `model` with, where it has one; every rank calls it.

        Returns:
            Notes on how it was built.
        """
        return []

    def restore_model(self, model: nn.Module) -> None:
        """Undo the task's changes to the inner model, except for its weights."""
        return

    # Rows.

    @property
    def rows(self) -> TrainingRows | None:
        """The encoded training rows; None if a user-defined loader provides batches."""
        return None

    @abstractmethod
    def evaluation_sets(self) -> list[DataPaths]:
        """The paths of each evaluation set."""

    @abstractmethod
    def data_files(self) -> list[dict[str, object]]:
        """The files that the training rows come from, with hashes; a resumed run must have the same."""

    def recall_files(self, records: Sequence[Mapping[str, object]]) -> None:
        """Take over what a run has recorded of its files, `data_files`, so that they need not be read for it again."""
        return

    def drawn_numbers(self, rows: Sequence[int]) -> Sequence[int]:
        """The numbers of training rows by which random ones are drawn."""
        return rows

    @abstractmethod
    def row_fingerprints(self, *, row_by_row: bool = False) -> dict[str, str]:
        """Fingerprints of the training and evaluation rows, by a name for messages; every rank must have the same.

        Args:
            row_by_row: of the rows alone, one by one; otherwise of the files, in which the time stamps of videos count.
        """

    @abstractmethod
    def describe_data(self) -> dict[str, object]:
        """The data, for the manifest."""

    def dropped_rows(self) -> Iterable[Mapping[str, object]]:
        """Every row of the data that is neither trained nor evaluated on, with its file, cause and reason."""
        return ()

    def name_rows(self, step: Step[MicroBatch], bad: Sequence[BadPart] = ()) -> str:
        """A short description of the rows of a step.

        Args:
            step: of the loader.
            bad: the parts to name; empty: the whole step.
        """
        rows = f"those after {step.state.rows_consumed:,} of epoch {step.state.epoch}"
        places = ", ".join(f"micro-batch {part.micro_batch + 1} of rank {part.rank}" for part in bad)
        return f"{places} among {rows}" if bad else rows

    # Training.

    @property
    def accumulate(self) -> Accumulate:
        """The function that accumulates gradients of micro-batches."""
        return accumulate

    @property
    def losses_add_up(self) -> bool:
        """Whether the loss of a step is the sum of those of its micro-batches, each computed by itself."""
        return True

    def metric_name(self, name: str) -> str:
        """The name under which a metric that a train method returns is logged."""
        return f"train/{name}"

    # Evaluation.

    @property
    def can_generate(self) -> bool:
        """Whether the model can generate answers."""
        return False

    @property
    def can_predict(self) -> bool:
        """Whether it is a task by name, of which `shardtune predict` gives predictions for rows."""
        return False

    @property
    def plays_episodes(self) -> bool:
        """Whether evaluation includes episodes in an environment."""
        return False

    @property
    def runs_harness(self) -> bool:
        """Whether evaluation includes tasks of lm-evaluation-harness."""
        return False

    def prepare_harness(self, ranks: Ranks) -> None:
        """Read the data of the harness's tasks, before training; every rank calls it."""
        return

    def evaluate_harness(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The scores of the harness's tasks; none by default."""
        return {}

    @abstractmethod
    def evaluate_set(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> Evaluated:
        """Evaluate one set."""

    def evaluate_episodes(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The metrics of the episodes that the recipe configures; none by default."""
        return {}

    def metric_names(self) -> list[str] | None:
        """The names of the evaluation metrics, if known before the first evaluation."""
        return None

    # Descriptions.

    def check(self) -> None:
        """Check the configuration before any rank is started, without building large objects."""
        return

    def describe(self, summary: RunSummary) -> RunSummary:
        """Add the task's facts about model and rows to the first screen's summary."""
        return replace(summary)


def add_metrics(into: dict[str, Metric], found: Mapping[str, Metric]) -> None:
    """Add metrics to sums by name."""
    for name, metric in found.items():
        into[name] = into.get(name, Metric(0.0, 0.0)) + metric
