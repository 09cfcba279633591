"""Buffers: what a model keeps beside its parameters, and what training makes of it on several ranks."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.modules import NormBase, contents, own_persistent_buffers
from shardtune.parallel.torch_private.tensors import version_of


def statistical_norms(model: nn.Module) -> dict[str, NormBase]:
    """The norms with running statistics (batch norms) in a model, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and module.track_running_stats
    }


class Buffers:
    """The persistent buffers of a model, and what becomes of those that forwards change.

    Every rank's forwards see other rows, so such buffers differ between ranks after a step. Then the running statistics
    of norms are averaged over ranks; other buffers (counters, codebooks) become rank 0's. So all ranks evaluate and
    save the same model. Buffers that are not persistent are left to each rank.

    Args:
        model: whose names are used.
        ranks: of the run.

    Attributes:
        overwritten: the names of those that have become rank 0's where ranks had other values, by the last `agree`.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        # By place, not by object: a model may put another tensor there.
        self._places = {
            f"{prefix}.{key}" if prefix else key: (module, key)
            for prefix, module in model.named_modules()
            for key in own_persistent_buffers(module)
        }
        norms = set(statistical_norms(model).values())
        self._averaged = {name for name, (module, _) in self._places.items() if module in norms}
        self._forms = {name: _form(module.get_buffer(key)) for name, (module, key) in self._places.items()}
        self._before: torch.Tensor | None = None
        self.overwritten: list[str] = []

    @property
    def names(self) -> Collection[str]:
        """Of the buffers."""
        return self._places.keys()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, by name.

        Raises:
            ModelError: one is gone, or has another shape or dtype than at first, so that no checkpoint would fit.
        """
        found = {}
        for name, (module, key) in self._places.items():
            buffer = contents(module)[1].get(key)
            if buffer is None or _form(buffer) != self._forms[name]:
                raise _other_form(name, self._forms[name], buffer)
            found[name] = buffer
        return found

    def added(self) -> list[str]:
        """The names of persistent buffers that the model has got since this object was made; raises as `tensors`."""
        self.tensors()
        known = {*self._places.values()}
        return [
            f"{prefix}.{key}" if prefix else key
            for prefix, module in self._model.named_modules()
            for key in own_persistent_buffers(module)
            if (module, key) not in known
        ]

    def marks(self) -> dict[str, torch.Tensor]:
        """A number for each floating buffer but the statistics of norms, by name, that changes with its values."""
        own = {name: tensor for name, tensor in self.tensors().items() if name not in self._averaged}
        return {name: fingerprint_of(tensor.detach()) for name, tensor in own.items() if tensor.is_floating_point()}

    def watch(self) -> None:
        """Note what the buffers are before the first forward of a step."""
        if self._ranks.mesh is not None and self._places and self._before is None:
            self._before = self._fingerprints()

    @torch.no_grad()
    def agree(self) -> None:
        """Make buffers that a rank has changed since `watch`, and that differ, the same on all ranks."""
        if self._before is None:
            return
        # By value: kernels of batch norms, and writes through `.data`, leave a tensor's version as it was.
        now = self._fingerprints()
        moved, most, least = found = torch.stack([(now != self._before).long(), now, -now])
        self._before = None
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        differ = ((moved > 0) & (most != -least)).tolist()
        changed = [item for item, flag in zip(self.tensors().items(), differ, strict=True) if flag]
        averaged = [tensor for name, tensor in changed if name in self._averaged and tensor.is_floating_point()]
        for name, tensor in changed:
            if name not in self._averaged or not tensor.is_floating_point():
                self._ranks.share(tensor)
        self.overwritten = [name for name, _ in changed if name not in self._averaged]
        if averaged:
            flat = torch.cat([tensor.reshape(-1) for tensor in averaged]) / self._ranks.world_size
            dist.all_reduce(flat)
            for tensor, mean in zip(averaged, flat.split([tensor.numel() for tensor in averaged]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def _fingerprints(self) -> torch.Tensor:
        """int64 [buffers]"""
        found = [fingerprint_of(tensor.detach()) for tensor in self.tensors().values()]
        return torch.stack(found).to(self._ranks.device)


class UnsavedBuffers:
    """The buffers that are not persistent, as forwards find them; what replaces one by a new tensor makes a cache.

    Args:
        model: whose names are used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._found()

    def changed(self) -> list[str]:
        """The names of those that have been changed in place since this object was made."""
        now, before = self._found(), self._before
        same = (name for name, (buffer, _) in now.items() if name in before and before[name][0] is buffer)
        return [name for name in same if now[name][1] != before[name][1]]

    def _found(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Each with how often it has been changed in place, by name."""
        return {
            f"{prefix}.{key}" if prefix else key: (buffer, version_of(buffer))
            for prefix, module in self._model.named_modules()
            for key, buffer in contents(module)[1].items()
            if buffer is not None and key not in own_persistent_buffers(module)
        }


class KeptBuffers:
    """The buffers that are not persistent, as they are when this object is made.

    Args:
        model: whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, key, buffer, buffer.clone(), version_of(buffer))
            for module in model.modules()
            for key, buffer in contents(module)[1].items()
            if buffer is not None and key not in own_persistent_buffers(module)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give them these values again, in the same tensors; those that nothing has written count as unchanged."""
        for module, key, buffer, copy, version in self._kept:
            written = version_of(buffer) != version
            (buffer if written else buffer.data).copy_(copy)  # through .data it may have been written all the same
            contents(module)[1][key] = buffer


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same; NaN counts as equal to NaN, and a sparse tensor has zeros elsewhere."""
    return one.shape == other.shape and torch.equal(*(_dense(each).nan_to_num() for each in (one, other)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


Form = tuple[torch.Size, torch.dtype]
"""The shape and dtype of a buffer."""


def _form(buffer: torch.Tensor) -> Form:
    return buffer.shape, buffer.dtype


def _described(form: Form) -> str:
    return f"{list(form[0])} of {form[1]}"


def _other_form(name: str, first: Form, buffer: torch.Tensor | None) -> ModelError:
    now = "None" if buffer is None else _described(_form(buffer))
    return ModelError(
        f"the buffer {name} is {_described(first)} when the model is built and {now} now, so that no checkpoint fits",
        where=name,
        remedy="write to it in place (copy_, mul_, add_), which keeps its shape and dtype; or leave it out of "
        "checkpoints: register_buffer(…, persistent=False)",
    )


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def fingerprint_of(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes, all but surely, with the bits of a tensor."""
    bits = _dense(tensor).contiguous().reshape(-1).view(_SAME_SIZE[tensor.element_size()]).long()
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
