"""How the words of a command line are read: other names of commands, and flags that stand for keys of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardtune.cli.words import without_flags
from shardtune.errors import ConfigError

SETTINGS: Mapping[str, object] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""For every command: `-h`, and underscores in options."""
SAME: Mapping[str, str] = {
    **dict.fromkeys(("sft", "finetune", "fine-tune", "ft", "fit"), "train"),
    **dict.fromkeys(("evaluate", "evaluation"), "eval"),
    **dict.fromkeys(("inference", "infer"), "generate"),
    "info": "env",
    **dict.fromkeys(("estimate", "estimate-memory"), "plan"),
    "compare": "diff",
}
"""Other names of commands that do the same."""
INSTEAD: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("merge", "merge-lora", "merge-adapter"),
        ("an adapter is merged by export", "shardtune export runs/lora my-model --merge"),
    ),
    **dict.fromkeys(
        ("preprocess", "tokenize", "prepare"),
        (
            "train tokenises the rows itself, once, and keeps them in its cache",
            "shardtune data preview recipe.yaml shows the rows, shardtune train recipe.yaml --dry-run checks them all",
        ),
    ),
    **dict.fromkeys(("preview", "inspect"), ("it is a command of data", "shardtune data preview recipe.yaml")),
    **dict.fromkeys(
        ("audit", "dedup", "deduplicate", "decontaminate"),
        ("data audit finds such rows, and leaves the files as they are", "shardtune data audit recipe.yaml"),
    ),
    **dict.fromkeys(
        ("ls", "list", "runs", "ps", "status"),
        ("a run is a directory, and there is no list of runs", "ls runs; tail runs/recipe/metrics.jsonl"),
    ),
    **dict.fromkeys(
        ("serve", "server", "api", "deploy", "vllm", "vllm-serve"),
        ("there is no inference server", "vllm serve runs/recipe/final, or shardtune chat runs/recipe"),
    ),
    **dict.fromkeys(
        ("webui", "gui", "ui", "webchat", "web"),
        ("there is no web page", "shardtune chat runs/recipe, or tensorboard --logdir runs"),
    ),
    **dict.fromkeys(
        ("resume", "continue"),
        ("the command that started a run continues it", "shardtune train recipe.yaml"),
    ),
    **dict.fromkeys(
        ("dpo", "orpo", "kto", "rm", "reward", "ppo", "grpo", "rloo", "rl"),
        (
            "a recipe is supervised fine-tuning; other methods run on the engine, docs/your-method.md",
            "shardtune train recipe.yaml",
        ),
    ),
    **dict.fromkeys(("pretrain", "pt"), ("there is supervised fine-tuning alone", "shardtune train recipe.yaml")),
    **dict.fromkeys(
        ("merge-sharded-fsdp-weights", "merge-fsdp", "consolidate"),
        ("final/ of a run is one model already, whatever it was sharded to", "shardtune export runs/recipe my-model"),
    ),
    **dict.fromkeys(
        ("quantize", "quantise"),
        ("the result is a directory for transformers, which quantisers read", "shardtune export runs/recipe my-model"),
    ),
    **dict.fromkeys(
        ("lm-eval", "lm-evaluation-harness", "benchmark"),
        ("eval has the tasks of lm-evaluation-harness", "shardtune eval runs/recipe eval.harness=[hellaswag]"),
    ),
    "adapter": ("it is a command of verify", "shardtune verify adapter my_model.py:MyModel"),
    "checkpoint": ("it is a command of verify", "shardtune verify checkpoint runs/recipe"),
}
"""Names of commands that do not exist: why, and what to type."""


class Commands(TyperGroup):
    """Commands with other names; one that does not exist is answered with the one to type."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        typed, *rest = args
        name = typed.lower().replace("_", "-")
        if name == "help" and rest:
            name, rest = rest[0], [*rest[1:], "--help"]
        name = SAME.get(name, name)
        if name in self.commands:
            return super().resolve_command(ctx, [name, *rest])
        if name in INSTEAD:
            why, instead = INSTEAD[name]
            raise _no_command(ctx, typed, f": {why}", instead)
        if name.endswith((".yaml", ".yml")):
            raise _no_command(ctx, typed, "; a recipe is trained by train", f"{ctx.command_path} train {typed}")
        near = difflib.get_close_matches(name, [*self.commands, *SAME, *INSTEAD], n=1, cutoff=0.65)
        if not near:
            raise _no_command(ctx, typed, "", f"{ctx.command_path} --help lists them")
        meant = SAME.get(near[0], near[0])
        if meant in INSTEAD:
            raise _no_command(ctx, typed, "", INSTEAD[meant][1])
        raise _no_command(ctx, typed, f"; did you mean {meant}?", f"{ctx.command_path} {meant} --help")


def _no_command(ctx: typer.Context, typed: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"there is no command {typed}{why}", where=f"{ctx.command_path} {typed}", remedy=remedy)


class RecipeCommand(TyperCommand):
    """A command whose words are a recipe and overrides: flags that are not its own stand for keys."""

    ignore_unknown_options = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        options = [name for param in self.params for name in param.opts if name.startswith("--")]
        for param in self.params:
            words = ctx.params.get(param.name or "")
            if param.nargs == -1 and param.param_type_name == "argument" and words:
                ctx.params[str(param.name)] = without_flags(words, [*options, "--help"])
        return rest
