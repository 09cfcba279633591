"""Tones that stand for words, as WAV files, with their texts; and a Whisper of two layers with random weights."""

import argparse
import json
import random
import wave
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

TONES = {"one": 300, "two": 500, "three": 800, "four": 1300, "five": 2100}  # Hz
RATE, SECONDS, WORD = 16_000, 2, 0.4
MARKS = ["<pad>", "<start>", "<end>"]


def sound(words: list[str], draw: np.random.Generator) -> np.ndarray:
    """A tone for each word, each a little off, under some noise; int16 [samples]."""
    times = np.arange(int(WORD * RATE)) / RATE
    tones = [np.sin(2 * np.pi * TONES[word] * draw.uniform(0.97, 1.03) * times) for word in words]
    waves = 0.3 * np.concatenate(tones)
    return ((waves + 0.01 * draw.standard_normal(len(waves))) * 32767).astype("<i2")


def write_rows(folder: Path, name: str, count: int, seed: int) -> None:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    with (folder / f"{name}.jsonl").open("w") as rows:
        for number in range(count):
            words = draw.choices(list(TONES), k=draw.randint(1, 4))
            with wave.open(str(folder / f"{name}-{number}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes(sound(words, numbers).tobytes())
            rows.write(json.dumps({"audio": f"{name}-{number}.wav", "text": " ".join(words)}) + "\n")


def write_model(folder: Path) -> None:
    """Configuration, weights, tokenizer and feature extractor; a text is between the marks of start and end."""
    vocabulary = {word: number for number, word in enumerate([*MARKS, *TONES])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=40, chunk_length=SECONDS, sampling_rate=RATE).save_pretrained(folder)
    config = WhisperConfig(
        vocab_size=len(vocabulary), num_mel_bins=40, max_source_positions=50 * SECONDS, max_target_positions=16,
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config.update(begin_suppress_tokens=None, suppress_tokens=None, max_length=16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("made"))
    parser.add_argument("--rows", type=int, default=600)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out, "train", args.rows, 0)
    write_rows(args.out, "heldout", max(4, args.rows // 10), 1)
    write_model(args.out / "whisper")


if __name__ == "__main__":
    main()
