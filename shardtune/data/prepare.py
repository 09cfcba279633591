"""From a recipe to encoded rows: done once, before any process group exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.batch import Sample
from shardtune.config import DataConfig, Recipe
from shardtune.data.audit.content import content_keys
from shardtune.data.cache.by_file import RowsByFile, TrainingRows, open_by_file
from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.cache.entry import ENCODED
from shardtune.data.cache_directory import cache_root, file_digest, known_digest
from shardtune.data.encoder import DRAWS, ByUser, Encoder, Row, frames_of
from shardtune.data.loader.protocol import Column
from shardtune.data.quarantine import without_quarantined
from shardtune.data.sources.entries import named_sets
from shardtune.data.sources.hub import Purpose
from shardtune.data.sources.other_frames import check_masks, notes_on_other_frames
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.same_files import notes_on_same_files
from shardtune.data.sources.source import Source
from shardtune.errors import ConfigError, DataError, counted

COMPARED_TOKENS, BLOCK_TOKENS = 10_000_000, 1_000_000
"""Tokens that are compared at each start at most, and at a time."""


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The training and evaluation data of a run.

    Attributes:
        encoder: turns rows into samples.
        train: the training rows; None for evaluation only.
        evals: the evaluation sets by name; "" for a single set without a name.
    """

    encoder: Encoder
    train: TrainingRows | None
    evals: Mapping[str, TokenDataset]

    @property
    def whole(self) -> TokenDataset | None:
        """The training rows where all of them are tokenised."""
        return self.train if isinstance(self.train, TokenDataset) else None

    def files(self) -> list[dict[str, Any]]:
        """The files of the training rows: each with its rows and a hash of their content and encoding.

        Where a user's code encodes them, which may draw or read what no hash covers, also a checksum of encoded rows.
        """
        files, whole = [] if self.train is None else self.train.files, self.whole
        if whole is None or not isinstance(self.encoder, ByUser) or not self.encoder.repeats_bits:
            return files
        sums = zip(files, whole.encoded, strict=True)
        return [file if encoded is None else {**file, ENCODED: encoded} for file, encoded in sums]

    def read(self) -> dict[str, TokenDataset]:
        """The data sets by purpose: `train`, and `eval` or `eval/NAME` unless it is a part of the training files.

        Without `train` where its files are tokenised one by one.
        """
        whole = self.whole
        sets = {} if whole is None else {"train": whole}
        others = {f"eval/{name}" if name else "eval": rows for name, rows in self.evals.items()}
        return {
            **sets,
            **{name: rows for name, rows in others.items() if whole is None or not rows.shares_files(whole)},
        }

    def dropped(self) -> Iterator[dict[str, object]]:
        """Every row that was read and dropped, with its file, number, cause and reason."""
        for name, rows in self.read().items():
            for row in rows.dropped():
                yield {"set": name, **row}

    def describe(self) -> dict[str, Any]:
        """The data's fingerprints, and what became of the rows of each file, for the manifest."""
        return {
            "outcomes": {name: rows.report.counts() for name, rows in self.read().items()},
            "train": self.files(),
            "sources": [] if self.train is None else [asdict(span) for span in self.train.sources],
            "train_fingerprint": None if self.train is None else self.train.fingerprint,
            "evaluation_fingerprints": {name: rows.fingerprint for name, rows in self.evals.items()},
            "encoding": self.encoder.cache_key(),
        }


