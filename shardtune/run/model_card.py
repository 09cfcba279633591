"""The model card of a trained model, `README.md`, made from the records of its run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from shardtune.checkpoint.atomic import read_json
from shardtune.config import Recipe, flatten
from shardtune.config.hub_name import split_revision
from shardtune.config.model_names import SENTENCE_TRANSFORMERS
from shardtune.config.paths import data_paths
from shardtune.config.recipe_file import read_stored
from shardtune.config.schema import short_key
from shardtune.config.secrets import without_secrets
from shardtune.config.tree import set_value
from shardtune.data.sources.hub import is_name, parse_name
from shardtune.run.final import METRICS
from shardtune.run.identity import CONFIG, record_file
from shardtune.run.resume_check import is_free
from shardtune.run.use_of_model import usage
from shardtune.training.loggers import read_metrics

CARD = "README.md"
LINK = "license_link"
HERE = "path/to/this/directory"
"""The place of the repository's name in the card of an exported directory."""
_MARK = re.compile(r"\n<!-- Written by shardtune; sha256 of the text above: ([0-9a-f]{64}) -->\n\Z")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")
PIPELINES = {
    "causal_lm": "text-generation",
    "vision_language": "image-text-to-text",
    "vision_language_action": "robotics",
    "sequence_classifier": "text-classification",
    "regression": "text-classification",
    "token_classifier": "token-classification",
    "embedding": "sentence-similarity",
    "reranker": "text-ranking",
    "seq2seq": "text2text-generation",
}
LIBRARIES = dict.fromkeys(SENTENCE_TRANSFORMERS, "sentence-transformers")
"""By which models of a task are loaded, where it is not transformers."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the files of a run say about it, read without executing or resolving anything.

    Attributes:
        recipe: `config.yaml`, with references to the environment as written.
        manifest: `manifest.json`.
        lines: `metrics.jsonl`.
    """

    recipe: dict[str, Any]
    manifest: dict[str, Any]
    lines: list[dict[str, float]]

    @classmethod
    def read(cls, run_dir: Path, manifest: dict[str, Any]) -> RunRecord:
        file = record_file(run_dir, CONFIG)
        values = {} if file is None else read_stored(file.read_text(encoding="utf-8"))
        return cls(values, manifest, read_metrics(run_dir))

    @property
    def base_model(self) -> str | None:
        """The base model's name on the Hub; None for a directory or a model in memory."""
        path = str(self.model["model_path"] or "")
        cached = _CACHED.search(path)
        if cached:
            return f"{cached[1]}/{cached[2]}"
        name, _ = split_revision(path)
        return name if is_name(name) and ":" not in name else None

    @property
    def model(self) -> dict[str, Any]:
        return self.recipe["actor"]["model"]

    @property
    def datasets(self) -> list[str]:
        """Names on the Hub among the training data."""
        texts = data_paths(self.recipe["data"]["train_data_paths"])
        return list(dict.fromkeys(parse_name(text)[0] for text in texts if is_name(text)))


def make_card(
    record: RunRecord,
    directory: Path,
    *,
    title: str,
    repo: str = HERE,
    merged: bool = False,
    step: int | None = None,
    checked: str | None = None,
) -> str:
    """The card of a model, signed, so that a later push can distinguish it from one that somebody has edited.

    Args:
        record: of the run.
        directory: with the model's files.
        title: its heading.
        repo: the name of the repository.
        merged: whether an adapter has been merged into its base model.
        step: of the checkpoint; None: the model is `final/`, whose evaluation is on record.
        checked: the result of the comparison after an export.
    """
    adapter = bool(record.model["is_lora"]) and not merged
    parts = [
        f"# {title}",
        _introduction(record, adapter),
        "## Use\n\n" + usage(directory, record.model["model_type"], repo, record.base_model, adapter=adapter),
        *_scores(record, directory, step),
        "## Data\n\n" + _data(record),
        "## Training\n\n" + _training(record, step),
        "## Recipe\n\nWhat differs from the defaults; of paths, the last part:\n\n```yaml\n" + _recipe(record) + "```",
        *_verified(record, step, checked),
    ]
    card = ModelCard(f"---\n{_metadata(record, directory, adapter).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")
    return signed(without_secrets(str(card)))


def signed(text: str) -> str:
    """A card with the digest of its text."""
    text = _MARK.sub("", text).rstrip("\n") + "\n"
    return f"{text}\n<!-- Written by shardtune; sha256 of the text above: {_digest(text)} -->\n"


def is_unedited(card: str) -> bool:
    """Whether a card is as `make_card` made it."""
    mark = _MARK.search(card.replace("\r\n", "\n"))
    return mark is not None and _digest(card.replace("\r\n", "\n")[: mark.start()]) == mark[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.rstrip("\n").encode()).hexdigest()


def _metadata(record: RunRecord, directory: Path, adapter: bool) -> ModelCardData:
    in_transformers = (directory / "config.json").exists()
    library = LIBRARIES.get(record.model["model_type"], "transformers")
    base = record.base_model
    more: dict[str, Any] = {**license_of(record, directory, base)}
    if base is not None:
        more["base_model_relation"] = "adapter" if adapter else "finetune"
    return ModelCardData(
        base_model=base,
        datasets=record.datasets or None,
        tags=["shardtune", "sft", *([_method(record).lower()] if record.model["is_lora"] else [])],
        library_name="peft" if adapter else library if in_transformers else None,
        pipeline_tag=PIPELINES.get(record.model["model_type"]) if adapter or in_transformers else None,
        **more,
    )


