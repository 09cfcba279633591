"""Errors of user methods on batches of a user's loader, with messages in terms of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, TracebackType

import torch
from torch.nn.utils import spectral_norm

from shardtune.data.user_loader.batch import COLLATE, MissingField, kind_of, missing_field
from shardtune.errors import DataError, ModelError

DEVICES = ("on the same device", "is not on the expected device", "tensors on different devices", "device type of")
"""Parts of torch's messages for tensors on different devices."""

SHARDED = "mixed torch.Tensor and DTensor"
"""A part of torch's message for a sharded weight in an operation with a plain tensor."""

ONCE = re.compile(r"derivative for (?:aten::)?(\w+) is not implemented")
"""In torch's message for an operation whose gradient has no graph."""

OLD_NORM = spectral_norm.__code__.co_filename
"""The file of the spectral norm that computes its weight in a hook, and not in a parametrization."""


@contextmanager
def explaining(method: str, batch: object, device: torch.device) -> Iterator[None]:
    """Run a user method on a batch; an error that the batch caused is raised as a readable one.

    Args:
        method: its name.
        batch: its argument.
        device: of the model.
    """
    try:
        yield
    except MissingField as error:
        raise MissingField(error.what, where=f"{method}; {COLLATE}", remedy=error.remedy) from error
    except KeyError as error:
        if isinstance(batch, Mapping) and error.args and error.args[0] not in batch and _reads(batch, error):
            raise missing_field(error.args[0], batch) from error
        raise
    except (TypeError, AttributeError) as error:
        if isinstance(batch, (list, tuple)):
            raise _not_a_dict(method, batch) from error
        raise
    except RuntimeError as error:
        if any(sign in str(error) for sign in DEVICES):
            raise _elsewhere(method, batch, device, error) from error
        if SHARDED in str(error):
            raise _uses_a_part(method) from error
        raise


def of_step(error: RuntimeError, layout: str) -> ModelError | None:
    """The readable form of an error of micro-batches; None for any that torch itself says well enough.

    It is that of an operation with a part of a weight, of one that is differentiated twice and cannot be, or of a
    spectral norm whose hook meets a weight in another dtype or shape than its buffers.

    Args:
        error: of torch.
        layout: of the ranks, for the message.
    """
    if (once := ONCE.search(str(error))) is not None:
        return ModelError(
            f"the loss differentiates a gradient, and torch's {once[1]} has no derivative",
            where="create_graph=True",
            remedy="in attention: actor.model.attn_implementation: eager; elsewhere: other operations",
        )
    if any(code.co_filename == OLD_NORM for code in _codes(error.__traceback__)):
        return ModelError(
            f"torch.nn.utils.spectral_norm cannot compute its weight here: {error}",
            where="the model's forward",
            remedy="make the layer with torch.nn.utils.parametrizations.spectral_norm, which computes the same",
        )
    if SHARDED not in str(error):
        return None
    return ModelError(
        f"the loss reads a parameter itself, of which each rank has a part ({layout})",
        where="the loss",
        remedy="the module that has the parameter is called as a whole (model.layer(x)), or a module above it computes "
        "this in its forward and shards as a unit (actor.fsdp_config.wrap: [its class]); weights are decayed by "
        "optim.weight_decay; get_train_model_output of a worker may read parameters, which are whole there",
    )


def _reads(batch: object, error: BaseException) -> bool:
    """Whether the innermost function that an error came through holds the batch."""
    frames = list(_frames(error.__traceback__))
    return any(value is batch for value in frames[-1].values()) if frames else False


def _codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    """The code of each function that an error came through, the outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _frames(traceback: TracebackType | None) -> Iterator[dict[str, object]]:
    """The local variables of each function that an error came through, the outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def _not_a_dict(method: str, batch: object) -> DataError:
    return DataError(
        f"the loader yields {kind_of(batch)}, and {method} treats it as one dict of tensors",
        where=f"{method}; {COLLATE}",
        remedy="let collate_fn return one dict, each field stacked: torch.stack([sample[name] for sample in samples])",
    )


def _uses_a_part(method: str) -> ModelError:
    return ModelError(
        "an operation uses a parameter of the sharded model, of which each rank has a part",
        where=method,
        remedy="compute this in a public method of the model's class, where parameters are whole, and call that; whole "
        "layers and modules outside of them (self.model.head) may be called by themselves, those inside a layer not",
    )


def _elsewhere(method: str, batch: object, device: torch.device, error: BaseException) -> ModelError:
    """Tensors on several devices: the fields that the method passed on as they were, else all that lie elsewhere."""
    fields = dict(batch) if isinstance(batch, Mapping) else {"batch": batch}
    away = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor) and value.device != device}
    used = [name for name, value in away.items() if _was_used(value, batch, error)]
    named = used or list(away)
    places = ", ".join(f"{name!r} on {away[name].device}" for name in named)
    first = named[0] if named else "name"
    what = f"a field of the batch is still on another device: {places}" if named else str(error).splitlines()[0]
    return ModelError(
        f"{what}; the model is on {device}",
        where=method,
        remedy=f'move every field before the model sees it: batch["{first}"].to(self.device)',
    )


def _was_used(tensor: torch.Tensor, batch: object, error: BaseException) -> bool:
    """Whether some function that the error came through holds the tensor itself, and not only the batch around it."""
    for names in _frames(error.__traceback__):
        for value in names.values():
            if value is tensor:
                return True
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if value is not batch and not _is_copy(value, batch) and any(item is tensor for item in inner):
                return True
    return False


def _is_copy(value: object, batch: object) -> bool:
    """Whether a dict holds just what the batch holds."""
    return (
        isinstance(value, Mapping)
        and isinstance(batch, Mapping)
        and value.keys() == batch.keys()
        and all(value[name] is batch[name] for name in batch)
    )
