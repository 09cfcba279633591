"""Writes YAML: by libyaml where it is, several times faster than in Python."""

from __future__ import annotations

import yaml

BASE: type[yaml.SafeDumper] = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper  # type: ignore[assignment]


class Dumper(BASE):
    """Text that a recipe would read as a number stands in quotes, and nothing is an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _is_number(text) else None)


def _is_number(text: str) -> bool:
    try:
        float(text)  # 1e-5 is one in a recipe, and none in YAML 1.1
    except ValueError:
        return False
    return True


Dumper.add_representer(str, Dumper.represent_text)


def yaml_text(value: object, *, width: int = 80) -> str:
    """Plain values (dicts, lists, scalars) as YAML, keys in their order.

    Args:
        width: of a line, in characters, where it can be broken.

    Raises:
        yaml.YAMLError: a value of another kind.
    """
    return yaml.dump(value, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False, width=width)
