"""Mistakes in the model, its weights, its tokenizer, and what trains it."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.bad_input.case import Case, change_json, cut, remove, with_keys, write
from tests.support.workspace import make_tokenizer


def tokenizer_with_more(work: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.save_pretrained(work / "model")


def bad_header(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(bytes(content))


def absurd_header(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 62) + file.read_bytes()[8:])


def fp8_without_scales(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file)
    change_json("model/config.json", quantization_config={"quant_method": "fp8"})(work)


MODEL: list[Case] = [
    with_keys(
        "a model that is not there",
        "actor.model.model_path=./modle",
        says="actor.model.model_path | modle | check the name",
    ),
    with_keys(
        "a directory that is no model",
        "actor.model.model_path=./papers",
        says="papers | actor.model.model_path | config.json",
        prepare=write("papers/a.txt", "?"),
    ),
    with_keys(
        "a file for a model",
        "actor.model.model_path=./train.jsonl",
        says="train.jsonl | actor.model.model_path | directory",
    ),
    with_keys(
        "a name the Hub cannot be asked for",
        "actor.model.model_path=org/never-heard-of",
        says="org/never-heard-of | actor.model.model_path | directory",
    ),
    with_keys(
        "a model without weights", says="no weights | model | from_scratch", prepare=remove("model/model.safetensors")
    ),
    with_keys(
        "a model without a tokenizer",
        says="no tokenizer | model | tokenizer_model",
        prepare=remove("model/tokenizer.json", "model/tokenizer_config.json"),
    ),
    with_keys(
        "a torn tokenizer",
        says="tokenizer | model | tokenizer_model",
        prepare=write("model/tokenizer.json", '{"version": "1.0", "trunc'),
    ),
    with_keys(
        "a tokenizer larger than the embedding",
        says="token ids up to 260 | 259 rows | resize_token_embeddings",
        prepare=tokenizer_with_more,
    ),
    with_keys(
        "torn weights", says="bytes of data | model.safetensors | torn", prepare=cut("model/model.safetensors", 100)
    ),
    with_keys(
        "a corrupted header", says="damaged safetensors header | model.safetensors | download", prepare=bad_header
    ),
    with_keys(
        "a header longer than the file",
        says="no safetensors header | model.safetensors | download",
        prepare=absurd_header,
    ),
    with_keys(
        "weights of other shapes",
        says="the model expects [32, 64] | model.safetensors | config.json",
        prepare=change_json("model/config.json", intermediate_size=64),
    ),
    with_keys(
        "weights of fewer layers",
        says="are not among the weights | model.layers.2 | config.json",
        prepare=change_json("model/config.json", num_hidden_layers=3),
    ),
    with_keys(
        "quantised weights",
        says="quantised by gptq | quantization_config | unquantised | GPTQModel",
        prepare=change_json("model/config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    with_keys(
        "quantised weights without a scale",
        says="q_proj.weight' is stored as float8_e4m3fn | q_proj.weight_scale_inv | model.safetensors | download",
        prepare=fp8_without_scales,
    ),
    with_keys(
        "an architecture nobody knows",
        says="model | gpt9 | config.json",
        prepare=change_json("model/config.json", model_type="gpt9"),
    ),
    with_keys(
        "a model that writes no text",
        says="'vit' | causal language model | config.json",
        prepare=change_json("model/config.json", model_type="vit"),
    ),
    with_keys(
        "a torn config.json",
        says="config.json | model | actor.model.model_path",
        prepare=write("model/config.json", '{"model_type": "lla'),
    ),
    with_keys(
        "a model type nobody registered", "actor.model.model_type=my_model", says="my_model | causal_lm | plugins"
    ),
    with_keys("an attention nobody knows", "actor.model.attn_implementation=quick", says="quick | attn_implementation"),
    with_keys(
        "FlashAttention 3 where it is not",
        "actor.model.attn_implementation=flash_attention_3",
        "actor.model.precision=bf16",
        says="flash_attention_3 | attn_implementation | flash_attn_interface",
    ),
    with_keys(
        "FlashAttention in fp32",
        "actor.model.attn_implementation=flash_attention_3",
        "actor.model.precision=fp32",
        says="flash_attention_3 | half precision | precision: bf16",
    ),
    with_keys(
        "kernels that are not installed",
        "actor.model.kernels.source=liger",
        says="kernels.source: liger | not installed | pip install",
    ),
    with_keys(
        "parts of no kernels",
        "actor.model.kernels.parts=[rope]",
        says="kernels.parts has no effect | without actor.model.kernels.source | set it",
    ),
    with_keys(
        "FP8 where torchao is not",
        "actor.model.fp8.scaling=rowwise",
        "actor.model.precision=bf16",
        says="fp8.scaling: rowwise | torchao is not installed | pip install",
    ),
    with_keys(
        "FP8 in fp32",
        "actor.model.fp8.scaling=rowwise",
        "actor.model.precision=fp32",
        says="fp8.scaling | needs | precision: bf16",
    ),
    with_keys(
        "nothing to freeze", "actor.model.freeze=[visual]", says="pattern visual | actor.model.freeze | names look like"
    ),
    with_keys(
        "everything frozen", "actor.model.freeze=['.']", says="nothing to train | actor.model.freeze | freeze less"
    ),
    with_keys(
        "units that the model has not",
        "actor.fsdp_config.wrap=[Block]",
        says="Block | actor.fsdp_config.wrap | LlamaDecoderLayer",
    ),
    with_keys("an optimizer nobody knows", "actor.optim.name=AdamX", says="AdamX | actor.optim.name | AdamW"),
    with_keys("an optimizer that cannot be used", "actor.optim.name=LBFGS", says="LBFGS | several times | AdamW"),
    with_keys(
        "an argument the optimizer has not",
        "actor.optim.args={momentum: 0.9}",
        says="actor.optim.args.momentum | AdamW | amsgrad",
    ),
    with_keys(
        "an argument of the wrong kind",
        "actor.optim.name=SGD",
        "actor.optim.args={momentum: -1}",
        says="momentum | -1 | actor.optim",
    ),
    with_keys(
        "a group of no parameter",
        "actor.optim.groups=[{pattern: vision, lr: 1e-4}]",
        says="pattern vision | actor.optim.groups | names look like",
    ),
]
