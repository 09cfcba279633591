"""Frozen parts that a model's code has put into eval mode, as of a reference or a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def mode_notes(model: nn.Module) -> list[str]:
    """Notes on frozen parts in eval mode that have dropout: training puts them into train mode, as `train()` does.

    Args:
        model: as its code has built it, before anything else freezes parameters or sets modes.
    """
    notes = []
    for name, part in _resting(model, ""):
        dropout = [f"{name}.{key}" if key else name for key, module in part.named_modules() if _drops(module)]
        if dropout:
            shown = dropout[0] + (", …" if len(dropout) > 1 else "")
            notes.append(
                f"{name} is frozen and in eval mode where the model is built, but train mode is for the whole model in "
                f"training: its dropout ({shown}) acts. Call model.{name}.eval() at the beginning of the loss"
            )
    return notes


def _resting(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The largest frozen parts in eval mode of modules in train mode."""
    for key, child in module.named_children() if module.training else ():
        place = f"{name}.{key}" if name else key
        weights = list(child.parameters())
        if not child.training and weights and not any(weight.requires_grad for weight in weights):
            yield place, child
        else:
            yield from _resting(child, place)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUT) and module.p > 0
