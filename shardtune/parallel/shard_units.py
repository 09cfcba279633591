"""Chooses the modules that are gathered and freed together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from shardtune.errors import ModelError

WRAP = "actor.fsdp_config.wrap"
LARGE = 2**28
"""Parameters above which a block is searched for smaller blocks, which are then gathered separately."""
SMALL = 1 / 8
"""Share of parameters below which repeated modules of a class are left to the rest of the model: norms."""
REVERSIBLE = ("ReformerEncoder",)
"""Classes of transformers that compute their layers again while gradients are computed, and call the layers' parts."""
CHOSEN_BETWEEN = re.compile("expert|head|branch|adapter|task", re.IGNORECASE)
"""Names of modules that a forward may skip; all ranks have to gather the same units."""


def choose_units(
    model: nn.Module, classes: Sequence[str] = (), wrap: list[str] | None = None
) -> tuple[list[nn.Module], str]:
    """The modules that shard as a unit: of the classes in `wrap`, else as declared, else the repeated blocks.

    A unit's weights are only available while the unit itself is called. So automatic units are blocks in a list or
    sequence with others of their class, except for lists with alternatives (experts, heads). A module that shares a
    parameter with one outside of it is not a unit: shared parameters belong to the root.

    Args:
        model: any module.
        classes: class names that the model's adapter declares.
        wrap: class names, `actor.fsdp_config.wrap`.

    Returns:
        The modules, and a sentence on the choice if they were not declared, or not all declared ones are used.
    """
    if wrap:
        return _unshared(model, _of_classes(model, wrap, WRAP))
    if classes:
        return _unshared(model, outermost(_of_classes(model, classes, "the adapter's unit_classes")))
    units = outermost(_declared_by_transformers(model))
    if units:
        return _unshared(model, units)
    units, shared = _unshared(model, list(dict.fromkeys(_repeated_blocks(model))))
    if not units:
        return [], f"the model is sharded as one: it has no list of blocks of one class that are its own{_HOW}"
    counts = Counter(_class_name(unit) for unit in units)
    chosen = ", ".join(f"{count} {name}" for name, count in counts.items())
    note = f"{chosen} shard as units, chosen by their size; they have to be called as modules, on all ranks alike{_HOW}"
    return units, "; ".join(part for part in (note, shared) if part)


_HOW = f" (others: unit_classes of the adapter, or {WRAP})"


