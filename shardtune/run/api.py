"""The Python interface of the commands: `train`, and the `Run` it returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.atomic import publish, read_json
from shardtune.checkpoint.checksums import complete_checksums, directory_faults
from shardtune.checkpoint.export_check import check_reload
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import STATE_FILE
from shardtune.checkpoint.verified import damage_on_ranks, damaged_file, directory_damage, require_sound
from shardtune.config import Recipe, load_recipe
from shardtune.config.own_code import named_code, require_consent
from shardtune.config.paths import user_path
from shardtune.config.rank_layout import Layout
from shardtune.config.user_code import import_plugins
from shardtune.errors import CheckpointError, ConfigError, ParallelError
from shardtune.evaluate.generate import Sampling
from shardtune.launch.elastic import Restarts, run_elastic
from shardtune.launch.local import free_port, is_launched, run_ranks
from shardtune.launch.signals import StopSignal, end_with_parent, listening
from shardtune.models.find_adapter import check_in_memory
from shardtune.parallel.ranks import choose_device, leave_ranks
from shardtune.run.choose_worker import Objects, check_worker, make_worker, worker_class
from shardtune.run.directory import (
    RunPlan,
    check_unlocked,
    check_writable,
    load_config,
    plan_run,
    without_final,
)
from shardtune.run.display import Display
from shardtune.run.exporting import exporting
from shardtune.run.identity import CONFIG, FINAL, MANIFEST, read_manifest
from shardtune.run.model_card import CARD, RunRecord, make_card
from shardtune.run.overridden import EVERYTHING, overridden
from shardtune.run.preflight import check_same_rows, is_one_of_several, read_together
from shardtune.run.prompts import PromptBuilder
from shardtune.run.push import check_push, push
from shardtune.run.resume_check import check_same_data
from shardtune.run.train_rank import report_finished, train_rank, watching
from shardtune.training.callbacks import load_callbacks
from shardtune.training.loggers import SAMPLES, check_logger, read_metrics
from shardtune.training.recorder import Recording
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.model_state import over_directory
from shardtune.training.worker.reported import evaluation_method
from shardtune.training.worker.run_context import RunContext, silent


def train(
    recipe: str | Path | Mapping[str, object] | DictConfig | None,
    *overrides: str,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_data: object = None,
    eval_data: object = None,
    recording: Recording | None = None,
) -> Run:
    """Fine-tune according to a recipe; continue from the last checkpoint of its run directory.

    Args:
        recipe: a YAML file, a dict or a `DictConfig`.
        overrides: `key=value`, as on the command line.
        model: a model in memory, trained in place of `actor.model.model_path` (one rank).
        tokenizer: a tokenizer in memory.
        train_data: a list of rows, a `datasets.Dataset` or a `pandas.DataFrame`.
        eval_data: likewise, or a dict of named ones.
        recording: what is recorded of each step, to be compared with other runs; None: nothing.

    Raises:
        ShardtuneError: an error that the user can fix; raised before anything is written where possible.
        Interrupted: stopped by a signal, after saving; calling again continues.
    """
    check_in_memory(model, tokenizer)
    objects = Objects(model, tokenizer, train_data, eval_data)

    def read() -> Recipe:
        loaded = load_recipe(recipe, overrides, in_memory=objects.keys())
        import_plugins(loaded.plugins)
        load_callbacks(loaded.runner.callbacks)
        return loaded

    if is_one_of_several():
        loaded, peers = read_together(read)
        with loaded.spelling.in_errors():
            return Run(train_rank(loaded, objects, peers, recording=recording), trained_here=True)
    loaded = read()
    with loaded.spelling.in_errors():
        return _train(loaded, objects, recording)


def _train(loaded: Recipe, objects: Objects, recording: Recording | None) -> Run:
    """Train in this process, or start the ranks."""
    if is_launched():
        return Run(train_rank(loaded, objects, recording=recording), trained_here=True)
    display = Display()
    plan = plan_run(loaded)
    check_unlocked(plan.run_dir)
    if plan.finished:
        plan = without_final(plan, partial(directory_faults, content=True))
    if plan.finished:
        report_finished(plan, loaded, objects, display.report)
        return Run(plan.run_dir, trained_here=True)
    by_ray = loaded.runner.launcher == "ray"
    if not by_ray:  # there another host may log
        check_logger(loaded.runner.logger)
    check_push(loaded.runner.push_to_hub)
    if by_ray or loaded.runner.nproc_per_node > 1:
        _refuse_objects(loaded, objects)
        for note in loaded.notes:  # the ranks read a recipe without them
            display.report(note)
        with listening() as stop:
            (_launch_on_ray if by_ray else _launch)(loaded, plan, display, stop, recording)
        return Run(plan.run_dir, trained_here=True)
    return Run(train_rank(loaded, objects, recording=recording), trained_here=True)


def _refuse_objects(recipe: Recipe, objects: Objects) -> None:
    if not objects.any:
        return
    by_ray = recipe.runner.launcher == "ray"
    raise ConfigError(
        "objects in memory train on one rank" + (" of this process" if by_ray else ""),
        where="runner.launcher = ray" if by_ray else f"runner.nproc_per_node = {recipe.runner.nproc_per_node}",
        remedy="save them and name them in the recipe, or set runner."
        + ("launcher: local" if by_ray else "nproc_per_node: 1"),
    )


def _launch(recipe: Recipe, plan: RunPlan, display: Display, stop: StopSignal, recording: Recording | None) -> None:
    """Run all checks that need no ranks, tokenise, then start the ranks on this machine."""
    free_port(recipe.runner.master_port)
    choose_device(recipe.runner.device, recipe.runner.nproc_per_node - 1)
    # A user-defined worker is created in the ranks only: it may hold resources that cannot be shared.
    kind = worker_class(recipe)
    if not issubclass(kind, SFTWorker):
        check_worker(recipe, kind)
    else:
        with watching(recipe.runner.watchdog_seconds, plan.run_dir, stop):
            worker = make_worker(recipe, report=display.report)
            worker.task.check()
            candidates = () if plan.resume_from is None else (plan.resume_from, *plan.older)
            readable = [path for path in candidates if damaged_file(path, STATE_FILE) is None]
            if readable:  # the ranks choose a checkpoint; each is of the same data
                check_same_data(readable[0], worker.task.data_files(), recipe.runner.allow_changes)
            del worker
    with tempfile.TemporaryDirectory(prefix="shardtune-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe.to_yaml(as_given=True))

        runner = recipe.runner
        logs_in = plan.run_dir if runner.logger.rank_logs else None

        def start(workers: int, environment: Mapping[str, str]) -> None:
            command, port = ["train", str(file), *(recording.words if recording else ())], runner.master_port
            run_ranks(command, workers, master_port=port, environment=environment, logs_in=logs_in)

        def left(numbers: Sequence[int], survivors: int) -> int:
            return next((number for number in numbers if number <= survivors), min(numbers, default=0))

        limits, fits, report = _restarts(recipe), _fits(recipe), display.report
        run_elastic(start, limits, left=left, fits=fits, stop=stop, report=report, run_dir=plan.run_dir)


def _launch_on_ray(
    recipe: Recipe, plan: RunPlan, display: Display, stop: StopSignal, recording: Recording | None
) -> None:
    """Start the ranks on a Ray cluster; each reads data and model on its own host."""
    if recording is not None:
        raise ConfigError(
            "steps are recorded on a single machine or under torchrun, not on Ray",
            where="--record, --stop-after",
            remedy="runner.launcher=local, or leave the option out",
        )
    from shardtune.launch.ray.ranks import connected, reserve_for_the_rest, run_ranks_on_ray

    with connected(recipe.runner) as cluster:

        def start(workers: int, environment: Mapping[str, str]) -> None:
            run_ranks_on_ray(
                cluster, ["train", "RECIPE"], recipe, workers, environment, stop=stop, report=display.report
            )

        def left(numbers: Sequence[int], survivors: int) -> int:
            return reserve_for_the_rest(cluster, numbers, stop)

        limits, fits, report = _restarts(recipe), _fits(recipe), display.report
        run_elastic(start, limits, left=left, fits=fits, stop=stop, report=report, run_dir=plan.run_dir)


def _restarts(recipe: Recipe) -> Restarts:
    runner = recipe.runner
    return Restarts(runner.max_restarts, runner.workers, runner.min_ranks or runner.workers)


def _fits(recipe: Recipe) -> Callable[[int], bool]:
    """Whether a number of ranks can have the layout of a recipe."""

    def fits(workers: int) -> bool:
        try:
            Layout.of(recipe.actor, workers)
        except ParallelError:
            return False
        return True

    return fits


class Run:
    """A run directory, finished or not: its metrics and its model.

    Args:
        directory: of the run.
        trust: code that its recipe names and that may be executed, besides what this user has trained with.
        trained_here: it is the result of a training that this process has done or started.
    """

    def __init__(self, directory: Path, *, trust: Sequence[str] = (), trained_here: bool = False) -> None:
        self.dir = directory
        self._trust = tuple(trust)
        self._trained_here = trained_here

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric; of the evaluation ones, those of `final/` if it exists."""
        latest: dict[str, float] = {}
        for line in read_metrics(self.dir):
            latest |= line
        final = self.dir / FINAL / "metrics.json"
        return {**latest, **(read_json(final) if final.exists() else {})}

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe that the run directory holds."""
        return load_config(self.dir)

    def executable_recipe(self) -> Recipe:
        """The recipe, whose code may be executed.

        Raises:
            ConfigError: it names code that this user has neither trained with nor named as trusted.
        """
        recipe = self.recipe
        if not self._trained_here:
            require_consent(recipe, self._trust, self.dir / CONFIG)
        return recipe

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
        recipe = overridden(recipe, overrides)
        import_plugins(recipe.plugins)
        path = self.dir / FINAL if checkpoint == "final" else None
        if path is None:
            weights = CheckpointStore(self.dir / "checkpoints").resolve(checkpoint)
            worker = make_worker(recipe, Objects(eval_data=eval_data), training=False, report=silent)
            require_sound(damage_on_ranks(weights, worker.ranks), weights, "take another: --checkpoint N")
            worker.setup_evaluation(weights, context)
            return worker
        if not path.is_dir():
            raise CheckpointError(
                f"{self.dir} has no {FINAL}/ yet",
                where="--checkpoint final",
                remedy="finish the run, or take a checkpoint of it: --checkpoint latest",
            )
        worker = make_worker(over_directory(recipe, path), Objects(eval_data=eval_data), training=False, report=silent)
        found = directory_damage(path, worker.ranks)
        weights = {
            name: fault for name, fault in found.items() if name.endswith(".safetensors")
        }  # a user may edit others
        require_sound(weights, path, "the command that trained the run writes it again from the last checkpoint")
        worker.setup_evaluation(context=replace(context, weights_directory=path))
        return worker

    def evaluate(self, checkpoint: str = "final", *overrides: str, eval_data: object = None) -> dict[str, float]:
        """The evaluation metrics of a checkpoint, measured now."""
        _require_same_worker(self)
        folder = self.dir / SAMPLES / Path(checkpoint).name
        worker = self.worker(checkpoint, *overrides, eval_data=eval_data, episodes_dir=folder)
        if not worker.evaluates:
            raise _nothing_to_evaluate()
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
        raw: bool = False,
        images: Sequence[object] = (),
        tools: Sequence[object] = (),
        folder: str | Path | None = None,
    ) -> list[str]:
        """Generate one answer per prompt; a prompt is the text of a user turn, or a whole conversation.

        Args:
            prompts: one text, or several texts or conversations. Turns may hold parts with images.
            checkpoint: final, latest, best, a step, or a path.
            system: a system turn before each prompt.
            sampling: how tokens are sampled; greedy by default. Or one by one:
            max_new_tokens: of an answer, its end-of-turn token included; 256 by default.
            temperature: 0 is greedy, the default.
            top_p: tokens are sampled from the smallest set with this probability; 1 by default.
            seed: of the sampling; 0 by default.
            raw: continue the prompts as plain text, without the chat template.
            images: the images of a single text; for several prompts a list for each. An image is given as in a row: a
                path, a URL, bytes, a Pillow image or a uint8 array [height, width, 3]. It replaces `<image>` in the
                prompt; without one it goes before the text.
            tools: definitions of the tools of a single text, as in a row; for several prompts a list for each.
            folder: what relative image paths are relative to; by default the working directory.
        """
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        sampling = _sampling(sampling, {name: value for name, value in settings.items() if value is not None})
        prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
        if raw and (system is not None or any(tools) or not all(isinstance(prompt, str) for prompt in prompt_list)):
            raise ConfigError(
                "raw text is continued as it is and has no turns",
                where="--raw",
                remedy="leave out --system, tools and messages, or --raw",
            )
        tool_lists = [tools] if isinstance(prompts, str) else list(tools) or [None] * len(prompt_list)
        if len(tool_lists) != len(prompt_list):
            raise ConfigError(
                f"{len(prompt_list)} prompts and {len(tool_lists)} lists of tools",
                where="tools=",
                remedy="give a list of tools for each prompt, empty for one without",
            )
        image_lists = (
            [images] if isinstance(prompts, str) else [_images(one) for one in images or [()] * len(prompt_list)]
        )
        if len(image_lists) != len(prompt_list):
            raise ConfigError(
                f"{len(prompt_list)} prompts and {len(image_lists)} lists of images",
                where="images=",
                remedy="give a list of images for each prompt, empty for one without",
            )
        worker = answering(self, checkpoint)
        encoder = worker.chat_encoder().at(Path.cwd() if folder is None else Path(folder).absolute())
        builder = PromptBuilder(encoder, str(self.dir))
        encoded = [
            builder.text(str(prompt), images) if raw else builder.turns(_conversation(prompt, system), images, tools)
            for prompt, images, tools in zip(prompt_list, image_lists, tool_lists, strict=True)
        ]
        return worker.generator().answers(encoded, sampling)

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
            to: the directory, which must be empty or not exist yet.
            checkpoint: final, latest, best, a step, or a path.
            dtype: auto (the base model's) | fp32 | bf16 | fp16.
            merge: add the adapter to the base model's weights, in full precision, and write the whole model.
            check: whether to compare.
            report: receives the result of the comparison.

        Raises:
            CheckpointError: the directory is not empty, or the written model differs from the trained one.
        """
        target = user_path(to, "--to").absolute()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            what = "is not empty" if target.is_dir() else "is a file"
            raise CheckpointError(f"{target} {what}", where="--to", remedy="name a directory that does not exist yet")
        check_writable(target, "--to")
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
            self._write_card(temporary, target.name, checkpoint, worker.step, merge=merge, checked=checked)
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


