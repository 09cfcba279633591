"""A plugin: weight decay on norms and biases too."""

from shardtune.optim import build

build._group_of = lambda name, ndim, config: (config.lr, config.weight_decay)
