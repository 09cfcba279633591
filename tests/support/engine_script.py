"""A user's script without a guard: the same in process, under torchrun and on Ray."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn
from shardtune.engine import session
from shardtune.engine.rank_process import Limits
from shardtune.errors import ParallelError

SAMPLES = [[(7 * row + 3 * place) % 64 for place in range(12)] for row in range(5)]
model, out, backend, ranks = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


class Own(ValueError):
    pass


class MyModel(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def step(self, input_ids):
        ids = torch.tensor(input_ids, device="cuda")
        loss = F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def fails(self):
        raise Own("on purpose")

    def step_on_and_on(self, file):
        for _ in range(1000):
            self(torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()
            Path(file).touch()
            time.sleep(0.01)

    def unequal(self):
        for _ in range(1 + self.ranks.rank):
            self(torch.zeros(1, 3, dtype=torch.int64))


def interrupt_once(file):
    while not Path(file).exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def stopped(engine):
    """What becomes of an interrupted call, the losses after it, and the message for a call that is stuck."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    threading.Thread(target=interrupt_once, args=(out + ".begun",), daemon=True).start()
    try:
        engine.step_on_and_on(out + ".begun")
        ended = "by itself"
    except KeyboardInterrupt:
        ended = "interrupted"
    losses = engine.step(NeedParallel(SAMPLES))
    try:
        engine.unequal()
        stuck = ""
    except ParallelError as error:
        stuck = str(error)
    return ended, losses, stuck


shardtune.init(None if backend == "auto" else backend, device="cpu")
session.current_session().limits = Limits(ended_seconds=1.0)
with init_empty_weights():
    module = MyModel.from_pretrained(model)
engine = TrainEngine(module)
engine.build(data_parallel_size=ranks)
losses = [engine.step(NeedParallel(SAMPLES)) for _ in range(2)]
try:
    engine.fails()
except Own as error:
    told = str(error)
other = TrainEngine(module, executor="ddp").build(colocate_with=engine)
again = [other.step(NeedParallel(SAMPLES)) for _ in range(2)]
state = dict(engine.named_tensors())
engine.step(NeedParallel(SAMPLES))
engine.push_weights(other)
mine, theirs = dict(engine.named_tensors()), dict(other.named_tensors())
pushed = all(torch.equal(mine[name], theirs[name]) and not torch.equal(mine[name], state[name]) for name in state)
other.close()
found = {"pushed": pushed, "losses": losses, "again": again, "told": told, "state": state}
if backend == "ray":
    found["stopped"] = stopped(engine)
torch.save(found, out)
engine.close()
