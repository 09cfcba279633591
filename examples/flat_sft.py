"""Supervised fine-tuning in one file of plain torch and transformers: what shardtune computes, without its speed.

    python examples/flat_sft.py --model DIR --data rows.jsonl --steps 20 --batch 8 --out flat

Trains the rows that `shardtune train` trains, in its order, in one process, padded and under the model's own attention.
A line of the data holds `messages`, or ready `input_ids` with `loss_weights`: how much each token counts as a target.
OUT gets the weights, and `log.jsonl` with loss and gradient norm of each step.
"""

import argparse
import hashlib
import json
import math
import random
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


def encode(row, tokenizer):
    """(token ids, weight of each token as a target); trained are the assistant's turns with their end token."""
    if "input_ids" in row:
        return row["input_ids"], [0.0, *row["loss_weights"][1:]]  # nothing precedes the first token to predict it from
    messages, render = row["messages"], partial(tokenizer.apply_chat_template, tokenize=False)
    tokens = tokenizer(render(messages), add_special_tokens=False, return_offsets_mapping=True)
    weights = [0.0] * len(tokens["input_ids"])
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(messages[:turn], add_generation_prompt=True))
            stop = len(render(messages[: turn + 1]).rstrip())
            for index, (first, last) in enumerate(tokens["offset_mapping"]):
                weights[index] = 1.0 if first < stop and last > start else weights[index]
    return tokens["input_ids"], weights


def read_rows(file, tokenizer):
    """All rows of a JSONL file, encoded."""
    with open(file, encoding="utf-8") as lines:
        return [encode(json.loads(line), tokenizer) for line in lines]


def keyed(*parts):
    """A 63-bit number that looks random and depends on `parts` alone."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def mix(value, key):
    """The finalizer of SplitMix64."""
    value = (value + key) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def shuffled(index, size, key):
    """Where a permutation of range(size) takes `index`: a Feistel network, repeated until it is back in range."""
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [keyed(key, number) for number in range(6)]
    while True:
        left, right = index >> bits, index % 2**bits
        for round_key in keys:
            left, right = right, left ^ mix(right, round_key) % 2**bits
        index = left << bits | right
        if index < size:
            return index


def steps_of(num_rows, batch, seed):
    """The rows of each optimizer step, epoch after epoch; an epoch's last step holds what is left."""
    epoch = 0
    while True:
        order = [shuffled(place, num_rows, keyed(seed, epoch, "epoch")) for place in range(num_rows)]
        yield from (order[start : start + batch] for start in range(0, num_rows, batch))
        epoch += 1


def balance(router_logits, lengths, top_k):
    """Switch Transformer's load-balancing loss of each row, summed over rows (transformers computes it in fp32)."""
    total = 0.0
    for row, length in enumerate(lengths):
        each = [logits.unflatten(0, (len(lengths), -1))[row, :length].softmax(-1) for logits in router_logits]
        probs = torch.cat(each)
        chosen = F.one_hot(probs.topk(top_k).indices, probs.shape[-1]).sum(1).to(probs.dtype)
        total = total + probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum()
    return total


def loss_sums(model, rows):
    """The loss over a few rows as sums: cross-entropy over target weights, and balance over rows (0 where dense)."""
    lengths = [len(ids) for ids, _ in rows]
    longest = max(lengths)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows])
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    outputs = model(input_ids=input_ids, attention_mask=mask, use_cache=False)
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
    balanced = 0.0
    if "router_logits" in outputs:
        router_logits = [one.to(logits.dtype) for one in outputs.router_logits]
        balanced = model.config.router_aux_loss_coef * balance(router_logits, lengths, model.config.num_experts_per_tok)
    return (each * weights[:, 1:].flatten()).sum(), balanced


def rate(step, steps, schedule, warmup):
    """The share of the learning rate that a step gets."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    shares = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return shares[schedule]


def train(model, rows, args):
    """Yields (loss, gradient norm) of each step."""
    computed = list(model.parameters())
    masters = computed
    if args.precision == "bf16":  # forward and backward see rounded copies; gradient sums and weights stay in fp32
        masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in computed]
        for parameter in computed:
            parameter.data = parameter.data.bfloat16()
    matrices, vectors = [p for p in masters if p.ndim > 1], [p for p in masters if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, args.optimizer)(groups, lr=args.lr, weight_decay=args.weight_decay)
    batches = steps_of(len(rows), args.batch, args.seed)
    for step in range(args.steps):
        chosen = [rows[index] for index in next(batches)]
        if args.sum_order:  # the same sums, added up in another order: how far rounding alone moves the numbers
            random.Random(args.sum_order + step).shuffle(chosen)
        targets = sum(sum(weights) for _, weights in chosen)
        total = 0.0
        for start in range(0, len(chosen), args.forward):
            tokens, balanced = loss_sums(model, chosen[start : start + args.forward])
            loss = tokens / targets + balanced / len(chosen)
            loss.backward()
            total += loss.item()
            for master, parameter in zip(masters, computed, strict=True):
                if master is not parameter:
                    master.grad = parameter.grad.float() + (0.0 if master.grad is None else master.grad)
                    parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, args.clip).item()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, args.steps, args.schedule, args.warmup)
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters, computed, strict=True):
            parameter.data.copy_(master.data)
        yield total, norm
    for master, parameter in zip(masters, computed, strict=True):
        parameter.data = master.data


def load_model(args):
    """The model in full precision. In fp64 its experts run one by one, as no grouped kernel takes that."""
    if args.precision == "fp64":
        settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    else:
        settings = {"dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(args.model, **settings).train()


def arguments(*given):
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory that from_pretrained reads")
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--out", type=Path, default=Path("flat"))
    parser.add_argument("--precision", choices=["fp64", "fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, and the schedule's horizon")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--forward", type=int, default=1, help="rows of a forward pass")
    parser.add_argument("--optimizer", choices=["AdamW", "SGD"], default="AdamW")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; inf: off")
    parser.add_argument("--schedule", choices=["constant", "linear", "cosine"], default="cosine")
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the rate rises")
    parser.add_argument("--seed", type=int, default=42, help="of the order")
    parser.add_argument("--sum-order", type=int, default=0, help="not 0: add up a step's rows in another order")
    return parser.parse_args(given or None)


def main():
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = read_rows(args.data, tokenizer)
    model = load_model(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "log.jsonl", "w") as log:
        for step, (loss, norm) in enumerate(train(model, rows, args), 1):
            print(f"step {step}: loss {loss:.6f}, gradient norm {norm:.6f}")
            log.write(json.dumps({"step": step, "train/loss": loss, "train/grad_norm": norm}) + "\n")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
