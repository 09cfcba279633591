"""Batched answers equal those of plain transformers to one prompt at a time; draws, stops, what counts as right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from shardtune.batch import Prompt, Sample
from shardtune.data.loader.packing import pack
from shardtune.errors import ConfigError, DataError
from shardtune.evaluate.generate import Generator, Matcher, Sampling
from shardtune.models.causal_lm import CausalLM
from shardtune.models.language_model import LanguageRoot
from shardtune.parallel.ranks import Ranks
from tests.support import tiny_checkpoint as tiny

STOP = 2
ALONE = Ranks(0, 1, torch.device("cpu"))
KINDS = ("llama", "mistral", "gemma3", "qwen3_moe")
PROMPTS = [np.arange(1, 1 + length, dtype=np.int32) * 7 % 60 + 3 for length in (3, 21, 1, 12, 30, 12)]


class Words:
    """Tokens as numbers in a text."""

    @staticmethod
    def decode(ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def packed(model: PreTrainedModel) -> LanguageRoot:
    """The model as it is in training: its attention keeps packed rows apart, and it has been trained on some."""
    adapter = CausalLM(model.config, precision="fp32", model=model)
    root = LanguageRoot(adapter, adapter.build())
    assert adapter.sharing.packs
    samples = [Sample(prompt, np.ones(len(prompt), np.float32)) for prompt in PROMPTS[:2]]
    weight = sum(sample.length - 1.0 for sample in samples)
    root(pack(samples, [0, 1], {"ce": weight}))["ce"].total.backward()
    return root


def answers(
    root: LanguageRoot, prompts: list[np.ndarray], sampling: Sampling, rows: int = 4, stop: int = STOP
) -> list[list[int]]:
    asked = [Prompt(prompt) for prompt in prompts]
    made = Generator(root, Words(), [stop], ALONE, rows).answers(asked, sampling)  # pyright: ignore
    return [[int(word) for word in text.split()] for text in made]


def alone(model: PreTrainedModel, prompt: np.ndarray, count: int, stop: int = STOP, **settings: Any) -> list[int]:
    """What plain transformers answers to one prompt, up to its stop."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    given = {"max_new_tokens": count, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0, **settings}
    made = model.generate(input_ids=ids, **given)[0, len(prompt) :].tolist()
    return made[: made.index(stop)] if stop in made else made


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS)
def test_batches_answer_as_plain_transformers_does_alone(kind: str) -> None:
    """Windows of 8 tokens (mistral, gemma3), prompts of 1 to 30 tokens, left-padded together."""
    reference = [alone(tiny.model(kind), prompt, 12) for prompt in PROMPTS]
    got = answers(packed(tiny.model(kind)), PROMPTS, Sampling(max_new_tokens=12))
    assert got == reference
    assert len({tuple(answer) for answer in got}) > 1


@pytest.mark.lengthy
def test_a_router_that_is_trained_to_be_even_answers_as_ever() -> None:
    """With `output_router_logits` transformers makes a balance loss of each forward; with a cache there is none."""
    model = tiny.model("qwen3_moe")
    reference = [alone(model, prompt, 12) for prompt in PROMPTS]
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.1})
    assert answers(packed(model), PROMPTS, Sampling(max_new_tokens=12)) == reference


def test_answers_do_not_depend_on_the_batches() -> None:
    root = packed(tiny.model("mistral"))
    sampling = Sampling(max_new_tokens=8)
    assert answers(root, PROMPTS, sampling, rows=1) == answers(root, PROMPTS, sampling, rows=64)


