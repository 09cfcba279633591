"""What looks like a secret is replaced in text that others read."""

from __future__ import annotations

import pytest

from shardtune.config.secrets import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"x hf_{'aB3' * 8} y", "x *** y"),
        (f"sk-{'a1' * 12}, ghp_{'b2' * 12}", "***, ***"),
        ("https://me:pass@host/a?x=1&api_key=abc#z", "https://***@host/a?x=1&api_key=***#z"),
        ("in the variable: mine-and-long", "in the variable: ***"),
        ("given: other secret", "given: ***"),
        ("https://host/a@b:c hf_short tokens: 12 of key", "https://host/a@b:c hf_short tokens: 12 of key"),
        (
            "short of MY_TOKEN: abc; path of A_KEY: /home/someone",
            "short of MY_TOKEN: abc; path of A_KEY: /home/someone",
        ),
    ],
)
def test_tokens_and_passwords(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "mine-and-long")
    monkeypatch.setenv("MY_TOKEN", "abc")
    monkeypatch.setenv("A_KEY", "/home/someone")
    assert without_secrets(text, "other secret", None) == shown
