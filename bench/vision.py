"""Vision-language models, measured: `python bench/vision.py [memory numbers loader waiting] [--small]`.

Rewrites the sections `vision-memory`, `vision-numbers`, `vision-loader` and `vision-waiting` of docs/benchmarks.md;
ends with exit code 1 where a limit does not hold. `--small` runs a short form of each and writes nothing.
`loader` needs TRL: `pip install -c constraints.txt trl`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from transformers import LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

import shardtune  # noqa: E402
from shardtune.config import load_recipe  # noqa: E402
from shardtune.data.loader.step_loader import StepLoader  # noqa: E402
from shardtune.models.vision.vision_language import VisionLanguage  # noqa: E402
from shardtune.training.worker.adapter_worker import SFTWorker  # noqa: E402
from tests.models.vision.test_vision_on_ranks import EXACT, LR, ROUNDED, a_recipe, order  # noqa: E402
from tests.support import flat_vision  # noqa: E402
from tests.support.dist.ranks import run_ranks  # noqa: E402
from tests.support.dist.training import Trace, quiet, run_recipe  # noqa: E402
from tests.support.memorised import memorise  # noqa: E402
from tests.support.vision import FAMILIES, save_image_rows, save_vision_model, template, tokenizer  # noqa: E402

Section = tuple[str, bool]
"""The text of a section, and whether all its limits hold."""


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# -- memory ------------------------------------------------------------------------------------------------------------

PICTURES, MEMORY_STEPS = 16, 250
MOST_SECONDS, FEWEST_EXACT = 120.0, 0.95


def memory(small: bool) -> Section:
    """Sixteen pictures learned by heart by each family."""
    families = ("llava", "smolvlm") if small else tuple(FAMILIES)
    count, steps = (6, 90) if small else (PICTURES, MEMORY_STEPS)
    lines, kept = [], True
    for family in families:
        with tempfile.TemporaryDirectory() as folder, _silently():
            found = memorise(family, Path(folder), count=count, steps=steps)
        kept &= found.exact >= FEWEST_EXACT and found.seconds <= MOST_SECONDS and found.exchanged > found.loss
        losses = (f"{found.loss:.3f}", f"{found.exchanged:.2f}")
        lines.append((family, f"{found.seconds:.0f}", f"{found.exact:.3f}", *losses))
        print(*lines[-1], flush=True)
    text = (
        f"{count} pictures of coloured squares with the same question and a word of four letters each, {steps} steps "
        "of all of them; models of two layers and random weights. CPU seconds of one thread, for training, evaluating "
        f"and answering; answers that are right letter by letter (limit {FEWEST_EXACT:g}, within {MOST_SECONDS:g} s); "
        "the loss, and the loss when each row has the picture of the next one.\n\n"
    )
    return text + table(("model", "CPU seconds", "exact", "loss", "loss, pictures exchanged"), lines), kept


# -- numbers -----------------------------------------------------------------------------------------------------------

ROUNDED_FP32 = 1e-5
"""Ten steps of SGD in fp32, losses and norms."""


def numbers(small: bool) -> Section:
    """One and two ranks against plain transformers."""
    families = ("llava", "qwen2_5_vl") if small else tuple(FAMILIES)
    lines, kept = [], True
    for family in families:
        for precision in ("fp64", "fp32"):
            with tempfile.TemporaryDirectory() as folder:
                found = _compared(family, precision, Path(folder))
            own = ROUNDED if family == "gemma3" else EXACT
            kept &= max(max(numbers) for _, numbers in found) <= (own if precision == "fp64" else ROUNDED_FP32)
            lines += [(family, precision, ranks, *(f"{n:.1e}" for n in numbers)) for ranks, numbers in found]
            print(*lines[-1], flush=True)
    text = (
        "Ten steps of four rows (no, one or two images each) in micro-batches of one, SGD with momentum, against plain "
        "transformers, which computes each row by itself from the processor's own inputs. Largest differences, losses "
        f"and norms relative. Limits: fp64 {EXACT:g}, of Gemma 3 {ROUNDED:g} (its norms compute in fp32 whatever the "
        f"dtype); fp32 {ROUNDED_FP32:g}.\n\n"
    )
    return text + table(("model", "precision", "ranks", "loss", "gradient norm", "weights"), lines), kept


def _compared(family: str, precision: str, folder: Path) -> list[tuple[int, tuple[float, float, float]]]:
    """The largest differences of losses, norms and weights, on one rank and on two."""
    directory = save_vision_model(family, folder / "model")
    file, rows = save_image_rows(folder)
    values = a_recipe(directory, file, actor__model__precision=precision, data__eval_data_paths=None)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    oracle = flat_vision.train(directory, rows, order(values), lr=LR, dtype=dtype)
    traces = {1: [run_recipe(values)], 2: run_ranks(run_recipe, 2, values)}
    return [(ranks, _apart(made, oracle)) for ranks, made in traces.items()]


def _apart(traces: Sequence[Trace], oracle: flat_vision.Trained) -> tuple[float, float, float]:
    def furthest(own: Sequence[float], other: Sequence[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))

    return (
        max(furthest(trace.losses, oracle.losses) for trace in traces),
        max(furthest(trace.norms, oracle.norms) for trace in traces),
        max(float((t - oracle.weights[name]).abs().max()) for trace in traces for name, t in trace.weights.items()),
    )


# -- photographs -------------------------------------------------------------------------------------------------------

SIDE, PATCH = 336, 14
"""Of LLaVA-1.5."""
PHOTO = (640, 480)


@dataclass(frozen=True)
class Photographs:
    """Rows about photographs, and a LLaVA that reads them at its usual size."""

    model: Path
    rows: Path


def make_photographs(folder: Path, count: int, width: int, layers: int) -> Photographs:
    """JPEG files of shapes, gradients and noise, one row each, and a model of some width."""
    (folder / "photographs").mkdir()
    lines = []
    for number in range(count):
        name = f"photographs/{number}.jpg"
        _photograph(number).save(folder / name, quality=90)
        turns = [
            {"role": "user", "content": "<image>What is in this picture, and where?"},
            {"role": "assistant", "content": f"Picture {number} shows some discs on a bright ground."},
        ]
        lines.append(json.dumps({"messages": turns, "images": [name]}) + "\n")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(lines))
    return Photographs(_save_llava(folder / "model", width, layers), rows)


def _photograph(number: int) -> Image.Image:
    draw = np.random.default_rng(number)
    ground = Image.fromarray(draw.integers(0, 256, (15, 20, 3), np.uint8)).resize(PHOTO, Image.Resampling.BICUBIC)
    noisy = np.asarray(ground, np.float32) + draw.normal(0, 8, (PHOTO[1], PHOTO[0], 3))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = draw.integers(0, PHOTO[0] - 80), draw.integers(0, PHOTO[1] - 60)
        pen.ellipse((x, y, x + 80, y + 60), fill=tuple(draw.integers(0, 256, 3).tolist()))
    return image


def _save_llava(directory: Path, width: int, layers: int) -> Path:
    text = tokenizer("<image>", image="<image>")
    shape = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
    }  # fmt: skip
    config: Any = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**shape, image_size=SIDE, patch_size=PATCH),
        text_config=transformers.LlamaConfig(
            **shape, vocab_size=len(text), max_position_embeddings=2048, eos_token_id=text.eos_token_id,
            bos_token_id=None, pad_token_id=None,
        ),
        image_token_id=text.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
    )  # fmt: skip
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size), text, patch_size=PATCH,
        vision_feature_select_strategy="default", chat_template=template(text), image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def photograph_recipe(made: Photographs, folder: Path, rows: int, processes: int, steps: int) -> dict[str, Any]:
    """`steps` steps of `rows` rows with loader processes."""
    return {
        "runner": {
            "max_steps": steps, "max_epochs": -1, "save_interval": -1,
            "logger": {
                "log_path": str(folder / "runs"), "experiment_name": f"{processes}-processes",
                "logger_backends": ["jsonl"], "log_interval": 1,
            },
        },
        "actor": {
            "micro_batch_size": rows, "global_batch_size": rows,
            "model": {"model_type": "vision_language", "model_path": str(made.model), "precision": "fp32"},
        },
        "data": {
            "train_data_paths": str(made.rows), "num_workers": processes, "cache_dir": str(folder / "cache"),
        },
    }  # fmt: skip


# -- loader ------------------------------------------------------------------------------------------------------------

BATCH, PROCESSES = 8, 2
TIMES = 3.0
FIRST, LATER = "keep_pixels, first epoch", "keep_pixels, later epochs"
"""What is measured with `data.keep_pixels`; without it all epochs are alike."""
LOADERS = ("shardtune", FIRST, LATER, "TRL")


def loader(small: bool) -> Section:
    """Images a second of the loader, beside TRL's collator in torch's."""
    photos, rounds, batches = (96, 1, 4) if small else (256, 7, 24)
    with tempfile.TemporaryDirectory() as folder:
        made = make_photographs(Path(folder), photos, 64, 1)
        contenders: dict[tuple[str, int], Callable[[], Iterator[Any]]] = {}
        for processes in (PROCESSES, 0):
            for name in LOADERS[:-1]:
                contenders[name, processes] = _own_batches(made, Path(folder), processes, name)
            contenders["TRL", processes] = _trl_batches(made, processes)
        rates: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
        for _ in range(rounds):
            for key, start in contenders.items():
                rates[key].append(_images_per_second(start(), batches))
        floor = statistics.median(_pillow_per_second(made, photos) for _ in range(rounds))
    lines, ratios = [], {}
    for name, processes in contenders:
        pairs = zip(rates[name, processes], rates["TRL", processes], strict=True)
        ratios[name, processes] = statistics.median(own / other for own, other in pairs)
        rate = f"{statistics.median(rates[name, processes]):.0f}"
        lines.append((name, processes, rate, f"{ratios[name, processes]:.2f}"))
    lines.append(("Pillow alone: decoding, resizing", 0, f"{floor:.0f}", ""))
    print(table(("loader", "processes", "images/s", "to TRL"), lines), flush=True)
    kept = ratios[LATER, PROCESSES] >= TIMES
    text = (
        f"{photos} JPEG photographs of {PHOTO[0]} x {PHOTO[1]}, LLaVA-1.5's preprocessing ({SIDE} x {SIDE}), "
        f"micro-batches of {BATCH} rows with one photograph each: images a second, from files to what the model takes "
        "(fp32 pixels) in the training process; 0 processes: made there. TRL: `DataCollatorForVisionLanguageModeling` "
        "with the same processor and files in torch's `DataLoader`; it decodes in every epoch. Median of "
        f"{rounds} interleaved rounds of {batches} batches, and median of the rounds' ratios to TRL with as many "
        f"processes; the pixels are bitwise the same. Aim: later epochs with `data.keep_pixels` and {PROCESSES} "
        f"processes {TIMES:g} times. Without kept pixels no loader can be that far ahead on the same cores: decoding a "
        "photograph and resizing it take most of the time of both, and both leave them to Pillow (the last line; twice "
        "that in two processes); what can be saved is the rest.\n\n"
    )
    return text + table(("loader", "processes", "images/s", "median ratio to TRL"), lines), kept


def _images_per_second(batches: Iterator[Any], count: int) -> float:
    """Of the batches behind those that were made ahead while nobody waited."""
    for _ in range(2 * PROCESSES + 2):
        next(batches)
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * BATCH / (time.perf_counter() - began)


def _pillow_per_second(made: Photographs, count: int) -> float:
    """Photographs decoded and resized by this process, and nothing else."""
    files = sorted((made.rows.parent / "photographs").iterdir())[:count]
    size = (round(PHOTO[0] * SIDE / PHOTO[1]), SIDE)
    began = time.perf_counter()
    for file in files:
        with Image.open(file) as image:
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    return len(files) / (time.perf_counter() - began)


def _own_batches(made: Photographs, folder: Path, processes: int, name: str) -> Callable[[], Iterator[Any]]:
    """As training does it."""
    recipe = photograph_recipe(made, folder, BATCH, processes, 1)
    cache = folder / f"cache-{processes}-{LOADERS.index(name)}"
    recipe["data"] |= {"cache_dir": str(cache), "keep_pixels": name in (FIRST, LATER)}
    worker = SFTWorker(load_recipe(recipe), report=quiet)
    worker.setup()
    adapter, steps = worker.adapter, worker.loader
    assert isinstance(steps, StepLoader)
    assert isinstance(adapter, VisionLanguage)
    state = worker.data_state
    for _ in range(steps.num_steps(0) if name == LATER else 0):
        state = steps.step(state).after

    def made_ready() -> Iterator[Any]:
        if processes:
            yield from steps.steps(state)
        at = state
        while True:  # without the thread that works ahead
            step = steps.step(at)
            at = step.after
            yield step

    def start() -> Iterator[Any]:
        if name == FIRST:
            shutil.rmtree(cache / "pixels", ignore_errors=True)
        for step in made_ready():
            yield [adapter.images.numbers(batch.fields) for batch in step.micro_batches]

    return start


def _trl_batches(made: Photographs, processes: int) -> Callable[[], Iterator[Any]]:
    from torch.utils.data import DataLoader, RandomSampler
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    processor = LlavaProcessor.from_pretrained(made.model)
    rows = [json.loads(line) for line in made.rows.read_text().splitlines()]
    folder = made.rows.parent

    class Rows(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            turns = [dict(turn, content=turn["content"].replace("<image>", "")) for turn in rows[index]["messages"]]
            return {"messages": turns, "images": [Image.open(folder / name) for name in rows[index]["images"]]}

    def start() -> Iterator[Any]:
        data = Rows()
        while True:
            yield from DataLoader(
                data, BATCH, sampler=RandomSampler(data, replacement=True, num_samples=1 << 16), num_workers=processes,
                collate_fn=DataCollatorForVisionLanguageModeling(processor),
            )  # fmt: skip

    return start


# -- waiting -----------------------------------------------------------------------------------------------------------


def waiting(small: bool) -> Section:
    """How long training waits for photographs."""
    photos, steps, width, layers = (32, 5, 128, 2) if small else (128, 15, 256, 4)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        made = make_photographs(Path(folder), photos, width, layers)
        for processes in (PROCESSES, 0):
            with _silently():
                run = shardtune.train(photograph_recipe(made, Path(folder), 4, processes, steps))
            waited, seconds = _waited(run.dir / "metrics.jsonl")
            lines.append((processes, f"{seconds:.2f}", f"{waited * 1000:.0f}", f"{100 * waited / seconds:.1f} %"))
            print(*lines[-1], flush=True)
    text = (
        f"A LLaVA of {2 * layers} layers and width {width} in fp32, {steps} steps of four photographs of {PHOTO[0]} x "
        f"{PHOTO[1]} ({SIDE} x {SIDE} to the model): medians of `perf/data_wait` and of the step, from the third step "
        "on. With 0 processes a thread of the training process makes the next step ready.\n\n"
    )
    return text + table(("processes", "step, s", "waiting, ms", "share"), lines), True


def _waited(metrics: Path) -> tuple[float, float]:
    """Medians: seconds that a step waits, and seconds that it takes."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "perf/data_wait" in line][2:]
    seconds = [line["train/tokens"] / line["perf/tokens_per_second"] for line in steps]
    return statistics.median(line["perf/data_wait"] for line in steps), statistics.median(seconds)


SECTIONS: dict[str, Callable[[bool], Section]] = {
    "memory": memory, "numbers": numbers, "loader": loader, "waiting": waiting,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; by default all")
    parser.add_argument("--small", action="store_true", help="a short form of each, which writes nothing")
    args = parser.parse_args()
    if unknown := set(args.sections) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    broken = []
    for name in args.sections or SECTIONS:
        text, kept = SECTIONS[name](args.small)
        if not kept:
            broken.append(name)
        verdict = "Within the limits" if kept else "NOT WITHIN THE LIMITS"
        if not args.small:
            write_section(f"vision-{name}", f"{text}\n\n{verdict}. {machine()}.")
    print("all within their limits" if not broken else f"not within the limits: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
