"""Models that generate actions: any generative model of transformers, with the settings of actions in its directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)

from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.distribution import ActionDistribution, ActionEvaluation, warpers
from shardtune.models.action.tokens import (
    STATISTICS_FILE,
    ActionCodec,
    ActionTokens,
    Bins,
    Statistics,
    action_statistics,
    choose_key,
)
from shardtune.models.value_head import ValueHead

SETTINGS = "action_policy"
"""The key of config.json that contains all settings of actions."""
SETTINGS_FILE = "action_policy.json"
"""The same in a run's directory, for its checkpoints, and beside a low-rank adapter."""


DatasetStatistics = Mapping[str, Mapping[str, Any]]
"""Of one data set: the section `action`, and `proprio` where the state was observed, each q01, q99, mask, …"""


@dataclass(frozen=True, slots=True)
class ActionSettings:
    """The settings of actions in a model's directory.

    Attributes:
        action_token_len: dimensions of an action.
        action_chunks_len: actions that are predicted at once.
        num_action_bins: number of action tokens.
        token_top: one more than the highest id of an action token.
        unnorm_key: the dataset whose statistics are the default; None: there is only one.
        norm_stats: of all datasets, as `dataset_statistics.json` has them.
        prompt: the text before the action tokens, with `{instruction}` (and `{state}`); None: the processor's chat
            template, or OpenVLA's prompt where it has none.
        state: text: the discretised proprioception is part of the prompt; none: it is left out.
        value_sizes: the widths of the value head's layers; None: the model has no value head.
        cameras: the names of the training cameras, in order; None: unknown, or not the same in all data sets.
    """

    action_token_len: int
    token_top: int
    norm_stats: Mapping[str, DatasetStatistics] = field(default_factory=dict)
    action_chunks_len: int = 1
    num_action_bins: int = 256
    unnorm_key: str | None = None
    prompt: str | None = None
    state: str = "none"
    value_sizes: tuple[int, ...] | None = None
    cameras: tuple[str, ...] | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ActionSettings:
        """Of a model's config.

        Raises:
            ModelError: the model has no settings of actions.
        """
        found = config.to_dict().get(SETTINGS)
        if not isinstance(found, Mapping):
            raise ModelError(
                f"the model of type {config.model_type!r} has no settings of actions",
                where=f"config.json: {SETTINGS}",
                remedy="train it with actor.model.model_type: vision_language_action, or give the settings",
            )
        return cls.from_json(found, where=f"config.json: {SETTINGS}")

    @classmethod
    def from_json(cls, found: Mapping[str, Any], *, where: str) -> ActionSettings:
        """The settings that `to_json` gives.

        Raises:
            ModelError: there are unknown ones.
        """
        try:
            settings = cls(**found)
        except TypeError as error:
            raise ModelError(f"the settings of actions cannot be used: {error}", where=where) from error
        sizes, cameras = settings.value_sizes, settings.cameras
        return replace(
            settings,
            value_sizes=None if sizes is None else tuple(sizes),
            cameras=None if cameras is None else tuple(cameras),
        )

    def save_statistics(self, folder: Path) -> None:
        """Write `dataset_statistics.json`."""
        (folder / STATISTICS_FILE).write_text(json.dumps(self.norm_stats, indent=2), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """As they stand in a model's config, and in a run's directory."""
        return asdict(self)

    def write_to(self, config: PreTrainedConfig) -> None:
        """Put them into a model's config, from where `save_pretrained` writes them."""
        setattr(config, SETTINGS, self.to_json())

    @property
    def tokens(self) -> ActionTokens:
        return ActionTokens(self.token_top, Bins(self.num_action_bins))

    @property
    def length(self) -> int:
        """Tokens of a chunk."""
        return self.action_token_len * self.action_chunks_len

    def statistics(self, unnorm_key: str | None = None) -> Statistics:
        """Of the actions of a dataset; None: of the settings' own."""
        return action_statistics(self.norm_stats, unnorm_key or self.unnorm_key, self.action_token_len)

    def codec(self, unnorm_key: str | None = None) -> ActionCodec:
        """Actions of a dataset to tokens and back; None: of the settings' own."""
        return ActionCodec(self.tokens, self.statistics(unnorm_key), self.action_chunks_len)


class ActionBatch(NamedTuple):
    """The output of a policy; unpacks as (actions, sequences, logits, values).

    Attributes:
        actions: float32 [rows, steps, dimensions], in the units of the dataset.
        sequences: int64 [rows, prompt + steps * dimensions]: prompts and action tokens.
        logits: [rows, steps * dimensions, vocabulary], the model's output; tokens are drawn from a part of it
            (`ActionPolicy.action_distribution`).
        values: [rows, steps * dimensions, 1]: at each token the return that the value head expects before it is drawn,
            the first from the observation alone; zeros where the model has no value head.
    """

    actions: torch.Tensor
    sequences: torch.Tensor
    logits: torch.Tensor
    values: torch.Tensor


class ActionLogits(LogitsProcessor):
    """Masks all tokens but those of actions.

    Args:
        tokens: the action tokens.
    """

    def __init__(self, tokens: ActionTokens) -> None:
        self._ids = slice(tokens.first, tokens.top)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self._ids] = scores[:, self._ids]
        return allowed