def evaluate(
    target: str | Path | None, *overrides: str, checkpoint: str = "final", trust: Sequence[str] = ()
) -> dict[str, float]:
    """Evaluate a run directory, or the model that a recipe names, on as many ranks as the recipe sets.

    Args:
        target: a run directory or a recipe; None: `overrides` name a model and rows.
        overrides: `key=value` on top of the recipe.
        checkpoint: of a run: final, latest, best, a step, or a path.
        trust: of a run: code that its recipe names and that may be executed, as for `load_run`.
    """
    run_dir = None if target is None or not Path(target).is_dir() else Path(target)
    if run_dir is None:
        recipe = load_recipe(target, overrides, in_memory=EVERYTHING[1:2])
    else:
        _require_same_worker(load_run(run_dir, trust=trust))
        recipe = overridden(load_run(run_dir).recipe, overrides)
    if (recipe.runner.nproc_per_node > 1 or recipe.runner.launcher == "ray") and "RANK" not in os.environ:
        _evaluate_on_ranks(target, overrides, checkpoint, recipe)
        return {}
    if "RANK" in os.environ:
        end_with_parent()
    with recipe.spelling.in_errors():
        return _evaluate(recipe, run_dir, overrides, checkpoint=checkpoint, trust=trust)


def _evaluate(
    recipe: Recipe,
    run_dir: Path | None,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    trust: Sequence[str],
) -> dict[str, float]:
    """`evaluate` on this rank."""
    peers = read_together(lambda: recipe)[1] if is_one_of_several() else None
    logger = recipe.runner.logger
    if run_dir is not None:
        episodes = run_dir / SAMPLES / Path(checkpoint).name
        worker = load_run(run_dir, trust=trust).worker(checkpoint, *overrides, episodes_dir=episodes)
    else:
        episodes = Path(logger.log_path) / f"{logger.experiment_name}-episodes"
        import_plugins(recipe.plugins)
        worker = make_worker(recipe, training=False, report=Display().report)
        worker.setup_evaluation(context=RunContext(episodes_dir=episodes))
    check_same_rows(worker)
    if not worker.evaluates:
        raise _nothing_to_evaluate()
    if worker.ranks.is_main:
        model = str(recipe.actor.model.model_path) if run_dir is None else f"{run_dir}, checkpoint {checkpoint}"
        Display().report(f"evaluating {model} on {_evaluated_on(worker, episodes)}")
    with Display().during("evaluating") if worker.ranks.is_main else nullcontext():
        metrics = evaluation_method(worker)()
    leave_ranks(worker.ranks)  # only on success: otherwise the other ranks may be blocked in another collective
    if peers is not None:
        peers.end()
    return metrics


