"""Vision-language models that predict actions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig, PreTrainedModel, ProcessorMixin

from shardtune.batch import Batch, Metric, PackedBatch, Prompt, Sample
from shardtune.config import ValueHeadConfig
from shardtune.data.chat.template import load_template
from shardtune.data.images.placeholders import ImageText
from shardtune.data.robot.representation import ENTRY as REPRESENTATION
from shardtune.data.robot.representation import Representation, described
from shardtune.data.robot.returns import RETURN
from shardtune.errors import ModelError
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.action.action_mask import left_as_is
from shardtune.models.action.encoder import ACTIONS, DATASET, PADDED, ActionEncoder, PromptForm
from shardtune.models.action.environment import Observation, Policy, Valuation
from shardtune.models.action.openvla import EMPTY_TOKEN, LLAMA2, OpenVLAConfig, OpenVLAForActionPrediction
from shardtune.models.action.openvla_processor import openvla_images
from shardtune.models.action.policy import SETTINGS_FILE, ActionBatch, ActionPolicy, ActionSettings, action_class
from shardtune.models.action.tokens import choose_key
from shardtune.models.adapter import AdapterRoot, Evaluation
from shardtune.models.language_model import LanguageRoot
from shardtune.models.user_metrics import Measure, Prediction
from shardtune.models.value_loss import ERROR as VALUE_ERROR
from shardtune.models.value_loss import EXPLAINED, HEAD, ValueLoss
from shardtune.models.vision.processors import image_text
from shardtune.models.vision.vision_language import VisionLanguage

ACCURACY, ERROR = "action_accuracy", "action_l1"
"""Metrics of evaluation: the share of action tokens that the policy would choose; the mean distance of its actions,
normalised. `action_l1/2` is that of the third dimension in the units of the data."""
MOST_NAMES = 5
"""Data sets that a note names one by one."""
_OWN_FIELDS = (ACTIONS, PADDED, DATASET)


class VisionLanguageAction(VisionLanguage, ActingAdapter):
    """A vision-language model trained on frames of robot data, each with the chunk of actions that follows.

    Args:
        config: the model's config, into which the settings are written, so that they are saved with it.
        processor: the model's.
        settings: of actions.
        used: the data sets whose statistics rows use.
        representation: of the actions in rows; None: they are absolute.
        values: the recipe's value head, if one is trained.
        kept: the data sets whose statistics are the model's own although their rows have others.
        others: as for `VisionLanguage`.
    """

    _kind = "vision-language-action model"

    def __init__(
        self,
        config: PreTrainedConfig,
        processor: ProcessorMixin,
        settings: ActionSettings,
        *,
        used: Callable[[], Sequence[str]],
        representation: Representation | None = None,
        values: ValueHeadConfig | None = None,
        kept: Callable[[], Sequence[str]] = tuple,
        **others: Any,
    ) -> None:
        super().__init__(config, processor, **others)
        self._used, self._kept = used, kept
        self.settings = settings
        self._representation = representation
        self._values = values
        self.value_loss = None if values is None else ValueLoss(values)
        settings.write_to(config)
        if isinstance(config, OpenVLAConfig):
            config.norm_stats = dict(settings.norm_stats)
            config.auto_map = None  # the code that it names is not in the directories that are saved

    def _image_text(self, processor: ProcessorMixin) -> ImageText:
        if isinstance(self.config, OpenVLAConfig):
            return openvla_images(processor, self.config)
        return image_text(processor)

    def _from_config(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        if self._make is not None:
            return super()._from_config(dtype)
        if isinstance(self.config, OpenVLAConfig):
            kind: Any = OpenVLAForActionPrediction
        else:
            kind = action_class(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self.config)])
        implementation = None if self._requested_attention == "auto" else self._requested_attention
        try:
            config = self.config if dtype is None else copy.deepcopy(self.config)
            return kind._from_config(config, dtype=dtype or torch.float32, attn_implementation=implementation)
        except (ValueError, ImportError, KeyError) as error:
            raise ModelError(
                f"transformers cannot build a {self._kind} of type {self.config.model_type!r}: {error}",
                where=f"actor.model.model_path, actor.model.attn_implementation: {self._requested_attention}",
                remedy="check the model directory's config.json and actor.model.attn_implementation",
            ) from error

    def build(self) -> PreTrainedModel:
        model = super().build()
        self.settings.write_to(model.config)  # if a user's function built the model, its config is another object
        if self._values is not None and HEAD not in dict(model.named_children()):
            raise ModelError(
                f"{type(model).__name__} has no {HEAD} to train",
                where="actor.model.add_value_head: true",
                remedy=f"let the function that makes the model set model.{HEAD} = shardtune.ValueHead(hidden_size), or "
                "leave the key out",
            )
        return model

    @property
    def new_parts(self) -> Sequence[str]:
        """The value head, which a base model lacks."""
        return () if self._values is None else (HEAD,)

    @functools.cached_property
    def actions(self) -> ActionEncoder:
        """The encoder of frames and observations."""
        data, settings = self._data, self.settings
        template = load_template(data.chat_template, self.tokenizer)
        assert isinstance(self.images, ImageText)
        return ActionEncoder(
            self.images,
            template,
            settings,
            self._form(),
            representation=self._representation,
            max_length=data.max_length,
            on_too_long=data.on_too_long,
            values=self._values,
            template_kwargs=data.template_kwargs,
        )

    def _form(self) -> PromptForm:
        if not isinstance(self.config, OpenVLAConfig):
            return PromptForm(self.settings.prompt)
        ending = (EMPTY_TOKEN,) if self.config.text_vocabulary == LLAMA2 else ()
        return PromptForm(self.settings.prompt, ending, lower=True)

    def encoder(self, *, with_prompts: bool) -> ActionEncoder:
        return self.actions

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
        batch = super().collate(samples, rows, weights)
        acting = [sample.fields for sample in samples if ACTIONS in sample.fields]
        own: dict[str, torch.Tensor] = {}
        if acting:
            own = {name: torch.from_numpy(np.stack([fields[name] for fields in acting])) for name in _OWN_FIELDS}
        if self._values is not None:  # of every document, those without a target too
            own[RETURN] = torch.tensor([float(sample.fields.get(RETURN, 0.0)) for sample in samples])
        return replace(batch, fields={**batch.fields, **own}) if own else batch

    def further_inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        kept = {name: value for name, value in batch.fields.items() if name not in (*_OWN_FIELDS, RETURN)}
        return super().further_inputs(replace(batch, fields=kept))

    # -- evaluation ------------------------------------------------------------------------------------------------

    @property
    def metric_names(self) -> Sequence[str]:
        of_values = [] if self._values is None else [VALUE_ERROR, EXPLAINED]
        by_dimension = (f"{ERROR}/{number}" for number in range(self.settings.action_token_len))
        return [ACCURACY, ERROR, *by_dimension, *of_values]

    def evaluate(self, model: nn.Module, batch: Batch, measure: Measure | None = None) -> Evaluation:
        """The loss and accuracy of all targets, and the error of the actions that the policy would take.

        Each token is predicted from the true ones before it.
        """

        def both(predictions: Iterator[Prediction]) -> Mapping[str, Metric]:
            chosen: list[torch.Tensor] = []
            watched = self._watched(predictions, chosen)
            further = {} if measure is None else dict(measure(watched))
            for _ in watched:
                pass
            return {**self._action_metrics(batch, torch.cat(chosen) if chosen else torch.empty(0)), **further}

        return super().evaluate(model, batch, both)

    def _watched(self, predictions: Iterator[Prediction], chosen: list[torch.Tensor]) -> Iterator[Prediction]:
        """Yields the same predictions and collects the likeliest action token of each."""
        tokens = self.settings.tokens
        for piece in predictions:
            chosen.append(piece.outputs[:, tokens.first : tokens.top].argmax(-1) + tokens.first)
            yield piece

    def _action_metrics(self, batch: Batch, chosen: torch.Tensor) -> dict[str, Metric]:
        """Compare the tokens chosen at the targets with the actions; a row has its actions' targets, then its end's."""
        size = self.settings.action_token_len
        if ACTIONS not in batch.fields or not len(chosen):
            return {}
        real = ~batch[PADDED].cpu().numpy()
        counts = real.sum(1) * size + 1
        is_action = np.ones(int(counts.sum()), dtype=bool)
        is_action[np.cumsum(counts) - 1] = False
        assert isinstance(batch, PackedBatch)
        ids, targets = (values.cpu().numpy()[is_action] for values in (chosen, batch.targets))
        found = {ACCURACY: Metric(float((ids == targets).sum()), float(len(ids)))}
        owner = np.repeat(np.arange(len(real)), real.sum(1))
        normal = self.settings.tokens.decode(ids).reshape(-1, size)
        truth = batch[ACTIONS].cpu().numpy()[real]
        off, off_real = np.empty_like(normal), np.empty_like(normal)
        datasets = batch[DATASET].cpu().numpy()[owner]
        for number in np.unique(datasets):
            rows = datasets == number
            statistics = self.settings.statistics(list(self.settings.norm_stats)[int(number)])
            off[rows] = np.abs(normal[rows] - np.clip(statistics.normalise(truth[rows]), -1, 1))
            off_real[rows] = np.abs(statistics.unnormalise(normal[rows]) - truth[rows])
        found[ERROR] = Metric(float(off.sum()), float(off.size))
        for dimension in range(size):
            found[f"{ERROR}/{dimension}"] = Metric(float(off_real[:, dimension].sum()), float(len(off_real)))
        return found

    def saved_files(self) -> Mapping[str, object]:
        return {**super().saved_files(), SETTINGS_FILE: self.settings.to_json()}

    def notes(self) -> Sequence[str]:
        settings, groups = self.settings, dict[str, list[str]]()
        for name in self._used():
            kept = left_as_is(settings.norm_stats[name]["action"], settings.statistics(name).mask.tolist())
            groups.setdefault(kept and f"; dimensions left as they are: {kept}", []).append(name)
        listed = {
            kept: ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} data sets"
            for kept, names in groups.items()
        }
        found = [f"the actions of {names} are normalised by their quantiles{kept}" for kept, names in listed.items()]
        kept = self._kept()
        if kept:
            found.append(
                f"the statistics of {', '.join(kept[:MOST_NAMES])}{', …' if len(kept) > MOST_NAMES else ''} are those "
                "saved with the model, not those of the training rows, which differ: another name of the data set, or "
                "model.action_statistics, changes that; model.unnorm_key confirms it"
            )
        return [*found, *([] if self._representation is None else [self._represented()])]

    def _represented(self) -> str:
        """How actions are represented, by the statistics of the first data set that rows use."""
        key = self._used()[0]
        form = Representation.from_json(self.settings.norm_stats[key].get(REPRESENTATION))
        return described(form, self.settings.action_token_len)

    @property
    def normalizes(self) -> bool:
        """False: actions are normalised by `settings`."""
        return False

    @property
    def representation(self) -> Representation | None:
        if self._representation is None:
            return None
        key = choose_key(self.settings.norm_stats, self.settings.unnorm_key)
        return Representation.from_json(self.settings.norm_stats[key].get(REPRESENTATION))

    def acting_settings(self) -> Mapping[str, object]:
        return {"unnorm_key": self.settings.unnorm_key}

    # -- acting ----------------------------------------------------------------------------------------------------

    def root(self, model: nn.Module) -> ActionRoot:
        return ActionRoot(self, model)

    def check_observation(self, observation: Observation) -> None:
        self.actions.observed(observation)

    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        """The likeliest actions for observations, by the statistics of `actor.model.unnorm_key`."""
        assert isinstance(root, ActionRoot)

        def act(observations: Sequence[Observation]) -> np.ndarray:
            prompts = [self.actions.observed(observation) for observation in observations]
            found = []
            for together in [[prompt] for prompt in prompts] if self.images.one_row else [prompts]:
                inputs = {name: value.to(device) for name, value in self.policy_inputs(together).items()}
                found.append(root.act(inputs, {"do_sample": False}).actions.numpy())
            return np.concatenate(found)

        return act

    def values(self, root: AdapterRoot, device: torch.device) -> Valuation | None:
        """Those of the value head, of the observations alone; None: there is none."""
        if self.settings.value_sizes is None:
            return None
        assert isinstance(root, ActionRoot)

        def value(observations: Sequence[Observation]) -> np.ndarray:
            prompts = [self.actions.observed(observation) for observation in observations]
            found = []
            for together in [[prompt] for prompt in prompts] if self.images.one_row else [prompts]:
                inputs = {name: tensor.to(device) for name, tensor in self.policy_inputs(together).items()}
                with torch.no_grad():
                    found.append(root.value(inputs).float().cpu().numpy())
            return np.concatenate(found)

        return value

    def policy_inputs(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """Prompts as the model's inputs, padded at the left."""
        longest = max(len(prompt.tokens) for prompt in prompts)
        pad: Any = self.tokenizer.pad_token_id
        ids = torch.full((len(prompts), longest), self.actions.end if pad is None else int(pad), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens.astype(np.int64))
            mask[row, longest - len(prompt.tokens) :] = 1
        return {"input_ids": ids, "attention_mask": mask, **self.prompt_inputs(prompts, longest)}

    def act(self, model: nn.Module, *inputs: Any) -> ActionBatch:
        """`predict_action_batch` of the model, with its own attention, from tensors and from arguments by name."""
        tensors, arguments = inputs
        assert isinstance(model, ActionPolicy)
        with self.sharing.unpacked(model):
            predict: Callable[..., ActionBatch] = model.predict_action_batch
            return predict(**tensors, **arguments)

    def value(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`observation_values` of the model, with its own attention."""
        assert isinstance(model, ActionPolicy)
        with self.sharing.unpacked(model):
            values: Callable[..., torch.Tensor] = model.observation_values
            return values(**inputs)


class ActionRoot(LanguageRoot):
    """A root that also computes actions and values."""

    entry_points = (*LanguageRoot.entry_points, "act", "value")

    def __init__(self, adapter: VisionLanguageAction, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._acting = adapter

    def act(self, inputs: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> ActionBatch:
        return self._acting.act(self.model, inputs, arguments)

    def value(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._acting.value(self.model, inputs)
