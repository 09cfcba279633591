"""Contradictions among the keys of the model: LoRA, how it is computed, fast parts."""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.config.checks.context import Context, enumerated
from shardtune.config.shown import as_written
from shardtune.errors import ConfigError

OF_LORA = (
    "r",
    "alpha",
    "dropout",
    "init",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
)
"""Keys of the section that only LoRA has."""


def lora(context: Context) -> Iterator[ConfigError]:
    model = context.recipe.actor.model
    lora, section = model.lora, "actor.model.lora"
    tensor = context.recipe.actor.parallel.tensor
    if not model.is_lora:
        given = lora.model_dump(exclude_defaults=True)
        yield from context.idle(section, given, "with actor.model.is_lora: false", "set it to true")
        return
    subtracts = str(lora.init).startswith(("pissa", "olora"))
    contradictions = {
        "init": [
            ("no effect with load_from, whose weights are loaded", lora.init is not True and lora.load_from),
            ("an even r", lora.init == "orthogonal" and lora.r % 2),
            (
                "even ranks in rank_pattern",
                lora.init == "orthogonal" and any(r % 2 for r in lora.rank_pattern.values()),
            ),
            ("adapters without DoRA", lora.init == "mica" and lora.use_dora),
            ("linear layers, not target_parameters", lora.init not in (True, False) and lora.target_parameters),
            (
                "base_dtype auto or bf16: NF4 would round the remaining base weights again",
                subtracts and lora.base_dtype == "nf4",
            ),
        ],
        "target_parameters": [
            (
                "training_backend: fsdp, as FSDP1 replaces the parameters that PEFT adapts",
                lora.target_parameters and context.recipe.actor.training_backend == "fsdp1",
            ),
            ("dropout: 0.0, as PEFT has none for them", lora.target_parameters and lora.dropout),
            ("use_dora: false, as PEFT has none for them", lora.target_parameters and lora.use_dora),
        ],
        "use_dora": [
            ("parallel.tensor: 1, as it takes norms of whole matrices in each forward", lora.use_dora and tensor > 1)
        ],
        "target_modules": [
            ("target_parameters, if it is empty", not lora.target_modules and not lora.target_parameters)
        ],
        "layers_pattern": [("layers_to_transform", lora.layers_pattern and lora.layers_to_transform is None)],
        "layers_to_transform": [
            (
                "no target_parameters, for which PEFT does not use it; name these with their layers",
                lora.layers_to_transform is not None and lora.target_parameters and not lora.load_from,
            )
        ],
        "peft": [
            ("a peft_type, as text, e.g. IA3", bool(lora.peft) and not isinstance(lora.peft.get("peft_type"), str)),
            ("base_dtype: auto or bf16", bool(lora.peft) and lora.base_dtype == "nf4"),
            ("parallel.tensor: 1", bool(lora.peft) and tensor > 1),
        ],
        "exclude_modules": [("target_modules", lora.exclude_modules and not lora.target_modules)],
        "base_dtype": [
            ("precision: bf16", lora.base_dtype == "bf16" and model.precision != "bf16"),
            ("parallel.tensor: 1, as blocks of its codes lie along rows", lora.base_dtype == "nf4" and tensor > 1),
        ],
    }
    for name in OF_LORA if lora.peft else ():
        if name in lora.model_dump(exclude_defaults=True):
            yield context.problem(
                f"{section}.{name}",
                f"{section}.{name} is LoRA's, and {section}.peft is of another method",
                f"leave it out; keys of that method are given in {section}.peft",
            )
    remedies = {"base_dtype": f"set {section}.base_dtype: auto, or change the other"}
    for name, rules in contradictions.items():
        for what, broken in rules:
            if broken:
                value = getattr(lora, name)
                verb = "has" if what.startswith("no effect") else "needs"
                yield context.problem(
                    f"{section}.{name}",
                    f"{section}.{name}: {as_written(value)} {verb} {what}",
                    remedies.get(name, "change one of them"),
                )