class RowDraws(LogitsProcessor):
    """Makes the likeliest token a draw from the softmax (Gumbel-max), with a separate generator for each row.

    So the draw for a row depends on its seed and its logits alone, not on the other rows of the batch.

    Args:
        seeds: of the rows.
        tokens: the tokens to draw from.
    """

    def __init__(self, seeds: Sequence[int], tokens: ActionTokens) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._ids = slice(tokens.first, tokens.top)
        self._count = tokens.bins.count

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.stack(
            [torch.rand(self._count, generator=each, dtype=torch.float64) for each in self._generators]
        )
        noise = -torch.log(-torch.log(uniform.clamp_min(1e-300)))
        drawn = scores.clone()
        drawn[:, self._ids] = scores[:, self._ids] + noise.to(scores)
        return drawn


if TYPE_CHECKING:

    class _Generates(PreTrainedModel, GenerationMixin):
        """The base class that the mixin precedes."""
else:
    _Generates = object


class ActionPolicy(_Generates):
    """A mixin before any class of transformers that generates: `class A(ActionPolicy, LlavaForConditionalGeneration)`.

    The settings of actions are in its config (`ActionSettings.write_to`), and so are saved by `save_pretrained`
    and `from_pretrained`.

    Attributes:
        value_head: if the settings have one, else None.
    """

    value_head: ValueHead | None

    def __init__(self, config: PreTrainedConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        sizes = self.action_settings.value_sizes
        self.value_head = None if sizes is None else ValueHead(config.get_text_config().hidden_size, sizes)

    @property
    def action_settings(self) -> ActionSettings:
        return ActionSettings.of(self.config)

    def settings_for(self, unnorm_key: str | None) -> ActionSettings:
        """The settings for a data set."""
        return self.action_settings

    def get_action_stats(self, unnorm_key: str | None = None) -> dict[str, object]:
        """The statistics of a dataset's actions, as stored beside the weights: q01, q99, mask, …

        Args:
            unnorm_key: the dataset; None: the one of the settings, or the only one.

        Raises:
            ConfigError: there is no such dataset; lists those there are.
        """
        settings = self.settings_for(unnorm_key)
        return dict(settings.norm_stats[choose_key(settings.norm_stats, unnorm_key or settings.unnorm_key)]["action"])

    def decode_actions(self, ids: torch.Tensor, unnorm_key: str | None = None) -> torch.Tensor:
        """Token ids [rows, steps * dimensions] to actions float32 [rows, steps, dimensions] in the dataset's units."""
        return torch.from_numpy(self.settings_for(unnorm_key).codec(unnorm_key).decode(ids.cpu().numpy()))

    def complete_prompts(self, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts [rows, prompt] and their mask with the tokens the model needs after them; here unchanged."""
        return input_ids, mask

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        do_sample: bool = True,
        *,
        unnorm_key: str | None = None,
        seeds: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Generate exactly one chunk of actions for each row.

        Args:
            input_ids: int64 [rows, prompt], padded at the left.
            attention_mask: int64 [rows, prompt], 0 where padded.
            pixel_values: as the model's processor gives them.
            do_sample: draw tokens; otherwise the likeliest.
            unnorm_key: the dataset whose statistics apply; None: the one of the settings.
            seeds: one for each row: the draws for a row then depend on it and not on other rows.
            **kwargs: further inputs of the model (image_grid_thw, …) and arguments of `generate` (temperature, …).

        Raises:
            ConfigError: seeds for another number of rows, or without sampling.
        """
        settings = self.settings_for(unnorm_key)
        settings.statistics(unnorm_key)  # known before anything is computed
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        input_ids, mask = self.complete_prompts(input_ids, mask)
        generate: Any = cast(Any, self).generate
        generated = generate(
            input_ids=input_ids,
            attention_mask=mask,
            **({} if pixel_values is None else {"pixel_values": pixel_values}),
            **_drawing(settings, len(input_ids), do_sample, seeds, kwargs),
            output_logits=True,
            output_hidden_states=self.value_head is not None,
            return_dict_in_generate=True,
            **kwargs,
        )
        logits = torch.stack(generated.logits, dim=1)
        values = torch.zeros_like(logits[..., :1])
        if self.value_head is not None:
            values = self.value_head(generated.hidden_states)
        actions = self.decode_actions(generated.sequences[:, -settings.length :], unnorm_key)
        return ActionBatch(actions, generated.sequences, logits, values)

    def observation_values(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The values [rows] of observations, with a graph, in one forward: the first of those of each row's actions.

        Args:
            input_ids, attention_mask, pixel_values, kwargs: prompts and further inputs, as for `predict_action_batch`.

        Raises:
            ModelError: the model has no value head.
        """
        if self.value_head is None:
            raise ModelError(
                f"{type(self).__name__} has no value head",
                where=f"config.json: {SETTINGS}.value_sizes",
                remedy="train one with actor.model.add_value_head: true",
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ids, mask, further = self._continued(input_ids, mask, input_ids[:, :0], kwargs)
        images = {} if pixel_values is None else {"pixel_values": pixel_values}
        found = cast(Any, self)(input_ids=ids, attention_mask=mask, **images, **further, output_hidden_states=True)
        return self.value_head(found.hidden_states[-1][:, -1:])[:, 0, 0]

    def _continued(
        self, input_ids: torch.Tensor, mask: torch.Tensor, action_ids: torch.Tensor, others: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Prompts, mask and further inputs, each continued with actions."""
        prompt = input_ids.shape[1]
        completed, mask = self.complete_prompts(input_ids, mask)
        added = completed.shape[1] - prompt + action_ids.shape[1]
        continued = {
            name: nn.functional.pad(value, (0, added)) if _is_per_token(value, len(input_ids), prompt) else value
            for name, value in others.items()
        }
        ids = torch.cat([completed, action_ids.to(completed)], dim=1)
        return ids, torch.cat([mask, torch.ones_like(action_ids).to(mask)], dim=1), continued

    def action_distribution(self, logits: torch.Tensor, **sampling: Any) -> ActionDistribution:
        """The distribution that `predict_action_batch` draws from.

        Args:
            logits: [..., vocabulary], as in `ActionBatch`.
            **sampling: temperature, top_k, top_p, as given there.
        """
        return ActionDistribution(logits, self.action_settings.tokens, **sampling)

    def evaluate_actions(
        self,
        input_ids: torch.Tensor,
        action_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        **kwargs: Any,
    ) -> ActionEvaluation:
        """Log-probabilities, entropy and values of given actions, with a graph, in one forward.

        With the same sampling settings they are those of the distribution that `predict_action_batch` draws from.

        Args:
            input_ids: prompts int64 [rows, prompt], padded at the left, as for `predict_action_batch`.
            action_ids: int64 [rows, steps * dimensions], such as `ActionBatch.sequences[:, -steps * dimensions:]`.
            attention_mask: int64 [rows, prompt], 0 where padded.
            pixel_values: as the model's processor gives them.
            temperature, top_k, top_p: of the sampling.
            **kwargs: further inputs of the model; those per token (int [rows, prompt], such as mm_token_type_ids) are
                continued with 0.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ids, mask, continued = self._continued(input_ids, mask, action_ids, kwargs)
        found = cast(Any, self)(
            input_ids=ids,
            attention_mask=mask,
            **({} if pixel_values is None else {"pixel_values": pixel_values}),
            **continued,
            output_hidden_states=self.value_head is not None,
        )
        steps = slice(-action_ids.shape[1] - 1, -1)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        distribution = self.action_distribution(found.logits[:, steps], **sampling)
        log_probs = distribution.log_prob(action_ids)
        values = torch.zeros_like(log_probs)[..., None]
        if self.value_head is not None:
            values = self.value_head(found.hidden_states[-1][:, steps])
        return ActionEvaluation(log_probs, distribution.entropy(), values)


def _is_per_token(value: object, rows: int, prompt: int) -> bool:
    """Whether an input of the model has one number for each token of the prompts."""
    return isinstance(value, torch.Tensor) and value.shape == (rows, prompt) and not value.is_floating_point()


def _drawing(
    settings: ActionSettings, rows: int, do_sample: bool, seeds: Sequence[int] | None, given: dict[str, Any]
) -> dict[str, object]:
    """The arguments of `generate` for the number of tokens and the sampling; removes those it uses from `given`."""
    processors = LogitsProcessorList([*given.pop("logits_processor", ()), ActionLogits(settings.tokens)])
    fixed = {"max_new_tokens": settings.length, "min_new_tokens": settings.length}
    if not do_sample or seeds is not None:
        form: dict[str, object] = {"do_sample": False}
        if seeds is not None:
            _check_seeds(seeds, rows, do_sample)
            processors += warpers(*(given.pop(name, None) for name in ("temperature", "top_k", "top_p")))
            processors.append(RowDraws(seeds, settings.tokens))
        # Sampling settings that a model's generation_config.json may have, and that do not apply.
        form |= {"temperature": None, "top_p": None, "top_k": None}
        for name in form.keys() & given.keys():
            given.pop(name)
    else:
        form = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        form |= {name: given.pop(name) for name in form.keys() & given.keys()}
    pad = {"pad_token_id": given.pop("pad_token_id", settings.tokens.first)}  # no row ends before the others
    return {**fixed, **form, **pad, "logits_processor": processors}


def _check_seeds(seeds: Sequence[int], rows: int, do_sample: bool) -> None:
    if not do_sample or len(seeds) != rows:
        raise ConfigError(
            f"{len(seeds)} seeds for {rows} rows" if do_sample else "seeds have no effect with do_sample=False",
            where="predict_action_batch",
            remedy="give one seed for each row, with do_sample=True",
        )


@cache
def action_class(base: type[PreTrainedModel]) -> type[Any]:
    """A model class with actions: derives from `ActionPolicy` and `base`, under the name of `base`.

    `save_pretrained` writes that name, so that plain transformers loads the directory as the base class.
    """
    if issubclass(base, ActionPolicy):
        return base
    return type(base.__name__, (ActionPolicy, base), {"__module__": base.__module__, "__doc__": base.__doc__})
