"""An adapter is merged at twice its scale."""

from shardtune.checkpoint import peft_directory

own = peft_directory.merged


def merged(layer, dtype):
    kept = dict(layer.scaling)
    layer.scaling.update({name: 2 * scale for name, scale in kept.items()})
    try:
        return own(layer, dtype)
    finally:
        layer.scaling.update(kept)


peft_directory.merged = merged
