"""Speech to text by Whisper (Radford et al., 2022, arXiv:2212.04356): an adapter over transformers' own model.

A row names a WAV file, beside the file of rows, and its text: {"audio": "a.wav", "text": "three one"}. The feature
extractor and the tokenizer are those of `model.model_path`; `final/` is a directory that
`WhisperForConditionalGeneration.from_pretrained` loads. The loss is summed over the tokens of the texts. Evaluation
writes down what it hears and adds up the edits (words put in, left out, or exchanged), so that the word error rate is
that of the whole set.
"""

import wave
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import BaseModel
from transformers import AutoConfig, AutoFeatureExtractor, WhisperForConditionalGeneration

from shardtune import Adapter, LossSum, Sample


class Options(BaseModel):
    audio_folder: str  # the files that rows name are relative to it
    max_length: int = 64  # tokens of a text, its marks included


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

    def build(self):
        return WhisperForConditionalGeneration(self.config)

    def encode(self, row):
        sound = read_wav(Path(self.options.audio_folder) / row["audio"], self.extractor.sampling_rate)
        heard = self.extractor(sound, sampling_rate=self.extractor.sampling_rate, return_tensors="np").input_features[0]
        labels = np.asarray(self.tokenizer(row["text"])["input_ids"])
        if labels[0] == self.config.decoder_start_token_id:
            labels = labels[1:]  # the model puts it before them
        return Sample(fields={"heard": heard.astype(np.float32), "labels": labels}, size=heard.shape[1] + len(labels))

    def _logits(self, model, batch):
        return model(input_features=batch["heard"], labels=batch["labels"], use_cache=False).logits

    def loss(self, model, batch):
        logits, labels = self._logits(model, batch), batch["labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return LossSum(total, int((labels != -100).sum()))

    def metrics(self, model, batch):
        together = dist.is_initialized() and dist.get_world_size() > 1  # ranks then write equally long
        written = model.generate(batch["heard"], max_length=self.options.max_length, synced_gpus=together)
        edits = words = 0
        for tokens, labels in zip(written, batch["labels"], strict=True):
            wanted, found = (self._words(ids) for ids in (labels[labels != -100], tokens))
            edits, words = edits + distance(wanted, found), words + len(wanted)
        return {"word_error_rate": (edits, words)}

    def _words(self, ids: torch.Tensor) -> list[str]:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).split()


def read_wav(path: Path, rate: int) -> np.ndarray:
    """The samples of a WAV file of 16 bits, float32 [samples] from -1 to 1; the mean of its channels."""
    with wave.open(str(path), "rb") as file:
        if file.getframerate() != rate or file.getsampwidth() != 2:
            raise ValueError(
                f"{path} has {file.getframerate()} Hz and {8 * file.getsampwidth()} bits, not {rate} and 16"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    return samples.mean(1, dtype=np.float32) / 32768


def distance(wanted: list[str], found: list[str]) -> int:
    """The least number of words to put in, leave out or exchange (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for number, word in enumerate(wanted, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(found, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]
