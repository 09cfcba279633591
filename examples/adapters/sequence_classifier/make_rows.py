"""Short texts of four kinds, and a tiny encoder with its tokenizer, in `made/`."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

MADE = Path(__file__).with_name("made")
KINDS = {
    "weather": ["rain", "snow", "wind", "storm", "sunshine", "frost", "clouds", "thunder"],
    "food": ["bread", "soup", "apples", "cheese", "pasta", "honey", "onions", "butter"],
    "travel": ["train", "ferry", "ticket", "luggage", "station", "airport", "bridge", "road"],
    "music": ["violin", "choir", "drum", "melody", "piano", "concert", "rhythm", "song"],
}
FILLER = [
    "there",
    "was",
    "some",
    "more",
    "than",
    "enough",
    "of",
    "it",
    "today",
    "and",
    "then",
    "again",
    "we",
    "saw",
    "a",
    "lot",
]


def row(draw: random.Random, kind: str) -> dict:
    """A few words of a kind among others that mean nothing."""
    words = draw.choices(FILLER, k=draw.randrange(2, 12)) + draw.choices(KINDS[kind], k=3)
    draw.shuffle(words)
    return {"text": " ".join(words), "label": kind}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Pieces of words, learned from the texts, between BERT's two marks."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=400, special_tokens=marks))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(mark, marks.index(mark)) for mark in ("[CLS]", "[SEP]")]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), marks, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def main() -> None:
    MADE.mkdir(exist_ok=True)
    draw = random.Random(0)
    for name, count in (("train", 256), ("heldout", 64)):
        rows = [row(draw, list(KINDS)[number % len(KINDS)]) for number in range(count)]
        (MADE / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    texts = [json.loads(line)["text"] for line in (MADE / "train.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(MADE / "encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        initializer_range=0.1,
    )
    BertModel(config).save_pretrained(MADE / "encoder")


if __name__ == "__main__":
    main()
