"""The commands over a model with eyes, as a user types them: preview, train, generate, chat."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from PIL import Image

import shardtune
from tests.support.vision import save_image_rows, save_vision_model
from tests.support.workspace import Outcome, make_workspace, run_cli

RECIPE = """\
runner: {max_steps: 1, logger: {log_path: runs, experiment_name: demo, logger_backends: [jsonl]}}
actor:
  micro_batch_size: 2
  global_batch_size: 4
  model: {model_path: model, model_type: vision_language, precision: fp32}
data: {train_data_paths: rows.jsonl, cache_dir: cache, num_workers: 0}
"""
ROW = re.compile(
    r"rows.jsonl:2:\n<\|im_start\|>user\n⟨image \d+×\d+, 4 tokens⟩[a-f ]+\?<\|im_end\|>\n<\|im_start\|>assistant\n"
    r"⟦a[a-f ]+b<\|im_end\|>⟧\n<\|im_start\|>user\n[a-f ]+⟨image \d+×\d+, 4 tokens⟩"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's directory with the run runs/demo; the working directory."""
    folder = tmp_path_factory.mktemp("user")
    save_vision_model("llava", folder / "model")
    save_image_rows(folder, 6)
    (folder / "recipe.yaml").write_text(RECIPE)
    with chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def trained(work: Path) -> Outcome:
    told = run_cli("train", "recipe.yaml")
    assert told.code == 0, told.err
    return told


@pytest.mark.lengthy
def test_preview_shows_what_the_model_sees(work: Path) -> None:
    told = run_cli("data", "preview", "recipe.yaml")
    assert told.code == 0, told.err
    assert ROW.search(told.err), told.err
    assert "image_" not in told.err


@pytest.mark.lengthy
def test_the_first_screen_shows_the_first_row(trained: Outcome) -> None:
    assert "the first row as the model receives it; trained tokens are in ⟦ ⟧:\n<|im_start|>user\n" in trained.err
    assert "image_" not in trained.err


def test_generate(trained: Outcome, work: Path) -> None:
    """The same image by any name is one question."""
    few = ("--max-new-tokens", "4")
    told = run_cli("generate", "runs/demo", "--prompt", "<image>?", "--prompt", "?", "--image", "images/1_0.png", *few)
    assert told.code == 0, told.err
    (work / "sub").mkdir()
    Image.open("images/1_0.png").save("sub/b.png")
    turn = {"role": "user", "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "?"}]}
    rows = [{"prompt": "<image>?", "images": ["b.png"]}, {"messages": [turn]}, {"question": "?", "image": "b.png"}]
    (work / "sub" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    filed = run_cli("generate", "runs/demo", "--file", "sub/rows.jsonl", *few)
    assert filed.code == 0, filed.err
    answers = [json.loads(line)["answer"] for line in filed.out.splitlines()]
    assert "".join(f"{answer}\n" for answer in answers[:2]) == told.out
    shutil.copytree("runs/demo/final", "taken")
    taken = run_cli("generate", "taken", "<image>?", "?", "--image", "images/1_0.png", *few)
    assert taken.out == told.out, taken.err
    run = shardtune.load_run("runs/demo")
    picture = Image.open("images/1_0.png")
    sampling = shardtune.evaluate.generate.Sampling(max_new_tokens=4)
    assert run.generate("?", images=[picture], sampling=sampling) == answers[:1]
    assert run.generate(["?", [turn]], images=[[picture], []], folder="sub", sampling=sampling) == answers[:2]
    with pytest.raises(shardtune.errors.ConfigError, match="2 prompts and 1 list of images"):
        run.generate(["?", "?"], images=[[picture]])


def test_generate_refuses(trained: Outcome, work: Path) -> None:
    for words, says in (
        (["--prompt", "?", "--image", "none.png"], "none.png does not exist"),
        (["--prompt", "<image> <image>", "--image", "images/1_0.png"], "there is 1 image and 2 places"),
        (["--file", "rows.jsonl", "--image", "images/1_0.png"], "--file and --image exclude each other"),
    ):
        told = run_cli("generate", "runs/demo", *words)
        assert (told.code, told.err.count("error: ")) == (2, 1), told.err
        assert says in told.err
    make_workspace(work / "text")
    with chdir(work / "text"):
        assert run_cli("train", "recipe.yaml", "runner.max_steps=1").code == 0
        told = run_cli("generate", "runs/demo", "--prompt", "?", "--image", str(work / "images/1_0.png"))
    assert told.code == 2
    assert "error: the model takes text and no images" in told.err


def test_chat(trained: Outcome, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(
        ["/image none.png", "/image images/1_0.png", "What is <image>?", "And <image>?", "/image", "Well?", ""]
    )
    monkeypatch.setattr(builtins, "input", lambda *_: next(lines))
    told = run_cli("chat", "runs/demo", "--max-new-tokens", "2")
    assert told.code == 0, told.err
    assert "the image none.png does not exist" in told.out
    assert re.search(r"an image of \d+ x \d+, added to your next turn", told.out)
    assert "there are 0 images and 1 place" in told.out
    assert "an image is an empty text" in told.out
