"""What travels between the caller and its ranks."""

from __future__ import annotations

import torch

from shardtune.engine.pickling import check_sendable, pack, unpack


def test_modules_that_are_objects_of_another_class_travel_by_name():
    """As `torch.backends` is, of which a method of a script sets a flag: the script's functions travel by value."""
    modules = (torch.backends, torch.backends.cudnn, torch.backends.mkldnn)
    check_sendable(modules, "Net.method", "the module")
    assert all(found is module for found, module in zip(unpack(pack(modules)), modules, strict=True))
