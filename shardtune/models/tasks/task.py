"""What the tasks by name share: a model of transformers, texts as padded tokens, metrics over whole evaluation sets."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row
from shardtune.data.row_formats import present
from shardtune.data.row_shapes import shown_keys
from shardtune.errors import ConfigError, ModelError
from shardtune.models.adapter import Adapter, AdapterRoot, Losses, named
from shardtune.models.adapter import Evaluation as Evaluated
from shardtune.models.mixed_precision import compute_in
from shardtune.models.pretrained import MODEL_PATH, OVERRIDES, check_vocabulary, load_config
from shardtune.models.tasks.encoder import PADDED, TextEncoder, TextSample, parts_of, require_tokens
from shardtune.models.tasks.half_probe import check_half
from shardtune.models.tasks.metrics import installed
from shardtune.models.tasks.padding_probe import padding_changes
from shardtune.models.tasks.router_notes import router_notes
from shardtune.models.user_metrics import Measure, checked
from shardtune.parallel.fp32_compute import may_be_the_models
from shardtune.parallel.half_products import HALF
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE

TASK_FILE = "task.json"
"""Beside the weights: the task's name, the longest row, and options that the training rows decide, such as labels."""
PARTS = "parts"
"""Beside the tokens of a long row: which text each belongs to, as in `TextSample`."""
ONE_LENGTH = "this model computes a row otherwise where it is padded, so rows of one length share a forward"
PADDED_TEXTS = (
    "this model computes a text otherwise where it is padded, and the texts of a row are padded to one length: the "
    "numbers of a row depend on those beside it, so on the micro-batch"
)
NOT_COMPARED = "whether padding changes a row of this model was not compared, as it computes no shortened row: {}"
OWN_LABELS = "name the labels in their order, actor.model.options: {labels: [bad, good]}"
OWN_SETTINGS: Mapping[str, str] = {
    "id2label": OWN_LABELS,
    "label2id": OWN_LABELS,
    "problem_type": "choose the task by actor.model.model_type: sequence_classifier, which has "
    "options: {multi_label: true}, or regression",
    "pad_token_id": "leave it out, or give a tokenizer with this padding token",
}
"""What to do instead of overriding a setting of the config that a task sets itself."""
Record = Mapping[str, Any]
"""What the metrics of a set and predictions are computed from, of one row."""
Outputs = Mapping[str, torch.Tensor]


