"""A small user's directory (model, data, recipe) made on the spot, and the command line called in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer.main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from shardtune.cli.commands import main

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
RECIPE = """\
runner:
  max_steps: 2
  logger:
    log_path: runs
    experiment_name: demo
    logger_backends: [jsonl]
actor:
  micro_batch_size: 4
  global_batch_size: 4
  model:
    model_path: model
    precision: fp32
  optim:
    lr: 1.0e-3
data:
  train_data_paths: train.jsonl
  eval_data_paths: eval.jsonl
  max_length: 128
  num_workers: 0
  cache_dir: ../cache
"""


_command = functools.cache(typer.main.get_command)
"""Making the options of all commands takes longer than most commands that tests type."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_cli(*argv: str) -> Outcome:
    """`shardtune ARGV`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["shardtune", *argv]
    code = 0
    try:
        same = patch.object(typer.main, "get_command", _command)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), same:
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return Outcome(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the progress bars of transformers."""
    transformers_logging.disable_progress_bar()
    yield


def make_tokenizer(
    *, template: str | None = CHATML, eos: str | None = END, pad: str | None = PAD
) -> PreTrainedTokenizerFast:
    """Each byte is a token, and so are the three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, START, END])
    special = {name: token for name, token in (("eos_token", eos), ("pad_token", pad)) if token is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = template
    return tokenizer


def make_model(vocabulary: int, *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A tiny Llama with random weights."""
    settings = {**SIZES, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **settings))


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Questions and answers of about the same length."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} plus {number + 1}?"},
                {"role": "assistant", "content": f"It is #### {2 * number + 1}"},
            ]
        }
        for number in range(first, first + count)
    ]


def write_rows(path: Path, content: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def make_workspace(folder: Path) -> Path:
    """model/, train.jsonl (24 rows), eval.jsonl (5 rows), recipe.yaml; the cache of tokens lies beside the folder."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    with quietly():
        make_model(len(tokenizer)).save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", rows(24))
    write_rows(folder / "eval.jsonl", rows(5, first=100))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder
