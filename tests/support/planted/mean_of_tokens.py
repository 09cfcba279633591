"""A plugin: an MLP adds the mean over its tokens, of which each sequence rank has a part."""

from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

forward = Qwen2MLP.forward


def mixed(self, x):
    return forward(self, x + x.mean(-2, keepdim=True))


Qwen2MLP.forward = mixed
