"""The prompts of `Run.generate` as a user gives them, each with its images, tools and settings, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtune.batch import Prompt
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.messages import ROLES
from shardtune.errors import ConfigError, DataError, counted
from shardtune.evaluate.generate import Sampling
from shardtune.run.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt.

    Attributes:
        prompt: the text of a user turn or, if `raw`, to continue; or the turns of a conversation.
        raw: without the chat template.
        images: in order.
        tools: definitions; None: none.
        template_kwargs: values for the chat template; None: none.
    """

    prompt: Any
    raw: bool
    images: Sequence[object]
    tools: object
    template_kwargs: object

    def build(self, builder: PromptBuilder, system: str | None) -> Prompt:
        """The encoded prompt, with a system turn if it has none."""
        if self.raw:
            return builder.text(str(self.prompt), self.images)
        return builder.turns(conversation(self.prompt, system), self.images, self.tools, self.template_kwargs)


def given_prompts(
    prompts: object,
    *,
    system: str | None,
    raw: bool | Sequence[bool],
    images: Sequence[object],
    tools: Sequence[object],
    template_kwargs: Mapping[str, object] | Sequence[object],
) -> list[GivenPrompt]:
    """The prompts one by one; arguments as of `Run.generate`.

    Raises:
        ConfigError: a prompt is neither text nor a list of turns, or the arguments do not fit together.
    """
    several = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
    each: list[object] = list(prompts) if isinstance(prompts, Iterable) and several else [prompts]
    for number, prompt in enumerate(each, 1):
        _check_prompt(prompt, number)
    count = len(each)
    if isinstance(prompts, str):
        tool_lists, image_lists = [tools], [images]
    else:
        tool_lists, image_lists = list(tools) or [None] * count, [_images(one) for one in images or [()] * count]
    _check_lists(tool_lists, each, "tools")
    _check_lists(image_lists, each, "images")
    raws = list(raw) if isinstance(raw, Sequence) else [bool(raw)] * count
    values = [template_kwargs] * count if isinstance(template_kwargs, Mapping) else list(template_kwargs)
    values = values or [None] * count
    for name, given in (("template_kwargs", values), ("raw", raws)):
        if len(given) != count:
            raise ConfigError(
                f"{counted(count, 'prompt')}, and {name} is given for {len(given)}",
                where=f"{name}=",
                remedy="give one for all prompts, or one for each",
            )
    found = [GivenPrompt(*one) for one in zip(each, raws, image_lists, tool_lists, values, strict=True)]
    for number, one in enumerate(found, 1):
        if one.raw:
            _check_raw(one, number, system)
    return found


def merged_sampling(given: Sampling | None, settings: Mapping[str, float | None]) -> Sampling:
    """The sampling that is given as a whole or by single settings, of which None is left out.

    Raises:
        ConfigError: it is given in both ways.
    """
    single: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if given is not None and single:
        raise ConfigError(
            f"sampling and {', '.join(single)} are both given",
            where="generate(sampling=…)",
            remedy="keep one of them: Sampling(max_new_tokens=…, temperature=…, top_p=…, seed=…)",
        )
    return replace(given or Sampling(), **single)


def check_arguments(encoder: ChatEncoder, *, given: object) -> None:
    """Refuse values for all prompts that the chat template does not take; those of one are read with it.

    Raises:
        DataError: it does not.
    """
    if not isinstance(given, Mapping) or encoder.template is None:
        return
    wrong = encoder.template.fault_of(given)
    if wrong is not None:
        raise DataError(
            wrong, where="template_kwargs (--template-kwargs)", remedy="leave it out, or give what the template reads"
        )


def conversation(prompt: str | Sequence[Mapping[str, object]], system: str | None) -> list[Mapping[str, object]]:
    """The turns of a prompt, after a system turn if it has none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_one = any(ROLES.get(str(turn.get("role", turn.get("from")))) == "system" for turn in messages)
    return [*messages] if system is None or has_one else [{"role": "system", "content": system}, *messages]


def _check_prompt(prompt: object, number: int) -> None:
    """Refuse what is neither the text of a user turn nor a list of turns, such as a row."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, Sequence) and all(isinstance(turn, Mapping) for turn in prompt):
        return
    keys = f" (its keys: {', '.join(map(str, prompt))})" if isinstance(prompt, Mapping) else ""
    shown = f"a {type(prompt).__name__}{keys}"
    raise ConfigError(
        f"the prompt is {shown}, neither text nor a list of turns",
        where=f"prompt {number:,}",
        remedy='give texts, or conversations: generate(["Hi", [{"role": "user", "content": "Hi"}]]); rows of a file '
        "are for shardtune generate --file",
    )


def _check_raw(given: GivenPrompt, number: int, system: str | None) -> None:
    """Refuse to continue, without the chat template, what needs one."""
    needs = {"--system": system, "tools": given.tools, "values for the chat template": given.template_kwargs}
    needs["messages"] = None if isinstance(given.prompt, str) else given.prompt
    named = [name for name, value in needs.items() if value]
    if named:
        raise ConfigError(
            f"raw text is continued as it is, without the chat template, and has no {', no '.join(named)}",
            where=f"prompt {number:,}",
            remedy=f"leave out {' and '.join(named)}, or --raw; a row with prompt and completion as text is continued "
            "so too: leave out its completion, and its prompt is a user turn",
        )


def _check_lists(lists: Sequence[object], prompts: Sequence[object], what: str) -> None:
    """Refuse another number of lists, of tools or images, than of prompts."""
    if len(lists) != len(prompts):
        raise ConfigError(
            f"{counted(len(prompts), 'prompt')} and {counted(len(lists), 'list')} of {what}",
            where=f"{what}=",
            remedy=f"give a list of {what} for each prompt, empty for one without",
        )


def _images(given: object) -> Sequence[object]:
    """The images of one of several prompts."""
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return given
    raise ConfigError(
        f"the images of a prompt are a {type(given).__name__}, not a list",
        where="images=",
        remedy="give a list of images for each prompt, empty for one without",
    )
