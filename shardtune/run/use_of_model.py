"""How a published model is used in plain transformers, PEFT or safetensors: the code in its card."""

from __future__ import annotations

from pathlib import Path

TEXT = """\
{imports}

tokenizer = AutoTokenizer.from_pretrained("{repo}")
{load}
{ask}
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
CHAT = """\
chat = [{"role": "user", "content": "What is the capital of Norway?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
PLAIN = """\
inputs = tokenizer("The capital of Norway is", return_tensors="pt")"""
IMAGES = """\
{imports}

processor = AutoProcessor.from_pretrained("{repo}")
{load}
"""
MODULE = """\
from huggingface_hub import hf_hub_download
from safetensors.torch import load_model

load_model(module, hf_hub_download("{repo}", "model.safetensors"))  # an instance of your own class
"""
CLASSES = {"causal_lm": "AutoModelForCausalLM", "vision_language": "AutoModelForImageTextToText"}


def usage(directory: Path, model_type: str, repo: str, base: str | None, *, adapter: bool) -> str:
    """Python code that loads a model, as a block of Markdown.

    Args:
        directory: with the model's files.
        model_type: `actor.model.model_type`.
        repo: the model's name.
        base: the base model's name on the Hub; None: an adapter needs a path.
        adapter: whether it is a low-rank adapter.
    """
    if not adapter and not (directory / "config.json").exists():
        return _block(MODULE.format(repo=repo))
    kind = CLASSES.get(model_type, "AutoModel")
    beside = "AutoTokenizer" if model_type == "causal_lm" else "AutoProcessor"
    imports, load = f"from transformers import {kind}, {beside}", f'model = {kind}.from_pretrained("{repo}")'
    if adapter:
        imports = f"from peft import PeftModel\n{imports}"
        base_load = f'base = {kind}.from_pretrained("{base or "path/to/the/base/model"}")'
        load = f'{base_load}\nmodel = PeftModel.from_pretrained(base, "{repo}")'
    if model_type != "causal_lm":
        return _block(IMAGES.format(repo=repo, imports=imports, load=load))
    ask = CHAT if (directory / "chat_template.jinja").exists() else PLAIN
    return _block(TEXT.format(repo=repo, imports=imports, load=load, ask=ask))


def _block(code: str) -> str:
    return f"```python\n{code}```"
