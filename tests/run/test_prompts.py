"""Questions with images as prompts: where images go, and what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardtune.batch import Prompt
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import PROMPT_IMAGES, from_fields
from shardtune.data.images.placeholders import ImageText
from shardtune.errors import DataError, ModelError
from shardtune.run.prompts import PromptBuilder
from tests.support.vision import FAMILIES, PARTS
from tests.support.workspace import CHATML, make_tokenizer

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def images() -> ImageText:
    return ImageText(FAMILIES["llava"]()[1])


@pytest.fixture
def asker(images: ImageText, tmp_path: Path) -> PromptBuilder:
    """Beside red.png and blue.png."""
    for name, colour in (("red", RED), ("blue", BLUE)):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{name}.png")
    return PromptBuilder(ImageChatEncoder(images, PARTS.replace("IMAGE", "<image>"), folder=tmp_path), "runs/demo")


def shown(prompt: Prompt, images: ImageText) -> tuple[str, list[Any]]:
    text = str(images.tokenizer.decode(prompt.tokens.tolist())).replace("<image>" * 4, "▣")
    stored = from_fields(prompt.fields)
    assert len(stored) == prompt.fields[PROMPT_IMAGES]
    return text, [image.read().getpixel((0, 0)) for image in stored]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


PARTS_OF_A_TURN = [{"type": "image", "path": "blue.png"}, {"type": "text", "text": "c"}]
OPENED = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("turns", "given", "text", "found"),
    [
        ([user("What?")], [], "<|im_start|>user\nWhat?", []),
        ([user("What?")], ["red.png", "blue.png"], "<|im_start|>user\n▣▣What?", [RED, BLUE]),
        ([user("Is <image> <image>?")], ["red.png", "blue.png"], "<|im_start|>user\nIs ▣ ▣?", [RED, BLUE]),
        ([user(PARTS_OF_A_TURN)], [], "<|im_start|>user\n▣c", [BLUE]),
        ([user("What?")], [Image.new("RGB", (8, 8), RED)], "<|im_start|>user\n▣What?", [RED]),
        (
            [user("a"), {"role": "assistant", "content": "b"}, user("c")],
            ["red.png"],
            f"<|im_start|>user\na{OPENED}b<|im_end|>\n<|im_start|>user\n▣c",
            [RED],
        ),
    ],
)
def test_turns(turns: Any, given: Any, text: str, found: Any, asker: PromptBuilder, images: ImageText) -> None:
    assert shown(asker.turns(turns, given), images) == (text + OPENED, found)


def test_texts_to_go_on_from(asker: PromptBuilder, images: ImageText) -> None:
    assert shown(asker.text("This <image> is", ["red.png"]), images) == ("This ▣ is", [RED])
    assert shown(asker.text("This is", ["red.png", "blue.png"]), images) == ("▣▣This is", [RED, BLUE])
    assert shown(asker.text("This is"), images) == ("This is", [])


def test_what_cannot_be_asked(asker: PromptBuilder) -> None:
    asker.turns([user("?")])
    for turns, given, says in (
        ([user("?")], ["green.png"], "green.png does not exist"),
        ([user("<image>?")], [], "there are 0 images and 1 place"),
        ([user("<image>?")], ["red.png", "red.png"], "there are 2 images and 1 place"),
        ([user(PARTS_OF_A_TURN)], ["red.png"], "parts name others"),
        ([user([{"type": "video", "video": "a.mp4"}])], [], "type 'video'"),
    ):
        with pytest.raises(DataError, match=says) as told:
            asker.turns(turns, given)
        assert str(told.value.where).startswith("prompt ")
    assert told.value.where == "prompt 6"


def test_tools_and_their_calls_are_in_the_prompt() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.tool_calls or m.content }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(), template)
    asker = PromptBuilder(encoder, "runs/demo")
    call = {"role": "assistant", "tool_calls": [{"name": "sum", "arguments": {"x": 1}}]}
    tools = [{"name": "sum", "parameters": {}}]
    for given in (tools, json.dumps(tools)):
        prompt = asker.turns([user("?"), call, {"role": "tool", "content": "1"}], tools=given)
        text = str(encoder.tokenizer.decode(prompt.tokens.tolist()))
        assert text.startswith('[{"type": "function", "function": {"name": "sum"')
        assert text.index("'name': 'sum'") < text.index("[tool]1")
    with pytest.raises(DataError, match="tools"):
        asker.turns([user("?")], tools=3)


def test_a_model_of_text_sees_no_images() -> None:
    encoder = ChatEncoder(make_tokenizer(), CHATML)
    asker = PromptBuilder(encoder, "runs/demo")
    for number, (turns, given) in enumerate((([user("?")], ["red.png"]), ([user(PARTS_OF_A_TURN)], [])), 1):
        with pytest.raises(ModelError, match=r"takes text and no images \(runs/demo\)") as told:
            asker.turns(turns, given)
        assert told.value.where == f"prompt {number}"
    with pytest.raises(ModelError, match="takes text and no images"):
        asker.text("a", ["red.png"])
    whole = asker.turns([user("a<image>b")]).tokens.tolist()
    assert asker.turns([user([{"type": "text", "text": "a<image>"}, "b"])]).tokens.tolist() == whole
    with pytest.raises(DataError, match="without text"):
        asker.turns([user([{"type": "text"}])])
