"""A policy with a continuous action head: flow matching, with a plain regression beside it as a second term.

A small network sees the camera's image, the robot's state and the words of the instruction. Its head is asked for a
velocity: noise at time 0 becomes a chunk of actions at time 1 by following it (Lipman et al., 2023, arXiv:2210.02747;
for robots, Black et al., 2024, arXiv:2410.24164). The second term asks a linear layer for the chunk itself; it counts a
tenth and gives the features something to hold on to early on. Both are sums over the numbers of actions that an episode
still has: what is padded behind its end weighs nothing.
"""

import itertools
import zlib

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from shardtune import LossSum, Sample
from shardtune.data.robot.images import decode_frame
from shardtune.models.action.acting import ActingAdapter

WORDS = 512  # an instruction's words by their hash; the network learns what the few that occur mean
LONGEST = 12  # words of an instruction


class Options(BaseModel):
    image: int = 48  # pixels of the image, which is square
    chunk: int = 4  # actions that are planned ahead
    dimensions: int = 2
    state: int = 2
    scale: float = 12.5  # times an action is about from -1 to 1
    width: int = 128
    regression: float = 0.1  # how much the second term counts
    follow: int = 8  # steps from noise to actions


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.layers(x)


class FlowPolicy(nn.Module):
    """Image [rows, 3, H, W], state [rows, S], words [rows, LONGEST] to features; those, a chunk [rows, C, A] on its way
    and its time [rows] to a velocity [rows, C, A]."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.shape, width = (options.chunk, options.dimensions), options.width
        sizes = (3, 24, 48, 64)
        pairs = itertools.pairwise(sizes)
        self.eye = nn.Sequential(*(part for i, o in pairs for part in (nn.Conv2d(i, o, 3, 2, 1), nn.GELU())))
        self.look = nn.Linear(sizes[-1] * (options.image // 8) ** 2, width)
        self.words = nn.EmbeddingBag(WORDS, width, mode="sum", padding_idx=0)
        self.state = nn.Linear(options.state, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.regress = nn.Linear(width, options.chunk * options.dimensions)
        self.enter = nn.Linear(width + options.chunk * options.dimensions + 1, width)
        self.flow = nn.ModuleList(Block(width) for _ in range(3))
        self.leave = nn.Linear(width, options.chunk * options.dimensions)

    def features(self, image, state, words):
        x = self.look(self.eye(image.to(self.look.weight.dtype) / 127.5 - 1).flatten(1))
        x = x * torch.tanh(self.words(words)) + self.state(state.to(x.dtype))
        for block in self.blocks:
            x = block(x)
        return x

    def velocity(self, features, chunk, time):
        x = self.enter(torch.cat([features, chunk.flatten(1).to(features.dtype), time[:, None].to(features.dtype)], 1))
        for block in self.flow:
            x = block(x)
        return self.leave(x).unflatten(1, self.shape)

    def forward(self, image, state, words, chunk, time):
        features = self.features(image, state, words)
        return self.velocity(features, chunk, time), self.regress(features).unflatten(1, self.shape)


class FlowAdapter(ActingAdapter):
    Options = Options
    unit_classes = ("Block",)

    @property
    def action_chunk(self):
        return self.options.chunk  # rows are frames of robot data, each with its chunk of actions

    def build(self):
        return FlowPolicy(self.options)

    def encode(self, row):
        (camera,) = row["images"].values()
        fields = seen(decode_frame(camera), row["state"], row["instruction"])
        actions = np.asarray(row["actions"], np.float32) * self.options.scale
        return Sample(fields=fields | {"actions": actions, "real": ~np.asarray(row["action_is_pad"], bool)})

    def weights(self, sample):
        numbers = np.count_nonzero(sample.fields["real"]) * self.options.dimensions
        return {"flow": numbers, "regression": numbers}

    def loss(self, model, batch):
        actions, real = batch["actions"], batch["real"][..., None]
        noise, time = batch.randn_like("noise", actions), batch.rand_like("time", actions[:, 0, 0])
        on_its_way = torch.lerp(noise, actions, time[:, None, None])
        velocity, guess = model(batch["image"], batch["state"], batch["words"], on_its_way, time)
        flow = ((velocity - (actions - noise)) ** 2 * real).sum()
        regression = ((guess - actions).abs() * real).sum()
        numbers = int(real.sum()) * self.options.dimensions
        return {"flow": LossSum(flow, numbers), "regression": LossSum(self.options.regression * regression, numbers)}

    def metrics(self, model, batch):
        """How far the chunk is off that the policy would follow, in the units of the data."""
        chunk, real = self.act(model, batch["image"], batch["state"], batch["words"]), batch["real"][..., None]
        off = (chunk - batch["actions"]).abs() * real / self.options.scale
        return {"action_l1": (float(off.sum()), float(real.sum()) * self.options.dimensions)}

    def act(self, model, image, state, words):
        """Follow the velocity from a fixed noise, so that the policy is a function of what it sees."""
        features, steps = model.features(image, state, words), self.options.follow
        noise = torch.randn((1, *model.shape), generator=torch.Generator().manual_seed(0)).to(features)
        chunk = noise.expand(len(features), -1, -1)
        for step in range(steps):
            chunk = chunk + model.velocity(features, chunk, features.new_full((len(features),), step / steps)) / steps
        return chunk

    def policy(self, root, device):
        def act(observations):
            fields = [seen(next(iter(o["images"].values())), o["state"], o["instruction"]) for o in observations]
            inputs = (torch.from_numpy(np.stack([one[name] for one in fields])).to(device) for name in fields[0])
            with torch.no_grad():
                return (root.act(*inputs) / self.options.scale).float().cpu().numpy()

        return act


def seen(image, state, instruction):
    """What the network sees, as named arrays."""
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in instruction.lower().split()][:LONGEST]
    padded = np.array(words + [0] * (LONGEST - len(words)), np.int64)
    return {"image": np.ascontiguousarray(image.transpose(2, 0, 1)), "state": np.float32(state), "words": padded}
