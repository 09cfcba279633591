"""What lm-evaluation-harness evaluates in a run: the tokenizer as it is in `final/`."""

from __future__ import annotations

import pytest

from shardtune.errors import ConfigError
from shardtune.training.worker.model_export import TextParts
from shardtune.training.worker.task_harness import _tokenizer
from tests.support.workspace import make_tokenizer


def test_the_tokenizer_has_the_runs_template_and_the_runs_own_stays_as_it_is() -> None:
    own = make_tokenizer()
    before = own.chat_template
    found = _tokenizer(TextParts(own, None, "{{ messages }}"))
    assert found.chat_template == "{{ messages }}"
    assert own.chat_template == before
    assert _tokenizer(TextParts(own, None)).chat_template == before


def test_a_run_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.harness needs a tokenizer"):
        _tokenizer(TextParts(None, None))
