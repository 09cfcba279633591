"""The troubleshooting list of the model guide: each of its lines is said by the system itself, one test each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from shardtune import FSDPSftWorker
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ConfigError, DataError, ModelError, ShardtuneError
from shardtune.training.worker.user_errors import explaining, of_step
from tests.parallel.test_parts import made, rows, sharded
from tests.support.dist.ranks import run_ranks

pytestmark = pytest.mark.lengthy

CPU, ROWS = torch.device("cpu"), 8
Collate = Callable[[list[Any]], Any]


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class Task(FSDPSftWorker):
    """Tells numbers below zero from others; what a test wants to go wrong stands in the class."""

    collate: Collate | None = staticmethod(stacked)
    samples_of: Callable[[int], dict[str, Any]] = staticmethod(
        lambda n: {"x": torch.tensor([n - 3.5]), "labels": torch.tensor(n > 3)}
    )
    rows = ROWS
    drop_last = False
    announced: int | None = None

    def model_provider_func(self) -> nn.Module:
        return nn.Linear(1, 2)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        dataset: Any = [type(self).samples_of(n) for n in range(self.rows)]
        size = self.cfg.actor.micro_batch_size
        loader = DataLoader(
            dataset, batch_size=size, collate_fn=self.collate, drop_last=eval_dataset and self.drop_last
        )
        return loader, {"num_samples": self.announced or len(dataset)}

    def get_train_model_output(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch["x"].to(self.device)), batch["labels"].long())

    def get_eval_model_output(self, batch: Any) -> Any:
        return int((self.model(batch["x"]).argmax(-1) == batch["labels"]).sum())


def recipe(tmp_path: Path, **changes: Any) -> Any:
    actor = {"micro_batch_size": 2, "global_batch_size": 4, "worker": f"{__file__}:Task", **changes}
    return load_recipe(
        {
            "actor": {**actor, "model": {"precision": "fp32"}},
            "data": {"train_data_paths": "made here", "eval_data_paths": "made here"},
            "runner": {"device": "cpu", "logger": {"log_path": str(tmp_path)}},
        },
        in_memory=["actor.model.model_path"],
    )


def task(tmp_path: Path, sizes: Mapping[str, int] | None = None, **attributes: Any) -> Task:
    """A worker that is set up, with something changed in its class or its recipe."""
    kind = type("Changed", (Task,), attributes)
    worker = kind(recipe(tmp_path, **(sizes or {})))
    worker.setup()
    return worker


def refusal(kind: type[ShardtuneError], says: str, act: Callable[[], Any]) -> str:
    """The whole message of an error that says this."""
    with pytest.raises(kind, match=re.escape(says)) as error:
        act()
    return str(error.value)


def test_all_is_well_where_nothing_is_wrong(tmp_path: Path) -> None:
    worker = task(tmp_path)
    assert worker.run_training()["train/supervised_tokens"] == 4.0
    assert worker.run_eval()["eval/eval_accuracy"] in {n / ROWS for n in range(ROWS + 1)}


# -- "KeyError: xxx - your collate function did not output the fields required by training code" ---------------------


def reads_image(self: Task, batch: Any) -> Any:
    return self.model(batch["pixel_values"]).mean()


def test_a_key_that_the_collate_function_did_not_produce(tmp_path: Path) -> None:
    worker = task(tmp_path, get_train_model_output=reads_image)
    told = refusal(
        DataError, "the batch has no 'pixel_values'; the collate function produced: x, labels", worker.run_training
    )
    assert "get_train_model_output; build_dataloader: collate_fn" in told
    worker = task(tmp_path, get_eval_model_output=reads_image)
    told = refusal(DataError, "the batch has no 'pixel_values'", worker.run_eval)
    assert "get_eval_model_output" in told


def test_a_key_that_is_taken_out_of_a_batch(tmp_path: Path) -> None:
    def takes(self: Task, batch: Any) -> Any:
        assert batch.pop("y", None) is None
        batch.pop("labels")
        return self.model(batch.pop("pixel_values")).mean()

    says = "the batch has no 'pixel_values'; the collate function produced: x"
    refusal(DataError, says, task(tmp_path, get_train_model_output=takes).run_training)


def test_a_key_that_is_missing_elsewhere_is_not_blamed_on_the_batch(tmp_path: Path) -> None:
    def own_mistake(self: Task, batch: Any) -> Any:
        return {}["elsewhere"]

    with pytest.raises(KeyError, match="elsewhere") as error:
        task(tmp_path, get_train_model_output=own_mistake).run_training()
    assert not isinstance(error.value, ShardtuneError)


# -- "Common mistakes: collate_fn outputs list[dict], but training code treats it as dict" ---------------------------


def test_a_list_of_dicts(tmp_path: Path) -> None:
    as_list: dict[str, Any] = {"collate": staticmethod(lambda samples: samples)}
    told = refusal(
        DataError, "the loader yields a list of 2 dicts, not a dict of tensors", task(tmp_path, **as_list).run_training
    )
    assert "let collate_fn return one dict" in told
    worker = task(tmp_path, **as_list)
    refusal(DataError, "a list of 2 dicts, and get_eval_model_output treats it as one dict of tensors", worker.run_eval)


# -- "Some samples miss multimodal fields, causing batch misalignment" -----------------------------------------------


def some_with_image(missing: set[int]) -> dict[str, Any]:
    def make(number: int) -> dict[str, Any]:
        sample = Task.samples_of(number)
        return sample if number in missing else {**sample, "pixel_values": torch.zeros(3)}

    return {"samples_of": staticmethod(make)}


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ({2, 3}, "batch 1 has no 'pixel_values', which those before it have"),
        ({0, 1}, "batch 1 has 'pixel_values', which those before it lack"),
        ({3}, "batch 1 cannot be made: a sample has no 'pixel_values'"),
        ({2}, "batch 1 has no 'pixel_values', which those before it have"),
    ],
    ids=["a whole batch", "all but the others", "the second of a batch", "the first of a batch"],
)
def test_samples_without_an_image(tmp_path: Path, missing: set[int], says: str) -> None:
    told = refusal(DataError, says, task(tmp_path, **some_with_image(missing)).run_training)
    assert "build_dataloader: collate_fn" in told
    assert "a blank one" in told or "an empty or blank one" in told


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_different_lengths(tmp_path: Path, num_workers: int) -> None:
    """With torch's own collate function, in training and in evaluation."""

    def loader(self: Task, data_paths: list[str], eval_dataset: bool = False) -> Any:
        dataset: Any = [{"x": [1.0] * (1 + n % 3), "labels": 1} for n in range(ROWS)]
        return DataLoader(dataset, batch_size=2, num_workers=num_workers), {}

    worker = task(tmp_path, build_dataloader=loader)
    for run in (worker.run_training, worker.run_eval):
        told = refusal(DataError, "batch 0 cannot be made: a field differs in length", run)
        assert "pads each field" in told


