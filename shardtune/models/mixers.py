"""Layers that carry a state from token to token (a convolution, a linear attention, a state space), over packed rows.

The kernels of `causal-conv1d`, `flash-linear-attention` and `mamba-ssm` begin anew at each row, if they receive where
rows begin. transformers' own code in their absence does not; then each row runs through such a layer by itself, while
all else of the model stays packed.

Worked example: rows of 3 and 2 tokens are packed into 5. The kernels receive `seq_idx` [[0, 0, 0, 1, 1]]. Without them
a layer is called twice, with hidden states [1, 3, width] and [1, 2, width], and its outputs are joined again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keyword arguments by which transformers passes the boundaries of packed rows to layers."""
STATE = "{} computes a row's state from all tokens before, and a rank has its own alone"
"""Why ranks cannot share the sequences of a model with such layers, by their classes' names."""


class Mixers:
    """The layers of a model that carry a state.

    Args:
        layers: none within another.
        without_boundaries: whether some have no kernel that receives where rows begin, so that packed rows have to run
            through them one by one. In half precision the packing probe may not see what they leak.

    Attributes:
        row_by_row: whether each packed row runs through the layers by itself.
    """

    def __init__(self, layers: Sequence[nn.Module] = (), *, without_boundaries: bool = False) -> None:
        self._layers = layers
        self.without_boundaries = without_boundaries
        self._lengths: list[int] | None = None
        self.row_by_row = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Mixers:
        """Those in the language model with a convolution over tokens of their own, which nearly all such layers have,
        and those that are called linear attention (MiniMax); the packing probe finds what others leak."""
        modules = list(model.get_decoder().modules())
        convolving = [layer for layer in modules if _convolves(layer)]
        inner = {id(child) for layer in convolving for child in layer.modules() if child is not layer}
        linear = [layer for layer in modules if _is_linear(layer) and not any(map(_has_state, _inside(layer)))]
        return cls([layer for layer in convolving if id(layer) not in inner] + linear, without_boundaries=bool(linear))

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def names(self) -> str:
        """The classes of the layers."""
        return ", ".join(sorted({type(layer).__name__ for layer in self._layers}))

    def run_row_by_row(self, on: bool) -> None:
        """Let each packed row run through the layers by itself, or no longer."""
        if on == self.row_by_row:
            return
        self.row_by_row = on
        for layer in self._layers:
            if on:
                layer.forward = self._split(layer.forward)
            else:
                del layer.forward  # that of its class is left

    def pack(self, cu_seqlens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Prepare for a forward of packed rows; returns further arguments of it.

        The boundaries hold until the next forward, as recomputation in the backward pass needs them too.

        Args:
            cu_seqlens: int32 [rows + 1].
        """
        lengths = cu_seqlens.diff()
        if self.row_by_row:
            self._lengths = lengths.tolist()
            return {}
        rows = torch.arange(len(lengths), dtype=torch.int32, device=cu_seqlens.device)
        return {"seq_idx": rows.repeat_interleave(lengths)[None]}

    def whole(self) -> None:
        """Prepare for a forward of sequences that are not packed."""
        self._lengths = None

    def _split(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        @torch.compiler.disable(recursive=True)  # lengths are data; a compiled graph would specialise on each of them
        def row_by_row(*args: Any, **kwargs: Any) -> Any:
            if self._lengths is None:
                return forward(*args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
            total, start, outputs = sum(self._lengths), 0, []
            for length in self._lengths:
                if length:
                    part = functools.partial(_part, total=total, start=start, length=length)
                    outputs.append(forward(*map(part, args), **{name: part(value) for name, value in kwargs.items()}))
                start += length
            return _joined(outputs)

        return row_by_row


def _convolves(layer: nn.Module) -> bool:
    return any(type(child) is nn.Conv1d for child in layer.children())


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer, or one around it, has linear attention by the config's `layer_types`, and no convolution."""
    return vars(layer).get("layer_type") == "linear_attention" and not _convolves(layer)


def _has_state(layer: nn.Module) -> bool:
    return _convolves(layer) or _is_linear(layer)


def _inside(layer: nn.Module) -> list[nn.Module]:
    return [child for child in layer.modules() if child is not layer]


def _part(value: Any, *, total: int, start: int, length: int) -> Any:
    """A row of a tensor [1, tokens, ...], or of each of a tuple; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_part(one, total=total, start=start, length=length) for one in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == total:
        return value.narrow(1, start, length)
    return value


def _joined(outputs: list[Any]) -> Any:
    """Tensors [1, tokens, ...] of rows end to end, or tuples of such; what is None stays None."""
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(_joined([output[place] for output in outputs]) for place in range(len(first)))
    return torch.cat(outputs, dim=1)
