"""The recipe as types: every key, its default, what it may hold and what it means.

The descriptions are the configuration reference: `python -m shardtune.config.reference` prints them as a page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from shardtune.config.values import (
    Allowed,
    AnswerPattern,
    Checkpointing,
    Count,
    CountOrUnlimited,
    Distinct,
    EnvironmentName,
    FunctionInFile,
    ImageSize,
    Interval,
    LoraInit,
    Match,
    NameOrNames,
    NamePattern,
    Names,
    Number,
    Reduce,
    RunName,
    StepWindow,
    Text,
    Worker,
    one_or_more,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig


def key(default: Any, description: str, **bounds: Any) -> Any:
    """One recipe key: its default, the sentence that explains it, and bounds such as `ge=1`."""
    return Field(default, description=description, **bounds)


def section(kind: type[BaseModel], description: str) -> Any:
    """A group of keys, all at their defaults unless given."""
    return Field(default_factory=kind, description=description)


def mapping(description: str) -> Any:
    """A free mapping, empty unless given."""
    return Field(default_factory=dict, description=description)


def sequence(description: str, *default: str) -> Any:
    """A list, with these entries unless given."""
    return Field(default_factory=lambda: list(default), description=description)


class Section(BaseModel):
    """A group of recipe keys: immutable, unknown keys refused, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class EarlyStopConfig(Section):
    enabled: bool = key(False, "End the run once `monitor` has stopped improving.")
    monitor: Text = key("eval/loss", "The metric that is watched; it has to be one that this run emits.")
    mode: Literal["auto", "min", "max"] = key(
        "auto", "Whether smaller or larger is better; auto: max for accuracies and successes, otherwise min."
    )
    patience: Count = key(5, "How many evaluations in a row may bring no improvement before the run ends.")
    min_delta: Number = key(0.0, "How much `monitor` must change to count as an improvement.", ge=0)


class BestConfig(Section):
    monitor: Text | None = key(
        None, "The metric whose best checkpoint is kept in `checkpoints/best`, e.g. eval/eval_accuracy; null: none is."
    )
    mode: Literal["auto", "min", "max"] = key(
        "auto", "Whether smaller or larger is better; auto: max for accuracies and successes, otherwise min."
    )


class LoggerConfig(Section):
    log_path: Text = key("runs", "The directory that holds the run directories; relative to the working directory.")
    project_name: Text = key("shardtune", "The project under which Weights & Biases files the run.")
    experiment_name: RunName | None = key(
        None, "The run directory's name below `log_path`; null: the recipe file's name without its suffix."
    )
    logger_backends: Annotated[list[Literal["jsonl", "tensorboard", "wandb"]], Distinct] = sequence(
        "Where metrics are written; wandb needs the extra of that name.", "jsonl", "tensorboard"
    )
    log_interval: Count = key(1, "A line of metrics every so many optimizer steps.")


class RayConfig(Section):
    address: Text | None = key(
        None,
        "The cluster: null: one on this machine alone, started for the run and ended with it; auto: the one that runs "
        "here; otherwise host:port of its head.",
    )
    cpus_per_worker: Count = key(1, "Cores that Ray sets aside for each worker.")
    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = key(
        None, "GPUs of each worker; null: 1 where the cluster has any and `runner.device` is not cpu."
    )
    resources: dict[str, Any] = mapping("What else each worker takes, by the cluster's names, e.g. {a100: 1}.")
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = key(
        "pack", "Workers on as few hosts as possible, or on as many; strict: on one host, or each on its own."
    )
    wait_seconds: Count = key(60, "How long is waited until the cluster has room for the workers.")


