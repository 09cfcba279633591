"""Chat templates: the Jinja text that a recipe names, and the built-in ChatML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from shardtune.config.shown import as_written
from shardtune.errors import DataError

_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nCall a function by writing a JSON object with its name and arguments between <tool_call> and ' }}
    {{- '</tool_call>.\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' + END + '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content | trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- END + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def load_template(choice: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The Jinja text that `data.chat_template` names: null the tokenizer's own, `chatml`, the name of another one that
    the tokenizer has, or a file.

    Returns None where the recipe names none and the tokenizer has none.
    """
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"default": tokenizer.chat_template}
    if choice is None or choice in own:
        return _valid(own.get(choice or "default"), f"the tokenizer {tokenizer.name_or_path}")
    if choice == "chatml":
        return _chatml(tokenizer)
    try:
        return _valid(Path(choice).read_text(encoding="utf-8"), choice)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the chat template {as_written(choice)} cannot be read: {error}",
            where="data.chat_template",
            remedy="null (the tokenizer's own), chatml, the path of a Jinja file, or the name of a template that the "
            f"tokenizer has ({', '.join(name for name, text in own.items() if text) or 'none'})",
        ) from error


def _valid(template: str | None, where: str) -> str | None:
    """The template, if it is valid Jinja; raises `DataError` otherwise."""
    if template is not None:
        try:
            _compile_jinja_template(template)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid Jinja: {error.message}",
                where=f"data.chat_template: {where}, line {error.lineno}",
                remedy="mend that line, or choose another with data.chat_template",
            ) from error
    return template


def _chatml(tokenizer: PreTrainedTokenizerBase) -> str:
    """The builtin template; its turns end in `<|im_end|>` where that is one token, otherwise in the end token."""
    if "<|im_end|>" in tokenizer.get_vocab():
        return _CHATML.replace("END", "'<|im_end|>'")
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer has neither <|im_end|> nor an end-of-sequence token, so no turn could ever end",
            where="data.chat_template: chatml",
            remedy="give the tokenizer an eos_token (tokenizer_config.json)",
        )
    return _CHATML.replace("END", "eos_token")


def refuse_without_template(template: str | None, arguments: Mapping[str, object]) -> None:
    """Refuse values for a chat template where there is none."""
    if template is None and arguments:
        raise DataError(
            "no chat template renders these rows, so there is nothing to give values to",
            where="data.template_kwargs",
            remedy="leave it out, or set data.chat_template",
        )


def missing_template(where: str) -> DataError:
    """The error for chats without a template; the command line prints it, too, before it starts anything."""
    return DataError(
        "the tokenizer has no chat template, so conversations cannot be rendered",
        where=where,
        remedy="set data.chat_template to chatml or to a Jinja file, or use the instruction-tuned model's tokenizer; "
        "shardtune generate --raw needs no template",
    )
