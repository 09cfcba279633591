"""Actions as tokens: against the published formulas written out one number at a time, and at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.action.tokens import (
    ActionCodec,
    ActionTokens,
    Bins,
    Statistics,
    action_statistics,
    choose_key,
    state_statistics,
)

VECTORS, DIMENSIONS, TOP = 100_000, 7, 32_000
ACTION = {
    "q01": [-0.5, -1.0, 0.0, -3.25, 2.0, -0.001, 0.0],
    "q99": [0.5, 2.0, 4.0, -1.75, 2.0, 0.002, 1.0],
    "mask": [True, True, True, True, True, True, False],
}
STATISTICS = {"bridge": {"action": ACTION, "proprio": {"q01": [0.0], "q99": [2.0]}}}


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    return Statistics.from_json(ACTION, "here")


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Also outside of the percentiles, and on them."""
    draws = np.random.default_rng(7)
    low, high = np.array(ACTION["q01"]), np.array(ACTION["q99"])
    values = low + (high - low) * draws.uniform(-0.2, 1.2, (VECTORS, DIMENSIONS))
    values[:100], values[100:200] = low, high
    return values


def one_normalised(value: float, low: float, high: float, masked: bool) -> float:
    if not masked:
        return value
    if low == high:
        return 0.0
    return max(-1.0, min(1.0, 2 * (value - low) / (high - low) - 1))


def one_token(normalised: float) -> int:
    """V less the number of the 256 edges, evenly spaced from -1 to 1, that are not above the value."""
    clipped = max(-1.0, min(1.0, normalised))
    edge = min(255, int((clipped + 1) * 127.5))
    while edge < 255 and -1 + (edge + 1) * 2 / 255 <= clipped:
        edge += 1
    while edge > 0 and -1 + edge * 2 / 255 > clipped:
        edge -= 1
    return TOP - (edge + 1)


def one_value(token: int) -> float:
    """The middle between two edges."""
    number = max(0, min(254, TOP - token - 1))
    return ((-1 + number * 2 / 255) + (-1 + (number + 1) * 2 / 255)) / 2


@pytest.mark.lengthy
def test_a_hundred_thousand_vectors_are_as_the_formulas_say(statistics: Statistics, vectors: np.ndarray) -> None:
    codec = ActionCodec(ActionTokens(TOP), statistics)
    normalised = statistics.normalise(vectors)
    ids = codec.encode(vectors[:, None])
    back = codec.decode(ids)[:, 0]
    low, high, mask = ACTION["q01"], ACTION["q99"], ACTION["mask"]
    wrong = 0
    for vector, at, tokens, decoded in zip(
        vectors.tolist(), normalised.tolist(), ids.tolist(), back.tolist(), strict=True
    ):
        for i in range(DIMENSIONS):
            expected = one_normalised(vector[i], low[i], high[i], mask[i])
            assert abs(at[i] - expected) <= 1e-15
            # A value within rounding of an edge may fall on either side of it.
            wrong += tokens[i] != one_token(at[i])
            middle = one_value(tokens[i])
            real = 0.5 * (middle + 1) * (high[i] - low[i]) + low[i] if mask[i] else middle
            assert abs(decoded[i] - real) <= 2e-7 * max(1.0, abs(real))
    assert wrong <= 2 * VECTORS * DIMENSIONS * 1e-6
    assert ids.min() == TOP - 256
    assert ids.max() == TOP - 1


def test_the_round_trip_is_off_by_half_a_bin_at_most(vectors: np.ndarray) -> None:
    tokens = ActionTokens(TOP)
    values = np.clip(vectors / 4, -1, 1)
    error = np.abs(tokens.decode(tokens.encode(values)) - values).max()
    assert 0.99 / 255 < error <= 1 / 255 + 1e-12


def test_the_ends_of_the_range() -> None:
    tokens = ActionTokens(TOP)
    assert tokens.encode(np.array([-1.0, -7.0, 1.0, 7.0, 0.0])).tolist() == [31999, 31999, 31744, 31744, 31872]
    # The edge at 1 has a token of its own, which shares the last of 255 centres.
    assert tokens.decode(np.array([31999, 31745, 31744])).tolist() == pytest.approx([-254 / 255, 254 / 255, 254 / 255])
    assert tokens.decode(np.array([5, 32063])).tolist() == pytest.approx([254 / 255, -254 / 255])
    assert (tokens.first, tokens.top) == (31744, 32000)


def test_other_numbers_of_bins() -> None:
    tokens = ActionTokens(10, Bins(4))
    assert tokens.encode(np.array([-1, -0.5, 0.0, 0.5, 1.0])).tolist() == [9, 9, 8, 7, 6]
    assert tokens.decode(np.array([9, 8, 7, 6])).tolist() == pytest.approx([-2 / 3, 0, 2 / 3, 2 / 3])


