"""Fine-tuning in plain PyTorch and transformers, one row per forward: `shardtune verify parity` compares runs with it.

    python plain_loop.py JOB OUT

Nothing is imported from shardtune. JOB is a file of `torch.save`: the rows of each step (`input_ids`, `weights`: how
much each token counts as a target, `inputs`: pixels and the like) and the recipe's settings. OUT gets `log.json` with
loss and gradient norm of each step, and the weights after step n as `step_n.safetensors`. In fp64, without dropout.
It ends with exit code 3, and the reason as its last line, where transformers does not know the model's architecture,
lacks a package of it, or computes it in fp32 only. Any other error is one of this file or of the job.
"""

import functools
import importlib
import json
import math
import re
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_

UNABLE = 3  # exit code
MIXED_DTYPES = re.compile(r"dtype|scalar type|[Ii]nput type \(|not implemented for '(Double|Float|BFloat16)'")
NOT_KNOWN = re.compile(r"does not recognize this architecture|Unrecognized (model|configuration class)")


class Unable(Exception):
    """What keeps transformers from training the model; the message is the reason."""


def build(job):
    """The model by transformers, in full precision, with LoRA by PEFT around it."""
    dtype = torch.float64 if job["precision"] == "fp64" else torch.float32
    settings = {"trust_remote_code": job["trust_remote_code"]}
    config = transformers.AutoConfig.from_pretrained(job["config"], **settings)
    auto = getattr(transformers, job["auto"])
    if job["from_scratch"]:
        model = auto.from_config(config, dtype=dtype, **settings)
    else:
        model = auto.from_pretrained(job["model"], config=config, dtype=dtype, **settings)
        if job["quantized"]:  # transformers leaves what was not quantised in the dtype on disk
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
    if job["precision"] == "fp64" and model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")  # no grouped kernel takes fp64
    if job["lora"]:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**job["lora"]))
    if job["vocabulary"]:  # new tokens
        model.resize_token_embeddings(job["vocabulary"])
    own = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in (load_file(job["drawn"]) if job["drawn"] else {}).items():  # what a run draws by its seed
            own[job["prefix"] + name].copy_(value)
        for number, parameter in enumerate(model.parameters() if job["noise"] else ()):
            draws = torch.Generator().manual_seed(number)
            parameter.mul_(1 + job["noise"] * torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype))
    for name, parameter in own.items():
        if any(re.search(pattern, name.removeprefix(job["prefix"])) for pattern in job["freeze"]):
            parameter.requires_grad_(False)
    return model.eval()  # nothing drops


def row_loss(model, row, job):
    """The loss of one row by term: the sum over its targets, and of a mixture of experts the router's balance."""
    ids, weights = row["input_ids"], row["weights"]
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in row["inputs"].items()}
    try:
        outputs = model(input_ids=ids[None], use_cache=False, **inputs)
    except RuntimeError as error:
        if MIXED_DTYPES.search(str(error)):
            raise Unable(f"the model cannot be computed in {job['precision']}: {first_line(error)}") from error
        raise
    logits = outputs.logits[0, -len(ids) :]  # of some models positions of images come first
    logits = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))  # token t predicts token t + 1
    places = weights[1:].nonzero()[:, 0]
    terms = {"ce": (target_losses(logits[places], ids[1:][places], job) * weights[1:][places]).sum()}
    if job["balance"]:
        probs = torch.cat([each.to(logits.dtype).softmax(-1) for each in outputs.router_logits])
        chosen = F.one_hot(probs.topk(job["experts_per_token"]).indices, probs.shape[-1]).sum(1).to(probs.dtype)
        terms["balance"] = job["balance"] * probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum()
    return terms


def target_losses(logits, targets, job):
    """The loss of each target: the recipe's own function, or the cross-entropy."""
    if job["loss"] == "dft":
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses * (-losses).exp().detach()
    if job["loss"]:
        file, _, name = job["loss"].rpartition(":")
        return functions_of(file)[name](logits, targets)
    smooth = F.cross_entropy(logits, targets, reduction="none", label_smoothing=job["label_smoothing"])
    return smooth + job["z_loss"] * logits.logsumexp(-1).square() if job["z_loss"] else smooth


