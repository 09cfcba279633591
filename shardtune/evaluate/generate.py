"""Batched generation from the sharded model on all ranks, and the comparison of answers with references."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from shardtune.batch import Prompt
from shardtune.batch.seeds import derive_seed, generators_kept, seed_generators
from shardtune.data.chat.reasoning import CLOSE
from shardtune.errors import ConfigError, DataError
from shardtune.launch.progress import GENERATION, PROGRESS
from shardtune.models.generation_settings import num_beams, stop_strings
from shardtune.models.language_model import LanguageRoot
from shardtune.parallel.ranks import Ranks

BLOCK_PROMPTS = 256
"""Prompts that are sorted by length and answered before the next ones; the same number on any ranks."""
SETTINGS: Sequence[tuple[str, tuple[type, ...], Callable[[float], bool], str]] = (
    ("max_new_tokens", (int, np.integer), lambda value: value >= 1, "a whole number, 1 or more"),
    ("temperature", (int, float, np.number), lambda value: value >= 0, "a number, 0 (greedy) or more"),
    ("top_p", (int, float, np.number), lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ("seed", (int, np.integer), lambda value: True, "a whole number"),
)
"""Of `Sampling`: name, types, whether a value fits, and what does."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        max_new_tokens: of an answer, its end-of-turn token included.
        temperature: 0 is greedy.
        top_p: tokens are sampled from the smallest set with this probability.
        seed: of the sampling.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        given = asdict(self)
        for name, kinds, fits, form in SETTINGS:
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
                raise ConfigError(f"{name} is {value!r}", where=f"sampling: {name}", remedy=f"give {form}")