def test_a_constant_dimension_is_0_and_comes_back_exactly(statistics: Statistics) -> None:
    normalised = statistics.normalise(np.full((3, DIMENSIONS), 2.5))
    assert normalised[:, 4].tolist() == [0.0] * 3
    assert statistics.unnormalise(np.full(DIMENSIONS, 0.7))[4] == 2.0


def test_what_the_mask_leaves_out_stays(statistics: Statistics) -> None:
    values = np.linspace(-1, 1, 9)[:, None].repeat(DIMENSIONS, 1)
    assert statistics.normalise(values)[:, 6].tolist() == values[:, 6].tolist()
    assert statistics.unnormalise(values)[:, 6].tolist() == values[:, 6].tolist()
    constant = Statistics.from_json({"q01": [1.0], "q99": [1.0], "mask": [False]}, "here")
    assert constant.normalise(np.array([1.0])).tolist() == [1.0]


def test_normalising_is_undone(statistics: Statistics, vectors: np.ndarray) -> None:
    inside = np.clip(vectors, statistics.low, statistics.high)
    assert np.abs(statistics.unnormalise(statistics.normalise(inside)) - inside).max() < 1e-14


def test_chunks_go_step_by_step(statistics: Statistics) -> None:
    steps = np.random.default_rng(1).uniform(-1, 1, (2, 5, 3, DIMENSIONS))
    chunk, single = (ActionCodec(ActionTokens(TOP), statistics, chunk) for chunk in (3, 1))
    ids = chunk.encode(steps)
    assert ids.shape == (2, 5, 21)
    assert ids.tolist() == single.encode(steps.reshape(2, 5 * 3, 1, DIMENSIONS)).reshape(2, 5, 21).tolist()
    assert chunk.decode(ids).shape == steps.shape
    assert chunk.decode(ids).dtype == np.float32
    with pytest.raises(DataError, match="no chunks of 3 steps"):
        chunk.encode(steps[:, :, :2])
    with pytest.raises(DataError, match="no chunks of 21 tokens"):
        chunk.decode(ids[..., :20])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused(statistics: Statistics, wrong: float) -> None:
    actions = np.zeros((4, 1, DIMENSIONS))
    actions[2, 0, 5] = wrong
    with pytest.raises(DataError, match=rf"{wrong} at \[2, 0, 5\]"):
        ActionCodec(ActionTokens(TOP), statistics).encode(actions)
    with pytest.raises(DataError, match="normalised values"):
        Bins().encode(np.array([wrong]))


def test_other_dimensions_are_refused(statistics: Statistics) -> None:
    with pytest.raises(DataError, match=r"\[2, 6\] do not have the 7 dimensions"):
        statistics.normalise(np.zeros((2, 6)))
    with pytest.raises(ConfigError, match="action_token_len is 6, the actions of bridge have 7"):
        action_statistics(STATISTICS, None, 6)


def test_the_key_is_chosen() -> None:
    both = {**STATISTICS, "fractal": STATISTICS["bridge"]}
    assert choose_key(STATISTICS, None) == "bridge"
    assert choose_key(both, "fractal") == "fractal"
    with pytest.raises(ConfigError, match="2 datasets: bridge, fractal"):
        choose_key(both, None)
    with pytest.raises(ConfigError, match=r"(?s)'bridg'; there are of: bridge, fractal.*did you mean bridge") as caught:
        choose_key(both, "bridg")
    assert caught.value.where == "actor.model.unnorm_key"
    with pytest.raises(ConfigError, match="no action statistics"):
        choose_key({}, None)
    assert state_statistics(STATISTICS, None).normalise(np.array([1.5])).tolist() == [0.5]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"q01": [0.0]}, "have no q99, but q01"),
        ({"q01": [0.0], "q99": [1.0, 2.0]}, r"q01 has shape \[1\], q99 \[2\]"),
        ({"q01": [0.0], "q99": [1.0], "mask": [1.0]}, "float64"),
        ({"q01": [0.0], "q99": [math.nan]}, "q01 and q99: nan"),
        ({"q01": [2.0, 2.0], "q99": [3.0, 1.0]}, "dimension 1: q01 is 2.0, q99 is 1.0"),
        ({"q01": ["a"], "q99": ["b"]}, "no lists of numbers"),
    ],
)
def test_statistics_that_cannot_be_used(section: dict[str, list[float]], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        action_statistics({"x": {"action": section}}, "x")
    assert caught.value.where == "dataset_statistics.json: x.action"
    with pytest.raises(DataError, match="have no 'action', but proprio"):
        action_statistics({"x": {"proprio": section}}, "x")


def test_bins_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="num_action_bins is 1"):
        Bins(1)
    with pytest.raises(ModelError, match="256 action tokens do not fit below id 200"):
        ActionTokens(200)
