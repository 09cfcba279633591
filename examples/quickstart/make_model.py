"""Make the quickstart's base model: a two-layer Llama with random weights, and a tokenizer with a ChatML template.

The model knows nothing, so everything it can do afterwards it learned from the recipe's data. The tokenizer is a
byte-level BPE made from the questions and answers in `train.jsonl`: each frequent word is one token, each digit always
one of its own, and any other text falls back to bytes, so nothing is unknown and everything decodes back exactly.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(data: Path, limit: int = 5_000) -> Iterator[str]:
    """The texts a tokenizer is made from: the roles, and the messages of the first `limit` rows."""
    with data.open(encoding="utf-8") as lines:
        for _, line in zip(range(limit), lines, strict=False):
            for message in json.loads(line)["messages"]:
                yield f"{message['role']}\n"
                yield message["content"]


def make_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the rows of `data`; digits never merge."""
    tokenizer = Tokenizer(models.BPE())
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    split_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, split_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build the model with weights drawn from `seed`, in fp32."""
    vocabulary = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        # Rows are some 60 tokens long: a short wavelength tells neighbours apart sooner than the usual 10,000.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # Twice the usual scale, as 128 is far narrower than the widths 0.02 was chosen for.
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def main() -> None:
    """Write model and tokenizer as one directory that `from_pretrained` loads."""
    made = Path(__file__).parent / "made"
    parser = argparse.ArgumentParser(description="Make the quickstart's model and tokenizer.")
    parser.add_argument("--out", type=Path, default=made / "model", help="directory to write to")
    parser.add_argument("--data", type=Path, default=made / "train.jsonl", help="rows to make the tokenizer from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"{args.data} does not exist: run make_data.py first")
    tokenizer = make_tokenizer(args.data)
    model = make_model(tokenizer, args.seed)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {size:,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
