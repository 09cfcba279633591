"""Plans of recipes: from a config.json alone, from rows, their time, and changes that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from shardtune.errors import ConfigError
from shardtune.run.plan.plan import Plan, Planner, Speed, planner
from shardtune.run.plan.rows import Given
from shardtune.run.plan.solve import solve
from shardtune.run.plan.table import change_lines, lines, verdict

GIVEN = Given(tokens=64_000, length=64)
UNKNOWN = Speed()


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def planned(folder: Path, *changes: str, speed: Speed = UNKNOWN, memory: float | None = None) -> Planner:
    words = ["micro_batch_size=32", "global_batch_size=64", *changes]
    return planner(str(folder), words, ranks=1, given=GIVEN, speed=speed, memory=memory, report=lambda _: None)


@pytest.mark.lengthy
def test_a_config_alone_is_enough(config_alone: Path) -> None:
    plan = planned(config_alone, speed=Speed(tokens_per_second=8192.0)).plan()
    assert plan.parameters.total == plan.parameters.trained == 139_584
    assert (plan.work.steps, plan.work.step_tokens, plan.work.micro_batches) == (16, 4096, 2)
    assert plan.work.micro_batch_tokens == 2048
    assert plan.step_seconds == 0.5
    assert plan.seconds == pytest.approx(64_000 / 8192)
    assert plan.fits is None
    assert plan.available is None
    text = "\n".join(lines(plan))
    assert "139,584 trained" in text
    assert "16 steps" in text
    assert "--gpu-memory" in text
    assert json.loads(json.dumps(plan.to_dict()))["peak"] == plan.peak


@pytest.mark.parametrize(
    ("words", "run", "tokens"),
    [
        ("runner.max_epochs=3", "6 steps", 4500),
        ("runner.max_epochs=3 runner.max_steps=3", "3 steps", 2524),
        ("runner.max_epochs=-1 runner.max_steps=1", "1 step", 1024),
    ],
)
def test_the_last_step_of_an_epoch_has_the_tokens_that_are_left(
    config_alone: Path, words: str, run: str, tokens: int
) -> None:
    """And a short step has digits."""
    plan = planner(
        str(config_alone), ["global_batch_size=64", *words.split()], ranks=1, given=Given(tokens=1500, length=16),
        speed=Speed(tokens_per_second=1e6), memory=None, report=lambda _: None,
    ).plan()  # fmt: skip
    text = "\n".join(lines(plan))
    assert f"{run}, {tokens:,} tokens" in text
    assert "0.00102 s a step, under 1 s in all" in text


def test_a_length_that_training_does_not_have(config_alone: Path) -> None:
    words = ["data.max_length=32", "runner.max_steps=1"]

    def notes(length: int) -> list[str]:
        given = Given(length=length)
        found = planner(str(config_alone), words, ranks=1, given=given, memory=None, report=lambda _: None).plan()
        return [note for note in found.notes if "--length" in note]

    assert notes(32) == []
    assert notes(48) == [
        "--length 48 is above data.max_length (32), so that training has no such rows (data.on_too_long: truncate): "
        "add data.max_length=48"
    ]


@pytest.mark.lengthy
def test_the_time_follows_from_a_share_of_the_peak_or_from_a_run(config_alone: Path, tmp_path: Path) -> None:
    plan = planned(config_alone, speed=Speed(mfu=0.5, flops=1e12)).plan()
    assert plan.rate is not None
    assert plan.parameters.use is not None
    # 6 operations per multiplied parameter and token, without the embedding, and attention.
    per_token = 6 * (139_584 - 512 * 64) + 6 * 2 * 64 * 64
    assert plan.rate.tokens_per_second == pytest.approx(0.5e12 / per_token)
    steps = [{"step": n, "perf/tokens_per_second": rate} for n, rate in enumerate((1.0, 30.0, 10.0, 20.0), 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    rate = Speed(run=tmp_path).rate(plan.parameters, plan.work, plan.hardware)
    assert rate is not None
    assert rate.tokens_per_second == 20.0
    with pytest.raises(ConfigError, match="no measured rate"):
        Speed(run=tmp_path / "none").rate(plan.parameters, plan.work, plan.hardware)


@pytest.mark.lengthy
def test_what_does_not_fit_gets_the_cheapest_changes_that_do(config_alone: Path) -> None:
    found = planned(config_alone)
    whole = found.plan()
    assert whole.needed is not None
    assert whole.peak is not None
    enough = replace(found, hardware=replace(found.hardware, memory=2 * whole.needed))
    assert list(solve(enough, _with(whole, 2.0))) == []
    limit = (whole.needed - 0.25 * whole.peak) / whole.needed
    tight = _with(whole, limit)
    changes = list(solve(replace(found, hardware=tight.hardware), tight))
    assert len(changes) == 3
    assert all(change.plan.fits for change in changes)
    costs = [sum(option.cost for option in change.options) for change in changes]
    assert costs == sorted(costs)
    assert changes[0].overrides[0].startswith("max_tokens_per_micro_batch=")
    text = "\n".join(change_lines(tight, changes))
    assert text.splitlines()[1].startswith("1. max_tokens_per_micro_batch=")
    assert "does NOT fit" in verdict(tight)
    with pytest.raises(ConfigError, match="unknown"):
        solve(found, whole)


@pytest.mark.slow
def test_a_ring_is_proposed_where_ranks_do_not_divide_the_heads(
    config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks share what is too much for two; the model has four heads."""
    monkeypatch.setattr("shardtune.run.plan.solve.WANTED", 1)
    words = [
        "micro_batch_size=1", "global_batch_size=6", "data.max_length=1024", "model.gradient_checkpointing=true",
        "fsdp_config.reduce=every", "optim.state_dtype=int8",
    ]  # fmt: skip
    given = Given(tokens=6 * 1024, length=1024)
    found = planner(str(config_alone), words, ranks=6, given=given, memory=80e9, report=lambda _: None)
    plan, three = found.plan(), found.plan(["parallel.sequence=3"])
    assert three.needed is not None
    tight = replace(plan, hardware=replace(plan.hardware, memory=three.needed + 1))
    (change,) = solve(replace(found, hardware=tight.hardware), tight)
    assert change.overrides[0] == "parallel.sequence=3"
    assert [option.effect for option in change.options] == [
        "3 ranks share the tokens of the same rows, by ring attention"
    ]


def _with(plan: Plan, share: float) -> Plan:
    assert plan.needed is not None
    return replace(plan, hardware=replace(plan.hardware, memory=share * plan.needed))


def test_a_worker_with_batches_of_its_own_is_refused(config_alone: Path) -> None:
    with pytest.raises(ConfigError, match="makes its own batches"):
        planned(config_alone, "worker=sft_trainer")
