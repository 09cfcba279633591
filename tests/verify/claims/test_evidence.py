"""What ranks recorded is compared step by step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardtune.verify.claims import resume
from shardtune.verify.claims.checkpoints import TensorDifference
from shardtune.verify.claims.evidence import (
    NORM,
    MicroBatch,
    StepRecord,
    first_difference,
    read_evidence,
    require_frozen,
)
from shardtune.verify.result import Failed, Skipped


def step(*ranks: list[list[int]], rows: tuple[int, ...] = (4, 7, 9)) -> StepRecord:
    """A step whose rows were dealt to ranks as micro-batches."""
    dealt = tuple(tuple(MicroBatch(tuple(batch), str(batch)) for batch in batches) for batches in ranks)
    return StepRecord(1, (0, 0), (0, 3), rows, dealt, {"train/loss": (1.0).hex()}, tuple({} for _ in ranks))


def test_each_row_is_dealt_once() -> None:
    assert step([[4, 7], [9]]).dealt_wrongly() is None
    assert step([[4, 7]], [[9, -1]]).dealt_wrongly() is None
    assert step([[4, -1]], [[7, -1], [9]]).dealt_wrongly() is None, "blank rows keep ranks in step"
    assert step([[4, 7]], [[7, 9]]).dealt_wrongly() == "row 7 was computed more than once"
    assert step([[4]], [[9]]).dealt_wrongly() == "row 7 by no rank"
    assert step([[4, 4]], [[9, 9, 7]], rows=(4, 9, 4, 7, 9)).dealt_wrongly() is None, "an epoch may repeat rows"


def line(number: int, rank: int, ranks: int, loss: float = 1.0) -> str:
    micro_batches = [{"rows": [2 * number + rank], "digest": f"{number}{rank}"}]
    place = {"from": [0, 2 * number - 2], "to": [0, 2 * number], "rows": [2 * number, 2 * number + 1]}
    values = {"metrics": {"train/loss": loss.hex(), "train/grad_norm": (2.0).hex()}}
    return json.dumps({"step": number, "ranks": ranks, **place, "micro_batches": micro_batches, **values}) + "\n"


def test_the_last_computation_of_a_step_counts(tmp_path: Path) -> None:
    for rank in range(2):
        lines = [line(1, rank, 2), line(2, rank, 2, loss=5.0), line(2, rank, 2), line(3, rank, 2)]
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(lines) + line(4, rank, 2)[:20])  # one is being written
    found = read_evidence(tmp_path)
    assert [one.number for one in found.steps] == [1, 2, 3]
    assert list(found.again) == [2]
    assert [one.value("train/loss") for one in found.steps] == [1.0, 1.0, 1.0]
    assert found.steps[0].ranks == 2


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    for name, losses in (("one", (1.0, 1.0)), ("same", (1.0, 1.0 + 1e-12)), ("other", (1.0, 1.5))):
        (tmp_path / name).mkdir()
        text = "".join(line(number, 0, 1, loss) for number, loss in enumerate(losses, 1))
        (tmp_path / name / "rank0.jsonl").write_text(
            text.replace('"rows": [2, 3]', '"rows": [2]').replace('"rows": [4, 5]', '"rows": [4]')
        )
    one, same, other = (read_evidence(tmp_path / name) for name in ("one", "same", "other"))
    assert first_difference(one, one) is None
    assert first_difference(one, same, close=1e-10) is None
    bits = first_difference(one, same)
    assert bits is not None
    assert (bits.step, bits.what) == (2, "train/loss")
    real = first_difference(one, other, close=1e-10)
    assert real is not None
    assert real.text == "train/loss 1 and 1.5 (relative 0.33)"


def test_steps_that_take_no_rows_or_return_no_norm_are_skipped_with_the_reason(tmp_path: Path) -> None:
    values = {"metrics": {"train/loss": (1.0).hex()}}
    (tmp_path / "rank0.jsonl").write_text(json.dumps({"step": 1, "ranks": 1, **values}) + "\n")
    with pytest.raises(Skipped, match="takes no batch from"):
        read_evidence(tmp_path)
    with pytest.raises(Skipped, match="returns no train/grad_norm"):
        step([[4, 7, 9]]).value(NORM)


def test_updates_of_a_part_of_a_step_are_none_that_were_computed_again(tmp_path: Path) -> None:
    def part(number: int, end: int, row: int) -> str:
        found = json.loads(line(number, 0, 1)) | {"from": [0, 0], "to": [0, end], "rows": None, "loader_steps": None}
        return json.dumps(found | {"micro_batches": [{"rows": [row, -1], "digest": str(row)}]}) + "\n"

    (tmp_path / "rank0.jsonl").write_text(part(1, 0, 5) + part(2, 2, 6) + part(2, 2, 7))
    found = read_evidence(tmp_path)
    assert [(one.number, one.rows, one.loader_steps) for one in found.steps] == [(1, (5,), None), (2, (7,), None)]
    assert list(found.again) == [2]


def test_a_frozen_weight_that_one_rank_changes_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        changed = json.loads(line(2, rank, 2)) | ({"changed": ["a.weight", "b.weight"]} if rank else {})
        (tmp_path / f"rank{rank}.jsonl").write_text(line(1, rank, 2) + json.dumps(changed) + "\n")
    with pytest.raises(Failed, match=r"the run changes a weight that is frozen, in step 2: a\.weight and 1 more"):
        require_frozen(read_evidence(tmp_path), "the run")


def test_what_an_earlier_step_left_is_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's state that a resume changes: the weights after the step part before the next loss does."""
    for name, loss in (("whole", 1.0), ("other", 1.5)):
        (tmp_path / name).mkdir()
        for rank in range(2):
            lines = line(1, rank, 2) + line(2, rank, 2) + line(3, rank, 2, loss=loss)
            (tmp_path / name / f"rank{rank}.jsonl").write_text(lines)
    apart = TensorDifference("model", "a.weight", 0.1, "the weights a.weight differ by 0.1 of their size")
    monkeypatch.setattr(resume, "tensor_difference", lambda one, other: apart if one >= 2 else None)
    whole, other = (
        SimpleNamespace(evidence=read_evidence(tmp_path / name), checkpoint=lambda step: step)
        for name in ("whole", "other")
    )
    with pytest.raises(Failed, match=r"the run parts from the uninterrupted one after step 2: the weights a\.weight"):
        resume.require_same(whole, other, 3, "the run")  # pyright: ignore[reportArgumentType]
