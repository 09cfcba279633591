"""A run directory: its metrics, its model, its answers, its exports."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardtune.batch.seeds import generators_kept
from shardtune.checkpoint.atomic import publish, read_json
from shardtune.checkpoint.checksums import complete_checksums
from shardtune.checkpoint.export_check import check_reload
from shardtune.checkpoint.state_file import StateFile
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.verified import damage_on_ranks, directory_damage, require_sound
from shardtune.config import Recipe
from shardtune.config.own_code import require_consent
from shardtune.config.paths import user_path
from shardtune.config.user_code import import_plugins
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.sources.inference_rows import InferenceRows
from shardtune.errors import CheckpointError, ConfigError, DataError
from shardtune.evaluate.generate import Sampling
from shardtune.run.caller_settings import in_recipe_settings, recipe_settings
from shardtune.run.choose_worker import Objects, make_worker, worker_class
from shardtune.run.directory import check_writable, load_config, no_run
from shardtune.run.evaluation_notes import notes_on_overrides
from shardtune.run.exporting import exporting
from shardtune.run.given_prompts import GivenPrompt, check_arguments, given_prompts, merged_sampling
from shardtune.run.identity import CONFIG, FINAL, MANIFEST, read_manifest
from shardtune.run.model_card import CARD, RunRecord, make_card
from shardtune.run.overridden import overridden, require_kept
from shardtune.run.predicting import predict
from shardtune.run.prompts import PromptBuilder
from shardtune.run.push import push
from shardtune.run.trained_policy import TrainedPolicy, acting_by, acting_policy
from shardtune.training.loggers import SAMPLES, as_numbers, read_metrics
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.exported_recipe import over_directory, with_average_of, with_found
from shardtune.training.worker.reported import evaluation_method
from shardtune.training.worker.run_context import RunContext, silent

ANOTHER = "name a directory that does not exist yet"
NO_EVALUATION = ("data.eval_data_paths=null", "data.eval_split=0", "eval.generate=false", "eval.metrics=[]", *(
    "eval.harness=[]", "eval.harness_options={}", "eval.environment=null",
    "runner.eval_before_training=false", "runner.eval_interval=-1", "runner.early_stop.enabled=false",
    "runner.best.monitor=null",
))  # fmt: skip


EXPORT_DTYPES = ("auto", "fp64", "fp32", "bf16", "fp16")


class Run:
    """A run directory, finished or not: its metrics and its model.

    Args:
        directory: of the run.
        trust: code that its recipe names and that may be executed, besides what this user has trained with.
        trained_here: it is the result of a training that this process has done or started.
    """

    def __init__(self, directory: str | Path, *, trust: Sequence[str] = (), trained_here: bool = False) -> None:
        self.dir = user_path(directory, "Run(directory)")
        self._trust = tuple(trust)
        self._trained_here = trained_here

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric; of the evaluation ones, those of `final/` if it exists.

        One that was not finite is NaN.

        Raises:
            CheckpointError: the directory is gone.
        """
        latest: dict[str, float] = {}
        if not self.dir.is_dir():
            raise no_run(self.dir)
        for line in read_metrics(self.dir):
            latest |= line
        final = self.dir / FINAL / "metrics.json"
        return as_numbers({**latest, **(read_json(final) if final.exists() else {})})

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe that the run directory holds."""
        return load_config(self.dir)

    def executable_recipe(self) -> Recipe:
        """The recipe, whose code may be executed.

        Raises:
            ConfigError: it names code that this user has neither trained with nor named as trusted.
        """
        return self.consented(self.recipe)

    def consented(self, recipe: Recipe) -> Recipe:
        """A recipe of this run, as it was at some time, whose code may be executed.

        Raises:
            ConfigError: it names code that this user has neither trained with nor named as trusted.
        """
        if not self._trained_here:
            require_consent(recipe, self._trust, self.dir / CONFIG)
        return recipe

    @recipe_settings()
    def worker(
        self, checkpoint: str = "final", *overrides: str, eval_data: object = None, episodes_dir: Path | None = None
    ) -> FSDPSftWorker:
        """The model of a checkpoint, ready to evaluate and to generate.

        Args:
            checkpoint: final, latest, best, a step, or a path.
            overrides: `key=value` on top of the run's recipe.
            eval_data: rows in memory instead of the recipe's evaluation sets.
            episodes_dir: where the episodes of evaluations are written; None: nowhere.
        """
        recipe, context = self.executable_recipe(), RunContext(report=silent, episodes_dir=episodes_dir)
        path = self.dir / FINAL if checkpoint == "final" else None
        if path is None:
            weights = CheckpointStore(self.dir / "checkpoints").resolve(checkpoint)
            recipe = with_average_of(with_found(recipe, self.dir, StateFile.read(weights).step), weights)
            recipe = overridden(recipe, overrides)
            import_plugins(recipe.plugins)
            worker = make_worker(recipe, Objects(eval_data=eval_data), training=False, report=silent)
            with _still_there(weights):
                require_sound(damage_on_ranks(weights, worker.ranks), weights, "take another: --checkpoint N")
                worker.setup_evaluation(weights, context)
            return worker
        if not path.is_dir():
            raise CheckpointError(
                f"{self.dir} has no {FINAL}/ yet",
                where="--checkpoint final",
                remedy="finish the run, or take a checkpoint of it: --checkpoint latest",
            )
        recipe = overridden(recipe, overrides)
        import_plugins(recipe.plugins)
        exported = over_directory(recipe, path)
        require_kept(self.executable_recipe(), recipe, exported, path)
        worker = make_worker(exported, Objects(eval_data=eval_data), training=False, report=silent)
        found = directory_damage(path, worker.ranks)
        weights = {
            name: fault for name, fault in found.items() if name.endswith(".safetensors")
        }  # a user may edit others
        require_sound(weights, path, "the command that trained the run writes it again from the last checkpoint")
        worker.setup_evaluation(context=replace(context, weights_directory=path))
        return worker

    def evaluate(self, checkpoint: str | Path = "final", *overrides: str, eval_data: object = None) -> dict[str, float]:
        """The evaluation metrics of a checkpoint (final, latest, best, a step, or a path), measured now."""
        if not isinstance(checkpoint, str | Path):
            raise ConfigError(
                f"the checkpoint is a {type(checkpoint).__name__}",
                where="run.evaluate()",
                remedy="give its name first, and rows by name: run.evaluate(eval_data=rows)",
            )
        require_same_worker(self)
        folder = self.dir / SAMPLES / Path(checkpoint).name
        with recipe_settings():
            worker = self.worker(str(checkpoint), *overrides, eval_data=eval_data, episodes_dir=folder)
            if not worker.evaluates:
                raise nothing_to_evaluate()
            for note in notes_on_overrides(overridden(self.recipe, overrides), overrides, self.recipe, self.dir):
                warnings.warn(note, stacklevel=2)
            return evaluation_method(worker)()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, object]]],
        *,
        checkpoint: str = "final",
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        raw: bool | Sequence[bool] = False,
        images: Sequence[object] = (),
        tools: Sequence[object] = (),
        folder: str | Path | None = None,
        template_kwargs: Mapping[str, object] | Sequence[object] = (),
    ) -> list[str]:
        """Generate one answer per prompt; a prompt is the text of a user turn, or a whole conversation.

        Args:
            prompts: one text, or several texts or conversations. Turns may hold parts with images.
            checkpoint: final, latest, best, a step, or a path.
            system: a system turn before each prompt that has none.
            sampling: how tokens are sampled; greedy by default. Or one by one:
            max_new_tokens: of an answer, its end-of-turn token included; 256 by default.
            temperature: 0 is greedy, the default.
            top_p: tokens are sampled from the smallest set with this probability; 1 by default.
            seed: of the sampling; 0 by default.
            raw: continue the prompts as plain text, without the chat template; or whether to, for each prompt.
            images: the images of a single text; for several prompts a list for each. An image is given as in a row: a
                path, a URL, bytes, a Pillow image or a uint8 array [height, width, 3]. It replaces `<image>` in the
                prompt; without one it goes before the text.
            tools: definitions of the tools of a single text, as in a row; for several prompts a list for each.
            folder: what relative image paths are relative to; by default the working directory.
            template_kwargs: values for the chat template, such as `{"enable_thinking": False}`, which take precedence
                over those of the run; or a list of them, one for each prompt.

        Raises:
            ConfigError: a prompt is neither text nor a list of turns, or the arguments do not fit together.
        """
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        sampling = merged_sampling(sampling, settings)
        given = given_prompts(
            prompts, system=system, raw=raw, images=images, tools=tools, template_kwargs=template_kwargs
        )
        check = partial(check_arguments, given=template_kwargs)
        return list(self.answers(given, sampling, checkpoint=checkpoint, system=system, folder=folder, check=check))

    def answers(
        self,
        prompts: Sequence[GivenPrompt],
        sampling: Sampling,
        *,
        checkpoint: str = "final",
        system: str | None = None,
        folder: str | Path | None = None,
        check: Callable[[ChatEncoder], None] = lambda encoder: None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Iterator[str]:
        """As `generate`, one answer after the other: those of a block of prompts when the block is answered.

        Args:
            prompts: read and checked.
            sampling, checkpoint, system, folder: as of `generate`.
            check: refuses what does not fit the model's encoder, before the first answer.
            progress: receives the number of prompts that are answered, now and then.
        """

        def found() -> Iterator[str]:
            with generators_kept():
                worker = answering(self, checkpoint)
                encoder = worker.chat_encoder().at(Path.cwd() if folder is None else Path(folder).absolute())
                check(encoder)
                builder = PromptBuilder(encoder, str(self.dir))
                encoded = [prompt.build(builder, system) for prompt in prompts]
            for block in worker.generator().in_blocks(encoded, sampling, progress):
                yield from block

        return in_recipe_settings(found())

    @recipe_settings()
    def predict(
        self, rows: Sequence[Mapping[str, Any]], *, checkpoint: str = "final", prepared: bool = False
    ) -> list[Any]:
        """What a model predicts for each row: of a task by name a label, a number, a vector, a score or a text; of an
        adapter of your own what its `predict_rows` returns, tensors as lists.

        Args:
            rows: as in training, without targets.
            checkpoint: final, latest, best, a step, or a path.
            prepared: the rows are as `data.transform` returns them, with the standard names of columns.

        Raises:
            ConfigError: the model is of no task by name, and its adapter has no `predict_rows`.
            DataError: a row cannot be used, or `data.transform` drops it.
        """
        found = [line["prediction"] for line in self.predictions(rows, checkpoint=checkpoint, prepared=prepared)]
        if len(found) != len(rows):
            raise DataError(
                f"data.transform drops {len(rows) - len(found)} of {len(rows)} rows, which have no prediction",
                where="predict(rows)",
                remedy="leave such rows out; or call predictions, whose lines have the rows' columns",
            )
        return found

    def predictions(
        self,
        rows: str | Path | Sequence[Mapping[str, Any]],
        *,
        checkpoint: str = "final",
        prepared: bool = False,
        report: Callable[[str], None] = silent,
    ) -> Iterator[dict[str, Any]]:
        """As `predict`, one row after the other, each with its columns; `rows` may be a file.

        A row that `data.transform` drops is left out; `report` receives a line with their count.
        """
        worker = self.worker(checkpoint, *NO_EVALUATION)
        return in_recipe_settings(predict(worker, rows, prepared=prepared, report=report))

    @recipe_settings()
    def rows_as_trained(self, *, prepared: bool = False) -> InferenceRows:
        """How the run read a row before it was encoded: by `data.transform`, then `data.columns`.

        Args:
            prepared: rows are as the transform returns them, and are read as they are.

        Raises:
            ConfigError: the recipe names code that this user has neither trained with nor named as trusted; or rows
                are prepared, and it has neither key.
        """
        return InferenceRows.of(self.executable_recipe().data, prepared=prepared)

    @recipe_settings()
    def policy(
        self,
        checkpoint: str = "final",
        *,
        action_steps: int | None = None,
        temporal_ensembling: float | None = None,
        unnorm_key: str | None = None,
    ) -> TrainedPolicy:
        """The trained policy, of a model that acts: `policy.reset()`, `policy.select_action(observation)`.

        Args:
            checkpoint: final, latest, best, a step, or a path.
            action_steps: how many actions of a prediction are returned before the next one; None: as
                `eval.action_steps` of the recipe, by default all.
            temporal_ensembling: as `eval.temporal_ensembling`.
            unnorm_key: the data set by whose statistics it acts, of a model with those of several; None: as
                `model.unnorm_key` of the recipe.

        Raises:
            ConfigError: the model does not act, or has no statistics of this data set.
        """
        worker = self.worker(checkpoint, *NO_EVALUATION, *acting_by(unnorm_key))
        return acting_policy(worker, self.recipe.eval, action_steps, temporal_ensembling)

    @recipe_settings()
    def export(
        self,
        to: str | Path,
        *,
        checkpoint: str = "final",
        dtype: str = "auto",
        merge: bool = False,
        check: bool = True,
        report: Callable[[str], None] = silent,
    ) -> Path:
        """Export a checkpoint as a directory for other programs, then load it in a new process and compare.

        A causal language model is compared by its logits, any other model by its tensors, bit by bit. An adapter is
        written in PEFT's format, unless it is merged.

        Args:
            to: the directory, which must be empty or not exist yet; of a link, what it leads to.
            checkpoint: final, latest, best, a step, or a path.
            dtype: auto (the base model's) | fp64 | fp32 | bf16 | fp16.
            merge: add the adapter to the base model's weights, in full precision, and write the whole model.
            check: whether to compare.
            report: receives the result of the comparison.

        Returns:
            The directory that is written.

        Raises:
            CheckpointError: the directory is not empty, or the written model differs from the trained one.
            ConfigError: there is no such dtype.
        """
        if dtype not in EXPORT_DTYPES:
            raise ConfigError(f"{dtype} is not a dtype for export", where="--dtype", remedy=" | ".join(EXPORT_DTYPES))
        target, title = _export_target(user_path(to, "--to").absolute())
        config = self.recipe.actor.model
        if merge and not config.is_lora:
            raise ConfigError(
                "the run trained no adapter, so there is nothing to merge", where="--merge", remedy="leave it out"
            )
        full = "fp64" if config.precision == "fp64" else "fp32"
        exactly = (f"actor.model.precision={full}", "actor.model.lora.base_dtype=auto") if config.is_lora else ()
        worker = self.worker(checkpoint, *NO_EVALUATION, *exactly)
        target.parent.mkdir(parents=True, exist_ok=True)
        checked = None
        with exporting(target) as temporary:
            worker.export(temporary, dtype, merge=merge)
            if check:
                worker.weights.restore_model()
                checked = check_reload(worker.inner_model, temporary)
                report(f"{target}: {checked}")
            self._write_card(temporary, title, checkpoint, worker.step, merge=merge, checked=checked)
            complete_checksums(temporary, {})
            if target.exists():
                target.rmdir()
            publish(temporary, target)
        return target

    def push(
        self,
        repo: str,
        *,
        public: bool = False,
        revision: str | None = None,
        replace_card: bool = False,
        report: Callable[[str], None] = silent,
    ) -> str:
        """Publish `final/` on the Hugging Face Hub, with a model card; returns the address of the commit.

        Arguments and errors are those of `shardtune.run.push.push`.
        """
        return push(self.dir, repo, public=public, revision=revision, replace_card=replace_card, report=report)

    def _write_card(
        self, directory: Path, name: str, checkpoint: str, step: int, *, merge: bool, checked: str | None
    ) -> None:
        """Write the model card of an exported directory, unless the model has brought one."""
        if (directory / CARD).exists():
            return
        record, at = RunRecord.read(self.dir, read_manifest(self.dir)), None if checkpoint == FINAL else step
        card = make_card(record, directory, title=name, merged=merge, step=at, checked=checked)
        (directory / CARD).write_text(card, encoding="utf-8")


@contextmanager
def _still_there(checkpoint: Path) -> Iterator[None]:
    """Say of a checkpoint that cannot be read that a run in progress has removed it since it was found, if it has.

    Raises:
        CheckpointError: it is not there any longer.
    """
    try:
        yield
    except (CheckpointError, OSError) as error:
        if checkpoint.is_dir():
            raise
        raise CheckpointError(
            f"{checkpoint.name} has been removed since: a run in progress keeps its last checkpoints alone",
            where=str(checkpoint),
            remedy="run the command again, which takes the newest then; runner.keep_last keeps more of them",
        ) from error


def _export_target(named: Path) -> tuple[Path, str]:
    """Where an export to a directory is written, through links, and its title.

    Raises:
        CheckpointError: it is not empty, or cannot be put in place there.
    """
    try:
        target = named.resolve() if named.is_symlink() else named
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise CheckpointError(f"{named} is a link that leads nowhere", where="--to", remedy=ANOTHER) from error
    what = ""
    if target.exists() and not target.is_dir():
        what = "is a file"
    elif target.exists() and any(target.iterdir()):
        what = "is not empty"
    elif os.path.ismount(target):  # an export is written beside its place, then renamed
        what = "is where a disk is mounted, and an export takes the place of a directory"
    if what:
        place = str(target) if target == named else f"{target}, which {named} leads to,"
        raise CheckpointError(f"{place} {what}", where="--to", remedy=ANOTHER)
    check_writable(target.parent if target.exists() else target, "--to")
    return target, named.name


def load_run(directory: str | Path, *, trust: Sequence[str] = ()) -> Run:
    """The run in a directory that `shardtune train` made.

    Args:
        directory: of the run, or its `final/`.
        trust: files, modules and models whose code may be executed where the run's recipe names them. What this user
            has trained with needs none.
    """
    run_dir = user_path(directory, "RUN").absolute()
    if run_dir.name in (FINAL, "FINAL") and (run_dir.parent / MANIFEST).exists():
        run_dir = run_dir.parent
    load_config(run_dir)
    return Run(run_dir, trust=trust)


def answering(run: Run, checkpoint: str) -> SFTWorker:
    """The model of a checkpoint, ready to generate.

    Raises:
        ConfigError: the run uses a user-defined worker, which cannot generate.
    """
    kind = worker_class(run.executable_recipe())
    if not issubclass(kind, SFTWorker):
        raise ConfigError(
            f"the run is driven by {kind.__name__}, which gives no answers",
            where=str(run.dir),
            remedy=f"shardtune eval {run.dir}; from Python, load_run({str(run.dir)!r}).worker() holds the model",
        )
    worker = run.worker(checkpoint, *NO_EVALUATION)
    assert isinstance(worker, SFTWorker)
    return worker


def require_same_worker(run: Run) -> None:
    """Refuse to evaluate a run by another loss than it was trained with: one of a class that its recipe does not name.

    Raises:
        ConfigError: a script trained it with a trainer of its own.
    """
    chosen = worker_class(run.executable_recipe()).__qualname__
    trained_by = str(read_manifest(run.dir)["worker"])
    if trained_by != chosen:
        raise ConfigError(
            f"the run was trained by {trained_by}, which its recipe does not name; {chosen} would evaluate it",
            where=str(run.dir / MANIFEST),
            remedy=f"name the class in the recipe before training, actor.worker: file.py:{trained_by}; the metrics of "
            "the trained model are in final/metrics.json",
        )


def nothing_to_evaluate() -> ConfigError:
    return ConfigError(
        "there is nothing to evaluate on: data.eval_data_paths and eval.environment are null, eval.harness is empty",
        where="data.eval_data_paths",
        remedy="set data.eval_data_paths or data.eval_split; from Python, or give rows: run.evaluate(eval_data=…)",
    )
