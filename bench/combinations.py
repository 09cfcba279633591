"""Drawn recipes, each trained in several ways that must agree: `python bench/combinations.py [--cases 50] [--save]`.

A case is a tiny model of some kind (language models, tasks by name, vision-language models, a model of one's own) with
four to eight settings that are drawn from a seed among those of a recipe, in fp64. It is trained

- as it is, on one rank;
- in another layout, on two ranks and with other micro-batches: losses, norms, evaluations and final weights are the
  same but for rounding;
- stopped after a drawn step, and continued by the same command: the same bits, on one rank, in every third case on two;
- and once without each of its settings. Without one that is about numbers some number is different: a setting that
  changes nothing is not used. Without one that is about something else, all numbers are the same but for rounding.

A recipe that is refused is drawn again. `--verbose` prints the messages, `--first N --cases 1` repeats a case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ["HF_HUB_OFFLINE"] = "1"

from combination_inputs import FAMILIES, KINDS, OWN, POLICIES, TASKS, make_inputs, model_keys, placed  # noqa: E402
from results import machine, table, write_section  # noqa: E402

LIMIT = 1e-6
"""Relative, of what rounding alone tells apart: norms of these models round to fp32, and an optimizer enlarges that."""
MISUSE = 0.05
"""How often a setting of language models is tried with others: it has to be refused, or to count."""
Values = dict[str, Any]
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """Keys of a recipe that go together.

    Attributes:
        choices: what may be set, by dotted key.
        counts: whether numbers depend on it.
        apart: beginnings of keys that it does not go together with.
        language: whether it is about language models alone.
        chats: whether it is about conversations, too.
    """

    choices: Sequence[Keys]
    counts: bool = True
    apart: tuple[str, ...] = ()
    language: bool = False
    chats: bool = False

    def fits(self, keys: Keys) -> bool:
        return not any(key.startswith(self.apart) for key in keys)


def one(key: str, *values: Any, **given: Any) -> Setting:
    """A setting of one key."""
    return Setting([{key: value} for value in values], **given)


def free(key: str, *values: Any) -> Setting:
    """A setting of one key on which no number depends."""
    return one(key, *values, counts=False)


def lora(*choices: Keys, **given: Any) -> Setting:
    return Setting([{"model.is_lora": True, **choice} for choice in choices], apart=APART, **given)


def distilled(**options: Any) -> Keys:
    return {"loss": "distill", "teacher.model_path": "teacher", **{f"teacher.{k}": v for k, v in options.items()}}


APART = ("model.is_lora", "model.from_scratch", "model.freeze")
LOSSES = ("loss", "label_smoothing", "z_loss")
LENGTHS = ("data.max_length", "data.on_too_long")
WEIGHED = [
    {"path": "train.jsonl", "weight": 0.7, "name": "a"},
    {"path": "eval.jsonl", "weight": 1.6, "name": "b", "max_samples": 5},
]
SETTINGS: Sequence[Setting] = (
    one("label_smoothing", 0.1, apart=LOSSES, language=True),
    one("z_loss", 0.01, apart=LOSSES, language=True),
    one("loss", "dft", "own.py:focal", apart=LOSSES, language=True),
    Setting(
        [distilled(), distilled(divergence="reverse_kl"), distilled(temperature=2.0, ce_share=0.4), distilled(top_k=8)],
        apart=LOSSES,
        language=True,
    ),
    one("neftune_alpha", 5.0, language=True),
    Setting([{"optim.name": "SGD", "optim.args": {"momentum": 0.9}, "optim.lr": 0.1}], apart=("optim.adam",)),
    Setting([{"optim.name": name, "optim.lr": 0.01} for name in ("Adafactor", "Muon", "NAdam", "RMSprop", "Adagrad")]),
    Setting(
        [{"optim.name": "Adam", "optim.args": {"amsgrad": True}}, {"optim.name": "Adam", "optim.weight_decay": 1.0}]
    ),
    one("optim.weight_decay", 0.3),
    one("optim.adam_beta1", 0.5, apart=("optim.name",)),
    one("optim.adam_beta2", 0.9, apart=("optim.name",)),
    one("optim.adam_eps", 1e-3, apart=("optim.name",)),
    one(
        "optim.groups", [{"pattern": "mlp|lora|weight", "lr": 0.02}], [{"pattern": "norm|bias|A", "weight_decay": 0.5}]
    ),
    one("optim.ema_decay", 0.7),
    one("optim.clip_grad", 0.05),
    one("optim.lr_scheduler", "linear", "constant", "wsd", apart=("optim.lr_warmup",)),  # few steps come after it
    one("optim.lr_warmup_steps", 3, apart=("optim.lr_warmup",)),
    one("optim.lr_warmup_steps_ratio", 0.4, apart=("optim.lr_warmup",)),
    Setting([{"optim.lr_warmup_from_zero": True, "optim.lr_warmup_steps": 2}], apart=("optim.lr_warmup",)),
    one("optim.min_lr", 0.004, apart=("optim.lr_scheduler",)),
    one("data.train_on", "all", language=True),
    one("data.train_on", "last_assistant", apart=LENGTHS, language=True, chats=True),  # which may leave one turn
    one("data.system_prompt", "be brief", language=True, chats=True),
    one("data.chat_template", "other.jinja", language=True, chats=True),
    one("data.max_length", 28, apart=LENGTHS, language=True),
    Setting([{"data.on_too_long": "drop", "data.max_length": 48}], apart=LENGTHS, language=True),
    Setting(
        [
            {"data.on_too_long": "split", "data.max_length": 20},
            {"data.on_too_long": "split", "data.max_length": 20, "data.split_stride": 10},
        ],
        apart=LENGTHS,
        language=True,
    ),
    one("data.shuffle", False, apart=("runner.seed",)),
    one("data.eval_split", 0.3),
    one("data.transform", "own.py:changed"),
    one("data.train_data_paths", WEIGHED),
    one("global_batch_size", 4, 7, apart=("global_batch",)),
    Setting([{"global_batch_tokens": 160, "global_batch_size": None}], apart=("global_batch",), language=True),
    one("runner.seed", 7, apart=("data.shuffle",)),  # which draws the order, if nothing else
    one("runner.max_epochs", 3),
    one("model.from_scratch", True, apart=APART),
    one("model.freeze", ["mlp|DenseReluDense|intermediate|blocks"], ["[Nn]orm|stem"], ["embed|wte|head"], apart=APART),
    one("tokenizer.new_tokens", ["please"], language=True),
    lora(
        {},
        {"model.lora.r": 2},
        {"model.lora.alpha": 3.0},
        {"model.lora.use_rslora": True},
        {"model.lora.use_dora": True},
    ),
    lora(*({"model.lora.init": name} for name in ("gaussian", "orthogonal", "pissa", "olora", "mica"))),
    lora(
        {"model.lora.layers_to_transform": [1]},
        {"model.lora.exclude_modules": ["down_proj", "c_proj"]},
        {"model.lora.target_modules": ["o_proj"]},
        {"model.lora.rank_pattern": {"o_proj|c_proj": 1}, "model.lora.alpha_pattern": {"o_proj|c_proj": 99}},
        {"model.lora.modules_to_save": ["lm_head"]},
        {"model.lora.peft": {"peft_type": "IA3", "feedforward_modules": []}},
        language=True,
    ),
    free("model.gradient_checkpointing", True, "selective"),
    free("fill_micro_batches", True),
    free("max_tokens_per_micro_batch", 100),
    free("eval_micro_batch_size", 1),
    free("model.attn_implementation", "sdpa"),  # eager attention has a softmax in fp32
    free("fsdp_config.reshard_after_forward", False),
    free("fsdp_config.prefetch", 2),
    free("fsdp_config.reduce", "every"),
    free("runner.async_save", True),
    free("runner.save_interval", 1, "epoch"),
    free("runner.eval_interval", 2, "epoch"),
    free("runner.eval_before_training", True),
    free("runner.logger.log_interval", 2),
    free("runner.keep_last", 1),
    free("runner.on_spike", "skip"),
    free("runner.watchdog_seconds", 0),
    free("runner.best.monitor", "eval/loss"),
    free("data.num_workers", 2),
    free("data.on_bad_row", "skip"),
)
LAYOUTS: Sequence[Keys] = (
    {},
    {},
    {"training_backend": "fsdp1"},
    {"training_backend": "ddp"},
    {"parallel.data_replicate": 2},
    {"parallel.tensor": 2},
    {"parallel.sequence": 2},
    {"parallel.sequence": 2, "parallel.sequence_method": "ring"},
    {"parallel.expert": 2},
)


@dataclass(frozen=True)
class Case:
    """A drawn recipe.

    Attributes:
        number: of the seed.
        kind: of its model: a family, a task, or OWN.
        chats: whether rows are conversations, of a language model.
        chosen: its settings in order, with what each sets.
        layout: on two ranks.
        micro: rows of a micro-batch, on one rank and on two.
        stop: the step after which the run is interrupted.
    """

    number: int
    kind: str
    chats: bool
    chosen: Sequence[tuple[Setting, Keys]]
    layout: Keys
    micro: tuple[int, int]
    stop: int

    def __str__(self) -> str:
        rows = " (chats)" if self.chats else ""
        return (
            f"{self.number} {self.kind}{rows}: {'; '.join(in_words(given) for _, given in self.chosen)} | "
            f"{in_words(self.layout) or 'fsdp'}, micro-batches of {self.micro[0]} and {self.micro[1]}, stop {self.stop}"
        )


def in_words(given: Keys) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())


def drawn(number: int, attempt: int, kinds: Sequence[str]) -> Case:
    """The case of a number, of one of some kinds; `attempt` counts its recipes that were refused."""
    draw = random.Random(f"{number}/{attempt}")
    kind = draw.choice(kinds)
    chats = draw.random() < 0.6 and kind in FAMILIES
    chosen: list[tuple[Setting, Keys]] = []
    keys: Values = {}
    wanted = draw.randint(4, 8)
    for setting in draw.sample(SETTINGS, len(SETTINGS)):
        given = draw.choice(setting.choices)
        others = (other for other, _ in chosen)
        if any(key in keys for key in given) or not setting.fits(keys) or not all(each.fits(given) for each in others):
            continue
        if setting.language and kind not in FAMILIES and draw.random() > MISUSE:
            continue
        if setting.chats and kind in FAMILIES and not chats:  # said to be not used
            continue
        if kind in (OWN, *POLICIES) and "model.from_scratch" in given:  # they begin so
            continue
        chosen.append((setting, given))
        keys |= given
        if len(chosen) == wanted:
            break
    refused = ("parallel.expert",) if not kind.endswith("moe") else ()
    refused += ("parallel.tensor", "parallel.sequence") if kind in POLICIES else ()
    layout = draw.choice([each for each in LAYOUTS if not any(key in each for key in refused)])
    return Case(
        number, kind, chats, chosen, layout, (draw.choice([2, 3, 6]), draw.choice([1, 2, 3])), draw.randint(1, 4)
    )


def recipe(case: Case, folder: Path, name: str, without: Setting | None = None, further: Keys | None = None) -> Values:
    """The recipe of a case, for a run directory `name`, without one of its settings and with further keys."""
    flat: Values = {
        "runner.max_epochs": 2,
        "runner.seed": 3,
        "runner.logger.log_path": str(folder / "runs"),
        "runner.logger.experiment_name": name,
        "runner.logger.logger_backends": ["jsonl"],
        "runner.callbacks": ["own.py:Stop"],
        "micro_batch_size": case.micro[0],
        "global_batch_size": 6,
        "model.precision": "fp64",
        "optim.lr": 0.01,
        "optim.weight_decay": 0.1,
        "data.train_data_paths": "train.jsonl",
        "data.eval_data_paths": "eval.jsonl",
        "data.cache_dir": str(folder / "cache"),
        "data.num_workers": 0,
    }
    flat |= model_keys(case.kind)
    flat |= {"data.max_length": 96} if case.kind in (*FAMILIES, *TASKS) else {}
    for setting, given in case.chosen:
        flat |= {} if setting is without else given
    if "data.eval_split" in flat:
        flat["data.eval_data_paths"] = None
    made: Values = {}
    for dotted, value in {**flat, **(further or {})}.items():
        *sections, key = dotted.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = placed(value, folder)
    return made


@dataclass
class Record:
    """The numbers of a run.

    Attributes:
        steps: by step and metric, of metrics.jsonl.
        weights: of final/, by name.
        states: the optimizer's shards.
    """

    steps: dict[tuple[int, str], float] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)


def record(run: Path) -> Record:
    import torch
    from safetensors.torch import load_file

    made = Record()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for key, value in values.items():
            if key.startswith(("train/", "eval/")) and isinstance(value, (int, float)):
                made.steps[values["step"], key] = value
    for file in sorted((run / "final").glob("*.safetensors")):
        made.weights |= load_file(file)
    for file in sorted((run / "final").glob("*.pt")):
        made.weights |= torch.load(file)
    for file in sorted((run / "final" / "training_state").rglob("*.safetensors")):
        made.states |= {f"{file.name}: {name}": tensor for name, tensor in load_file(file).items()}
    assert made.weights, f"no weights in {run}/final"
    return made


def differences(one: Record, other: Record, limit: float, *, common: bool = False) -> list[str]:
    """In words, what of two runs differs by more than a relative limit; `common`: of the steps that both logged."""
    import torch

    found = []
    for place in sorted(one.steps.keys() | other.steps.keys(), key=str):
        a, b = one.steps.get(place), other.steps.get(place)
        if limit and place[0] == 0 and place[1].startswith("eval/action_"):
            continue  # appended action tokens begin alike: rounding chooses among them
        if a is None or b is None:
            found += [] if common else [f"step {place[0]}, {place[1]}: {a} and {b}"]
        elif a != b and abs(a - b) > limit * max(1e-3, abs(a)):
            found.append(f"step {place[0]}, {place[1]}: {a!r} and {b!r}")
    these, those = (each.weights | (each.states if limit == 0 else {}) for each in (one, other))
    if these.keys() != those.keys():
        found.append(f"weights of other names: {sorted(these.keys() ^ those.keys())[:3]}")
    for name in sorted(these.keys() & those.keys()):
        a, b = these[name], those[name]
        if a.shape != b.shape:
            found.append(f"{name}: shapes {list(a.shape)} and {list(b.shape)}")
        elif not torch.equal(a, b):
            apart = float((a.double() - b.double()).abs().max())
            if apart > 10 * limit * max(0.1, float(a.double().abs().max())):  # Adam divides rounding by itself
                found.append(f"{name}: {apart:.1e} apart")
    return found


def trained(values: Values, ranks: int) -> Record:
    """Train a recipe on some ranks; an error of theirs is raised as an `AssertionError` with its text."""
    import shardtune
    from tests.support.tiny_run import train_on_ranks

    if ranks == 1:
        shardtune.train(deepcopy(values))
    else:
        train_on_ranks(ranks, [deepcopy(values)], timeout=600)
    logger = values["runner"]["logger"]
    return record(Path(logger["log_path"]) / logger["experiment_name"])


@dataclass
class Findings:
    """What became of a case: faults, and variants that were refused, in words; and how much was compared."""

    faults: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, differing: Sequence[str]) -> None:
        self.compared[what.partition(":")[0]] += 1
        self.faults += [f"{what}: {each}" for each in differing[:3]]


def tried(case: Case, folder: Path) -> Findings:
    """Train a case in all ways. Raises `ShardtuneError` where its recipe is refused."""
    from shardtune.errors import ShardtuneError

    found = Findings()
    plain = trained(recipe(case, folder, "plain"), 1)
    case = replace(case, stop=min(case.stop, max(step for step, _ in plain.steps) - 1))
    layout = {**case.layout, "micro_batch_size": case.micro[1]}
    try:
        found.note("two ranks", differences(plain, trained(recipe(case, folder, "two", further=layout), 2), LIMIT))
    except AssertionError as error:
        known = any(kind in str(error) for kind in ("ParallelError", "ConfigError", "ModelError"))
        (found.refused if known else found.faults).append(f"two ranks: {str(error)[-1500:]}")
        layout = None
    found.note("continued", differences(plain, continued(case, folder, 1, {}, found), 0.0))
    if layout is not None and case.number % 3 == 0:
        whole = trained(recipe(case, folder, "whole", further=case.layout), 2)
        found.note("continued on two", differences(whole, continued(case, folder, 2, case.layout, found), 0.0))
    for place, (setting, given) in enumerate(case.chosen):
        try:
            less = trained(recipe(case, folder, f"without{place}", without=setting), 1)
        except ShardtuneError as error:
            found.refused.append(f"without {in_words(given)}: {error}")
            continue
        if setting.counts:
            same = not differences(plain, less, 1e-12, common=True)
            found.note("without", [f"{in_words(given)} changes nothing"] if same else [])
        else:
            found.note(f"without: {in_words(given)}", differences(plain, less, LIMIT, common=True))
    return found


def continued(case: Case, folder: Path, ranks: int, further: Keys, found: Findings) -> Record:
    """A run that is stopped after the case's step and continued by the same command."""
    from shardtune.errors import ShardtuneError

    values = recipe(case, folder, f"stopped{ranks}", further=further)
    os.environ["STOP_AFTER"] = str(case.stop)
    try:
        trained(values, ranks)
        found.faults.append("the run was not stopped")
    except (ShardtuneError, AssertionError) as error:
        if "stopped on purpose" not in str(error):
            raise
    finally:
        del os.environ["STOP_AFTER"]
    return trained(values, ranks)


