"""Make the base model of the reaching task: a LLaVA of random weights, its tokenizer and its processor.

SigLIP's vision tower sees the image in 16 patches, a projector hands them to a Llama of two layers: about 225,000
parameters, as small as the task allows. The tokenizer knows the words of robot prompts, and a token for each of the 256
values that a number of an action can have. (A model without such tokens would get them from the training, each at first
the mean of all others; where all weights are random anyway, values that differ from the start are learned sooner.)
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

PAD, END, IMAGE = "<pad>", "</s>", "<image>"
TEXTS = [
    f"In: What action should the robot take to {task}?\nOut:"
    for task in ("touch the red ball", "touch the blue ball", *(f"move to the {c} disc" for c in ("red", "blue")))
]
IMAGE_SIZE, PATCH = 48, 12
WIDTH = 64
ACTIONS = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on prompts: their words are tokens, any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, END, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([f"<act_{number}>" for number in range(ACTIONS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        clean_up_tokenization_spaces=False,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Images as the robot sees them, scaled to [-1, 1]; an image is as many tokens as it has patches."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    half = [0.5, 0.5, 0.5]
    images = SiglipImageProcessorPil(size=size, image_mean=half, image_std=half)
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE,
        num_additional_image_tokens=0,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Build the model with weights drawn from `seed`, in fp32."""
    vocabulary = tokenizer.get_vocab()
    layers: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    vision = SiglipVisionConfig(
        **layers, num_hidden_layers=1, image_size=IMAGE_SIZE, patch_size=PATCH, vision_use_head=False
    )
    text = LlamaConfig(
        **layers,
        num_hidden_layers=2,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        # Prompts are some 30 tokens long: a short wavelength tells neighbours apart sooner than the usual 10,000.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # Twice the usual scale, as 64 is far narrower than the widths 0.02 was chosen for.
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=vocabulary[IMAGE],
        image_seq_length=(IMAGE_SIZE // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(config)


def main() -> None:
    """Write model, tokenizer and processor as one directory that `from_pretrained` loads."""
    parser = argparse.ArgumentParser(description="Make the base model of the reaching task.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made" / "model", help="where to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    make_processor(tokenizer).save_pretrained(args.out)
    model.save_pretrained(args.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {size:,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
