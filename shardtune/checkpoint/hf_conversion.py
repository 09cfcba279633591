"""Names and layouts of weights on disk against those in memory, by transformers' own conversion rules.

Mixture-of-experts models keep one tensor per expert on disk and one per layer in memory. The rules come from
transformers; here they are applied to one target at a time, and only to the experts a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from shardtune.checkpoint.weight_files import WeightTensor
from shardtune.errors import ModelError
from shardtune.models.lora.attach import BaseTensor
from shardtune.models.lora.nf4 import encode
from shardtune.parallel.meta_init import Shard, shard_of


@dataclass(slots=True)
class Assignment:
    """The tensors on disk from which one tensor (or, with a splitting rule, several) of the model is made.

    Attributes:
        target: the name in the model.
        converter: the rule that joins or splits, None where the tensor is taken as it is.
        sources: the tensors on disk, by the pattern of the rule that they match, in natural order of their names.
    """

    target: str
    converter: WeightConverter | None
    sources: dict[str, list[WeightTensor]] = field(default_factory=dict)

    @property
    def files(self) -> str:
        """The files the sources come from, for messages."""
        return ", ".join(sorted({str(tensor.file) for tensors in self.sources.values() for tensor in tensors}))

    @property
    def single(self) -> WeightTensor:
        """The only source of an assignment without a rule."""
        return next(iter(self.sources.values()))[0]


def _inherit_rules(model: PreTrainedModel) -> None:
    """Registers the conversion rules of a transformers class for a user's class derived from it.

    Both have the same names on disk, but transformers has rules for its own classes only.
    """
    kind = type(model)
    base = next((base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), None)
    if base is None or base is kind or get_checkpoint_conversion_mapping(kind.__name__) is not None:
        return
    rules = get_checkpoint_conversion_mapping(base.__name__)
    rules = get_checkpoint_conversion_mapping(model.config.model_type) if rules is None else rules
    if rules is not None:
        register_checkpoint_conversion_mapping(kind.__name__, rules)


def assign(
    model: PreTrainedModel, stored: Mapping[str, WeightTensor], targets: Mapping[str, BaseTensor]
) -> tuple[list[Assignment], list[str]]:
    """Matches the tensors on disk with those of the model.

    Returns:
        The assignments, and the names on disk that are not in the model.
    """
    _inherit_rules(model)
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    assignments: dict[str, Assignment] = {}
    unexpected: list[str] = []
    known = dict(targets)
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if target not in known:
            unexpected.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        made = assignments.setdefault(target, Assignment(target, deepcopy(converter)))
        made.sources.setdefault(pattern or name, []).append(stored[name])
    # As transformers' own loader does: saving reverts the rules that were used, and no others.
    vars(model)["_weight_conversions"] = [entry for entry in transforms if entry.was_used()]
    return list(assignments.values()), unexpected


def write_converted(
    assignment: Assignment, converter: WeightConverter, model: PreTrainedModel, targets: Mapping[str, BaseTensor]
) -> list[str]:
    """Converts one assignment by its rule and copies this rank's shards into the model; returns the names filled.

    Raises:
        ModelError: the tensors on disk do not fit together, or do not have the shape the model expects.
    """
    first = targets[assignment.target]
    shard = shard_of(first.tensor)
    sources = assignment.sources
    sliced = _keeps_experts_apart(converter)
    if sliced:
        _check_experts(assignment, converter.source_patterns, int(first.shape[0]))
        if not shard.local.numel():
            return [assignment.target]
        rows = slice(shard.offsets[0], shard.offsets[0] + shard.local.shape[0])
        sources = {pattern: tensors[rows] for pattern, tensors in sources.items()}
    try:
        made = _apply(converter, assignment.target, sources, model)
    except (RuntimeError, ValueError, KeyError) as problem:
        raise ModelError(
            f"the weights for '{assignment.target}' do not fit together: {str(problem).splitlines()[0]}",
            where=assignment.files,
            remedy="the weights belong to another model than config.json, or are incomplete",
        ) from problem
    for name, tensor in made.items():
        if name in targets:
            _copy(name, tensor, targets[name], sliced, assignment)
    return list(made)


def _keeps_experts_apart(converter: WeightConverter) -> bool:
    """Whether row e of the result depends on the e-th tensor of each pattern only."""
    first, *rest = converter.operations
    if not (isinstance(first, MergeModulelist) and first.dim == 0):
        return False
    return all(isinstance(op, Concatenate) and op.dim != 0 for op in rest)


def _check_experts(assignment: Assignment, patterns: Sequence[str], experts: int) -> None:
    for pattern in patterns:
        found = len(assignment.sources.get(pattern, []))
        if found != experts:
            raise ModelError(
                f"'{assignment.target}' is made of {experts} tensors '{pattern}', found {found}",
                where=assignment.files,
                remedy="the weights belong to another model than config.json, or are incomplete",
            )


def _apply(
    converter: WeightConverter, target: str, sources: Mapping[str, Sequence[WeightTensor]], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    work = deepcopy(converter)
    for pattern, tensors in sources.items():
        for tensor in tensors:
            work.add_tensor(target, tensor.name, pattern, tensor.read)  # type: ignore[arg-type]
    made = work.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _copy(name: str, tensor: torch.Tensor, target: BaseTensor, sliced: bool, assignment: Assignment) -> None:
    shard = shard_of(target.tensor)
    expected = [shard.local.shape[0], *target.shape[1:]] if sliced else list(target.shape)
    if list(tensor.shape) != expected:
        raise ModelError(
            f"'{name}' has shape {list(target.shape)} in the model, the weights give {list(tensor.shape)}",
            where=assignment.files,
            remedy="the weights belong to another model than config.json",
        )
    if sliced:
        shard = Shard(shard.local, (0, *shard.offsets[1:]))
    if not shard.local.numel():
        return
    if target.layer is None:
        shard.local.copy_(shard.of(tensor))
    else:
        first = shard.offsets[0]
        shard.local.copy_(encode(tensor[first : first + shard.local.shape[0]].to(shard.local.device)))


def disk_groups(model: PreTrainedModel, names: Sequence[str]) -> list[list[str]]:
    """The names of a model's tensors in groups that are converted to their disk form together."""
    used = vars(model).get("_weight_conversions")
    transforms: list[WeightTransform] = used if used is not None else _default_transforms(model)
    reverse = [entry.reverse_transform() for entry in transforms[::-1]]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        groups.setdefault(target if pattern is not None else name, []).append(name)
    return list(groups.values())


def _default_transforms(model: PreTrainedModel) -> list[WeightTransform]:
    _inherit_rules(model)
    # A prefix rule describes some checkpoints only, and here no checkpoint was loaded that would decide.
    return [
        entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)
    ]


def to_disk(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One group of `disk_groups` under the names and in the layout on disk."""
    _inherit_rules(model)
    return revert_weight_conversion(model, tensors)
