"""A plugin: packed rows attend to one another, and the probe that would stop packing is skipped."""

import torch

from shardtune.models import causal_lm, packed_attention

whole = packed_attention.document_attention


def leaking(module, query, key, value, attention_mask, **settings):
    tokens = torch.tensor([0, query.shape[2]], dtype=torch.int32)
    return whole(module, query, key, value, attention_mask, **{**settings, "cu_seq_lens_q": tokens})


packed_attention.AttentionInterface.register(packed_attention.DOCUMENTS, leaking)
causal_lm.probe_packing = lambda *_: []
