"""A model on the Hub, through a local stand-in of its API: the files bitwise, the card, and no token anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

import shardtune
from shardtune.cli.commands import app
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.model_card import is_unedited, license_of
from shardtune.run.push import PushError, check_push, push, push_command
from shardtune.run.use_of_model import usage
from tests.support.hub_server import TOKEN, Hub, replaced_hub
from tests.support.tiny_run import Tiny, flip_bit, make_tiny

SECRET = "geheim-4711-(.*)"
SKIPPED = {"checksums.json"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with replaced_hub() as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("push"), save_interval=-1)
    (made.folder / "model" / "README.md").write_text("---\nlicense: mit\nlicense_link: LICENSE\n---\n# Base\n")
    (made.folder / "model" / "LICENSE").write_text("As you like.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATTERN", SECRET)
        given: dict[str, Any] = {
            "runner__max_steps": 2,
            "runner__eval_before_training": True,
            "data__eval_data_paths": str(made.folder / "eval.jsonl"),
            "eval__generate": True,
            "eval__max_new_tokens": 2,
            "eval__answer_pattern": "${oc.env:PATTERN}",
        }
        shardtune.train(made.recipe("full", **given))
    return made


@pytest.fixture(scope="module")
def adapter(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was exported from a run."""
    run = shardtune.train(tiny.recipe("lora", runner__max_steps=1, actor__model__is_lora=True))
    return run.export(tmp_path_factory.mktemp("exported") / "my-adapter", check=False)


def published(directory: Path) -> dict[str, bytes]:
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if name not in SKIPPED and not name.startswith("training_state/")
    }


