"""`actor`: the model and how it is trained: batch sizes, loss, optimizer, and the layout of ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.schema.model import ModelConfig, TokenizerConfig, action_tokens
from shardtune.config.schema.section import Section, key, section
from shardtune.config.values import (
    Arguments,
    Count,
    CountOrUnlimited,
    LossName,
    NamePattern,
    Names,
    Number,
    RankCount,
    Reduce,
    Text,
    Worker,
)


class ParameterGroup(Section):
    pattern: NamePattern = Field(
        description="A regular expression, searched for in the parameters' names; or a part: vision_tower, projector, "
        "language_model."
    )
    lr: Number | None = key(None, "The group's peak learning rate; null: `optim.lr`.", ge=0)
    weight_decay: Number | None = key(
        None, "The group's weight decay, of vectors too; null: as `optim.weight_decay`.", ge=0
    )


class OptimConfig(Section):
    name: Text = key(
        "AdamW",
        "The optimizer: the name of a class in torch.optim, or one of your own or of another package: file.py:Class or "
        "package.module:Class, with arguments from `lr`, `weight_decay` and `args` alone. Muon is for the matrices of "
        "hidden layers; embeddings, the head, norms and biases are trained by AdamW beside it, with the same `lr` and "
        "`adam_*`.",
    )
    lr: Number = key(1.0e-5, "The peak learning rate.", gt=0)
    adam_beta1: Number = key(0.9, "Adam's decay rate of the first moment.", ge=0, lt=1)
    adam_beta2: Number = key(0.999, "Adam's decay rate of the second moment.", ge=0, lt=1)
    adam_eps: Number = key(1.0e-8, "Added to Adam's denominator.", gt=0)
    weight_decay: Number = key(
        0.01,
        "Decoupled weight decay; parameters of fewer than two dimensions, such as norms and biases, are exempt.",
        ge=0,
    )
    args: Arguments = key({}, "Further arguments of the optimizer's class, e.g. {momentum: 0.9}.")
    state_dtype: Literal["fp32", "bf16", "int8"] = key(
        "fp32",
        "The storage of the moments of AdamW, Adam and SGD; fp32: as in torch; bf16 (stochastic rounding) or int8 (in "
        "blocks of 256 with one scale each): half or a quarter of that memory, with some noise.",
    )
    groups: list[ParameterGroup] = key(
        [], "Parameters with their own rate or decay, e.g. [{pattern: embed_tokens, lr: 1e-6}]; the last match counts."
    )
    ema_decay: Annotated[Number, Field(ge=0, lt=1)] | None = key(
        None,
        "Keep an exponential moving average of the trained weights, which becomes ema_decay * average + "
        "(1 - ema_decay) * weights after each step; null: none is kept.",
    )
    ema_use: bool = key(
        True,
        "With `ema_decay`: evaluate and export (final/ too) the average; false: the weights of the last step, with the "
        "average in checkpoints alone.",
    )
    clip_grad: Annotated[Number, Field(gt=0)] | None = key(
        1.0, "The largest global norm of the gradient, over all ranks and parameters; null: no clipping."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "The learning rate after the warm-up; wsd: constant, then linear over the last `decay_ratio`."
    )
    lr_warmup_steps: int = key(0, "Optimizer steps over which the rate rises from 0 to `lr`.", ge=0)
    lr_warmup_steps_ratio: Number = key(
        0.0, "The same as a share of all steps, rounded to the nearest step.", ge=0, le=1
    )
    lr_warmup_from_zero: bool = key(
        False,
        "The rate of step i of n of the warm-up (i from 1) is `lr` * (i - 1) / n, as in transformers and torchtune, so "
        "that of the first step is 0; false: `lr` * i / n.",
    )
    decay_ratio: Number = key(0.1, "wsd: the share of all steps in which the rate falls.", gt=0, le=1)
    min_lr: Number = key(
        0.0,
        "What the rate falls to: the last step is one step short of it; a group of a lower rate keeps its own.",
        ge=0,
    )


SequenceMethod = Literal["auto", "ulysses", "ring"]
"""How ranks share the attention of a sequence."""


class ParallelConfig(Section):
    data_replicate: RankCount = key(1, "Copies of the sharded model (HSDP).")
    data_shard: CountOrUnlimited = key(-1, "Ranks over which each copy is sharded; -1: all that are left.")
    tensor: RankCount = key(1, "Ranks that share each matrix multiplication.")
    sequence: RankCount = key(1, "Ranks that share each sequence.")
    sequence_method: SequenceMethod = key(
        "auto",
        "How these ranks share attention; ulysses: they exchange tokens for heads, which they must divide; ring: keys "
        "and values go from rank to rank; auto: ulysses where the ranks divide the heads, otherwise ring.",
    )
    expert: RankCount = key(1, "Ranks over which a layer's experts are distributed.")


class FsdpConfig(Section):
    cpu_offload: bool = key(False, "Keep weights, gradients and optimizer states in host memory; on two ranks or more.")
    reshard_after_forward: bool = key(
        True, "Free a unit's gathered weights after its forward pass and gather them again in the backward pass."
    )
    prefetch: Count = key(
        1,
        "How many units ahead weights are gathered, in the forward and in the backward pass; 1: FSDP2's default; each "
        "further one holds the weights of one more unit.",
    )
    reduce: Annotated[Literal["last", "every"], Reduce] = key(
        "last", "Reduce gradients over ranks after the last micro-batch of a step, or after every one (less memory)."
    )
    wrap: Names | None = key(
        None, "Class names of the modules that are sharded as a unit; null: as the model declares."
    )


class TeacherConfig(Section):
    model_path: Text | None = key(
        None, "The teacher, a language model with the vocabulary of the model: a directory, or a Hub name."
    )
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = key(
        None, "The dtype in which the teacher is kept and computed; null: `model.precision`."
    )
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = key(
        "forward_kl",
        "The distance D of the distributions; forward_kl: KL(teacher || model); reverse_kl: KL(model || teacher); "
        "jensen_shannon: the mean of both against the mean distribution.",
    )
    temperature: Number = key(1.0, "Both logits are divided by it, and D is multiplied by its square.", gt=0)
    top_k: Count | None = key(
        None,
        "Compute the teacher's most probable tokens of each target once, before training, and keep that many in the "
        "cache; the teacher's distribution is then on them alone, and only forward_kl is possible; null: the teacher "
        "is computed beside the model.",
    )
    ce_share: Number = key(0.0, "The loss is ce_share * cross-entropy + (1 - ce_share) * D.", ge=0, le=1)


class ActorConfig(Section):
    training_backend: Literal["fsdp", "fsdp1", "ddp"] = key(
        "fsdp",
        "How the model is distributed over ranks: fsdp is FSDP2; ddp keeps a whole copy on each rank; fsdp1 is torch's "
        "FullyShardedDataParallel, with the same numbers and checkpoints.",
    )
    micro_batch_size: Count | None = key(
        2, "Maximum rows per forward pass; null: only `max_tokens_per_micro_batch`, which is then required."
    )
    max_tokens_per_micro_batch: Count | None = key(
        None, "Maximum tokens per forward pass; null: no limit; if both limits are given, both apply."
    )
    fill_micro_batches: bool | None = key(
        None,
        "Fill packed micro-batches up to one of a few sizes with a copy of a row's first tokens, as documents of their "
        "own without a target: the numbers stay the same, but that dropout draws others, and kernels that are made for "
        "a size are made once; null: on a CPU in half precision, where each new size would cost time and memory.",
    )
    eval_micro_batch_size: Count | None = key(
        None, "Maximum rows per forward pass in evaluation; null: as in training."
    )
    global_batch_size: Count | None = key(
        32, "Rows per optimizer step, exactly, over all ranks; the last step of an epoch takes what is left."
    )
    global_batch_tokens: Count | None = key(
        None, "Maximum input tokens per optimizer step, over all ranks; replaces `global_batch_size`."
    )
    loss: LossName | None = key(
        None,
        "The training loss of each target; dft: cross-entropy times the target's own probability (dynamic "
        "fine-tuning); distill: the distance to the distribution of `teacher`; file.py:function: (outputs [n, …], "
        "targets [n]) -> losses [n]; null: cross-entropy for language models, otherwise the adapter's; `eval/loss` "
        "stays the model's own.",
    )
    neftune_alpha: Annotated[Number, Field(gt=0)] | None = key(
        None,
        "Noise on the embeddings of tokens in training (NEFTune): uniform in -a to a, where a = neftune_alpha / "
        "sqrt(tokens of the row * width); null: none.",
    )
    label_smoothing: Number = key(
        0.0,
        "The share of each target's probability that the training loss spreads over the whole vocabulary; `eval/loss` "
        "is not smoothed.",
        ge=0,
        lt=1,
    )
    z_loss: Number = key(
        0.0,
        "Factor of the squared log-normaliser of the softmax, added to the training loss of each target; not part of "
        "`eval/loss`.",
        ge=0,
    )
    worker: Worker | None = key(
        None,
        "The worker of the task: your class, file.py:Class, or sft_trainer (HALOs' SFTTrainer: padded batches, "
        "`get_batch_metrics`); null: the one of `model.model_type`.",
    )
    model: ModelConfig = section(ModelConfig, "The model.")
    teacher: TeacherConfig = section(TeacherConfig, "The teacher of `loss: distill`.")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "The tokenizer.")
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning rate.")
    parallel: ParallelConfig = section(ParallelConfig, "The layout of ranks.")
    fsdp_config: FsdpConfig = section(FsdpConfig, "How the model is sharded.")

    @property
    def added_tokens(self) -> list[str]:
        """Tokens that are added to the tokenizer's own."""
        model = self.model
        appended = model.model_type == "vision_language_action" and model.action_tokens == "appended"
        return [*self.tokenizer.new_tokens, *(action_tokens(model.num_action_bins) if appended else ())]