def test_an_answer_ends_where_the_models_positions_do() -> None:
    """Learned positions have an end; what an answer may have beside longer prompts, it has alone."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    reference = [alone(model, prompt, min(12, 32 - len(prompt))) for prompt in PROMPTS]
    assert answers(packed(model), PROMPTS, Sampling(max_new_tokens=12), rows=6) == reference
    assert [len(answer) for answer in reference] == [12, 11, 12, 12, 2, 12]


@pytest.mark.parametrize(
    ("length", "says"), [(32, "prompt has 32 tokens, and the model takes 32 with the answer"), (0, "has no tokens")]
)
def test_a_prompt_without_tokens_or_without_room_for_an_answer_is_named(length: int, says: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(DataError, match=says) as found:
        answers(packed(model), [PROMPTS[0], np.full(length, 5, np.int32)], Sampling(2))
    assert found.value.where == "prompt 2"


def in_blocks(
    root: LanguageRoot, sampling: Sampling, prompts: list[np.ndarray] = PROMPTS
) -> tuple[list[list[int]], list[int]]:
    """The answers block by block, joined, and the numbers that progress received."""
    done: list[int] = []
    generator = Generator(root, Words(), [STOP], ALONE, 2)  # pyright: ignore
    blocks = list(generator.in_blocks([Prompt(prompt) for prompt in prompts], sampling, done.append))
    return [[int(word) for word in text.split()] for block in blocks for text in block], done


def test_answers_come_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    root, sampling = packed(tiny.model("mistral")), Sampling(8, temperature=1.5, seed=1)
    whole = answers(root, PROMPTS, Sampling(8))
    drawn, done = in_blocks(root, sampling)
    assert drawn == answers(root, PROMPTS, sampling, rows=2)  # they fit into one block
    assert done == [2, 4, 6]
    monkeypatch.setattr("shardtune.evaluate.generate.BLOCK_PROMPTS", 4)
    assert in_blocks(root, Sampling(8)) == (whole, [2, 4, 6])
    state = torch.random.get_rng_state()
    first, again = (in_blocks(root, sampling)[0] for _ in range(2))
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), state)
    blocks, _ = in_blocks(root, sampling, prompts=[PROMPTS[3]] * 8)
    assert blocks[:4] != blocks[4:], "each block has draws of its own"


def test_no_prompt_is_answered_if_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block's prompts are looked at before the first one is answered."""
    monkeypatch.setattr("shardtune.evaluate.generate.BLOCK_PROMPTS", 1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    prompts = [Prompt(PROMPTS[0]), Prompt(np.full(32, 5, np.int32))]
    with pytest.raises(DataError, match="prompt has 32 tokens") as found:
        next(Generator(packed(model), Words(), [STOP], ALONE).in_blocks(prompts, Sampling(2)))  # pyright: ignore
    assert found.value.where == "prompt 2"


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_p": 2.0},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"seed": 1.5},
    ],
)
def test_settings_of_sampling_that_are_none_are_refused(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}")):
        Sampling(**given)


def test_generation_ends_where_all_answers_have() -> None:
    """The stop is whatever token comes third; nothing is computed beyond it, and it is no part of the answer."""
    root = packed(tiny.model("llama"))
    first = answers(root, PROMPTS[:1], Sampling(12))[0]
    stop = first[2]
    made: list[torch.Tensor] = []
    inner = root.generate

    def generate(*given: Any) -> torch.Tensor:
        made.append(inner(*given))
        return made[-1]

    root.generate = generate
    text = Generator(root, Words(), [stop], ALONE).answers([Prompt(PROMPTS[0])], Sampling(12))[0]  # pyright: ignore
    until = first.index(stop)
    assert text == Words.decode(first[:until])
    assert made[0].shape[1] == len(PROMPTS[0]) + until + 1


def test_draws_repeat_with_the_seed_and_only_with_it() -> None:
    root = packed(tiny.model("llama"))
    first = answers(root, PROMPTS, Sampling(8, temperature=1.5, seed=1))
    torch.manual_seed(123)
    assert answers(root, PROMPTS, Sampling(8, temperature=1.5, seed=1)) == first
    assert answers(root, PROMPTS, Sampling(8, temperature=1.5, seed=2)) != first


@pytest.mark.lengthy
def test_a_small_top_p_is_greedy() -> None:
    root = packed(tiny.model("llama"))
    narrow = answers(root, PROMPTS, Sampling(6, temperature=1.0, top_p=1e-6, seed=3))
    assert narrow == answers(root, PROMPTS, Sampling(6))


