"""`train`, and the `Run` it returns: what the command line does, from Python."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.durable import publish, read_json, write_json
from shardtune.checkpoint.reload import check_reload
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import Recipe, load_recipe
from shardtune.display import Display, Facts
from shardtune.errors import CheckpointError, ConfigError
from shardtune.functions import import_plugins
from shardtune.generate import Sampling
from shardtune.interrupt import StopSignal, end_with_parent
from shardtune.launch import free_port, run_ranks
from shardtune.parallel.mesh import choose_device, leave_ranks
from shardtune.parallel.shard import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.run_directory import (
    FINAL,
    MANIFEST,
    RunLock,
    RunPlan,
    begin_run,
    check_same_data,
    check_unlocked,
    check_writable,
    environment,
    finish_run,
    load_config,
    plan_run,
)
from shardtune.runner import SFTRunner
from shardtune.sft_worker import SFTWorker
from shardtune.track import read_metrics

SHOWN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Objects:
    """What a caller holds in memory instead of naming it in the recipe."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train_data: Any = None
    eval_data: Any = None

    def keys(self) -> list[str]:
        """The recipe keys that they stand for."""
        given = {
            "actor.model.model_path": self.model is not None,
            "data.train_data_paths": self.train_data is not None,
            "data.eval_data_paths": self.eval_data is not None,
        }
        return [key for key, present in given.items() if present]


NOTHING = Objects()


def train(
    recipe: str | Path | Mapping[str, Any] | DictConfig | None,
    *overrides: str,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_data: Any = None,
    eval_data: Any = None,
) -> Run:
    """Fine-tune as a recipe says; continue where its run directory stands.

    Args:
        recipe: a YAML file, a dict or a `DictConfig`.
        overrides: `key=value`, as on the command line.
        model: a model in memory, trained in place of `actor.model.model_path` (one rank).
        tokenizer: a tokenizer in memory.
        train_data: a list of rows or a `datasets.Dataset`.
        eval_data: likewise, or a dict of named ones.

    Raises:
        ShardtuneError: what the user can mend, before anything is written where it can be known by then.
        Interrupted: stopped by a signal, after saving; calling again continues.
    """
    objects = Objects(model, tokenizer, train_data, eval_data)
    loaded = load_recipe(recipe, overrides, in_memory=objects.keys())
    import_plugins(loaded.plugins)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _train_rank(loaded, objects)
    display = Display()
    plan = plan_run(loaded)
    check_unlocked(plan.run_dir)
    if plan.finished:
        display.say(f"{plan.run_dir} is finished; its result is {plan.run_dir / FINAL}")
        return Run(plan.run_dir)
    if loaded.runner.nproc_per_node > 1:
        return _launch(loaded, plan, objects, display)
    return _train_rank(loaded, objects)


