"""What is trained of rows with images, character by character, for every family; and that it is the processor's own."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import processors

from shardtune.batch import Sample
from shardtune.data.encoder import LengthLimit, RowDropped, RowError
from shardtune.data.images.chat_encoder import IMAGE_STOP, ImageChatEncoder
from shardtune.data.images.images import PROMPT_IMAGES, from_fields
from shardtune.data.images.placeholders import ImageText
from shardtune.errors import DataError
from tests.support.vision import FAMILIES, PARTS

TEMPLATES = Path(__file__).parents[2] / "support" / "templates" / "vision"
OPEN, CLOSE = "⟦", "⟧"
FAKE = "<fake_token_around_image>"
WIDE = f"{FAKE}<row_1_col_1><image>{FAKE}<row_1_col_2><image>\n\n{FAKE}<global-img><image>{FAKE}"
SQUARE = (
    f"{FAKE}<row_1_col_1><image>{FAKE}<row_1_col_2><image>\n{FAKE}<row_2_col_1><image>{FAKE}<row_2_col_2><image>\n\n"
    f"{FAKE}<global-img><image>{FAKE}"
)
GEMMA = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
# What stands for an image of 60 x 30 and for one of 30 x 30.
IMAGES = {
    "llava": ("<image>" * 4,) * 2,
    "llava_siglip": ("<image>" * 4,) * 2,
    "qwen2_5_vl": ("<|image_pad|>" * 2, "<|image_pad|>"),
    "qwen3_vl": ("<|image_pad|>" * 2, "<|image_pad|>"),
    "idefics3": (WIDE, SQUARE),
    "smolvlm": (WIDE, SQUARE),
    "gemma3": (GEMMA, GEMMA),
    "internvl": ("<img>" + "<IMG_CONTEXT>" * 3 + "</img>", "<img><IMG_CONTEXT></img>"),
}
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TURNS = [
    turn("system", "Be brief."),
    turn("user", "<image>What is it?"),
    turn("assistant", "A cat."),
    turn("user", "And <image> or <image>"),
    turn("assistant", "Dogs,\ntwo."),
]


@cache
def images_of(family: str) -> ImageText:
    return ImageText(FAMILIES[family]()[1])


def image_token(family: str) -> str:
    """What a template writes for an image."""
    text = images_of(family).image_token
    return f"<|vision_start|>{text}<|vision_end|>" if family.startswith("qwen") else text


def encoder(family: str, folder: Path, template: str | None = None, **options: Any) -> ImageChatEncoder:
    template = PARTS if template is None else template
    options = {"max_length": 4096, **options}
    return ImageChatEncoder(images_of(family), template.replace("IMAGE", image_token(family)), folder=folder, **options)


def shown(sample: Sample, family: str) -> str:
    """The text of a row, what is trained of it between ⟦ and ⟧."""
    tokenizer, weights = images_of(family).tokenizer, sample.loss_weights > 0
    cuts = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)]
    pieces = []
    for start, stop in pairwise(cuts):
        text = str(tokenizer.decode(sample.input_ids[start:stop].tolist()))
        pieces.append(f"{OPEN}{text}{CLOSE}" if weights[start] else text)
    return "".join(pieces)


def colours(sample: Sample) -> list[tuple[int, ...]]:
    """The first pixel of each image of a row, in order."""
    return [image.read().getpixel((0, 0)) for image in from_fields(sample.fields)]  # type: ignore[misc]


RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """red.png is 60 x 30, green.png and blue.png 30 x 30."""
    place = tmp_path_factory.mktemp("rows")
    for name, size, colour in (("red", (60, 30), RED), ("green", (30, 30), GREEN), ("blue", (30, 30), BLUE)):
        Image.new("RGB", size, colour).save(place / f"{name}.png")
    return place


FILES = ["red.png", "green.png", "blue.png"]


def expected(family: str, train_on: str = "assistant") -> str:
    wide, square = IMAGES[family]
    before, after = ("<|vision_start|>", "<|vision_end|>") if family.startswith("qwen") else ("", "")
    first, second = ("A cat.<|im_end|>", "Dogs,\ntwo.<|im_end|>")
    if train_on != "last_assistant":
        first = f"{OPEN}{first}{CLOSE}"
    return (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{before}{wide}{after}What is it?<|im_end|>\n"
        f"<|im_start|>assistant\n{first}\n"
        f"<|im_start|>user\nAnd {before}{square}{after} or {before}{square}{after}<|im_end|>\n"
        f"<|im_start|>assistant\n{OPEN}{second}{CLOSE}\n"
    )


def of_processor(family: str, text: str, pictures: Sequence[Image.Image]) -> Any:
    """What the processor itself makes of a text and its images."""
    given = {"images": [pictures]} if pictures else {}
    made = images_of(family).processor(text=[text], **given, return_tensors="np", add_special_tokens=False)
    return {key: made[key][0] for key in made if key.endswith("_ids")}


# -- all families --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
@pytest.mark.parametrize("template", [PARTS, MARKED], ids=["prefix", "marked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_trained(family: str, template: str, train_on: Any, folder: Path) -> None:
    maker = encoder(family, folder, template, train_on=train_on)
    sample = maker.encode({"messages": TURNS, "images": FILES})
    assert shown(sample, family) == expected(family, train_on)
    assert colours(sample) == [RED, GREEN, BLUE]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_but_images_is_trained(family: str, folder: Path) -> None:
    wide, square = IMAGES[family]
    plain = expected(family).replace(OPEN, "").replace(CLOSE, "")
    first, rest = "<|im_start|>", plain.removeprefix("<|im_start|>")
    rest = re.sub(f"{re.escape(wide)}|{re.escape(square)}", lambda found: f"{CLOSE}{found[0]}{OPEN}", rest)
    sample = encoder(family, folder, train_on="all").encode({"messages": TURNS, "images": FILES})
    assert shown(sample, family) == f"{first}{OPEN}{rest}{CLOSE}"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_processor(family: str, folder: Path) -> None:
    """Also the types of tokens, by which models tell images from text, and the pixels."""
    maker = encoder(family, folder)
    sample = maker.encode({"messages": TURNS, "images": FILES})
    assert maker.template is not None
    marked = [turn(one["role"], one["content"].replace("<image>", "\ue0f7")) for one in TURNS]
    pictures = [Image.open(folder / name) for name in FILES]
    own = of_processor(family, maker.template.render(marked, None), pictures)
    assert sample.input_ids.tolist() == own["input_ids"].tolist()
    types = images_of(family).token_types
    assert (types is None) == (len(own) == 1)
    if types is not None:
        assert images_of(family).token_type_ids(sample.input_ids).tolist() == own[types].tolist()
    made = images_of(family).pixels([image.read() for image in from_fields(sample.fields)])
    whole = images_of(family).processor(
        text=[images_of(family).image_token * 3], images=[pictures], return_tensors="pt"
    )
    for key, value in made.items():
        assert value.equal(whole[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_text_alone(family: str, folder: Path) -> None:
    row = {"messages": [turn("user", "Hi"), turn("assistant", "Hello!")], "images": []}
    text = f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{OPEN}Hello!<|im_end|>{CLOSE}\n"
    assert shown(encoder(family, folder).encode(row), family) == text
    del row["images"]
    sample = encoder(family, folder).encode(row)
    assert shown(sample, family) == text
    assert (sample.fields[IMAGE_STOP], from_fields(sample.fields)) == (0, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_literal_placeholder_is_refused(family: str, folder: Path) -> None:
    """The token that the model puts features in the place of, in a user's words."""
    words = images_of(family)._pixel_token
    for content, images in ((f"What is {words}?", []), (f"<image>What is {words}?", ["red.png"])):
        row = {"messages": [turn("user", content), turn("assistant", "A token.")], "images": images}
        with pytest.raises(RowError, match=r"contains|for images"):
            encoder(family, folder).encode(row)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_end_where_the_answer_begins(family: str, folder: Path) -> None:
    maker = encoder(family, folder, with_prompts=True)
    sample = maker.encode({"messages": TURNS, "images": FILES})
    assert sample.prompt_ids is not None
    text = expected(family).replace(OPEN, "").replace(CLOSE, "")
    ids = sample.input_ids.tolist()
    assert sample.prompt_ids.tolist() == ids[: len(sample.prompt_ids)]
    rest = str(images_of(family).tokenizer.decode(ids[len(sample.prompt_ids) :]))
    assert (rest, sample.reference) == ("Dogs,\ntwo.<|im_end|>\n", "Dogs,\ntwo.")
    assert sample.question == "And ⟨image⟩  or ⟨image⟩ "
    assert text.endswith(rest)
    assert sample.fields[PROMPT_IMAGES] == 3
    opened = maker.prompt([turn("user", [{"type": "image", "path": "green.png"}, "?"])])
    assert len(from_fields(opened.fields)) == opened.fields[PROMPT_IMAGES] == 1


