"""Models that packing or the chunked head would compute wrongly are found out, and train with the right numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from shardtune.config import load_recipe
from shardtune.errors import ModelError
from shardtune.models.packed_attention import DOCUMENTS, document_attention
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import (
    flat_script,
    make_tokenizer,
    quiet,
    recipe,
    run_flat,
    run_recipe,
    run_recipes,
    save_model,
    save_rows,
)
from tests.support.tiny_architectures import DECODERS, shake, tiny_config

pytestmark = pytest.mark.lengthy

STEPS = 3
PRECISIONS = ("fp64", "fp32", "bf16")


BY_LENGTH = "rows of one length share a forward"


def rows_of(folder: Path, count: int = 9) -> Path:
    return save_rows(folder / "rows.jsonl", count, longest=60)


def save_family(family: str, folder: Path) -> Path:
    """A tiny model of one of transformers' families."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family, DECODERS.get(family, {})))
    shake(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def attention() -> Iterator[Callable[[Any], None]]:
    """Puts another function in the place of our attention."""

    def put(function: Any) -> None:
        AttentionInterface.register(DOCUMENTS, function)

    yield put
    put(document_attention)


def leaking(*args: Any, cu_seq_lens_q: torch.Tensor, max_length_q: int, **kwargs: Any) -> Any:
    """All packed rows as one document."""
    total = int(cu_seq_lens_q[-1])
    whole = torch.tensor([0, total], dtype=torch.int32)
    return document_attention(*args, cu_seq_lens_q=whole, max_length_q=total, **kwargs)


def without_window(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    """Rows apart, but each sees all of itself."""
    return document_attention(*args, sliding_window=None, **kwargs)


@pytest.mark.parametrize("precision", slow_except(PRECISIONS, "fp64", "bf16"))
@pytest.mark.parametrize(
    ("kind", "function", "note"),
    [
        ("dense", leaking, "packed rows see each other in this model: one row per forward"),
        ("mixtral", leaking, "packed rows see each other in this model: one row per forward"),
        ("mistral", without_window, "its attention over packed rows differs from its own: one row per forward"),
    ],
    ids=["leak", "leak among experts", "no window"],
)
def test_wrong_attention_is_caught_and_training_goes_row_by_row(
    attention: Callable, tmp_path: Path, kind: str, function: Any, note: str, precision: str
) -> None:
    model, rows = save_model(kind, tmp_path / "model"), rows_of(tmp_path)
    values = recipe(model, rows, runner__max_steps=STEPS, actor__model__precision=precision)
    attention(function)
    trace = run_recipe(values)
    assert trace.notes == [note, BY_LENGTH]
    if precision == "fp64":
        flat = run_flat(model, rows, precision="fp64", steps=STEPS)
        assert trace.losses == pytest.approx(flat.losses, abs=1e-10)
        assert trace.norms == pytest.approx(flat.norms, abs=1e-10)


@pytest.mark.parametrize("precision", slow_except(PRECISIONS, "fp64", "bf16"))
@pytest.mark.parametrize("kind", ["dense", "mixtral", "gemma", "mistral"])
def test_right_models_are_left_alone(tmp_path: Path, kind: str, precision: str) -> None:
    model, rows = save_model(kind, tmp_path / "model"), rows_of(tmp_path)
    worker = SFTWorker(load_recipe(recipe(model, rows, actor__model__precision=precision)), report=quiet)
    worker.setup()
    assert worker.notes == []
    assert worker.adapter.sharing.packs


class Mixing(nn.Module):
    """A layer that adds a little of all tokens of a forward to each: rows see each other, packed or in a batch."""

    def __init__(self, inner: nn.Module, size: float) -> None:
        super().__init__()
        self.inner, self.size = inner, size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        return hidden + self.size * hidden[..., :1].mean()


SEEN = "packed rows see each other in this model: one row per forward"


@pytest.mark.parametrize(
    ("kind", "function", "precision", "size", "notes"),
    [
        ("mixtral", document_attention, "fp64", 4e-12, []),  # moves logits by 3e-13
        ("mixtral", document_attention, "fp64", 2e-9, [SEEN]),  # by 1e-10
        ("dense", document_attention, "fp64", 2e-10, [SEEN]),  # by 3e-13
        ("mixtral", document_attention, "fp32", 5e-5, []),  # by 3e-6
        ("mixtral", document_attention, "fp32", 5e-3, [SEEN]),  # by 3e-4
        ("dense", document_attention, "fp32", 3e-3, [SEEN]),  # by 4e-6
        ("mixtral", leaking, "fp64", 4e-12, [SEEN, BY_LENGTH]),  # in a batch of rows of one length
    ],
)
def test_logits_may_move_by_the_rounding_of_experts_alone(
    attention: Callable, tmp_path: Path, kind: str, function: Any, precision: str, size: float, notes: list[str]
) -> None:
    """When another row changes, experts get other shapes, which kernels may sum in another order; nothing else does."""
    folder, rows = save_model(kind, tmp_path / "model"), rows_of(tmp_path)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.model.norm = Mixing(model.model.norm, size)
    attention(function)
    values, tokenizer = recipe(folder, rows, actor__model__precision=precision), AutoTokenizer.from_pretrained(folder)
    worker = SFTWorker(load_recipe(values), model=model, tokenizer=tokenizer, report=quiet)
    worker.setup()
    assert worker.notes == notes
    worker.release()


class Convolving(nn.Module):
    """A layer that looks at the token before, in whatever row that is: a state that packing carries across."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.inner(hidden + 0.5 * before)


class Doubled(Qwen2ForCausalLM):
    """Its logits are twice what its head gives, and no setting says so."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs


def convolving(folder: Path) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.model.layers[0].mlp = Convolving(model.model.layers[0].mlp)
    return model


def doubled(folder: Path) -> nn.Module:
    return Doubled.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "notes"),
    [
        (convolving, ["packed rows see each other in this model: one row per forward", BY_LENGTH]),
        (
            doubled,
            [
                "its attention over packed rows differs from its own: one row per forward",
                "its logits are not a linear head of its last hidden state: taken from its own forward",
                BY_LENGTH,
            ],
        ),
    ],
    ids=["state", "head"],
)
def test_a_users_own_model_trains_with_the_numbers_of_plain_torch(
    tmp_path: Path, make: Callable[[Path], Any], notes: list[str]
) -> None:
    folder, rows = save_model("dense", tmp_path / "model"), rows_of(tmp_path)
    values = recipe(folder, rows, runner__max_steps=STEPS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    worker = SFTWorker(load_recipe(values), model=make(folder), tokenizer=tokenizer, report=quiet)
    worker.setup()
    assert worker.notes == notes
    flat = flat_script()
    options = ["--clip=0.5", "--lr=1e-2", "--schedule=linear", "--warmup=3", "--precision=fp64", f"--steps={STEPS}"]
    args = flat.arguments(f"--model={folder}", f"--data={rows}", *options)
    wanted = list(flat.train(make(folder).train(), flat.read_rows(rows, tokenizer), args))
    for loss, norm in wanted:
        metrics = worker.run_training()
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-10)
        assert metrics["train/grad_norm"] == pytest.approx(norm, abs=1e-10)