def outermost(units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are not inside another one."""
    inside = {module for unit in units for module in unit.modules() if module is not unit}
    return [unit for unit in units if unit not in inside]


def _of_classes(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    units = [module for module in model.modules() if _class_name(module) in names]
    if not units:
        raise ModelError(
            f"{key}: no module of the model is a {' or a '.join(sorted(set(names)))}",
            where=key,
            remedy=f"class names here are {', '.join(sorted({_class_name(module) for module in model.modules()}))}",
        )
    for whole in (module for module in model.modules() if _class_name(module) in REVERSIBLE):
        inside = {_class_name(module) for module in whole.modules()}.intersection(names) - {_class_name(whole)}
        if inside:
            raise ModelError(
                f"{key} names {', '.join(sorted(inside))}, and a {_class_name(whole)} calls parts of its layers in the "
                "backward pass, where a unit of their own would not gather them",
                where=key,
                remedy=f"name {_class_name(whole)}, or leave it out",
            )
    if not all(_has_forward(unit) for unit in units):
        raise ModelError(
            f"{key} names a list of modules, which cannot shard as a unit: it has no forward",
            where=key,
            remedy="name the class of the modules in it",
        )
    return units


def _declared_by_transformers(model: nn.Module) -> list[nn.Module]:
    """The modules that the models of transformers in it, or the model itself, declare as not to be split, and those
    whose layers cannot be gathered alone."""
    found: dict[nn.Module, None] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            names = {*(part._no_split_modules or ()), *REVERSIBLE}
            found |= dict.fromkeys(module for module in part.modules() if _class_name(module) in names)
    return _whole_blocks(model, [module for module in found if _has_forward(module)])


def _whole_blocks(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """For a module in a block of a list, that block: some models declare the attention in it alone, which would leave
    the rest of each block to the root."""
    block_of: dict[nn.Module, nn.Module] = {}
    for blocks in model.modules():  # inner lists come later
        if isinstance(blocks, nn.ModuleList):
            block_of |= {
                inner: block for block in blocks.children() for inner in block.modules()
            }  # entries may be None
    return list(dict.fromkeys(block_of.get(module, module) for module in modules))


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the outermost lists and sequences, of the class with the most parameters in each of them."""
    if isinstance(module, nn.ModuleList) and (parts := _parts_of_layers(module)):
        for part in parts:
            yield part
            if _size(part) > LARGE:
                yield from _repeated_blocks(part)
        return
    repeated = _repeated(module) if isinstance(module, nn.ModuleList | nn.Sequential) else set()
    for name, child in module.named_children():
        if CHOSEN_BETWEEN.search(name):
            continue
        if isinstance(child, nn.ModuleDict) and not _has_forward(child):
            yield from _blocks_by_name(child)
            continue
        if child in repeated:
            yield child
        if child not in repeated or _size(child) > LARGE:
            yield from _repeated_blocks(child)


def _blocks_by_name(parts: nn.ModuleDict) -> Iterator[nn.Module]:
    """The blocks in the one list among a model's named parts (nanoGPT: embeddings, blocks, norm); modules under names
    are otherwise taken for alternatives, of which a forward calls some."""
    lists = [(name, part) for name, part in parts.items() if isinstance(part, nn.ModuleList)]
    if len(lists) == 1 and len(parts) > 1 and not CHOSEN_BETWEEN.search(lists[0][0]):
        yield from _repeated_blocks(lists[0][1])


def _parts_of_layers(layers: nn.ModuleList) -> list[nn.Module]:
    """The repeated parts of layers that are lists themselves, as `ModuleList([attention, feed_forward])` is, or hold
    them by name."""
    inner = list(layers.children())
    if not all(isinstance(layer, nn.ModuleList) or _one_after_another(layer) for layer in inner):
        return []
    parts = [part for layer in inner for part in layer.children() if _has_forward(part) and _size(part)]
    number = Counter(map(type, parts))
    sizes: Counter[type] = Counter()
    for part in parts:
        sizes[type(part)] += _size(part) if number[type(part)] > 1 else 0
    least = SMALL * max(sizes.values(), default=0)
    return [part for part in parts if number[type(part)] > 1 and sizes[type(part)] >= least]


def _one_after_another(layer: nn.Module) -> bool:
    """Whether a layer's named parts are steps of it, such as attention, feed-forward and norms (`rtdl`), and none are
    alternatives, which have a class in common or say so by their names."""
    if not isinstance(layer, nn.ModuleDict) or _has_forward(layer):
        return False
    large = Counter(type(part) for part in layer.children() if _size(part) >= SMALL * _size(layer))
    return bool(large) and max(large.values()) == 1 and not any(CHOSEN_BETWEEN.search(name) for name in layer)


def _repeated(blocks: nn.Module) -> set[nn.Module]:
    """The elements of the largest class of which there are several, unless they are a small part (norms)."""
    by_class: dict[type, list[nn.Module]] = {}
    for block in blocks.children():
        if _has_forward(block) and _size(block):
            by_class.setdefault(type(block), []).append(block)
    several = [members for members in by_class.values() if len(members) > 1]
    largest = max(several, key=lambda members: sum(map(_size, members)), default=[])
    return set(largest) if sum(map(_size, largest)) >= SMALL * _size(blocks) else set()


def _unshared(model: nn.Module, units: list[nn.Module]) -> tuple[list[nn.Module], str]:
    """The units whose parameters are all their own, and a sentence on the others."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(module)
    tied = {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}
    paths: dict[nn.Module, list[tuple[nn.Module, ...]]] = {}
    _add_paths(model, (), paths)
    several = {module: ways for module, ways in paths.items() if len(ways) > 1}
    kept, left = [], []
    for unit in units:
        own = set(unit.modules())
        split = any(own.intersection(modules) and not own.issuperset(modules) for modules in tied.values())
        split |= any(module in own and any(unit not in way for way in ways) for module, ways in several.items())
        (left if split else kept).append(unit)
    if not left:
        return kept, ""
    kinds = f"{len(left)} modules ({', '.join(sorted({_class_name(unit) for unit in left}))})"
    return kept, f"{kinds} share parameters with others, so they are gathered with the whole model"


def _add_paths(
    module: nn.Module, above: tuple[nn.Module, ...], found: dict[nn.Module, list[tuple[nn.Module, ...]]]
) -> None:
    """Add, for each module with parameters of its own, the modules on each way to it, itself included."""
    way = (*above, module)
    if any(True for _ in module.parameters(recurse=False)):
        found.setdefault(module, []).append(way)
    for child in module.children():
        if child not in way:
            _add_paths(child, way, found)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _has_forward(module: nn.Module) -> bool:
    """Containers have none: they are never called."""
    return type(module).forward is not nn.Module.forward


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