SETTINGS = {
    "several": {"num_beams": 3, "num_return_sequences": 2},
    "dict": {"return_dict_in_generate": True},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "once": {"no_repeat_ngram_size": 1},
    "least": {"min_length": 12},
}
"""Such as a model's generation_config.json may have."""
ONE = {"num_return_sequences": 1, "return_dict_in_generate": False}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_own_settings_of_generation_give_one_answer_each_as_without_padding(settings: dict[str, Any]) -> None:
    """Padding is the token that ends an answer here, and no setting may take it for a part of the prompt."""
    model = tiny.model("llama")
    prompts = [prompt[prompt != STOP] for prompt in PROMPTS[:4]]
    model.generation_config.update(**settings)
    first = alone(model, prompts[2], 12, **ONE)[2]
    expected = [alone(model, prompt, 12, stop=first, **ONE) for prompt in prompts]
    assert answers(packed(model), prompts, Sampling(12), stop=first) == expected


def test_beams_are_given_to_a_streamer_when_they_have_ended() -> None:
    model, seen = tiny.model("llama"), []
    model.generation_config.num_beams = 3

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.append(value.tolist())

        def end(self) -> None:
            seen.append("end")

    generator = Generator(packed(model), Words(), [STOP], ALONE)  # pyright: ignore
    answer = generator.continuations([Prompt(PROMPTS[0])], Sampling(4), streamer=Streamer())[0]
    assert seen == [PROMPTS[0].tolist(), answer, "end"]


def test_a_model_in_training_stays_so() -> None:
    root = packed(tiny.model("llama"))
    root.train()
    answers(root, PROMPTS[:1], Sampling(2))
    assert root.training


# -- what counts as right ------------------------------------------------------------------------------------------


def matcher(pattern: str | None, match: str | Callable[[str, str], bool] = "exact") -> Matcher:
    return Matcher(re.compile(pattern) if pattern else None, match)


@pytest.mark.parametrize(
    ("made", "answer", "reference", "right"),
    [
        (matcher(None), " yes\n", "yes", True),
        (matcher(None), "yes, sir", "yes", False),
        (matcher(None), "<think>\nno or yes\n</think>\n\nyes", "yes", True),  # of rows with reasoning_content
        (matcher(None, "numeric"), "2 + 2\n</think>\n\n4", "<think>it is 4</think>4.0", True),
        (matcher(None), "<think>\nyes", "yes", False),
        (matcher(None, lambda got, wanted: got == f"<think>x</think>{wanted}"), "<think>x</think>y", "y", True),
        (matcher(r"#### (\S+)"), "so #### 4 no, #### 5", "it is #### 5", True),
        (matcher(r"#### (\S+)"), "five", "#### 5", None),
        (matcher(r"#### (\S+)"), "#### 5", "5", True),
        (matcher(r"#### (\S+)"), "#### 5.0", "#### 5", False),
        (matcher(r"#### (\S+)", "numeric"), "#### 5.0", "#### 5", True),
        (matcher(r"#### (\S+)", "numeric"), "#### $1,234.50", "#### 1234.5", True),
        (matcher(r"#### (\S+)", "numeric"), "#### five", "#### 5", False),
        (matcher(r"#### (\S+)", "numeric"), "#### five", "#### five", False),
        (matcher(r"(\w+)$", lambda got, wanted: got.lower() == wanted.lower()), "it is YES", "yes", True),
    ],
)
def test_what_counts_as_right(made: Matcher, answer: str, reference: str, right: bool | None) -> None:
    assert made.correct(answer, reference) is right


def test_a_matching_function_that_raises_is_named() -> None:
    def match(got: str, wanted: str) -> bool:
        return float(got) == float(wanted)

    with pytest.raises(ConfigError, match=r"(?s)eval.match raised ValueError.*'many'"):
        matcher(None, match).correct("many", "5")
