"""Data sets of the `datasets` library: on the Hub, in the Hub's layout, saved to disk, or in memory."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardtune.data.cache_directory import cache_folder, files_digest, spool
from shardtune.data.sources.found_files import files_below
from shardtune.errors import DataError

Purpose = Literal["train", "eval"]
CARD = "README.md"
_HIDDEN_CARD = ".huggingface.yaml"
"""Names configurations as the header of `CARD` does."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")  # hf://datasets/owner/name@COMMIT/file
# The split that is used when several exist and none is named, in order of preference.
_PREFERRED = {"train": ("train",), "eval": ("validation", "valid", "val", "dev", "eval", "test")}
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")  # how the Hub names the files of a split
_SPLIT = re.compile(r"(?:^|[._-])(train|validation|valid|val|dev|eval|test)(?=[._-]|$)", re.IGNORECASE)


_SAVE_AGAIN = "copy it completely, or save it again with save_to_disk"


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected part of a data set; `name` is a configuration where the data set has one of this name."""

    name: str | None
    split: str | None
    purpose: Purpose


def is_name(spec: str) -> bool:
    """Whether a text has the form of a Hub name, `owner/name` or `owner/name:configuration`."""
    return _NAME.fullmatch(spec) is not None


def parse_name(spec: str) -> tuple[str, str | None]:
    """`name:configuration` as its two parts."""
    name, colon, config = spec.rpartition(":")
    return (name, config) if colon and name else (spec, None)


def is_dataset(value: object) -> bool:
    """Whether a value is a `datasets.Dataset`; without importing that library for those who do not use it."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(value, library.Dataset)


def refuse_container(value: Any) -> None:
    """Refuse what `datasets` has besides a `Dataset`: several of them under names, and streams.

    Raises:
        DataError: with what to pass instead.
    """
    library = sys.modules.get("datasets")
    if library is None:
        return
    kind = type(value).__name__
    if isinstance(value, (library.DatasetDict, library.IterableDatasetDict)):
        raise DataError(
            f"{'an' if kind[0] == 'I' else 'a'} {kind} is several data sets: {', '.join(map(str, value))}",
            where="data",
            remedy=f"pass one of them: train_data=data[{next(iter(value), 'train')!r}], and eval_data likewise",
        )
    if isinstance(value, library.IterableDataset):
        raise DataError(
            f"an {kind} is a stream: its rows have neither a number nor an order to come back to",
            where="data",
            remedy="pass list(data), or load it without streaming=True",
        )


def spool_dataset(dataset: Any, root: Path) -> Path:
    """A `datasets.Dataset` as a Parquet file in the cache."""
    return spool(lambda path: dataset.to_parquet(str(path)), ".parquet", root)


def has_card(folder: Path) -> bool:
    """Whether a directory is laid out as on the Hub: a README.md whose header names configurations."""
    return card_header(folder) is not None


def card_header(folder: Path) -> str | None:
    """The header of a directory's README.md that names configurations; None for any other directory."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    header = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    if header is None or re.search(r"^(configs|dataset_info):", header[1], re.MULTILINE) is None:
        return None
    return header[1]


def configured_folder(spec: str) -> Path | None:
    """The local directory of `directory:configuration`; None for any other text."""
    name, config = parse_name(spec)
    return Path(name) if config is not None and Path(name).is_dir() else None


def _library_cache(name: str, root: Path) -> Path:
    """Where `datasets` keeps what it loads: of a local directory, which it knows by name alone, by content."""
    if not Path(name).is_dir():
        return cache_folder(root, "hub")
    found = files_below(Path(name), lambda inner: inner.startswith(".") and inner != _HIDDEN_CARD)
    files = [file for file in found.files if file.is_file()]
    return cache_folder(root, f"hub/local/{files_digest(Path(name), files, root)}")


def load_files(
    name: str, config: str | None, selection: Selection, root: Path, revision: str | None = None
) -> tuple[str, list[Path]]:
    """A label for the loaded part of a data set, and its Arrow files; downloaded or converted if needed.

    The label has the commit of a data set of the Hub.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    where = f"data: {name}" + (f":{config}" if config else "") + (f"@{revision}" if revision else "")
    of_hub: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        if (
            config is None
            and selection.name is not None
            and selection.name in datasets.get_dataset_config_names(name, **of_hub)
        ):
            config = selection.name
        loaded = datasets.load_dataset(name, config, cache_dir=str(_library_cache(name, root)), **of_hub)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"the data set cannot be loaded: {error}",
            where=where,
            remedy="check the name (owner/name, owner/name:configuration, owner/name@revision), the configuration, the "
            "revision and the network",
        ) from error
    splits = {str(key): dataset for key, dataset in loaded.items()}
    chosen = choose_split(list(splits), selection, where)
    commit = _commit(splits[chosen])
    label = (f"{name}:{config}" if config else name) + (f"@{commit}" if commit else "") + f" ({chosen})"
    return label, [Path(file["filename"]) for file in splits[chosen].cache_files]


