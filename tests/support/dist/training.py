"""Tiny models on disk, and training recipes on several ranks with every number kept."""

from __future__ import annotations

import importlib.util
import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from shardtune.batch import PackedBatch
from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that attention matters, and a leak or a wrong window with it
    "bos_token_id": None,
    "pad_token_id": None,
}
VOCABULARY = 264
"""Some more than the tokenizer has."""
HEADS = {"one_head": 1, "two_heads": 2, "three_heads": 3}
"""Models of few heads of queries, and one of keys and values."""
LOGIT_ROWS = 3
"""Evaluation rows whose logits are kept."""
ROWS = 33
"""Not divisible by the batch of 8: the last step of an epoch holds one row, for which other ranks have fillers."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, and so are the marks of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHATML
    return tokenizer


def model_config(kind: str, vocabulary: int, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of some kind."""
    sizes = {**SIZES, "vocab_size": vocabulary, "eos_token_id": 257, **changes}
    if kind == "dense":
        return Qwen2Config(**{"tie_word_embeddings": True, **sizes})
    if kind in HEADS:
        heads = {"num_attention_heads": HEADS[kind], "num_key_value_heads": 1, "hidden_size": 8 * HEADS[kind]}
        return Qwen2Config(**{"tie_word_embeddings": True, **sizes, **heads})
    if kind == "mistral":
        return MistralConfig(**{"sliding_window": 8, "tie_word_embeddings": False, **sizes})
    if kind == "gemma":
        own = {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}
        layers = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(**{**own, "layer_types": layers, **sizes, "pad_token_id": 0})
    if kind == "mamba":
        kept = {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size", "eos_token_id")}
        return MambaConfig(**kept, state_size=4, bos_token_id=None, pad_token_id=None)
    experts = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1, **sizes}
    if kind == "mixtral":
        return MixtralConfig(**{"num_local_experts": 4, **experts})
    assert kind == "qwen3_moe", kind
    return Qwen3MoeConfig(**{"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **experts})


def save_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model with random weights and its tokenizer, as a directory."""
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(model_config(kind, VOCABULARY, **changes)).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_rows(file: Path, count: int = ROWS, longest: int = 40, seed: int = 0, weight: float | None = None) -> Path:
    """Ragged conversations of one or two rounds, about 20 to `longest` + 60 tokens.

    Args:
        weight: of the last answer's tokens; None: 1.
    """
    draw = random.Random(seed)

    def words(most: int) -> str:
        return "a" + "".join(draw.choice("abcdefgh ,.") for _ in range(draw.randint(0, most)))

    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            turns: list[dict[str, Any]] = []
            for _ in range(draw.choice([1, 1, 2])):
                turns += [{"role": "user", "content": words(longest // 4)}]
                turns += [{"role": "assistant", "content": words(longest // 2)}]
            if weight is not None:
                turns[-1]["weight"] = weight
            lines.write(json.dumps({"messages": turns}) + "\n")
    return file


def recipe(model: Path, rows: Path, **changes: Any) -> dict[str, Any]:
    """A recipe for 20 steps of 8 rows with active clipping; `changes` are dotted keys with `__` for the dots."""
    made: dict[str, Any] = {
        "runner": {"max_steps": 20, "max_epochs": -1, "device": "cpu"},
        "actor": {
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "model": {"model_path": str(model), "precision": "fp64"},
            "optim": {"lr": 1e-2, "clip_grad": 0.5, "lr_scheduler": "linear", "lr_warmup_steps": 3},
        },
        "data": {"train_data_paths": str(rows), "num_workers": 0, "cache_dir": str(rows.parent / "cache")},
    }
    for key, value in changes.items():
        section = made
        *path, last = key.split("__")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return made


@dataclass
class Trace:
    """The numbers of a run; tensors are whole.

    Attributes:
        losses: of each step, as logged.
        norms: before clipping.
        gradients: by parameter name, clipped, of each step.
        weights: by name, at the end.
        rows: of each step.
        notes: what the probe found.
        evaluation: the metrics of the evaluation rows at the end, where there are any.
        logits: [targets, vocabulary], of the first of them.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    logits: torch.Tensor | None = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it; a collective for a sharded tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def as_it_is(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """For optimizers over a model's own parameters."""
    return tensor


@contextmanager
def keeping_gradients(
    into: list[dict[str, torch.Tensor]],
    names: Mapping[int, str],
    stored: Callable[[str, torch.Tensor], torch.Tensor] = as_it_is,
) -> Iterator[None]:
    """Inside, every optimizer's step first leaves its gradients in `into`; `names` by the parameters' ids.

    Args:
        stored: a gradient in the form that checkpoints have.
    """

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        into.append({names[id(p)]: whole(stored(names[id(p)], p.grad)) for p in parameters})

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def quiet(text: str) -> None:
    """For workers that would print."""


def run_recipe(values: Mapping[str, Any], export: Path | None = None) -> Trace:
    """Train a recipe to its end; on every rank of a process group alike.

    Args:
        export: where its adapter is written in the end, as it is (`adapter`) and in the model (`merged`).
    """
    worker = SFTWorker(load_recipe(dict(values)), report=quiet)
    worker.setup()
    trace = Trace(notes=worker.notes)
    names = {id(parameter): name for name, parameter in worker.weights.parameters.items()}
    with keeping_gradients(trace.gradients, names, worker.weights.to_checkpoint_layout):
        while not worker.finished:
            metrics = worker.run_training()
            trace.losses.append(metrics["train/loss"])
            trace.norms.append(metrics["train/grad_norm"])
    weights = worker.weights.tensors()
    trace.weights = {name: whole(weights[name]) for name in worker.weights.parameters}
    for evaluated in worker.prepared.evals.values():
        trace.evaluation = worker.run_eval()
        some = [evaluated.row(index) for index in range(LOGIT_ROWS)]
        first = worker.adapter.collate(some, range(LOGIT_ROWS), {})
        assert isinstance(first, PackedBatch)
        with torch.no_grad():
            trace.logits = worker.root.logits(first, first.target_positions)
    if export is not None:
        worker.export(export / "adapter", "fp64")
        worker.export(export / "merged", "fp64", merge=True)
    worker.release()
    return trace


def run_recipes(recipes: Sequence[Mapping[str, Any]], exports: Sequence[Path | None] = ()) -> list[Trace]:
    """Several recipes one after the other in the same ranks."""
    return [run_recipe(values, export) for values, export in zip_longest(recipes, exports)]


def flat_script() -> Any:
    """The module `examples/flat_sft.py`."""
    file = Path(__file__).resolve().parents[3] / "examples" / "flat_sft.py"
    spec = importlib.util.spec_from_file_location("flat_sft", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def own_patterns() -> Iterator[None]:
    """Inside, PEFT does not warn of patterns that it made itself: for `all-linear` it names the stacked experts'
    parameters, doubles their rank by a pattern, and then looks for that pattern among modules alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*_pattern keys did not match.*gate_up_proj", RuntimeWarning)
        yield


def save_adapter(model: Path, folder: Path) -> Path:
    """A LoRA of PEFT on a model in a directory, with random weights in fp64: on stacked experts, too, and a router."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    experts = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"] if "experts" in str(base) else None
    torch.manual_seed(11)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", target_parameters=experts, rank_pattern={"k_proj": 2},
        use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    with own_patterns():
        made = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    made.save_pretrained(str(folder))
    return folder


def with_adapter(model: PreTrainedModel, adapter: Path | None) -> Any:
    """A model with an adapter as PEFT loads it, to be trained; with None as it is."""
    if adapter is None:
        return model
    with own_patterns():
        made = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True, autocast_adapter_dtype=False)
    return made.get_base_model()


def run_flat(model: Path, rows: Path, *, adapter: Path | None = None, **options: Any) -> Trace:
    """The flat script with the settings of `recipe`, with an adapter of PEFT or without; `options` are its own."""
    flat = flat_script()
    settings = {"lr": 1e-2, "clip": 0.5, "schedule": "linear", "warmup": 3, **options}
    paths = ["--model", str(model), "--data", str(rows)]
    args = flat.arguments(*paths, *(f"--{key.replace('_', '-')}={value}" for key, value in settings.items()))
    made = with_adapter(flat.load_model(args), adapter).train()
    samples = flat.read_rows(rows, AutoTokenizer.from_pretrained(model))
    trace = Trace()
    names = [name for name, _ in made.named_parameters()]
    masters: dict[int, str] = {}
    # The optimizer's parameters in its own order: matrices, then vectors, each as the model has them.
    dims = {name: parameter.ndim for name, parameter in made.named_parameters()}
    in_order = [name for name in names if dims[name] > 1] + [name for name in names if dims[name] == 1]

    def name_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        masters.update({id(p): name for p, name in zip(parameters, in_order, strict=True)})

    handle = register_optimizer_step_pre_hook(name_all)
    try:
        with keeping_gradients(trace.gradients, masters):
            for loss, norm in flat.train(made, samples, args):
                trace.losses.append(loss)
                trace.norms.append(norm)
    finally:
        handle.remove()
    trace.weights = {name: parameter.detach() for name, parameter in made.named_parameters()}
    return trace
