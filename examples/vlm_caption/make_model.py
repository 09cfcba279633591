"""Make the example's base model: LLaVA's architecture with random weights, with a tokenizer and an image processor.

A CLIP vision tower of two layers sees four patches of 16 x 16 pixels, a projector maps them to the width of a Llama of
two layers. Neither has seen anything, so everything the model can do afterwards it learned from the recipe's data. The
tokenizer makes one token of each word of the questions and answers; other text falls back to bytes.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPVisionConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

PAD, START, END, IMAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"
SIZE, PATCH = 32, 16
GREY = 0.65
"""Of the pictures' ground: as the processor's mean it makes empty patches zero, so that shapes and places stand out."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(data: Path) -> Iterator[str]:
    """The texts a tokenizer is made from: the roles and the messages."""
    for line in data.read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"]:
            yield f"{message['role']}\n"
            yield message["content"].replace(IMAGE, "")


def make_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the rows of `data`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, START, END, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """What turns pictures into pixels, and says how many tokens one takes."""
    size = {"height": SIZE, "width": SIZE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=size, image_mean=[GREY] * 3, image_std=[0.3] * 3),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=CHATML,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Build the model with weights drawn from `seed`, in fp32."""
    vocabulary = tokenizer.get_vocab()
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "initializer_range": 0.04}
    llama: Any = transformers.LlamaConfig(
        **shape,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_key_value_heads=4,
        max_position_embeddings=256,
        # Rows are some 30 tokens long: a short wavelength tells neighbours apart sooner than the usual 10,000.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    # The projector takes the tower's last layer; pretrained LLaVA takes the last but one.
    vision = CLIPVisionConfig(**shape, num_hidden_layers=2, image_size=SIZE, patch_size=PATCH)
    config: Any = transformers.LlavaConfig(
        vision_config=vision,
        text_config=llama,
        image_token_id=vocabulary[IMAGE],
        vision_feature_layer=-1,
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    # CLIP's usual 0.04 is little beside a patch of 768 numbers: it would take long to see where things are.
    torch.nn.init.normal_(model.model.vision_tower.embeddings.position_embedding.weight, std=0.25)
    return model


def main() -> None:
    """Write model and processor as one directory that `from_pretrained` loads."""
    made = Path(__file__).parent / "made"
    parser = argparse.ArgumentParser(description="Make the example's model and processor.")
    parser.add_argument("--out", type=Path, default=made / "model", help="directory to write to")
    parser.add_argument("--data", type=Path, default=made / "train.jsonl", help="rows to make the tokenizer from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"{args.data} does not exist: run make_data.py first")
    tokenizer = make_tokenizer(args.data)
    model = make_model(tokenizer, args.seed)
    make_processor(tokenizer).save_pretrained(args.out)
    model.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
