"""Weights in slice by slice, random weights that know no ranks, and directories that `from_pretrained` loads."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from shardtune.checkpoint import safetensors_file
from shardtune.checkpoint.hf_load import init_empty_weights, initialise_weights, load_weights, save_pretrained
from shardtune.checkpoint.weight_files import stored_dtype
from shardtune.errors import ModelError
from shardtune.models.new_tokens import grow_embeddings
from tests.support import tiny_checkpoint as tiny
from tests.support.dist.ranks import run_ranks


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Everything in the state dict, whole, and the buffers outside it."""
    tensors = dict(model.state_dict())
    tensors.update(dict(model.named_buffers()))
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def loaded(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny.empty(tiny.config(kind), dtype)
    load_weights(model, folder, dtype=dtype)
    return model


def test_empty_models_have_no_parameters_but_right_buffers() -> None:
    real = tiny.model("gemma3")
    model = tiny.empty(tiny.config("gemma3"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert differing(dict(real.named_buffers()), dict(model.named_buffers())) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_one_process_loads_what_transformers_saved_and_saves_what_it_loads(tmp_path: Path, kind: str) -> None:
    reference = tiny.saved(kind, tmp_path / "in")
    model = loaded(kind, tmp_path / "in")
    assert differing(state_of(reference), state_of(model)) == []
    assert torch.equal(tiny.logits(reference), tiny.logits(model))
    save_pretrained(model, tmp_path / "out", dtype=torch.float32)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "in"))
    assert differing(ours, theirs) == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(tiny.logits(reference), tiny.logits(again))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == reference.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("kind", "on_disk", "dtype"),
    [("qwen3_moe", torch.bfloat16, torch.float32), ("gemma3", torch.float32, torch.float64)],
)
def test_weights_are_cast_as_they_are_read(tmp_path: Path, kind: str, on_disk: torch.dtype, dtype: torch.dtype) -> None:
    reference = tiny.saved(kind, tmp_path, on_disk)
    model = loaded(kind, tmp_path, dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, reference.get_parameter(name).to(dtype)), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert differing(dict(theirs.named_buffers()), dict(model.named_buffers())) == []
    assert torch.equal(tiny.logits(model), tiny.logits(theirs))


@pytest.mark.parametrize("exact", [False, True])
def test_weights_that_are_rounded_as_they_are_read_are_noted(tmp_path: Path, exact: bool) -> None:
    """Files in fp32 may hold what bf16 holds too, such as those of a run whose weights are in bf16."""
    tiny.saved("gemma3", tmp_path, torch.bfloat16 if exact else torch.float32)
    if exact:
        file = tmp_path / "model.safetensors"
        save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[dtype] = load_weights(tiny.empty(tiny.config("gemma3"), dtype), tmp_path, dtype=dtype).notes
    assert found[torch.float32] == ()
    assert [
        note.partition(" is the first")[0].count("float32, of which bfloat16") for note in found[torch.bfloat16]
    ] == ([] if exact else [1])


