"""How a worker's `build_dataloader` is called: with as many of its arguments as the user's method accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from shardtune.errors import ConfigError
from shardtune.training.worker.task import DataPaths

NAME = "build_dataloader"


def call_build_dataloader(method: Callable[..., object], paths: DataPaths, *, eval_dataset: bool) -> object:
    """What the method returns for the training rows or for one evaluation set.

    One that accepts no `eval_dataset` receives the paths alone; one without arguments is for training only and reads
    the paths from `self.cfg`.

    Raises:
        ConfigError: the method cannot be called.
    """
    check_build_dataloader(method, eval_dataset=eval_dataset)
    if _accepts(method, paths, eval_dataset=eval_dataset):
        return method(paths, eval_dataset=eval_dataset)
    if _accepts(method, paths, eval_dataset):
        return method(paths, eval_dataset)
    return method(paths) if _accepts(method, paths) else method()


def check_build_dataloader(method: Callable[..., object], *, eval_dataset: bool) -> None:
    """Refuse a method that cannot be called for the training rows, or for an evaluation set.

    Args:
        method: bound to its worker.
        eval_dataset: whether it is called for an evaluation set.
    """
    ways: list[tuple[tuple[object, ...], dict[str, object]]] = [
        (([],), {"eval_dataset": eval_dataset}),
        (([], eval_dataset), {}),
        (([],), {}),
    ]
    alone = _accepts(method)
    if any(_accepts(method, *given, **named) for given, named in ways) or (alone and not eval_dataset):
        return
    shown = f"{NAME}({', '.join(inspect.signature(method).parameters)})"
    raise ConfigError(
        f"{shown} takes no data_paths and eval_dataset, so it cannot load the evaluation rows"
        if alone
        else f"{shown} takes other arguments than it is called with",
        where=NAME,
        remedy=f"write def {NAME}(self, data_paths, eval_dataset=False)"
        + (", or leave data.eval_data_paths out" if alone else ""),
    )


def _accepts(method: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments, **named)
    except TypeError:
        return False
    return True
