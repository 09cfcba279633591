"""Adapters of models that predict actions: the interface for closed-loop evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from shardtune.data.encoder import FrameOptions
from shardtune.data.robot.representation import Representation, described
from shardtune.data.sources.resolve import resolve_sources
from shardtune.models.action.action_mask import left_as_is
from shardtune.models.action.environment import Observation, Policy, Valuation
from shardtune.models.action.normalizer import Normalizer
from shardtune.models.action.recipe_normalizer import NORMALIZER_FILE, normalizer_of, recipe_normalizers
from shardtune.models.adapter import Adapter, AdapterRoot
from shardtune.models.mixed_precision import compute_in
from shardtune.parallel.precision import COMPUTE_DTYPE


class ActingAdapter(Adapter):
    """A model that predicts the next actions in an environment.

    Attributes:
        normalization_mapping: how VISUAL, STATE and ACTION are normalised, each IDENTITY, MEAN_STD, MIN_MAX or
            QUANTILES; the recipe's `model.normalization_mapping` takes precedence. With any, `self.normalizer` has the
            statistics of the training data (`Normalizer` has an example); they are part of the key of the cache of
            encoded rows, and saved beside the weights.
    """

    normalization_mapping: ClassVar[Mapping[str, str]] = {}
    _normalizers: Mapping[str, Normalizer] | None = None

    @property
    def normalizers(self) -> Mapping[str, Normalizer]:
        """The normalizers of the training data sets, by their names; `row["dataset"]` is the name of a row's.

        Raises:
            ConfigError: there are no statistics, or other modes than the file of statistics has.
            DataError: statistics that cannot be read or used.
        """
        if self._normalizers is None:
            self._normalizers = recipe_normalizers(
                self.recipe, self.normalization_mapping, self.action_chunk, self.train_data
            )
        return self._normalizers

    @property
    def normalizer(self) -> Normalizer:
        """The normalizer of the only training data set, or of the one that `actor.model.unnorm_key` names.

        Raises:
            ConfigError: there are several, and none is named.
        """
        return normalizer_of(self.normalizers, self.recipe.actor.model.unnorm_key)

    @property
    def used_normalizers(self) -> Mapping[str, Normalizer]:
        """Those of `normalizers` that the first lines of a run name, by data set: all that rows may use."""
        return self.normalizers

    @property
    def normalizes(self) -> bool:
        """Whether the adapter or its recipe names a mode."""
        return bool({**self.normalization_mapping, **(self.recipe.actor.model.normalization_mapping or {})})

    @property
    def representation(self) -> Representation | None:
        """How the actions are represented that `policy` predicts (`actor.model.action_representation`), with a mask by
        dimension; None: they are absolute."""
        model = self.recipe.actor.model
        frames = FrameOptions.of(model, self.action_chunk or 1, self.observation_steps)
        if frames.representation is None:
            return None
        if self.normalizes:
            found = {one.representation for one in self.normalizers.values()}
            return found.pop() if len(found) == 1 else self.normalizer.representation
        if not isinstance(model.action_representation_mask, dict):
            return frames.representation
        spec = self.recipe.data.train_data_paths if self.train_data is None else self.train_data
        return resolve_sources(spec, self.recipe.data, frames=frames, report=lambda _: None)[0].representation

    @property
    def action_steps(self) -> int | None:
        """How many actions of a chunk are executed where neither `eval.action_steps` nor `eval.temporal_ensembling` is
        given; None: all."""
        return None

    @property
    def temporal_ensembling(self) -> float | None:
        """The exponent of temporal ensembling where neither of these keys is given; None: no ensembling."""
        return None

    def encoding_settings(self) -> Mapping[str, Any]:
        found = {name: one.to_json() for name, one in self.normalizers.items()} if self.normalizes else {}
        return {**super().encoding_settings(), **({"normalizers": found} if found else {})}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        if "normalizers" in settings:
            self._normalizers = {name: Normalizer.from_json(one) for name, one in settings["normalizers"].items()}

    def notes(self) -> Sequence[str]:
        found = []
        for name, one in self.used_normalizers.items() if self.normalizes else ():
            modes = ", ".join(f"{kind} {mode}" for kind, mode in one.mapping.items())
            mask = one.actions.mask
            kept = left_as_is({}, None if mask is None else mask.tolist())
            found.append(
                f"{name} is normalised: {modes}" + (f"; dimensions of actions as they are: {kept}" if kept else "")
            )
            found += [f"{name}: {line}" for line in one.constant()]
            form = one.representation
            found += [] if form is None else [f"{name}: {described(form, len(form.given or ()))}"]
        return found

    def history_notes(self) -> Sequence[str]:
        """A sentence where observations have earlier ones and rows have not."""
        if self.observation_steps == 1 or self.action_chunk is not None:
            return ()
        kind = type(self).__name__
        return [
            f"{kind}.observation_steps ({self.observation_steps}) applies to observations alone: rows are those of the "
            f"data files, as {kind}.action_chunk is None"
        ]

    def saved_files(self) -> Mapping[str, object]:
        found = self.encoding_settings().get("normalizers")
        return {**super().saved_files(), **({} if found is None else {NORMALIZER_FILE: found})}

    @abstractmethod
    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        """A function from observations to actions.

        It is called at the same time on every rank, with one or more observations; each call has to run the same
        collectives whatever the observations. Actions are in the units of the environment, that is of the training
        data.

        Args:
            root: the sharded module that `self.root` made, in evaluation mode; `root.act(…)` is `self.act(model, …)`
                with the weights gathered.
            device: where it computes.
        """

    def check_observation(self, observation: Observation) -> None:
        """Refuse an observation that the policy cannot act on; called with the first one of `eval.environment` before
        training. By default nothing is known of observations.

        Args:
            observation: with `earlier` ones where the policy sees several frames.

        Raises:
            ShardtuneError: it cannot.
        """

    def values(self, root: AdapterRoot, device: torch.device) -> Valuation | None:
        """A function from observations to the returns that the model expects, float32 [observations], called as that of
        `policy` is; by default None: the model has no values."""
        return None

    @abstractmethod
    def act(self, model: nn.Module, *inputs: Any) -> Any:
        """The computation of a policy with the model: from tensors to tensors."""

    def acting_settings(self) -> Mapping[str, object]:
        """Keys of `actor.model` whose values are known after training, for `policy.json` in the saved directory."""
        form = None if self.normalizes else self.representation  # a normalizer has it, with the names of dimensions
        if form is None or not form.names:
            return {}
        return {"action_representation_mask": form.mask(len(form.names)).tolist()}

    def root(self, model: nn.Module) -> AdapterRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return ActingRoot(self, model)


class ActingRoot(AdapterRoot):
    """A root that also computes actions."""

    entry_points = (*AdapterRoot.entry_points, "act")

    def __init__(self, adapter: ActingAdapter, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._acting = adapter

    def act(self, *inputs: Any) -> Any:
        return self._acting.act(self.model, *inputs)
