"""An engine of one rank, which is the caller's process: what it offers, refuses and says."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.engine import offload
from shardtune.errors import CheckpointError, ModelError, ParallelError
from tests.support.engine_modules import SAMPLES, Trained, apart, make, plain, steps
from tests.support.vision import save_vision_model


@pytest.fixture
def engine(model: Path) -> TrainEngine:
    return TrainEngine(make(model)).build()


@pytest.mark.lengthy
@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
@pytest.mark.parametrize("method", ["step_by_mean", "step_by_weights", "step_by_sums"])
def test_steps_are_those_of_plain_pytorch(model: Path, executor: Any, method: str):
    engine = TrainEngine(make(model), executor).build()
    assert apart(steps(engine, method, NeedParallel(SAMPLES)), plain(model)) < 1e-10


def test_it_starts_quickly(model: Path):
    began = time.perf_counter()
    TrainEngine(make(model)).build().where()
    assert time.perf_counter() - began < 1.0


def test_calls_before_build_say_so(model: Path):
    engine = TrainEngine(make(model))
    for call in (lambda: engine.where(), engine.eval, engine.memory, lambda: list(engine.named_tensors())):
        with pytest.raises(ParallelError, match="not built"):
            call()


class Named(TrainEngine):
    """An engine with an attribute of its own."""

    label = ""


def test_a_class_of_ones_own_has_its_attributes(model: Path):
    engine = Named(make(model))
    engine.label = "policy"
    assert engine.label == "policy"


def test_what_would_have_no_effect_is_refused(model: Path):
    engine, wrong = TrainEngine(make(model)), cast(Any, "no")
    with pytest.raises(AttributeError, match=r"setting lr of the engine has no effect"):
        engine.lr = 3
    for seed in ("a", -1, 1.5, True):
        with pytest.raises(ParallelError, match=f"the seed is {seed!r}"):
            TrainEngine(make(model), seed=cast(Any, seed))
    with pytest.raises(ParallelError, match="gather_to_generate is 'no'"):
        TrainEngine(make(model), gather_to_generate=wrong)
    with pytest.raises(ParallelError, match=r"the size 2\.0 is no whole number"):
        engine.build(data_parallel_size=cast(Any, 2.0))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"placement": "near"}, "no placement 'near'"),
        ({"address": "host:1"}, "address would have no effect"),
        ({"watchdog_seconds": -1}, "-1 is no number of seconds from 0 on"),
        ({"watchdog_seconds": float("nan")}, "nan is no number of seconds"),
        ({"collective_timeout": "a"}, "'a' is no number of seconds"),
        ({"collective_timeout": 0}, "0 is no number of seconds"),
        ({"gpus_per_rank": 1.0, "wait_seconds": 5.0}, "gpus_per_rank, wait_seconds would have no effect"),
    ],
)
def test_what_init_cannot_use_is_refused(given: dict[str, Any], told: str):
    with pytest.raises(ParallelError, match=told):
        shardtune.init(**{"backend": "local", **given})


def test_a_script_for_a_cluster_runs_without_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardtune.engine.session._session", None)
    with pytest.warns(UserWarning, match="gpus_per_rank would have no effect: the ranks are those of the backend loc"):
        shardtune.init(gpus_per_rank=1.0)


def test_a_typo_fails_on_the_spot_with_the_list(model: Path):
    engine = TrainEngine(make(model))
    with pytest.raises(
        AttributeError, match=r"no method 'step_by_maen': it has .*step_by_sums.*did you mean step_by_m"
    ):
        engine.step_by_maen  # noqa: B018
    engine.build()
    with pytest.raises(TypeError, match="missing a required argument: 'input_ids'"):
        engine.step_by_mean()
    assert "on_weights_materialized" not in engine.methods
    assert "forward" in engine.methods


class Decorated(nn.Fsdp2TrainModule):
    """Methods of several kinds, and what is none."""

    steps = 3

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(2, 2)

    @functools.cache  # noqa: B019
    def plus(self, number: int) -> int:
        return self.steps + number

    def scaled(self, number: int, factor: int) -> int:
        return number * factor

    doubled = functools.partialmethod(scaled, factor=2)

    @staticmethod
    def minus(number: int) -> int:
        return -number

    @property
    def width(self) -> int:
        return 2

    @classmethod
    def load(cls) -> None:
        """The engine has one; a method of the class is called without an engine."""


def test_decorated_functions_are_methods_and_what_is_none_is_said():
    with TrainEngine(Decorated()).build() as engine:
        assert [engine.plus(2), engine.plus(2), engine.doubled(4), engine.minus(1)] == [[5], [5], [8], [-1]]
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            engine.doubled(4, other=1)
        for name in ("encoder", "steps", "width"):
            with pytest.raises(AttributeError, match=rf"{name} is no method, .*write a method that uses self\.{name};"):
                getattr(engine, name)
        with pytest.raises(
            AttributeError, match=r"state_dict is inherited, .*write a method that uses self\.state_dict\("
        ):
            engine.state_dict()


class Clashing(Trained):
    def save(self) -> None:
        """The engine has one."""


class Misspelt(Trained):
    def on_weight_materialized(self) -> None:
        """Nothing would call it."""


def test_a_method_of_the_engines_name_is_refused(model: Path):
    with pytest.raises(ModelError, match=r"Misspelt\.on_weight_materialized is no hook.*\n.*\n.*on_weights_mat"):
        TrainEngine(make(model, Misspelt))
    with pytest.raises(ModelError, match=r"Clashing\.save has the name of a method of the engine's"):
        TrainEngine(make(model, Clashing))


def test_the_train_module_comes_first():
    with pytest.raises(ModelError, match="names its model before"):
        type("Wrong", (Qwen2ForCausalLM, nn.HuggingFaceFsdp2TrainModule), {})


def test_what_is_no_train_module_is_refused():
    with pytest.raises(ModelError, match="Linear is no train module"):
        TrainEngine(torch.nn.Linear(1, 1))


class Calling(Trained):
    def directly(self) -> Any:
        return self.forward(torch.zeros(1, 2, dtype=torch.int64))

    def fails(self) -> None:
        raise LookupError("in the method")


def test_self_forward_is_refused_with_the_hint(model: Path, two_ranks: TrainEngine):
    for executor in ("fsdp2", "fsdp1", "ddp"):
        with TrainEngine(make(model, Calling), executor).build(colocate_with=two_ranks, take_turns=False) as several:
            several.forward(torch.zeros(1, 2, dtype=torch.int64))
            with pytest.raises(ModelError, match=r"remedy: call self\(\.\.\.\)"):
                several.directly()
    engine = TrainEngine(make(model, Calling)).build()
    with pytest.raises(ModelError, match=r"remedy: call self\(\.\.\.\)"):
        engine.directly()
    with pytest.raises(LookupError, match="in the method"):
        engine.fails()
    assert engine.forward(torch.zeros(1, 2, dtype=torch.int64))[0].logits.shape == (1, 2, 64)


def test_a_printed_cuda_means_the_engines_device(engine: TrainEngine):
    assert engine.where() == [(0, 0, "cpu")]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")  # outside it is torch's


def test_the_callers_module_stays_as_it_is(model: Path):
    module = make(model)
    TrainEngine(module).build().where()
    assert next(module.parameters()).is_meta
    assert not isinstance(module.forward, type(lambda: 0))


class Reference(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def trains(self) -> tuple[bool, bool]:
        return self.training, any(parameter.requires_grad for parameter in self.parameters())


def test_a_class_without_hooks_is_frozen(model: Path):
    assert TrainEngine(make(model, Reference)).build().trains() == [(False, False)]


def test_train_and_eval(engine: TrainEngine):
    engine.train().eval().cpu().cuda()
    assert engine.logits(SAMPLES)[0].shape == (5, 12, 64)


def test_ragged_rows_count_by_their_weights(model: Path):
    rows = [SAMPLES[0][:3], SAMPLES[1], SAMPLES[2][:7]]
    engine = TrainEngine(make(model)).build()
    given = NeedParallel(rows, weights=[len(row) - 1 for row in rows])
    assert apart(steps(engine, "padded_step", given), plain(model, rows)) < 1e-10


@pytest.mark.lengthy
def test_half_precision_keeps_full_weights(model: Path):
    with TrainEngine(make(model, Dtypes), precision="bf16").build() as engine:
        found = engine.dtypes(NeedParallel(SAMPLES))
    assert found == [("torch.float32", "torch.bfloat16", "torch.float32")]


class Dtypes(Trained):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

    def dtypes(self, rows: list[list[int]]) -> tuple[str, str, str]:
        logits = self(torch.tensor(rows)).logits
        logits.float().mean().backward()
        self.optimizer.step()
        moments = next(iter(self.optimizer.state.values()))["exp_avg"]
        return str(next(self.parameters()).dtype), str(logits.dtype), str(moments.dtype)


# -- Weights -----------------------------------------------------------------------------------------------------------


class Custom(nn.Fsdp2TrainModule):
    """A plain module; where its weights come from is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
        self.source: Any = None

    @property
    def non_split_modules(self) -> set[type[torch.nn.Module]]:
        return {torch.nn.Linear}

    def materialization_source(self) -> Any:
        return self.source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def custom(source: Any) -> Custom:
    with shardtune.init_empty_weights():
        module = Custom()
    module.source = source
    return module