def test_samples_without_an_image_in_a_process_of_the_loader(tmp_path: Path) -> None:
    def loader(self: Task, data_paths: list[str], eval_dataset: bool = False) -> Any:
        dataset: Any = [type(self).samples_of(n) for n in range(ROWS)]
        return DataLoader(dataset, batch_size=2, collate_fn=stacked, num_workers=1), {}

    worker = task(tmp_path, **some_with_image({3}), build_dataloader=loader)
    refusal(DataError, "batch 1 cannot be made: a sample has no 'pixel_values'", worker.run_training)


# -- "Expected all tensors on same device - some batch fields were not moved via to(self.device)" --------------------


def test_a_field_on_another_device_is_named(tmp_path: Path) -> None:
    """The meta device stands for one that this machine may not have."""

    def with_labels_elsewhere(samples: list[Any]) -> Any:
        batch = stacked(samples)
        return {**batch, "labels": batch["labels"].to("meta"), "unused": batch["x"].to("meta")}

    def losing(self: Task, batch: Any) -> Any:
        scores = self.model(batch["x"].to(self.device))
        return nn.functional.cross_entropy(scores, batch["labels"].long() if batch["x"] is None else batch["labels"])

    worker = task(
        tmp_path,
        collate=staticmethod(with_labels_elsewhere),
        get_train_model_output=losing,
        loss_weights=lambda self, batch: {"loss": 2.0},
    )
    told = refusal(
        ModelError,
        "a field of the batch is still on another device: 'labels' on meta; the model is on cpu",
        worker.run_training,
    )
    assert 'batch["labels"].to(self.device)' in told


def test_every_field_elsewhere_is_named_where_none_can_be_told() -> None:
    batch = {"x": torch.zeros(1), "a": torch.zeros(1, device="meta"), "b": torch.zeros(1, device="meta")}
    with pytest.raises(ModelError, match="'a' on meta, 'b' on meta"), explaining("m", batch, CPU):
        raise RuntimeError("Expected all tensors to be on the same device, but got …")
    with pytest.raises(RuntimeError, match="out of luck"), explaining("m", batch, CPU):
        raise RuntimeError("out of luck")


# -- "global_batch_size is not divisible ... - adjust global_batch_size / micro_batch_size / world_size" -------------


