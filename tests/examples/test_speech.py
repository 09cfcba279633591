"""The example with speech: its loss is Whisper's own, errors are counted, and final/ is a Whisper."""

from __future__ import annotations

import json
import os
import runpy
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor, GenerationConfig, WhisperForConditionalGeneration

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import find_adapter
from tests.support.whisper_tokenizer import SPOKEN, START, TRANSCRIBE, TRANSLATE, UNTIMED, whisper_tokenizer
from tests.support.workspace import quietly

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "speech"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setattr(sys, "argv", ["make_data.py", "--out", str(folder), "--rows", "8"])
        runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")
    return folder


def recipe(made: Path, *overrides: str) -> Any:
    return load_recipe(
        FOLDER / "recipe.yaml",
        [
            f"model.model_path={made}/whisper", f"model.options.audio_folder={made}", f"data.cache_dir={made}/cache",
            f"data.train_data_paths={made}/train.jsonl", f"data.eval_data_paths={made}/heldout.jsonl",
            f"runner.logger.log_path={made}/runs", "data.num_workers=0", *overrides,
        ],
    )  # fmt: skip


def test_the_loss_is_that_of_whisper(made: Path):
    adapter: Any = find_adapter(recipe(made))
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    batch = adapter.collate([adapter.encode(row) for row in rows[:3]], range(3), {})
    model = WhisperForConditionalGeneration.from_pretrained(made / "whisper")
    found = adapter.loss(model, batch)
    own = model(input_features=batch["heard"], labels=batch["labels"]).loss  # a mean over all tokens
    assert float(found.total.detach()) / found.weight == pytest.approx(float(own.detach()), rel=1e-6)
    heard = sys.modules[type(adapter).__module__].distance
    assert [heard(["a", "b", "c"], text.split()) for text in ("a b c", "a c", "b b c d", "")] == [0, 1, 2, 3]


