"""Claims about training hold on a tiny recipe, and each is refuted by a fault that it is there to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardtune.config import load_recipe, user_code
from shardtune.errors import ParallelError
from shardtune.run.choose_worker import make_worker
from shardtune.run.verified import read_verified
from shardtune.verify.claims.claim import Claim, check_claims
from shardtune.verify.claims.table import CLAIMS
from shardtune.verify.result import Outcome, Report, Result
from tests.support.tiny_run import Tiny, make_tiny
from tests.support.tiny_tasks import rows, save_encoder, write
from tests.support.workspace import run_cli

pytestmark = pytest.mark.lengthy

WORKERS = Path(__file__).parents[2] / "support" / "planted" / "workers.py"
"""Workers with a fault each."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("claims"), dropout=0.2)


def check(tiny: Tiny, name: str, worker: str = "", *, steps: int, ranks: tuple[int, ...] = (1, 2)) -> Result:
    changes: dict[str, object] = {}
    if worker:
        changes["actor__worker"] = f"{WORKERS}:{worker}"
    recipe = load_recipe(tiny.recipe(f"of-{name}", **changes))
    claims = [claim for claim in CLAIMS if claim.name == name]
    report = check_claims(
        claims, recipe, steps=steps, ranks=ranks, make_worker=make_worker, title=name, report=lambda _: None
    )
    assert not (tiny.runs / f"of-{name}").exists(), "nothing is written into the recipe's run directory"
    return report[name]


def test_a_run_that_is_continued_is_the_uninterrupted_one(tiny: Tiny) -> None:
    found = check(tiny, "resume", steps=4)
    assert found.outcome == "passed", found
    assert found.text.startswith("stopped after steps 1 and 3 of 4 (step 3 ends an epoch)")


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        pytest.param("DrawsForItself", "in step 2: train/loss ", id="draws", marks=pytest.mark.slow),
        pytest.param("ForgetsASlot", "after step 2: the weights ", id="slot"),
    ],
)
def test_what_is_not_in_the_checkpoint_is_named(tiny: Tiny, worker: str, words: str) -> None:
    found = check(tiny, "resume", worker, steps=2)
    assert found.outcome == "failed", found
    assert words in found.text


def test_draws_of_the_global_generators_are_repeated(tiny: Tiny) -> None:
    found = check(tiny, "resume", "DrawsFromPython", steps=2)
    assert found.outcome == "passed", found


@pytest.mark.slow  # twelve processes; test_layouts and test_order hold the same in one
def test_numbers_do_not_depend_on_ranks(tiny: Tiny) -> None:
    found = check(tiny, "elastic", steps=2)
    assert found.outcome == "passed", found
    assert "dropout off" in found.text
    assert "from 1 to 2 and back at a resume" in found.text


def test_a_loss_that_depends_on_the_rank_is_named(tiny: Tiny) -> None:
    found = check(tiny, "elastic", "LossOfTheRank", steps=1)
    assert found.outcome == "failed", found
    assert "1 rank and 2 ranks part in step 1: train/loss" in found.text
    assert "what depends on the rank" in found.remedy


def test_one_number_of_ranks_is_nothing_to_compare(tiny: Tiny) -> None:
    found = check(tiny, "elastic", steps=1, ranks=(1,))
    assert (found.outcome, found.text) == ("skipped", "--ranks 1: give two numbers or more, as --ranks 1,2")


def test_ranks_for_which_there_is_no_gpu_are_left_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(device: str, local_rank: int) -> torch.device:
        if local_rank:
            raise ParallelError("rank 1 of this machine has no GPU", where="", remedy="")
        return torch.device("cpu")

    monkeypatch.setattr("shardtune.verify.claims.ground.choose_device", choose)
    found = check(tiny, "elastic", steps=1)
    assert found.outcome == "skipped", found
    assert "not on 2 ranks: rank 1 of this machine has no GPU; runner.device=cpu compares them" in found.text


@pytest.mark.slow  # six processes; test_signals and test_kill hold the same
def test_a_preempted_run_loses_nothing(tiny: Tiny) -> None:
    found = check(tiny, "preempt", steps=5)
    assert found.outcome == "passed", found
    assert found.text.endswith("no step lost or computed twice, bitwise the uninterrupted run")