def test_several_files_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_BUFFER_BYTES", 200)
    reference = tiny.saved("mixtral", tmp_path / "in", max_shard_size="12KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    model = loaded("mixtral", tmp_path / "in")
    assert differing(state_of(reference), state_of(model)) == []
    save_pretrained(model, tmp_path / "out", dtype=torch.float32, max_shard_bytes=12_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 2
    assert max((tmp_path / "out" / name).stat().st_size for name in files) < 16_000
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(tiny.logits(reference), tiny.logits(again))
    save_pretrained(model, tmp_path / "out", dtype=torch.float32)
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == ["model.safetensors"]


def test_pickled_weights_are_read_safely_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = tiny.saved("qwen2_tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        model = loaded("qwen2_tied", tmp_path)
    assert "weights_only=True" in caplog.text
    assert differing(state_of(reference), state_of(model)) == []
    torch.save({"a": Exploding()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read safely"):
        loaded("qwen2_tied", tmp_path)


class Exploding:
    """Unpickling an instance raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_unexpected_tensors_are_named_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.saved("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"extra.weight": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(2)}))
    model = tiny.empty(tiny.config("llama"))
    with caplog.at_level(logging.WARNING):
        report = load_weights(model, tmp_path, dtype=torch.float32)
    assert report.unexpected == ("extra.weight",)
    assert caplog.text.count("extra.weight") == 1


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    reference = tiny.saved("llama_tied", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model = loaded("llama_tied", tmp_path)
    assert torch.equal(tiny.logits(model), tiny.logits(reference))
    rewrite(tmp_path, lambda t: t.update({"model.embed_tokens.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ModelError, match=r"ties 'lm_head.weight' and 'model.embed_tokens.weight'.*differ"):
        loaded("llama_tied", tmp_path)


def test_a_base_model_without_the_head_names_how_one_begins_anew(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    with init_empty_weights():
        model = BertForQuestionAnswering(config)
    with pytest.raises(ModelError, match="not among the weights: qa_outputs") as raised:
        load_weights(model, tmp_path, dtype=torch.float32)
    assert f'initial_weights returns {{"bert": "{tmp_path}", "qa_outputs": None}}' in raised.value.remedy
    rewrite(tmp_path, lambda tensors: tensors.pop("embeddings.word_embeddings.weight"))
    with pytest.raises(ModelError, match="word_embeddings") as raised:  # of the base, too
        load_weights(model, tmp_path, dtype=torch.float32)
    assert "initial_weights" not in raised.value.remedy


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def damage_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"x" * 12
    file.write_bytes(data)


def huge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


BROKEN: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "torn": ("llama", truncate, ["model.safetensors", "it ends inside or before tensor 'model."]),
    "empty file": ("llama", lambda p: (p / "model.safetensors").write_bytes(b""), ["no safetensors header (0 bytes"]),
    "damaged header": ("llama", damage_header, ["model.safetensors", "damaged safetensors header"]),
    "header too long": ("llama", huge_header, ["model.safetensors", "no safetensors header"]),
    "no weights": ("llama", lambda p: (p / "model.safetensors").unlink(), ["has no weights", "config.json"]),
    "missing": (
        "llama",
        lambda p: rewrite(p, lambda t: [t.pop("lm_head.weight"), t.pop("model.layers.1.mlp.up_proj.weight")]),
        ["2 of 21 tensors of LlamaForCausalLM", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"],
    ),
    "shape": (
        "llama",
        lambda p: rewrite(p, lambda t: t.update({"model.norm.weight": torch.ones(9)})),
        ["'model.norm.weight' has shape [9], the model expects [16]", "model.safetensors"],
    ),
    "expert missing": (
        "qwen3_moe",
        lambda p: rewrite(p, lambda t: t.pop("model.layers.1.mlp.experts.4.up_proj.weight")),
        ["'model.layers.1.mlp.experts.gate_up_proj' is made of 5 tensors", "up_proj.weight', found 4"],
    ),
    "expert shape": (
        "mixtral",
        lambda p: (
            rewrite(p, lambda t: t.update({"model.layers.0.mlp.experts.1.w2.weight": torch.ones(3, 3)}))
            if "model.layers.0.mlp.experts.1.w2.weight" in load_file(p / "model.safetensors")
            else rewrite(
                p, lambda t: t.update({"model.layers.0.block_sparse_moe.experts.1.w2.weight": torch.ones(3, 3)})
            )
        ),
        ["model.layers.0.mlp.experts.down_proj", "do not fit together"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_weights_are_the_users_error_and_name_the_place(tmp_path: Path, case: str) -> None:
    kind, spoil, told = BROKEN[case]
    tiny.saved(kind, tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError) as caught:
        loaded(kind, tmp_path)
    for part in [*told, str(tmp_path)]:
        assert part in str(caught.value)
    assert caught.value.remedy


def test_a_missing_file_of_an_index_is_named(tmp_path: Path) -> None:
    tiny.saved("llama", tmp_path, max_shard_size="12KB")
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"1 of 3 weight files .* missing: model-00002-of-00003\.safetensors"):
        loaded("llama", tmp_path)


def test_only_the_bytes_of_the_own_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is counted: one process reads every byte once and no more."""
    tiny.saved("mixtral", tmp_path)
    asked: list[int] = []
    read = os.preadv

    def counting(descriptor: int, buffers: list[Any], position: int) -> int:
        asked.append(sum(len(buffer) for buffer in buffers))
        return read(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", counting)
    loaded("mixtral", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(asked) == sum(tensor.nbytes for tensor in stored.values())


def test_initialisation_follows_the_models_own_rules() -> None:
    for kind in ("qwen2_tied", "gemma3", "qwen3_moe"):
        model = tiny.empty(tiny.config(kind))
        initialise_weights(model, 5, dtype=torch.float32)
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(tiny.config(kind))
        for name, parameter in model.named_parameters():
            other = theirs.get_parameter(name)
            constant = bool((other == other.flatten()[0]).all())
            if constant:
                assert torch.equal(parameter, other), name
            else:
                assert abs(parameter.std() / other.std() - 1).item() < 0.5, name
                assert not torch.equal(parameter, other)
        assert differing(dict(theirs.named_buffers()), dict(model.named_buffers())) == []


def test_initialisation_depends_on_the_seed_and_not_on_the_precision() -> None:
    def made(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = tiny.empty(tiny.config("llama"), dtype)
        initialise_weights(model, seed, dtype=dtype)
        return {name: parameter.double() for name, parameter in model.named_parameters()}

    before = torch.get_rng_state()
    first = made(1, torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    assert differing(first, made(1, torch.float64)) == []
    assert differing(first, made(1, torch.float32)) == []
    other = made(2, torch.float32)
    assert set(differing(first, other)) == {name for name in first if "norm" not in name}
    layers = first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(*layers)


class Scaled(nn.Module):
    """Initialises itself through `.data`, as older code does, and scales its child's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.inner = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        self.gain.data.fill_(2.0)
        self.inner.weight.data.mul_(100)


def test_initialisation_of_a_plain_module_and_of_children_by_their_parent() -> None:
    with init_empty_weights():
        model = Scaled()
    initialise_weights(model, 0, dtype=torch.float64)
    assert torch.equal(model.gain, torch.full((3,), 2.0, dtype=torch.float64))
    assert 1 < model.inner.weight.abs().max() < 100
    with init_empty_weights():
        bare = nn.ParameterDict({"forgotten": nn.Parameter(torch.empty(2))})
    with pytest.raises(ModelError, match="does not initialise 1 of its parameters: forgotten"):
        initialise_weights(bare, 0, dtype=torch.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<end>", "a", "b"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), eos_token="</s>", pad_token="<pad>"
    )


def test_settings_beside_the_weights(tmp_path: Path) -> None:
    tiny.saved("llama", tmp_path / "in")
    GenerationConfig(temperature=0.6, top_k=7, eos_token_id=2, do_sample=False).to_json_file(
        tmp_path / "in" / "generation_config.json"
    )
    model = loaded("llama", tmp_path / "in")
    model.set_attn_implementation("eager")
    given = tokenizer()
    save_pretrained(
        model,
        tmp_path / "out",
        dtype=torch.bfloat16,
        tokenizer=given,
        chat_template="{{ messages }}!",
        end_of_turn_ids=[3],
    )
    configuration = json.loads((tmp_path / "out" / "config.json").read_text())
    assert configuration["dtype"] == "bfloat16"
    assert configuration["architectures"] == ["LlamaForCausalLM"]
    assert not [key for key in configuration if "attn_implementation" in key]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [3, 2]
    assert generation.pad_token_id == 0
    assert (generation.temperature, generation.top_k) == (0.6, 7)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}!"
    assert given.chat_template is None
    assert model.config.dtype == torch.float32
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    model.set_attn_implementation("sdpa")
    assert torch.equal(tiny.logits(again), tiny.logits(model.to(torch.bfloat16)))


def test_modules_that_transformers_keeps_in_fp32_are_written_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model("llama")
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"input_layernorm"})
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules", {"mlp.up_proj"})
    tiny.saved("llama", tmp_path / "in")
    for dtype in (torch.bfloat16, torch.float16):
        AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=dtype).save_pretrained(tmp_path / "wanted")
        save_pretrained(loaded("llama", tmp_path / "in"), tmp_path / "out", dtype=dtype)
        wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("wanted", "out"))
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in wanted.items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert len({tensor.dtype for tensor in found.values()}) == 2
        assert stored_dtype(tmp_path / "out") == dtype
    (tmp_path / "out" / "config.json").unlink()
    assert stored_dtype(tmp_path / "out") in (torch.float16, torch.float32)
    assert stored_dtype(tmp_path) is None


def test_generation_stops_at_the_trained_token(tmp_path: Path) -> None:
    model = tiny.model("qwen2")
    prompt = torch.tensor([[5, 6]])
    free = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    save_pretrained(model, tmp_path, dtype=torch.float32, end_of_turn_ids=[int(free[0, 4])])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    answer = again.generate(prompt, max_new_tokens=6, do_sample=False)
    first = free[0].tolist().index(int(free[0, 4]), 2)
    assert answer[0].tolist() == free[0, : first + 1].tolist()


def test_other_tensors_may_be_saved_in_the_models_place(tmp_path: Path) -> None:
    """An adapter that is merged while it is saved, say."""
    model = tiny.model("mixtral")

    def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if name.endswith("gate_up_proj") else tensor

    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_pretrained(model, tmp_path, dtype=torch.float32, tensors=tensors, gather=doubled)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), doubled(name, parameter)), name


class Wrapped(nn.Module):
    """What is sharded may be a module around the model."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(**inputs).logits


def wrapped_on_ranks(folder: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Logits of a model whose root is sharded from outside: loaded, and initialised; and the share of bytes read."""
    made = []
    asked: list[int] = []
    read = os.preadv
    os.preadv = lambda d, buffers, at: (asked.append(sum(map(len, buffers))), read(d, buffers, at))[1]
    for fresh in (False, True):
        root = Wrapped(tiny.empty(tiny.config("mixtral")))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in root.inner.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(root, mesh=mesh)
        if fresh:
            initialise_weights(root.inner, 3, dtype=torch.float32, root=root)
        else:
            load_weights(root.inner, folder, dtype=torch.float32, root=root)
        with torch.no_grad():
            made.append(root(input_ids=torch.arange(9)[None]))
    os.preadv = read
    stored = sum(tensor.nbytes for tensor in load_file(Path(folder) / "model.safetensors").values())
    return made[0], made[1], sum(asked) / stored


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Every kind: loaded into shards, saved from them, and made from a seed."""
    told: dict[str, Any] = {}
    for kind in tiny.KINDS:
        model = tiny.shard(tiny.empty(tiny.config(kind)), dist.get_world_size())
        load_weights(model, Path(folder) / kind, dtype=torch.float32)
        told[kind] = state_of(model), tiny.logits(model)
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        told[f"{kind} share"] = held / sum(p.numel() for p in model.parameters())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings
        save_pretrained(model, Path(folder) / f"{kind}-out", dtype=torch.float32, max_shard_bytes=20_000)
        for dtype in (torch.float32, torch.float64):
            fresh = tiny.shard(tiny.empty(tiny.config(kind), dtype), dist.get_world_size())
            initialise_weights(fresh, 11, dtype=dtype)
            told[f"{kind} {dtype}"] = state_of(fresh)
    told["wrapped"] = wrapped_on_ranks(f"{folder}/mixtral")
    return told


@pytest.mark.lengthy
def test_two_ranks_load_save_and_initialise_as_one_does(tmp_path: Path) -> None:
    references = {kind: tiny.saved(kind, tmp_path / kind) for kind in tiny.KINDS}
    for rank in run_ranks(on_two_ranks, 2, str(tmp_path)):
        for kind, reference in references.items():
            state, logits = rank[kind]
            assert differing(state_of(reference), state) == [], kind
            torch.testing.assert_close(logits, tiny.logits(reference), rtol=1e-5, atol=1e-6)
            assert rank[f"{kind} share"] < 0.62, kind
            for dtype in (torch.float32, torch.float64):
                alone = tiny.empty(tiny.config(kind), dtype)
                initialise_weights(alone, 11, dtype=dtype)
                assert differing(state_of(alone), rank[f"{kind} {dtype}"]) == [], kind
        logits, initialised, share = rank["wrapped"]
        inputs = torch.arange(9)[None]
        with torch.no_grad():
            torch.testing.assert_close(logits, references["mixtral"](input_ids=inputs).logits, rtol=1e-5, atol=1e-6)
            alone = tiny.empty(tiny.config("mixtral"))
            initialise_weights(alone, 3, dtype=torch.float32)
            torch.testing.assert_close(initialised, alone(input_ids=inputs).logits, rtol=1e-5, atol=1e-6)
        assert share < 0.62
    for kind, reference in references.items():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-out")
        assert differing(state_of(reference), state_of(again)) == [], kind
        assert again.config.architectures == [type(reference).__name__]


def test_a_bias_per_token_grows_by_zeros(tmp_path: Path) -> None:
    """BART has `final_logits_bias`, a buffer of [1, tokens]."""
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 8, "vocab_size": 16}
    parts = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    made = BartForConditionalGeneration(BartConfig(**sizes, **parts))
    made.final_logits_bias += torch.arange(16.0)
    made.save_pretrained(tmp_path)
    with init_empty_weights():
        model = BartForConditionalGeneration(made.config)
    grow_embeddings(model, [16, 17])
    load_weights(model, tmp_path, dtype=torch.float32, grow=True)
    assert model.final_logits_bias[0].tolist() == [*range(16), 0, 0]
    assert torch.equal(model.get_input_embeddings().weight[:16], made.get_input_embeddings().weight)


@pytest.mark.parametrize("stored", [False, True])
def test_a_table_that_its_class_computes_is_read_where_it_is_stored(tmp_path: Path, *, stored: bool) -> None:
    """Marian's of positions: `save_pretrained` leaves it out, and files of earlier versions have it."""
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 8, "vocab_size": 16}
    parts = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = MarianConfig(**sizes, **parts, pad_token_id=15, eos_token_id=0, decoder_start_token_id=15)
    made = MarianMTModel(config)
    made.save_pretrained(tmp_path)
    tables = {f"model.{part}.embed_positions.weight": torch.ones(8, 8) for part in ("encoder", "decoder")}
    if stored:
        save_file({**load_file(tmp_path / "model.safetensors"), **tables}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = MarianMTModel(config)
    load_weights(model, tmp_path, dtype=torch.float32)
    expected = {**made.state_dict(), **(tables if stored else {})}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
