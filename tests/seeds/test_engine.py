"""The samples of a training engine's documentation, run with one rank and two, as plain PyTorch computes them.

What the tests add to the print and to the changes in `engine.py`:

- models and pictures are tiny, on disk, with weights in fp64, so that the numbers can be compared to 1e-10;
- two steps of two micro-batches each follow the printed call, through `gradient_accumulation_steps`, which it has;
- the classes of an adapter and of a custom model, of which the print has the hooks alone, get the language sample's
  training methods, by inheritance, with another rate (1e-5 moves nothing within two steps);
- the engines with two ranks share their processes (`colocate_with`), as starting some takes longest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine
from shardtune.nn import AutoProcessor
from tests.seeds.engine import (
    CUSTOM,
    CUSTOM_CHANGES,
    FEWER_RANKS,
    IMPORTS,
    LANGUAGE,
    LANGUAGE_CHANGES,
    LORA,
    LORA_CHANGES,
    SEQUENCE,
    VISION,
    VISION_CHANGES,
)
from tests.seeds.guide import changed
from tests.support.chosen import slow_except
from tests.support.vision import save_vision_model

pytestmark = pytest.mark.lengthy

ROW = [1, 2, 3, 4] * 8
STEPS = [[[[(step + 3 * batch + 7 * row + 5 * place) % 64 for place in range(9)] for row in range(3)]
          for batch in range(2)] for step in range(2)]  # fmt: skip
"""Two steps of two micro-batches of three rows, which two ranks do not share evenly."""


@pytest.fixture(autouse=True, scope="module")
def _here() -> None:
    shardtune.init("local", device="cpu")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tied embeddings, as the printed model has them."""
    folder = tmp_path_factory.mktemp("seed") / "qwen"
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).double().save_pretrained(folder)
    return folder


def language(qwen: Path, ranks: int) -> dict[str, Any]:
    names: dict[str, Any] = {"MODEL": str(qwen), "RANKS": ranks, "__name__": "sample"}
    exec(changed(LANGUAGE, (*LANGUAGE_CHANGES, FEWER_RANKS)), names)
    return names


@pytest.fixture(scope="module")
def one(qwen: Path) -> dict[str, Any]:
    return language(qwen, 1)


@pytest.fixture(scope="module")
def two(qwen: Path) -> Iterator[dict[str, Any]]:
    names = language(qwen, 2)
    yield names
    names["train_engine"].close()


def loss_of(model: Any, rows: list[list[int]], steps: int) -> torch.Tensor:
    ids = torch.tensor(rows)
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / steps


