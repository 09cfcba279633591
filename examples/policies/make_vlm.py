"""Make the tiny vision-language models of random weights on which SmolVLA and pi0 of the reaching task stand.

    made/smolvlm      SmolVLM's architecture, for SmolVLA
    made/paligemma    PaliGemma's, for pi0

Each directory has a config and a tokenizer of the words of robot prompts, and no weights: a recipe without
`load_vlm_weights` draws them.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PaliGemmaConfig, PreTrainedTokenizerFast, SmolVLMConfig

PAD, END, IMAGE = "<pad>", "</s>", "<image>"
TEXTS = [
    f"{task}\n" for task in ("touch the red ball", "touch the blue ball", "move to the red disc", "move to the blue disc")
]
IMAGE_SIZE, PATCH, WIDTH, LAYERS = 48, 8, 64, 2
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on prompts: their words are tokens, any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[PAD, END, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, extra_special_tokens={"image_token": IMAGE}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny backbones of SmolVLA and pi0.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made", help="directory to write to")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH,
    }
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.04,  # twice the usual scale, as 64 is far narrower than the widths 0.02 was chosen for
        **HEADS,
    }
    smolvlm = SmolVLMConfig(
        vision_config=vision,
        text_config={"model_type": "llama", **text},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    paligemma = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision, "patch_size": 2 * PATCH},
        text_config={"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", **text},
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    for name, config in (("smolvlm", smolvlm), ("paligemma", paligemma)):
        config.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
        print(f"{args.out / name}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
