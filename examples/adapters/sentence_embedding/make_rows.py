"""Questions with the passage that answers each, and a tiny encoder's configuration and tokenizer, in `made/`."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

MADE = Path(__file__).with_name("made")
WHO = ["baker", "cook", "pilot", "nurse", "farmer", "painter", "lawyer", "driver", "gardener", "teacher"]
WHERE = ["harbour", "market", "station", "school", "garden", "castle", "bridge", "forest"]
WHAT = ["ladder", "basket", "lantern", "hammer", "kettle", "violin", "mirror", "bicycle"]


def row(draw: random.Random) -> dict:
    """What is asked for and what is told share two words of three."""
    who, where, what = draw.choice(WHO), draw.choice(WHERE), draw.choice(WHAT)
    return {"question": f"who left a {what} at the {where} ?", "passage": f"at the {where} the {who} left the {what} ."}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A token for each word."""
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def main() -> None:
    MADE.mkdir(exist_ok=True)
    draw = random.Random(0)
    sets = {"train": [row(draw) for _ in range(256)], "heldout": [row(draw) for _ in range(64)]}
    for name, rows in sets.items():
        (MADE / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    tokenizer = make_tokenizer([text for one in sets["train"] for text in one.values()])
    tokenizer.save_pretrained(MADE / "encoder")
    BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    ).save_pretrained(MADE / "encoder")


if __name__ == "__main__":
    main()