def test_weights_come_from_tensors_functions_or_a_file(tmp_path: Path):
    torch.manual_seed(3)
    wanted = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])}
    ).state_dict()
    torch.save(wanted, tmp_path / "weights.pt")
    functions = {name: (lambda tensor=tensor: tensor.clone()) for name, tensor in wanted.items()}
    for source in (wanted, functions, str(tmp_path / "weights.pt")):
        found = dict(TrainEngine(custom(source)).build().named_tensors())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Buffered(Custom):
    """With a persistent buffer that its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("renames", [False, True])
def test_weights_without_buffers_leave_the_modules_own(renames: bool):
    """`dict(module.named_parameters())` is a source, too; what it lacks is named, and a missing parameter refused."""
    hook = {"preprocess_input_named_parameters": lambda self, name, param: (name, param)} if renames else {}
    kind = type("Buffered", (Buffered,), hook)
    weights = {name: torch.randn_like(value) for name, value in Buffered().named_parameters()}
    with shardtune.init_empty_weights():
        module = kind()
    module.source = weights
    engine = TrainEngine(module).build()
    found = dict(engine.named_tensors())
    assert torch.equal(found["scale"], torch.arange(3.0))
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert any("1 buffer of the model has no values among the weights" in n and "scale" in n for n in engine.notes)


def test_a_processor_takes_no_arguments_that_it_would_ignore(tmp_path: Path):
    save_vision_model("qwen2_5_vl", tmp_path)
    processor = nn.AutoProcessor.from_pretrained(tmp_path, use_fast=True)
    assert processor.image_processor is not None
    with pytest.raises(TypeError, match="min_pixels"):
        nn.AutoProcessor.from_pretrained(tmp_path, min_pixels=4)  # pyright: ignore[reportCallIssue]


class Watching(Trained):
    def on_weights_materialized(self) -> None:
        raise OSError("Can't load video processor for 'model'.")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="transformers' own processor works")
def test_a_processor_that_lacks_torchvision_names_the_engines(model: Path):
    with pytest.raises(OSError, match="video processor") as caught:
        TrainEngine(make(model, Watching)).build()
    assert "shardtune.nn.AutoProcessor" in str(caught.value.__notes__)


class Halfway(Trained):
    def fails_after_its_backward(self, input_ids: list[list[int]]) -> None:
        self.step_by_mean(input_ids)
        raise IndexError


def test_an_exception_leaves_no_gradients_of_its_call(model: Path):
    engine = TrainEngine(make(model, Halfway)).build()
    with pytest.raises(IndexError):
        engine.fails_after_its_backward(SAMPLES[:2])
    assert apart(steps(engine, "step_by_mean", NeedParallel(SAMPLES)), plain(model)) < 1e-10


def test_no_weights_and_wrong_weights_are_errors():
    with pytest.raises(ModelError, match="was made without weights"):
        TrainEngine(custom(None)).build()
    with pytest.raises(ModelError, match=r"blocks\.1\.weight"):
        TrainEngine(custom({"blocks.0.weight": torch.zeros(3, 3)})).build()


def test_real_weights_are_taken_as_they_are():
    module = Custom()
    found = dict(TrainEngine(module).build().named_tensors())
    assert torch.equal(found["blocks.0.weight"], module.blocks[0].weight)  # pyright: ignore[reportArgumentType]


class Renamed(Custom):
    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name.replace("layers.", "blocks."), param * 2 if name.endswith("weight") else param

    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        assert name in full_state_dict
        whole = param.full_tensor()
        return name.replace("blocks.", "layers."), whole / 2 if name.endswith("weight") else whole


def test_hooks_rename_and_change_both_ways():
    torch.manual_seed(4)
    wanted = {f"layers.{n}.{key}": torch.randn(3, 3) if key == "weight" else torch.randn(3) for n in (0, 1)
              for key in ("weight", "bias")}  # fmt: skip
    with shardtune.init_empty_weights():
        module = Renamed()
    module.source = wanted
    engine = TrainEngine(module).build()
    x = torch.randn(4, 3)
    by_hand = x
    for number in (0, 1):
        by_hand = F.linear(by_hand, 2 * wanted[f"layers.{number}.weight"], wanted[f"layers.{number}.bias"])
    assert torch.allclose(engine.forward(NeedParallel(x))[0], by_hand)
    found = dict(engine.named_tensors())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_from_pretrained_reads_nothing_inside_init_empty_weights(model: Path):
    module = make(model)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.materialization_source() == str(model)
    with shardtune.init_empty_weights(), pytest.raises(ModelError, match="no use for device_map"):
        Trained.from_pretrained(model, device_map="auto")


def test_a_module_made_under_a_meta_device_is_refused(model: Path):
    with torch.device("meta"):
        module = Trained(Qwen2Config.from_pretrained(model))
    with pytest.raises(ModelError, match=r"buffer model\.rotary_emb\..* has no values.*\n.*\n.*init_empty_weights"):
        TrainEngine(module)


class Extended(Trained):
    """A model with a parameter that is in no file, and that `_init_weights` does not know."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.full((3,), 2.0))


