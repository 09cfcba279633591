"""`shardtune generate` and `shardtune chat`: answers of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.arguments import (
    AdapterOption,
    Checkpoint,
    MaxNewTokens,
    ModelOption,
    Prepared,
    RunOrModel,
    Seed,
    Temperature,
    TemplateKwargs,
    TopP,
    Trust,
    prepared_without_file,
)
from shardtune.cli.first_rank import is_first_rank
from shardtune.cli.results import results_alone
from shardtune.cli.starting import importing
from shardtune.cli.words import refuse_keys, refuse_models
from shardtune.data.json_rows import DECODER, RepeatedKeyError
from shardtune.errors import ConfigError, ShardtuneError, printable

if TYPE_CHECKING:
    from shardtune.cli.prompt_files import Question
    from shardtune.evaluate.generate import Sampling
    from shardtune.run.given_prompts import GivenPrompt

OPTIONS: Mapping[str, str] = {
    "eval.max_new_tokens": "--max-new-tokens",
    "eval.temperature": "--temperature",
    "eval.top_p": "--top-p",
    "runner.seed": "--seed",
    "data.system_prompt": "--system",
    "data.template_kwargs": "--template-kwargs",
    "actor.model.model_path": "--model",
}
"""Of both commands, by the key of a recipe that sets the same."""
AS_TEXT: Mapping[str, str] = {"generate": "--prompt {}", "chat": "type {} in the chat"}
"""How a word is given to the model as a text."""


PromptFile = Annotated[
    Path | None,
    typer.Option(
        help="A file of rows as for training (JSON lines, JSON, CSV, Parquet, Arrow), with or without their answers: "
        "messages, conversations, question, instruction or prompt, with images, tools and chat_template_kwargs; "
        "answered in order, a line of JSON for each. Relative paths of images start at the file."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")]


def generate(
    run: RunOrModel = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A user turn to answer; may be repeated.")
    ] = None,
    file: PromptFile = None,
    prepared: Prepared = False,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="An image for every prompt, in the place of &lt;image&gt; or before the text; a path or a URL."
        ),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="A system turn before each prompt that has none.")] = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    template_kwargs: TemplateKwargs = None,
    trust: Trust = None,
) -> None:
    """Answer prompts with a run's model or any other: plain text for prompts, JSON lines for --file.

    Decoding is greedy unless --temperature is given. Of the model's generation_config.json temperature, top_k and top_p
    have no effect; its other settings, such as num_beams and repetition_penalty, have that of transformers. A row of
    --file is asked as training shows it: system, history and question, without the assistant's turns at its end;
    data.transform and data.columns of the run's recipe are applied first. Its line has row (its number in the file),
    the row's other keys, prompt, reference (its own answer, if any) and answer. Lines are written for 256 prompts at a
    time, as soon as these are answered. Paths that are typed start at the working directory.

    **Examples**

    ```text
    shardtune generate runs/recipe --prompt "What is 2 plus 3?"
    shardtune generate Qwen/Qwen3-0.6B "What is 2 plus 3?"
    shardtune generate runs/recipe --prompt "What is this?" --image photo.jpg
    shardtune generate runs/recipe --file questions.jsonl > answers.jsonl
    shardtune generate runs/recipe --prompt "A rhyme, please." --temperature 0.8 --top-p 0.9 --seed 7
    ```
    """
    target, typed = _target("generate", run, model, adapter)
    prompts = [*typed, *(prompt or ())]
    _check_asked(target, prompts, file, image, prepared)
    with importing():
        from shardtune.cli.answering_pace import AnsweringPace
        from shardtune.cli.prompt_files import Question, answer_line, read_prompts
        from shardtune.run.given_prompts import check_arguments
        from shardtune.run.plain_model import load_run_or_model

    given = _template_kwargs(template_kwargs)
    with results_alone():
        source = load_run_or_model(target, trust=trust or ())
    questions = [Question(text, image or []) for text in prompts]
    if file is not None:
        questions, notes = read_prompts(file, source.rows_as_trained(prepared=prepared))
        for note in notes if is_first_rank() else ():
            typer.echo(f"generate: {note}", err=True)
    sampling, shown = _sampling("generate", max_new_tokens, temperature, top_p, seed), is_first_rank()
    values = _of_each(questions, given)
    pace = AnsweringPace(len(questions), lambda line: typer.echo(f"generate: {line}", err=True))
    with results_alone() as show, _rows_in_errors(file, questions):
        answers = source.answers(
            _prompts(questions, system, raw, values),
            sampling,
            checkpoint=checkpoint,
            system=system,
            folder=file.parent if file else None,
            check=partial(check_arguments, given=values),
            progress=pace.update if file and shown else lambda done: None,
        )
        for question, answer in zip(questions, answers, strict=True):
            if shown:
                show(answer_line(question, answer) if file else printable(answer))


def _prompts(
    questions: Sequence[Question], system: str | None, raw: bool, values: Mapping[str, object] | Sequence[object]
) -> list[GivenPrompt]:
    from shardtune.run.given_prompts import given_prompts

    return given_prompts(
        [question.prompt for question in questions],
        system=system,
        raw=[raw or question.raw for question in questions],
        images=[question.images for question in questions],
        tools=[question.tools for question in questions],
        template_kwargs=values,
    )


def _of_each(questions: Sequence[Question], given: dict[str, object]) -> dict[str, object] | list[dict[str, object]]:
    """The arguments of the chat template: one for all prompts, or one for each where a row has its own."""
    if not any(question.template_kwargs for question in questions):
        return given
    return [{**given, **question.template_kwargs} for question in questions]


@contextmanager
def _rows_in_errors(file: Path | None, questions: Sequence[Question]) -> Iterator[None]:
    """Errors on a prompt of a file name its line: lines that are empty or dropped are no prompts."""
    try:
        yield
    except ShardtuneError as error:
        found = re.fullmatch(r"prompt ([\d,]+)", error.where or "")
        if file is None or found is None:
            raise
        from shardtune.cli.prompt_files import place_of

        row = questions[int(found[1].replace(",", "")) - 1].kept["row"]
        assert isinstance(row, int)
        raise type(error)(error.what, where=place_of(file, row), remedy=error.remedy) from error


def _check_asked(
    target: str, prompts: Sequence[str], file: Path | None, image: Sequence[str] | None, prepared: bool
) -> None:
    """Refuse what does not fit together: prompts that are typed, a file of rows, and the options of each."""
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
    if prepared and file is None:
        raise prepared_without_file("generate")


def _sampling(command: str, max_new_tokens: int, temperature: float, top_p: float | None, seed: int | None) -> Sampling:
    """How answers are sampled; a note where an option has no effect, as decoding is greedy."""
    from shardtune.evaluate.generate import Sampling

    idle = [name for name, value in (("--top-p", top_p), ("--seed", seed)) if value is not None]
    if temperature == 0 and idle:
        have = "have" if len(idle) > 1 else "has"
        typer.echo(
            f"{command}: {' and '.join(idle)} {have} no effect: decoding is greedy without --temperature", err=True
        )
    return Sampling(max_new_tokens, temperature, 1.0 if top_p is None else top_p, seed or 0)


def chat(
    run: RunOrModel = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    checkpoint: Checkpoint = "final",
    system: Annotated[str | None, typer.Option(help="The system turn.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    template_kwargs: TemplateKwargs = None,
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
    target, more = _target("chat", run, model, adapter)
    if more:
        raise ConfigError(
            f"chat reads its turns from the terminal; {more[0]!r} has no meaning here",
            where="shardtune chat",
            remedy=f"shardtune chat {target}, or shardtune generate {target} --prompt {more[0]!r}",
        )
    with importing():
        from shardtune.cli.chat import chat as talk
        from shardtune.run.plain_model import load_run_or_model

    given = _template_kwargs(template_kwargs)
    sampling = _sampling("chat", max_new_tokens, temperature, top_p, seed)
    talk(load_run_or_model(target, trust=trust or ()), checkpoint, system, sampling, given)


def _template_kwargs(text: str | None) -> dict[str, object]:
    """The values of the option `--template-kwargs`."""
    try:
        found = DECODER.decode(text or "{}")
    except RepeatedKeyError as error:
        raise ConfigError(str(error), where="--template-kwargs", remedy="leave one of them") from error
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    raise ConfigError(
        f"{text!r} is no JSON object",
        where="--template-kwargs",
        remedy="write names with their values: --template-kwargs '{\"enable_thinking\": false}'",
    )


def _target(command: str, words: list[str] | None, model: str | None, adapter: str | None) -> tuple[str, list[str]]:
    """The run or model that is named, and the words after it, which are no keys of a recipe."""
    refuse_keys(command, words or (), OPTIONS, f"as a text to the model: {AS_TEXT[command]}")
    if adapter is not None:
        raise ConfigError(
            "an adapter has no option of its own: its directory names the model that it belongs to",
            where=f"shardtune {command}",
            remedy=f"write it in the place of the model: shardtune {command} {adapter}",
        )
    named = [*([] if model is None else [model]), *(words or ())]
    if not named:
        raise ConfigError(
            "there is no run and no model",
            where=f"shardtune {command}",
            remedy=f"shardtune {command} runs/recipe, or a model: shardtune {command} Qwen/Qwen3-0.6B",
        )
    refuse_models(command, named[1:], AS_TEXT[command])
    return named[0], named[1:]