def _evaluated_on(worker: FSDPSftWorker, episodes: Path) -> str:
    """A description of what is evaluated on."""
    announced = [info.get("num_samples") for _, info in worker.eval_loaders.values()]
    sizes = [size for size in announced if isinstance(size, int)]
    rows = f"{sum(sizes):,} rows" if len(sizes) == len(announced) else f"{len(announced)} sets"
    config = worker.recipe.eval
    found = [rows] if announced else []
    if config.environment is not None:
        found.append(f"{config.episodes:,} episodes of {config.environment}, kept in {episodes}")
    if config.harness:
        found.append(f"{', '.join(config.harness)} of lm-evaluation-harness, kept in {episodes}")
    return " and ".join(found)


def _evaluate_on_ranks(target: str | Path | None, overrides: Sequence[str], checkpoint: str, recipe: Recipe) -> None:
    runner, is_run = recipe.runner, target is not None and Path(target).is_dir()
    # A rank on another host has no record of the code that is executed here.
    consent = [word for name in named_code(recipe) for word in ("--trust", name)] if is_run else []
    rest = ["--checkpoint", checkpoint, *consent]
    if runner.launcher == "local":
        named = [] if target is None else [str(target)]
        run_ranks(["eval", *named, *overrides, *rest], runner.nproc_per_node, master_port=runner.master_port)
        return
    from shardtune.launch.ray.ranks import connected, run_ranks_on_ray

    # The recipe that is sent has the overrides in it.
    words = [str(Path(target).absolute()), *overrides] if target is not None and is_run else ["RECIPE"]
    with listening() as stop, connected(runner) as cluster:
        arguments = ["eval", *words, *rest]
        run_ranks_on_ray(cluster, arguments, recipe, runner.workers, {}, stop=stop, report=silent, bare=True)


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