def test_one_row_is_packed_with_itself(attention: Callable, tmp_path: Path) -> None:
    model, rows = save_model("dense", tmp_path / "model"), rows_of(tmp_path, 1)
    attention(leaking)
    assert run_recipe(recipe(model, rows, runner__max_steps=1)).notes


def test_the_longest_rows_are_looked_at_wherever_they_stand(attention: Callable, tmp_path: Path) -> None:
    """A window of 200 tokens matters to a single row, the last of 600."""
    model, rows = save_model("mistral", tmp_path / "model", sliding_window=200), rows_of(tmp_path, 600)
    long = {"messages": [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b" * 120}]}
    with rows.open("a") as lines:
        lines.write(json.dumps(long) + "\n")
    attention(without_window)
    values = recipe(model, rows)
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    assert worker.notes == ["its attention over packed rows differs from its own: one row per forward", BY_LENGTH]


@pytest.mark.parametrize("kind", slow_except(["dense", "mixtral"], "dense"))
def test_rows_of_one_length_share_a_forward_where_packing_is_not_exact(
    attention: Callable, tmp_path: Path, kind: str
) -> None:
    """Twelve rows of three lengths, four a forward at most: the numbers of plain PyTorch."""
    model, rows = save_model(kind, tmp_path / "model"), tmp_path / "rows.jsonl"
    turns = [("a" * (3 + number % 3), chr(98 + number) * (4 + 2 * (number % 3))) for number in range(12)]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    rows.write_text("".join(json.dumps({"messages": both}) + "\n" for both in messages))
    values = recipe(model, rows, runner__max_steps=STEPS, actor__micro_batch_size=4, actor__global_batch_size=12)
    attention(leaking)
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    assert worker.notes[-1] == BY_LENGTH
    step = next(worker.loader.steps(worker.data_state))
    assert sorted(len(batch.rows) for batch in step.micro_batches) == [4, 4, 4]
    worker.release()
    got = run_recipe(values)
    flat = run_flat(model, rows, precision="fp64", steps=STEPS, batch=12)
    assert got.losses == pytest.approx(flat.losses, abs=1e-10)
    assert got.norms == pytest.approx(flat.norms, abs=1e-10)


# -- whatever a way raises, the next simpler one is tried --------------------------------------------------------------


def raising_when_packed(*args: Any, cu_seq_lens_q: torch.Tensor, **kwargs: Any) -> Any:
    """A kernel that is missing here, as in models of linear attention without their package."""
    raise ValueError("packed rows need a package that is not installed.\nInstall it.")


def losing_a_peer(*args: Any, cu_seq_lens_q: torch.Tensor, **kwargs: Any) -> Any:
    """As where another rank has ended in the middle of a gather."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30343")


def raising_for_several(*args: Any, cu_seq_lens_q: torch.Tensor, **kwargs: Any) -> Any:
    """One row is computed, several are refused, in the words of torch.compile."""
    if len(cu_seq_lens_q) > 2:
        raise RuntimeError("the backend raised:\n\nNoCompiler: none was found\nfor more, set TORCH_LOGS")
    return document_attention(*args, cu_seq_lens_q=cu_seq_lens_q, **kwargs)


class OneSequence(nn.Module):
    """A layer that takes one sequence at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert len(hidden) == 1, "one sequence at a time"
        return self.inner(hidden)


class Headless(Qwen2ForCausalLM):
    """Its forward has a head that it does not declare, and takes no `logits_to_keep`."""

    def get_output_embeddings(self) -> Any:
        return None

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, use_cache=False)


class Broken(Qwen2ForCausalLM):
    """Not even its own forward works."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("'NoneType' object is not subscriptable")


class Unscaled(Qwen2ForCausalLM):
    """Its config declares a scale of the logits that it does not apply, as some with a part for images."""

    def __init__(self, config: Any) -> None:
        config.logit_scale = 0.25
        super().__init__(config)


def one_sequence(folder: Path) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.model.layers[0].mlp = OneSequence(model.model.layers[0].mlp)
    return model


def made_of(kind: type[Qwen2ForCausalLM]) -> Callable[[Path], nn.Module]:
    return lambda folder: kind.from_pretrained(folder, dtype=torch.float64)


def plain(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


MISSING = "ValueError: packed rows need a package that is not installed: one row per forward"


@pytest.mark.parametrize(
    ("function", "make", "notes"),
    [
        (raising_when_packed, plain, [MISSING, BY_LENGTH]),
        (
            raising_for_several,
            plain,
            ["RuntimeError: the backend raised: NoCompiler: none was found: one row per forward", BY_LENGTH],
        ),
        (raising_when_packed, one_sequence, [MISSING]),
        (
            document_attention,
            made_of(Headless),
            [
                "ModelError: Headless has no language-model head: one row per forward",
                "ModelError: Headless has no language-model head: taken from its own forward",
                BY_LENGTH,
            ],
        ),
        (document_attention, made_of(Unscaled), []),
    ],
    ids=["packed", "several", "batch", "head", "scale"],
)
def test_a_way_that_raises_is_not_taken(
    attention: Callable, tmp_path: Path, function: Any, make: Callable[[Path], Any], notes: list[str]
) -> None:
    folder, rows = save_model("dense", tmp_path / "model"), rows_of(tmp_path)
    attention(function)
    values = recipe(folder, rows, runner__max_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    worker = SFTWorker(load_recipe(values), model=make(folder), tokenizer=tokenizer, report=quiet)
    worker.setup()
    assert worker.notes == notes
    flat = run_flat(folder, rows, precision="fp64", steps=2)
    for loss, norm in zip(flat.losses, flat.norms, strict=True):
        metrics = worker.run_training()
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-10)
        assert metrics["train/grad_norm"] == pytest.approx(norm, abs=1e-10)


def test_a_model_that_transformers_cannot_compute_is_refused_by_one_message(tmp_path: Path) -> None:
    folder, rows = save_model("dense", tmp_path / "model"), rows_of(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Broken.from_pretrained(folder, dtype=torch.float64)
    worker = SFTWorker(load_recipe(recipe(folder, rows)), model=model, tokenizer=tokenizer, report=quiet)
    with pytest.raises(ModelError, match=r"own forward of one row of \d+ tokens fails: TypeError: 'NoneType'"):
        worker.setup()


def test_nothing_follows_about_a_model_from_the_end_of_another_rank(attention: Callable, tmp_path: Path) -> None:
    """Its launcher ends the run by that rank's reason: a stop, or a lost rank."""
    model, rows = save_model("dense", tmp_path / "model"), rows_of(tmp_path)
    attention(losing_a_peer)
    worker = SFTWorker(load_recipe(recipe(model, rows, actor__model__precision="bf16")), report=quiet)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        worker.setup()
    worker.release()


def test_an_exception_of_the_probe_leaves_ranks_in_order(tmp_path: Path) -> None:
    """It ends a forward of the sharded model half-way; two micro-batches per rank, in every way of sharding."""
    folder, rows = save_family("stablelm", tmp_path / "model"), rows_of(tmp_path)
    sizes = {"runner__max_steps": 2, "actor__micro_batch_size": 2}
    backends = ("fsdp", "fsdp1", "ddp")
    values = [recipe(folder, rows, actor__training_backend=backend, **sizes) for backend in backends]
    flat = run_flat(folder, rows, precision="fp64", steps=2)
    for trace in run_ranks(run_recipes, 2, values)[0]:
        assert trace.notes[-1] == BY_LENGTH
        assert trace.losses == pytest.approx(flat.losses, rel=1e-6)
        assert trace.norms == pytest.approx(flat.norms, rel=1e-6)
