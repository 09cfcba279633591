"""The reference of the command line, made from the commands' own help: `python -m shardtune.cli.reference`."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup

from shardtune.cli.commands import app

PROGRAM = "shardtune"


def all_commands() -> str:
    """Markdown with a section for each command: its usage, its help, its arguments and options."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    return "\n".join(_sections(root, typer.Context(root, info_name=PROGRAM)))


def _sections(group: TyperGroup, parent: typer.Context) -> Iterator[str]:
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=name, parent=parent)
        if isinstance(command, TyperGroup):
            yield from _sections(command, context)
        elif isinstance(command, TyperCommand) and not command.hidden:
            yield _section(command, context)


def _section(command: TyperCommand, context: typer.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [f"| {_code(record[0])} | {_cell(record[1])} |" for record in records if record is not None]
    table = ["", "| argument or option | meaning |", "|---|---|", *rows, ""]
    text = (command.help or "").replace("```text", "```")
    return "\n".join([f"## {context.command_path}", "", "```", usage, "```", "", text, *table])


def _code(names: str) -> str:
    return f"`{names}`".replace("|", r"\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", r"\<")


if __name__ == "__main__":
    print(all_commands())
