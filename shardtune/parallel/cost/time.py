"""The time of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardtune.parallel.cost.memory import memory
from shardtune.parallel.cost.shape import ModelShape, Setting, Work
from shardtune.parallel.cost.traffic import RING, Exchange, traffic


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step runs on; the rates are those of data sheets, the shares what is reached of them.

    Attributes:
        per_node: ranks of a node.
        memory: bytes of a device.
        host_size: bytes of host memory, a device's share.
        flops: dense operations per second of a device, in the precision that is computed in.
        flops_share: that matrix products reach.
        inside: bytes per second from a device to others of its node, one way.
        outside: bytes per second from a device to other nodes, one way.
        link_share: that collectives reach.
        hop: seconds from one node to the next.
        device_memory: bytes per second of the device's memory.
        host: bytes per second between a device and host memory, one way.
        host_memory: bytes per second of host memory, a device's share.
    """

    per_node: int = 8
    memory: float = 80e9
    host_size: float = 250e9
    flops: float = 989e12
    flops_share: float = 0.5
    inside: float = 450e9
    outside: float = 50e9
    link_share: float = 0.8
    hop: float = 5e-6
    device_memory: float = 3.35e12
    host: float = 55e9
    host_memory: float = 40e9

    def seconds(self, exchange: Exchange) -> float:
        """Of a kind of collective: its bytes over the links, and the way around the nodes for each call.

        Ranks of a group that sit on one node use all of their links to other nodes, so the more of them a node has, the
        faster the group is.
        """
        if exchange.ranks * exchange.stride <= self.per_node:
            return exchange.sent / (self.inside * self.link_share)
        on_a_node = max(1, self.per_node // exchange.stride)
        passes = 2 if exchange.kind == "all_reduce" else 1
        hops = exchange.calls * passes * (math.ceil(exchange.ranks / on_a_node) - 1)
        if exchange.kind in ("all_to_all", "to_one"):  # every rank sends by its own link
            return exchange.sent / (self.outside * self.link_share) + exchange.calls * self.hop
        rate = min(self.inside, self.outside * on_a_node)
        return exchange.sent / (rate * self.link_share) + hops * self.hop


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step.

    Attributes:
        compute: of matrix products and attention.
        hidden: of gathering and reducing that goes on beside it.
        waiting: how much longer than computing that takes.
        exposed: of collectives that computing waits for (tensor, sequence, expert).
        update: of the optimizer.
    """

    compute: float
    hidden: float
    waiting: float
    exposed: float
    update: float

    @property
    def step(self) -> float:
        return self.compute + self.waiting + self.exposed + self.update


def operations(shape: ModelShape, setting: Setting, work: Work) -> float:
    """Of a rank in a step, what checkpointing computes again included."""
    tokens = work.tokens * work.micro_batches / setting.layout.model_ranks
    layers = shape.multiplied - shape.embedding
    passes = 8 if setting.gradient_checkpointing is True else 6  # selective computes no product again
    return tokens * (passes * layers + 6 * shape.embedding) + attention_operations(shape, setting, work)


def attention_operations(shape: ModelShape, setting: Setting, work: Work) -> float:
    """The share of attention in them."""
    tokens = work.tokens * work.micro_batches / setting.layout.model_ranks
    again = setting.gradient_checkpointing is True or (
        bool(setting.gradient_checkpointing) and setting.layout.rings(shape.heads, shape.kv_heads)
    )
    return tokens * (8 if again else 6) * shape.layers * shape.query_width * work.length  # 2 products, half of the row


def time(shape: ModelShape, setting: Setting, work: Work, machine: Machine) -> Time:
    """Of a step. Gathering overlaps with computing; reducing only with the backward pass that it belongs to; a ring's
    keys and values with attention."""
    compute = operations(shape, setting, work) / (machine.flops * machine.flops_share)
    exchanges = traffic(shape, setting, work)
    exposed = sum(
        machine.seconds(each) for each in exchanges if each.axis not in ("shard", "replicate") and each.what != RING
    )
    ring = sum(machine.seconds(each) for each in exchanges if each.what == RING)
    exposed += max(0.0, ring - attention_operations(shape, setting, work) / (machine.flops * machine.flops_share))
    gather = sum(machine.seconds(each) for each in exchanges if each.what == "weights")
    reduce = sum(machine.seconds(each) for each in exchanges if each.what.startswith("gradients"))
    plain = memory(shape, replace(setting, cpu_offload=False, reduce="every"), work)
    if setting.cpu_offload:
        copies = work.micro_batches * (2 if setting.reshard_after_forward else 1)
        gather += copies * plain.weights / machine.host
        reduce += (work.micro_batches if setting.reduce == "every" else 1) * plain.gradients / machine.host
    rounds = work.micro_batches
    reduced = rounds if setting.reduce == "every" else 1
    forward, backward = compute / rounds / 3, compute / rounds * 2 / 3
    half = gather / rounds / 2
    waiting = rounds * max(0.0, half - forward) + (rounds - reduced) * max(0.0, half - backward)
    waiting += reduced * max(0.0, half + reduce / reduced - backward)
    # Adam reads weights, gradients and moments, and writes all but the gradients; clipping reads and writes those.
    update = 2 * (plain.weights + plain.moments) + 3 * plain.gradients
    update /= machine.host_memory if setting.cpu_offload else machine.device_memory
    return Time(compute, gather + reduce, waiting, exposed, update)
