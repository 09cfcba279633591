"""Plain modules of the kinds that differ in how they are built, sharded or saved."""

from __future__ import annotations

import torch
from torch import nn

SEED = 11
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Blocks in a list, each of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x).sum(-1)


class Convolutions(nn.Module):
    """Batch norms, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU()
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x[:, None]).flatten(1)).sum(-1)


class Tied(nn.Module):
    """One matrix under two names, and a whole block under two."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight
        first, second = (block.get_submodule("up") for block in self.blocks)
        second.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x).sum(-1)


class Bare(nn.Module):
    """Parameters of its own, one of them a scalar, with values of its own; a random buffer and a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, 3))
        self.unused = nn.Parameter(torch.tensor(2.0))
        self.inner = nn.Linear(3, 1)
        with torch.no_grad():
            self.inner.weight.uniform_(0.5, 1.0)
            self.weight[0] = 1.0
        self.directions: torch.Tensor
        self.kept_shift: torch.Tensor
        self.portion: torch.Tensor
        self.register_buffer("directions", torch.randn(WIDTH))
        self.register_buffer("kept_shift", self.shift.detach().clone())
        self.register_buffer("portion", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x * self.directions.to(x.dtype)) @ self.weight.T * self.scale.exp() + self.shift
        return self.inner(hidden * self.portion + self.kept_shift).sum(-1)


class Reading(nn.Module):
    """A constructor that needs its parameters' values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)
        self.inner.weight.data = torch.full((1, WIDTH), 0.25)
        self.bias = self.inner.bias
        self.size = float(self.inner.weight.detach().norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum(-1) * self.size + self.bias


KINDS: dict[str, type[nn.Module]] = {
    "perceptron": Perceptron,
    "convolutions": Convolutions,
    "tied": Tied,
    "bare": Bare,
    "reading": Reading,
}


def made(kind: str) -> nn.Module:
    """What the constructor makes, after `torch.manual_seed(SEED)`."""
    torch.manual_seed(SEED)
    return KINDS[kind]()