def _method(record: RunRecord) -> str:
    """The name of the adapter's method."""
    return str(((record.model.get("lora") or {}).get("peft") or {}).get("peft_type", "LoRA"))


def license_of(record: RunRecord, directory: Path, base: str | None) -> dict[str, str]:
    """The license that the base model's card names, if that card is on this machine.

    A link to a file that the directory lacks leads to that of the base model, or is left out where it is on no Hub.
    """
    cached = None if base is None else try_to_load_from_cache(base, CARD)
    card = Path(cached) if isinstance(cached, str) else Path(str(record.model["model_path"] or "")) / CARD
    try:
        found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    terms = {key: str(found[key]) for key in ("license", "license_name", LINK) if found.get(key)}
    link = terms.get(LINK, "")
    if link and "://" not in link and not (directory / link).is_file():
        del terms[LINK]
        terms |= {} if base is None else {LINK: f"https://huggingface.co/{base}/blob/main/{link}"}
    return terms


def _introduction(record: RunRecord, adapter: bool) -> str:
    base = record.base_model
    named = f"[{base}](https://huggingface.co/{base})" if base else f"the model `{_last(record.model['model_path'])}`"
    kind = "A low-rank adapter" if _method(record) == "LoRA" else f"An adapter ({_method(record)})"
    trained = f"{kind} of {named}" if adapter else f"{named[:1].upper()}{named[1:]}"
    if record.model["model_path"] is None:
        trained = f"{kind} of a model in memory" if adapter else "A model from memory"
    version = record.manifest["versions"]["shardtune"]
    return f"{trained}, trained with supervised data by shardtune {version}."


def _scores(record: RunRecord, directory: Path, step: int | None) -> Iterator[str]:
    """The evaluation before the first step, if there was one, and that of the model."""
    lines = {int(line["step"]): line for line in record.lines}
    final = directory / METRICS
    after = read_json(final) if step is None and final.exists() else lines.get(step or -1, {})
    before, after = _evaluation(lines.get(0, {})), _evaluation(after)
    if not after:
        return
    yield "## Scores\n\n" + _table(
        ["metric", "before", "after"] if before else ["metric", "value"],
        [[key, *([_number(before.get(key))] if before else []), _number(value)] for key, value in after.items()],
    )


def _evaluation(line: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.startswith("eval/")}


def _data(record: RunRecord) -> str:
    data, inputs = record.manifest["data"], record.manifest.get("inputs", {})
    digests = {_last(name): content for key in inputs if key.startswith("data.") for name, content in inputs[key]}
    rows = [
        [
            kind,
            _last(file["file"]),
            f"{file['rows']:,}",
            f"{file['kept']:,}",
            f"`{digests.get(_last(file['file']), '')}`",
        ]
        for kind, files in data.get("outcomes", {}).items()
        for file in files
    ]
    if not rows:
        return "The run's own code reads its data; there is no record of rows."
    table = _table(["for", "file", "rows", "used", "digest of the content"], rows)
    return f"{table}\n\nFingerprint of the training rows as tokens: `{data.get('train_fingerprint', 'none')}`."


def _training(record: RunRecord, step: int | None) -> str:
    manifest, finished = record.manifest, record.manifest.get("finished", {})
    done = step if step is not None else int(finished.get("step", 0))
    lines = [line for line in record.lines if 0 < line["step"] <= done]
    rows = [["optimizer steps", f"{done:,}"]]
    if step is None and "ended" in finished:
        rows.append(["ended by", str(finished["ended"])])
    if lines and "epoch" in lines[-1]:
        rows.append(["epochs", _number(lines[-1]["epoch"])])
    if len(lines) == done > 0:  # every step is logged
        for key, name in (
            ("train/tokens", "tokens"),
            ("train/samples", "samples"),
            ("train/supervised_tokens", "tokens trained on"),
        ):
            if all(line.get(key) is not None for line in lines):
                rows.append([name, f"{sum(line[key] for line in lines):,.0f}"])
    if lines and lines[-1].get("train/loss") is not None:
        rows.append(["last training loss", _number(lines[-1]["train/loss"])])
    trained = sum(int(pattern["parameters"]) for pattern in manifest.get("trainable_patterns", ()))
    rows += [
        ["trained parameters", f"{trained:,}"],
        ["dtypes", ", ".join(f"{name} {dtype}" for name, dtype in manifest["dtypes"].items())],
        ["ranks", str(manifest["world_size"])],
        ["versions", ", ".join(f"{name} {manifest['versions'][name]}" for name in ("torch", "transformers"))],
    ]
    return _table(["", ""], rows)


def _recipe(record: RunRecord) -> str:
    """The keys that matter for numerics and differ from their defaults, as YAML."""
    defaults = flatten(Recipe().to_dict())
    chosen: dict[str, object] = {}
    for key, value in flatten(record.recipe).items():
        if not is_free(key) and defaults.get(key) != value:
            set_value(chosen, short_key(key), _shortened(value))
    return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)


def _verified(record: RunRecord, step: int | None, checked: str | None) -> Iterator[str]:
    lines = []
    if step is None and record.manifest.get("finished", {}).get("metrics"):
        lines.append("- The scores are of these files: they were loaded again after training, then evaluated.")
    if checked:
        lines.append(f"- Loaded in a new process after the export and compared with the model in memory: {checked}.")
    if lines:
        yield "## What was verified\n\n" + "\n".join(lines)


def _shortened(value: object) -> object:
    """A value without the directories of this machine."""
    if isinstance(value, str):
        return _last(value)
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return value


def _last(path: object) -> str:
    """The last part of an absolute path; anything else as it is."""
    text = str(path)
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", "~")) else text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}".removesuffix(".0000")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