def write(file: Path, samples: int, rate: int = 16_000, bits: int = 16) -> Path:
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(bits // 8)
        sound.setframerate(rate)
        sound.writeframes(bytes(samples * bits // 8))
    return file


def test_a_sound_in_a_row_is_that_of_its_file(made: Path):
    adapter: Any = find_adapter(recipe(made))
    file = made / "train-0.wav"
    with wave.open(str(file), "rb") as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2") / 32768
    ways = [
        "train-0.wav",
        {"path": "train-0.wav", "bytes": None},
        {"path": "elsewhere.wav", "bytes": file.read_bytes()},
        {"array": samples.tolist(), "sampling_rate": 16_000, "path": None},
    ]
    first, *others = [adapter.encode({"audio": way, "text": "one"}).fields["heard"] for way in ways]
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("audio", "text", "why"),
    [
        (write, "one", "2.5 s long, and the model hears 2 s"),
        ("missing.wav", "one", "there is no WAV file"),
        ("train.jsonl", "one", "there is no WAV file"),
        ({"bytes": b"RIFF", "path": "a.wav"}, "one", "a.wav is no WAV file of 16 bits: it ends too early"),
        ({"bytes": b"no sound at all"}, "one", "audio is no WAV file of 16 bits"),
        ({"array": [], "sampling_rate": 16_000}, "one", "audio is empty"),
        ({"array": [float("nan")], "sampling_rate": 16_000}, "one", "values that are no numbers"),
        ({"array": [0.5], "sampling_rate": 8_000}, "one", "8000 Hz"),
        ({"array": [[0.5, 0.5]], "sampling_rate": 16_000}, "one", r"\[1, 2\]"),
        ({"array": [12000, 3], "sampling_rate": 16_000}, "one", "int64"),
        (None, "one", "audio is None"),
        ("train-0.wav", " ".join(["one"] * 16), "text has 17 tokens, and the model writes 16"),
        ("train-0.wav", ["one"], "no text"),
    ],
)
def test_a_sound_or_text_that_the_model_does_not_take_is_an_error_of_its_row(
    made: Path, tmp_path: Path, audio: Any, text: Any, why: str
):
    adapter: Any = find_adapter(recipe(made))
    sound = str(audio(tmp_path / "long.wav", 40_000)) if callable(audio) else audio
    with pytest.raises(ValueError, match=why):
        adapter.encode({"audio": sound, "text": text})


def test_a_changed_sound_makes_the_cache_anew(made: Path):
    found = find_adapter(recipe(made)).encoding_settings()
    assert find_adapter(recipe(made)).encoding_settings() == found
    os.utime(made / "train-0.wav", (1, 1))
    assert find_adapter(recipe(made)).encoding_settings() != found


@pytest.fixture
def multilingual(made: Path, tmp_path: Path) -> Path:
    """A Whisper of many languages, with the tokenizer that transformers has for it."""
    tokenizer = whisper_tokenizer()
    start, *spoken = tokenizer.convert_tokens_to_ids([START, *SPOKEN])
    translate, transcribe, untimed = tokenizer.convert_tokens_to_ids([TRANSLATE, TRANSCRIBE, UNTIMED])
    end = tokenizer.eos_token_id
    config = WhisperForConditionalGeneration.from_pretrained(made / "whisper").config
    config.update({"vocab_size": len(tokenizer), "pad_token_id": end, "bos_token_id": end, "eos_token_id": end})
    config.update({"decoder_start_token_id": start, "max_target_positions": 64})
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, is_multilingual=True, max_length=64,
        lang_to_id=dict(zip(SPOKEN, spoken, strict=True)), no_timestamps_token_id=untimed,
        task_to_id={"translate": translate, "transcribe": transcribe},
    )  # fmt: skip
    for part in (model, tokenizer, AutoFeatureExtractor.from_pretrained(made / "whisper")):
        part.save_pretrained(tmp_path / "multilingual")
    return tmp_path / "multilingual"


def test_texts_of_a_multilingual_model_begin_with_its_marks(
    made: Path, multilingual: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = [f"model.model_path={multilingual}", "model.options.language=German", "model.options.max_length=40"]
    adapter: Any = find_adapter(recipe(made, *keys, "model.options.task=translate"))
    row = json.loads((made / "train.jsonl").read_text().splitlines()[0])
    tokens = adapter.tokenizer.convert_ids_to_tokens(adapter.encode(row).fields["labels"])
    text = ["\u0120" if sign == " " else sign for sign in row["text"]]
    assert tokens == ["<|de|>", "<|translate|>", "<|notimestamps|>", *text, "<|endoftext|>"]

    model, asked = WhisperForConditionalGeneration.from_pretrained(multilingual), []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *heard, **named: [asked.append(named), generate(*heard, **named)][1])
    adapter.metrics(model, adapter.collate([adapter.encode(row)], [0], {}))
    assert [(named["language"], named["task"]) for named in asked] == [("German", "translate")]


@pytest.mark.parametrize(
    ("language", "why"),
    [("null", "is a multilingual Whisper"), ("gaga", "Unsupported language: gaga")],
)
def test_the_language_of_a_multilingual_model_is_named(made: Path, multilingual: Path, language: str, why: str):
    keys = [f"model.model_path={multilingual}", f"model.options.language={language}"]
    with pytest.raises(ConfigError, match=why) as raised:
        find_adapter(recipe(made, *keys)).encoding_settings()
    assert "model.options.language" in str(raised.value)
    with pytest.raises(ConfigError, match="has no tokenizer of Whisper"):
        find_adapter(recipe(made, "model.options.language=german")).encoding_settings()
    GenerationConfig(is_multilingual=False).save_pretrained(multilingual)
    keys = [f"model.model_path={multilingual}", "model.options.language=german"]
    with pytest.raises(ConfigError, match="is no multilingual Whisper"):
        find_adapter(recipe(made, *keys)).encoding_settings()


@pytest.mark.slow
def test_final_is_a_whisper(made: Path):
    run = shardtune.train(recipe(made, "runner.max_steps=2", "runner.eval_before_training=false").to_dict())
    assert run.metrics["eval/word_error_rate"] >= 0
    assert torch.isfinite(WhisperForConditionalGeneration.from_pretrained(run.dir / "final").proj_out.weight).all()
    assert AutoFeatureExtractor.from_pretrained(run.dir / "final").feature_size == 40
