"""The weights that checkpoints leave out, which are loaded from elsewhere: what a checkpoint says of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import final

from torch import nn

from shardtune.checkpoint.base_weights import fingerprint
from shardtune.checkpoint.peft_directory import base_of_adapter
from shardtune.config import Recipe
from shardtune.errors import CheckpointError
from shardtune.models.lora.attach import is_adapted
from shardtune.models.lora.init import changes_base
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.build.lora import frozen_dtype, is_adapter
from shardtune.training.worker.frozen_weights import BASE, FrozenWeights, changed_error, changed_line, named


@final
class LeftOutWeights:
    """The frozen weights of a model that its checkpoints leave out.

    A checkpoint has a record of them, so that trained weights are not put on others than those they were trained with:
    the form they are held in, hashes of what was read from the base model and with an adapter, and what has changed
    since. Every rank makes one.

    Args:
        recipe: of the run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._record: dict[str, str] = {}
        self._frozen: FrozenWeights | None = None

    def take(self, model: nn.Module, names: Collection[str], ranks: Ranks) -> None:
        """Record weights as they were read, before an adapter is begun on them; every rank calls it.

        Args:
            model: that has them.
            names: of those left out.
            ranks: of the run.
        """
        settings = self._recipe.actor.model
        form = f"{settings.lora.base_dtype} {frozen_dtype(settings)}"
        begun = settings.lora.init if is_adapted(model) and changes_base(model) else "kept"
        self._record = {"form": form, "hash": fingerprint(model, names, ranks), "base": str(begun)}

    def take_with_adapter(self, model: nn.Module, ranks: Ranks) -> None:
        """Record the base weights that came with an adapter, once it is read; every rank calls it."""
        names = set(base_of_adapter(model).values())
        self._record["adapter"] = fingerprint(model, names, ranks) if names else "none"

    def begin_steps(self, weights: Weights, ranks: Ranks) -> None:
        """Before a first step, after all that `setup` does: note the values, which steps may not change."""
        self._frozen = FrozenWeights(weights, ranks)

    def record(self, report: Callable[[str], None], keeps: str) -> dict[str, str]:
        """What a checkpoint says of them; every rank calls it.

        Args:
            report: receives a line, once, if they have changed since the first step.
            keeps: the class of a worker whose own methods may keep them all the same; "" if none does.
        """
        changed = self._frozen.changed() if self._frozen is not None else []
        if changed and "changed" not in self._record:
            self._record["changed"] = named(changed)
            report(changed_line(changed, keeps))
        return self._record

    def check(self, checkpoint: Path, recorded: object, *, may_have_changed: bool = False) -> None:
        """Refuse trained weights on others than those they were trained with.

        Args:
            checkpoint: where the trained weights are from.
            recorded: what it says of those it leaves out; None in a checkpoint of an earlier version.
            may_have_changed: whether frozen weights that steps have changed are kept elsewhere.

        Raises:
            CheckpointError: they differ, and `runner.allow_changes` does not allow it.
        """
        own, saved = self._record, recorded if isinstance(recorded, Mapping) else {}
        allowed = self._recipe.runner.allows(BASE)
        # In a rollback they are those of this process, which has changed them.
        if "changed" in saved and not (may_have_changed or "changed" in own or allowed):
            raise changed_error(saved["changed"], checkpoint)
        if saved.get("form") != own.get("form"):
            return
        if not is_adapter(checkpoint):
            self._check_begun(checkpoint, saved)
        if saved.get("hash") == own.get("hash") or allowed:
            return
        raise CheckpointError(
            "the frozen weights, which are not saved with the trained ones, are not those of training: "
            f"what is read from {self._recipe.actor.model.model_path or 'the model'} has changed",
            where=str(checkpoint),
            remedy="put the base model back"
            + ("" if is_adapter(checkpoint) else f", or go on all the same with {self._recipe.runner.allowing(BASE)}"),
        )

    def _check_begun(self, checkpoint: Path, saved: Mapping[str, str]) -> None:
        """Refuse an adapter on base weights that its beginning has changed in another way."""
        own, lora = self._record, self._recipe.actor.model.lora
        if saved.get("base", own.get("base")) != own.get("base"):
            raise CheckpointError(
                f"actor.model.lora.init was {saved['base']} in training and is {own['base']} now, which changes the "
                "base weights that the adapter was trained on (kept: not changed)",
                where=str(checkpoint),
                remedy="put actor.model.lora.init back: it matters at the beginning of a run alone",
            )
        if saved.get("adapter", own.get("adapter")) != own.get("adapter"):
            raise CheckpointError(
                "the base weights that came with the adapter of actor.model.lora.load_from, and are not saved with the "
                "trained ones, are not those of training",
                where=f"{checkpoint}, {lora.load_from}",
                remedy="put that adapter back as it was",
            )
