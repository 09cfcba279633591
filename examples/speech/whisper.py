"""Speech to text by Whisper (Radford et al., 2022, arXiv:2212.04356): an adapter over transformers' own model.

A row names a WAV file in `audio_folder`, and its text: {"audio": "a.wav", "text": "three one"}. The sound may also be
in the row, as data sets have it: {"bytes": a WAV file, "path": …} or {"array": samples, "sampling_rate": 16000}. One
that is empty, of another rate, or longer than the model hears is an error of its row; so is a text that is longer than
the model writes. The cache of encoded rows is made again where a WAV file of the folder has changed.

The feature extractor and the tokenizer are those of `model.model_path`; `final/` is a directory that
`WhisperForConditionalGeneration.from_pretrained` loads. The loss is summed over the tokens of the texts. Evaluation
writes down what it hears and adds up the edits (words put in, left out, or exchanged), so that the word error rate is
that of the whole set.

A multilingual Whisper begins each text with marks of its language and task, which are trained, generated and kept in
the tokenizer of `final/`: `options.language` ("german" or "de") and `options.task` choose them.
"""

import hashlib
import io
import wave
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import BaseModel
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    GenerationConfig,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from shardtune import Adapter, LossSum, Sample
from shardtune.errors import ConfigError


class Options(BaseModel):
    audio_folder: str  # the files that rows name are relative to it
    max_length: int = 64  # tokens of a text, its marks included
    language: str | None = None  # of the texts, for a multilingual model
    task: Literal["transcribe", "translate"] = "transcribe"  # translate: the texts are English


class Whisper(Adapter):
    Options = Options
    padding = {"labels": -100}
    unit_classes = ("WhisperEncoderLayer", "WhisperDecoderLayer")

    @cached_property
    def config(self):
        return AutoConfig.from_pretrained(self.recipe.actor.model.model_path)

    @cached_property
    def extractor(self):
        return AutoFeatureExtractor.from_pretrained(self.recipe.actor.model.model_path)

    @cached_property
    def tokenizer(self):
        tokenizer, language, folder = super().tokenizer, self.options.language, self.recipe.actor.model.model_path
        has_marks = self._is_multilingual
        if has_marks is not None and has_marks != (language is not None):
            raise ConfigError(
                f"{folder} is {'a' if has_marks else 'no'} multilingual Whisper",
                where=f"model.options.language: {language}",
                remedy="name the language of the texts, such as english" if has_marks else "leave it out",
            )
        if language is not None:
            if not isinstance(tokenizer, WhisperTokenizer):
                raise ConfigError(
                    f"{folder} has no tokenizer of Whisper, in which languages have marks",
                    where=f"model.options.language: {language}",
                    remedy="leave it out",
                )
            try:
                tokenizer.set_prefix_tokens(language=language, task=self.options.task)
            except ValueError as error:
                raise ConfigError(str(error), where="model.options.language") from error
        return tokenizer

    @property
    def _is_multilingual(self):
        """None where the directory does not say."""
        try:
            settings = GenerationConfig.from_pretrained(self.recipe.actor.model.model_path)
        except OSError:  # without generation_config.json
            return None
        return settings.to_dict().get("is_multilingual")

    def build(self):
        return WhisperForConditionalGeneration(self.config)

    def encoding_settings(self):
        return {"sounds": self._sounds, "marks": self.tokenizer("")["input_ids"]}

    @cached_property
    def _sounds(self):
        """Names, sizes and times of change of the WAV files."""
        found = sorted(path for path in Path(self.options.audio_folder).rglob("*") if path.suffix.lower() == ".wav")
        facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]
        return hashlib.blake2b(repr(facts).encode(), digest_size=20).hexdigest()

    def encode(self, row):
        rate = self.extractor.sampling_rate
        sound = read_sound(row["audio"], Path(self.options.audio_folder), rate)
        if len(sound) > self.extractor.n_samples:
            seconds, most = len(sound) / rate, self.extractor.n_samples / rate
            raise ValueError(f"audio is {seconds:.1f} s long, and the model hears {most:g} s: cut it, with its text")
        heard = self.extractor(sound, sampling_rate=rate, return_tensors="np").input_features[0]
        labels = self._labels(row["text"])
        return Sample(fields={"heard": heard.astype(np.float32), "labels": labels}, size=heard.shape[1] + len(labels))

    def _labels(self, text):
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r:.40}, no text")
        labels = np.asarray(self.tokenizer(text)["input_ids"], dtype=np.int64)
        if labels[:1] == self.config.decoder_start_token_id:
            labels = labels[1:]  # the model puts it before them
        if len(labels) > self.config.max_target_positions:
            raise ValueError(
                f"text has {len(labels)} tokens, and the model writes {self.config.max_target_positions}: cut it, with "
                "its audio"
            )
        return labels

    def _logits(self, model, batch):
        return model(input_features=batch["heard"], labels=batch["labels"], use_cache=False).logits

    def loss(self, model, batch):
        logits, labels = self._logits(model, batch), batch["labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return LossSum(total, int((labels != -100).sum()))

    def metrics(self, model, batch):
        together = dist.is_initialized() and dist.get_world_size() > 1  # ranks then write equally long
        language = self.options.language
        marks = {} if language is None else {"language": language, "task": self.options.task}
        written = model.generate(batch["heard"], max_length=self.options.max_length, synced_gpus=together, **marks)
        edits = words = 0
        for tokens, labels in zip(written, batch["labels"], strict=True):
            wanted, found = (self._words(ids) for ids in (labels[labels != -100], tokens))
            edits, words = edits + distance(wanted, found), words + len(wanted)
        return {"word_error_rate": (edits, words)}

    def _words(self, ids: torch.Tensor) -> list[str]:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).split()


