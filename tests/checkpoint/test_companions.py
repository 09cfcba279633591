"""Files beside the weights reach the directory of a trained model: settings of processors, folders of modules, code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtune.checkpoint.companions import copy_companions, module_folders
from shardtune.errors import CheckpointError
from tests.support.tiny_run import make_tokenizer

MODULES = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"path": "../outside"}, {"path": "/etc"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "base"
    for folder in ("1_Pooling", "onnx", "training_state"):
        (made / folder).mkdir(parents=True)
        (made / folder / "config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (made / "modules.json").write_text(json.dumps(MODULES))
    for name in ("preprocessor_config.json", "config.json", "metrics.json", "tokenizer.json", "mine.json", "code.py"):
        (made / name).write_text(json.dumps({"base": name}))
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", ".hidden.json"):
        (made / name).write_text("weights")
    return made


def copied(source: Path, target: Path, **changes: object) -> list[str]:
    target.mkdir(exist_ok=True)
    given = {"tokenizer": make_tokenizer(), "has_processor": False, "adapter": False, **changes}
    names = copy_companions([source], target, **given)  # pyright: ignore[reportArgumentType]
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert len(found) == len(set(names))
    return found


def test_what_is_copied(source: Path, tmp_path: Path) -> None:
    settings = ["1_Pooling/config.json", "mine.json", "modules.json"]
    assert copied(source, tmp_path / "a") == sorted([*settings, "preprocessor_config.json"])
    assert copied(source, tmp_path / "b", has_processor=True) == settings
    assert "tokenizer.json" in copied(source, tmp_path / "c", tokenizer=None)
    assert copied(source, tmp_path / "d", adapter=True) == ["preprocessor_config.json"]
    (source / "sentence_bert_config.json").write_text("{}")
    assert copied(source, tmp_path / "e", sentences=False) == ["mine.json", "preprocessor_config.json"]


def test_the_terms_on_which_a_model_may_be_used_stay_with_it(source: Path, tmp_path: Path) -> None:
    terms = ["LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md"]
    for name in (*terms, "README.md"):
        (source / name).write_text("terms")
    for adapter in (False, True):
        found = copied(source, tmp_path / str(adapter), adapter=adapter)
        assert [name for name in found if name in (*terms, "README.md")] == terms


def test_settings_of_videos_stay_where_a_processor_is_written_without_them(source: Path, tmp_path: Path) -> None:
    """In the order in which transformers looks for them."""
    files = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    for number, name in enumerate(files):
        (source / name).write_text(
            json.dumps({"video_processor": {"video": number}} if number == 2 else {"video": number})
        )
        assert "video_preprocessor_config.json" not in copied(source, tmp_path / f"with{number}", has_processor=True)
        target = tmp_path / f"without{number}"
        copied(source, target, has_processor=True, lacks_video=True)
        assert json.loads((target / "video_preprocessor_config.json").read_text()) == {"video": number}


def test_what_is_there_stays_and_the_first_directory_counts(source: Path, tmp_path: Path) -> None:
    first, target = tmp_path / "first", tmp_path / "target"
    for folder, name in ((first, "preprocessor_config.json"), (target, "mine.json")):
        folder.mkdir()
        (folder / name).write_text('{"own": true}')
    copy_companions([first, source], target, tokenizer=None, has_processor=False, adapter=False)
    for name in ("preprocessor_config.json", "mine.json"):
        assert json.loads((target / name).read_text()) == {"own": True}
    assert json.loads((target / "tokenizer.json").read_text()) == {"base": "tokenizer.json"}


def test_code_is_copied_where_a_file_names_it(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "code.Mine"}}))
    copy_companions([source], target, tokenizer=None, has_processor=True, adapter=False)
    assert (target / "code.py").is_file()


def test_modules_that_cannot_be_read_are_an_error(source: Path) -> None:
    assert module_folders(source) == ["1_Pooling"]
    (source / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json is no JSON"):
        module_folders(source)