def test_plain_prompts_are_those_of_rows(folder: Path) -> None:
    """With the begin token of a tokenizer that puts one before a text by itself."""
    maker = encoder("llava", folder, with_prompts=True)
    plain = maker.text_prompt("<image>What?", ["red.png"])
    begin, number = "<|im_start|>", maker.tokenizer.convert_tokens_to_ids("<|im_start|>")
    images = ImageText(copy.deepcopy(FAMILIES["llava"]()[1]))  # of which all tests share one
    maker = ImageChatEncoder(images, None, max_length=4096, folder=folder, with_prompts=True)
    maker.tokenizer.bos_token = begin
    maker.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, number)]
    )
    row = {"prompt": "<image>What?", "completion": " A cat.", "images": ["red.png"]}
    sample, opened = maker.encode(row), maker.text_prompt("<image>What?", ["red.png"])
    assert sample.prompt_ids is not None
    assert opened.tokens.tolist() == sample.prompt_ids.tolist() == [number, *plain.tokens.tolist()]
    assert opened.fields[PROMPT_IMAGES] == 1


# -- templates as they are published -------------------------------------------------------------------------------

OFFICIAL = {
    "llava": (
        f"Be brief. USER: {'<image>' * 4}\nWhat is it? ASSISTANT: ⟦A cat.<|im_end|>⟧USER: {'<image>' * 4}\n"
        f"{'<image>' * 4}\nAnd   or  ASSISTANT: ⟦Dogs,\ntwo.<|im_end|>⟧"
    ),
    "qwen2_5_vl": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|>"
        "<|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n⟦A cat.<|im_end|>⟧\n<|im_start|>user\nAnd "
        "<|vision_start|><|image_pad|><|vision_end|> or <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n⟦Dogs,\ntwo.<|im_end|>⟧\n"
    ),
    "smolvlm": (
        f"<|im_start|>System: Be brief.<end_of_utterance>\nUser:{WIDE}What is it?<end_of_utterance>\nAssistant:"
        f"⟦ A cat.<end_of_utterance>⟧\nUser: And {SQUARE} or {SQUARE}<end_of_utterance>\nAssistant:"
        "⟦ Dogs,\ntwo.<end_of_utterance>⟧\n"
    ),
    "gemma3": (
        f"<bos><start_of_turn>user\nBe brief.\n\n{GEMMA}What is it?<end_of_turn>\n<start_of_turn>model\n"
        f"⟦A cat.<end_of_turn>⟧\n<start_of_turn>user\nAnd{GEMMA}or{GEMMA}<end_of_turn>\n<start_of_turn>model\n"
        "⟦Dogs,\ntwo.<end_of_turn>⟧\n"
    ),
    "internvl": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "\nWhat is it?<|im_end|>\n<|im_start|>assistant\n⟦A cat.<|im_end|>⟧\n<|im_start|>user\nAnd <img><IMG_CONTEXT>"
        "</img>\n or <img><IMG_CONTEXT></img>\n<|im_end|>\n<|im_start|>assistant\n⟦Dogs,\ntwo.<|im_end|>⟧\n"
    ),
}


