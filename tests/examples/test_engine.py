"""The worked examples of the engine do what they say, on one rank and on two."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.doc_blocks import ROOT

FOLDER = ROOT / "examples" / "engine"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_rejection_sampling_raises_the_score_on_unseen_problems(ranks: str):
    told = re.search(
        r"held-out score: ([\d.]+)% before, ([\d.]+)% after", run("rejection_sampling.py", "--ranks", ranks)
    )
    assert told is not None
    before, after = map(float, told.groups())
    assert before < 60
    assert after > before + 25


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_distillation_brings_the_student_to_its_teacher(ranks: str):
    told = re.search(
        r"is ([\d.]+) nats per token from its teacher before, ([\d.]+) after",
        run("distillation.py", "--ranks", ranks, "--steps", "30"),
    )
    assert told is not None
    before, after = map(float, told.groups())
    assert after < before / 2


@pytest.mark.parametrize(
    ("script", "options", "told", "more"),
    [
        ("dpo.py", ["--steps", "30"], r"held-out score: ([\d.]+)% before, ([\d.]+)% after", 8),
        ("grpo.py", ["--rounds", "25"], r"held-out score: ([\d.]+)% before, ([\d.]+)% after", 8),
        ("reward_model.py", ["--steps", "100"], r"of four found: ([\d.]+)% before, ([\d.]+)% after", 15),
    ],
)
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.slow
def test_preference_and_policy_methods_raise_their_score(
    script: str, options: list[str], told: str, more: float, ranks: str
):
    found = re.search(told, run(script, "--ranks", ranks, *options))
    assert found is not None
    before, after = map(float, found.groups())
    assert after > before + more
