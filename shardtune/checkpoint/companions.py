"""Files beside a model's weights, config and tokenizer that a user's own loading code may read, copied as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from transformers import PreTrainedTokenizerBase

from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.checkpoint.checksums import CHECKSUMS
from shardtune.errors import CheckpointError
from shardtune.models.pretrained import SETTINGS, TERMS

VIDEO = "video_preprocessor_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", VIDEO)
"""Of processors, image processors and feature extractors."""
MODULES = "modules.json"
"""Of sentence-transformers: the modules after the model, such as pooling, each in a folder of its own."""
OF_SENTENCES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
"""Of sentence-transformers: how texts become vectors or scores."""
WRITTEN = ("config.json", "generation_config.json", "adapter_config.json")
"""Written from the trained model; of another model they would be wrong."""
RESULTS = (
    *("metrics.json", "trainer_state.json", "train_results.json", "eval_results.json", "all_results.json"),
    CHECKSUMS,
)
"""Of the training that the directory comes from, and the checksums of its files."""
CODE = "*.py"
SIGNS = ("config.json", "tokenizer_config.json", *PROCESSOR_FILES, MODULES, "*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files by which a directory is taken for a model's, and not for one of other work."""
MAX_BYTES = 64 * 2**20
"""Larger files are no settings."""
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.json"),
    "chat_template.jinja",
)
"""Of tokenizers."""


def copy_companions(
    sources: Sequence[Path],
    target: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    has_processor: bool,
    adapter: bool,
    sentences: bool = True,
    lacks_video: bool = False,
) -> list[str]:
    """Copy what a written directory lacks of the directories that training began from; returns the names.

    Copied are files of settings (`SETTINGS`: never weights), the terms of use (`TERMS`), and the folders that
    `modules.json` names. What the directory has already stays, and so does the form in which tokenizer and processor
    were written.

    Args:
        sources: directories; the first that has a file counts.
        target: with the trained model.
        tokenizer: written there; None if none was.
        has_processor: whether a processor was written there.
        adapter: the directory holds a low-rank adapter, which is loaded with its base; then only the files of
            processors and the terms are copied.
        sentences: whether sentence-transformers may load the trained model; beside any other its files would be wrong.
        lacks_video: the processor that was written is without its part for videos, whose settings are copied too.

    Raises:
        CheckpointError: a file cannot be copied.
    """
    own = set(tokenizer.vocab_files_names.values()) | set(TEXT_FILES) if tokenizer is not None else set()
    left_out = {*WRITTEN, *RESULTS, *own, *(PROCESSOR_FILES if has_processor else ())}
    settings = PROCESSOR_FILES if adapter else [pattern for pattern in SETTINGS if pattern != CODE]
    patterns = [*settings, *TERMS]
    names: list[str] = []
    try:
        if lacks_video and (video := _video_settings(sources)) is not None:
            write_json(target / VIDEO, video)
            names.append(VIDEO)
        for source in sources:
            for file in _files(source, [*patterns, CODE] if _names_code(target) else patterns):
                wrong = file.name in left_out or (not sentences and any(file.match(name) for name in OF_SENTENCES))
                if not wrong and not (target / file.name).exists():
                    shutil.copyfile(file, target / file.name)
                    names.append(file.name)
            for folder in module_folders(source) if sentences and not adapter else ():
                if not (target / folder).exists():
                    shutil.copytree(source / folder, target / folder)
                    names.append(f"{folder}/")
    except OSError as error:
        raise CheckpointError(
            f"a file beside the model cannot be copied: {error.strerror or error}",
            where=str(error.filename or target),
            remedy="make it readable, and make room where runner.logger.log_path is",
        ) from error
    return names


def _video_settings(sources: Sequence[Path]) -> dict[str, object] | None:
    """The settings of videos, of the first directory that has some, in the order in which transformers looks for them:
    in the processor's file, in a file of their own, in that of images."""
    nested, *others = ("processor_config.json", VIDEO, "preprocessor_config.json")
    for source in sources:
        found = [_settings(source / nested).get("video_processor"), *(_settings(source / name) for name in others)]
        if settings := next((one for one in found if isinstance(one, dict) and one), None):
            return settings
    return None


def _settings(file: Path) -> dict[str, object]:
    return read_json(file) if file.is_file() else {}


def _files(source: Path, patterns: Collection[str]) -> Iterator[Path]:
    if not any(next(source.glob(sign), None) for sign in SIGNS):
        return
    for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
        settings = file.is_file() and not file.name.startswith(".") and not file.name.endswith(".index.json")
        if settings and file.stat().st_size <= MAX_BYTES:
            yield file


def module_folders(source: Path) -> list[str]:
    """The folders that a directory's `modules.json` names, without those outside of it."""
    file = source / MODULES
    if not file.is_file():
        return []
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{MODULES} is no JSON: {error}", where=str(file), remedy="repair it, or remove it"
        ) from error
    paths = [str(entry.get("path", "")) for entry in entries if isinstance(entry, dict)]
    inside = [path for path in paths if path and not PurePosixPath(path).is_absolute() and ".." not in path.split("/")]
    return [path for path in inside if (source / path).is_dir()]


def _names_code(target: Path) -> bool:
    """Whether a file of settings names Python code that is loaded with the model."""
    return any('"auto_map"' in file.read_text(encoding="utf-8", errors="replace") for file in target.glob("*.json"))