class Generator:
    """Answers prompts with a (sharded) model; every rank calls it with the same prompts.

    Args:
        root: the sharded module.
        tokenizer: decodes the answers.
        stop_ids: tokens that end an answer.
        ranks: among which the prompts are divided.
        batch_rows: prompts per batch.
        opening: tokens before the text of an answer that are no part of it (`ChatEncoder.answer_opening`).
    """

    def __init__(
        self,
        root: LanguageRoot,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        ranks: Ranks,
        batch_rows: int = 64,
        opening: Sequence[int] = (),
    ) -> None:
        self._root = root
        self._tokenizer = tokenizer
        self._stop_ids = list(stop_ids)
        self._ranks = ranks
        self._batch_rows = batch_rows
        self._opening = list(opening)

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        poll: Callable[[], None] = lambda: None,
        streamer: BaseStreamer | None = None,
    ) -> list[str]:
        """The text of each answer, in the order of the prompts, on every rank; as `continuations`."""
        return [self.text(tokens) for tokens in self.continuations(prompts, sampling, poll=poll, streamer=streamer)]

    def in_blocks(
        self, prompts: Sequence[Prompt], sampling: Sampling, progress: Callable[[int], None] = lambda done: None
    ) -> Iterator[list[str]]:
        """The answers to `BLOCK_PROMPTS` prompts after the other, so that the first are there before the last.

        All prompts are checked before the first is answered. The global generators are as before between two blocks.

        Args:
            prompts: to be continued.
            sampling: how answers are sampled.
            progress: receives the number of prompts that are answered, now and then.

        Raises:
            DataError: as `continuations`.
        """
        self._rooms(prompts, sampling)
        for block, start in enumerate(range(0, len(prompts), BLOCK_PROMPTS)):
            some, reached = prompts[start : start + BLOCK_PROMPTS], partial(_from, start, progress)
            with generators_kept():
                written = self.continuations(some, sampling, progress=reached, block=block)
            yield [self.text(tokens) for tokens in written]

    @torch.no_grad()
    def continuations(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        poll: Callable[[], None] = lambda: None,
        streamer: BaseStreamer | None = None,
        progress: Callable[[int], None] = lambda done: None,
        block: int = 0,
    ) -> list[list[int]]:
        """The tokens of each answer, its first stop token included, in the order of the prompts, on every rank.

        Prompts are sorted by length, so that those of a batch have about the same; exactly the same where the model
        computes a padded prompt otherwise (learned positions that count the padding). A rank without a batch in the
        last round computes another rank's and discards the answers: it has to take part in the all-gathers of the
        weights.

        Worked example: 10 prompts, `batch_rows` = 4, 2 ranks, sampling. Batches hold 4, 4 and 2 prompts. In round 1
        rank 0 has batch 0 and rank 1 batch 1; in round 2 rank 0 has batch 2, and rank 1 computes it too. Greedy
        decoding takes ceil(10 / 2) = 5 prompts per batch at most, here 4.

        Args:
            prompts: to be continued.
            sampling: how answers are sampled. An answer ends where the model's positions do.
            poll: called before each batch, by all ranks alike.
            streamer: a transformers streamer, for a single prompt.
            progress: receives the number of prompts that are answered, after each round.
            block: has a part in the seeds of samples.

        Raises:
            DataError: a prompt has no tokens, or leaves no position for an answer.
        """
        room = self._rooms(prompts, sampling)
        order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].tokens), number))
        companion = self._root.companion_prompt(prompts)
        num_ranks = self._ranks.num_data_ranks
        rows = self._batch_rows
        if (
            sampling.temperature == 0
        ):  # samples depend on the batch, so with sampling the batches are the same on any ranks
            rows = max(1, min(rows, -(-len(prompts) // num_ranks)))
        # None: prompts share batches. False and True: each is continued alone, and at one time all ranks do one kind.
        kinds = [self._root.prompts_apart(prompt) for prompt in prompts]
        rounds: list[list[list[int]]] = []
        was_training = self._root.training
        self._root.eval()
        # Prompts that leave less room have one length each, so that the other answers of a batch are no limit.
        for kind, space in itertools.product((None, False, True), sorted(set(room), reverse=True)):
            own = [number for number in order if kinds[number] is kind and room[number] == space]
            size = rows if kind is None else 1
            together = self._batched([prompts[number] for number in own], companion) if size > 1 else [len(own)]
            batches, start = [], 0
            for count in together:
                batches += [
                    own[first : min(first + size, start + count)] for first in range(start, start + count, size)
                ]
                start += count
            rounds += [batches[start : start + num_ranks] for start in range(0, len(batches), num_ranks)]
        mine: list[tuple[int, list[int]]] = []
        purpose, done = f"generate {block}" if block else "generate", 0
        for place, batches in enumerate(rounds):
            poll()
            idle = self._ranks.data_rank >= len(batches)
            numbers = batches[0] if idle else batches[self._ranks.data_rank]
            seed_generators(
                derive_seed(sampling.seed, place * num_ranks + self._ranks.data_rank, purpose), torch_alone=True
            )
            with PROGRESS.during(GENERATION):
                limited = replace(sampling, max_new_tokens=room[numbers[0]])
                written = self._answer([prompts[number] for number in numbers], companion, limited, streamer)
            if not idle:
                mine.extend(zip(numbers, written, strict=True))
            done += sum(map(len, batches))
            progress(done)
        self._root.train(was_training)
        found = dict(pair for part in self._ranks.gather(mine) for pair in part)
        return [found[number] for number in range(len(prompts))]

    def _rooms(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[int]:
        return [self._room(prompt, number, sampling) for number, prompt in enumerate(prompts, 1)]

    def _room(self, prompt: Prompt, number: int, sampling: Sampling) -> int:
        """The most tokens that an answer to a prompt may have."""
        length, positions = len(prompt.tokens), self._root.max_positions
        if not length:
            raise DataError(
                "the prompt has no tokens, so there is nothing to continue",
                where=f"prompt {number:,}",
                remedy="write some text; the tokenizer has no token that begins every text",
            )
        if positions is None:
            return sampling.max_new_tokens
        if length >= positions:
            raise DataError(
                f"the prompt has {length:,} tokens, and the model takes {positions:,} with the answer",
                where=f"prompt {number:,}",
                remedy=f"shorten it to {positions - 1:,} tokens or fewer",
            )
        return min(sampling.max_new_tokens, positions - length)

    def _batched(self, prompts: list[Prompt], companion: Prompt | None) -> list[int]:
        """How many prompts, sorted by length, may be in a batch one after the other: all, or those of each length."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        if len(set(lengths)) < 2:
            return [len(prompts)]
        alone, padded = (self._inputs(batch, companion) for batch in ([prompts[-1]], [prompts[-1], prompts[0]]))
        if not self._root.padding_changes(alone, padded):
            return [len(prompts)]
        return [len(list(group)) for _, group in itertools.groupby(lengths)]

    def _inputs(self, batch: list[Prompt], companion: Prompt | None) -> dict[str, torch.Tensor]:
        """The model's inputs for prompts, padded on the left, and for a companion where the batch needs one."""
        joins = companion is not None and self._root.companion_prompt(batch) is None
        prompts = [*batch, companion] if companion is not None and joins else batch
        longest = max(len(prompt.tokens) for prompt in prompts)
        pad = self._stop_ids[0]
        input_ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
        attention_mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt.tokens)
            input_ids[row, start:] = torch.from_numpy(np.asarray(prompt.tokens, dtype=np.int64))
            attention_mask[row, start:] = 1
        device = self._ranks.device
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            **self._root.prompt_inputs(prompts, longest),
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _answer(
        self, batch: list[Prompt], companion: Prompt | None, sampling: Sampling, streamer: BaseStreamer | None
    ) -> list[list[int]]:
        inputs = self._inputs(batch, companion)
        input_ids, attention_mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        longest = input_ids.shape[1]
        arguments: dict[str, object] = {
            **inputs,
            "max_new_tokens": sampling.max_new_tokens,
            "do_sample": sampling.temperature > 0,
            "eos_token_id": self._stop_ids,
            "pad_token_id": self._stop_ids[0],
            "synced_gpus": self._ranks.mesh is not None,
        }
        if sampling.temperature > 0:
            arguments |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        if stop_strings(self._root.model):
            arguments["tokenizer"] = self._tokenizer
        beams = num_beams(self._root.model) > 1  # with them no token is certain before the last one
        if streamer is not None and not beams:
            arguments["streamer"] = streamer
        output = self._root.generate(input_ids, attention_mask, arguments)
        if streamer is not None and beams:
            _put(streamer, output[0], longest)
        return [self._ended(row) for row in output[: len(batch), longest:].tolist()]

    def _ended(self, tokens: list[int]) -> list[int]:
        """An answer up to its first stop token, which is included."""
        stop = next((place for place, token in enumerate(tokens) if token in self._stop_ids), len(tokens) - 1)
        return tokens[: stop + 1]

    def text(self, tokens: Sequence[int]) -> str:
        """An answer's text, without its stop token; behind the last opening, if there is one."""
        size = len(self._opening)
        ends = [
            stop for stop in range(size, len(tokens) + 1) if size and [*tokens[stop - size : stop]] == self._opening
        ]
        told = tokens[max(ends, default=0) :]
        return decoded(self._tokenizer, [token for token in told if token not in self._stop_ids], special=False)


def _from(start: int, progress: Callable[[int], None], done: int) -> None:
    progress(start + done)


def _put(streamer: BaseStreamer, tokens: torch.Tensor, start: int) -> None:
    """Give a streamer a prompt and its whole answer, which begins at `start`."""
    streamer.put(tokens[:start].cpu())
    streamer.put(tokens[start:].cpu())
    streamer.end()


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | np.ndarray, *, special: bool = True) -> str:
    """Tokens as text, with or without special tokens."""
    text = tokenizer.decode(tokens, skip_special_tokens=not special)
    assert isinstance(text, str)  # a list only for a list of sequences
    return text


@dataclass(frozen=True, slots=True)
class Matcher:
    """Compares an answer with its reference.

    Attributes:
        pattern: regular expression searched in answer and reference, of which the last match counts; group 1 (or the
            whole match) is compared. None compares the whole texts, but without reasoning unless `match` is a function:
            that of an answer is never the reference's to the letter, and a row's may stand beside its text.
        match: "exact", "numeric", or a function (answer, reference) -> bool.
    """

    pattern: re.Pattern[str] | None
    match: str | Callable[[str, str], bool]

    def extract(self, text: str) -> str | None:
        """The part of a text that is compared; None where the pattern does not match."""
        if self.pattern is None:
            return text.strip()
        found = list(self.pattern.finditer(text))
        if not found:
            return None
        return (found[-1].group(1) if self.pattern.groups else found[-1].group(0)).strip()

    def correct(self, answer: str, reference: str) -> bool | None:
        """Whether an answer is right; None where the pattern does not match it."""
        if self.pattern is None and not callable(self.match):
            answer, reference = (text.rpartition(CLOSE)[2] for text in (answer, reference))
        got, expected = self.extract(answer), self.extract(reference)
        if got is None:
            return None
        if expected is None:
            expected = reference.strip()
        if callable(self.match):
            return self._call(self.match, got, expected)
        if self.match == "numeric":
            left, right = _number(got), _number(expected)
            return left is not None and left == right
        return got == expected

    @staticmethod
    def _call(match: Callable[[str, str], bool], got: str, expected: str) -> bool:
        """The result of the user's function."""
        try:
            return bool(match(got, expected))
        except Exception as error:
            raise ConfigError(
                f"the function of eval.match raised {type(error).__name__}: {error}",
                where=f"eval.match: the answer {got[:60]!r}, the reference {expected[:60]!r}",
                remedy="let it return True or False for any two texts",
            ) from error


def _number(text: str) -> Decimal | None:
    """A number from text, with separators and signs of currency: 1,234.50 and $7."""
    try:
        return Decimal(re.sub(r"[,$€£%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None