def test_a_parameter_of_the_class_that_no_file_holds(model: Path):
    """It is never left as memory that nobody has written."""
    with pytest.raises(ModelError, match=r"1 of .* tensors of Extended have no values: scale"):
        Extended.from_pretrained(model)
    with pytest.raises(ModelError, match="not among the weights: scale") as told:
        TrainEngine(make(model, Extended)).build()
    assert "what the class adds to them, give in a state dict" in str(told.value)


def test_shared_weights_of_a_model_made_with_accelerate(tmp_path: Path):
    """Its context makes another parameter at each registration, so that it parts what the model shares."""
    Trained(
        Qwen2Config(
            vocab_size=8,
            hidden_size=4,
            num_attention_heads=1,
            num_key_value_heads=1,
            intermediate_size=4,
            num_hidden_layers=1,
            tie_word_embeddings=True,
        )
    ).save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        module = Trained.from_pretrained(tmp_path)
    found = dict(TrainEngine(module).build().named_tensors())
    assert "model.embed_tokens.weight" in found
    assert "lm_head.weight" not in found


# -- State -------------------------------------------------------------------------------------------------------------


class Adam(Trained):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def move(self, rows: list[list[int]]) -> float:
        loss = self.step_by_mean(rows)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss


def test_save_and_load_go_on_bitwise(model: Path, tmp_path: Path):
    engine = TrainEngine(make(model, Adam)).build()
    data = NeedParallel(SAMPLES)
    engine.move(data)
    engine.save(tmp_path / "state")
    wanted = [engine.move(data) for _ in range(2)]
    other = TrainEngine(make(model, Adam)).build()
    other.load(tmp_path / "state")
    assert [other.move(data) for _ in range(2)] == wanted
    with pytest.raises(CheckpointError, match="no saved state"):
        other.load(tmp_path / "nothing")


