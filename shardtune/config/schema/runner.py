"""`runner`: how long a run is, what it saves, where it writes, and how its ranks are started."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shardtune.config.schema.section import Section, key, section
from shardtune.config.values import (
    Count,
    CountOrUnlimited,
    Distinct,
    FunctionInFile,
    HubName,
    Interval,
    LoggerName,
    Number,
    RankCount,
    RunName,
    StepWindow,
    Text,
)

Direction = Literal["auto", "min", "max"]


class EarlyStopConfig(Section):
    enabled: bool = key(False, "End the run once `monitor` has stopped improving.")
    monitor: Text = key("eval/loss", "The metric to watch; the run must log it.")
    mode: Direction = key(
        "auto",
        "Whether smaller or larger is better; auto: max for accuracies, success rates, F1, recall and the like, "
        "min for losses, errors, distances and the like; a name that shows neither is an error.",
    )
    patience: Count = key(5, "Evaluations in a row without improvement after which the run ends.")
    min_delta: Number = key(0.0, "The smallest change of `monitor` that counts as an improvement.", ge=0)


class BestConfig(Section):
    monitor: Text | None = key(
        None, "The metric that selects `checkpoints/best`, e.g. eval/eval_accuracy; null: no best checkpoint is kept."
    )
    mode: Direction = key(
        "auto",
        "Whether smaller or larger is better; auto: max for accuracies, success rates, F1, recall and the like, "
        "min for losses, errors, distances and the like; a name that shows neither is an error.",
    )


AnomalyAction = Literal["stop", "skip", "rollback"]
DEFAULT_BUDGET = 10


class SpikeConfig(Section):
    watch: Annotated[list[Literal["loss", "grad_norm"]], Distinct, Field(min_length=1)] = key(
        ["loss", "grad_norm"], "What is compared with its last values; grad_norm is that before clipping."
    )
    factor: Number = key(
        10.0,
        "A value is a spike if it is above the median by more than this many times the spread (1.4826 median absolute "
        "deviations, a standard deviation of normal values; at least 1 % of the median).",
        gt=0,
    )
    window: Count = key(50, "Over how many of the last steps that changed weights median and spread are taken.")
    warmup_steps: Count = key(20, "How many of them there have to be before anything counts as a spike.")


class PrometheusConfig(Section):
    address: Text = key(
        "127.0.0.1",
        "The address to listen on, of the host of rank 0; 0.0.0.0: all of its addresses, without a password.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = key(9464, "The TCP port.")


class LoggerConfig(Section):
    log_path: Text = key("runs", "The directory of all run directories; relative to the working directory.")
    project_name: Text = key(
        "shardtune", "The project name in Weights & Biases, trackio and SwanLab, and the experiment's in MLflow."
    )
    experiment_name: RunName | None = key(
        None, "The name of the run directory in `log_path`; null: the recipe file's name without its suffix."
    )
    logger_backends: Annotated[list[LoggerName], Distinct] = key(
        ["jsonl", "tensorboard"],
        "Where metrics are logged; wandb, mlflow, trackio, swanlab and prometheus need the extra of that name; "
        "timings: `timings.jsonl`, with wall time, host, restarts and the seconds of each part of a step; a class of "
        "yours: package.module:Class or file.py:Class.",
    )
    log_interval: Count = key(1, "Optimizer steps between two logged lines of metrics.")
    rank_logs: bool = key(
        False,
        "With several ranks on this machine: also write what each prints to `logs/rank_N.log` in the run directory.",
    )
    prometheus: PrometheusConfig = section(
        PrometheusConfig, "Where Prometheus reads the newest metrics, with prometheus in `logger_backends`."
    )


class RayConfig(Section):
    address: Text | None = key(
        None,
        "The cluster; null: a local one, started for the run and stopped after it; auto: the one that is running "
        "here; otherwise host:port of its head.",
    )
    cpus_per_rank: Count = key(1, "CPU cores that Ray reserves for each rank.")
    gpus_per_rank: Annotated[int, Field(ge=0, le=1)] | None = key(
        None, "GPUs of each rank; null: 1 if the cluster has GPUs and `runner.device` is not cpu."
    )
    resources: dict[str, Number] = key({}, "Custom resources of each rank, by the cluster's names, e.g. {a100: 1}.")
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = key(
        "pack",
        "Ranks on as few hosts as possible (pack), or on as many (spread); strict: all on one host, or each on its "
        "own.",
    )
    wait_seconds: Count = key(60, "How long to wait until the cluster has room for the ranks.")

    FORMER_NAMES: ClassVar = {"cpus_per_worker": "cpus_per_rank", "gpus_per_worker": "gpus_per_rank"}

    @property
    def cpus_per_worker(self) -> int:
        """The former name of `cpus_per_rank`."""
        return self.cpus_per_rank

    @property
    def gpus_per_worker(self) -> int | None:
        """The former name of `gpus_per_rank`."""
        return self.gpus_per_rank


class RunnerConfig(Section):
    task_type: Literal["sft"] = key("sft", "The kind of training: supervised fine-tuning.")
    max_epochs: CountOrUnlimited = key(
        1, "Passes over the training rows; with `max_steps`, whichever ends first; -1: no limit."
    )
    max_steps: CountOrUnlimited = key(-1, "Optimizer steps after which training ends; -1: no limit.")
    eval_interval: Interval = key(
        -1, 'Optimizer steps between evaluations, or "epoch"; -1: only at the end, if there is evaluation data.'
    )
    save_interval: Interval = key(
        -1, 'Optimizer steps between checkpoints, or "epoch"; -1: only at the end; a final model is always saved.'
    )
    eval_before_training: bool = key(False, "Evaluate once before the first step, logged as step 0.")
    resume_dir: Text | None = key(
        "auto",
        "auto: resume from this run's own latest checkpoint, if there is one; a checkpoint or run directory: resume "
        "from there; null: start from scratch.",
    )
    allow_changes: list[Text] = key([], "Keys that may differ from those of the resumed run, e.g. [optim.lr].")
    overwrite: bool = key(False, "Move an older run in the same directory aside and start from scratch.")
    keep_last: Count = key(3, "How many of the newest checkpoints are kept, in addition to the best one.")
    keep_every: Count | None = key(
        None, "Checkpoints at multiples of this many steps are kept permanently; null: none are."
    )
    async_save: bool = key(False, "Write checkpoints in the background while training continues.")
    final_dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = key(
        "auto",
        "The dtype of the weights in `final/`; auto: that of the base model's files, of an adapter or a module of your "
        "own that of training.",
    )
    seed: int = key(42, "The seed of the row order, of dropout and of new weights.", ge=0, lt=2**63)
    profile_steps: StepWindow = key([], "First and last optimizer step recorded by torch's profiler, e.g. [10, 12].")
    deterministic: bool = key(
        False, "Bitwise repeatable runs on CUDA too, with slower kernels; on a CPU they always are."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where the model runs; auto: CUDA if there is a GPU.")
    nproc_per_node: RankCount = key(
        1, "Ranks (processes) started on this machine; under torchrun, its own count is used."
    )
    num_ranks: RankCount | None = key(None, "Ranks that Ray starts; required with `launcher: ray`.")
    launcher: Literal["local", "ray"] = key(
        "local", "What starts the ranks; torchrun and accelerate launch are detected and need no key."
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = key(
        None, "The TCP port of the ranks' rendezvous; null: a free one."
    )
    max_restarts: int = key(
        0,
        "How often the ranks are restarted from the last checkpoint after one was lost (killed, or its host is gone); "
        "under torchrun, its own `--max-restarts` is used.",
        ge=0,
    )
    min_ranks: Count | None = key(
        None,
        "With `max_restarts`: the smallest number of ranks to continue with; null: as many as at first, lost ones are "
        "replaced.",
    )
    lost_after: Count = key(60, "On several hosts: seconds without a heartbeat after which a host counts as lost.")
    watchdog_seconds: Number | None = key(
        600,
        "Seconds without progress (a micro-batch, a batch of an evaluation) after which a run counts as stuck: it "
        "names the rank that differs, writes every rank's stack into `stuck/` of the run directory, and ends with code "
        "76; saving, generation, callbacks, the first compiled step and idleness at the start may take six times as "
        "long; 0 or null: off.",
        ge=0,
    )
    collective_timeout: Count = key(
        1800, "Seconds that a rank waits in a collective for the others, before torch ends it with an error."
    )

    def allows(self, changed: str) -> bool:
        """Whether `allow_changes` names a key, by its dotted name, or what the key is below."""
        return any(f"{changed}.".startswith(f"{name}.") for name in self.allow_changes)

    def allowing(self, *keys: str) -> str:
        """The override that allows keys beside those that are allowed already, for messages."""
        return f"runner.allow_changes=[{','.join(dict.fromkeys([*self.allow_changes, *keys]))}]"

    callbacks: Annotated[list[FunctionInFile], Distinct] = key(
        [],
        "Your classes that receive the run's events and may request a stop, a save or an evaluation: [file.py:Class].",
    )
    push_to_hub: HubName | None = key(
        None,
        "A repository on the Hugging Face Hub, owner/name, to which `final/` is pushed with a model card when the run "
        "has ended; a new one is private; null: none.",
    )
    on_nonfinite: AnomalyAction = key(
        "skip",
        "What follows a loss or gradient that is not finite, after which no weight is changed. skip: training goes on "
        "after its rows; stop: likewise, but a checkpoint is saved and the run ends, and the same command goes on; "
        "rollback: the newest checkpoint is loaded, and training goes on after the rows.",
    )
    on_spike: AnomalyAction | None = key(
        None,
        "What follows a loss or gradient norm far above the last ones (`spike`), before it changes a weight: as "
        "`on_nonfinite`; null: nothing, spikes are not looked for.",
    )
    max_anomalies: Count | None = key(
        None,
        "How many steps within `anomaly_window` may be skipped or rolled back for these reasons before the run ends; "
        "null: 10 with `on_spike: skip` or a rollback, otherwise any number. Ten in a row always end it.",
    )
    anomaly_window: Count = key(1000, "Over how many steps `max_anomalies` is counted, those left out included.")
    spike: SpikeConfig = section(SpikeConfig, "What counts as a spike, with `on_spike`.")
    early_stop: EarlyStopConfig = section(EarlyStopConfig, "When to end before the last step.")
    best: BestConfig = section(BestConfig, "Which checkpoint counts as the best.")
    logger: LoggerConfig = section(LoggerConfig, "Where the run is written and what is logged.")
    ray: RayConfig = section(RayConfig, "The ranks that Ray starts, with `launcher: ray`.")

    @property
    def workers(self) -> int:
        """Ranks that our own launchers start."""
        return (self.num_ranks or 1) if self.launcher == "ray" else self.nproc_per_node

    @property
    def anomaly_budget(self) -> int | None:
        """The anomalies within `anomaly_window` that a run survives; None: any number."""
        if self.max_anomalies is not None:
            return self.max_anomalies
        leaves_out = self.on_spike in ("skip", "rollback") or self.on_nonfinite == "rollback"
        return DEFAULT_BUDGET if leaves_out else None

    FORMER_NAMES: ClassVar = {
        "val_check_interval": "eval_interval",
        "num_workers": "num_ranks",
        "min_workers": "min_ranks",
    }

    @property
    def val_check_interval(self) -> int | str:
        """The former name of `eval_interval`."""
        return self.eval_interval

    @property
    def num_workers(self) -> int | None:
        """The former name of `num_ranks`."""
        return self.num_ranks

    @property
    def min_workers(self) -> int | None:
        """The former name of `min_ranks`."""
        return self.min_ranks
