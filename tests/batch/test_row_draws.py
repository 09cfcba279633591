"""The random numbers of a row are its own: no other row, no padding and no rank has a part in them."""

from __future__ import annotations

import pytest
import torch

from shardtune import Batch
from shardtune.batch.row_draws import RowDraws
from shardtune.errors import ModelError

WIDE = torch.zeros(3, 6, 4, dtype=torch.float64)


def test_a_row_draws_the_same_in_any_company_and_however_far_it_is_padded() -> None:
    together, alone = RowDraws(7, (5, 2, 9)), RowDraws(7, [9])
    for draw in ("randn_like", "rand_like"):
        numbers, own = (getattr(one, draw)("noise", WIDE[: len(one.rows)]) for one in (together, alone))
        assert torch.equal(numbers[2:], own)
        further = getattr(alone, draw)("noise", torch.zeros(1, 9, 11, dtype=torch.float64))
        assert torch.equal(further[:, :6, :4], own)
        assert len(numbers.unique()) == numbers.numel()


def test_keys_names_rows_and_kinds_are_independent() -> None:
    like = torch.zeros(1, 4000, dtype=torch.float64)
    drawn = [
        RowDraws(1, [0]).randn_like("noise", like), RowDraws(2, [0]).randn_like("noise", like),
        RowDraws(1, [1]).randn_like("noise", like), RowDraws(1, [-1]).randn_like("noise", like),
        RowDraws(1, [0]).randn_like("other", like), RowDraws(1, [0]).rand_like("noise", like) - 0.5,
    ]  # fmt: skip
    correlations = torch.corrcoef(torch.cat(drawn)) - torch.eye(len(drawn))
    assert correlations.abs().max() < 0.06


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_distributed_as_they_should_be(dtype: torch.dtype) -> None:
    like = torch.zeros(50, 40, 50, dtype=dtype)
    draws = RowDraws(3, range(50))
    normal, uniform = draws.randn_like("a", like), draws.rand_like("a", like)
    assert (normal.dtype, uniform.dtype) == (dtype, dtype)
    normal, uniform = normal.double(), uniform.double()
    for place in (normal.flatten(), normal.mean((1, 2)) * 2000**0.5, normal.mean((0, 1)) * 2000**0.5):
        assert abs(float(place.mean())) < 4 / len(place) ** 0.5
        assert float(place.std()) == pytest.approx(1, abs=4 / (2 * len(place)) ** 0.5)
    assert float((normal.abs() > 3).double().mean()) == pytest.approx(0.0027, abs=0.0007)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    half = 2.0**-9 if dtype == torch.bfloat16 else 0  # it has 8 bits, and the lower neighbour is taken
    assert float(uniform.mean()) == pytest.approx(0.5 - half, abs=0.004)
    assert float(uniform.std()) == pytest.approx(1 / 12**0.5, abs=0.004)


def test_the_numbers_stay_what_they_are() -> None:
    """A resumed run of an older version has to draw what it would have drawn."""
    draws, like = RowDraws(123, [4]), torch.zeros(1, 3, dtype=torch.float64)
    assert draws.rand_like("time", like)[0].tolist() == RAND
    assert draws.randn_like("noise", like)[0].tolist() == pytest.approx(RANDN, rel=1e-14)
    assert torch.equal(draws.randn_like("noise", like.float()), draws.randn_like("noise", like).float())


RAND = [0.35694861984781967, 0.6979986913518365, 0.297964775764501]
RANDN = [-0.7844105013073611, 1.2774007712934443, 0.45496859897939107]


def test_a_batch_draws_for_its_rows_and_refuses_another_number_of_them() -> None:
    batch = Batch(rows=(3, 8), fields={"tokens": torch.zeros(2, 5, dtype=torch.int64)}, key=11)
    assert torch.equal(batch.randn_like("a", WIDE[:2]), RowDraws(11, (3, 8)).randn_like("a", WIDE[:2]))
    dropped = batch.rand_like("drop", batch["tokens"])
    assert (dropped.dtype, dropped.shape) == (torch.float32, (2, 5))
    for wrong in (WIDE, torch.zeros(())):
        with pytest.raises(ModelError, match="random numbers of 2 rows"):
            batch.rand_like("a", wrong)
