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
    f"{task}\n"
    for task in ("touch the red ball", "touch the blue ball", "move to the red disc", "move to the blue disc")
]
SPECIAL = [PAD, END, IMAGE, "<fake_token_around_image>", "<global-img>"]


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on prompts: their words are tokens, any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, extra_special_tokens={"image_token": IMAGE}
    )


def make(out: Path, width: int = 64, layers: int = 2, vocabulary: int = 400, side: int = 48, patch: int = 12) -> None:
    """Write both directories.

    Args:
        out: where to.
        width: of all layers.
        layers: of the language models; the vision towers have one.
        vocabulary: tokens, at most.
        side, patch: pixels of an image and of its patches, which are square.
    """
    tokenizer = make_tokenizer(vocabulary)
    image = tokenizer.get_vocab()[IMAGE]
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": side, "patch_size": patch}
    text = {
        **sizes,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.04,  # twice the usual scale, which was chosen for far greater widths
    }
    smolvlm = SmolVLMConfig(
        vision_config=vision,
        text_config={"model_type": "llama", **text},
        scale_factor=1,
        image_token_id=image,
    )
    paligemma = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
        text_config={"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", **text},
        projection_dim=width,
        hidden_size=width,
        image_token_index=image,
    )
    for name, config in (("smolvlm", smolvlm), ("paligemma", paligemma)):
        config.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)


def main() -> None:
    """Write the directories that smolvla.yaml and pi0.yaml name."""
    parser = argparse.ArgumentParser(description="Make the tiny backbones of SmolVLA and pi0.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made", help="directory to write to")
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
