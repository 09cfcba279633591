"""Rows of robot data to tokens: a prompt with images, the tokens of a chunk of actions, and an end token."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np
from PIL import Image

from shardtune.batch import Prompt, Sample
from shardtune.config import ValueHeadConfig
from shardtune.data.encoder import FrameOptions, Row, RowDropped, RowError, TooLong
from shardtune.data.images.chat_encoder import IMAGE_MARK, IMAGE_STOP, ImageChatEncoder
from shardtune.data.images.images import ImageKind, StoredImage, read_image, to_fields
from shardtune.data.images.placeholders import ImageText
from shardtune.data.robot.representation import Representation
from shardtune.data.robot.returns import RETURN, return_of, with_returns
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.action.action_mask import TOLERANCE, dimension_name
from shardtune.models.action.environment import Observation
from shardtune.models.action.openvla import PROMPT
from shardtune.models.action.policy import ActionSettings
from shardtune.models.action.tokens import (
    CHOOSE,
    STATISTICS_FILE,
    UNNORM_KEY,
    ActionCodec,
    Bins,
    require_finite,
    state_statistics,
)
from shardtune.models.value_loss import VALUE

ACTIONS, PADDED, DATASET = "actions", "action_is_pad", "action_dataset"
"""Fields of a sample: float32 [steps, dimensions] in real units; bool [steps], after the episode's end; the number of
the data set among those with statistics."""
QUESTION = "What action should the robot take to {instruction}?"
WITH_STATE = " State: {state}."
PROMPT_KEY = "actor.model.action_prompt"
ENCODING_VERSION = 1


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The form of a prompt.

    Attributes:
        text: with `{instruction}`, and `{state}` if it includes the state; None: a question in the chat template.
        ending: tokens after it.
        lower: whether the instruction is lower-cased.
    """

    text: str | None = None
    ending: tuple[int, ...] = ()
    lower: bool = False


