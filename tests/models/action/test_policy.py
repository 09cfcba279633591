"""Any model that generates, answering with actions: batch or single, drawn or likeliest, saved and loaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration, LogitsProcessorList

from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.policy import SETTINGS, ActionLogits, ActionPolicy, ActionSettings, action_class
from shardtune.models.action.tokens import ActionTokens, Bins
from shardtune.models.value_head import ValueHead
from tests.support.tiny_policies import (
    BINS,
    CHUNK,
    DIMENSIONS,
    STATISTICS,
    TOP,
    VOCABULARY,
    inputs,
    make_policy,
    settings,
)

PROMPTS = ([5, 6, 7, 8], [9], [10, 11])
NEW = DIMENSIONS * CHUNK


@cache
def policy(kind: str) -> Any:
    return make_policy(kind, value_sizes=(8,))


@pytest.fixture(params=["llava", "qwen"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.lengthy
def test_a_batch_is_answered_as_each_row_alone(kind: str) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "seeds": [3, 4, 5], "temperature": 1.5, "top_p": 0.95}
    ways: list[dict[str, Any]] = [{"do_sample": False}, drawn]
    for how in ways:
        together = policy(kind).predict_action_batch(**inputs(kind, PROMPTS), **how)
        assert together.actions.shape == (3, CHUNK, DIMENSIONS)
        assert together.actions.dtype == torch.float32
        assert together.sequences.dtype == torch.int64
        assert together.logits.shape == (3, NEW, VOCABULARY)
        assert together.values.shape == (3, NEW, 1)
        answers = together.sequences[:, -NEW:]
        assert int(answers.min()) >= TOP - BINS
        assert int(answers.max()) < TOP
        assert len({tuple(row) for row in answers.tolist()}) == 3
        for row, prompt in enumerate(PROMPTS):
            own = {**how, "seeds": how["seeds"][row : row + 1]} if "seeds" in how else how
            actions, sequences, logits, values = policy(kind).predict_action_batch(**inputs(kind, [prompt]), **own)
            assert torch.equal(actions[0], together.actions[row])
            assert torch.equal(sequences[0, -NEW:], answers[row])
            torch.testing.assert_close(logits[0], together.logits[row], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values[0], together.values[row], atol=1e-4, rtol=1e-4)


def test_logits_and_values_are_those_of_one_forward(kind: str) -> None:
    """Over the prompt and the chosen tokens at once."""
    given = inputs(kind, PROMPTS[:1])
    actions, sequences, logits, values = policy(kind).predict_action_batch(**given, do_sample=False)
    again = {**given, "input_ids": sequences, "attention_mask": torch.ones_like(sequences)}
    if kind == "qwen":
        again["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, NEW))
    with torch.no_grad():
        whole = policy(kind)(**again, output_hidden_states=True)
        torch.testing.assert_close(logits, whole.logits[:, -NEW - 1 : -1], atol=1e-4, rtol=1e-4)
        wanted = policy(kind).value_head(whole.hidden_states[-1][:, -NEW - 1 : -1])
    torch.testing.assert_close(values, wanted, atol=1e-4, rtol=1e-4)
    inside = logits[..., TOP - BINS : TOP].argmax(-1) + TOP - BINS
    assert torch.equal(inside, sequences[:, -NEW:])
    decoded = settings().codec("left").decode(inside.numpy())
    assert np.array_equal(decoded, actions.numpy())


def test_without_seeds_draws_come_from_torch(kind: str) -> None:
    given, model = inputs(kind, [PROMPTS[0]] * 8), policy(kind)
    torch.manual_seed(0)
    first = model.predict_action_batch(**given)
    torch.manual_seed(0)
    assert torch.equal(first.sequences, model.predict_action_batch(**given).sequences)
    assert len({tuple(row) for row in first.sequences.tolist()}) > 1
    likeliest = model.predict_action_batch(**given, temperature=1e-4)
    assert torch.equal(likeliest.actions, model.predict_action_batch(**given, do_sample=False).actions)


@pytest.mark.lengthy
def test_seeded_draws_have_the_probabilities_of_the_model() -> None:
    """The first token of 4,000 rows of one prompt."""
    given = inputs("llava", [PROMPTS[1]])
    rows, model = 4000, make_policy("llava", action_chunks_len=1, action_token_len=1, norm_stats={})
    model.config.action_policy["norm_stats"] = {"left": {"action": {"q01": [-1.0], "q99": [1.0]}}}
    many = {name: value.repeat(rows, *[1] * (value.ndim - 1)) for name, value in given.items()}
    found = model.predict_action_batch(**many, seeds=range(rows), temperature=2.0)
    wanted = torch.softmax(found.logits[0, 0, TOP - BINS : TOP] / 2.0, -1)
    counted = torch.bincount(found.sequences[:, -1] - (TOP - BINS), minlength=BINS) / rows
    assert float((counted - wanted).abs().max()) < 4 * (0.25 / rows) ** 0.5


SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.7}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.6}]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_probabilities_are_those_that_are_drawn_from(kind: str, sampling: dict[str, Any]) -> None:
    """transformers' own scores, after all processors, beside log-probabilities, entropy and values."""
    model, given = policy(kind), inputs(kind, PROMPTS)
    found = model.predict_action_batch(**given, seeds=[1, 2, 3], **sampling)
    chosen = found.sequences[:, -NEW:]
    distribution = model.action_distribution(found.logits, **sampling)
    settings = {"top_k": 0, "top_p": 1.0, **sampling}
    drawn = model.generate(
        **given,
        **settings,
        do_sample=True,
        logits_processor=LogitsProcessorList([ActionLogits(model.action_settings.tokens)]),
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    expected = torch.log_softmax(drawn.scores[0], -1)
    assert torch.isinf(expected[:, : TOP - BINS]).all()
    torch.testing.assert_close(distribution.log_probabilities[:, 0], expected[:, TOP - BINS : TOP])
    assert torch.equal(
        distribution.log_prob(chosen)[:, 0], distribution.log_probabilities[range(3), 0, chosen[:, 0] - TOP + BINS]
    )
    single = torch.distributions.Categorical(logits=expected[:, TOP - BINS : TOP].clamp_min(-1e30))
    torch.testing.assert_close(distribution.entropy()[:, 0], single.entropy())
    if not sampling:
        whole = torch.log_softmax(found.logits, -1).gather(-1, chosen[..., None])
        assert float(distribution.log_prob(chosen).sum()) > float(whole.sum()) + 0.1, "not over the whole vocabulary"
    prompts = {name: value for name, value in given.items() if name != "input_ids"}
    again = model.evaluate_actions(given["input_ids"], chosen, **prompts, **sampling)
    torch.testing.assert_close(again.log_probs, distribution.log_prob(chosen), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again.entropy, distribution.entropy(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again.values, found.values, atol=1e-4, rtol=1e-4)
    loss = again.log_probs.sum() + again.entropy.sum() + again.values.sum()
    loss.backward()
    weights = [*model.value_head.parameters(), model.get_input_embeddings().weight]
    assert all(torch.isfinite(weight.grad).all() and weight.grad.any() for weight in weights)
    model.zero_grad()


def test_the_statistics_that_hold(kind: str) -> None:
    given = inputs(kind, PROMPTS)
    left, right = (
        policy(kind).predict_action_batch(**given, do_sample=False, unnorm_key=key).actions for key in (None, "right")
    )
    assert torch.allclose(2 * left[..., 0], right[..., 0])
    assert torch.equal(left[..., 1:], right[..., 1:])
    assert policy(kind).get_action_stats() == STATISTICS["left"]["action"]
    assert policy(kind).get_action_stats("right") == STATISTICS["right"]["action"]
    for call in (policy(kind).get_action_stats, lambda key: policy(kind).predict_action_batch(**given, unnorm_key=key)):
        with pytest.raises(ConfigError, match="'up'; there are of: left, right"):
            call("up")


@pytest.mark.lengthy
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """With its actions, and by plain transformers as the class that it is made of."""
    model = policy(kind)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    base = type(model).__mro__[2]
    assert written["architectures"] == [base.__name__]
    assert written[SETTINGS]["norm_stats"] == STATISTICS
    given = inputs(kind, PROMPTS)
    wanted = model.predict_action_batch(**given, do_sample=False)
    loaded: Any = action_class(base).from_pretrained(tmp_path)
    found = loaded.predict_action_batch(**given, do_sample=False)
    assert torch.equal(found.actions, wanted.actions)
    assert torch.equal(found.values, wanted.values)
    assert loaded.action_settings == settings(value_sizes=(8,))
    plain: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(plain) is base
    assert not isinstance(plain, ActionPolicy)
    with torch.no_grad():
        assert torch.equal(plain(**given).logits, model(**given).logits)


def test_a_model_without_a_value_head_has_values_of_zero() -> None:
    model = make_policy("llava")
    assert model.value_head is None
    assert not [name for name, _ in model.named_parameters() if "value_head" in name]
    found = model.predict_action_batch(**inputs("llava", PROMPTS), do_sample=False)
    assert found.values.shape == (3, NEW, 1)
    assert not found.values.any()


def test_the_mixin_before_a_class_of_ones_own() -> None:
    class Mine(ActionPolicy, LlavaForConditionalGeneration):
        pass

    model = Mine(policy("llava").config)
    model.load_state_dict(policy("llava").state_dict())
    given = inputs("llava", PROMPTS)
    found = model.eval().predict_action_batch(**given, do_sample=False)
    assert torch.equal(found.actions, policy("llava").predict_action_batch(**given, do_sample=False).actions)
    assert action_class(Mine) is Mine


def test_a_further_processor_of_logits_comes_first() -> None:
    class Only(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([50]), 1e4)

    given = inputs("llava", PROMPTS)
    found = policy("llava").predict_action_batch(**given, logits_processor=LogitsProcessorList([Only()]))
    assert found.sequences[:, -NEW:].unique().tolist() == [50]


def test_only_tokens_of_actions_are_left() -> None:
    scores = torch.randn(2, VOCABULARY)
    scores[:, 3] = 1e9
    left = ActionLogits(ActionTokens(TOP, Bins(BINS)))(torch.zeros(2, 1).long(), scores)  # pyright: ignore[reportArgumentType]
    assert torch.isfinite(left).sum(-1).tolist() == [BINS, BINS]
    assert torch.equal(left[:, TOP - BINS : TOP], scores[:, TOP - BINS : TOP])


def test_seeds_that_do_not_fit() -> None:
    given = inputs("llava", PROMPTS)
    with pytest.raises(ConfigError, match="2 seeds for 3 rows"):
        policy("llava").predict_action_batch(**given, seeds=[1, 2])
    with pytest.raises(ConfigError, match="no effect with do_sample=False"):
        policy("llava").predict_action_batch(**given, do_sample=False, seeds=[1, 2, 3])


def test_settings_that_are_missing_or_wrong() -> None:
    plain = make_policy("llava").config
    plain.action_policy = None
    with pytest.raises(ModelError, match="model of type 'llava' has no settings of actions"):
        ActionSettings.of(plain)
    plain.action_policy = {"action_token_len": 7, "tokens": 3}
    with pytest.raises(ModelError, match="settings of actions cannot be used"):
        ActionSettings.of(plain)


def test_a_value_head_takes_tensors_and_what_generation_returns() -> None:
    head = ValueHead(6)
    hidden = torch.randn(2, 5, 6)
    values = head(hidden)
    assert values.shape == (2, 5, 1)
    prompt = torch.randn(2, 3, 6)
    steps = [(prompt, torch.cat([prompt, hidden[:, :1]], 1))]
    steps += [(hidden[:, n : n + 1] * 0, hidden[:, n : n + 1]) for n in range(1, 5)]
    assert torch.equal(head(tuple(steps)), values)
    assert head.double()(hidden).dtype == torch.float64
    with pytest.raises(ModelError, match=r"\[2, 5, 4\] are not \[batch, tokens, 6\]"):
        head(hidden[..., :4])
    with pytest.raises(ModelError, match="no hidden states of a generation"):
        head([3, 4])