def prepare_data(
    recipe: Recipe,
    make_encoder: Callable[[bool], Encoder],
    *,
    train_data: object = None,
    eval_data: object = None,
    training: bool = True,
    whole: bool = False,
    report: Callable[[str], None],
) -> PreparedData:
    """Encode the recipe's data, or find them encoded in the cache.

    Args:
        recipe: its `data` and `eval` sections are read.
        make_encoder: the model's; its argument: whether samples also hold a prompt for generation.
        train_data: rows in memory instead of `data.train_data_paths`.
        eval_data: rows in memory, or named sets of them, instead of `data.eval_data_paths`.
        training: whether to prepare the training rows.
        whole: tokenise all training rows, whatever `data.cache` is.
        report: receives one line per source and file.
    """
    data = recipe.data
    found: dict[Purpose, list[Source]] = {"train": [], "eval": []}
    drawn: list[str] = []

    def sources_of(spec: object, purpose: Purpose, encoder: Encoder) -> list[Source]:
        title, frames = _looking_for_draws(encoder, drawn), frames_of(encoder)
        sources = resolve_sources(spec, data, purpose=purpose, name_format=title, frames=frames, report=report)
        found[purpose] += sources
        check_masks([*found["train"], *found["eval"]])
        return sources

    def build(spec: object, purpose: Purpose, with_prompts: bool) -> TokenDataset:
        encoder = make_encoder(with_prompts)
        sources = sources_of(spec, purpose, encoder)
        built = build_dataset(
            sources,
            encoder,
            cache_dir=data.cache_dir,
            num_workers=data.num_workers,
            on_bad_row=data.on_bad_row,
            max_bad_rows=data.max_bad_rows,
            report=report,
        )
        for line in built.report.lines(max_length=data.max_length):
            report(f"data: {line}")
        return built

    train_spec = data.train_data_paths if train_data is None else train_data
    eval_spec = data.eval_data_paths if eval_data is None else eval_data
    splits = data.eval_split > 0 and eval_spec is None
    by_file = data.cache == "by_file" and not whole
    train, evals = None, dict[str, TokenDataset]()
    if training or splits:
        if train_spec is None:
            raise ConfigError("data.train_data_paths is not set", remedy="name a file, directory, glob or Hub name")
        if by_file:
            encoder = make_encoder(False)
            train = open_by_file(sources_of(train_spec, "train", encoder), encoder, recipe, report)
        else:
            rows = build(train_spec, "train", splits and recipe.eval.generate)
            if splits:
                rows, evals[""] = _split(rows, data.eval_split, report)
            _require_rows(rows, "data.train_data_paths", train_spec)
            if training and data.quarantine is not None:
                rows = without_quarantined(rows, Path(data.quarantine), held_out=evals.get(""), report=report)
                for line in rows.report.quarantined():
                    report(f"data: {line}")
            train = rows
    for name, spec in named_sets(eval_spec).items() if eval_spec is not None else ():
        evals[name] = build(spec, "eval", recipe.eval.generate)
    for name, rows in evals.items():
        _require_rows(rows, f"data.eval_data_paths{': ' + name if name else ''}", eval_spec)
    digest = partial(known_digest if by_file else file_digest, root=cache_root(data.cache_dir))
    prepared = PreparedData(make_encoder(recipe.eval.generate), train, evals)
    compared = any(ENCODED in file for file in prepared.files())
    draws = (_note_on_draws(part, compared=compared) for part in drawn)
    for note in (*_notes_on(found, data, digest, training=training), *draws):
        report(f"data: {note}")
    return prepared


def _notes_on(
    found: Mapping[Purpose, Sequence[Source]], data: DataConfig, digest: Callable[[Path], str | None], *, training: bool
) -> Iterator[str]:
    """What there is to say of the sources together."""
    every = [*found["train"], *found["eval"]]
    yield from notes_on_same_files(found["train"], found["eval"], digest)
    yield from notes_on_other_frames(every)
    yield from notes_on_weights(found["train"]) if training and not data.shuffle else ()
    yield from notes_on_turns(every, data)


def _looking_for_draws(encoder: Encoder, drawn: list[str]) -> Callable[[Row], str] | None:
    """The encoder's names of formats; beside, what it draws of the first row is added to `drawn`."""
    title = encoder.title
    if title is None or not isinstance(encoder, ByUser):
        return title

    def look(row: Row) -> str:
        part = None if drawn else encoder.drawn(row)
        drawn.extend([] if part is None else [part])
        return title(row)

    return look


def _note_on_draws(part: str, *, compared: bool) -> str:
    """The note; `compared`: whether a run that continues compares its rows with those of its checkpoint."""
    without = "is refused" if compared else "has other rows"
    return (
        f"encode of the model's adapter gives another {part} {DRAWS}, and each row is encoded once, into "
        "data.cache_dir: every epoch has the same draw. Draws of the global generators of torch, numpy and Python "
        f"follow from the row; with those of others a run that continues without this cache {without}. To draw anew in "
        "each step, repeatably: batch.rand_like and batch.randn_like in loss"
    )


def _split(rows: TokenDataset, share: float, report: Callable[[str], None]) -> tuple[TokenDataset, TokenDataset]:
    """The training rows and those held out; rows that are on both sides are reported."""
    train, held_out = rows.split_by_hash(share)
    for line in notes_on_both_sides(train, held_out):
        report(f"data: {line}")
    return train, held_out


