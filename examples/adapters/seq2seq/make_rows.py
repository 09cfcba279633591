"""Numbers in words to be sorted, and a tiny T5's configuration and tokenizer, in `made/`."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config

MADE = Path(__file__).with_name("made")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def row(draw: random.Random) -> dict:
    """Two to six different numbers, and the same in order."""
    words = draw.sample(WORDS, draw.randrange(2, 7))
    return {"source": "sort: " + " ".join(words), "target": " ".join(sorted(words, key=WORDS.index))}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A token for each word, and T5's mark at the end of a text."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"]))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def main() -> None:
    MADE.mkdir(exist_ok=True)
    draw = random.Random(0)
    sets = {"train": [row(draw) for _ in range(256)], "heldout": [row(draw) for _ in range(64)]}
    for name, rows in sets.items():
        (MADE / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    tokenizer = make_tokenizer([one["source"] for one in sets["train"]])
    tokenizer.save_pretrained(MADE / "t5")
    T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    ).save_pretrained(MADE / "t5")


if __name__ == "__main__":
    main()
