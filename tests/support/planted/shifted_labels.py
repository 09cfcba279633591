"""A plugin: each token is trained to predict the one after the next."""

from dataclasses import replace

from shardtune.models import causal_lm

pack = causal_lm.pack


def shifted(samples, rows, weights):
    batch = pack(samples, rows, weights)
    return replace(batch, targets=batch.targets.roll(-1))


causal_lm.pack = shifted