def test_a_saved_directory_is_transformers_own(model: Path, tmp_path: Path):
    engine = TrainEngine(make(model)).build()
    steps(engine, "step_by_mean", NeedParallel(SAMPLES))
    engine.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is Qwen2ForCausalLM
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    assert torch.equal(loaded(torch.tensor(SAMPLES)).logits, engine.logits(SAMPLES)[0])
    engine.grow(1e6)
    with pytest.raises(CheckpointError, match=r"lm_head.weight holds values up to .*, beyond the range of float16"):
        engine.save_pretrained(tmp_path / "half", torch.float16)
    assert not (tmp_path / "half").exists()


@pytest.mark.lengthy
def test_sleep_gives_back_memory_and_loses_nothing(model: Path):
    engine, twin = (TrainEngine(make(model, Adam)).build() for _ in range(2))
    data = NeedParallel(SAMPLES)
    assert engine.move(data) == twin.move(data)
    awake = engine.memory()[0]
    engine.sleep()
    assert engine.memory()[0] < 0.05 * awake
    assert [engine.move(data) for _ in range(2)] == [twin.move(data) for _ in range(2)]


class Viewed(Adam):
    def numbers(self) -> float:
        return float(self.lm_head.weight.detach().numpy().sum())


@pytest.mark.lengthy
def test_it_sleeps_after_a_save_and_after_numpy_has_seen_a_weight(model: Path, tmp_path: Path):
    """numpy's view of a weight keeps its memory from being freed for good: a save takes none, a user's is left out."""
    engine, twin = (TrainEngine(make(model, Viewed)).build() for _ in range(2))
    data = NeedParallel(SAMPLES)
    engine.save_pretrained(tmp_path, torch.float64)
    engine.save(tmp_path / "state")
    engine.sleep()
    assert engine.memory()[0] < 2000
    engine.numbers()
    engine.sleep()
    assert engine.memory()[0] == pytest.approx(64 * 32 * 8, abs=2000)
    assert engine.move(data) == twin.move(data)


