"""Revisions of models, tokenizers and data sets of the Hub, of a cache laid out as huggingface_hub writes it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from shardtune.config import load_recipe
from shardtune.config.hub_name import split_revision
from shardtune.config.schema import ModelConfig
from shardtune.data.sources.hub import Selection, load_files
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError, ModelError
from shardtune.models.pretrained import load_config, load_tokenizer, model_directory, settings_directory
from shardtune.run.choose_worker import Objects
from shardtune.run.inputs import run_inputs
from tests.support.tiny_run import make_tiny

COMMITS = {"main": "a" * 40, "v1": "b" * 40, "refs/pr/7": "c" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model in three revisions, whose configurations differ in a number."""
    hub = tmp_path / "hub"
    tiny = make_tiny(tmp_path / "tiny")
    source = Path(tiny.recipe("x")["actor"]["model"]["model_path"])
    repository = hub / "models--me--tiny"
    for number, (name, commit) in enumerate(COMMITS.items()):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        settings = json.loads((folder / "config.json").read_text()) | {"initializer_range": 0.1 * (number + 1)}
        (folder / "config.json").write_text(json.dumps(settings))
        ref = repository / "refs" / name
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    return hub


def test_names() -> None:
    assert split_revision("me/tiny@v1.0-beta") == ("me/tiny", "v1.0-beta")
    assert split_revision("me/tiny@refs/pr/7") == ("me/tiny", "refs/pr/7")
    assert split_revision("me/set:config@main") == ("me/set:config", "main")
    for path in ("me/tiny", "/a/b@c", "./a@b", "a@b/c@d", "rows@2.jsonl/x y"):
        assert split_revision(path) == (path, None)


def test_a_model_and_its_tokenizer(cache: Path) -> None:
    for number, (revision, commit) in enumerate(COMMITS.items()):
        for named in (revision, commit):
            path = f"me/tiny@{named}"
            assert load_config(ModelConfig(model_path=path)).initializer_range == pytest.approx(0.1 * (number + 1))
            for folder in (model_directory(path), settings_directory(path)):
                assert folder is not None
                assert folder.name == commit
            assert len(load_tokenizer(path)) == len(load_tokenizer(str(model_directory("me/tiny"))))
    with pytest.raises(ModelError, match="v2") as caught:
        load_config(ModelConfig(model_path="me/tiny@v2"))
    with pytest.raises(ModelError, match="me/tiny@v2 cannot be fetched") as caught:
        model_directory("me/tiny@v2")
    assert "owner/name@revision" in str(caught.value.remedy)


def test_the_manifest_has_the_commits(cache: Path, tmp_path: Path) -> None:
    """The recipe's names stay as they are, wherever it lies; a moved branch is another input."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    keys = {"model": {"model_path": "me/tiny@v1"}, "tokenizer": {"tokenizer_model": "me/tiny@refs/pr/7"}}
    recipe = load_recipe({**keys, "data": {"train_data_paths": str(tmp_path / "rows.jsonl")}})
    found = run_inputs(recipe, Objects(), {})
    assert found["actor.model.model_path"] == [("me/tiny@v1", COMMITS["v1"])]
    assert found["actor.tokenizer.tokenizer_model"] == [("me/tiny@refs/pr/7", COMMITS["refs/pr/7"])]


def test_a_data_set(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision is passed on, and the commit that came is in the label, which the manifest has."""
    asked: list[tuple[str, str | None, str | None]] = []
    rows = datasets.Dataset.from_list([{"question": "a", "answer": "b"}])
    rows.save_to_disk(str(tmp_path / "saved"))
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    assert isinstance(saved, datasets.Dataset)
    commit = COMMITS["v1"]

    def load_dataset(name: str, config: str | None, *, cache_dir: str, revision: str | None = None) -> Any:
        asked.append((name, config, revision))
        if revision == "v9":
            raise ValueError("Revision v9 doesn't exist")
        sources = {f"hf://datasets/{name}@{commit}/data.parquet": {"num_bytes": 1}}
        info = SimpleNamespace(download_checksums=sources if revision else None)
        return {"train": SimpleNamespace(info=info, cache_files=saved.cache_files)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    lines: list[str] = []
    source = resolve_sources("me/set:small@v1", data, report=lines.append)[0]
    assert asked == [("me/set", "small", "v1")]
    assert source.files[0].label == f"me/set:small@{commit} (train)"
    assert [row for _, row in source.rows(source.files[0])] == [{"question": "a", "answer": "b"}]
    assert commit in lines[0]
    label, _ = load_files("me/set", None, Selection(None, None, "train"), tmp_path)
    assert label == "me/set (train)"
    with pytest.raises(DataError, match="Revision v9") as caught:
        resolve_sources("me/set@v9", data, report=lines.append)
    assert caught.value.where == "data: me/set@v9"