@pytest.mark.slow
def test_a_worker_that_dies_of_sigterm_loses_a_step(tiny: Tiny) -> None:
    found = check(tiny, "preempt", "DiesOfSigterm", steps=5)
    assert found.outcome == "failed", found
    assert "was computed twice" in found.text


def test_the_recipe_of_a_refused_run_is_one_message(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(tiny.recipe("refused", data__columns={"prompt": "absent"})))
    ended = run_cli("verify", "resume", str(file), "--steps", "2")
    assert ended.code == 2
    assert "the shortened run was refused" in ended.err
    assert "absent" in ended.err


def test_what_was_verified_is_noted_in_the_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Outcome] = {"resume": "passed", "elastic": "failed"}

    def check_claims(claims: list[Claim], *_: object, **__: object) -> Report:
        return Report("recipe", [Result(claim.name, found[claim.name], "seen") for claim in claims])

    monkeypatch.setattr("shardtune.verify.claims.claim.check_claims", check_claims)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(tiny.recipe("noted")))
    run_cli("verify", "resume", str(file))
    assert not tiny.run("noted").exists()
    tiny.run("noted").mkdir(parents=True)
    assert run_cli("verify", "resume", str(file)).code == 0
    ended = run_cli("verify", "elastic", str(file), "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["results"][0]["name"] == "elastic"
    noted = read_verified(tiny.run("noted"))
    assert [(one.claim, one.outcome) for one in noted] == [("resume", "passed"), ("elastic", "failed")]


def test_stopped_in_the_middle_nothing_is_left(tiny: Tiny, tmp_path: Path) -> None:
    """SIGTERM to the command alone ends its shortened runs and removes their folder."""
    file, scratch = tmp_path / "recipe.yaml", tmp_path / "scratch"
    file.write_text(json.dumps(tiny.recipe("stopped-verify")))
    scratch.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "verify", "resume", str(file)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not list(scratch.glob("shardtune-verify-*/*.recorded/rank0.jsonl")) and time.monotonic() < until:
        assert command.poll() is None
        time.sleep(0.02)
    command.terminate()
    _, told = command.communicate(timeout=30)
    assert (command.returncode, told.strip()) == (
        75,
        "stopped: nothing of this is noted, and the shortened runs are removed",
    )
    assert not list(scratch.glob("shardtune-verify-*"))
    running = subprocess.run(["ps", "axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(scratch) not in running


@pytest.mark.slow
def test_a_bias_that_rounding_alone_moves_is_no_fault(tmp_path: Path) -> None:
    """The gradient of the bias of attention's keys is zero but for rounding, and Adam divides it by its own size."""
    save_encoder(tmp_path / "encoder")
    values = {
        "model": {"model_type": "sequence_classifier", "model_path": str(tmp_path / "encoder")},
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "optim": {"lr": 1e-3},
        "data": {
            "train_data_paths": write(tmp_path / "rows.jsonl", rows("sequence_classifier", 24)),
            "max_length": 32,
            "num_workers": 0,
            "cache_dir": str(tmp_path / "cache"),
        },
        "runner": {"device": "cpu", "logger": {"log_path": str(tmp_path / "runs")}},
    }
    (claim,) = [claim for claim in CLAIMS if claim.name == "elastic"]
    found = check_claims(
        [claim], load_recipe(values), steps=3, ranks=(1, 2), make_worker=make_worker, title="", report=lambda _: None
    )["elastic"]
    assert found.outcome == "passed", found


def test_an_error_that_no_check_foresees_leaves_the_other_results(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_packages", set())  # another test may have named these tests as a user's package

    def broken(_: object) -> str:
        raise KeyError("rows")

    claims = [Claim("parity", "", broken), Claim("export", "", lambda _: "seen")]
    report = check_claims(
        claims, load_recipe(tiny.recipe("b")), steps=1, ranks=(1,), make_worker=make_worker, title="", report=print
    )
    assert report["export"].outcome == "passed"
    assert report["parity"].text.startswith("nothing was compared: KeyError: 'rows'\nTraceback")
    assert "in broken" in report["parity"].text
    assert "test_training_claims.py:" in report["parity"].where