@functools.cache
def functions_of(file):
    """What a file defines, by name."""
    return runpy.run_path(file)


def rate(step, peak, job):
    """The learning rate of a step, by the recipe's schedule."""
    optim, steps = job["optim"], job["horizon"]
    warmup = optim["lr_warmup_steps"] or round(optim["lr_warmup_steps_ratio"] * steps)
    if step < warmup:
        return peak * (step if optim["lr_warmup_from_zero"] else step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    share = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": min(1.0, max(0.0, (steps - step) / max(1, round(optim["decay_ratio"] * steps)))),
    }
    least = min(optim["min_lr"], peak)
    return least + (peak - least) * share[optim["lr_scheduler"]]


def optimizer_of(parameters, job):
    """torch's optimizer over parameters by name: no weight decay for vectors, own rates and decays by pattern."""
    optim, groups = job["optim"], []
    for name, parameter in parameters.items():
        peak, decay = optim["lr"], optim["weight_decay"] if parameter.ndim > 1 else 0.0
        for pattern, own_rate, own_decay in optim["groups"]:
            if re.search(pattern, name.removeprefix(job["prefix"])):
                peak, decay = peak if own_rate is None else own_rate, decay if own_decay is None else own_decay
        decayed = {"weight_decay": decay} if optim["decays"] else {}
        groups.append({"params": [parameter], "lr": peak, "peak": peak, **decayed})
    module, _, name = optim["name"].rpartition(":")
    own = functions_of(module) if module.endswith(".py") else vars(importlib.import_module(module or "torch.optim"))
    return own[name](groups, **optim["arguments"])


def train(model, steps, job, part_loss):
    """Yields (loss, gradient norm) of each step, after its update of the weights.

    Args:
        model: whose trained parameters are updated.
        steps: of each the parts (rows), and the sum of their weights by term.
        job: the recipe's settings.
        part_loss: a part and the number of updates before it to the sum of its loss by term.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = named
    if job["precision"] == "bf16":  # forward and backward see rounded copies; gradient sums and weights are fp32
        masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in named.items()}
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer, done = optimizer_of(masters, job), 0
    for parts, weights in steps:
        if not any(weights.values()):  # nothing to learn from: no update
            yield 0.0, 0.0
            continue
        total = 0.0
        for part in parts:
            shares = [value / weights[term] for term, value in part_loss(part, done).items() if weights[term]]
            loss = torch.stack(shares).sum()
            loss.backward()
            total += loss.item()
            for name, parameter in named.items():
                if parameter is not masters[name] and parameter.grad is not None:
                    summed = masters[name].grad
                    masters[name].grad = parameter.grad.float() + (0.0 if summed is None else summed)
                    parameter.grad = None
        norm = clip_grad_norm_(masters.values(), job["optim"]["clip_grad"] or math.inf).item()
        for group in optimizer.param_groups:
            group["lr"] = rate(done, group["peak"], job)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        for name, parameter in named.items():
            if parameter is not masters[name]:
                parameter.data.copy_(masters[name].data)
        yield total, norm


def first_line(error):
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def main(job_file, out):
    job = torch.load(job_file, weights_only=True)
    try:
        model, log = build(job), []
    except ImportError as error:
        raise Unable(f"a package is not installed: {first_line(error)}") from error
    except ValueError as error:
        if NOT_KNOWN.search(str(error)):
            raise Unable(f"its architecture is made known by a plugin: {first_line(error)}") from error
        raise
    steps = [([job["rows"][row] for row in rows], weights) for rows, weights in job["steps"]]
    for loss, norm in train(model, steps, job, lambda row, _: row_loss(model, row, job)):
        log.append((loss, norm))
        tensors = {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(tensors, Path(out) / f"step_{len(log)}.safetensors")
    attention = model.config._attn_implementation
    (Path(out) / "log.json").write_text(json.dumps({"steps": log, "attention": attention}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        main(*sys.argv[1:])
    except Unable as reason:
        print(reason, file=sys.stderr)
        sys.exit(UNABLE)
