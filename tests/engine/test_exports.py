"""Weights that are streamed in several requests, and what may happen between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune import NeedParallel, TrainEngine
from shardtune.engine import rank_module
from shardtune.errors import ModelError, ParallelError
from tests.support.engine_modules import SAMPLES, Trained, make


class Piecemeal(Trained):
    """Its tensors come one by one."""

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        rank_module.EXPORT_BYTES = 1

    def whole_again(self) -> None:
        rank_module.EXPORT_BYTES = 32 << 20


@pytest.fixture(params=["here", "fsdp2", "fsdp1", "ddp"])
def engine(request: pytest.FixtureRequest, model: Path, two_ranks: TrainEngine) -> Iterator[TrainEngine]:
    executor: Any = "fsdp2" if request.param == "here" else request.param
    with TrainEngine(make(model, Piecemeal), executor).build(
        colocate_with=None if request.param == "here" else two_ranks
    ) as made:
        yield made
        made.whole_again()


def test_two_streams_at_once_are_both_whole(engine: TrainEngine) -> None:
    whole = dict(engine.named_tensors())
    pairs = list(zip(engine.named_tensors(), engine.named_tensors(torch.float32), strict=True))
    assert [one[0] for one, _ in pairs] == [other[0] for _, other in pairs] == list(whole)
    assert all(torch.equal(whole[name], one) and other.dtype == torch.float32 for (name, one), (_, other) in pairs)


def test_a_step_within_a_stream_ends_it_and_a_forward_does_not(engine: TrainEngine) -> None:
    whole, stream = dict(engine.named_tensors()), engine.named_tensors()
    begun = dict(islice(stream, 2))
    engine.logits(NeedParallel(SAMPLES))
    assert all(torch.equal(whole[name], tensor) for name, tensor in {**begun, **dict(stream)}.items())
    stream = engine.named_tensors()
    begun = dict(islice(stream, 2))
    engine.grow(2.0)
    with pytest.raises(ModelError, match="the weights have changed since the stream began"):
        list(stream)
    assert len(dict(engine.named_tensors())) == len(whole)


def test_what_no_weight_can_be_exported_as_is_refused(model: Path, tmp_path: Path) -> None:
    with TrainEngine(make(model)).build() as engine:
        wrong: Any = "bfloat16"
        for dtype in (torch.int8, wrong):
            for call in (
                lambda dtype=dtype: list(engine.named_tensors(dtype)),
                lambda dtype=dtype: engine.save_pretrained(tmp_path / "new", dtype),
                lambda dtype=dtype: engine.push_weights(engine, dtype),
            ):
                with pytest.raises(ModelError, match="is no floating dtype of torch"):
                    call()
        assert not (tmp_path / "new").exists()
        module: Any = make(model)
        with pytest.raises(ParallelError, match="a Trained is no engine"):
            engine.push_weights(module)
        with pytest.raises(ParallelError, match="a Trained is no engine"):
            TrainEngine(module).build(colocate_with=module)
