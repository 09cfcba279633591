"""How a published model is used in plain transformers, PEFT or safetensors: the code in its card."""

from __future__ import annotations

from pathlib import Path

from shardtune.checkpoint.atomic import read_json
from shardtune.models.tasks.task import TASK_FILE

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
PROCESSOR = """\
{imports}

processor = AutoProcessor.from_pretrained("{repo}")
{load}
"""
IMAGES = """\
{imports}

processor = AutoProcessor.from_pretrained("{repo}")
processor.image_processor = AutoImageProcessor.from_pretrained("{repo}", backend="pil")  # the pixels of training
{load}
"""
MODULE = """\
from huggingface_hub import hf_hub_download
from safetensors.torch import load_model

load_model(module, hf_hub_download("{repo}", "model.safetensors"))  # an instance of your own class
"""
CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "vision_language": "AutoModelForImageTextToText",
    "sequence_classifier": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "reranker": "AutoModelForSequenceClassification",
    "token_classifier": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
TASK = """\
{imports}

tokenizer = AutoTokenizer.from_pretrained("{repo}")
{load}
{use}
"""
SENTENCES = """\
from sentence_transformers import {kind}

model = {kind}("{repo}")
{use}
"""
USES = {
    "sequence_classifier": """\
logits = model(**tokenizer("a text", return_tensors="pt")).logits
print(model.config.id2label[int(logits.argmax())])""",
    "regression": 'print(float(model(**tokenizer("a text", return_tensors="pt")).logits))',
    "token_classifier": """\
inputs = tokenizer(["some", "words"], is_split_into_words=True, return_tensors="pt")
print([model.config.id2label[int(label)] for label in model(**inputs).logits[0].argmax(-1)])""",
    "embedding": """\
queries, documents = model.encode(["a query"], prompt_name="query"), model.encode(["a text"], prompt_name="document")
print(model.similarity(queries, documents))""",
    "reranker": 'print(model.predict([("a query", "a text")]))',
    "seq2seq": """\
output = model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
}
"""Of the models of tasks by name."""
BY_SENTENCE_TRANSFORMERS = {"embedding": "SentenceTransformer", "reranker": "CrossEncoder"}


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
    if model_type in BY_SENTENCE_TRANSFORMERS and not adapter:
        return _block(SENTENCES.format(repo=repo, kind=BY_SENTENCE_TRANSFORMERS[model_type], use=USES[model_type]))
    kind = CLASSES.get(model_type, "AutoModel")
    beside = "AutoTokenizer" if model_type in ("causal_lm", *USES) else "AutoProcessor"
    names = sorted((kind, beside, "AutoImageProcessor") if model_type == "vision_language" else (kind, beside))
    imports, load = f"from transformers import {', '.join(names)}", f'model = {kind}.from_pretrained("{repo}")'
    if adapter:
        imports = f"from peft import PeftModel\n{imports}"
        base_load = f'base = {kind}.from_pretrained("{base or "path/to/the/base/model"}"{_outputs(directory, kind)})'
        load = f'{base_load}\nmodel = PeftModel.from_pretrained(base, "{repo}")'
    if model_type in USES:
        use = "" if model_type in BY_SENTENCE_TRANSFORMERS else USES[model_type]
        return _block(TASK.format(repo=repo, imports=imports, load=load, use=use).rstrip() + "\n")
    if model_type != "causal_lm":
        template = IMAGES if model_type == "vision_language" else PROCESSOR
        return _block(template.format(repo=repo, imports=imports, load=load))
    ask = CHAT if (directory / "chat_template.jinja").exists() else PLAIN
    return _block(TEXT.format(repo=repo, imports=imports, load=load, ask=ask))


def _outputs(directory: Path, kind: str) -> str:
    """The argument by which a base model gets the head of an adapter: its outputs, which the adapter does not name."""
    if not kind.endswith("Classification") or not (directory / TASK_FILE).is_file():
        return ""
    labels = read_json(directory / TASK_FILE)["options"].get("labels")
    return f", id2label={dict(enumerate(labels))}" if labels else ", num_labels=1"


def _block(code: str) -> str:
    return f"```python\n{code}```"