def _commit(dataset: Any) -> str | None:
    """The commit from which a data set was made; None for a local one."""
    checksums = dataset.info.download_checksums or {}
    found = [_COMMIT.search(source) for source in checksums]
    return next((one[1] for one in found if one is not None), None)


def robot_data(name: str, root: Path, revision: str | None = None) -> Path | None:
    """The directory of a LeRobot data set of the Hub, downloaded if needed; None for any other data set."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    folder = str(cache_folder(root, "hub"))
    try:
        hf_hub_download(name, "meta/info.json", repo_type="dataset", revision=revision, cache_dir=folder)
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None  # `load_files` reports a wrong name
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, cache_dir=folder))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise DataError(
            f"the data set cannot be loaded: {error}",
            where=f"data: {name}",
            remedy="check the name (owner/name) and the network, or download it and name its directory",
        ) from error


def saved_files(folder: Path, selection: Selection) -> list[Path] | None:
    """The Arrow files of a directory that `save_to_disk` wrote; None for any other directory."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = json.loads(splits.read_text())["splits"]
            chosen = choose_split(names, selection, str(folder))
            folder = folder / chosen
            state = folder / "state.json"
        elif not state.is_file():
            return None
        saved = json.loads(state.read_text())
        if not splits.is_file() and selection.split not in (None, "train"):
            choose_split([saved.get("_split") or "train"], selection, str(folder))
        files = [folder / file["filename"] for file in saved["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the saved data set is torn: {error}", where=str(state), remedy=_SAVE_AGAIN) from error
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        lacking = missing[0].name if missing else "its files"
        raise DataError(f"the saved data set lacks {lacking}", where=str(folder), remedy=_SAVE_AGAIN)
    return files


def choose_split(names: list[str], selection: Selection, where: str) -> str:
    """The split that the recipe names; otherwise the only one, or the one usual for training or for evaluation."""
    if selection.split is not None:
        if selection.split in names:
            return selection.split
        raise DataError(
            f"there is no split {selection.split!r}",
            where=where,
            remedy=f"its splits are {', '.join(names)}; for a part of one use max_samples",
        )
    if len(names) == 1:
        return names[0]
    for preferred in _PREFERRED[selection.purpose]:
        if preferred in names:
            return preferred
    raise DataError(
        "it has several splits and none is named", where=where, remedy=f"set split to one of {', '.join(names)}"
    )


def names_splits(files: Sequence[Path], folder: Path) -> bool:
    """Whether the name of a file, or of a folder that it is in below `folder`, is that of a split."""
    parts = [part for file in files for part in file.relative_to(folder).parts]
    return any(_SPLIT.search(part) or _SHARD.fullmatch(part.partition(".")[0]) for part in parts)


def choose_files(files: list[Path], folder: Path, selection: Selection, report: Callable[[str], None]) -> list[Path]:
    """The files of one split of a directory, as `_of_split`; reports the ones that are left out."""
    split, chosen = _of_split(files, folder, selection)
    kept = set(chosen)
    if out := [file.relative_to(folder).as_posix() for file in files if file not in kept]:
        name = selection.name or folder.absolute().name
        report(f"data: {name}: split {split}; left out: {some_of(out)}")
    return chosen


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _of_split(files: list[Path], folder: Path, selection: Selection) -> tuple[str, list[Path]]:
    """One split of a directory and its files, where splits are recognised by file or folder names; "" for all files.

    A split is a word such as `train` in a name; or all of a file's name, without its number, where the recipe names the
    split so (`train_sft`) or the files are numbered as on the Hub (`train_sft-00000-of-00003.parquet`).
    """
    whole: dict[str, list[Path]] = {}
    for file in files:
        stem = file.name.partition(".")[0]
        numbered = _SHARD.fullmatch(stem)
        if numbered or stem == selection.split:
            whole.setdefault(numbered[1] if numbered else stem, []).append(file)
    if selection.split in whole:
        return str(selection.split), whole[str(selection.split)]
    alike = {name: word[1] for name in whole for word in [_SPLIT.search(name)] if word}
    if len(alike) == len(whole) > len(set(alike.values())) and sum(map(len, whole.values())) == len(files):
        chosen = choose_split(sorted(whole), selection, str(folder))
        return chosen, whole[chosen]
    splits: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(folder).parts
        found = [match[1].lower() for part in parts for match in [_SPLIT.search(part)] if match]
        splits.setdefault(found[-1] if found else "", []).append(file)
    named = [name for name in splits if name]
    if selection.split is None and len(named) < 2:
        return "", files
    if selection.split is not None and not named:
        raise DataError(
            f"the file names name no splits, so there is no {selection.split!r}",
            where=str(folder),
            remedy="leave split out, or name the file itself",
        )
    chosen = choose_split(named, selection, str(folder))
    return chosen, splits[chosen]
