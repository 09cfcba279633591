"""A tiny model, tokenizer and rows on disk, and what a test compares of the runs made with them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and three special tokens, with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([PAD, START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, width: int = 16, dropout: float = 0.0) -> Qwen2ForCausalLM:
    """Two layers of random weights."""
    config = Qwen2Config(
        vocab_size=272,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def rows(number: int, start: int = 0) -> list[dict[str, str]]:
    """Questions and answers of ragged length."""
    return [
        {"prompt": f"say {index} {'please ' * (index % 4)}", "completion": f"{index * 7 % 13} " * (1 + index * 5 % 6)}
        for index in range(start, start + number)
    ]


def write_rows(file: Path, given: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return file


@dataclass(frozen=True)
class Tiny:
    """Inputs of a run in a folder: `model/`, `train.jsonl`, `eval.jsonl`.

    Attributes:
        save_interval: of its recipes; -1, at the end alone, takes a third less.
    """

    folder: Path
    save_interval: int = 1

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def recipe(self, name: str = "run", **changes: Any) -> dict[str, Any]:
        """A recipe of two epochs of four steps, the last one smaller.

        Args:
            name: the run directory's.
            changes: dotted keys, dots written as two underscores: `runner__max_steps=3`.
        """
        values: dict[str, Any] = {
            "runner": {
                "max_epochs": 2,
                "save_interval": self.save_interval,
                "keep_last": 100,
                "logger": {"log_path": str(self.runs), "experiment_name": name, "logger_backends": ["jsonl"]},
            },
            "actor": {
                "micro_batch_size": 3,
                "global_batch_size": 6,
                "model": {"model_path": str(self.folder / "model"), "precision": "fp32"},
                "optim": {"lr": 1e-3},
            },
            "data": {
                "train_data_paths": str(self.folder / "train.jsonl"),
                "cache_dir": str(self.folder / "cache"),
                "max_length": 96,
                "num_workers": 0,
            },
        }
        for dotted, value in changes.items():
            *sections, key = dotted.split("__")
            place = values
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return values

    def run(self, name: str = "run") -> Path:
        return self.runs / name


def make_tiny(
    folder: Path, *, width: int = 16, dropout: float = 0.0, train_rows: int = 21, save_interval: int = 1
) -> Tiny:
    """Write model, tokenizer and rows."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, width=width, dropout=dropout).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", rows(train_rows))
    write_rows(folder / "eval.jsonl", rows(7, start=100))
    return Tiny(folder, save_interval)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's files, by file and name: weights and optimizer state, bit for bit."""
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[f"{file.relative_to(checkpoint)}:{name}"] = tensor
    assert found, f"no tensors in {checkpoint}"
    return found


def assert_same_tensors(first: Path, second: Path) -> None:
    """Two checkpoints hold bitwise the same tensors."""
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} tensors differ, the first is {different[0]}"


def flip_bit(file: Path, place: float = 0.5, bit: int = 0) -> None:
    """Flip a bit of the byte at a fraction of a file's length; a hard link to the file elsewhere stays as it is."""
    content = bytearray(file.read_bytes())
    content[min(int(place * len(content)), len(content) - 1)] ^= 1 << bit
    file.unlink()
    file.write_bytes(content)


def as_saved_before_checksums(checkpoint: Path) -> None:
    """Give a checkpoint the form of versions without checksums, run ids and indices of tensors."""
    file = checkpoint / "state.json"
    indices = list(checkpoint.rglob("index.json"))
    assert indices
    for index in indices:
        index.unlink()
    known = json.loads(file.read_text())
    sizes = {
        name: sum(size for size, _ in parts)
        for name, parts in known["files"].items()
        if not name.endswith("/index.json")
    }
    file.write_text(json.dumps({"step": known["step"], "state": known["state"], "files": sizes}))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in found]


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


@contextmanager
def recorded_rows() -> Iterator[list[list[int]]]:
    """The rows of every step that the loader hands out meanwhile."""
    from shardtune.data.loader.step_loader import StepLoader

    seen: list[list[int]] = []
    original = StepLoader.steps

    def steps(self: StepLoader, state: Any) -> Iterator[Any]:
        for step in original(self, state):
            seen.append(step.rows.tolist())
            yield step

    StepLoader.steps = steps
    try:
        yield seen
    finally:
        StepLoader.steps = original


@contextmanager
def signal_after(step: int, number: int = signal.SIGTERM, times: int = 1) -> Iterator[None]:
    """Meanwhile a signal reaches this process when the runner has done a step."""
    from shardtune.training.runner import SFTRunner

    original = SFTRunner._after_step

    def after(self: SFTRunner, **known: Any) -> None:
        if self._actor.step == step:
            for _ in range(times):
                os.kill(os.getpid(), number)
        original(self, **known)

    SFTRunner._after_step = after
    try:
        yield
    finally:
        SFTRunner._after_step = original


def train_on_ranks(num_ranks: int, jobs: list[dict[str, Any]], timeout: float = 120.0) -> list[list[list[int]]]:
    """Train each recipe of `jobs` in turn on several ranks, which are started once.

    Returns:
        Of each job, the rows of its steps, as rank 0 saw them.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, free_ports(len(jobs)), jobs, folder)
        ranks = [context.Process(target=_rank_main, args=(rank, *given)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        until = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < until:
                if any(process.exitcode for process in ranks):
                    until = min(until, time.monotonic() + 2)
                time.sleep(0.02)
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        told = "\n".join(file.read_text() for file in sorted(Path(folder).glob("*.error")))
        assert codes == [0] * num_ranks, f"exit codes {codes}\n{told}"
        return json.loads((Path(folder) / "rows.json").read_text())


def free_ports(number: int) -> list[int]:
    """Ports that are free now, all different, and below those that the system gives to connections of other tests."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == number:
            return ports
    raise AssertionError("no port is free")


def _rank_main(rank: int, num_ranks: int, ports: list[int], jobs: list[dict[str, Any]], folder: str) -> None:
    import shardtune

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    try:
        seen = []
        for port, job in zip(ports, jobs, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            with recorded_rows() as rows_of_steps:
                shardtune.train(job)
            seen.append(rows_of_steps)
        if rank == 0:
            (Path(folder) / "rows.json").write_text(json.dumps(seen))
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
