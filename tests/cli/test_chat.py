"""Talking to a model: turns are kept, forgotten with /reset, and an answer may be broken off."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtune.cli.chat import chat
from shardtune.data.encoder import RowError
from shardtune.errors import DataError
from shardtune.evaluate.generate import Sampling
from shardtune.run.run import Run


class Encoder:
    tokenizer = template = object()
    answer_opening = ()

    @staticmethod
    def prompt(messages: list[dict[str, Any]], template_kwargs: Mapping[str, object]) -> np.ndarray:
        assert not template_kwargs
        asked.append([f"{turn['role']}: {turn['content']}" for turn in messages])
        return np.zeros(1, np.int32)


class Worker:
    """Answers `re <turn>`; breaks off at "stop", and has no room at "long"."""

    def chat_encoder(self) -> Encoder:
        return Encoder()

    def generator(self) -> Worker:
        return self

    def answers(self, prompts: list[np.ndarray], sampling: Sampling, streamer: object) -> list[str]:
        last = asked[-1][-1].removeprefix("user: ")
        if last == "stop":
            raise KeyboardInterrupt
        if last == "long":
            raise DataError("the prompt has 9 tokens, and the model takes 8 with the answer", where="prompt 1")
        return [f"re {last}"]


asked: list[list[str]] = []


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> list[list[str]]:
    """The conversations that were answered."""
    asked.clear()
    typed: Iterator[str] = iter(lines)

    def read(_: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr("shardtune.cli.chat.answering", lambda run, checkpoint: Worker())
    chat(Run(Path("nowhere")), "final", system, Sampling())
    return asked


def test_turns_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "a", " b ", system="s")[-1] == ["system: s", "user: a", "assistant: re a", "user: b"]


def test_reset_forgets_all_but_the_system_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "a", "/reset", "b", system="s")[-1] == ["system: s", "user: b"]


def test_a_word_like_a_command_is_no_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    turns = talk(monkeypatch, "/help", "/reset now", "/etc is a folder", "/2")
    assert turns[-1] == ["user: /etc is a folder", "assistant: re /etc is a folder", "user: /2"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "/help is no command: /reset clears the conversation" in printed
    assert "/reset now is no command" in printed


def test_options_that_the_template_does_not_take_are_refused_before_the_first_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompt(messages: list[dict[str, Any]], template_kwargs: Mapping[str, object]) -> np.ndarray:
        raise RowError("the template takes no system turn")

    monkeypatch.setattr(Encoder, "prompt", staticmethod(prompt))
    with pytest.raises(DataError, match="takes no system turn"):
        talk(monkeypatch, "a", system="s")


def test_the_end_of_input_ends_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch)
    assert capsys.readouterr().out.endswith("\n")


def test_an_empty_line_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "a", "", "b") == [["user: a"]]


def test_an_answer_that_is_broken_off_was_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "a", "stop", "b")[-1] == ["user: a", "assistant: re a", "user: b"]


def test_a_turn_beyond_the_models_positions_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "a", "long", "b")[-1] == ["user: a", "assistant: re a", "user: b"]
    assert "the model takes 8 with the answer; /reset begins another conversation" in " ".join(
        capsys.readouterr().out.split()
    )