def read_sound(sound: object, folder: Path, rate: int) -> np.ndarray:
    """What a row has as `audio`, float32 [samples] from -1 to 1; the mean of its channels."""
    if isinstance(sound, Mapping) and sound.get("array") is not None:
        values, found = np.asarray(sound["array"]), sound.get("sampling_rate")
        if found != rate or values.ndim != 1 or (values.dtype.kind != "f" and len(values)):
            shape = f"{found} Hz and {values.dtype} {list(values.shape)}"
            raise ValueError(f"audio has {shape}: it is made of {rate} Hz and fractions [samples] from -1 to 1")
        samples = values.astype(np.float32)
    elif isinstance(sound, Mapping) and sound.get("bytes") is not None:
        samples = read_wav(io.BytesIO(sound["bytes"]), sound.get("path") or "audio", rate)
    else:
        name = sound.get("path") if isinstance(sound, Mapping) else sound
        if not isinstance(name, str):
            raise ValueError(
                f"audio is {sound!r:.60}: it is a file's name, {{bytes, path}} or {{array, sampling_rate}}"
            )
        file = folder / name
        if file.suffix.lower() != ".wav" or not file.is_file():
            raise ValueError(f"there is no WAV file {file.absolute()} (audio_folder: {folder})")
        samples = read_wav(str(file), str(file), rate)
    if not len(samples) or not np.isfinite(samples).all():
        raise ValueError("audio is empty" if not len(samples) else "audio has values that are no numbers")
    return samples


def read_wav(source: str | io.BytesIO, name: str, rate: int) -> np.ndarray:
    """The samples of a WAV file of 16 bits."""
    try:
        with wave.open(source, "rb") as file:
            found, bits = file.getframerate(), 8 * file.getsampwidth()
            values, channels, count = file.readframes(file.getnframes()), file.getnchannels(), file.getnframes()
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{name} is no WAV file of 16 bits: {str(error) or 'it ends too early'}") from error
    if (found, bits) != (rate, 16):
        raise ValueError(f"{name} has {found} Hz and {bits} bits, not {rate} and 16")
    if len(values) != 2 * channels * count:
        raise ValueError(f"{name} ends too early: {len(values)} bytes of {2 * channels * count}")
    return np.frombuffer(values, "<i2").reshape(-1, channels).mean(1, dtype=np.float32) / 32768


def distance(wanted: list[str], found: list[str]) -> int:
    """The least number of words to put in, leave out or exchange (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for number, word in enumerate(wanted, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(found, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]
