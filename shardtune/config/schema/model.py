"""`actor.model` and `actor.tokenizer`: the base model, how it is computed, its adapter, and its tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from shardtune.config.schema.section import Section, key, section
from shardtune.config.values import (
    ActionMask,
    Checkpointing,
    Count,
    Distinct,
    FunctionInFile,
    ImageSize,
    LayerNumbers,
    LoraInit,
    NamePattern,
    NamePatterns,
    Number,
    Scale,
    Text,
)


class LoraConfig(Section):
    r: Count = key(16, "The rank of the LoRA matrices.")
    alpha: Number = key(32.0, "The scale of LoRA: its output is multiplied by alpha / r.", gt=0)
    dropout: Number = key(
        0.0,
        "Dropout on the inputs of LoRA, in training. What it drops depends on micro-batches and ranks, so above 0 "
        "numbers of other layouts differ.",
        ge=0,
        lt=1,
    )
    target_modules: NamePatterns = key(
        "all-linear",
        "The modules that get LoRA: all-linear (except the head), a list of name endings, or a regular expression for "
        "whole names of linear layers; [] with `target_parameters` alone.",
    )
    target_parameters: list[Text] = key(
        [],
        "Parameters with two or three dimensions that get LoRA although they are not the weight of a linear "
        "layer, by name endings: experts that are stacked in one tensor.",
    )
    exclude_modules: NamePatterns = key(
        [], "Targeted modules that get no LoRA: a list of name endings, or a regular expression for whole names."
    )
    layers_to_transform: LayerNumbers | None = key(
        None,
        "The layers whose targeted modules get LoRA, by number from 0; modules named in full always do; null: all.",
    )
    layers_pattern: NamePatterns = key(
        [], "The names of the lists of layers that `layers_to_transform` counts, e.g. layers or h; []: any list."
    )
    rank_pattern: dict[NamePattern, Count] = key(
        {},
        "Other ranks than `r`, by regular expressions for the ends of names, e.g. {q_proj: 8}; the first that matches "
        "decides.",
    )
    alpha_pattern: dict[NamePattern, Scale] = key({}, "Other scales than `alpha`, likewise.")
    use_rslora: bool = key(False, "Scale by alpha / sqrt(r) instead of alpha / r.")
    use_dora: bool = key(False, "Learn each column's magnitude separately from its direction (DoRA).")
    init: LoraInit = key(
        True,
        "How a new LoRA is initialised, by PEFT's names: true (A random, B zero), gaussian, orthogonal, pissa, "
        "pissa_niter_16, olora, mica; false: random, for tests.",
    )
    peft: dict[str, object] = key(
        {},
        "Another method of PEFT instead of LoRA, by PEFT's own keys: {peft_type: IA3, feedforward_modules: "
        "[down_proj]}; the modules are those of `target_modules`.",
    )
    modules_to_save: list[Text] = key([], "Modules, by name endings, that are trained in full and saved with LoRA.")
    load_from: Text | None = key(
        None,
        "The directory of a LoRA to start from; its rank, scale and modules are used; null: a new LoRA.",
    )
    base_dtype: Literal["auto", "bf16", "nf4"] = key(
        "auto",
        "The storage of the frozen weights; auto: that of the computation where the base's files hold nothing else, "
        "otherwise the dtype of the trained ones; bf16: half of that; nf4: the linear layers in four bits (QLoRA).",
    )

    FORMER_NAMES: ClassVar = {"adapter_path": "load_from"}

    @property
    def adapter_path(self) -> str | None:
        """The former name of `load_from`."""
        return self.load_from


class ValueHeadConfig(Section):
    sizes: list[Count] | None = key(
        None,
        "The widths of its layers between the hidden states and the value, [] for a single linear layer; null: as "
        "saved with the model, otherwise [512, 128].",
    )
    weight: Number = key(1.0, "Factor of the value's loss beside that of the actions.", gt=0)
    discount: Number | None = key(
        None,
        "Returns are computed from the rewards of the frames: a reward k frames later counts discount^k; null: rows "
        "have returns.",
        ge=0,
        le=1,
    )
    detach: bool = key(False, "The value's loss trains the value head alone; its gradient does not reach the model.")


class KernelsConfig(Section):
    source: Literal["torch", "liger", "hub"] | None = key(
        None,
        "Whose fused modules replace the model's own in training: torch (RMSNorm), liger (RMSNorm, SwiGLU, rotary "
        "embeddings; needs a GPU), hub (an RMSNorm of Hugging Face's kernels; needs a GPU); null: none. Each is "
        "compared with the model's own before training, and refused where more than rounding differs.",
    )
    parts: Annotated[list[Literal["rms_norm", "swiglu", "rope"]], Distinct] = key(
        [], "The parts that are replaced; []: all that the source has and the model has."
    )


class Fp8Config(Section):
    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(
        None,
        "Compute linear layers in FP8 in training, by torchao's recipe of this name; rowwise_with_gw_hp: the one whose "
        "numbers do not depend on the rows of a micro-batch; null: none. The head is not.",
    )
    exclude: list[NamePattern] = key(
        [], "Linear layers that are not computed in FP8: regular expressions, searched for in the layers' names."
    )
    emulate: bool = key(False, "Round as FP8 does and compute in fp32: for devices that have no FP8, slow.")


class ModelConfig(Section):
    model_type: Text = key(
        "causal_lm",
        "causal_lm, vision_language, vision_language_action; a task: sequence_classifier, token_classifier, "
        "regression, embedding, reranker, seq2seq; a policy: act, diffusion, smolvla, pi0; or the name of a registered "
        "model.",
    )
    model_path: Text | None = key(
        None,
        "The base model: a directory for `from_pretrained`, or a Hub name, with a branch, tag or commit as "
        "owner/name@revision; required unless the model is passed as an object.",
    )
    from_scratch: bool = key(
        False, "Take only the configuration and tokenizer from `model_path` and initialise the weights from the seed."
    )
    config_overrides: dict[str, object] = key(
        {},
        "Values that replace those of the model's own configuration, e.g. {attention_dropout: 0.1}; those of a part "
        "beside the language model under its name, {vision_config: {attention_dropout: 0.1}}.",
    )
    adapter: FunctionInFile | None = key(
        None, "Your class that describes the model, file.py:Class; null: the one of `model_type`."
    )
    options: dict[str, object] = key(
        {}, "The keys of a task, a policy, or your worker or adapter, checked by its Options class."
    )
    precision: Literal["bf16", "pure_bf16", "fp16", "fp32", "fp64"] = key(
        "bf16",
        "The dtype of the computation; bf16 and fp16 keep weights and optimizer in fp32; pure_bf16 keeps trained "
        "weights in bf16 too and rounds each update at random: less memory, with some noise; fp64 is for proofs.",
    )
    attn_implementation: Text = key(
        "auto", "The attention implementation; auto: the fastest exact one here; otherwise a name of transformers."
    )
    trust_remote_code: bool = key(False, "Run Python code that comes with the model; it may do anything.")
    gradient_checkpointing: Checkpointing = key(
        False,
        "Recompute activations in the backward pass instead of storing them: less memory, slower; selective: store "
        "the results of matrix products and attention, and recompute only the rest.",
    )
    compile: bool = key(False, "Compile the model with torch.compile.")
    kernels: KernelsConfig = section(KernelsConfig, "Fused modules of other libraries.")
    fp8: Fp8Config = section(Fp8Config, "Linear layers in FP8.")
    freeze: list[NamePattern] = key(
        [],
        "Parameters that are not trained: regular expressions, searched for in the parameters' names; or parts: "
        "vision_tower, projector, language_model.",
    )
    low_cpu_mem_usage: bool = key(
        True,
        "For a registered function to pass on; built-in model types are always built on the meta device and loaded in "
        "parts.",
    )
    micro_batch_size: Count | None = key(
        None, "The place of `micro_batch_size` in other systems; null: it is given there."
    )
    val_micro_batch_size: Count | None = key(
        None, "The place of `eval_micro_batch_size` in other systems; null: it is given there."
    )
    vocab_size: Count | None = key(
        None, "The required size of the text vocabulary, without padding of the embedding; null: not checked."
    )
    hidden_size: Count | None = key(None, "The required hidden size of the text model; null: not checked.")
    image_size: ImageSize | None = key(
        None, "The required [height, width] of images at the model's input; null: as its processor makes them."
    )
    action_token_len: Count | None = key(
        None, "Dimensions of an action, one token each; null: those of the statistics."
    )
    action_chunks_len: Count = key(1, "Actions that are predicted at once.")
    unnorm_key: Text | None = key(
        None, "The data set whose statistics turn action tokens into numbers; null: the only one there is."
    )
    num_action_bins: int = key(256, "Tokens for the values of an action.", ge=2)
    action_tokens: Literal["auto", "appended", "last"] = key(
        "auto",
        "Which tokens these are; appended: new ones, <act_0>, <act_1>, …; last: the last ordinary ones; auto: as saved "
        "with the model, otherwise last.",
    )
    action_prompt: Text | None = key(
        None,
        "The text before an action, with {instruction}; null: as saved with the model, otherwise its processor's chat "
        "template, otherwise OpenVLA's.",
    )
    action_state: Literal["none", "text"] | None = key(
        None,
        "text: the prompt contains the state's values as bin numbers; none: it does not; null: as saved with the "
        "model, otherwise none.",
    )
    action_statistics: Text | None = key(
        None,
        "The statistics that normalise actions: a dataset_statistics.json, or a run's normalizer.json or "
        "action_policy.json; null: those next to the weights, otherwise those of the training rows.",
    )
    action_normalization_mask: ActionMask | None = key(
        None,
        "Which dimensions of an action are normalised, by name or number ({gripper: false}), or all in a list; others, "
        "and null: as a given file of statistics has it, otherwise all, but action tokens are made of dimensions that "
        "are always -1, 0 or 1 as they are.",
    )
    action_representation: Literal["absolute", "relative", "delta"] = key(
        "absolute",
        "What the model predicts of the data's actions. relative: each action of a chunk minus the present state; "
        "delta: minus the action before it, the first one minus the state; absolute: as they are. Converted before "
        "they are normalised, and undone when the policy acts.",
    )
    action_representation_mask: ActionMask | None = key(
        None,
        "Which dimensions of an action are converted, by name or number ({gripper: false}), or all in a list; others "
        "stay absolute; null: all are converted.",
    )
    normalization_mapping: dict[str, Text] | None = key(
        None,
        "How an adapter of your own normalises VISUAL, STATE and ACTION, e.g. {STATE: MEAN_STD, ACTION: MIN_MAX}; also "
        "QUANTILES, IDENTITY; null: as its class declares.",
    )
    add_value_head: bool = key(
        False,
        "Train a value head beside the actions: it predicts the return of a frame, the mean squared error is a second "
        "loss, and the policy gives values.",
    )
    value_head: ValueHeadConfig = section(ValueHeadConfig, "The value head (`add_value_head`).")
    is_lora: bool = key(False, "Train a low-rank adapter (LoRA) instead of the model's own weights.")
    lora: LoraConfig = section(LoraConfig, "The low-rank adapter (LoRA).")


class TokenizerConfig(Section):
    tokenizer_model: Text | None = key(
        None, "The tokenizer: a directory or a Hub name; null: that of `model.model_path`."
    )
    new_tokens: Annotated[list[Text], Distinct] = key(
        [],
        "Tokens to add. Their embeddings are trained, with LoRA too; if the embedding has too few rows, it is "
        "enlarged, and each new row starts as the mean of the others.",
    )


def action_tokens(count: int) -> list[str]:
    """The tokens that are appended to a vocabulary for the values of an action."""
    return [f"<act_{number}>" for number in range(count)]