def trained(model: Any, micro_batches: list[list[Any]], rate: float, loss: Any = loss_of) -> list[float]:
    """The losses of steps in plain PyTorch, which change the model."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate), []
    for step in micro_batches:
        for batch in step:
            value = loss(model, batch, len(step))
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(engine: Any, micro_batches: list[list[Any]]) -> None:
    for step in micro_batches:
        for batch in step:
            parts = [NeedParallel(part) for part in (batch if isinstance(batch, tuple) else (batch,))]
            engine.train_step(*parts, gradient_accumulation_steps=len(step))
        engine.optimizer_step()


def check_weights(engine: Any, wanted: dict[str, torch.Tensor], shared: tuple[str, ...] = ()) -> None:
    found = dict(engine.named_tensors())
    assert found.keys() == wanted.keys() - set(shared)
    for name, tensor in found.items():
        assert (tensor - wanted[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_the_language_sample(qwen: Path, ranks: str, request: pytest.FixtureRequest):
    names = request.getfixturevalue(ranks)
    plain = Qwen2ForCausalLM.from_pretrained(qwen)
    first = loss_of(plain, [ROW], 4).item()
    assert names["losses_for_each_gpu"] == [pytest.approx(first, abs=1e-12)] * (1 + (ranks == "two"))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5)  # the printed call's, which goes on afterwards
    run(names["train_engine"], STEPS)
    for step in ([None], *STEPS):
        for rows in step:
            loss_of(plain, [ROW] if rows is None else rows, 4 if rows is None else len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_weights(names["train_engine"], plain.state_dict(), ("lm_head.weight",))


@pytest.mark.slow
def test_the_language_sample_as_a_script_on_four_ranks(qwen: Path, tmp_path: Path):
    """Unguarded as it is printed, and with its `tensor_parallel_size=4` over two heads of keys and values."""
    text = changed(LANGUAGE, LANGUAGE_CHANGES).replace("MODEL", repr(str(qwen)))
    (tmp_path / "sample.py").write_text(f"{text}\n print(losses_for_each_gpu)\n")
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "sample.py")], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    losses = json.loads(outcome.stdout.strip().splitlines()[-1])
    assert losses == [pytest.approx(loss_of(Qwen2ForCausalLM.from_pretrained(qwen), [ROW], 4).item(), abs=1e-12)] * 4


def test_the_mark_of_a_sequence():
    names: dict[str, Any] = {"NeedParallel": NeedParallel}
    exec(SEQUENCE, names)
    assert (names["seq_parallel_data"].type, names["seq_parallel_data"].size) == ("seq", 1)


def built(module: Any, executor: Any, beside: dict[str, Any] | None) -> TrainEngine:
    """An engine in this process, or on the two ranks of another."""
    if beside is None:
        return TrainEngine(module, executor).build()
    return TrainEngine(module, executor).build(colocate_with=beside["train_engine"], take_turns=False)


def test_the_adapter_sample(qwen: Path, two: dict[str, Any], tmp_path: Path):
    """Names are mapped on the way in; on the way out the adapter is merged, with alpha / r = 4."""
    names: dict[str, Any] = {}
    exec(changed(LORA, LORA_CHANGES), names)

    class Adapted(names["LoraTrainModule"], two["MyQwenModel"]):  # pyright: ignore[reportGeneralTypeIssues]
        def on_weights_materialized(self) -> None:
            self._init_lora_B_as_zeros()
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")
    with accelerate.init_empty_weights():
        module = Adapted.from_pretrained(qwen)
        before = set(module.state_dict())
        adapted = peft.get_peft_model(module, config)
    with pytest.raises(ValueError, match="weight_mapping is not set"):
        TrainEngine(adapted).build()
    own = {name.replace("base_model.model.", "").replace("base_layer.", ""): name for name in adapted.state_dict()}
    vars(adapted)["weight_mapping"] = {name: own[name] for name in own if name in before}
    for ranks in (None, two):
        engine = built(adapted, "fsdp2", ranks)
        engine.save_pretrained(tmp_path / "adapter")
        plain: Any = peft.PeftModel.from_pretrained(
            Qwen2ForCausalLM.from_pretrained(qwen),
            str(tmp_path / "adapter"),
            is_trainable=True,
            autocast_adapter_dtype=False,
        )
        run(engine, STEPS)
        trained(plain, STEPS, 1e-2)
        check_weights(engine, plain.merge_and_unload().state_dict(), ("lm_head.weight",))
        engine.close()


@pytest.mark.parametrize("executor", slow_except(["fsdp2", "fsdp1", "ddp"], "fsdp2"))
def test_the_sample_of_a_custom_model(two: dict[str, Any], tmp_path: Path, executor: str):
    names: dict[str, Any] = {}
    exec(changed(CUSTOM, CUSTOM_CHANGES), names)
    language_sample = two["MyQwenModel"]

    class Trained(names["MyModel"]):  # pyright: ignore[reportGeneralTypeIssues]
        optimizer_step = language_sample.optimizer_step

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_step(self, x: torch.Tensor, gradient_accumulation_steps: int = 1) -> None:
            (self(x.to("cuda")).square().mean() / gradient_accumulation_steps).backward()

    draw = torch.Generator().manual_seed(0)
    weights = {f"blocks.{number}.weight": torch.randn(4, 4, generator=draw).double() for number in range(2)}
    data = [[torch.randn(3, 4, generator=draw).double() for _ in range(2)] for _ in range(2)]
    torch.save(weights, tmp_path / "weights.pt")
    save_file(weights, tmp_path / "weights.safetensors")
    functions = {name: (lambda tensor=tensor: tensor.clone()) for name, tensor in weights.items()}
    plain = Trained(None).double()
    plain.load_state_dict(weights)
    trained(plain, data, 1e-2, lambda model, x, steps: model(x).square().mean() / steps)
    # Each source with one rank or two.
    sources: dict[str, tuple[Any, Any]] = {
        "fsdp2": (weights, functions),
        "fsdp1": (str(tmp_path / "weights.pt"), weights),
        "ddp": (functions, str(tmp_path / "weights.safetensors")),
    }
    for source, ranks in zip(sources[executor], (None, two), strict=True):
        with accelerate.init_empty_weights():
            module = Trained(source).double()
        engine = built(module, executor, ranks)
        run(engine, data)
        check_weights(engine, dict(plain.state_dict()))
        engine.close()


def test_the_custom_sample_with_its_blanks_as_they_are_printed(two: dict[str, Any]):
    """Hooks that return nothing are not used: the module's own values, and units as they are found."""
    names: dict[str, Any] = {}
    exec(IMPORTS + CUSTOM, names)

    class Layers(names["MyModel"]):  # pyright: ignore[reportGeneralTypeIssues]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    module = Layers().double()
    x = torch.arange(12.0).double().view(3, 4)
    for ranks in (None, two):
        engine = built(module, "fsdp2", ranks)
        parts = [part for part in engine.forward(NeedParallel(x)) if part is not None]
        assert (torch.cat(parts) - module(x)).abs().max() < 1e-12
        engine.close()


def test_the_vision_sample(two: dict[str, Any], tmp_path: Path):
    """The processor is made on the ranks from what the module answers; pictures are read there too."""
    path = save_vision_model("qwen2_5_vl", tmp_path / "model")
    Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float64).save_pretrained(path)
    pictures = []
    for number in range(2):
        pictures.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", (40, 60), (100 * number, 50, 200)).save(pictures[-1])
    names: dict[str, Any] = {"__name__": "sample"}
    exec(changed(VISION, VISION_CHANGES), names)
    parts = [{"type": "image"}, {"type": "text", "text": "what"}]
    data = [[([[{"role": "user", "content": parts}]] * 2, list(order)) for order in (pictures, pictures[::-1])]]
    processor: Any = AutoProcessor.from_pretrained(path)

    def loss(model: Any, batch: Any, steps: int) -> torch.Tensor:
        texts = [processor.apply_chat_template(row, tokenize=False, add_generation_prompt=True) for row in batch[0]]
        images = [names["prepare_image"](image) for image in batch[1]]
        return model(**processor(text=texts, images=images, return_tensors="pt", padding=True)).logits.mean() / steps

    plain = Qwen2_5_VLForConditionalGeneration.from_pretrained(path)
    trained(plain, data, 1e-5, loss)
    plain.save_pretrained(tmp_path / "plain")
    with accelerate.init_empty_weights():
        module = names["MyQwenVLModel"].from_pretrained(path)
    engine = built(module, "fsdp2", two)
    run(engine, data)
    check_weights(engine, load_file(tmp_path / "plain/model.safetensors"))
    engine.close()