class ActionEncoder(ImageChatEncoder):
    """Encodes a frame of robot data: prompt, action tokens, end of turn. Targets are the tokens of actions that the
    episode still has, and the end.

    Args:
        images: applies the model's processor.
        template: the Jinja text of the chat template; None: prompts are plain text.
        settings: of actions.
        form: of prompts.
        representation: of the actions in rows; None: they are absolute.
        max_length: tokens of a row at most; a longer one is never cut.
        on_too_long: drop | fail; truncate counts as drop, and split is refused.
        values: of the value head that is trained on the rows' returns; None: there is none.
        template_kwargs: values for the template.
    """

    def __init__(
        self,
        images: ImageText,
        template: str | None,
        settings: ActionSettings,
        form: PromptForm,
        *,
        representation: Representation | None = None,
        max_length: int = 2048,
        on_too_long: TooLong = "truncate",
        values: ValueHeadConfig | None = None,
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            images,
            template if form.text is None else None,
            max_length=max_length,
            on_too_long=on_too_long,
            template_kwargs=template_kwargs,
        )
        self.settings = settings
        self.form = form
        self._representation = representation
        self.values = values
        self._names = list(settings.norm_stats)
        self._codecs: dict[str, ActionCodec] = {}
        if form.text is not None:
            check_prompt(form.text, with_state=settings.state == "text")

    @property
    def frames(self) -> FrameOptions:
        """One row per frame, with the actions of a chunk."""
        frames = FrameOptions(self.settings.action_chunks_len, representation=self._representation)
        return with_returns(frames, self.values)

    @property
    def title(self) -> Callable[[Row], str]:
        return _title if self.values is None else _valued_title

    def weights(self, sample: Sample) -> Mapping[str, float]:
        found = super().weights(sample)
        return found if self.values is None else {**found, VALUE: sample.target_weight}

    def cache_key(self) -> str:
        settings = {**asdict(self.settings), "value_sizes": None}
        parts = [super().cache_key(), json.dumps([settings, asdict(self.form)], sort_keys=True), str(ENCODING_VERSION)]
        parts += [] if self.values is None else [RETURN]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()

    def encode(self, row: Row) -> Sample:
        key = self._key(str(row["dataset"]))
        codec = self._codec(key)
        if not str(row["instruction"]).strip():
            raise RowError(
                "the instruction is empty (data.columns: {instruction: …} names its column, and data.transform may "
                "give one)"
            )
        actions = _finite(row["actions"], "actions")
        ids = codec.encode(actions).astype(np.int32)
        clipped = codec.statistics.outside(actions, TOLERANCE)
        if clipped is not None:
            raise self._clipped(row, key, clipped)
        shown, known = tuple(sorted(row["images"])), self.settings.cameras
        if known is not None and shown != known:
            raise RowError(f"it shows {_listed(shown)}, the first frame of the training data {_listed(known)}")
        images = [read_image(row["images"][camera], self._folder) for camera in shown]
        prompt, stop = self._prompt(self._named(str(row["instruction"]), row["state"], key), images)
        padded = np.asarray(row["action_is_pad"], dtype=bool)
        weights = np.concatenate(
            [np.zeros(len(prompt)), np.repeat(~padded, codec.statistics.dimensions), np.ones(1)], dtype=np.float32
        )
        fields = {
            **to_fields(images, len(images)),
            IMAGE_STOP: np.array(stop, np.int32),
            ACTIONS: np.asarray(row["actions"], np.float32),
            PADDED: padded,
            DATASET: np.array(self._names.index(key), np.int32),
        }
        if self.values is not None:
            fields[RETURN] = np.array(return_of(row), np.float32)
        return Sample(np.concatenate([prompt, ids, [self.end]], dtype=np.int32), weights, fields=fields)

    def fit(self, sample: Sample) -> Sample | list[Sample]:
        if sample.length <= self.limit.max_length or self.limit.on_too_long in ("fail", "split"):
            return super().fit(sample)
        raise RowDropped(f"{sample.length:,} tokens: no action is cut")

    @property
    def end(self) -> int:
        """The token after a chunk's last action.

        Raises:
            DataError: the tokenizer has none.
        """
        stops = self.stop_token_ids
        if not stops:
            raise DataError(
                "the tokenizer has no end-of-sequence token",
                where="actor.tokenizer.tokenizer_model",
                remedy="give the tokenizer an eos_token (tokenizer_config.json)",
            )
        return stops[0]

    def observed(self, observation: Observation, unnorm_key: str | None = None) -> Prompt:
        """The prompt of a policy for an observation.

        Args:
            observation: images of the cameras of the training data, instruction, state.
            unnorm_key: the data set whose statistics apply to the state.

        Raises:
            ConfigError: it shows other cameras, or has no instruction.
            ModelError: it has no state that can be used, and prompts have one.
        """
        shown, known = tuple(sorted(observation["images"])), self.settings.cameras
        if known is not None and shown != known:
            raise _other_cameras(shown, known)
        if not observation["instruction"].strip():
            raise ConfigError(
                "the observation has no instruction, and that of no training row is empty",
                where="observation['instruction']",
                remedy="give the task in words, as the training data do",
            )
        images = [as_stored(observation["images"][camera]) for camera in shown]
        key = self._key(unnorm_key or self.settings.unnorm_key or "")
        with _unfit("state", "give the state of the training data, all of its numbers"):
            named = self._named(observation["instruction"], observation["state"], key)
        part = "instruction" if self.images.image_token in observation["instruction"] else "images"
        with _unfit(part, "observations are to be like the training data"):
            tokens, _ = self._prompt(named, images)
        return Prompt(tokens, to_fields(images, len(images)))

    def _clipped(self, row: Row, key: str, number: int) -> DataError:
        """The error for a value that is not normalised and lies outside of the bins; no fault of the row."""
        worst = float(np.abs(np.asarray(row["actions"])[:, number]).max())
        name = dimension_name(self.settings.norm_stats[key]["action"], number)
        return DataError(
            f"dimension {name} of an action has the magnitude {worst:g}, and the statistics of {key} leave it as it is "
            "(mask: false): it would be clipped to [-1, 1]",
            where=f"{STATISTICS_FILE}: {key}.action.mask",
            remedy=f"normalise it (model.action_normalization_mask: {{{number}: true}}), or scale it by data.transform",
        )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _key(self, dataset: str) -> str:
        """The key of the statistics for rows of a data set."""
        chosen = self.settings.unnorm_key
        if chosen is not None:
            return chosen
        if dataset in self.settings.norm_stats:
            return dataset
        if len(self._names) == 1:
            return self._names[0]
        lacking = f"there are no action statistics of {dataset!r}" if dataset else "unnorm_key is not given"
        raise DataError(
            f"{lacking}; there are statistics of {', '.join(self._names)}",
            where=UNNORM_KEY,
            remedy=CHOOSE,
        )

    def _codec(self, key: str) -> ActionCodec:
        if key not in self._codecs:
            self._codecs[key] = self.settings.codec(key)
        return self._codecs[key]

    def _named(self, instruction: str, state: np.ndarray | None, key: str) -> dict[str, str]:
        """The texts for the places of a prompt."""
        named = {"instruction": instruction.lower() if self.form.lower else instruction}
        if self.settings.state == "text":
            named["state"] = self._state(state, key)
        return named

    def _prompt(self, named: Mapping[str, str], images: Sequence[StoredImage]) -> tuple[np.ndarray, int]:
        """Tokens int32 [length] up to the first action, and where the last image ends in them."""
        marks = IMAGE_MARK * len(images)
        if self.template is None:
            filled = marks + _filled(self.form.text or PROMPT, named)
            text = filled.replace(IMAGE_MARK, self.images.image_token)
        else:
            question = marks + _filled(QUESTION + (WITH_STATE if "state" in named else ""), named)
            text = self.template.render([{"role": "user", "content": question}], None, prompt=True)
        expanded = self.images.expand(text, [image.size for image in images])
        ids, starts, _ = self._tokens(expanded.text)
        stop = int(np.searchsorted(starts, expanded.images[-1][1])) if images else 0
        if self.template is None:
            opened = self._opened(ids)
            stop, ids = stop + len(opened) - len(ids), opened
        return np.concatenate([ids, np.array(self.form.ending, np.int32)]), stop

    def _state(self, state: np.ndarray | None, key: str) -> str:
        """The state's values as the numbers of their bins, from 0."""
        if state is None:
            raise RowError("there is no state, and actor.model.action_state is text")
        statistics = state_statistics(self.settings.norm_stats, key)
        values = _finite(state, "state")
        if values.shape != (statistics.dimensions,):
            raise RowError(f"the state is {values.tolist()!r:.60}, its statistics have {statistics.dimensions} numbers")
        normalised = statistics.normalise(values)
        numbers = Bins(self.settings.num_action_bins).encode(normalised) - 1
        return " ".join(map(str, numbers.tolist()))