class TextTask(Adapter):
    """An adapter of a named task on a model of transformers.

    A subclass has `auto`, `columns`, `encode_text`, `encode_target`, `outputs`, `loss_of`, `records`, `set_metrics` and
    `prediction`. Fields of tokens are padded with -1; `inputs` replaces that by the model's padding token.

    Attributes:
        auto: the class of transformers that makes the model.
        token_fields: the fields that hold token ids.
        row_form: what a row has, for messages.
    """

    auto: ClassVar[Any]
    token_fields: ClassVar[Sequence[str]] = ("input_ids",)
    padding: ClassVar[Mapping[str, float]] = {"input_ids": PADDED, "token_type_ids": 0}
    reads: ClassVar[Sequence[str]] = ("actor.model.config_overrides", "actor.model.attn_implementation")
    row_form: ClassVar[str]

    # The model.

    @cached_property
    def loaded_config(self) -> PreTrainedConfig:
        """The model's config as it is in its directory, with the recipe's overrides."""
        return load_config(self.recipe.actor.model)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config, with what the task sets in it."""
        config = deepcopy(self.loaded_config)
        if "pad_token_id" not in config.to_dict():  # of images, or of several parts
            raise self.not_of_text()
        pad, fixed = self.tokenizer.pad_token_id, config.model_type in OFFSET_POSITIONS or config.is_encoder_decoder
        if config.pad_token_id is None:
            config.pad_token_id = pad if pad is not None else self.tokenizer.eos_token_id
        elif pad is not None and not fixed:  # the token that users' batches have: heads of decoders look for it
            config.pad_token_id = pad
        check_vocabulary(self.tokenizer, config, self.recipe.actor.added_tokens)
        self.configure(config)
        self._check_head(config.num_labels)
        self._check_overrides(config)
        return config

    def not_of_text(self) -> ConfigError:
        """The error for a model that does not read text alone."""
        model = self.recipe.actor.model
        return ConfigError(
            f"{model.model_path} is a {self.loaded_config.model_type} model, which does not read text alone, and the "
            f"rows of this {model.model_type} are texts",
            where=MODEL_PATH,
            remedy="give a model of text",
        )

    def _check_head(self, outputs: int | None) -> None:
        """Refuse a trained head with another number of outputs."""
        loaded, model = self.loaded_config, self.recipe.actor.model
        if self.has_trained_head and loaded.num_labels != outputs:
            raise ConfigError(
                f"{model.model_path} has a head of {loaded.num_labels} outputs, this {model.model_type} has {outputs}",
                where=MODEL_PATH,
                remedy="begin from a model without a head",
            )

    def _check_overrides(self, config: PreTrainedConfig) -> None:
        """Refuse a setting of the recipe in whose place the task sets its own."""
        model = self.recipe.actor.model
        given, used = (json.loads(one.to_json_string(use_diff=False)) for one in (self.loaded_config, config))
        for name in model.config_overrides:
            if name in used and used[name] != given.get(name):
                raise ConfigError(
                    f"{OVERRIDES}.{name} is {given.get(name)!r:.200}, "
                    f"and this {model.model_type} sets {used[name]!r:.200}",
                    where=OVERRIDES,
                    remedy=OWN_SETTINGS.get(name, "leave it out"),
                )

    @property
    def has_trained_head(self) -> bool:
        """Whether training begins from a model with the task's head."""
        heads = [name for name in self.loaded_config.architectures or [] if name.endswith(self.auto_suffix)]
        return bool(heads) and not self.recipe.actor.model.from_scratch

    @property
    def auto_suffix(self) -> str:
        """How the names of the classes of such models end."""
        return self.auto.__name__.removeprefix("AutoModel")

    def refuse_smoothing(self) -> None:
        """Refuse losses of classes, for a task whose rows have no class.

        Raises:
            ConfigError: the recipe asks for one.
        """
        actor = self.recipe.actor
        for key, value in (("actor.label_smoothing", actor.label_smoothing), ("actor.z_loss", actor.z_loss)):
            if value:
                raise ConfigError(
                    f"{key} ({value:g}) is for rows with one class each, and those of this {actor.model.model_type} "
                    "have none or several",
                    where=self.recipe.where(key) or key,
                    remedy="leave it out",
                )

    def configure(self, config: PreTrainedConfig) -> None:
        """Set what the task needs in the model's config."""

    def build(self) -> PreTrainedModel:
        requested = self.recipe.actor.model.attn_implementation
        try:
            return self.auto.from_config(
                self.config,
                dtype=MASTER_DTYPE[self.recipe.actor.model.precision],
                attn_implementation=None if requested == "auto" else requested,
                trust_remote_code=self.recipe.actor.model.trust_remote_code,
                **self.build_arguments(),
            )
        except (ValueError, ImportError, KeyError) as error:
            name = self.recipe.actor.model.model_type
            raise ModelError(
                f"transformers makes no {name} of {self.recipe.actor.model.model_path}: {str(error).splitlines()[0]}",
                where=f"{MODEL_PATH}, actor.model.attn_implementation: {requested}",
                remedy=f"give a model that {self.auto.__name__} takes: its config.json has model_type "
                f"{self.config.model_type!r}",
            ) from error

    def build_arguments(self) -> Mapping[str, Any]:
        """Further arguments of `from_config`."""
        return {}

    @property
    def builds_by_class(self) -> bool:
        return True

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]:
        """What the task puts on a base model: its head, and a pooling layer that not every checkpoint has.

        A class may hand its head to the base model (Perceiver's decoder), which has none by itself.
        """
        assert isinstance(model, PreTrainedModel)
        inside = f"{model.base_model_prefix}."
        new = [name for name in missing if not name.startswith(inside) or ".pooler." in name]
        left = set(missing) - set(new)
        return [*new, *(left - _names_of_base(model, inside) if left else ())]

    def root(self, model: nn.Module) -> TaskRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return TaskRoot(self, model)

    # Rows in a forward.

    _padding_changes: bool | None = None
    _by_length: bool = False

    @property
    def rows_share_forwards(self) -> bool:
        return not self._by_length

    @property
    def rows_of_one_length(self) -> bool:
        return self._by_length

    def probe_assumptions(
        self, root: AdapterRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Check on a real row that padding does not change it; otherwise rows of one length share a forward."""
        notes = super().probe_assumptions(root, samples, device, dtype)
        if self._padding_changes is not None:
            return notes
        assert isinstance(root, TaskRoot)
        with _evaluating(root):
            return [*notes, *self._compare_padded(root, samples, device, dtype)]

    def _compare_padded(
        self, root: TaskRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        batch, notes = self.collate(samples[:1], [0], {}).to(device), list[str]()
        if dtype in HALF:
            check_half(root.model, lambda: root.probed_outputs(batch), samples[0].size)
        try:
            self._padding_changes = self._differs_padded(root, batch, dtype)
        except Exception as error:  # a model's code is third-party and may raise anything
            if not may_be_the_models(error):
                raise
            self._padding_changes = False
            return [*notes, NOT_COMPARED.format(f"{type(error).__name__}: {error}".splitlines()[0])]
        if self._padding_changes:
            self._by_length = all(self._is_one_text(sample) for sample in samples)
            notes.append(ONE_LENGTH if self._by_length else PADDED_TEXTS)
        return notes

    def _differs_padded(self, root: TaskRoot, batch: Batch, dtype: torch.dtype) -> bool:
        beside = {name for field in self.token_fields for name in (field, *self.beside(field))}
        padding = {name: value for name, value in self.padding.items() if name in beside}
        return padding_changes(root.probed_outputs, batch, padding, most=self.max_positions, dtype=dtype)

    def _is_one_text(self, sample: Sample) -> bool:
        """Whether nothing in a row is padded to the length of another text of it."""
        texts = [sample.fields[name] for name in self.token_fields if name in sample.fields]
        return sum(text.size // max(1, text.shape[-1]) for text in texts) == 1

    # Rows.

    @abstractmethod
    def columns(self, row: Row) -> Sequence[str | None]:
        """The columns of a row that are read; None for one that it lacks."""

    def title(self, row: Row) -> str:
        """What is read of rows such as this one, and what is not."""
        self.encode(row)
        read = [name for name in self.columns(row) if name is not None]
        unread = shown_keys(self.unread(row))
        return " + ".join(read) + (f" (not read: {unread})" if unread else "")

    def unread(self, row: Row) -> Sequence[str]:
        """The columns of a row that have a value and are not read."""
        read = self.columns(row)
        return [name for name, value in present(row).items() if value is not None and name not in read]

    def without_part(self, row: Row) -> Sequence[str]:
        """The columns of a row that have a value, are no targets and have no part in its prediction."""
        return self.unread(row)

    @abstractmethod
    def encode_text(self, row: Row) -> dict[str, Any]:
        """The fields of what the model reads."""

    @abstractmethod
    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of what it is to predict.

        Args:
            row: with its target.
            fields: of `encode_text`.
        """

    @abstractmethod
    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `encode_target` for a row without a target, of which there is only a prediction."""

    def encode(self, row: Row) -> Sample:
        fields = self.encode_text(row)
        return self._sample({**fields, **self.encode_target(row, fields)})

    def encode_input(self, row: Row) -> Sample:
        """A row without a target."""
        fields = self.encode_text(row)
        return self._sample({**fields, **self.no_target(row, fields)})

    def _sample(self, fields: Mapping[str, Any]) -> Sample:
        arrays = {name: np.asarray(value) for name, value in fields.items()}
        parts = arrays.pop(PARTS, None)
        return TextSample(fields=arrays, size=self.size_of(arrays), parts=parts)

    def beside(self, name: str) -> Sequence[str]:
        """The fields that have an entry for each token of a field of ids."""
        return ("token_type_ids",) if name == "input_ids" else ()

    def size_of(self, fields: Mapping[str, np.ndarray]) -> int:
        """The tokens of a row, of all its texts."""
        return max(1, sum(int((fields[name] != PADDED).sum()) for name in self.token_fields))

    def tokens(self, *texts: Any, **settings: Any) -> dict[str, Any]:
        """The tokens of a text or of a pair, as the tokenizer ends them, and to which of the two each belongs.

        Of a long row also `PARTS`, by which it is cut; `encode` takes them out of the fields.

        Args:
            texts: one or two.
            settings: of the tokenizer's call.
        """
        batch: Any = [[text] for text in texts]  # of a single pair the tokenizer leaves out an empty second text
        made: Any = self.tokenizer(*batch, verbose=False, return_token_type_ids=True, **settings)
        ids, kinds = made["input_ids"][0], made["token_type_ids"][0]
        require_tokens(ids)
        found = {"input_ids": ids, "token_type_ids": np.array(kinds, np.int8)}
        is_long = len(ids) > min(self.recipe.data.max_length, self.max_positions or len(ids))
        parts = parts_of(self.tokenizer, texts, made) if is_long else None
        return found if parts is None else {**found, PARTS: parts}

    def encoder(self, *, with_prompts: bool) -> TextEncoder:
        _ = self.loaded_config  # without a model there is no tokenizer either, and the message is about the model
        return TextEncoder(self, self.recipe, self._in_memory)

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model has positions for; None: any number, as with rotary or relative ones."""
        return self._positions

    @cached_property
    def _positions(self) -> int | None:
        text = self.config.get_text_config()
        settings = text.to_dict()
        if RELATIVE & settings.keys() or settings.get("position_biased_input") is False:
            return None
        most = settings.get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
        offset = int(self.config.pad_token_id or 0) + 1 if self.config.model_type in OFFSET_POSITIONS else 0
        return most - offset if isinstance(most, int) and most > 0 else None

    def inputs(self, batch: Batch, name: str = "input_ids") -> dict[str, torch.Tensor]:
        """What the model reads: ids with the model's padding token, the mask, and the kinds of tokens."""
        ids = batch[name]
        mask = ids != PADDED
        found = {"input_ids": torch.where(mask, ids, int(self.config.pad_token_id or 0)).long()}
        found["attention_mask"] = mask.long()  # as a tokenizer gives it: some models (XLNet) subtract it from 1
        if name == "input_ids" and "token_type_ids" in self.tokenizer.model_input_names:
            found["token_type_ids"] = batch["token_type_ids"].long()
        return found

    def encoding_settings(self) -> Mapping[str, Any]:
        return {**super().encoding_settings(), **self.found_options()}

    def found_options(self) -> Mapping[str, Any]:
        """Options that the training rows decide where the recipe does not; as they are now."""
        return {}

    def saved_files(self) -> Mapping[str, object]:
        recipe = self.recipe
        described = {
            "model_type": recipe.actor.model.model_type,
            "options": {**recipe.actor.model.options, **self.found_options()},
            "max_length": recipe.data.max_length,
        }
        return {**super().saved_files(), TASK_FILE: described}

    # Loss, metrics, predictions.

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the model gives for a micro-batch: tensors with an entry per row."""

    @abstractmethod
    def loss_of(self, outputs: Outputs, batch: Batch) -> Losses:
        """The loss of the outputs of a micro-batch, as a sum."""

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        return self.loss_of(self.outputs(model, batch), batch)

    @abstractmethod
    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        """For each row of a micro-batch what `set_metrics` and `prediction` need."""

    @abstractmethod
    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """The metrics of a whole evaluation set, from the records of all its rows."""

    @property
    @abstractmethod
    def set_metric_names(self) -> Sequence[str]:
        """The names of `set_metrics`."""

    libraries: ClassVar[Sequence[str]] = ()
    """Those of the extra `tasks` that its metrics need."""

    def notes(self) -> Sequence[str]:
        routers = router_notes(self.config, str(self.recipe.actor.model.model_type))
        absent = [name for name in self.libraries if not installed(name)]
        if not absent or not self.evaluates:
            return [*super().notes(), *routers]
        return [
            *super().notes(),
            *routers,
            f"{', '.join(absent)} is not installed, so evaluation leaves out the metrics that it computes: "
            "pip install 'shardtune[tasks]'",
        ]

    @property
    def evaluates(self) -> bool:
        """Whether the recipe names evaluation rows."""
        data = self.recipe.data
        return data.eval_data_paths is not None or data.eval_split > 0

    @abstractmethod
    def prediction(self, record: Record) -> dict[str, Any]:
        """What the model predicts for a row, as JSON."""

    def predict_rows(self, model: nn.Module, batch: Batch) -> list[object]:
        return [self.prediction(record) for record in self.records(self.predicted_outputs(model, batch), batch)]

    def measured_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """The outputs in evaluation; by default those of training."""
        return self.outputs(model, batch)

    def predicted_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """The outputs of rows without targets."""
        return self.outputs(model, batch)

    def probed_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """The outputs that show whether padding changes a row, with or without a target."""
        return self.outputs(model, batch)


class TaskRoot(AdapterRoot):
    """A root that keeps a record of each row while a set is evaluated.

    Attributes:
        kept: records by the number of the row, while a set is evaluated; None otherwise.
    """

    entry_points = (*AdapterRoot.entry_points, "probed_outputs")

    def __init__(self, task: TextTask, model: nn.Module) -> None:
        super().__init__(task, model)
        self._task = task
        self.kept: dict[int, Record] | None = None

    def evaluate(self, batch: Batch) -> Evaluated:
        outputs = self._task.measured_outputs(self.model, batch)
        losses = named(self._task.loss_of(outputs, batch))
        if not batch.counts:
            return Evaluated({name: LossSum(loss.total * 0.0, 0.0) for name, loss in losses.items()}, {})
        self.keep(outputs, batch)
        measure: Measure | None = self.measure
        further = {} if measure is None else measure(checked(self._task.predictions(self.model, batch)))
        return Evaluated(losses, further)

    def probed_outputs(self, batch: Batch) -> Outputs:
        return self._task.probed_outputs(self.model, batch)

    def keep(self, outputs: Outputs, batch: Batch) -> None:
        """Keep a record of each row, where they are wanted."""
        if self.kept is None or not batch.counts:
            return
        records = self._task.records({name: tensor.detach() for name, tensor in outputs.items()}, batch)
        self.kept |= {row: record for row, record in zip(batch.rows, records, strict=True) if row >= 0}

    @contextmanager
    def keeping(self) -> Iterator[dict[int, Record]]:
        """Keep the records of the rows that are evaluated within a `with` block."""
        self.kept = {}
        try:
            yield self.kept
        finally:
            self.kept = None


def _names_of_base(model: PreTrainedModel, inside: str) -> set[str]:
    """The names of what the class of a model's base makes from the config alone; of another class all of the base."""
    base = model.base_model
    try:
        with init_empty_weights():
            alone = type(base)(deepcopy(base.config))
    except Exception as error:  # the class may take other arguments, and raise anything
        if not may_be_the_models(error):
            raise
        alone = base
    return {f"{inside}{name}" for name in alone.state_dict()}


@contextmanager
def _evaluating(root: TaskRoot) -> Iterator[None]:
    was_training = root.training
    root.eval()
    try:
        yield
    finally:
        root.train(was_training)


RELATIVE = {"rope_parameters", "rope_theta", "rope_scaling"}
"""Settings of models whose positions are no table."""
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text", "longformer")
"""Architectures that count positions from the padding token on."""
