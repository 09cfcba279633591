"""Processors that put text and images of a row together in their own ways, and rows that no others may join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from shardtune.batch import Prompt
from shardtune.config import load_recipe
from shardtune.data.encoder import RowDropped, RowError
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import ENDS
from shardtune.data.images.whole_row_encoder import WholeRowEncoder
from shardtune.data.images.whole_rows import WholeRows
from shardtune.errors import DataError
from shardtune.evaluate.generate import Sampling
from shardtune.models.check_sizes import made_size
from shardtune.models.vision.processors import applied_images, load_processor
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.models.vision.test_vision_on_ranks import LR, a_recipe
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, quiet, run_recipe, run_recipes
from tests.support.flat_vision import IGNORED
from tests.support.tiny_vision import ROWS_OF_IMAGES, image_rows, inputs_of, make_processor, save_family

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # PaliGemma's processor

ROUNDED = 1e-6
"""These families compute norms in fp32 whatever the precision."""
EXACT = 1e-10


def plain(directory: Path, rows: list[dict[str, Any]], steps: int) -> Trace:
    """Losses, norms and weights of plain transformers, over the processor's own output for each row."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float64).train()
    if model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")  # the other has no kernel for fp64
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    made, trace = inputs_of(directory, rows), Trace()
    for _ in range(steps):
        optimizer.zero_grad()
        weight, total = sum(int((labels[1:] != IGNORED).sum()) for _, labels in made), 0.0
        for inputs, labels in made:
            cast = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
            logits = model(**cast, use_cache=False).logits[0, -len(labels) :]  # GIT's begin with its images'
            loss = F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum") / weight
            loss.backward()
            total += float(loss.detach())
        norms = [p.grad for p in model.parameters() if p.grad is not None]
        trace.losses.append(total)
        trace.norms.append(float(torch.nn.utils.get_total_norm(norms)))
        optimizer.step()
    trace.weights = dict(model.state_dict())
    return trace


