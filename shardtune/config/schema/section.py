"""What every section of the recipe is made of."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A group of recipe keys: immutable, unknown keys refused, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

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