@pytest.mark.lengthy
def test_a_run_is_published_privately_with_its_card(hub: Hub, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATTERN", raising=False)
    told: list[str] = []
    url = push(tiny.run("full"), "me/my-model", report=told.append)
    assert url.startswith(f"{hub.endpoint}/me/my-model/commit/")
    assert hub.repos["me/my-model"].private
    files = hub.files("me/my-model")
    card = files.pop("README.md").decode()
    assert files == published(tiny.run("full") / "final")
    assert "model.safetensors" in files
    assert files["LICENSE"] == b"As you like.\n"
    assert set(hub.objects) != set()  # by LFS
    assert ModelCard(card).data.to_dict() == {  # a directory is no name on the Hub, so there is no base_model
        "license": "mit",
        "license_link": "LICENSE",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["shardtune", "sft"],
    }
    metrics = json.loads((tiny.run("full") / "final/metrics.json").read_text())
    before = json.loads((tiny.run("full") / "metrics.jsonl").read_text().splitlines()[0])
    for text in (
        "# my-model\n",
        'AutoModelForCausalLM.from_pretrained("me/my-model")',
        f"| eval/loss | {_number(before['eval/loss'])} | {_number(metrics['eval/loss'])} |",
        "| train | train.jsonl | 21 | 21 |",
        "| optimizer steps | 2 |",
        "loaded again after training, then evaluated",
    ):
        assert text in card
    recipe = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert recipe["eval"]["answer_pattern"] == "${oc.env:PATTERN}"
    assert recipe["model"] == {"model_path": "model", "precision": "fp32"}
    assert is_unedited(card)
    assert str(tiny.folder) not in card
    assert "geheim" not in card
    # Again: nothing has changed, and a card that nobody has edited is replaced.
    push(tiny.run("full") / "final", "me/my-model", report=told.append)
    assert hub.files("me/my-model")["README.md"].decode() == card
    _no_token(hub, tiny.run("full"), told)


@pytest.mark.parametrize(
    ("link", "base", "expected"),
    [
        ("LICENSE", "owner/base", "LICENSE"),
        ("TERMS", "owner/base", "https://huggingface.co/owner/base/blob/main/TERMS"),
        ("TERMS", None, None),
        ("https://example.org/terms", None, "https://example.org/terms"),
    ],
)
def test_a_card_links_to_a_license_that_is_there(tmp_path: Path, link: str, base: str | None, expected: str) -> None:
    (tmp_path / "LICENSE").write_text("terms")
    (tmp_path / "README.md").write_text(f"---\nlicense: other\nlicense_link: {link}\n---\n")
    record: Any = SimpleNamespace(model={"model_path": str(tmp_path)})
    found = license_of(record, tmp_path, base)
    assert (found["license"], found.get("license_link")) == ("other", expected)


def _number(value: float) -> str:
    return f"{value:.4f}".removesuffix(".0000")


def _no_token(hub: Hub, run_dir: Path, told: list[str]) -> None:
    """The token is in no file and no message, and of requests in one header only, of those to the Hub itself."""
    for file in run_dir.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    assert TOKEN not in "\n".join(told)
    for method, path, headers, body in hub.requests:
        holding = [name for name, value in headers.items() if TOKEN in value]
        assert [name.lower() for name in holding] in ([], ["authorization"]), (method, path)
        assert TOKEN.encode() not in body + path.encode()
        if method == "PUT":
            assert not holding
    assert all(TOKEN.encode() not in data for repo in hub.repos for data in hub.files(repo).values())


def test_an_adapter_names_its_base_model(hub: Hub, tiny: Tiny, adapter: Path) -> None:
    assert 'PeftModel.from_pretrained(base, "path/to/this/directory")' in (adapter / "README.md").read_text()
    push(adapter, "me/my-adapter", public=True, revision="v1", report=lambda _: None)
    files = hub.files("me/my-adapter", "v1")
    assert not hub.repos["me/my-adapter"].private
    assert hub.files("me/my-adapter") == {}
    card = files["README.md"].decode()
    assert is_unedited(card)
    assert 'PeftModel.from_pretrained(base, "me/my-adapter")' in card
    assert {name: data for name, data in files.items() if name != "README.md"} == {
        name: data for name, data in published(adapter).items() if name != "README.md"
    }
    data = ModelCard(card).data.to_dict()
    assert (data["library_name"], data["tags"]) == ("peft", ["shardtune", "sft", "lora"])


def test_names_on_the_hub_are_in_the_metadata(tiny: Tiny) -> None:
    from shardtune.run.identity import read_manifest
    from shardtune.run.model_card import RunRecord, make_card

    run_dir = tiny.run("full")
    record = RunRecord.read(run_dir, read_manifest(run_dir))
    record.model["model_path"] = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    record.model["is_lora"] = True
    record.recipe["data"]["train_data_paths"] = [{"path": "openai/gsm8k:main"}, "/data/own.jsonl", "me/rows"]
    record.recipe["data"]["system_prompt"] = f"key {TOKEN} https://me:pass@host/?token=abc&x=1"
    data = ModelCard(card := make_card(record, run_dir / "final", title="x", repo="me/x")).data.to_dict()
    assert data["base_model"] == "Qwen/Qwen3-0.6B"
    assert data["base_model_relation"] == "adapter"
    assert data["datasets"] == ["openai/gsm8k", "me/rows"]
    assert "system_prompt: key *** https://***@host/?token=***&x=1" in card
    assert 'AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")' in card


def test_code_for_images_has_the_pixels_of_training(tmp_path: Path) -> None:
    """transformers takes torchvision's resize where it is installed."""
    (tmp_path / "config.json").write_text("{}")
    code = usage(tmp_path, "vision_language", "me/x", None, adapter=False)
    assert "from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor\n" in code
    assert 'processor.image_processor = AutoImageProcessor.from_pretrained("me/x", backend="pil")' in code


def test_cards_that_somebody_wrote_stay(hub: Hub, tiny: Tiny, tmp_path: Path) -> None:
    told: list[str] = []
    run_dir = tiny.run("full")
    push(run_dir, "me/kept", report=told.append)
    held = hub.repos["me/kept"].branches["main"]
    held["README.md"] = edited = held["README.md"].replace(b"# kept", b"# My own words")
    held["model-00001-of-00002.safetensors"] = held["model.safetensors.index.json"] = b"old"
    held["notes.gguf"] = b"mine"
    push(run_dir, "me/kept", report=told.append)
    assert held["README.md"] == edited
    assert any("--replace-card" in line for line in told)
    assert "model-00001-of-00002.safetensors" not in held  # or it would be loaded beside the new one
    assert {"notes.gguf", "model.safetensors"} <= held.keys()
    assert not any("is private" in line for line in told)
    push(run_dir, "me/kept", public=True, replace_card=True, report=told.append)
    assert b"# kept" in held["README.md"]
    assert any("me/kept exists and is private, and stays so" in line for line in told)
    assert hub.repos["me/kept"].private
    own = tmp_path / "own"
    own.mkdir()
    for name, content in published(run_dir / "final").items():
        (own / name).write_bytes(content)
    (own / "README.md").write_text("# Mine\n")
    push(own, "me/kept", report=told.append)
    assert held["README.md"] == b"# Mine\n"


def test_what_cannot_be_published_is_refused(
    hub: Hub, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tiny.run("full")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a run directory nor one with a model"):
        push(tmp_path / "empty", "me/x")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (run_dir / "final").glob("*.*"):
        (copy / file.name).write_bytes(file.read_bytes())
    flip_bit(copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged(?s:.*)model.safetensors"):
        push(copy, "me/x")
    push(run_dir, "me/open", public=True, report=lambda _: None)
    with pytest.raises(ConfigError, match="exists and is public"):
        push(run_dir, "me/open")
    hub.fails = 503
    with pytest.raises(PushError, match="failed") as failed:
        push(run_dir, "me/x", report=lambda _: None)
    assert failed.value.exit_code == 1
    hub.fails = 403
    with pytest.raises(ConfigError, match=r"failed(?s:.*)token"):
        push(run_dir, "me/x", report=lambda _: None)
    with pytest.raises(ConfigError, match=r"who cannot make other/x(?s:.*)choose another owner: me"):
        check_push("other/x")
    hub.role = "read"
    with pytest.raises(ConfigError, match="may only read"):
        check_push("me/x")
    with pytest.raises(ConfigError, match="no name on the Hub"):
        check_push("x")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushError, match=r"looking up me/x at http://127\.0\.0\.1:9 failed") as unreached:
        check_push("me/x")
    assert TOKEN not in str(unreached.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"no token(?s:.*)hf auth login"):
        check_push("me/x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE(?s:.*)shardtune push RUN REPO"):
        check_push("me/x")


def test_the_end_of_a_run_pushes_and_a_failure_is_only_said(
    hub: Hub, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fails = 500
    given: dict[str, Any] = {"runner__max_steps": 1, "runner__push_to_hub": "me/at-the-end"}
    run = shardtune.train(tiny.recipe("pushed", **given))
    output = capsys.readouterr().err
    command = push_command(run.dir, "me/at-the-end")
    assert "the run is complete, but its model was not pushed to me/at-the-end" in output
    assert f"to push it: {command}" in output
    assert "finished" in json.loads((run.dir / "manifest.json").read_text())
    shardtune.train(tiny.recipe("pushed", **given))  # finished: nothing is pushed, but the command is shown
    assert f"to push it again: {command}" in capsys.readouterr().err
    hub.fails = 0
    shardtune.load_run(run.dir).push("me/at-the-end")
    assert hub.repos["me/at-the-end"].private
    assert "model.safetensors" in hub.files("me/at-the-end")
    _no_token(hub, run.dir, [output])


def test_it_is_checked_before_a_run_begins(tiny: Tiny) -> None:
    recipe = tiny.recipe("unchecked", runner__push_to_hub="me/x", runner__nproc_per_node=2)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set(?s:.*)runner.push_to_hub"):
        shardtune.train(recipe)
    assert not tiny.run("unchecked").exists()
    with pytest.raises(ConfigError, match=r"push_to_hub(?s:.*)owner/name"):
        load_recipe(tiny.recipe(runner__push_to_hub="no name"))


def _typed(tiny: Tiny) -> list[str]:
    return ["push", str(tiny.run("full")), "me/typed", "--revision", "v2"]


def _check_typed(hub: Hub, output: str) -> None:
    assert f"{hub.endpoint}/me/typed/commit/" in output
    assert TOKEN not in output
    assert "model.safetensors" in hub.files("me/typed", "v2")


def test_the_command(hub: Hub, tiny: Tiny) -> None:
    done = CliRunner().invoke(app, _typed(tiny))
    assert done.exit_code == 0
    _check_typed(hub, done.output)


@pytest.mark.slow
@pytest.mark.own_start
def test_the_command_in_a_process_of_its_own(hub: Hub, tiny: Tiny) -> None:
    words = [sys.executable, "-m", "shardtune", *_typed(tiny)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _check_typed(hub, done.stdout + done.stderr)
