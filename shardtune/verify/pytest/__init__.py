"""The conformance kit for tests: `check_adapter` in your own test, or the kit's checks as tests.

pytest --pyargs shardtune.verify.pytest --adapter my_model.py:MyModel --recipe recipe.yaml
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

__all__ = ["check_adapter"]


def check_adapter(
    adapter: str | Path,
    *overrides: str,
    recipe: str | Path | Mapping[str, object] | None = None,
    only: Collection[str] = (),
) -> None:
    """Assert that an adapter passes the conformance kit.

    Args:
        adapter: `file.py:Class`, the name of a registered model, or a recipe that names its model itself.
        overrides: `key=value` over the recipe.
        recipe: whose model, options and training rows are taken; without one the adapter's own `examples`.
        only: names of checks; all of them by default.

    Raises:
        AssertionError: a check failed; the message has what, where and the remedy of each failure.
        ShardtuneError: there is no such adapter, the recipe is wrong, or there are no rows.
    """
    from shardtune.verify.adapter import verify_adapter

    report = verify_adapter(adapter, recipe, *overrides, only=only, report=lambda text: None)
    if report.failures:
        raise AssertionError("\n\n".join([f"{report.subject} does not conform", *map(str, report.failures)]))