@contextlib.contextmanager
def quiet(file: Path) -> Iterator[None]:
    """What this process and its children print goes to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(file, "a") as sink:
        try:
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
            yield
        finally:
            for number, each in zip((1, 2), kept, strict=True):
                os.dup2(each, number)
                os.close(each)


def tally(number: int, kinds: Sequence[str], verbose: bool) -> Findings:
    """The first recipe of a number that is not refused, tried and printed."""
    from shardtune.errors import ShardtuneError

    for attempt in range(50):
        case, began = drawn(number, attempt, kinds), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="shardtune-bench-") as name:
            folder = Path(name)
            try:
                with quiet(folder / "output.txt"):
                    make_inputs(case.kind, case.chats, folder)
                    found = tried(case, folder)
            except ShardtuneError as error:
                if verbose:
                    print(f"refused {case}\n    {error}", flush=True)
                continue
            except Exception:
                found = Findings([traceback.format_exc()])
        print(f"{'FAULT' if found.faults else 'ok'} {case} ({time.monotonic() - began:.0f} s)", flush=True)
        for fault in found.faults:
            print(f"    - {fault}", flush=True)
        for refusal in found.refused if verbose else ():
            print(f"    refused: {refusal}", flush=True)
        return found
    raise SystemExit(f"case {number}: no recipe was accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kinds", nargs="*", choices=sorted({*KINDS}), default=KINDS, help="of models; by default all")
    parser.add_argument("--verbose", action="store_true", help="print refusals too")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    from tests.support import fork_server

    torch.set_num_threads(1)
    fork_server.install()
    compared, faulty = Counter[str](), 0
    for number in range(given.first, given.first + given.cases):
        found = tally(number, given.kinds, given.verbose)
        compared += found.compared
        faulty += bool(found.faults)
    rows = [(what, f"{count:,}") for what, count in sorted(compared.items())]
    text = f"{given.cases} cases from number {given.first}, {faulty} with a fault.\n\n"
    text += table(("compared", "runs"), rows) + f"\n\n{machine()}."
    print(text)
    if given.save:
        write_section("combinations", text)
    raise SystemExit(1 if faulty else 0)


if __name__ == "__main__":
    main()