class RunnerConfig(Section):
    task_type: Literal["sft"] = key("sft", "The kind of training: supervised fine-tuning.")
    max_epochs: CountOrUnlimited = key(
        1, "How often the training rows are gone through; with `max_steps`, whichever comes first; -1: no limit."
    )
    max_steps: CountOrUnlimited = key(-1, "Optimizer steps after which training ends; -1: no limit.")
    val_check_interval: Interval = key(
        -1, 'Optimizer steps between evaluations, or "epoch"; -1: only at the end, where evaluation data is given.'
    )
    save_interval: Interval = key(
        -1, 'Optimizer steps between checkpoints, or "epoch"; -1: only at the end; a final model is saved in any case.'
    )
    eval_before_training: bool = key(False, "Evaluate once before the first step, logged as step 0.")
    resume_dir: Text | None = key(
        "auto",
        "auto: go on with this run's own latest checkpoint if there is one; a checkpoint or run directory: go on from "
        "there; null: start afresh.",
    )
    allow_changes: list[Text] = sequence(
        "Keys that may differ from those of the run that is continued, e.g. [actor.optim.lr]."
    )
    overwrite: bool = key(False, "Move an older run in the same directory aside and start afresh.")
    keep_last: Count = key(3, "How many of the newest checkpoints are kept; the best one is kept besides.")
    keep_every: Count | None = key(None, "Checkpoints at multiples of so many steps are kept for good; null: none is.")
    async_save: bool = key(False, "Write checkpoints in the background while training goes on.")
    final_dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "The dtype of the weights in `final/`; auto: that of the base model's files."
    )
    seed: int = key(42, "The seed from which order, dropout and fresh weights are derived.", ge=0, lt=2**63)
    profile_steps: StepWindow = sequence("First and last optimizer step that torch's profiler records, e.g. [10, 12].")
    deterministic: bool = key(
        False, "Bitwise repeatable on CUDA too, through slower kernels; on a CPU runs are repeatable in any case."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where the model is; auto: CUDA where there is one.")
    nproc_per_node: Count = key(1, "Ranks (processes) started on this machine; under torchrun its own count holds.")
    num_workers: Count | None = key(None, "Ranks that Ray starts; required with `launcher: ray`.")
    launcher: Literal["local", "ray"] = key(
        "local", "Who starts the ranks; torchrun and accelerate launch are detected and need no key."
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = key(
        None, "The TCP port on which the ranks meet; null: a free one."
    )
    max_restarts: int = key(
        0,
        "How often the ranks are started again from the last checkpoint after one of them was lost (killed, or its "
        "host gone); under torchrun its own `--max-restarts` holds.",
        ge=0,
    )
    min_workers: Count | None = key(
        None, "With `max_restarts`: the fewest ranks to go on with; null: as many as at first, a lost one is replaced."
    )
    lost_after: Count = key(
        60, "Ranks on several hosts: a host of which nothing was heard for so many seconds counts as lost."
    )
    callbacks: Annotated[list[FunctionInFile], Distinct] = sequence(
        "Classes of yours that are told how the run goes and may ask it to stop, save or evaluate: [file.py:Class]."
    )
    early_stop: EarlyStopConfig = section(EarlyStopConfig, "When to end before the last step.")
    best: BestConfig = section(BestConfig, "Which checkpoint counts as the best.")
    logger: LoggerConfig = section(LoggerConfig, "Where the run is written and what is logged.")
    ray: RayConfig = section(RayConfig, "The workers that Ray starts, with `launcher: ray`.")

    @property
    def workers(self) -> int:
        """Ranks that a launcher of ours starts."""
        return (self.num_workers or 1) if self.launcher == "ray" else self.nproc_per_node


class LoraConfig(Section):
    r: Count = key(16, "The rank of the adapter matrices.")
    alpha: Number = key(32.0, "The adapter's scale: its output is multiplied by alpha / r.", gt=0)
    dropout: Number = key(0.0, "The share of the adapter's inputs that are dropped in training.", ge=0, lt=1)
    target_modules: NameOrNames = key(
        "all-linear",
        "The modules that get an adapter: all-linear (the head excepted), or a list of name endings; [] with "
        "`target_parameters` alone.",
    )
    target_parameters: list[Text] = sequence(
        "Parameters of two or three dimensions that get an adapter though no layer of their own has them, by name "
        "endings: experts that are stacked in one tensor."
    )
    use_rslora: bool = key(False, "Scale by alpha / sqrt(r) instead of alpha / r.")
    use_dora: bool = key(False, "Learn each column's magnitude apart from its direction (DoRA).")
    init: LoraInit = key(
        True,
        "How a fresh adapter begins, by PEFT's names: true (A random, B zero), gaussian, orthogonal, pissa, "
        "pissa_niter_16, olora, mica; false: random, for tests.",
    )
    modules_to_save: list[Text] = sequence(
        "Modules, by name endings, that are trained in full and saved with the adapter."
    )
    adapter_path: Text | None = key(
        None,
        "The directory of an adapter to start from, whose rank, scale and modules hold; null: a fresh one.",
    )
    base_dtype: Literal["auto", "bf16", "nf4"] = key(
        "auto",
        "How the frozen weights are kept: auto: in the dtype of the trained ones; bf16: half of that; nf4: the linear "
        "layers in four bits (QLoRA).",
    )


class ModelConfig(Section):
    model_type: Text = key(
        "causal_lm", "causal_lm, vision_language, vision_language_action, or the name of a registered model."
    )
    model_path: Text | None = key(
        None,
        "The base model: a directory as `from_pretrained` reads it, or a Hub name; required unless the model is "
        "handed over as an object.",
    )
    from_scratch: bool = key(
        False, "Take only the configuration and tokenizer from `model_path` and draw the weights from the seed."
    )
    config_overrides: dict[str, Any] = mapping(
        "Values that replace those of the model's own configuration, e.g. {attention_dropout: 0.1}."
    )
    adapter: FunctionInFile | None = key(
        None, "A class in a file of yours that describes the model, file.py:Class; null: the one of `model_type`."
    )
    options: dict[str, Any] = mapping("Your worker's or adapter's own keys, checked by its Options class.")
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = key(
        "bf16", "The dtype of the computation; bf16 and fp16 keep weights and optimizer in fp32; fp64 is for proofs."
    )
    attn_implementation: Text = key(
        "auto", "How attention is computed; auto: the exact way that is fastest here; otherwise a name of transformers."
    )
    trust_remote_code: bool = key(False, "Run Python code that comes with the model; it may do anything.")
    gradient_checkpointing: Checkpointing = key(
        False,
        "Compute activations a second time in the backward pass instead of keeping them: less memory, slower; "
        "selective: keep the results of matrix products and attention, and compute only the rest again.",
    )
    compile: bool = key(False, "Compile the model with torch.compile.")
    freeze: list[NamePattern] = sequence(
        "Parameters that are not trained: regular expressions, searched for in the parameters' names; or parts: "
        "vision_tower, projector, language_model."
    )
    low_cpu_mem_usage: bool = key(
        True,
        "For a registered function to pass on; built-in model types are always built without memory and read in parts.",
    )
    micro_batch_size: Count | None = key(
        None, "`actor.micro_batch_size`, where other systems write it; null: it is given there."
    )
    val_micro_batch_size: Count | None = key(
        None, "`actor.eval_micro_batch_size`, where other systems write it; null: it is given there."
    )
    vocab_size: Count | None = key(
        None, "What the text vocabulary has to have, padding of the embedding aside; null: whatever the model has."
    )
    hidden_size: Count | None = key(None, "What the text model's width has to be; null: whatever the model has.")
    image_size: ImageSize | None = key(
        None,
        "[height, width] that images have to be given to the model in; null: whatever its processor makes of them.",
    )
    action_token_len: Count | None = key(
        None, "Dimensions of an action, one token each; null: those of the statistics."
    )
    action_chunks_len: Count = key(1, "Actions that are predicted at once.")
    unnorm_key: Text | None = key(
        None, "The data set whose statistics make numbers of an action's tokens; null: the only one there is."
    )
    num_action_bins: int = key(256, "Tokens that stand for the values of an action.", ge=2)
    action_tokens: Literal["auto", "appended", "last"] = key(
        "auto",
        "Which tokens they are: appended: new ones, <act_0>, <act_1>, …; last: the last ordinary ones; auto: as the "
        "model has it, last for one that has none yet.",
    )
    action_prompt: Text | None = key(
        None,
        "The text before an action, with {instruction}; null: as the model has it, or else the chat template of its "
        "processor, or else OpenVLA's.",
    )
    action_state: Literal["none", "text"] | None = key(
        None,
        "text: the state's values stand in the prompt as numbers of bins; none: they are left out; null: as the model "
        "has it, none for one that has nothing yet.",
    )
    action_statistics: Text | None = key(
        None,
        "The statistics by which actions are normalised, a dataset_statistics.json; null: those beside the weights, or "
        "else those of the training rows.",
    )
    is_lora: bool = key(False, "Train a low-rank adapter instead of the model's own weights.")
    lora: LoraConfig = section(LoraConfig, "The low-rank adapter.")


class TokenizerConfig(Section):
    tokenizer_model: Text | None = key(
        None, "The tokenizer: a directory or a Hub name; null: the one that comes with `actor.model.model_path`."
    )
    new_tokens: Annotated[list[Text], Distinct] = sequence(
        "Tokens to add. Their embeddings are trained, with an adapter too; a model with too few rows gets more, each "
        "at first the mean of the others."
    )


class ParameterGroup(Section):
    pattern: NamePattern = Field(
        description="A regular expression, searched for in the parameters' names; or a part: vision_tower, projector, "
        "language_model."
    )
    lr: Number | None = key(None, "The group's peak learning rate; null: `actor.optim.lr`.", ge=0)
    weight_decay: Number | None = key(None, "The group's weight decay; null: `actor.optim.weight_decay`.", ge=0)


class OptimConfig(Section):
    name: Text = key("AdamW", "The optimizer: the name of a class in torch.optim.")
    lr: Number = key(1.0e-5, "The peak learning rate.", gt=0)
    adam_beta1: Number = key(0.9, "Decay per step of Adam's mean of gradients.", ge=0, lt=1)
    adam_beta2: Number = key(0.999, "Decay per step of Adam's mean of squared gradients.", ge=0, lt=1)
    adam_eps: Number = key(1.0e-8, "Added to Adam's denominator.", gt=0)
    weight_decay: Number = key(0.01, "Decoupled weight decay; norms and biases are exempt.", ge=0)
    args: dict[str, Any] = mapping("Further arguments of the optimizer's class, e.g. {momentum: 0.9}.")
    state_dtype: Literal["fp32", "bf16", "int8"] = key(
        "fp32",
        "How the moments of AdamW, Adam and SGD are kept: fp32: as torch does; bf16 (rounded at random) or int8 (in "
        "blocks of 256 with a scale each): half or a quarter of that memory, for some noise.",
    )
    groups: list[ParameterGroup] = sequence(
        "Parameters with their own rate or decay, e.g. [{pattern: embed_tokens, lr: 1e-6}]; the last match counts."
    )
    clip_grad: Annotated[Number, Field(gt=0)] | None = key(
        1.0, "The gradient's largest global norm, over all ranks and parameters; null: no clipping."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "How the rate falls after the warm-up; wsd: constant, then linear over the last `decay_ratio`."
    )
    lr_warmup_steps: int = key(0, "Optimizer steps over which the rate rises from 0 to `lr`.", ge=0)
    lr_warmup_steps_ratio: Number = key(0.0, "The same as a share of all steps.", ge=0, le=1)
    decay_ratio: Number = key(0.1, "wsd: the share of all steps in which the rate falls.", gt=0, le=1)
    min_lr: Number = key(0.0, "The rate at the last step, and after it.", ge=0)


class ParallelConfig(Section):
    data_replicate: Count = key(1, "Copies of the sharded model (HSDP).")
    data_shard: CountOrUnlimited = key(-1, "Ranks among which each copy is sharded; -1: all that are left.")
    tensor: Count = key(1, "Ranks that share each matrix multiplication.")
    sequence: Count = key(1, "Ranks that share each sequence.")
    expert: Count = key(1, "Ranks among which a layer's experts are spread.")


class FsdpConfig(Section):
    cpu_offload: bool = key(False, "Keep weights, gradients and optimizer states in host memory.")
    reshard_after_forward: bool = key(
        True, "Free a unit's gathered weights after its forward pass and gather them again in the backward pass."
    )
    prefetch: Count = key(
        1,
        "How many units ahead weights are gathered, in the forward and in the backward pass; 1: as FSDP2 does by "
        "itself; each further one holds the weights of one unit more.",
    )
    reduce: Annotated[Literal["last", "every"], Reduce] = key(
        "last", "Reduce gradients over ranks after the last micro-batch of a step, or after every one (less memory)."
    )
    wrap: Names | None = key(None, "Class names of the modules that shard as a unit; null: as the model declares.")


class ActorConfig(Section):
    training_backend: Literal["fsdp", "fsdp1", "ddp"] = key(
        "fsdp",
        "How the model is spread over ranks: fsdp is FSDP2, ddp keeps all of it on each, fsdp1 is torch's "
        "FullyShardedDataParallel, with the same numbers and checkpoints.",
    )
    micro_batch_size: Count | None = key(
        2, "Rows of one forward at most; null: only `max_tokens_per_micro_batch`, which is then required."
    )
    max_tokens_per_micro_batch: Count | None = key(
        None, "Tokens of one forward at most; null: no limit; where both limits are given, both hold."
    )
    eval_micro_batch_size: Count | None = key(None, "Rows of one forward in evaluation at most; null: as in training.")
    global_batch_size: Count | None = key(
        32, "Rows of one optimizer step, exactly, over all ranks; the last step of an epoch takes what is left."
    )
    global_batch_tokens: Count | None = key(
        None, "Input tokens of one optimizer step at most, over all ranks; replaces `global_batch_size`."
    )
    loss: FunctionInFile | None = key(
        None,
        "A loss per target, file.py:function: (outputs [n, …], targets [n]) -> losses [n], in place of the model's own "
        "one; null: cross-entropy for language models, otherwise the adapter's; `eval/loss` stays the model's own.",
    )
    label_smoothing: Number = key(
        0.0,
        "The share of each target's probability that the training loss spreads over the whole vocabulary; `eval/loss` "
        "stays plain.",
        ge=0,
        lt=1,
    )
    z_loss: Number = key(
        0.0,
        "Factor on the square of the softmax's log-normaliser, added to the training loss of each target; `eval/loss` "
        "stays plain.",
        ge=0,
    )
    worker: Worker | None = key(
        None,
        "What the task is: a class of yours, file.py:Class, or sft_trainer (HALOs' SFTTrainer: padded batches, "
        "`get_batch_metrics`); null: the one of `model.model_type`.",
    )
    model: ModelConfig = section(ModelConfig, "The model.")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "The tokenizer.")
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning rate.")
    parallel: ParallelConfig = section(ParallelConfig, "How ranks are laid out.")
    fsdp_config: FsdpConfig = section(FsdpConfig, "How the model is sharded.")

    @property
    def added_tokens(self) -> list[str]:
        """Tokens that the tokenizer gets besides its own."""
        model = self.model
        appended = model.model_type == "vision_language_action" and model.action_tokens == "appended"
        return [*self.tokenizer.new_tokens, *(action_tokens(model.num_action_bins) if appended else ())]


def action_tokens(count: int) -> list[str]:
    """The tokens of an action's values that a vocabulary is given."""
    return [f"<act_{number}>" for number in range(count)]


class DataEntry(Section):
    """One source among several in `data.train_data_paths` or `data.eval_data_paths`."""

    path: Text = Field(description="A file, glob, directory or Hub name.")
    name: Text | None = key(
        None, "The source's name in logs and counts; for a Hub data set also its configuration; null: from the path."
    )
    weight: Number = key(1.0, "An epoch holds round(weight x rows) of this source.", gt=0)
    max_samples: Count | None = key(None, "Only the first so many rows; null: all of them.")
    columns: dict[str, str] = mapping("As `data.columns`, for this source; its entries go before those.")
    format: Literal["messages", "sharegpt", "instruction", "prompt_completion", "question_answer", "text"] | None = key(
        None, "The row format; null: recognised row by row."
    )
    split: Text | None = key(
        None, "The split of a Hub data set; null: train for training rows, validation or test for evaluation rows."
    )


SOURCES = "a path or Hub name, an entry {path, name, weight, …}, or a list of these"
Sources = Annotated[str | DataEntry | list[str | DataEntry], one_or_more(DataEntry, named=False), Allowed(SOURCES)]
NamedSources = Annotated[
    str | DataEntry | list[str | DataEntry] | dict[str, str | DataEntry | list[str | DataEntry]],
    one_or_more(DataEntry, named=True),
    Allowed(f"{SOURCES}, or a mapping of set name to any of these"),
]


class DataConfig(Section):
    train_data_paths: Sources | None = key(
        None,
        "The training rows: files, globs, directories and Hub names, or entries {path, name, weight, max_samples, "
        "columns, format, split}; required unless rows are handed over as objects.",
    )
    eval_data_paths: NamedSources | None = key(
        None, "The evaluation rows, likewise, or named sets {math: a.jsonl, chat: b.jsonl} -> eval/math/loss, …"
    )
    eval_split: Number = key(
        0.0, "The share of the training rows that is held out for evaluation, chosen by row hash.", ge=0, lt=1
    )
    columns: dict[str, str] = mapping(
        "Your names for the columns a row format expects, e.g. {question: problem, answer: solution}."
    )
    transform: FunctionInFile | None = key(None, "A function row -> row, applied to every row before it is encoded.")
    chat_template: Text | None = key(
        None, "null: the tokenizer's own; chatml: the built-in ChatML template; otherwise a Jinja file."
    )
    system_prompt: Text | None = key(None, "The system turn of conversations that have none; null: none is added.")
    train_on: Literal["assistant", "last_assistant", "all"] = key(
        "assistant", "Which turns are targets: all of the assistant's, its last one, or every token."
    )
    max_length: int = key(2048, "Tokens of one row at most.", ge=2)
    on_too_long: Literal["truncate", "drop", "fail"] = key(
        "truncate", "What happens to rows longer than `max_length`; truncated and dropped rows are counted."
    )
    on_bad_row: Literal["fail", "skip"] = key(
        "fail", "What happens to rows that cannot be used; skipped ones are counted and reported with file and row."
    )
    max_bad_rows: int = key(100, "With `on_bad_row: skip`, how many rows may be skipped before the run fails.", ge=0)
    shuffle: bool = key(True, "Go through the rows in an order drawn from seed and epoch; false: as they are stored.")
    num_workers: int = key(2, "Processes that build the cache and decode rows; 0: none besides the main one.", ge=0)
    keep_pixels: bool = key(
        False,
        "Keep the resized pixels of each image (bytes) in the cache the first time it is read: later epochs and runs "
        "do not decode. Takes about width x height x 3 bytes of what the processor makes of an image.",
    )
    cache_dir: Text | None = key(None, "Where tokenised rows are kept; null: the user's cache directory.")


class EvalConfig(Section):
    generate: bool = key(
        False, "Let the model answer the evaluation rows and count correct answers: eval/eval_accuracy."
    )
    max_new_tokens: Count = key(256, "Tokens of one generated answer at most.")
    temperature: Number = key(0.0, "How random the answers are drawn; 0: always the likeliest token.", ge=0)
    answer_pattern: AnswerPattern | None = key(
        None, "Where in a text the answer is: group 1 of this regular expression; null: the whole text."
    )
    match: Match = key(
        "exact", "When an answer counts as correct: exact (same text), numeric (same number), or file.py:function."
    )
    num_samples: Count | None = key(None, "How many evaluation rows are answered; null: all of them.")
    metrics: Annotated[list[FunctionInFile], Distinct] = sequence(
        "Metrics of yours, [file.py:function]: (outputs [n, …], targets [n], weights [n]) -> (sum, weight), called on "
        "the predictions piece by piece and reported as eval/<function>."
    )
    environment: EnvironmentName | None = key(
        None,
        "The simulator in which an action model plays episodes, reported as eval/success: reach, point2d, or "
        "file.py:Class; null: none.",
    )
    environment_options: dict[str, Any] = mapping("Arguments of the environment's class, e.g. {max_steps: 60}.")
    episodes: Count = key(50, "How many episodes are played in each evaluation, always the same ones.")
    episode_seed: int = key(0, "The number from which the seed of each episode follows.", ge=0, lt=2**63)
    episodes_at_once: Count = key(
        16, "Episodes that a rank plays side by side, with one environment each; the policy is asked about all of them."
    )
    action_steps: Count | None = key(
        None, "How many actions of a predicted chunk are taken before the next one is predicted; null: all of them."
    )
    videos: int = key(4, "The first so many episodes are kept as videos in `samples/`.", ge=0)
    video_format: Literal["gif", "mp4"] = key("gif", "How videos are written; mp4 needs the extra of the name video.")


class Recipe(Section):
    """A validated recipe: defaults filled in, interpolation resolved, paths absolute."""

    plugins: list[Text] = sequence("Files or modules of yours, imported in every process before anything else.")
    runner: RunnerConfig = section(RunnerConfig, "The run: how long, how often, where to.")
    actor: ActorConfig = section(ActorConfig, "The model and how it is trained.")
    data: DataConfig = section(DataConfig, "The rows and how they become tokens.")
    eval: EvalConfig = section(EvalConfig, "Evaluation by generated answers, and by episodes in a simulator.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal when every key is: where the values were written does not matter."""
        return isinstance(other, Recipe) and self.to_dict() == other.to_dict()

    def where(self, dotted: str) -> str | None:
        """Where a key was given (`recipe.yaml:12` or the override's text); None for a default."""
        return self._origins.get(dotted)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, lists and scalars, every key present."""
        return self.model_dump(mode="python")

    def as_dict_config(self) -> DictConfig:
        """The same values as an OmegaConf config; reading it never interpolates anything."""
        from omegaconf import DictConfig

        return DictConfig(escape_interpolation(self.to_dict()))

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that loads back to an equal one."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(self.as_dict_config())


def escape_interpolation(value: Any) -> Any:
    """Write `${` so that OmegaConf takes it for text: a backslash before it, those that stand there doubled."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {name: escape_interpolation(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolation(item) for item in value]
    return value
