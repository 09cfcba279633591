"""Which runs fill their micro-batches up to a few sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune import SFTWorker
from shardtune.config import load_recipe
from tests.support.dist.training import quiet, recipe, save_model, save_rows


class Own(SFTWorker):
    """Whose loss may count documents."""

    def get_train_model_output(self, batch: Any) -> Any:
        return super().get_train_model_output(batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("filled")
    save_model("dense", made / "dense")
    save_rows(made / "rows.jsonl", 9)
    return made


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("worker", "precision", "wanted", "filled"),
    [
        (SFTWorker, "bf16", None, True),
        (SFTWorker, "fp32", None, False),
        (SFTWorker, "fp32", True, True),
        (SFTWorker, "bf16", False, False),
        (Own, "bf16", None, False),
        (Own, "bf16", True, False),
    ],
)
def test_micro_batches_are_filled_where_sizes_cost_and_nothing_counts_documents(
    folder: Path, worker: type[SFTWorker], precision: str, wanted: bool | None, filled: bool
) -> None:
    changes = {"actor__model__precision": precision, "actor__fill_micro_batches": wanted}
    run = worker(load_recipe(recipe(folder / "dense", folder / "rows.jsonl", **changes)), report=quiet)
    run.setup()
    summary = run.summary()
    assert ("filled up to a few sizes" in summary.attention) == filled
    assert any("nothing is filled" in note for note in summary.notes) == (wanted is True and not filled)
    run.release()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"micro_batch_size": 2, "max_tokens_per_micro_batch": 4096}, "at most 2 rows (actor.micro_batch_size), some"),
        ({"micro_batch_size": None, "max_tokens_per_micro_batch": 4096}, ""),
        ({"micro_batch_size": 2}, ""),
        ({"micro_batch_size": 2, "max_tokens_per_micro_batch": 64, "max_length": 64}, ""),
        ({"micro_batch_size": 8, "max_tokens_per_micro_batch": 4096}, ""),  # all rows of a step are in one
    ],
)
def test_a_limit_of_rows_that_leaves_forwards_half_empty_is_said(
    limits: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_rows(rows := tmp_path / "rows.jsonl")
    changes = {f"{'data' if key == 'max_length' else 'actor'}__{key}": value for key, value in limits.items()}
    worker = SFTWorker(load_recipe(recipe(save_model("dense", tmp_path / "model"), rows, **changes)), report=quiet)
    worker.setup()
    notes = [note for note in worker.summary().notes if "micro_batch_size" in note]
    worker.release()
    assert (said in " ".join(notes)) if said else not notes
    assert all("of the 4,096 tokens" in note for note in notes)
