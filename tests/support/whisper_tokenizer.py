"""A tokenizer of Whisper, without merges: each byte is a token, and it has the marks of all languages."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES

START, TRANSLATE, TRANSCRIBE, UNTIMED = "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"
SPOKEN = [f"<|{language}|>" for language in LANGUAGES]
"""In the order in which their tokens follow `START`."""


def whisper_tokenizer() -> WhisperTokenizer:
    tokenizer = WhisperTokenizer(vocab={sign: number for number, sign in enumerate(sorted(ByteLevel.alphabet()))})
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [START, *SPOKEN, TRANSLATE, TRANSCRIBE, UNTIMED]}  # pyright: ignore[reportArgumentType]
    )
    return tokenizer
