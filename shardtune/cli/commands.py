"""The commands, each a thin caller of a Python function. Only the commands that need torch import it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.claims import add_claims
from shardtune.cli.exit import UsageError, end, leave, wrong_usage
from shardtune.cli.group import SETTINGS, Commands, RecipeCommand
from shardtune.cli.starting import starting
from shardtune.cli.words import is_override, split_words, without_flags
from shardtune.errors import ConfigError, printable
from shardtune.launch.signals import end_with_parent, is_supervised, listening
from shardtune.verify.commands import verify_app

CTRL_C = 130
"""The exit code that typer returns for a KeyboardInterrupt."""

app = typer.Typer(
    cls=Commands,
    context_settings=dict(SETTINGS),
    help=(
        "Supervised fine-tuning of any Hugging Face model, sharded with FSDP2, with numbers that a command proves.\n\n"
        "**Start with**\n\n"
        "    shardtune train recipe.yaml --dry-run\n"
        "    shardtune train recipe.yaml\n"
        "    shardtune train --model Qwen/Qwen3-0.6B --data rows.jsonl\n"
        '    shardtune generate runs/recipe --prompt "What is 2 plus 3?"\n\n'
        "Any key of a recipe may be overridden on the command line: optim.lr=3e-5, or --optim.lr 3e-5. "
        "`shardtune COMMAND -h` has examples of each command.\n\n"
        "**Exit codes**: 0 done; 2 an error in your input, see the message; 75 stopped by a signal after saving, run "
        "the same command to continue; 76 stuck, the same command continues from the last checkpoint; 1 anything else."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Show the data as the model sees it.")
config_app = typer.Typer(help="Explain the keys of a recipe.")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(verify_app, name="verify")
add_claims(verify_app)

RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.yaml [key=value …]",
        help="A recipe, also as --config FILE; then overrides of its keys, key=value (Hydra's grammar) or --key value.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a training run.")]
RunOrModel = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN_OR_MODEL",
        help="A run directory, a model directory (final/, an export, any causal or image-text model of transformers, "
        "an adapter of PEFT), or a name on the Hub.",
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "--model-name-or-path", help="The same as RUN_OR_MODEL, as an option.")
]
Checkpoint = Annotated[str, typer.Option(help="final | latest | best | a step | a checkpoint's path")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Maximum tokens of one answer.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy decoding.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability.")
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Code that the run names and that may be executed: a file, module or model; may be repeated. A run that "
        "you trained needs none.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling: the same seed gives the same answers.")]


@config_app.callback(invoke_without_command=True)
@data_app.callback(invoke_without_command=True)
@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _print_version(is_set: bool) -> None:
    if is_set:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def shardtune(
    context: typer.Context,
    print_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(cls=RecipeCommand)
def train(
    recipe: RecipeArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the first rows, run one step, save nothing.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Record each step's rows, exact numbers and random draws in this folder, a file per rank."),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step as on a signal: save, exit with 75.")
    ] = None,
) -> None:
    """Fine-tune a model by a recipe, or by a model and rows; the same command continues an interrupted run.

    A key may be set as key=value or as --key value, and by its usual name in other trainers where that means the same:
    --learning_rate, --epochs, --output_dir. Paths in a recipe start at the recipe, paths that are typed at the working
    directory.

    **Examples**

    ```text
    shardtune train recipe.yaml --dry-run
    shardtune train --model Qwen/Qwen3-0.6B --data rows.jsonl
    shardtune train recipe.yaml optim.lr=3e-5 runner.max_epochs=3
    shardtune train --config recipe.yaml --learning_rate 3e-5 --epochs 3
    shardtune train recipe.yaml runner.nproc_per_node=2
    shardtune train loss=sft model=llama datasets=[ultrachat] ++model.name_or_path=path/to/model
    torchrun --nproc-per-node 2 -m shardtune train recipe.yaml
    ```
    """
    path, overrides = split_words(recipe)
    if dry_run:
        from shardtune.run.dry_run import dry_run as rehearse

        rehearse(path, *overrides)
        return
    _train(path, *overrides, record=record, stop_after=stop_after)


def _train(path: str | None, *overrides: str, record: Path | None = None, stop_after: int | None = None) -> None:
    with listening(own_process=True) as stop:
        with stop.deferred(), starting():  # torch takes seconds; code that is being imported may swallow an exception
            from shardtune.run.api import train as run_training
            from shardtune.training.recorder import Recording
        stop.check()
        recording = None if record is None and stop_after is None else Recording(record, stop_after)
        run_training(path, *overrides, recording=recording)


@app.command("eval", cls=RecipeCommand)
def evaluate(
    target: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_RECIPE [key=value …]", help="A run or a recipe, then overrides of keys."),
    ],
    checkpoint: Checkpoint = "final",
    trust: Trust = None,
) -> None:
    """Evaluate a run's model, a recipe's base model, or any model, on the evaluation rows of the recipe; prints JSON.

    Paths that are typed start at the working directory; those in the run's recipe are the files that it was trained
    with.

    **Examples**

    ```text
    shardtune eval runs/recipe
    shardtune eval runs/recipe --checkpoint best data.eval_data_paths=other.jsonl
    shardtune eval runs/recipe data.eval_data_paths.math=a.jsonl data.eval_data_paths.chat=b.jsonl
    shardtune eval recipe.yaml eval.generate=true
    shardtune eval --model Qwen/Qwen3-0.6B --eval_data rows.jsonl
    ```
    """
    path, overrides = split_words(target)
    if path is None and not any(word.partition("=")[0].endswith("model_path") for word in overrides):
        raise ConfigError(
            f"there is nothing to evaluate: {' '.join(target)} names neither a run nor a recipe",
            where="RUN_OR_RECIPE",
            remedy="shardtune eval runs/recipe, or shardtune eval recipe.yaml, or a model and rows: shardtune eval "
            "--model Qwen/Qwen3-0.6B --eval_data rows.jsonl",
        )
    if path is not None and (Path(path) / "config.json").is_file():
        path, overrides = None, without_flags([f"--model={path}"], []) + overrides
    from shardtune.run.api import evaluate as run_evaluation

    metrics = run_evaluation(path, *overrides, checkpoint=checkpoint, trust=trust or ())
    if metrics and os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(metrics, indent=2))


@app.command()
def generate(
    run: RunOrModel = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A user turn to answer; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A JSONL file with rows {prompt}, {question} or {messages}, with images and tools; answered in order. "
            "Relative paths of images start at the file."
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="An image for every prompt, in the place of &lt;image&gt; or before the text; a path or a URL."
        ),
    ] = None,
    model: ModelOption = None,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="A system turn before each prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    trust: Trust = None,
) -> None:
    """Answer prompts with a run's model or any other: plain text for prompts, JSON lines for --file.

    Decoding is greedy unless --temperature is given. Paths that are typed start at the working directory.

    **Examples**

    ```text
    shardtune generate runs/recipe --prompt "What is 2 plus 3?"
    shardtune generate Qwen/Qwen3-0.6B "What is 2 plus 3?"
    shardtune generate runs/recipe --prompt "What is this?" --image photo.jpg
    shardtune generate runs/recipe --file questions.jsonl > answers.jsonl
    shardtune generate runs/recipe --prompt "A rhyme, please." --temperature 0.8 --top-p 0.9 --seed 7
    ```
    """
    target, typed = _target("generate", run, model)
    prompts = [*typed, *(prompt or ())]
    if (not prompts) == (file is None):
        raise ConfigError(
            "give a prompt or --file" if file is None else "a prompt and --file exclude each other",
            where="shardtune generate",
            remedy=f'shardtune generate {target} --prompt "…", or --file prompts.jsonl; or shardtune chat {target}',
        )
    if file is not None and image:
        raise ConfigError(
            "--file and --image exclude each other",
            where="shardtune generate",
            remedy="name images in the rows of the file: images: [a.jpg], relative to it",
        )
    from shardtune.cli.chat import Question, answer_line, read_prompts
    from shardtune.evaluate.generate import Sampling
    from shardtune.run.plain_model import load_run_or_model

    questions = read_prompts(file) if file else [Question(text, image or []) for text in prompts]
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    answers = load_run_or_model(target, trust=trust or ()).generate(
        [question.prompt for question in questions],
        checkpoint=checkpoint,
        system=system,
        sampling=sampling,
        raw=raw,
        images=[question.images for question in questions],
        tools=[question.tools for question in questions],
        folder=file.parent if file else None,
    )
    for question, answer in zip(questions, answers, strict=True):
        typer.echo(answer_line(question, answer) if file else printable(answer))


def _target(command: str, words: list[str] | None, model: str | None) -> tuple[str, list[str]]:
    """The run or model that is named, and the words after it."""
    named = [*([] if model is None else [model]), *(words or ())]
    if not named:
        raise ConfigError(
            "there is no run and no model",
            where=f"shardtune {command}",
            remedy=f"shardtune {command} runs/recipe, or a model: shardtune {command} Qwen/Qwen3-0.6B",
        )
    return named[0], named[1:]


@app.command()
def chat(
    run: RunOrModel = None,
    model: ModelOption = None,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="The system turn.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    trust: Trust = None,
) -> None:
    """Chat with a run's model or any other; /reset clears the conversation, an empty line or Ctrl-D ends it.

    **Examples**

    ```text
    shardtune chat runs/recipe
    shardtune chat Qwen/Qwen3-0.6B
    shardtune chat runs/recipe --checkpoint best --system "Be brief." --temperature 0.7
    ```
    """
    target, more = _target("chat", run, model)
    if more:
        raise ConfigError(
            f"chat reads its turns from the terminal; {more[0]!r} has no meaning here",
            where="shardtune chat",
            remedy=f"shardtune chat {target}, or shardtune generate {target} --prompt {more[0]!r}",
        )
    from shardtune.cli.chat import chat as talk
    from shardtune.evaluate.generate import Sampling
    from shardtune.run.plain_model import load_run_or_model

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    talk(load_run_or_model(target, trust=trust or ()), checkpoint, system, sampling)


@app.command()
def export(
    run: RunArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The directory to write; must be new or empty.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", "--output-dir", "-o", help="The same directory, as an option.")
    ] = None,
    checkpoint: Checkpoint = "final",
    dtype: Annotated[str, typer.Option(help="auto (the base model's) | fp32 | bf16 | fp16")] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the base weights.")] = False,
    trust: Trust = None,
) -> None:
    """Write a directory for other software, then load it in a fresh process and compare its logits (or tensors).

    **Examples**

    ```text
    shardtune export runs/recipe my-model
    shardtune export runs/recipe my-model --checkpoint best --dtype bf16
    shardtune export runs/lora my-model --merge
    ```
    """
    if dtype not in ("auto", "fp32", "bf16", "fp16"):
        raise ConfigError(f"{dtype} is not a dtype for export", where="--dtype", remedy="auto, fp32, bf16 or fp16")
    target = directory or to
    if target is None or (directory and to):
        raise ConfigError(
            f"two directories are given: {directory} and {to}" if target else "there is no directory to write",
            where="shardtune export",
            remedy=f"shardtune export {run} my-model",
        )
    from shardtune.run.api import load_run

    load_run(run, trust=trust or ()).export(target, checkpoint=checkpoint, dtype=dtype, merge=merge, report=typer.echo)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or one that shardtune export wrote.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the Hugging Face Hub: owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Anyone may read it; a new one is private otherwise.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; by default main. A new one is made.")] = None,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Replace a README.md there that somebody has written or edited.")
    ] = False,
) -> None:
    """Publish a trained model on the Hugging Face Hub, with a model card made from the run's records.

    **Examples**

    ```text
    shardtune push runs/recipe me/my-model
    shardtune push my-model me/my-model --public --revision v1
    ```
    """
    from shardtune.run.push import push as publish

    typer.echo(publish(run, repo, public=public, revision=revision, replace_card=replace_card, report=typer.echo))


@data_app.command("preview", cls=RecipeCommand)
def preview(
    recipe: RecipeArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="How many training rows to show, and of each evaluation set.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first training row to show, counted from 0.")] = 0,
) -> None:
    """Show rows as the model receives them, with the trained tokens marked, and count the rows left out.

    **Examples**

    ```text
    shardtune data preview recipe.yaml
    shardtune data preview recipe.yaml --rows 10 --start 500 data.max_length=512
    ```
    """
    from shardtune.run.dry_run import preview as show

    path, overrides = split_words(recipe)
    show(path, *overrides, rows=rows, start=start)


@config_app.command("explain")
def explain_key(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key or a group of keys, e.g. optim.lr.")] = None,
) -> None:
    """Show a key's type, default, meaning and former names; of a group its keys; without KEY all groups.

    **Examples**

    ```text
    shardtune config explain optim.lr
    shardtune config explain runner.logger
    shardtune config explain warmup_ratio
    ```
    """
    from shardtune.config.explain import explain, groups

    typer.echo(groups() if key is None else explain(key))


@app.command(cls=RecipeCommand)
def launch(
    recipe: RecipeArgument = None,
    show: Annotated[bool, typer.Option("--print", help="Print the commands; nothing is run.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each host; by default the recipe's number.")
    ] = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="The fewest hosts to continue with after a loss; by default all.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to restart after a loss.")] = 0,
    by: Annotated[
        str | None,
        typer.Option(
            help="torchrun | slurm | ray | docker | kuberay | jobset | skypilot | all; by default, to start: Slurm "
            "where a cluster answers, otherwise this machine; to print: all."
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(help="Slurm: numbers of a job array, one run each; overrides may use $SLURM_ARRAY_TASK_ID."),
    ] = None,
) -> None:
    """Start a recipe on this machine or as a job of Slurm, or print how to start it on several hosts.

    With --print nothing is started: commands for torchrun, Slurm and Ray, files for containers.

    **Examples**

    ```text
    shardtune launch recipe.yaml --nproc-per-node 8
    shardtune launch recipe.yaml --nodes 4 --nproc-per-node 8 --by slurm
    shardtune launch recipe.yaml --print --nodes 4 --nproc-per-node 8
    shardtune launch recipe.yaml --print --nodes 2 --nproc-per-node 8 --by slurm > job.sh
    shardtune launch recipe.yaml --print --by slurm --array 0-3 'runner.seed=$SLURM_ARRAY_TASK_ID' > job.sh
    shardtune launch recipe.yaml --print --nodes 2 --nproc-per-node 8 --by jobset > jobset.yaml
    ```
    """
    from shardtune.launch.jobs.commands import LAUNCHERS, launch_commands

    path, overrides = split_words(recipe)
    if by is not None and by not in (*LAUNCHERS, "all"):
        raise ConfigError(f"{by} is not a known launcher", where="--by", remedy=f"{', '.join(LAUNCHERS)} or all")
    if not show:
        from shardtune.cli.launch import Request, start

        request = Request(path, overrides, by, nodes, nproc_per_node, min_nodes, max_restarts, array)
        start(request, _train, lambda line: typer.echo(line, err=True))
        return
    if path is None:
        raise ConfigError(
            "there is no recipe to launch", where="shardtune launch", remedy="shardtune launch recipe.yaml --print"
        )
    launchers = LAUNCHERS if by in (None, "all") else (by,)
    again = {"fewest": min_nodes, "restarts": max_restarts}
    typer.echo(launch_commands(path, overrides, nodes, nproc_per_node, launchers, **again, array=array))


@app.command(cls=RecipeCommand)
def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [WORD …]", help="A recipe with plugins; words to search for: qwen3."),
    ] = None,
) -> None:
    """List the values of model.model_type, or search them: built in, from installed packages, from plugins.

    Of the built-in ones, the architectures that have been trained with the numbers of plain transformers, by how:
    packed, only rows of one length in a forward, or one row per forward. Others may train too; a probe checks each
    before it does.

    **Examples**

    ```text
    shardtune models
    shardtune models qwen3
    shardtune models recipe.yaml
    ```
    """
    from shardtune.cli.model_list import is_recipe, listing, read_plugins, search

    overrides = [word for word in words or () if is_override(word)]
    recipe = next((word for word in words or () if is_recipe(word)), None)
    wanted = [word for word in words or () if word != recipe and word not in overrides]
    read_plugins(recipe, overrides)
    for line in search(wanted) if wanted else listing():
        typer.echo(line)


@app.command(context_settings={"ignore_unknown_options": True})
def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | COMMAND",
            help="A configuration of another trainer, YAML or JSON; or its command: trl sft --learning_rate …",
        ),
    ],
    to: Annotated[
        Path | None, typer.Option("-o", "--output", help="The recipe to write; by default it is printed.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--from", help="trl | axolotl | llama-factory | torchtune | halos; by default recognised."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="The processes (GPUs) it was run with, for the rows of a step.")
    ] = None,
) -> None:
    """Write a recipe from a configuration of another trainer, and report what became of each of its keys.

    **Examples**

    ```text
    shardtune convert axolotl.yaml -o recipe.yaml
    shardtune convert sft.yaml --world-size 8 -o recipe.yaml
    shardtune convert arguments.json --from trl > recipe.yaml
    shardtune convert -o recipe.yaml trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/rows --packing
    ```
    """
    from shardtune.cli.convert import write_recipe

    write_recipe(words, trainer, to, world_size)


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the model and its file, e.g. my_model.")],
    to: Annotated[
        Path | None, typer.Option("--dir", help="The directory to write into; by default one with the model's name.")
    ] = None,
) -> None:
    """Write the files of a new model: an adapter, a recipe, a few rows, and a test that passes.

    **Examples**

    ```text
    shardtune init my_model
    shardtune init my_model --dir .
    ```
    """
    from shardtune.cli.init import next_steps, write_starter

    typer.echo(next_steps(write_starter(name, to)))


@app.command()
def version() -> None:
    """Print the version.

    **Examples**

    ```text
    shardtune version
    shardtune --version
    ```
    """
    from importlib.metadata import version as version_of

    typer.echo(f"shardtune {version_of('shardtune')}")


@app.command("help", hidden=True)
def help_(context: typer.Context) -> None:
    """Print the list of commands; `shardtune help COMMAND`, the help of one."""
    typer.echo(context.parent.get_help() if context.parent else "")


@app.command()
def env() -> None:
    """Print versions and devices, for a bug report.

    **Examples**

    ```text
    shardtune env
    ```
    """
    import torch

    from shardtune.run.directory import environment

    for name, value in environment().items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"cpu threads: {torch.get_num_threads()}")
    typer.echo(f"cuda devices: {torch.cuda.device_count()}")
    for number in range(torch.cuda.device_count()):
        typer.echo(f"cuda:{number}: {torch.cuda.get_device_name(number)}")


def main() -> None:
    """Run the command line; exit with 0, 1, 2 (an error in the input), 75 (stopped after saving) or 76 (stuck)."""
    if is_supervised():
        end_with_parent()
    try:
        code = app(standalone_mode=False, prog_name="shardtune")
    except UsageError as error:
        end(wrong_usage(error))
    except BaseException as error:
        end(error)
    if code == CTRL_C:
        end(KeyboardInterrupt())
    leave(code if isinstance(code, int) else 0)
