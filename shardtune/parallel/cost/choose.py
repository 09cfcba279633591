"""Chooses the layout for a number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardtune.config.rank_layout import Layout, divides
from shardtune.parallel.cost.memory import Memory, memory
from shardtune.parallel.cost.shape import ModelShape, Setting, Work
from shardtune.parallel.cost.time import Machine, Time, time
from shardtune.parallel.cost.traffic import Exchange, traffic


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting and what it costs.

    Attributes:
        setting: of the recipe's keys.
        work: of a rank.
        memory: of a rank.
        exchanges: of a rank's step.
        time: of a step.
    """

    setting: Setting
    work: Work
    memory: Memory
    exchanges: tuple[Exchange, ...]
    time: Time

    @classmethod
    def of(cls, shape: ModelShape, setting: Setting, work: Work, machine: Machine) -> Plan:
        exchanges = tuple(traffic(shape, setting, work))
        return cls(setting, work, memory(shape, setting, work), exchanges, time(shape, setting, work, machine))

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(exchange.sent for exchange in self.exchanges)


USABLE = 0.9
"""Of memory; the rest is for the driver, communication buffers and gaps."""
NEAR = 1.02
"""Steps that take at most this many times the shortest count as equal; the one that sends the least is taken."""


def fits(plan: Plan, machine: Machine) -> bool:
    return plan.memory.device <= USABLE * machine.memory and plan.memory.host <= USABLE * machine.host_size


def layouts(shape: ModelShape, num_ranks: int, machine: Machine) -> Iterator[Layout]:
    """The candidates: tensor and sequence ranks on one node, copies of whole nodes.

    Sequence ranks that do not divide the heads form a ring.
    """
    near = min(num_ranks, machine.per_node)
    for inner in _divisors(math.gcd(near, num_ranks)):
        for tensor in _divisors(inner):
            sequence = inner // tensor
            if not divides(tensor, shape.heads, shape.kv_heads):
                continue
            outer = num_ranks // inner
            yield Layout(1, outer, sequence, tensor)
            node = machine.per_node // inner
            shard = max(1, node)
            while shard < outer:
                if outer % shard == 0:
                    yield Layout(outer // shard, shard, sequence, tensor)
                shard *= 2
            if outer > 1 and node > 1:
                yield Layout(outer, 1, sequence, tensor)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def fastest(
    shape: ModelShape, num_ranks: int, machine: Machine, step_tokens: int, length: int, most: int, trained: float = 1.0
) -> Plan:
    """The plan with the shortest step among those that fit, otherwise the one that needs the least memory.

    Host memory is used only where nothing fits without.

    Args:
        shape: of the model.
        num_ranks: of the run.
        machine: they run on.
        step_tokens: of an optimizer step, on all ranks.
        length: mean length of a row; no micro-batch is shorter.
        most: tokens of a micro-batch at most.
        trained: share of the tokens that are targets.
    """
    plans = list(_plans(shape, num_ranks, machine, step_tokens, length, most, trained))
    fitting = [plan for plan in plans if fits(plan, machine)]
    fitting = [plan for plan in fitting if not plan.setting.cpu_offload] or fitting
    if not fitting:
        return min(plans, key=lambda plan: plan.memory.device + plan.memory.host)
    shortest = min(plan.time.step for plan in fitting)
    near = [plan for plan in fitting if plan.time.step <= NEAR * shortest]
    return min(near, key=lambda plan: (plan.sent, plan.memory.device))


def _plans(
    shape: ModelShape, num_ranks: int, machine: Machine, step_tokens: int, length: int, most: int, trained: float
) -> Iterator[Plan]:
    for layout in layouts(shape, num_ranks, machine):
        if step_tokens / layout.num_data_ranks < length:
            continue  # not a row for each
        sizes = {most // 2**power for power in range(8) if most // 2**power >= length}
        for size in sorted(sizes):
            work = Work.of(step_tokens, layout, size, length, trained)
            for setting in _settings(Setting(layout)):
                yield Plan.of(shape, setting, work, machine)


def _settings(setting: Setting) -> Iterator[Setting]:
    for checkpointing in (False, "selective", True):
        for reduce in ("last", "every"):
            for reshard in (True, False):
                yield replace(
                    setting, gradient_checkpointing=checkpointing, reduce=reduce, reshard_after_forward=reshard
                )
    yield replace(setting, gradient_checkpointing=True, reduce="every", cpu_offload=True)