def _require_same_worker(run: Run) -> None:
    """Refuse to evaluate a run by another loss than it was trained with: one of a class that its recipe does not name.

    Raises:
        ConfigError: a script trained it with a trainer of its own.
    """
    trained_by = str(read_manifest(run.dir)["worker"])
    chosen = worker_class(run.executable_recipe()).__qualname__
    if trained_by != chosen:
        raise ConfigError(
            f"the run was trained by {trained_by}, which its recipe does not name; {chosen} would evaluate it",
            where=str(run.dir / MANIFEST),
            remedy=f"name the class in the recipe before training, actor.worker: file.py:{trained_by}; the metrics of "
            "the trained model are in final/metrics.json",
        )


def _sampling(given: Sampling | None, settings: Mapping[str, float]) -> Sampling:
    if given is not None and settings:
        raise ConfigError(
            f"sampling and {', '.join(settings)} are both given",
            where="generate(sampling=…)",
            remedy="keep one of them: Sampling(max_new_tokens=…, temperature=…, top_p=…, seed=…)",
        )
    return replace(given or Sampling(), **settings)


def _nothing_to_evaluate() -> ConfigError:
    return ConfigError(
        "there is nothing to evaluate on: data.eval_data_paths and eval.environment are null, eval.harness is empty",
        where="data.eval_data_paths",
        remedy="set data.eval_data_paths or data.eval_split; from Python, or give rows: run.evaluate(eval_data=…)",
    )


NO_EVALUATION = ("data.eval_data_paths=null", "data.eval_split=0", "eval.generate=false", "eval.metrics=[]", *(
    "eval.harness=[]", "eval.harness_options={}", "eval.environment=null",
    "runner.eval_before_training=false", "runner.eval_interval=-1", "runner.early_stop.enabled=false",
    "runner.best.monitor=null",
))  # fmt: skip


def _conversation(prompt: str | Sequence[Mapping[str, object]], system: str | None) -> list[Mapping[str, object]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*messages] if system is None else [{"role": "system", "content": system}, *messages]


def _images(given: object) -> Sequence[object]:
    """The images of one of several prompts."""
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return given
    raise ConfigError(
        f"the images of a prompt are a {type(given).__name__}, not a list",
        where="images=",
        remedy="give a list of images for each prompt, empty for one without",
    )


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
