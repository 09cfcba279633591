"""What every section of the recipe is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A group of recipe keys: immutable, unknown keys refused, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    FORMER_NAMES: ClassVar[Mapping[str, str]] = {}
    """Former names of keys of this section, and the present ones."""

    @model_validator(mode="before")
    @classmethod
    def _under_present_names(cls, values: object) -> object:
        """Move values from former names; one that its present name has too, with its default, counts as not given."""
        if not isinstance(values, Mapping) or cls.FORMER_NAMES.keys().isdisjoint(values):
            return values
        moved = {name: value for name, value in values.items() if name not in cls.FORMER_NAMES}
        for former, present in cls.FORMER_NAMES.items():
            if former not in values:
                continue
            if moved.get(present, cls.model_fields[present].default) == cls.model_fields[present].default:
                moved[present] = values[former]
            elif values[former] not in (moved[present], cls.model_fields[present].default):
                raise ValueError(f"{former} and {present} are two names of one key, with different values")
        return moved

    @field_validator("*")
    @classmethod
    def _in_a_machine_word(cls, value: object) -> object:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("the number has more than 64 bits")
        return value


def key(
    default: T,
    description: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> T:
    """A recipe key.

    Args:
        default: its value where it is not given; a list or mapping is copied for each recipe.
        description: a sentence for the configuration reference.
        gt: the value is greater than this.
        ge: the value is at least this.
        lt: the value is less than this.
        le: the value is at most this.
    """
    return Field(default, description=description, gt=gt, ge=ge, lt=lt, le=le)


def section(kind: type[S], description: str) -> S:
    """A section inside another one; its keys have their defaults unless given."""
    return Field(default_factory=kind, description=description)
