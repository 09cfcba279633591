"""The extra state of modules inside a user's: what torch keeps beside tensors (`get_extra_state`)."""

from __future__ import annotations

from typing import Any

from torch import nn

KEY = "_extra_state"
"""As torch names it."""


class ExtraState:
    """The extra state of a module, as an object with a state.

    Args:
        module: whose class has `get_extra_state` and `set_extra_state`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {KEY: self._module.get_extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._module.set_extra_state(state_dict[KEY])


def extra_states(module: nn.Module) -> dict[str, ExtraState]:
    """The extra states in a module, by the names that they have in `state_dict()`."""
    return {
        f"{name}.{KEY}" if name else KEY: ExtraState(part)
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
