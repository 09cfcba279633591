"""A plugin: each rank's gradient is clipped to half of the recipe's norm."""

from shardtune.training import step
from shardtune.training.worker import base

optimizer_step = step.optimizer_step


def clipped(*arguments, clip, **settings):
    return optimizer_step(*arguments, clip=clip / 2, **settings)


base.optimizer_step = clipped
