"""Workers with a fault each, over the recipe's own rows or over a loader of their own."""

import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardtune import FSDPSftWorker, SFTWorker


def scaled(losses, factor):
    return {name: type(loss)(loss.total * factor, loss.weight) for name, loss in losses.items()}


class DrawsFromPython(SFTWorker):
    """Draws from Python's global generator in a forward and before a step, where it is seeded."""

    factor = 1.0

    def run_training(self):
        self.factor = 1.0 + random.random()
        return super().run_training()

    def get_train_model_output(self, batch):
        return scaled(super().get_train_model_output(batch), self.factor + random.random())


class DrawsForItself(SFTWorker):
    """Draws from a generator of its own, which no checkpoint holds."""

    draws = random.Random(0)

    def get_train_model_output(self, batch):
        return scaled(super().get_train_model_output(batch), 1.0 + self.draws.random())


class ForgetsASlot(SFTWorker):
    """Loses Adam's first moment at a resume."""

    def load_checkpoint(self, path):
        step = super().load_checkpoint(path)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
        return step


class CountsForItself(SFTWorker):
    """Weighs the loss by a counter that no checkpoint holds."""

    count = 0

    def get_train_model_output(self, batch):
        self.count += 1
        return scaled(super().get_train_model_output(batch), 1.0 + 0.1 * self.count)


class LossOfTheRank(SFTWorker):
    """Weighs the loss by the rank."""

    def get_train_model_output(self, batch):
        return scaled(super().get_train_model_output(batch), 1.0 + self.ranks.rank)


class DrawsInTheLoss(SFTWorker):
    """Draws from torch's generator once per micro-batch."""

    def get_train_model_output(self, batch):
        return scaled(super().get_train_model_output(batch), 1.0 + float(torch.rand(())))


class WritesToFrozen(SFTWorker):
    """Changes a weight that is not trained, in the last steps."""

    def run_training(self):
        metrics = super().run_training()
        if self.step > 1:
            frozen = [p for p in self.inner_model.parameters() if not p.requires_grad]
            frozen[-1].data.mul_(1.5)
        return metrics


class MeanOfTheRank(SFTWorker):
    """Divides by the number of the micro-batch's own targets."""

    def get_train_model_output(self, batch):
        losses = super().get_train_model_output(batch)
        return {name: type(loss)(loss.total / loss.weight, loss.weight) for name, loss in losses.items()}


class DiesOfSigterm(SFTWorker):
    """Restores SIGTERM's default, and takes long to save."""

    def run_training(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return super().run_training()

    def save_checkpoint(self, path, step, *, background=False):
        if step == 2:
            time.sleep(1.0)
        return super().save_checkpoint(path, step, background=background and step != 2)


class ForgetsThePosition(SFTWorker):
    """Saves the beginning of the data as its position."""

    def save_checkpoint(self, path, step, *, background=False):
        epoch, rows = self._data_epoch, self._data_iter_offset
        self._data_epoch = self._data_iter_offset = 0
        saved = super().save_checkpoint(path, step, background=background)
        self._data_epoch, self._data_iter_offset = epoch, rows
        return saved


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Fits(FSDPSftWorker):
    """Without a fault: a network and a loader of the user's own."""

    net = Net

    def model_provider_func(self):
        torch.manual_seed(0)
        return self.net()

    def rows(self, data_paths):
        lines = [line for path in data_paths for line in Path(path).read_text().splitlines()]
        return [(torch.tensor(row["x"]), torch.tensor(row["y"])) for row in map(json.loads, lines)]

    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = self.rows(data_paths)
        return DataLoader(rows, batch_size=3, shuffle=True, collate_fn=stacked), {"num_samples": len(rows)}

    def get_train_model_output(self, batch):
        dtype = next(self.model.parameters()).dtype
        return ((self.model(batch["x"].to(dtype)) - batch["y"].to(dtype)) ** 2).mean()

    def get_eval_model_output(self, batch):
        return 0.0


def stacked(rows):
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}


class Batches:
    """Batches in an order that a function of the epoch gives."""

    def __init__(self, rows, order):
        self.rows, self.order = rows, order

    def __len__(self):
        return len(self.order()) // 3

    def __iter__(self):
        order = self.order()
        for start in range(0, 3 * len(self), 3):
            yield stacked([self.rows[row] for row in order[start : start + 3]])


class ShufflesByTheClock(Fits):
    """Shuffles by a generator of its own, which it seeds by the system."""

    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = self.rows(data_paths)
        order = list(range(len(rows)))
        random.Random(int.from_bytes(os.urandom(8), "big")).shuffle(order)
        return Batches(rows, lambda: order), {"num_samples": len(rows)}


class OrderOfTheRank(Fits):
    """Deals rows to ranks after each has shuffled them for itself."""

    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = self.rows(data_paths)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        order = random.Random(rank).sample(range(len(rows)), len(rows))[rank::ranks]
        return Batches(rows, lambda: order), {"num_samples": len(rows), "sharded": True}


class Remembers(Net):
    """Keeps a running mean of what it has seen in a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * x.float().mean(0))
        return super().forward(x + self.seen.to(x.dtype))


class RemembersForItself(Fits):
    net = Remembers


random.seed(0)
