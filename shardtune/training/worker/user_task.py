"""The task of a user-defined worker, whose methods provide model, batches, loss and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from shardtune.batch import Metric
from shardtune.config import DataEntry, Recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.cache_directory import cache_root
from shardtune.data.sources.fingerprint import fingerprints
from shardtune.data.user_loader.rng import LoaderRng
from shardtune.models.activation_checkpointing import set_execution
from shardtune.models.adapter import WeightSource, cannot_share_sequences
from shardtune.models.value_loss import HEAD
from shardtune.parallel.layer_drop import check_layer_drop
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel, check_experts
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units
from shardtune.parallel.tensor_parallel import check_planned
from shardtune.parallel.unfit_parameters import check_joined, check_python, check_trained
from shardtune.training.worker.exported_recipe import ACTS
from shardtune.training.worker.task import DataPaths, Evaluated, Evaluation, Task, UserMethods
from shardtune.training.worker.user_evaluation import sum_user_batches


class UserSets:
    """Evaluation over user-defined loaders by a user-defined method.

    Args:
        methods: the worker's.
        recipe: of the run; by its seed, random draws of a loader are the same in each evaluation.
    """

    def __init__(self, methods: UserMethods, recipe: Recipe) -> None:
        self._methods = methods
        self._seed = recipe.runner.seed
        self._rows_per_batch = recipe.actor.eval_micro_batch_size
        self._rng: dict[int, LoaderRng] = {}  # by the id of the loader
        self._reported: set[str] = set()

    def evaluate(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> Evaluated:
        """The metrics of one set, from `get_eval_model_output` of each batch."""
        return Evaluated({key: metric.mean for key, metric in self.sums(name, loader, info, evaluation).items()})

    def sums(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> dict[str, Metric]:
        """As `evaluate`, the metrics as sums."""
        announced = info.get("num_samples")

        def report_once(text: str) -> None:
            if text not in self._reported:
                self._reported.add(text)
                evaluation.report(text)

        return sum_user_batches(
            self._methods.get_eval_model_output,
            loader,
            evaluation.ranks,
            sharded=bool(info.get("sharded")),
            num_samples=announced if isinstance(announced, int) else None,
            name=name or "eval",
            poll=evaluation.poll,
            draws=self._rng.setdefault(id(loader), LoaderRng(loader, self._seed)),
            rows_per_batch=self._rows_per_batch,
            report=report_once,
        )


class UserTask(Task):
    """The task of a user-defined worker: model and batches are only accessible through its methods.

    Args:
        recipe: of the run.
        methods: the worker's.
        kind: the name of the worker's class, for messages.
    """

    def __init__(self, recipe: Recipe, methods: UserMethods, kind: str) -> None:
        self._recipe = recipe
        self._methods = methods
        self._kind = kind
        self._sets = UserSets(methods, recipe)
        self._files: list[dict[str, object]] = []

    def inner_model(self, model: nn.Module) -> nn.Module:
        return model

    def set_execution(self, model: nn.Module) -> None:
        """Whatever made the model: `get_model` has done so already, and a second time changes nothing."""
        set_execution(model, self.shard_units(model)[0], self._recipe.actor.model)

    def initial_weights(self) -> WeightSource:
        config = self._recipe.actor.model
        return None if config.from_scratch else config.model_path

    @property
    def builds_by_class(self) -> bool:
        """True: a model that the worker's method makes without memory has no values of its own."""
        return True

    @property
    def new_parts(self) -> Sequence[str]:
        """The value head that `get_model` puts beside the actions."""
        model = self._recipe.actor.model
        return (HEAD,) if model.add_value_head and model.model_type == ACTS else ()

    def build_again(self) -> nn.Module:
        return self._methods.model_provider_func()

    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        return choose_units(model, wrap=self._recipe.actor.fsdp_config.wrap)[0], ""

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        self._check_sequence(ranks.layout)
        check_layer_drop(model, self.shard_units(model)[0], ranks.layout)
        return apply_model_parallel(model, *_plans(model), ranks, None)

    def check_layout(self, model: nn.Module, layout: Layout) -> None:
        """Refuse, on one rank and without starting others, a layout that they would refuse for this model."""
        self._check_sequence(layout)
        tensor_plan, expert_plan = _plans(model)
        if layout.tensor > 1:
            check_planned(model, tensor_plan)
        if layout.expert > 1:
            check_experts(model, expert_plan, layout.expert)
        if layout.num_ranks > 1:
            check_python(model)
            check_trained(model, self._recipe.actor.model.precision, on_ranks=True)
            check_layer_drop(model, self.shard_units(model)[0], layout)
            if layout.flat:
                check_joined(dict(model.named_parameters()))

    def _check_sequence(self, layout: Layout) -> None:
        if layout.sequence > 1:
            raise cannot_share_sequences(self._kind, "it makes its batches itself")

    def evaluation_sets(self) -> list[DataPaths]:
        return evaluation_paths(self._recipe)

    def data_files(self) -> list[dict[str, object]]:
        """The files and directories that the recipe names, with hashes, as they were at the first call."""
        if not self._files:
            data = self._recipe.data
            found = fingerprints(list(training_paths(self._recipe)), cache_root(data.cache_dir))
            self._files = [{**file} for file in found]
        return self._files

    def row_fingerprints(self, *, row_by_row: bool = False) -> dict[str, str]:
        paths = [path for paths in self.evaluation_sets() for path in paths]
        found = [*self.data_files(), *fingerprints(paths, cache_root(self._recipe.data.cache_dir))]
        return {f"the files of {file['file']}": str(file["key"]) for file in found}

    def describe_data(self) -> dict[str, object]:
        return {"train": self.data_files()}

    def evaluate_set(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> Evaluated:
        return self._sets.evaluate(name, loader, info, evaluation)


def _plans(model: nn.Module) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """How tensor ranks, and the ranks of experts, share a model of transformers; no other one declares it."""
    return (model.tp_plan, model.ep_plan) if isinstance(model, PreTrainedModel) else ({}, {})


def training_paths(recipe: Recipe) -> DataPaths:
    """The paths of the training rows."""
    return DataPaths(_paths(recipe.data.train_data_paths))


def evaluation_paths(recipe: Recipe) -> list[DataPaths]:
    """The paths of each evaluation set that a recipe names."""
    spec = recipe.data.eval_data_paths
    if spec is None:
        return []
    if isinstance(spec, dict):
        return [DataPaths(_paths(paths), name) for name, paths in spec.items()]
    return [DataPaths(_paths(spec))]


def _paths(spec: str | DataEntry | Sequence[str | DataEntry] | None) -> list[str]:
    if spec is None:
        return []
    entries = [spec] if isinstance(spec, (str, DataEntry)) else spec
    return [entry if isinstance(entry, str) else entry.path for entry in entries]