@pytest.mark.lengthy
def test_colocated_engines_take_turns(model: Path, monkeypatch: pytest.MonkeyPatch):
    first = TrainEngine(make(model, Adam)).build()
    monkeypatch.setattr(offload, "HOST_RESERVE", 0.0)  # as if memory sufficed
    second = TrainEngine(make(model, Adam)).build(colocate_with=first)
    first.move(NeedParallel(SAMPLES))
    assert min(first.memory()[0], second.memory()[0]) > 0
    monkeypatch.setattr(offload, "HOST_RESERVE", 2.0)  # as if it were short
    second.move(NeedParallel(SAMPLES))
    assert (first.memory()[0], second.memory()[0] > 0) == (0, True)
    first.move(NeedParallel(SAMPLES))
    assert (first.memory()[0] > 0, second.memory()[0]) == (True, 0)
    third = TrainEngine(make(model, Reference)).build(colocate_with=first, take_turns=False)
    third.trains()
    assert first.memory()[0] > 0


SLEEPER = """
import psutil, torch, shardtune
from shardtune import nn, TrainEngine

class Large(nn.Fsdp2TrainModule):
    def __init__(self, number):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1024, 1024) for _ in range(number)])
    def materialization_source(self):
        return {name: (lambda p=p: torch.randn(p.shape)) for name, p in self.named_parameters()}
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters())
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
    def step(self):
        self(torch.ones(1, 1024)).sum().backward()
        self.optimizer.step()

shardtune.init("local", device="cpu")
with shardtune.init_empty_weights():
    small, module = Large(1), Large(10)
first = TrainEngine(small).build()  # for what torch itself takes in
first.step()
first.sleep()
resident = lambda: psutil.Process().memory_info().rss / 2**20
before = resident()
engine = TrainEngine(module).build()
engine.step()
awake = resident() - before
engine.sleep()
print(awake, resident() - before)
"""


def test_the_process_itself_becomes_smaller(tmp_path: Path):
    """160 MB: weights, gradients and two moments of 10 million parameters."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    outcome = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    awake, asleep = map(float, outcome.stdout.split())
    assert awake > 155
    assert asleep < 0.1 * awake


def test_offloaded_memory_of_killed_processes_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, alive, young = (tmp_path / f"{offload.PREFIX}{name}" for name in ("left", "alive", "young"))
    for file in (left, alive, young):
        file.write_bytes(b"weights")
    for file in (left, alive):
        os.utime(file, (0, 0))
    with alive.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        memory = offload.Memory(torch.nn.Linear(2, 2), torch.device("cpu"))
        memory.leave()
        (own,) = set(tmp_path.iterdir()) - {alive, young}
        os.utime(own, (0, 0))
        offload.remove_left_files()
        assert own.exists()
    memory.come_back()
    assert set(tmp_path.iterdir()) == {alive, young}


def test_sizes_that_do_not_fit(model: Path):
    engine = TrainEngine(make(model)).build()
    with pytest.raises(ParallelError, match="there are 1"):
        TrainEngine(make(model)).build(2, colocate_with=engine)
    with pytest.raises(ParallelError, match="built already"):
        engine.build()
    with pytest.raises(ParallelError, match="fsdp1 joins"):
        TrainEngine(make(model), "fsdp1").build(2)
    with pytest.raises(ParallelError, match="no executor 'fsdp3'"):
        TrainEngine(make(model), "fsdp3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ParallelError, match="cannot share the sequences of Custom"):
        TrainEngine(Custom()).build(sequence_parallel_size=2)
    with shardtune.init_empty_weights():
        adapted = peft.get_peft_model(Trained.from_pretrained(model), peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ParallelError, match="Trained has a low-rank adapter, whose matrices tensor ranks cannot share"):
        TrainEngine(adapted).build(2)