@pytest.mark.parametrize(
    ("size", "micro", "remedy"),
    [
        (5, 2, "set actor.global_batch_size to 4 or 6, or actor.micro_batch_size to 1"),
        (2, 4, "set actor.global_batch_size to 4, or actor.micro_batch_size to 2"),
        (12, 5, "set actor.global_batch_size to 10 or 15, or actor.micro_batch_size to 4"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, size: int, micro: int, remedy: str) -> None:
    says = f"global_batch_size = {size} is not divisible by micro_batch_size = {micro} times 1 rank"
    sizes = {"global_batch_size": size, "micro_batch_size": micro}
    assert remedy in refusal(ConfigError, says, lambda: task(tmp_path, sizes))


# -- "eval_accuracy is unexpectedly low - check whether drop_last is dropping eval samples" --------------------------


def test_evaluation_that_drops_samples(tmp_path: Path) -> None:
    worker = task(tmp_path, rows=7, drop_last=True)
    told = refusal(
        DataError, "evaluation saw 6 samples of the 7 that there are: the loader has drop_last=True", worker.run_eval
    )
    assert "drop_last=False" in told
    worker = task(tmp_path, announced=9)
    refusal(DataError, "evaluation saw 8 samples of the 9 that build_dataloader announced", worker.run_eval)


def test_a_random_part_is_the_same_at_each_evaluation(tmp_path: Path) -> None:
    def part(self: Task, data_paths: list[str], eval_dataset: bool = False) -> Any:
        rows: Any = [type(self).samples_of(n) for n in range(ROWS)]
        own = torch.Generator().manual_seed(3)
        return DataLoader(rows, 2, sampler=RandomSampler(rows, num_samples=4, generator=own), collate_fn=stacked), {}

    seen: list[float] = []

    def see(self: Task, batch: Any) -> int:
        seen.extend(batch["x"].flatten().tolist())
        return 0

    worker = task(tmp_path, build_dataloader=part, get_eval_model_output=see)
    worker.run_eval()
    worker.run_training()
    worker.run_eval()
    assert len(seen) == 8
    assert seen[:4] == seen[4:]


# -- "data repeats/skips after resume - check save/load flow for _data_epoch and _data_iter_offset" ------------------


def test_data_that_changed_before_resume(tmp_path: Path) -> None:
    worker = task(tmp_path)
    worker.run_training()
    assert (worker._data_epoch, worker._data_iter_offset) == (0, 4)
    worker.save_checkpoint(tmp_path / "saved", 1)
    again = task(tmp_path)
    again.load_checkpoint(tmp_path / "saved")
    assert (again._data_epoch, again._data_iter_offset) == (0, 4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": 10}, "num_samples: 8 -> 10"),
        ({"samples_of": staticmethod(lambda n: Task.samples_of(n + 1))}, "the first batch: other content"),
    ]
    for changed, says in cases:
        told = refusal(
            CheckpointError,
            f"the training data is not what this run was trained on so far:\n    {says}",
            lambda changed=changed: task(tmp_path, **changed).load_checkpoint(tmp_path / "saved"),
        )
        assert "runner.allow_changes=[data.train_data_paths]" in told


# -- What build_dataloader returns -----------------------------------------------------------------------------------


def test_a_loader_without_the_dict_beside_it(tmp_path: Path) -> None:
    says = "build_dataloader returned a list, not a loader and a dict"
    told = refusal(DataError, says, lambda: task(tmp_path, build_dataloader=lambda *_, **__: [1, 2, 3]))
    assert 'return data_loader, {"num_samples": len(dataset)}' in told
    says = "the dict beside the loader has 'shraded', which nothing reads"
    told = refusal(DataError, says, lambda: task(tmp_path, build_dataloader=lambda *_, **__: ([], {"shraded": True})))
    assert "it may hold 'num_samples' and 'sharded'" in told


def used_directly() -> str:
    model = made()
    sharded(model, "fsdp")
    with pytest.raises(ModelError) as caught, explaining("get_train_model_output", {}, CPU):
        rows() * model.gain
    with pytest.raises(ModelError, match="those inside a layer not"), explaining("get_train_model_output", {}, CPU):
        model.tower.blocks[0].down(model.tower.blocks[0].up(rows()))
    return str(caught.value)


def test_a_parameter_of_which_the_rank_has_a_part() -> None:
    for told in run_ranks(used_directly, 2):
        assert "an operation uses a parameter of the sharded model, of which each rank has a part" in told
        assert "compute this in a public method of the model's class" in told


def test_a_kernel_without_second_derivatives_is_named() -> None:
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    output = F.scaled_dot_product_attention(query, query.detach(), query.detach())
    (slope,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        slope.square().sum().backward()
    found = of_step(caught.value, "")
    assert found is not None
    assert "scaled_dot_product_flash_attention" in found.what
    assert "attn_implementation: eager" in (found.remedy or "")


def test_a_spectral_norm_that_finds_its_weight_in_another_dtype_is_named() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(4, 8))
    layer.register_parameter("weight_orig", nn.Parameter(layer.weight_orig.detach().bfloat16()))  # as FSDP2 casts it
    with pytest.raises(RuntimeError) as caught:
        layer(rows()[:, :4].bfloat16())
    found = of_step(caught.value, "")
    assert found is not None
    assert "torch.nn.utils.spectral_norm cannot compute its weight here: " in found.what
    assert "torch.nn.utils.parametrizations.spectral_norm" in (found.remedy or "")
    with pytest.raises(RuntimeError) as other:
        nn.utils.spectral_norm(nn.Linear(4, 8))(torch.zeros(2, 5))
    assert of_step(other.value, "") is None