def saved(family: str, folder: Path, kind: str, count: int = 4) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A recipe of two steps over all rows, and the rows."""
    save_family(family, folder)
    file, rows = image_rows(folder, count, kind)
    further: dict[str, Any] = {"actor__global_batch_size": count, "runner__max_steps": 2, "data__eval_data_paths": None}
    return a_recipe(folder, file, **further), rows


def check(got: Trace, expected: Trace, exact: float) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=exact)
    assert got.norms == pytest.approx(expected.norms, rel=exact)
    for name, tensor in got.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=exact, atol=exact, check_dtype=False)


@pytest.mark.lengthy
def test_no_blank_image_lengthens_a_row_of_a_model_that_is_not_packed(tmp_path: Path) -> None:
    """GLM-5 Next selects keys, and ties among them fall otherwise where more tokens follow a row."""
    values, rows = saved("glm5_next", tmp_path, ROWS_OF_IMAGES[0])
    assert {bool(row["images"]) for row in rows} == {True, False}
    values["runner"]["max_steps"] = 1
    values["actor"]["micro_batch_size"] = 2
    got, expected = run_recipe(values), plain(tmp_path, rows, 1)
    assert got.losses == pytest.approx(expected.losses, rel=ROUNDED)
    assert got.norms == pytest.approx(expected.norms, rel=ROUNDED)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("family", "exact"), [("paligemma", ROUNDED), ("git", EXACT), ("blip", EXACT), ("ernie4_5_vl_moe", ROUNDED)]
)
def test_rows_are_those_of_their_processor(family: str, exact: float, tmp_path: Path) -> None:
    """PaliGemma's sees the text before the first answer in both directions, and writes around it; GIT and BLIP take an
    image beside the text; ERNIE 4.5-VL sends tokens to experts by their kind."""
    values, rows = saved(family, tmp_path, ROWS_OF_IMAGES[2])
    check(run_recipe(values), plain(tmp_path, rows, 2), exact)


@pytest.mark.lengthy
def test_rows_with_and_without_images_stay_apart(tmp_path: Path) -> None:
    """Llama 3.2 Vision leaves out layers for a row without an image, on all ranks at once; PaliGemma on two ranks."""
    recipes, expected = [], []
    for family, kind in (("mllama", ROWS_OF_IMAGES[0]), ("paligemma", ROWS_OF_IMAGES[2])):
        (tmp_path / family).mkdir()
        values, rows = saved(family, tmp_path / family, kind)
        assert {bool(row["images"]) for row in rows} == ({True, False} if family == "mllama" else {True})
        values["runner"]["max_steps"] = 1
        recipes.append(values)
        expected.append(plain(tmp_path / family, rows, 1))
    check(run_recipe(recipes[0]), expected[0], ROUNDED)
    for traces in run_ranks(run_recipes, 2, recipes):
        for got, one in zip(traces, expected, strict=True):
            check(got, one, ROUNDED)


def answered(values: dict[str, Any]) -> list[list[int]]:
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    evals = next(iter(worker.prepared.evals.values()))
    rows = [evals.row(index) for index in range(3)]
    prompts = [Prompt(row.prompt_ids, row.fields) for row in rows if row.prompt_ids is not None]
    written = worker.generator().continuations(prompts, Sampling(max_new_tokens=4))
    worker.release()
    return written


@pytest.mark.lengthy
@pytest.mark.parametrize("family", ["mllama", "paligemma"])
def test_prompts_are_those_of_their_processor(family: str, tmp_path: Path) -> None:
    """Each is continued alone, with an image or without."""
    kind = ROWS_OF_IMAGES[0 if family == "mllama" else 2]
    values, rows = saved(family, tmp_path, kind, 3)
    values["data"] |= {"eval_data_paths": values["data"]["train_data_paths"]}
    values["eval"] = {**values.get("eval", {}), "generate": True}
    processor: Any = load_processor(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64)
    for row, answer in zip(rows, answered(values), strict=True):
        (inputs, labels), *_ = inputs_of(tmp_path, [row])
        asked = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        start = int((labels != IGNORED).nonzero()[0])
        if len(row["messages"]) > 2:  # the last answer is asked for
            start = int((labels != IGNORED).diff().nonzero()[-2]) + 1
        assert processor.tokenizer.decode(asked["input_ids"][0, :start])
        of_tokens = asked["input_ids"].shape
        cut = {key: value[:, :start] if value.shape[:2] == of_tokens else value for key, value in asked.items()}
        if family == "paligemma":  # a prompt has no suffix: its text ends with a line's end
            ends = torch.tensor(processor.tokenizer("\n")["input_ids"])[None]
            cut["input_ids"] = torch.cat([cut["input_ids"], ends], 1)
            cut["token_type_ids"] = torch.zeros_like(cut["input_ids"])
        made: Any = model
        made = made.generate(**cut, max_new_tokens=len(answer), do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert made[0, cut["input_ids"].shape[1] :].tolist() == answer


def test_targets_are_found_in_what_the_processor_writes(tmp_path: Path) -> None:
    """A begin token and a line's end around the text, an end token after it; a row that it cannot express is bad."""
    processor = make_processor("paligemma")
    images = applied_images(processor)
    assert isinstance(images, WholeRows)
    assert made_size(images, [40, 30]) == made_size(images.processor.image_processor, [40, 30])
    _, rows = image_rows(tmp_path, 3)
    encoder = WholeRowEncoder(images, None, max_length=60, folder=tmp_path)
    sample = encoder.encode({"prompt": "<image>what?", "completion": " a b", "images": rows[1]["images"][:1]})
    text = images.tokenizer.decode(sample.input_ids)
    assert text == "<image><image><image><image><bos>what?\n a b<|im_end|>"
    trained = images.tokenizer.decode(sample.input_ids[sample.loss_weights > 0])
    assert trained == " a b<|im_end|>"
    assert sample.fields[ENDS].size == 1
    with pytest.raises(RowError, match="an image follows the first answer"):
        encoder.encode({"prompt": "what?", "completion": "<image>a", "images": rows[1]["images"][:1]})
    with pytest.raises(RowError, match="refuses it: ValueError: `images` are expected"):
        encoder.encode({"prompt": "what?", "completion": "a"})
    long = encoder.encode({"prompt": "<image>what?", "completion": "a" * 80, "images": rows[1]["images"][:1]})
    with pytest.raises(RowDropped, match="none is cut"):
        encoder.fit(long)
    beside = WholeRowEncoder(WholeRows(make_processor("git")), None, folder=tmp_path)
    two = {"prompt": "<image><image>a", "completion": "b", "images": rows[1]["images"]}
    with pytest.raises(RowError, match="takes 1 per row"):
        beside.encode(two)


@pytest.mark.parametrize("family", ["mllama", "paligemma"])
def test_a_conversation_to_answer_is_the_prompt_of_a_row(family: str, tmp_path: Path) -> None:
    """With the reasoning of earlier answers, which the template does not print."""
    processor = make_processor(family)
    images = applied_images(processor)
    template = images.tokenizer.chat_template
    if isinstance(images, WholeRows):
        encoder: ImageChatEncoder = WholeRowEncoder(
            images, template, thinking="keep", with_prompts=True, folder=tmp_path
        )
    else:
        encoder = ImageChatEncoder(images, template, thinking="keep", with_prompts=True, folder=tmp_path)
    file, rows = image_rows(tmp_path, 3, ROWS_OF_IMAGES[0 if family == "mllama" else 2])
    earlier = 0
    for row in rows:
        *turns, answer = row["messages"]
        turns = [{**turn, "reasoning": "look"} if turn["role"] == "assistant" else turn for turn in turns]
        sample = encoder.at(file.parent).encode({**row, "messages": [*turns, answer]})
        prompt = encoder.prompt(turns, None, [str(file.parent / image) for image in row["images"]])
        assert sample.prompt_ids is not None
        assert prompt.tokens.tolist() == sample.prompt_ids.tolist()
        earlier += "look" in images.tokenizer.decode(prompt.tokens)
    assert earlier or family == "paligemma"  # whose rows have one answer each


def test_a_model_that_needs_an_image_has_no_rows_without(tmp_path: Path) -> None:
    values, _ = saved("blip", tmp_path, ROWS_OF_IMAGES[0])
    with pytest.raises(DataError, match="forward always takes one"):
        SFTWorker(load_recipe(values), report=quiet).setup()
