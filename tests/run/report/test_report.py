"""The page about a run: bounded, self-contained, escaped, and drawn by a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Error, Page, sync_playwright
from typer.testing import CliRunner

import shardtune
from shardtune.cli.commands import app
from shardtune.data.file_lock import FileLock
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.html import element
from shardtune.run.report import write
from shardtune.run.report.content import state
from shardtune.run.report.curves import Decimated, natural_order
from shardtune.run.report.page import page
from shardtune.run.report.write import REPORT, write_report
from shardtune.run.stored_run import StoredRun
from tests.support.tiny_run import Tiny, make_tiny

BAD = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With `runs/first`, trained, and `runs/second`, a copy of its records with other numbers and hostile texts."""
    made = make_tiny(tmp_path_factory.mktemp("report"), save_interval=-1)
    changes = {"runner__save_interval": -1, "runner__max_epochs": 1, "runner__device": "cpu"}
    evaluation = {"data__eval_data_paths": str(made.folder / "eval.jsonl"), "runner__eval_before_training": True}
    shardtune.train(made.recipe("first", **changes, **evaluation))
    second = made.runs / "second"
    shutil.copytree(made.run("first"), second, symlinks=True, ignore=shutil.ignore_patterns("checkpoints", "final"))
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update({name: value * 1.5 for name, value in line.items() if name == "train/loss"})
        line |= {f"train/{BAD}": 1.0, "train/never": None}
    lines[-1]["train/grad_norm"] = None
    (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "tr')
    tree = yaml.safe_load((second / "config.yaml").read_text())
    tree["data"]["system_prompt"] = BAD
    tree["runner"]["logger"]["project_name"] = "${oc.env:TEST_REPORT_TOKEN}"
    (second / "config.yaml").write_text(yaml.safe_dump(tree))
    manifest = json.loads((second / "manifest.json").read_text())
    manifest["data"]["outcomes"]["train"][0]["file"] = BAD.replace("/", "") + ".jsonl"
    manifest["user_code"] = {BAD: "0123"}
    (second / "manifest.json").write_text(json.dumps(manifest))
    (second / "samples").mkdir(exist_ok=True)
    for step, answer, right in ((0, BAD, None), (4, "seven", True)):
        row = {"row": f"{BAD}:1", "question": BAD, "reference": "seven", "answer": answer, "correct": right}
        (second / "samples" / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
    (second / "verified.jsonl").write_text(
        json.dumps({"claim": "resume", "outcome": "passed", "text": BAD, "at": ""}) + "\n"
    )
    with open(second / "events.jsonl", "a") as events:
        events.write(
            json.dumps({"time": "2026-01-01T00:00:00Z", "event": "lost", "step": 3, "reason": BAD}) + "\n{torn"
        )
    return made


class Texts(HTMLParser):
    """The elements of a page and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.lengthy
def test_a_run_ends_with_a_page(tiny: Tiny) -> None:
    page = (tiny.run("first") / REPORT).read_text()
    assert len(page) < 100_000
    found = Texts(page)
    for text in ("first", "finished", "train.jsonl", "runner.max_epochs: 1", "Nothing verified yet", "eval/loss"):
        assert text in found.text
    links = [value for _, given in found.tags for name, value in given.items() if name in ("src", "href")]
    assert links
    assert all(str(link).startswith("#") for link in links)
    assert "url(" not in re.sub(r"url\(#", "", page)
    assert "http" not in re.sub(r'http-equiv|"http://www.w3.org/2000/svg"', "", page)


def test_everything_is_escaped(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_REPORT_TOKEN", "geheimnisvoll")
    page = write_report([tiny.run("second")], tmp_path / "page.html").read_text()
    found = Texts(page)
    assert [tag for tag, _ in found.tags if tag in ("img", "script")] == ["script", "script"]
    assert found.text.count("onerror=") >= 6
    assert "geheimnisvoll" not in page
    assert "${oc.env:TEST_REPORT_TOKEN}" in found.text
    assert element("a", "<b>", title='"&') == '<a title="&quot;&amp;">&lt;b&gt;</a>'


@pytest.mark.parametrize(
    ("settings", "given", "shown"),
    [
        ({"model": {"model_path": "/models/org/tiny"}}, [], "org/tiny"),
        ({"model": {"adapter": "/project/mine.py:Mine", "model_path": None}}, [], "project/mine.py:Mine"),
        ({"model": {"model_type": "act", "model_path": None, "adapter": None}}, [], "act"),
        ({"model": {"model_path": None}}, ["actor.model.model_path"], "a model in memory"),
    ],
)
def test_the_model_is_what_the_recipe_names(
    settings: dict[str, Any], given: list[str], shown: str, tmp_path: Path
) -> None:
    run = StoredRun(tmp_path, {"actor": settings}, {"in_memory": given}, [])
    found = Texts(page([run]))
    assert f"model{shown}" in found.text


def test_a_curve_is_bounded_and_keeps_its_peaks() -> None:
    curve = Decimated(64)
    for step in range(1, 10_001):
        curve.add(step, None if step == 7 else 1000.0 if step == 4321 else float(step % 2))
    points = curve.to_json()
    assert 32 <= len(points["x"]) <= 64
    assert points["x"][-1] == 10_000
    assert max(points["high"]) == 1000.0
    assert min(points["low"]) == 0.0
    assert sorted(points["y"])[32] == pytest.approx(0.5, abs=0.01)
    assert (curve.missing, curve.values, curve.largest) == (1, 9_999, 1000.0)
    few = Decimated(64)
    few.add(3, 1 / 3)
    assert few.to_json() == {"x": [3], "y": [0.33333]}
    for step, value in ((4, None), (5, 1.0), (6, 2.0), (7, None)):
        few.add(step, value)
    assert few.to_json() == {"x": [3, 5, 6], "y": [0.33333, 1.0, 2.0], "gaps": [1]}
    assert (few.last, few.last_shown) == (2.0, "not finite")


def test_numbers_in_names_are_in_their_order() -> None:
    names = ["train/loss_10", "train/loss", "train/loss_2", "train/loss_2b"]
    assert sorted(names, key=natural_order) == ["train/loss", "train/loss_2", "train/loss_2b", "train/loss_10"]


def test_a_failure_is_a_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def broken(_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "page", broken)
    write.report_at_end(tiny.run("first"), told.append)
    (line,) = told
    assert "No space left on device" in line
    assert "shardtune report" in line


def test_a_killed_run_is_not_shown_as_running(tmp_path: Path) -> None:
    run = StoredRun(tmp_path, tree={}, manifest={}, events=[{"event": "start", "step": 0}])
    assert state(run) == ("not finished", "")
    (tmp_path / "alive").write_text("7")
    lock = FileLock(tmp_path / ".lock")
    assert lock.acquire(lambda *_: True)
    try:
        assert state(run) == ("running", "")
    finally:
        lock.release()
    assert state(run) == ("killed", "bad")


def test_the_command(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    runs = [str(tiny.run("first")), str(tiny.run("second"))]
    assert CliRunner().invoke(app, ["report", *runs, "--open"]).output == f"{REPORT}\n"
    assert opened == [(tmp_path / REPORT).as_uri()]
    text = Texts((tmp_path / REPORT).read_text()).text
    assert "data.system_prompt" in text
    assert "Not drawn, without a finite value: train/never." in text
    assert "→ not finite, at most" in text
    twice = write_report([tiny.run("first"), tiny.run("first")], tmp_path / "twice.html")
    assert f"{tiny.run('first')}" in Texts(twice.read_text()).text
    other = tmp_path / "notes.html"
    other.write_text("my notes")
    with pytest.raises(ConfigError, match="is no report of shardtune"):
        write_report([tiny.run("first")], other)
    assert other.read_text() == "my notes"
    with pytest.raises(CheckpointError, match="is not a run directory"):
        write_report([tmp_path])
    with pytest.raises(CheckpointError, match=r"there are runs below it: .*first"):
        write_report([tiny.run("first").parent])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, Playwright's own or the system's."""
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path).exists()
        path = None if own else shutil.which("chromium")
        if not own and path is None:
            pytest.skip("there is no Chromium: playwright install chromium, or apt install chromium")
        try:
            started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield started
        started.close()


def faults_of(page: Page) -> list[str]:
    """What goes wrong on a page from now on, requests included."""
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    return faults


@pytest.mark.lengthy
def test_in_a_browser(tiny: Tiny, browser: Browser, tmp_path: Path) -> None:
    file = write_report([tiny.run("first"), tiny.run("second")], tmp_path / "page.html")
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
        faults = faults_of(page)
        page.goto(file.as_uri())
        assert page.title() == "2 runs: first, second · shardtune"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        loss = page.locator("figure", has_text="train/loss").first
        assert loss.locator("path.curve").count() == 2
        before = loss.locator(".readout").inner_text()
        loss.locator("svg").focus()
        page.keyboard.press("Home")
        assert loss.locator(".readout").inner_text().startswith("step 1")
        assert before != loss.locator(".readout").inner_text()
        page.locator("button[data-run='1']").click()
        assert loss.locator("path.curve").count() == 1
        box = loss.locator("svg").bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + 60
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 60, y, steps=3)
        page.mouse.up()
        page.locator("#reset").click()
        assert page.locator("#reset").is_hidden()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        assert not faults
        page.close()