def execution(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    ahead = actor.fsdp_config.prefetch
    if ahead > 1 and actor.training_backend != "fsdp":
        why = "gathers in its own way" if actor.training_backend == "fsdp1" else "has nothing to gather"
        yield context.problem(
            "actor.fsdp_config.prefetch",
            f"actor.fsdp_config.prefetch ({ahead}) has no effect with actor.training_backend: "
            f"{actor.training_backend}, which {why}",
            "leave it out, or use actor.training_backend: fsdp",
        )
    method = actor.parallel.sequence_method
    if method != "auto" and actor.parallel.sequence == 1:
        yield context.problem(
            "actor.parallel.sequence_method",
            f"actor.parallel.sequence_method ({method}) has no effect with actor.parallel.sequence: 1",
            "leave it out, or set actor.parallel.sequence to the ranks that share each sequence",
        )
    attention, precision = actor.model.attn_implementation, actor.model.precision
    ours = actor.worker is None and actor.model.adapter is None and actor.model.model_type in OF_LANGUAGE
    if ours and "flash" in attention and precision in ("fp32", "fp64"):
        yield context.problem(
            "actor.model.attn_implementation",
            f"actor.model.attn_implementation: {attention} computes in half precision alone, and "
            f"actor.model.precision is {precision}",
            "set actor.model.precision: bf16, or attn_implementation: auto",
        )
    if actor.model.compile and actor.model.gradient_checkpointing == "selective":
        yield context.problem(
            "actor.model.gradient_checkpointing",
            "actor.model.gradient_checkpointing: selective selects among a layer's operations, which "
            "actor.model.compile: true fuses into one",
            "set it to true or false; the compiler chooses by itself what to store",
        )
    if actor.model.compile and actor.parallel.tensor > 1:
        yield context.problem(
            "actor.model.compile",
            f"actor.model.compile: true does not work with actor.parallel.tensor: {actor.parallel.tensor}: torch's "
            "compiler does not support layers with tensor parallelism",
            "leave one of them out; actor.parallel.sequence works with it",
        )


OF_LANGUAGE = ("causal_lm", "vision_language", "vision_language_action")
"""Model types whose modules may be replaced by fast parts."""


def fast_parts(context: Context) -> Iterator[ConfigError]:
    actor, model = context.recipe.actor, context.recipe.actor.model
    for section, on, values in (
        ("kernels", "source", model.kernels.model_dump(exclude_defaults=True)),
        ("fp8", "scaling", model.fp8.model_dump(exclude_defaults=True)),
    ):
        if values and on not in values:
            why = f"without actor.model.{section}.{on}"
            yield from context.idle(f"actor.model.{section}", values, why, "set it, or leave the section out")
        if on not in values:
            continue
        key = f"actor.model.{section}.{on}"
        refused = {
            f"actor.worker: {actor.worker}": (actor.worker is not None, "its own code computes the model"),
            f"actor.model.adapter: {model.adapter}": (model.adapter is not None, "it may compute the model in any way"),
            f"actor.model.model_type: {model.model_type}": (
                model.model_type not in OF_LANGUAGE,
                f"it is for {enumerated(OF_LANGUAGE)}",
            ),
            f"actor.parallel.tensor: {actor.parallel.tensor}": (
                actor.parallel.tensor > 1,
                "layers then hold parts of their matrices",
            ),
        }
        for other, (is_set, why) in refused.items():
            if is_set:
                yield context.problem(
                    key, f"{key}: {values[on]} does not work with {other}: {why}", "leave one of them out"
                )
    if model.fp8.scaling is None:
        return
    if model.is_lora and model.lora.base_dtype == "nf4":
        key = "actor.model.fp8.scaling"
        nf4 = "actor.model.lora.base_dtype: nf4"
        what = f"{key}: {model.fp8.scaling} does not work with {nf4}, whose layers hold four bits"
        yield context.problem(key, what, "leave one of them out")
    if model.precision not in ("bf16", "pure_bf16") and not model.fp8.emulate:
        key = "actor.model.fp8.scaling"
        what = f"{key}: {model.fp8.scaling} needs actor.model.precision: bf16, not {model.precision}"
        yield context.problem(key, what, "set precision: bf16, or leave it out")
