"""What transformers and PEFT alone make of directories that training wrote. A program of its own:

    python -P plain_reader.py FOLDER

It imports torch, transformers and PEFT, and not the package that it lies in. `FOLDER/job.pt` names the directories,
rows, prompts and conversations; what is found is written into `FOLDER/plain.pt`, under the name of each directory.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

AUTO = {"causal_lm": AutoModelForCausalLM, "vision_language": AutoModelForImageTextToText}


# -- weights ----------------------------------------------------------------------------------------------------------


def load_model(directory, kind):
    """The model of a directory, as its config names it; the weights that the directory lacks; those of other shapes."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    auto = AUTO.get(kind) or getattr(transformers, name)
    eager = {"attn_implementation": "eager"} if kind in AUTO else {}
    model, info = auto.from_pretrained(directory, output_loading_info=True, ignore_mismatched_sizes=True, **eager)
    shapes = {name: (tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"]}
    return model.eval(), set(info["missing_keys"]), shapes


def load_adapter(directory, kind, dtype):
    """The adapter of a directory over the base model that it names."""
    import peft

    config = json.loads((directory / "adapter_config.json").read_text())
    base = AUTO[kind].from_pretrained(
        config["base_model_name_or_path"],
        attn_implementation="eager",
        dtype=getattr(torch, dtype),
        **({"revision": config["revision"]} if config.get("revision") else {}),
    )
    by_module = config.get("trainable_token_indices")
    rows = 1 + max((row for ids in by_module.values() for row in ids), default=0) if isinstance(by_module, dict) else 0
    if rows > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows, mean_resizing=False)
    begun = config.get("init_lora_weights") == "mica"  # for which PEFT would decompose each matrix, and not in fp64
    return peft.PeftModel.from_pretrained(base, str(directory), low_cpu_mem_usage=begun).eval()


def digest(tensor):
    """A hash of a tensor's bits."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def described(tensors):
    """The dtype and a hash of each tensor."""
    return {name: (str(t.dtype).removeprefix("torch."), digest(t.detach())) for name, t in tensors.items()}


def tensors_of(model, missing):
    """The parameters and persistent buffers of a model, each under its first name, and the names that share one."""
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in missing}
    names = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    shared = sorted(group for group in names.values() if len(group) > 1)
    return described({group[0]: state[group[0]] for group in names.values()}), shared


def tensors_in_files(directory):
    """All tensors of a directory's files of weights; other safetensors (a policy's statistics) are none of them."""
    index = directory / "model.safetensors.index.json"
    weights = [directory / name for name in ("adapter_model.safetensors", "model.safetensors")]
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [file for file in weights if file.is_file()][:1] or sorted(directory.glob("*.safetensors"))
    return described({name: tensor for file in files for name, tensor in load_file(file).items()})


def merge_gap(adapted, directory):
    """The largest difference between weights that were merged and those that PEFT merges, over the largest weight."""
    merged = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    gaps = [(0.0, "")]
    for name, own in adapted.merge_and_unload().state_dict().items():
        if name in merged and merged[name].is_floating_point():
            gap = (merged[name].double() - own.double()).abs().max() / own.double().abs().max().clamp(min=1e-300)
            gaps.append((float(gap), name))
    return max(gaps)


# -- numbers ----------------------------------------------------------------------------------------------------------


def logits_of(model, rows, last):
    """The logits of the last tokens of each row, each row alone."""
    return [model(**row, use_cache=False).logits[0, -last:].clone() for row in rows]


def answers_of(model, prompts, most, stops):
    """The greedy answer to each prompt, up to a stop token; and how much worse the trained model's own tokens are.

    Where an answer leaves the trained model's own, it is the difference between the logits of both tokens, over the
    largest logit: next to nothing where two tokens are equally likely.
    """
    found = []
    for inputs, own in prompts:
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=most,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, length:].tolist()
        end = next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))
        tokens, worse = tokens[:end], float("inf") if len(own) != end else 0.0
        for place, (one, other) in enumerate(zip(tokens, own, strict=False)):
            if one != other:
                logits = output.logits[place][0].double()
                worse = float((logits[one] - logits[other]).abs() / logits.abs().max())
                break
        found.append((tokens, worse))
    return found


# -- text -------------------------------------------------------------------------------------------------------------


def text_of(directory, text):
    """What a directory's tokenizer and chat template make of texts and conversations."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    special = {name: json.dumps(value, default=str) for name, value in tokenizer.special_tokens_map.items()}
    shown = [
        tokenizer.apply_chat_template(
            one["messages"], tools=one["tools"], add_generation_prompt=one["prompt"], tokenize=False
        )
        for one in text["conversations"]
    ]
    return {
        "ids": [tokenizer(one, add_special_tokens=False)["input_ids"] for one in text["texts"]],
        "special": special,
        "template": tokenizer.chat_template,
        "conversations": shown,
    }


def processor_of(directory):
    """A directory's processor, whose images are read by Pillow where it can, as in training.

    torchvision, which transformers takes where it is installed, resizes to other bytes. `AutoProcessor` has the keyword
    `backend` too, and passes it to the part for videos, which has no such backend and cannot be loaded then.
    """
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return processor


def inputs_of(directory, rows, base):
    """What a directory's processor makes of each row's text and images; the error where the base's cannot be loaded."""
    from PIL import Image

    try:
        processor = processor_of(directory)
    except (ImportError, ValueError, OSError) as error:  # torchvision is not installed, or the class is not known
        try:
            processor_of(base)
        except (ImportError, ValueError, OSError):
            return str(error)
        raise
    found = []
    for text, files in rows:
        images = [Image.open(file).convert("RGB") for file in files]
        made = processor(images=[images], text=[text], add_special_tokens=False, return_tensors="pt")
        found.append({name: value for name, value in made.items() if isinstance(value, torch.Tensor)})
    return found


# -- the program ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def read(directory, job, beside):
    """What is found in one directory: `kind` is causal_lm, vision_language, model (of transformers) or files."""
    path, kind = Path(directory["path"]), directory["kind"]
    found = {}
    if job["text"] is not None:
        found["text"] = text_of(path, job["text"])
    if job["images"]:
        found["inputs"] = inputs_of(path, job["images"], job["base"])
    if kind == "files" or directory["adapter"]:
        found["tensors"] = tensors_in_files(path)
    if kind == "files":
        return found
    if directory["adapter"]:
        model = load_adapter(path, kind, job["dtype"])
    else:
        model, missing, shapes = load_model(path, kind)
        found["missing"], found["shapes"] = sorted(missing), shapes
        found["tensors"], found["shared"] = tensors_of(model, missing)
        found["labels"] = dict(model.config.id2label or {})
    if kind in AUTO:
        found["logits"] = logits_of(model, directory["rows"], job["last"])
        found["stops"] = model.generation_config.eos_token_id
        found["answers"] = answers_of(
            model.to(getattr(torch, job["dtype"])), job["prompts"], job["new_tokens"], job["stops"]
        )
    if directory["adapter"] and beside is not None:
        found["merge"] = merge_gap(model, beside)
    return found


def main(folder):
    job = torch.load(folder / "job.pt")
    found = {}
    for name, directory in job["directories"].items():
        merged = Path(job["merged"]) if job["merged"] and name == "exported" else None
        found[name] = read(directory, job, merged)
    assert "shardtune" not in sys.modules, "the package that wrote the directories was imported"
    torch.save(found, folder / "plain.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