@contextmanager
def _unfit(part: str, remedy: str) -> Iterator[None]:
    """Faults of a part of an observation."""
    try:
        yield
    except RowError as error:
        raise ModelError(
            f"the model cannot act on the observation: {error.reason}", where=f"observation['{part}']", remedy=remedy
        ) from error


def _finite(values: object, name: str) -> np.ndarray:
    """Numbers of a row; other faults than these are not the row's but the statistics'. Raises `RowError`."""
    found = np.asarray(values)
    try:
        require_finite(found, name)
    except DataError as error:
        raise RowError(error.what) from error
    return found


def check_prompt(text: str, *, with_state: bool) -> None:
    """Refuse a prompt that has no place for the instruction, or for the state where there has to be one.

    Raises:
        ConfigError: a place is missing, or there is one for a state that is not used.
    """
    places = {"{instruction}": True, "{state}": with_state}
    for place, required in places.items():
        if (place in text) != required:
            raise ConfigError(
                f"{PROMPT_KEY}: {text!r} has {'no' if required else 'a'} place for {place}",
                where=PROMPT_KEY,
                remedy="write {instruction}, and {state} with actor.model.action_state: text alone",
            )


def _other_cameras(shown: Sequence[str], known: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the observation shows {_listed(shown)}, the model was trained with {_listed(known)}",
        where="observation['images']",
        remedy="name its cameras, those of an environment too, as the training data do, and show all of them",
    )


def _listed(cameras: Sequence[str]) -> str:
    return ", ".join(cameras) or "no camera"


def as_stored(pixels: np.ndarray) -> StoredImage:
    """An image in memory, uint8 [height, width, 3], in the form of a row's images."""
    sink = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(sink, "PNG", compress_level=1)
    height, width = pixels.shape[:2]
    return StoredImage(ImageKind.ENCODED, sink.getvalue(), (width, height))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """A prompt with its places filled; other braces are unchanged."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _title(row: Row) -> str:
    steps, dimensions = np.asarray(row["actions"]).shape
    cameras = ", ".join(sorted(row["images"])) or "none"
    return f"frames with {steps} actions of {dimensions} dimensions, cameras: {cameras}"


def _valued_title(row: Row) -> str:
    return_of(row)
    return f"{_title(row)}, with returns"
