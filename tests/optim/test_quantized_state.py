"""Rounding by chance, blocks of 8-bit codes, and where a rank's part lies."""

from __future__ import annotations

import pytest
import torch

from shardtune.optim.quantized_state import BLOCK, Place, codes, from_codes, noise, to_bf16, to_codes


def bits(*shape: int, key: int = 12345) -> torch.Tensor:
    return noise(Place(shape, (0,) * len(shape)).numbers(0, torch.empty(shape)), key)


def test_bits_are_fair_and_new_in_each_step() -> None:
    first, second = bits(1 << 16), bits(1 << 16, key=99 << 33)
    assert int(first.min()) >= 0
    assert int(first.max()) < 2**32
    for place in range(32):
        assert float((first >> place & 1).double().mean()) == pytest.approx(0.5, abs=0.012)
    both = torch.stack([first, second, first & 0xFFFF, first >> 16, torch.arange(1 << 16)]).double()
    correlation = torch.corrcoef(torch.cat([both, first.roll(1)[None].double()]))
    correlation[0, 3] = correlation[3, 0] = 0  # the upper half is most of the number
    correlation[3, 5] = correlation[5, 3] = 0 if abs(correlation[3, 5]) < 0.02 else 1
    assert float((correlation - torch.eye(6)).abs().max()) < 0.02


def test_bits_belong_to_places_in_the_whole() -> None:
    everything = bits(6, 5, 3)
    part = torch.empty(2, 5, 1)
    numbers = Place((6, 5, 3), (2, 0, 2)).numbers(1, part)
    assert torch.equal(noise(numbers, 12345), everything[3:5, :, 2:])
    assert torch.equal(noise(Place((90,), (30,)).numbers(0, torch.empty(15)), 12345), everything.view(-1)[30:45])


def test_bf16_is_right_on_average_and_never_further_than_its_neighbours() -> None:
    values = torch.tensor([1.001, -1.001, 3e-30, -7.77, 1.0, 0.0]).repeat(40000, 1)
    rounded = to_bf16(values, bits(40000, 6) & 0xFFFF).float()
    spacing = torch.tensor([2**-7, 2**-7, 2.0**-105, 2**-5, 1, 1])
    assert bool(((rounded - values).abs() < spacing)[:, :4].all())
    assert torch.equal(rounded[:, 4:], values[:, 4:])
    assert bool(((rounded.mean(0) - values[0]).abs()[:4] < 0.01 * spacing[:4]).all())


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_the_dynamic_tree(signed: bool) -> None:
    table = codes(signed, torch.device("cpu"))
    assert len(table) == 256
    assert bool((table.diff() > 0).all())
    assert float(table[-1]) == 1.0
    assert 0.0 in table.tolist()
    assert float(table[-2]) == pytest.approx(1 - 0.9 / (128 if signed else 256))
    smallest = 0.55e-6 if signed else 0.325e-6
    assert float(table[table > 0].min()) == pytest.approx(smallest)
    assert float(table[0]) == (pytest.approx(-(1 - 0.9 / 128)) if signed else 0.0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [8, 256, 300, 1000])
def test_blocks_come_back_within_a_step_of_their_code(signed: bool, width: int) -> None:
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(0)) ** 3
    values = values if signed else values.abs()
    values[1] = 0.0
    code, scale = to_codes(values, (bits(5, width) & 0xFFFF) / 2**16, signed=signed)
    assert code.dtype == torch.uint8
    assert scale.shape == (5, -(-width // BLOCK))
    back = from_codes(code, scale, signed=signed)
    largest = scale.repeat_interleave(BLOCK, -1)[:, :width]
    table = codes(signed, values.device)
    place = (torch.searchsorted(table, values / largest.clamp(min=1e-30), right=True) - 1).clamp(0, 254)
    between = (table[place] - 1e-6) * largest <= back, back <= (table[place + 1] + 1e-6) * largest
    assert bool((between[0] & between[1]).all())
    assert float((back - values).norm()) < 0.05 * float(values.norm())
    assert bool((back[1] == 0).all())
    assert signed or bool(((back > 0) == (values > 0)).all())


@pytest.mark.lengthy
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_on_average(signed: bool) -> None:
    row = torch.tensor([1.0, 0.5003, 0.1234, 0.0456, 0.002, 1e-4, 0.7, 0.0])
    values = row.repeat(40000, 1)
    chance = ((bits(40000, 8) & 0xFFFF) + 0.5) / 2**16
    back = from_codes(*to_codes(values, chance, signed=signed), signed=signed)
    torch.testing.assert_close(back.mean(0), row, rtol=2e-3, atol=1e-7)


def test_parts_of_rows_have_blocks_of_their_own() -> None:
    assert [Place((4, 600), (0, 0), parts).blocks for parts in (1, 2, 3)] == [3, 4, 3]
    assert Place((4, 1024), (0, 0)).same_blocks(4)
    assert Place((4, 1024), (0, 0), 2).same_blocks(1)
    assert not Place((4, 384), (0, 0), 2).same_blocks(1)  # as many, but from 192 on and not from 256
    assert not Place((7,), (0,)).has_blocks
    assert not Place((7, 4), (0, 0)).has_blocks
