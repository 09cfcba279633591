"""The samples of a training engine's documentation, run: language, adapters, a module of one's own, pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
)

import shardtune
from shardtune import NeedParallel, TrainEngine
from tests.seeds.engine import (
    CUSTOM,
    CUSTOM_CHANGES,
    LANGUAGE,
    LANGUAGE_CHANGES,
    LORA,
    LORA_CHANGES,
    METHODS,
    ONE_RANK,
    SEQUENCE,
    VISION,
    VISION_CHANGES,
)
from tests.seeds.guide import changed
from tests.support.vision import save_vision_model

ROW = [1, 2, 3, 4] * 8


@pytest.fixture(autouse=True)
def _here() -> None:
    shardtune.init("local", device="cpu")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seed") / "qwen"
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def plain_loss(model: Path) -> float:
    made = Qwen2ForCausalLM.from_pretrained(model)
    ids = torch.tensor([ROW])
    return F.cross_entropy(made(ids).logits[0, :-1], ids[0, 1:]).item() / 4


def test_the_language_sample(qwen: Path):
    names: dict[str, Any] = {"MODEL": str(qwen), "__name__": "sample"}
    exec(changed(LANGUAGE, (*LANGUAGE_CHANGES, ONE_RANK)), names)
    assert names["losses_for_each_gpu"] == [pytest.approx(plain_loss(qwen), rel=1e-5)]
    moved = dict(names["train_engine"].named_tensors())
    before = Qwen2ForCausalLM.from_pretrained(qwen).state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in moved.items())


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
    assert losses == [pytest.approx(plain_loss(qwen), rel=1e-5)] * 4


def test_the_mark_of_a_sequence():
    names: dict[str, Any] = {"NeedParallel": NeedParallel}
    exec(SEQUENCE, names)
    assert (names["seq_parallel_data"].type, names["seq_parallel_data"].size) == ("seq", 1)


def lora_sample() -> type:
    """The printed class, its methods put into it."""
    names: dict[str, Any] = {}
    exec(changed(LORA, LORA_CHANGES), names)
    base = shardtune.nn.HuggingFaceFsdp2TrainModule
    return type("LoraTrainModule", (base,), {name: names[name] for name in METHODS})


def test_the_adapter_sample(qwen: Path):
    """Names are mapped on the way in; on the way out the adapter is merged, with alpha / r = 4."""
    printed = lora_sample()

    class Adapted(printed, Qwen2ForCausalLM):  # pyright: ignore[reportGeneralTypeIssues]
        def on_weights_materialized(self) -> None:
            self._init_lora_B_as_zeros()
            self.optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

        def move(self, ids: list[list[int]]) -> None:
            self(torch.tensor(ids, device="cuda")).logits.square().mean().backward()
            self.optimizer.step()

        def logits(self, ids: list[list[int]]) -> torch.Tensor:
            return self(torch.tensor(ids)).logits

    for mapped in (True, False):
        with shardtune.init_empty_weights():
            module = Adapted.from_pretrained(qwen)
            before = set(module.state_dict())
            adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear"))
        own = {name.replace("base_model.model.", "").replace("base_layer.", ""): name for name in adapted.state_dict()}
        if not mapped:
            with pytest.raises(ValueError, match="weight_mapping is not set"):
                TrainEngine(adapted).build()
            continue
        vars(adapted)["weight_mapping"] = {name: own[name] for name in own if name in before}
        engine = TrainEngine(adapted).build()
        plain = Qwen2ForCausalLM.from_pretrained(qwen)
        assert torch.allclose(engine.logits([ROW])[0], plain(torch.tensor([ROW])).logits, atol=1e-5)
        engine.move([ROW])
        after = engine.logits([ROW])[0]
        assert not torch.allclose(after, plain(torch.tensor([ROW])).logits, atol=1e-3)
        missing = plain.load_state_dict(dict(engine.named_tensors()), strict=False)
        assert not missing.unexpected_keys
        assert torch.allclose(after, plain(torch.tensor([ROW])).logits, atol=1e-5)


def test_the_sample_of_a_custom_model(tmp_path: Path):
    names: dict[str, Any] = {}
    exec(changed(CUSTOM, CUSTOM_CHANGES), names)
    torch.manual_seed(0)
    weights = {f"blocks.{number}.weight": torch.randn(4, 4) for number in range(2)}
    torch.save(weights, tmp_path / "weights.pt")
    x = torch.randn(3, 4)
    wanted = torch.tanh(x @ weights["blocks.0.weight"].T) @ weights["blocks.1.weight"].T
    functions = {name: (lambda tensor=tensor: tensor) for name, tensor in weights.items()}
    for source in (weights, functions, str(tmp_path / "weights.pt")):
        with shardtune.init_empty_weights():
            module = names["MyModel"](source)
        assert torch.allclose(TrainEngine(module).build().forward(NeedParallel(x))[0], wanted)


def test_the_vision_sample(tmp_path: Path):
    """The processor is made on the ranks from what the module answers; pictures are read there too."""
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    pictures = []
    for number in range(2):
        pictures.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", (40, 60), (100 * number, 50, 200)).save(pictures[-1])

    def prepare(path: str) -> Image.Image:
        return Image.open(path).convert("RGB")

    names: dict[str, Any] = {"PREPARE": prepare, "__name__": "sample"}
    exec(changed(VISION, VISION_CHANGES), names)
    with shardtune.init_empty_weights():
        module = names["MyQwenVLModel"].from_pretrained(tmp_path / "model")
    engine = TrainEngine(module).build()
    before = dict(engine.named_tensors())
    parts = [{"type": "image"}, {"type": "text", "text": "what"}]
    messages = [[{"role": "user", "content": parts}], [{"role": "user", "content": [*parts, parts[1]]}]]
    assert engine.train_step(NeedParallel(messages), NeedParallel(pictures)) == [None]
    engine.optimizer_step()
    after = dict(engine.named_tensors())
    assert any(not torch.equal(before[name], after[name]) for name in before if "visual" in name)
