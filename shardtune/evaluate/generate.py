"""Batched answers from the sharded model on all ranks, and how an answer is compared with the one expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Prompt
from shardtune.data.loader.order import derive_seed
from shardtune.errors import ConfigError
from shardtune.models.adapter import LanguageRoot
from shardtune.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        max_new_tokens: of an answer, its end-of-turn token included.
        temperature: 0 is greedy.
        top_p: the smallest set of tokens with this much probability is drawn from.
        seed: of the draws.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Generator:
    """Answers prompts with a (sharded) model; every rank calls it with the same prompts.

    Args:
        root: the module that is sharded.
        tokenizer: turns answers into text.
        stop_ids: tokens that end an answer.
        ranks: share the prompts.
        batch_rows: prompts of one batch.
    """

    def __init__(
        self,
        root: LanguageRoot,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        ranks: Ranks,
        batch_rows: int = 64,
    ) -> None:
        self._root = root
        self._tokenizer = tokenizer
        self._stop_ids = list(stop_ids)
        self._ranks = ranks
        self._batch_rows = batch_rows

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        poll: Callable[[], None] = lambda: None,
        streamer: object | None = None,
    ) -> list[str]:
        """The text of each answer, in the order of the prompts, on every rank; as `continuations`."""
        return [self.text(tokens) for tokens in self.continuations(prompts, sampling, poll=poll, streamer=streamer)]

    @torch.no_grad()
    def continuations(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        poll: Callable[[], None] = lambda: None,
        streamer: object | None = None,
    ) -> list[list[int]]:
        """The tokens of each answer, its first stop token included, in the order of the prompts, on every rank.

        Prompts are dealt to ranks by length, so that a batch holds prompts of about one length; a rank without prompts
        in the last round answers another rank's and throws the answers away: it has to join the gathering of weights.

        Args:
            prompts: what is to be gone on from.
            sampling: how answers are drawn.
            poll: called before each batch, by all ranks alike.
            streamer: a transformers streamer, for a single prompt.
        """
        order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].tokens), number))
        companion = self._root.companion_prompt(prompts)
        num_ranks = self._ranks.num_data_ranks
        rows = self._batch_rows
        if sampling.temperature == 0:  # draws belong to a batch, so with them batches are the same on any ranks
            rows = max(1, min(rows, -(-len(prompts) // num_ranks)))
        batches = [order[start : start + rows] for start in range(0, len(order), rows)]
        mine: list[tuple[int, list[int]]] = []
        was_training = self._root.training
        self._root.eval()
        for first in range(0, len(batches), num_ranks):
            poll()
            here = first + self._ranks.data_rank
            idle = here >= len(batches)
            numbers = batches[first] if idle else batches[here]
            torch.manual_seed(derive_seed(sampling.seed, here, "generate"))
            written = self._answer([prompts[number] for number in numbers], companion, sampling, streamer)
            if not idle:
                mine.extend(zip(numbers, written, strict=True))
        self._root.train(was_training)
        found = dict(pair for part in self._ranks.gather(mine) for pair in part)
        return [found[number] for number in range(len(prompts))]

    def _answer(
        self, asked: list[Prompt], companion: Prompt | None, sampling: Sampling, streamer: object | None
    ) -> list[list[int]]:
        alone = companion is None or self._root.companion_prompt(asked) is not None
        prompts = asked if alone or companion is None else [*asked, companion]
        longest = max(len(prompt.tokens) for prompt in prompts)
        pad = self._stop_ids[0]
        input_ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
        attention_mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt.tokens)
            input_ids[row, start:] = torch.from_numpy(np.asarray(prompt.tokens, dtype=np.int64))
            attention_mask[row, start:] = 1
        arguments: dict[str, object] = {
            "max_new_tokens": sampling.max_new_tokens,
            "do_sample": sampling.temperature > 0,
            "eos_token_id": self._stop_ids,
            "pad_token_id": pad,
            "synced_gpus": self._ranks.mesh is not None,
        }
        if sampling.temperature > 0:
            arguments |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        if streamer is not None:
            arguments["streamer"] = streamer
        device = self._ranks.device
        further = self._root.prompt_inputs(prompts, longest)
        arguments |= {name: tensor.to(device) for name, tensor in further.items()}
        output = self._root.generate(input_ids.to(device), attention_mask.to(device), arguments)
        return [self._ended(row) for row in output[: len(asked), longest:].tolist()]

    def _ended(self, tokens: list[int]) -> list[int]:
        """An answer without what stands behind its first stop token."""
        stop = next((place for place, token in enumerate(tokens) if token in self._stop_ids), len(tokens) - 1)
        return tokens[: stop + 1]

    def text(self, tokens: Sequence[int]) -> str:
        """An answer's text, without its stop token."""
        kept = [token for token in tokens if token not in self._stop_ids]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True, slots=True)
class Matcher:
    """Decides whether an answer is right.

    Attributes:
        pattern: regular expression searched in answer and reference, the last match counts; group 1 (or the whole
            match) is compared. None compares the whole texts.
        match: "exact", "numeric", or a function (answer, reference) -> bool.
    """

    pattern: re.Pattern[str] | None
    match: str | Callable[[str, str], bool]

    def extract(self, text: str) -> str | None:
        """What is compared, or None where the pattern does not match."""
        if self.pattern is None:
            return text.strip()
        found = list(self.pattern.finditer(text))
        if not found:
            return None
        return (found[-1].group(1) if self.pattern.groups else found[-1].group(0)).strip()

    def correct(self, answer: str, reference: str) -> bool | None:
        """Whether an answer is right; None where the pattern does not match it."""
        got, wanted = self.extract(answer), self.extract(reference)
        if got is None:
            return None
        if wanted is None:
            wanted = reference.strip()
        if callable(self.match):
            return self._ask(self.match, got, wanted)
        if self.match == "numeric":
            left, right = _number(got), _number(wanted)
            return left is not None and left == right
        return got == wanted

    @staticmethod
    def _ask(match: Callable[[str, str], bool], got: str, wanted: str) -> bool:
        """The user's own function."""
        try:
            return bool(match(got, wanted))
        except Exception as error:
            raise ConfigError(
                f"the function of eval.match raised {type(error).__name__}: {error}",
                where=f"eval.match: the answer {got[:60]!r}, the reference {wanted[:60]!r}",
                remedy="let it return True or False for any two texts",
            ) from error


def _number(text: str) -> Decimal | None:
    """A number as people write it: 1,234.50 and $7 included."""
    try:
        return Decimal(re.sub(r"[,$€£%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None