def _launch(recipe: Recipe, plan: RunPlan, objects: Objects, display: Display) -> Run:
    """Check everything that can be checked here, tokenise, then start the ranks."""
    if objects != NOTHING:
        raise ConfigError(
            "objects in memory train on one rank",
            where=f"runner.nproc_per_node = {recipe.runner.nproc_per_node}",
            remedy="save them and name them in the recipe, or set runner.nproc_per_node: 1",
        )
    free_port(recipe.runner.master_port)
    choose_device(recipe.runner.device, recipe.runner.nproc_per_node - 1)
    worker = SFTWorker(recipe, say=display.say)
    worker.check()
    if plan.resume_from is not None:
        check_same_data(plan.run_dir, worker.prepared.files(), recipe.runner.allow_changes)
    del worker
    with tempfile.TemporaryDirectory(prefix="shardtune-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe.to_yaml())
        run_ranks(["train", str(file)], recipe.runner.nproc_per_node, master_port=recipe.runner.master_port)
    return Run(plan.run_dir)


@contextmanager
def listening(stop: StopSignal) -> Iterator[None]:
    """Let SIGTERM and SIGINT ask for a stop for a while; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop.listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train_rank(recipe: Recipe, objects: Objects) -> Run:
    """One rank of training (or all of it, on one rank)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end_with_parent()
    main = os.environ.get("RANK", "0") == "0"
    display = Display() if main else None
    plan = plan_run(recipe) if main else None
    stop = StopSignal()
    with listening(stop):
        worker = SFTWorker(
            recipe,
            model=objects.model,
            tokenizer=objects.tokenizer,
            train_data=objects.train_data,
            eval_data=objects.eval_data,
            say=display.say if display else _silent,
        )
        ranks = worker.ranks
        lock = None
        try:
            plan = ranks.broadcast(plan)
            assert plan is not None
            if plan.finished:
                return Run(plan.run_dir)
            if plan.resume_from is not None:
                check_same_data(plan.run_dir, worker.prepared.files(), recipe.runner.allow_changes)
            runner = SFTRunner(
                recipe, worker, run_dir=plan.run_dir, observer=display, stop=stop, resume_from=plan.resume_from
            )
            runner.prepare()
            lock = _begin(recipe, objects, plan, worker)
            worker.samples_dir = plan.run_dir / "samples"
            runner.on_start = lambda: _show_start(display, plan, worker)
            runner.run()
            _finish(recipe, objects, plan.run_dir, worker, display)
        finally:
            if lock is not None:
                lock.release()
            leave_ranks(ranks)
    return Run(plan.run_dir)


def _silent(text: str) -> None:
    """What ranks other than the first say."""


def _begin(recipe: Recipe, objects: Objects, plan: RunPlan, worker: SFTWorker) -> RunLock | None:
    """Make the run directory and hold it; only rank 0 does, and all ranks hear of its failure."""
    ranks = worker.ranks
    lock, failure = RunLock(plan.run_dir), None
    if ranks.is_main:
        try:
            if plan.move_aside:
                begin_run(plan, recipe, _manifest(recipe, objects, worker))
            lock.acquire()
            if not plan.move_aside:
                begin_run(plan, recipe, _manifest(recipe, objects, worker))
        except Exception as error:
            failure = error
    failure = ranks.broadcast(failure)
    if failure is not None:
        raise failure
    return lock if ranks.is_main else None


def _manifest(recipe: Recipe, objects: Objects, worker: SFTWorker) -> dict[str, Any]:
    precision = recipe.actor.model.precision
    return {
        "versions": environment(),
        "data": worker.prepared.describe(),
        "in_memory": objects.keys(),
        "dtypes": {
            "weights": _name(MASTER_DTYPE[precision]),
            "compute": _name(COMPUTE_DTYPE[precision]),
            "optimizer": _name(MASTER_DTYPE[precision]),
        },
        "world_size": worker.ranks.world_size,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show_start(display: Display | None, plan: RunPlan, worker: SFTWorker) -> None:
    """The first screen, and the trainable parameters into the manifest."""
    if display is None:
        return
    for note in plan.notes:
        display.say(note)
    rows = worker.prepared.train
    assert rows is not None
    assert worker.tokenizer is not None
    display.first_screen(facts(worker), rows.row(0), worker.tokenizer, plan.run_dir)
    manifest = plan.run_dir / MANIFEST
    write_json(manifest, {**read_json(manifest), "trainable": sorted(worker.weights.trainable())})


def facts(worker: SFTWorker) -> Facts:
    """What the first screen tells of a worker that is set up."""
    precision = worker.recipe.actor.model.precision
    rows = worker.prepared.train
    assert rows is not None
    weights = worker.weights
    master, compute = _name(MASTER_DTYPE[precision]), _name(COMPUTE_DTYPE[precision])
    share = worker.loader.rows_per_epoch / len(rows)
    return Facts(
        model=type(worker.hf_model()).__name__.removeprefix("FSDP"),
        parameters=sum(p.numel() for p in weights.parameters.values()),
        trainable=sum(p.numel() for p in weights.trainable().values()),
        dtypes=f"{master} weights and optimizer, {compute} compute, {master} gradients",
        ranks=f"{worker.ranks.world_size} on {worker.device.type}",
        attention=(
            "rows end to end, each attends to itself alone (proved on two rows)"
            if worker.adapter.packs
            else "one row per forward"
        ),
        rows=worker.loader.rows_per_epoch,
        tokens=round(float(rows.lengths.sum(dtype="int64")) * share),
        targets=float(rows.term_weights["ce"].sum()) * share,
        steps_per_epoch=worker.loader.num_steps(0),
        total_steps=worker.total_steps(),
        evaluation={name: len(data) for name, data in worker.prepared.evals.items()},
        notes=worker.notes,
    )


def _finish(recipe: Recipe, objects: Objects, run_dir: Path, worker: SFTWorker, display: Display | None) -> None:
    """Write `final/`, load it afresh and evaluate it, then give it its name and say how it went."""
    ranks = worker.ranks
    temporary = ranks.broadcast(run_dir / f".{FINAL}.tmp-{uuid.uuid4().hex[:8]}")
    if display:
        display.say(f"writing {run_dir / FINAL}")
    worker.export(temporary, recipe.runner.final_dtype)
    ranks.barrier()
    last, step = CheckpointStore(run_dir / "checkpoints").latest(), worker.step
    prepared = worker.prepared
    worker.release()
    gc.collect()
    scores: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    if prepared.evals:
        fresh = SFTWorker(_from_directory(recipe, temporary), prepared=prepared, training=False, say=_silent)
        fresh.setup_evaluation()
        scores, samples = fresh.run_eval(), fresh.samples
        fresh.release()
    if ranks.is_main:
        write_json(temporary / "metrics.json", {"step": step, **scores})
        if last is not None:
            _keep_training_state(last, temporary / "training_state")
        publish(temporary, run_dir / FINAL)
        if not (run_dir / "FINAL").exists():
            (run_dir / "FINAL").symlink_to(FINAL)
        finish_run(run_dir, {"step": step, "metrics": scores})
    ranks.barrier()
    if display:
        first = next((line for line in read_metrics(run_dir) if line["step"] == 0), {})
        before = {key: value for key, value in first.items() if key.startswith("eval/")}
        chosen = [sample for sample in samples if sample["correct"] is not True][:1] + samples
        display.summary(run_dir, before, scores, chosen[:SHOWN_SAMPLES])


def _from_directory(recipe: Recipe, directory: Path) -> Recipe:
    """The same recipe, over the weights and tokenizer of another directory."""
    values = recipe.to_dict()
    values["actor"]["model"] |= {"model_path": str(directory), "from_scratch": False, "config_overrides": {}}
    values["actor"]["tokenizer"]["tokenizer_model"] = None
    values["data"]["chat_template"] = None
    return load_recipe(values, in_memory=["data.train_data_paths", "data.eval_data_paths"], files_must_exist=False)


def _keep_training_state(checkpoint: Path, target: Path) -> None:
    """Optimizer and schedule of the last checkpoint, sharing its bytes where the file system can."""
    target.mkdir()
    for file in [*(checkpoint / "optimizer").glob("*"), checkpoint / "worker.json"]:
        place = target / file.relative_to(checkpoint)
        place.parent.mkdir(exist_ok=True)
        try:
            os.link(file, place)
        except OSError:
            shutil.copy2(file, place)


class Run:
    """A run directory, finished or not: its metrics, and the model it holds."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric; of the evaluation ones, those of `final/` where it is there."""
        latest: dict[str, float] = {}
        for line in read_metrics(self.dir):
            latest |= line
        final = self.dir / FINAL / "metrics.json"
        return {**latest, **(read_json(final) if final.exists() else {})}

    @property
    def recipe(self) -> Recipe:
        return load_config(self.dir)

    def worker(self, checkpoint: str = "final", *overrides: str, eval_data: Any = None) -> SFTWorker:
        """The model of a checkpoint, ready to evaluate and to answer.

        Args:
            checkpoint: final, latest, best, a step, or a path.
            overrides: `key=value` over the run's recipe.
            eval_data: rows in memory instead of the recipe's evaluation sets.
        """
        recipe = self.recipe
        if overrides:
            recipe = load_recipe(recipe.to_dict(), overrides, in_memory=EVERYTHING, files_must_exist=False)
        import_plugins(recipe.plugins)
        path = self.dir / FINAL if checkpoint == "final" else None
        if path is None:
            weights = CheckpointStore(self.dir / "checkpoints").resolve(checkpoint)
            worker = SFTWorker(recipe, eval_data=eval_data, training=False, say=_silent)
            worker.setup_evaluation(weights)
            return worker
        if not path.is_dir():
            raise CheckpointError(
                f"{self.dir} has no {FINAL}/ yet",
                where="--checkpoint final",
                remedy="finish the run, or take a checkpoint of it: --checkpoint latest",
            )
        worker = SFTWorker(_from_directory(recipe, path), eval_data=eval_data, training=False, say=_silent)
        worker.setup_evaluation()
        return worker

    def evaluate(self, checkpoint: str = "final", *overrides: str, eval_data: Any = None) -> dict[str, float]:
        """The evaluation metrics of a checkpoint, measured now."""
        worker = self.worker(checkpoint, *overrides, eval_data=eval_data)
        if not worker.eval_loaders:
            raise _nothing_to_evaluate()
        return worker.run_eval()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        checkpoint: str = "final",
        system: str | None = None,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Answers to prompts (texts of a user's turn, or whole conversations), one each."""
        worker = self.worker(checkpoint, *NO_EVALUATION)
        conversations = [
            _conversation(prompt, system) for prompt in ([prompts] if isinstance(prompts, str) else prompts)
        ]
        encoder = worker.prepared.encoder
        return worker.generator().answers(
            [encoder.prompt(messages) for messages in conversations], sampling or Sampling()
        )

    def export(self, to: str | Path, *, checkpoint: str = "final", dtype: str = "auto", check: bool = True) -> Path:
        """Write a checkpoint as a Hugging Face directory, then load it in a fresh process and compare its logits.

        Raises:
            CheckpointError: the directory is not empty, or the reloaded model gives other logits.
        """
        target = Path(to).expanduser().absolute()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            what = "is not empty" if target.is_dir() else "is a file"
            raise CheckpointError(f"{target} {what}", where="--to", remedy="name a directory that is not there yet")
        check_writable(target, "--to")
        worker = self.worker(checkpoint, *NO_EVALUATION)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")
        try:
            worker.export(temporary, dtype)
            if check:
                check_reload(worker.hf_model(), temporary)
            if target.exists():
                target.rmdir()
            publish(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target


def evaluate(target: str | Path, *overrides: str, checkpoint: str = "final") -> dict[str, float]:
    """Evaluate a run directory, or the model that a recipe names; on all ranks that the recipe asks for.

    Args:
        target: a run directory or a recipe.
        overrides: `key=value` over the recipe.
        checkpoint: of a run: final, latest, best, a step, or a path.
    """
    is_run = Path(target).is_dir()
    recipe = load_run(target).recipe if is_run else load_recipe(target, overrides, in_memory=EVERYTHING[1:2])
    if is_run and overrides:
        recipe = load_recipe(recipe.to_dict(), overrides, in_memory=EVERYTHING, files_must_exist=False)
    if recipe.runner.nproc_per_node > 1 and "RANK" not in os.environ:
        arguments = ["eval", str(target), *overrides, "--checkpoint", checkpoint]
        run_ranks(arguments, recipe.runner.nproc_per_node, master_port=recipe.runner.master_port)
        return {}
    if "RANK" in os.environ:
        end_with_parent()
    if is_run:
        worker = load_run(target).worker(checkpoint, *overrides)
    else:
        import_plugins(recipe.plugins)
        worker = SFTWorker(recipe, training=False, say=Display().say)
        worker.setup_evaluation()
    try:
        if not worker.eval_loaders:
            raise _nothing_to_evaluate()
        return worker.run_eval()
    finally:
        leave_ranks(worker.ranks)


def _nothing_to_evaluate() -> ConfigError:
    return ConfigError(
        "there is nothing to evaluate on: data.eval_data_paths is null",
        where="data.eval_data_paths",
        remedy="set data.eval_data_paths or data.eval_split",
    )


EVERYTHING = ("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths")
NO_EVALUATION = ("data.eval_data_paths=null", "data.eval_split=0", "eval.generate=false", *(
    "runner.eval_before_training=false", "runner.val_check_interval=-1", "runner.early_stop.enabled=false",
    "runner.best.monitor=null",
))  # fmt: skip


def _conversation(prompt: str | Sequence[Mapping[str, Any]], system: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def load_run(directory: str | Path) -> Run:
    """The run in a directory that `shardtune train` made."""
    run_dir = Path(directory).expanduser().absolute()
    if run_dir.name in (FINAL, "FINAL") and (run_dir.parent / MANIFEST).exists():
        run_dir = run_dir.parent
    load_config(run_dir)
    return Run(run_dir)
