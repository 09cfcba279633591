"""Pages to be followed from top to bottom: files are saved, Python is run, commands are typed, in one directory."""

from __future__ import annotations

import shlex
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardtune.verify.adapter import verify_adapter
from tests.docs.test_code_blocks import KNOWN, WALKED
from tests.support.chosen import slow_except
from tests.support.doc_blocks import ROOT, Block, blocks
from tests.support.workspace import run_cli

QUOTED = [pytest.param(block, id=str(block)) for block in blocks(*KNOWN) if block.source]


@pytest.mark.lengthy
@pytest.mark.parametrize("page", slow_except(WALKED, "docs/losses.md", "docs/tutorials/distillation.md"))
def test_a_reader_can_follow(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Two ranks and a fresh process for each of the kit's runs would take minutes; tests/cli/test_init.py has them once.
    monkeypatch.setattr("shardtune.verify.adapter.verify_adapter", partial(verify_adapter, processes=False))
    ran = []
    for block in (block for block in blocks(*KNOWN) if block.page == page and not (block.excuse or block.source)):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), {"__name__": "documentation"})
        elif block.language == "console":
            ran += _type(block)
    assert len(ran) >= 2


def _type(block: Block) -> list[str]:
    """Run those of a block's commands that are shardtune's and about files of the page; returns them."""
    typed = []
    for command in block.commands:
        words: list[Any] = shlex.split(command)
        if words[0] != "shardtune" or any(word.startswith("examples/") for word in words):
            continue
        outcome = run_cli(*words[1:])
        assert outcome.code == 0, f"{block}: {command}\n{outcome.err}"
        typed.append(command)
    return typed


@pytest.mark.parametrize("block", QUOTED)
def test_quotations_are_what_the_file_says(block: Block):
    assert block.source is not None
    assert textwrap.dedent(block.text).strip()
    assert block.text in (ROOT / block.source).read_text(encoding="utf-8")


def test_there_are_quotations():
    assert len(QUOTED) >= 6