def notes_on_both_sides(train: TokenDataset, held_out: TokenDataset) -> Iterator[str]:
    """A line where held out rows have the tokens of training rows: their files have other keys or values, not read.

    Rows with more than tokens, and rows of more than `COMPARED_TOKENS` that are as long as a held out one, are left to
    the audit.
    """
    alike = np.flatnonzero(np.isin(train.lengths, held_out.lengths))
    tokens = int(train.lengths[alike].sum(dtype=np.int64)) + int(held_out.lengths.sum(dtype=np.int64))
    if train.fields or not len(alike) or tokens > COMPARED_TOKENS:
        return
    ours, theirs = _token_keys(held_out), _token_keys(train.select(alike))
    order = np.argsort(theirs, kind="stable")
    found = order[np.searchsorted(theirs, ours, sorter=order).clip(max=len(order) - 1)]
    both = np.flatnonzero(theirs[found] == ours)
    if len(both):
        first, other = held_out.locate(int(both[0])), train.locate(int(alike[found[both[0]]]))
        yield (
            f"data.eval_split: {len(both):,} of {counted(len(held_out), 'held out row')} have the tokens of a training "
            f"row, as the two differ in their files alone, in keys that are not read or by their format: {first} and "
            f"{other}. Their score says nothing about new rows; shardtune data audit lists them"
        )


def _token_keys(rows: TokenDataset) -> np.ndarray:
    """uint64 [rows]: the hash of each row's tokens."""
    blocks = (block for _, block in rows.blocks(BLOCK_TOKENS, BLOCK_TOKENS))
    keys = [content_keys(block, np.zeros(len(block.offsets) - 1, np.uint64)) for block in blocks]
    return np.concatenate(keys) if keys else np.zeros(0, np.uint64)


def notes_on_weights(sources: Sequence[Source]) -> Iterator[str]:
    """A line for each source of whose rows every epoch has the same share, because nothing is shuffled."""
    for source in sources:
        if source.weight == round(source.weight):
            continue
        others = "come once more" if source.weight > 1 else "are trained, and the others never"
        yield (
            f"{source.name}: with data.shuffle: false the weight {source.weight:g} stands for the same rows in every "
            f"epoch: the first ones of the source (with data.cache: by_file those of each file) {others}"
        )


def notes_on_turns(sources: Sequence[Source], data: DataConfig) -> Iterator[str]:
    """A line where keys about conversations are set, and the first row of no source is one."""
    given = {
        "data.chat_template": data.chat_template is not None,
        "data.template_kwargs": bool(data.template_kwargs),
        "data.thinking": data.thinking is not None,
        "data.train_on: last_assistant": data.train_on == "last_assistant",
    }
    keys = [key for key, is_set in given.items() if is_set]
    if keys and sources and all(source.is_text and not source.has_turns for source in sources):
        titles = ", ".join(dict.fromkeys(source.title for source in sources))
        yield (
            f"not used for these rows: {', '.join(keys)}; the first rows have no turns ({titles}) and are trained as "
            "they are written, without a chat template"
        )


def _require_rows(rows: TokenDataset, where: str, spec: object) -> None:
    if not len(rows):
        raise DataError(
            "no row with a target is left",
            where=f"{where}{'' if not isinstance(spec, str) else ' = ' + spec}",
            remedy="shardtune data preview shows what becomes of the rows",
        )


class _Alike:
    """One value for each row."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __getitem__(self, rows: np.ndarray | int, /) -> np.ndarray:
        return np.full(np.shape(rows), self._value, np.float64)


def _alike(rows: TrainingRows, value: float) -> Column:
    """One value for each row; as an array where the number of rows is known."""
    return _Alike(value) if isinstance(rows, RowsByFile) else np.broadcast_to(np.float64(value), len(rows))


class WeighedRows:
    """Encoded rows with every loss term of a model: those in the index, and those that weigh each row alike.

    Args:
        rows: the encoded rows.
        row_terms: as of `Adapter.row_terms`.
    """

    def __init__(self, rows: TrainingRows, row_terms: Mapping[str, float]) -> None:
        self._rows = rows
        alike = {name: _alike(rows, value) for name, value in row_terms.items()}
        self._weights: dict[str, Column] = {**rows.term_weights, **alike}

    @property
    def lengths(self) -> Column:
        return self._rows.lengths

    @property
    def term_weights(self) -> Mapping[str, Column]:
        return self._weights

    def row(self, index: int) -> Sample:
        return self._rows.row(index)

    def field_counts(self, name: str) -> Column:
        return self._rows.field_counts(name)
