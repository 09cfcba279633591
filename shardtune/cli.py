"""The command line: a thin caller of the Python functions. torch is imported by the commands that need it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardtune.errors import Interrupted, ShardtuneError

app = typer.Typer(
    help=(
        "Supervised fine-tuning of any Hugging Face model, sharded with FSDP2, with numbers that a command proves.\n\n"
        "Start with: shardtune train recipe.yaml --dry-run. Any key of a recipe may be overridden: actor.optim.lr=3e-5."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Look at the data as the model will see it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.yaml [key=value …]", help="A recipe, then keys of it to override (Hydra's grammar)."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, as shardtune train makes it.")]
Checkpoint = Annotated[str, typer.Option(help="final | latest | best | a step | a checkpoint's path")]


def _split(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """The recipe, if one is named, and the overrides."""
    given = arguments or []
    if given and "=" not in given[0]:
        return given[0], given[1:]
    return None, given


@app.command()
def train(
    recipe: RecipeArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the first rows, do one step, write no run.")
    ] = False,
) -> None:
    """Fine-tune as a recipe says; run it again to continue where it stopped."""
    path, overrides = _split(recipe)
    if dry_run:
        from shardtune.rehearse import dry_run as rehearse

        rehearse(path, *overrides)
        return
    from shardtune.run import train as run_training

    run_training(path, *overrides)


@app.command("eval")
def evaluate(
    target: Annotated[list[str], typer.Argument(metavar="RUN_OR_RECIPE [key=value …]")],
    checkpoint: Checkpoint = "final",
) -> None:
    """Evaluate a run, or the model that a recipe names, on the recipe's evaluation sets."""
    from shardtune.run import evaluate as run_evaluation

    metrics = run_evaluation(target[0], *target[1:], checkpoint=checkpoint)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(metrics, indent=2))


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A user's turn to answer; may be given several times.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A JSONL file of rows: {prompt}, {question} or {messages}, answered in order.")
    ] = None,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="A system turn before each prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the tokens that make up this much.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Answer prompts: one answer per line for --prompt, JSON lines for --file."""
    from shardtune.conversation import read_prompts
    from shardtune.generate import Sampling
    from shardtune.run import load_run

    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file")
    prompts = read_prompts(file) if file else (prompt or [])
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    answers = load_run(run).generate(prompts, checkpoint=checkpoint, system=system, sampling=sampling)
    for asked, answer in zip(prompts, answers, strict=True):
        typer.echo(json.dumps({"prompt": asked, "answer": answer}, ensure_ascii=False) if file else answer)


@app.command()
def chat(
    run: RunArgument,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="The system turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Talk to a run's model; /reset forgets the conversation, an empty line or Ctrl-D ends it."""
    from shardtune.conversation import chat as talk
    from shardtune.generate import Sampling
    from shardtune.run import load_run

    talk(load_run(run), checkpoint, system, Sampling(max_new_tokens, temperature, top_p, seed))


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option(help="The directory to write; must not be there yet.")],
    checkpoint: Checkpoint = "final",
    dtype: Annotated[str, typer.Option(help="auto (the base model's) | fp32 | bf16 | fp16")] = "auto",
) -> None:
    """Write a Hugging Face directory, then load it in a fresh process and compare its logits."""
    from shardtune.run import load_run

    if dtype not in ("auto", "fp32", "bf16", "fp16"):
        raise typer.BadParameter(f"--dtype {dtype}: use auto, fp32, bf16 or fp16")
    path = load_run(run).export(to, checkpoint=checkpoint, dtype=dtype)
    typer.echo(f"{path}: loaded afresh, gives the same logits")


@data_app.command("preview")
def preview(
    recipe: RecipeArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
) -> None:
    """Show rows as the model will see them, the trained tokens marked, and what became of the others."""
    from shardtune.rehearse import preview as show

    path, overrides = _split(recipe)
    show(path, *overrides, rows=rows, start=start)


@app.command()
def models() -> None:
    """List what actor.model.model_type may be, and the architectures it covers."""
    from shardtune.models.registry import MODEL_TYPES, known_architectures

    for name, meaning in MODEL_TYPES.items():
        typer.echo(f"{name}: {meaning}")
    known = known_architectures()
    typer.echo(f"  {len(known)} architectures: {', '.join(known)}")


@app.command()
def env() -> None:
    """Print versions and devices, for a bug report."""
    import torch

    from shardtune.run_directory import environment

    for name, value in environment().items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"cpu threads: {torch.get_num_threads()}")
    for number in range(torch.cuda.device_count()):
        typer.echo(f"cuda:{number}: {torch.cuda.get_device_name(number)}")


def main() -> None:
    """Run the command line; exit with 0, 1, 2 (the user's to mend) or 75 (stopped after saving)."""
    try:
        app()
    except SystemExit:
        raise
    except BaseException as error:
        _end(error)


def _end(error: BaseException) -> NoReturn:
    """Say what went wrong, once, and leave with the exit code that tells which kind it is."""
    rank = int(os.environ.get("RANK", "0"))
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    launched = "SHARDTUNE_REPORT_DIR" in os.environ
    code = 1
    if isinstance(error, (ShardtuneError, Interrupted)):
        code, text = error.exit_code, str(error)
    else:
        from shardtune.memory import explain_out_of_memory

        text = explain_out_of_memory(error) or "".join(traceback.format_exception(error))
    if launched and not isinstance(error, Interrupted):
        from shardtune.launch import write_report

        write_report(rank, error, text)
    elif not launched or rank == 0:
        kind = "stopped" if isinstance(error, Interrupted) else "error"
        prefix = f"rank {rank}: " if "RANK" in os.environ and not launched else ""
        print(f"{prefix}{kind}: {text}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    if "RANK" in os.environ and not isinstance(error, Interrupted):
        os._exit(code)  # the process group may be beyond an orderly end; the others must not wait for it
    sys.exit(code)