@cache
def with_turn_tokens(family: str) -> ImageText:
    """The family with the tokens that its published template ends turns with."""
    processor = FAMILIES[family]()[1]
    if family == "gemma3":
        processor.tokenizer.add_special_tokens(
            {"bos_token": "<bos>", "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]},
            replace_extra_special_tokens=False,
        )
    return ImageText(processor)


def template(family: str, *, marked: bool = True) -> str:
    text = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return text if marked else text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


@pytest.mark.parametrize("family", OFFICIAL)
def test_published_templates(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = with_turn_tokens(family)
    monkeypatch.setattr(f"{__name__}.images_of", lambda _: images)
    maker = ImageChatEncoder(images, template(family), folder=folder, max_length=4096)
    sample = maker.encode({"messages": TURNS, "images": FILES})
    assert shown(sample, family) == OFFICIAL[family]
    assert colours(sample) == [RED, GREEN, BLUE]


def test_llavas_template_without_marks_trains_what_its_prompt_lacks(folder: Path) -> None:
    """`ASSISTANT:` opens an answer, so the space behind it belongs to the answer."""
    maker = ImageChatEncoder(images_of("llava"), template("llava", marked=False), folder=folder)
    text = OFFICIAL["llava"].replace(" ⟦", "⟦ ")
    assert shown(maker.encode({"messages": TURNS, "images": FILES}), "llava") == text


def test_a_template_whose_answers_do_not_end_is_refused(folder: Path) -> None:
    """As LLaVA 1.5 is published: a space stands behind an answer."""
    text = template("llava").replace("eos_token", "' '")
    with pytest.raises(DataError, match="no token that ends a turn"):
        ImageChatEncoder(images_of("llava"), text, folder=folder).encode({"messages": TURNS, "images": FILES})


def test_a_template_without_images_is_refused() -> None:
    text = PARTS.replace("IMAGE", "")
    with pytest.raises(DataError, match="leaves out images"):
        ImageChatEncoder(images_of("qwen2_5_vl"), text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_of_plain_turns_is_given_text(family: str, folder: Path) -> None:
    """With what the processor's own template writes around an image."""
    text = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    sample = ImageChatEncoder(images_of(family), text, folder=folder).encode({"messages": TURNS, "images": FILES})
    assert shown(sample, family) == expected(family)


# -- forms of rows -------------------------------------------------------------------------------------------------


def text_of(row: dict[str, Any], folder: Path, **options: Any) -> tuple[str, list[tuple[int, ...]]]:
    sample = encoder("llava", folder, **options).encode(row)
    return shown(sample, "llava").replace("<image>" * 4, "▣"), colours(sample)


def chat(user: str, answer: str = "A cat.") -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{OPEN}{answer}<|im_end|>{CLOSE}\n"


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [turn("user", list(parts)), turn("assistant", "A cat.")]}


WORDS = {"type": "text", "text": "What?"}


def data_url(place: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(place.read_bytes()).decode()


@pytest.mark.parametrize(
    ("row", "text", "found"),
    [
        ({"messages": [turn("user", "a<image>b"), turn("assistant", "A cat.")], "image": "red.png"}, "a▣b", [RED]),
        (
            {"messages": [turn("user", "What?"), turn("assistant", "A cat.")], "images": FILES[:2]},
            "▣▣What?",
            [RED, GREEN],
        ),
        (asked({"type": "image"}, WORDS) | {"images": ["green.png"]}, "▣What?", [GREEN]),
        (asked(WORDS, {"type": "image", "image": "blue.png"}), "What?▣", [BLUE]),
        (asked(WORDS, {"type": "image", "path": "blue.png"}), "What?▣", [BLUE]),
        (asked({"type": "image_url", "image_url": {"url": "red.png"}}, WORDS), "▣What?", [RED]),
        (asked({"type": "input_image", "image_url": "red.png"}, {"type": "input_text", "text": "?"}), "▣?", [RED]),
        (
            asked({"type": "image", "index": 1}, WORDS, {"type": "image", "index": 0}) | {"images": FILES[:2]},
            "▣What?▣",
            [GREEN, RED],
        ),
        (asked("<image>", "What?", "<image>") | {"images": FILES[1:]}, "▣What?▣", [GREEN, BLUE]),
        (
            {
                "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
                "image": "red.png",
            },
            "▣\nWhat?",
            [RED],
        ),
        (
            {
                "conversations": json.dumps(
                    [{"from": "human", "value": "Q<image>"}, {"from": "gpt", "value": "A cat."}]
                ),
                "images": '["red.png"]',
            },
            "Q▣",
            [RED],
        ),
        ({"output": "A cat.", "instruction": "What?", "input": "<image>", "image": "red.png"}, "What?\n\n▣", [RED]),
        (
            {"output": "A cat.", "input": "<image>", "instruction": "<image>What?", "images": FILES[:2]},
            "▣What?\n\n▣",
            [RED, GREEN],
        ),
        ({"question": "What?", "answer": "A cat.", "image": "red.png"}, "▣What?", [RED]),
        (
            {"prompt": [turn("user", "<image>What?")], "completion": [turn("assistant", "A cat.")], "image": "red.png"},
            "▣What?",
            [RED],
        ),
        (
            {
                "messages": [turn("user", "What?"), turn("assistant", "A cat.")],
                "images": ["red.png"],
                "note": "no <image>",
            },
            "▣What?",
            [RED],
        ),
    ],
)
def test_forms_of_rows(row: dict[str, Any], text: str, found: list[Any], folder: Path) -> None:
    before = copy.deepcopy(row)
    assert text_of(row, folder) == (chat(text), found)
    assert row == before


def test_images_go_before_the_first_words_of_the_user(folder: Path) -> None:
    turns = [TURNS[0], turn("user", "What is it?"), TURNS[2], turn("user", "?"), turn("assistant", "B.")]
    row: dict[str, Any] = {"messages": turns, "image": "red.png"}
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert text_of(row, folder) == (f"{system}{chat('▣What is it?')}{chat('?', 'B.')}", [RED])
    row = {"instruction": "And?", "output": "B.", "history": [["What?", "A cat."]], "image": "red.png"}
    assert text_of(row, folder) == (f"{chat('▣What?')}{chat('And?', 'B.')}", [RED])


def test_images_come_in_the_order_in_which_they_are_shown(folder: Path) -> None:
    """Not in that of the row's keys."""
    row = {
        "completion": [turn("user", [{"type": "image", "path": "blue.png"}]), turn("assistant", "A cat.")],
        "prompt": [turn("user", [{"type": "image", "path": "red.png"}])],
    }
    text = chat("▣")
    assert text_of(row, folder) == ("<|im_start|>user\n▣<|im_end|>\n" + text, [RED, BLUE])


def test_images_in_the_history_come_first(folder: Path) -> None:
    row = {"instruction": "<image>?", "output": "B.", "history": [["<image>", "A cat."]], "images": FILES[:2]}
    assert text_of(row, folder) == (f"{chat('▣')}{chat('▣?', 'B.')}", [RED, GREEN])


def test_system_prompts(folder: Path) -> None:
    row = {"question": "What?", "answer": "A cat.", "image": "red.png"}
    text = "<|im_start|>system\nBe brief.<|im_end|>\n" + chat("▣What?")
    assert text_of(row, folder, system_prompt="Be brief.") == (text, [RED])


def test_completions_and_texts(folder: Path) -> None:
    maker = encoder("llava", folder)
    sample = maker.encode({"completion": " a <image> cat", "prompt": "This <image> is", "images": FILES[:2]})
    image = "<image>" * 4
    assert shown(sample, "llava") == f"This {image} is{OPEN} a {CLOSE}{image}{OPEN} cat<|im_end|>{CLOSE}"
    assert colours(sample) == [RED, GREEN]
    sample = maker.encode({"text": "A cat: <image>.", "image": "red.png"})
    assert shown(sample, "llava") == f"A{OPEN} cat: {CLOSE}{image}{OPEN}.<|im_end|>{CLOSE}"
    sample = maker.encode({"text": "A cat.", "image": "red.png"})
    assert shown(sample, "llava") == f"{image}{OPEN}A cat.<|im_end|>{CLOSE}"
    maker = encoder("llava", folder, with_prompts=True)
    sample = maker.encode({"completion": " a <image> cat", "prompt": "This <image> is", "images": FILES[:2]})
    assert sample.prompt_ids is not None
    assert images_of("llava").tokenizer.decode(sample.prompt_ids) == f"This {image} is"
    assert (sample.fields[PROMPT_IMAGES], len(from_fields(sample.fields))) == (1, 2)
    assert sample.question == "This ⟨image⟩  is"


def test_rows_with_loss_weights(folder: Path) -> None:
    turns = [TURNS[1], turn("assistant", "A cat.", loss_weight=0.5)]
    sample = encoder("llava", folder).encode({"messages": turns, "images": FILES[:1]})
    assert set(sample.loss_weights.tolist()) == {0.0, 0.5}
    assert float(sample.loss_weights.sum()) == 0.5 * len("A cat.x")


QUESTION = [turn("user", "<image>What?"), turn("assistant", "A cat.")]
PLAIN = [turn("user", "What?"), turn("assistant", "A cat.")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": QUESTION}, "0 images and 1 place"),
        ({"messages": QUESTION, "images": FILES[:2]}, "2 images and 1 place"),
        ({"messages": QUESTION, "images": FILES[:1], "image": "red.png"}, "both image and images"),
        ({"messages": PLAIN, "videos": ["a.mp4"]}, "the row has videos"),
        (asked({"type": "video", "video": "a.mp4"}, WORDS), "type 'video'"),
        (asked({"type": "sound"}, WORDS), "type 'sound'"),
        (asked({"type": "image"}, WORDS), "0 images and 1 place"),
        (asked({"type": "image", "index": 1}, {"type": "image"}, WORDS) | {"images": FILES[:2]}, r"images\[0\] has no"),
        (asked({"type": "image", "index": 5}, {"type": "image", "index": 0}) | {"images": FILES[:2]}, r"images\[1\]"),
        ({"messages": [turn("user", "See <image_1>"), PLAIN[1]], "images": FILES[:1]}, "'<image_1>' is no place"),
        ({"question": "<IMAGE> What?", "answer": "A cat.", "images": FILES[:1]}, "'<IMAGE>' is no place"),
        (
            {"prompt": "<|image_pad|>A", "completion": " cat", "image": "red.png"},
            "'<|image_pad|>' is no place".replace("|", r"\|"),
        ),
        (asked({"type": "image", "index": 3}, WORDS) | {"images": FILES}, "3 images and 1 place"),
        (asked({"type": "image", "path": "red.png"}, WORDS) | {"images": FILES[:1]}, "parts name others"),
        (asked({"type": "image", "image": "red.png"}, {"type": "text"}), "type text without text"),
        (asked(7, WORDS), "type 'int'"),
        ({"messages": [turn("user", "a\ue0f7"), turn("assistant", "A.")]}, r"U\+E0F7"),
        ({"messages": [turn("assistant", "A cat.")], "images": FILES[:1]}, "no user turn"),
        ({"messages": [turn("user", "<image>?")], "images": FILES[:1]}, "no assistant turn"),
        ({"messages": QUESTION, "images": ["grey.png"]}, r"the image grey.png does not exist \(looked for /"),
        ({"messages": QUESTION, "images": [3]}, "an image is int"),
        ({"messages": QUESTION, "images": [{"file": "red.png"}]}, r"none of bytes.*its keys: file"),
        ({"messages": QUESTION, "images": [{"path": "red.png", "url": "blue.png"}]}, "an image has path and url"),
        ({"messages": QUESTION, "images": [{"path": "red.png", "max_pixels": 784}]}, "an image has 'max_pixels' .784"),
        (asked({"type": "image", "image": "red.png", "max_pixels": 784}), "type 'image' has max_pixels"),
        (asked({"type": "image", "image": "red.png", "path": "blue.png"}), "type 'image' has path"),
        (asked({"type": "image", "image": "red.png", "text": "a disc"}), "type 'image' has text"),
        (
            asked({"type": "image_url", "image_url": {"url": "red.png", "detail": "low"}}),
            "an image has 'detail' .'low'",
        ),
        ({**asked({"type": "image", "index": "0"}), "images": ["red.png"]}, "index of an image is '0'"),
        ({"caption": "A cat.", "image": "red.png"}, "format that is not known"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], says: str, folder: Path) -> None:
    with pytest.raises(RowError, match=says):
        encoder("llava", folder).encode(row)


# -- lengths -------------------------------------------------------------------------------------------------------


def test_no_row_is_cut_before_the_end_of_its_last_image(folder: Path) -> None:
    row = {"messages": [turn("user", "<image>What?<image>"), turn("assistant", "A cat on a mat.")], "images": FILES[:2]}
    maker = encoder("llava", folder)
    sample = maker.encode(row)
    stop = int(sample.fields[IMAGE_STOP])
    head = images_of("llava").tokenizer.decode(sample.input_ids[:stop])
    assert head == f"<|im_start|>user\n{'<image>' * 4}What?{'<image>' * 4}"
    for length, kept in ((sample.length, sample.length), (sample.length - 3, sample.length - 3), (stop, stop)):
        maker.limit = LengthLimit(length, "truncate")
        assert maker.fit(sample).length == kept
    maker.limit = LengthLimit(stop - 1, "truncate")
    with pytest.raises(RowDropped, match=f"last image ends at {stop}: no image is cut"):
        maker.fit(sample)
    maker.limit = LengthLimit(sample.length - 1, "drop")
    with pytest.raises(RowDropped, match=f"^{sample.length} tokens$"):
        maker.fit(sample)
    maker.limit = LengthLimit(sample.length - 1, "fail")
    with pytest.raises(DataError, match=f"the row has {sample.length} tokens, data.max_length is"):
        maker.fit(sample)
    text = maker.encode({"messages": PLAIN})
    maker.limit = LengthLimit(20, "truncate")
    assert maker.fit(text).length == 20
