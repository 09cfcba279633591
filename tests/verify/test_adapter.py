"""The conformance kit passes adapters that are right, and finds each fault by the check that is for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.errors import ConfigError, DataError
from shardtune.verify.adapter import CHECKS, verify_adapter
from shardtune.verify.pytest import check_adapter
from shardtune.verify.result import Report
from tests.support.workspace import make_workspace, run_cli

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HERE = Path(__file__).parent
PROCESSES = {"reload", "shards"}
"""Checks that take processes of their own, and so longer."""
HEALTHY, BROKEN = HERE.parent / "support" / "healthy_adapters.py", HERE.parent / "support" / "broken_adapters.py"


def verify(file: Path, name: str, *only: str, processes: bool = False) -> Report:
    return verify_adapter(f"{file}:{name}", only=only, processes=processes, report=lambda text: None)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("Regressor", {"padding", "metrics"}),
        ("Denoiser", {"padding"}),
        ("Tokens", set()),
        *(
            pytest.param(name, skipped, marks=pytest.mark.slow)
            for name, skipped in (
                ("TorchDenoiser", {"padding"}),
                ("Pictures", {"padding", "masked", "metrics"}),
                ("Encoder", {"masked"}),
                ("Contrast", {"padding", "masked", "metrics"}),
            )
        ),
        ("Packed", set()),
    ],
)
def test_a_healthy_adapter_passes(name: str, skipped: set[str]) -> None:
    report = verify(HEALTHY, name)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert {result.name for result in report.results if result.outcome == "skipped"} == skipped | PROCESSES


def test_what_is_drawn_where_micro_batches_are_made_is_repeated() -> None:
    report = verify(HEALTHY, "Masked", "sums", "padding", "repeat", "resume", "parity")
    outcomes = {result.name: result.outcome for result in report.results}
    assert outcomes.pop("padding") == "skipped"
    assert "collate makes hidden of the size of padded rows" in report["padding"].text
    assert set(outcomes.values()) == {"passed"}, report.failures


def test_a_loss_of_all_rows_may_have_a_metric_as_a_term() -> None:
    assert verify(HEALTHY, "ContrastWithMetric", "gradient")["gradient"].outcome == "passed"


FAULTS = [
    ("EncodeDraws", "encode", "row 0 is encoded otherwise a second time: .* of the 16 values of picture differ"),
    ("EncodeChangesRows", "encode", "encode changes the row it is given"),
    ("EncodeNumbersWords", "encode", "row 0 is encoded otherwise by a copy of the encoder, the last row first"),
    ("EncodeCannotTravel", "encode", "cannot be sent to another process"),
    ("BuildComputesBuffer", "build", "the buffer norm is computed from parameters"),
    ("BuildKeepsTensor", "build", r"blocks.0.scale is a tensor of shape \[6\] that is neither parameter nor buffer"),
    ("BuildDrawsBuffer", "build", "the buffer noise comes out differently .* drawn at random"),
    ("BuildTiesData", "build", "embed.weight and head.weight are two parameters over the same memory"),
    ("BuildCounts", "build", "1 of 12 parameters do not start with the values that build gives them: head.bias"),
    (
        "GradientMissesLayer",
        "gradient",
        "the loss of these 8 rows does not reach 2 of 14 trained parameters: pooler.weight, pooler.bias",
    ),
    ("GradientDetached", "gradient", r"the term 'sign' \(.*\) has no graph"),
    ("GradientChangesBatch", "gradient", "loss changes the batch it is given: .* of the 128 values of picture"),
    ("SumsCentresInTraining", "sums", "in sum row by row in training mode and .* with all 8 rows together"),
    ("SumsMoves", "sums", "the buffer size changes in training mode, and the loss in training mode reads it"),
    ("SumsCountsRows", "sums", "the buffer seen changes in training mode, and the loss in evaluation mode reads it"),
    ("SumsMean", "sums", r"\(ratio 8\)"),
    ("SumsOtherWeight", "sums", "the loss reports weight 4 for the term 'loss' of row 0, which by weights is 2"),
    ("SumsCentres", "sums", "in sum row by row and .* with all 8 rows together"),
    ("DrawsMean", "sums", r"\(ratio 8\)"),
    ("TorchDrawsMean", "sums", r"\(ratio 8\)"),
    ("DrawsCentre", "sums", "in sum row by row and .* with all 8 rows together"),
    ("TorchDrawsCentre", "sums", "in sum row by row and .* with all 8 rows together"),
    ("DrawsCentre", "parity", "accumulation .* is the first that diverges"),
    ("TorchDrawsCentre", "parity", "accumulation .* is the first that diverges"),
    ("DrawsCount", "masked", r"a row without targets \(seen all 0\) changes the term 'value' from"),
    ("TorchDrawsCount", "masked", r"a row without targets \(seen all 0\) changes the term 'value' from"),
    ("MaskedWeighsAlike", "masked", "with half the weight on every target the term 'loss' is .*, not half of"),
    ("MaskedLooksAhead", "masked", "another last token moves the logits at 1 of the . tokens before it"),
    ("MaskedCounts", "masked", r"a row without targets \(seen all 0\) changes the term 'value' from"),
    ("PaddingPooled", "padding", "3 more positions of padding in tokens, labels change the term 'loss'"),
    ("PackedLeaks", "padding", "the logits of row . among 3 in one forward differ from its own by"),
    ("EmptyDivides", "empty", r"without targets \(seen all 0\) gives the term 'value' nan"),
    ("MetricsMean", "metrics", "accuracy is .* over 8 row by row and .* over 1 with all 8 rows together"),
    ("MetricsPredictMasked", "metrics", r"the predictions of 8 rows weigh \d+, their targets \d+ by weights"),
    ("MetricsPredictPadding", "metrics", r"the prediction of row \d is another one alone \(.*\) than together"),
    ("MetricsPredictOnce", "metrics", r"8 rows have 8 predictions one by one and 1 together"),
    ("MetricsPredictWithoutGraph", "metrics", r"a loss computed from the predictions \(actor.loss\) has no graph"),
    ("TiesRebinds", "ties", r"mean is \[2\] of torch.float64 when the model is built and \[2\] of torch.bfloat16 now"),
    ("TiesUnsaved", "ties", "the buffer count changes in training and is not saved"),
    ("RepeatDrawsElsewhere", "repeat", "the same micro-batch with the same seed gives .* and then"),
    ("RepeatCounts", "repeat", "the same micro-batch with the same seed gives .* and then"),
    ("ResumeForgets", "resume", "a run resumed after 2 steps has the loss .* in step 2, the first run"),
    ("HalfSums", "bf16", "the total of the term 'loss' is torch.bfloat16"),
    ("ShardsSometimes", "shards", "row 0 calls the units blocks.0; one of row 2 blocks.0, blocks.1, and ranks that"),
    ("LoraPassedBy", "lora", "stem.lora_.* is trained, and stays as it was in 8 steps"),
    ("ParityMean", "parity", "accumulation .* is the first that diverges .* Agreeing: loss, checkpointing"),
    ("PackedLeaks", "parity", "packing .* is the first that diverges .* Agreeing: accumulation"),
    ("ParityRecomputed", "parity", "checkpointing .* is the first that diverges .* Agreeing: loss, accumulation, prec"),
    ("ParityExecution", "parity", "checkpointing .* is the first that diverges .* no attribute 'gradient_checkpointi"),
    ("ParityCancels", "parity", "precision .* is the first that diverges .* Agreeing: loss, accumulation, checkpoint"),
]


AGAIN = (
    "EncodeNumbersWords", "BuildDrawsBuffer", "SumsCentresInTraining", "SumsCountsRows", "DrawsMean", "TorchDrawsMean",
    "DrawsCentre", "TorchDrawsCentre", "DrawsCount", "TorchDrawsCount", "RepeatCounts", "ParityExecution",
)  # fmt: skip
"""Mistakes that a check finds by the comparison that finds another one."""


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        pytest.param(name, check, said, id=f"{check}-{name}", marks=pytest.mark.slow if name in AGAIN else ())
        for name, check, said in FAULTS
    ],
)
def test_a_fault_is_found(name: str, check: str, said: str) -> None:
    result = verify(BROKEN, name, check)[check]
    assert result.outcome == "failed", result
    assert re.search(said, result.text), result
    assert result.where
    assert result.remedy


def test_a_layer_made_in_forward_is_explained() -> None:
    result = verify(BROKEN, "GradientMakesLayer", "gradient")["gradient"]
    assert "must have the same dtype" in result.text
    assert "make layers and parameters in the constructor of the model" in result.remedy


def test_every_check_has_an_adapter_that_fails_it() -> None:
    assert {check for _, check, _ in FAULTS} | PROCESSES == {check.name for check in CHECKS}


def test_what_two_ranks_and_a_fresh_process_find() -> None:
    found = verify(BROKEN, "ShardsReach", "shards", "parity", processes=True)
    assert "rank" in found["shards"].text
    assert "DTensor" in found["shards"].text
    assert "sharding (two ranks, one with a filler in place of a row) is the first" in found["parity"].text
    hashed = verify(BROKEN, "EncodeHashes", "encode", "reload", processes=True)
    assert hashed["encode"].outcome == "passed"
    assert "is encoded otherwise in a fresh process" in hashed["reload"].text
    assert "hash() of text" in hashed["reload"].remedy


@pytest.mark.slow
def test_what_else_two_ranks_and_a_fresh_process_find() -> None:
    drawing = verify(HEALTHY, "TorchDenoiser", "shards", "parity", processes=True)
    assert [result.outcome for result in drawing.results] == ["passed", "passed"], drawing.results
    assert "sharding" in drawing["parity"].text
    forgotten = verify(BROKEN, "ReloadForgets", "reload", processes=True)["reload"]
    assert "in a fresh process that loaded the checkpoint" in forgotten.text


@pytest.mark.lengthy
def test_a_causal_model_of_transformers_passes_everything(tmp_path: Path) -> None:
    work = make_workspace(tmp_path / "work")
    outcome = run_cli("verify", "adapter", "causal_lm", str(work / "recipe.yaml"))
    assert outcome.code == 0, outcome.out
    assert "16 passed of 16 checks" in outcome.out.replace("\n", " ")
    lines = [line for line in outcome.out.splitlines() if "/16 " in line]
    assert [line.split()[1] for line in lines] == [check.name for check in CHECKS]
    assert all("passed" in line for line in lines)
    for axis in ("accumulation", "packing", "checkpointing", "sharding", "precision"):
        assert axis in outcome.out


@pytest.mark.lengthy
def test_failures_are_shown_and_give_the_exit_code() -> None:
    words = (f"{BROKEN}:SumsMean", "--only", "sums", "--only", "encode")
    outcome = run_cli("verify", "adapter", *words)
    assert outcome.code == 1
    assert re.search(r"2/2 sums +failed", outcome.out)
    assert "1 passed, 1 failed of 2 checks" in " ".join(outcome.out.split())
    assert "where:  SumsMean.loss\n  remedy: this looks like a mean" in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no adapter is named"),
        ([f"{HEALTHY}:Regressor", "a.yaml", "b.yaml"], "an adapter and a recipe at most"),
        ([f"{HEALTHY}:Nobody"], "has no function or class 'Nobody'"),
        ([f"{HEALTHY}:Block"], "is no adapter"),
        (["never_heard_of"], "never_heard_of is not known"),
        ([f"{HEALTHY}:Regressor", "--only", "everything"], "there is no check 'everything'"),
        ([f"{HEALTHY}:Regressor", "actor.model.options.widht=4"], "did you mean width?"),
    ],
)
def test_input_that_cannot_be_used(words: list[str], said: str) -> None:
    outcome = run_cli("verify", "adapter", *words)
    assert outcome.code == 2
    assert said in outcome.err


def test_checks_are_listed() -> None:
    outcome = run_cli("verify", "adapter", "--list")
    assert outcome.code == 0
    for check in CHECKS:
        assert f" {check.name} " in outcome.out
    outcome = run_cli("verify", "adapter", "--list", "--only", "sums")
    assert [check.name for check in CHECKS if f" {check.name} " in outcome.out] == ["sums"]


ROWLESS = """
import numpy as np
from torch import nn
from shardtune import Adapter, LossSum, Sample

class Rowless(Adapter):
    def build(self):
        return nn.Linear(1, 1)
    def encode(self, row):
        return Sample(fields={"x": np.array([row["x"]], np.float32)})
    def loss(self, model, batch):
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))
"""


def test_rows_come_from_examples_or_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(ROWLESS)
    with pytest.raises(ConfigError, match=r"no rows to try Rowless on[\s\S]*recipe.yaml[\s\S]*examples\(\)"):
        verify(file, "Rowless", "encode")
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n{"y": 2}\n{"x": 3}\n')
    recipe = {"data": {"train_data_paths": str(tmp_path / "rows.jsonl")}}
    report = verify_adapter(f"{file}:Rowless", recipe, only=["encode"], processes=False, report=lambda text: None)
    assert report["encode"].text.startswith("2 rows")  # the row without x is passed over
    (tmp_path / "rows.jsonl").write_text('{"y": 1}\n{"y": 2}\n')
    with pytest.raises(DataError, match="0 of the first 2 rows can be used: the row has no 'x'"):
        verify_adapter(f"{file}:Rowless", recipe, only=["encode"], processes=False)


OF_BYTES = """
import numpy as np
from torch import nn
from shardtune import Adapter, LossSum, Sample, register_model

@register_model("of_bytes")
class OfBytes(Adapter):
    def build(self):
        return nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    def encode(self, row):
        return Sample(fields={"x": np.array([len(row["x"])], np.float32)})
    def loss(self, model, batch):
        return LossSum(model[0](batch["x"]).square().sum(), len(batch["x"]))
"""


@pytest.mark.lengthy
def test_a_registered_name_is_found_through_plugins(tmp_path: Path) -> None:
    """Bytes come in Parquet, and go on as that; what a recipe freezes is not expected to be reached."""
    file, rows = tmp_path / "model.py", tmp_path / "rows.parquet"
    file.write_text(OF_BYTES)
    pq.write_table(pa.table({"x": [b"\xff" * length for length in (1, 2, 3)]}), rows)
    recipe = {
        "plugins": [str(file)],
        "actor": {"model": {"freeze": ["^1"], "is_lora": True, "lora": {"target_modules": ["0"]}}},
        "data": {"train_data_paths": str(rows)},
    }
    only = ["encode", "gradient", "resume", "lora"]
    report = verify_adapter("of_bytes", recipe, only=only, processes=False, report=lambda text: None)
    assert report.passed, "\n".join(map(str, report.failures))
    assert "reaches 2 parameters" in report["gradient"].text
    assert report["lora"].text.startswith("8 parameters")  # of 1 x 1, at rank 4


UNUSUAL = """
import numpy as np
import torch
from torch import nn
from shardtune import Adapter, LossSum, Sample

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.table = nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, 3)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.table.weight)
        self.scale = nn.Parameter(torch.ones(2, 1))
        self.head = lambda x: x @ self.scale
        self.register_buffer("chosen", torch.eye(2).to_sparse(), persistent=False)
    def forward(self, x):
        return self.head(self.inner(x)) + self.table(self.outer(self.inner(x).tanh())).square().sum(-1, keepdim=True)

class Unusual(Adapter):
    def build(self):
        return Net()
    def encode(self, row):
        return Sample(fields={"x": np.array([row["x"]], np.float32)})
    def loss(self, model, batch):
        return LossSum((model(batch["x"]) - 1).square().sum(), len(batch["x"]))
    def examples(self):
        return [{"x": value / 4} for value in range(1, 7)]
"""


@pytest.mark.parametrize("check", ["build", "parity", "lora"])
def test_a_function_of_a_model_its_zeros_and_its_sparse_buffer_are_no_mistakes(check: str, tmp_path: Path) -> None:
    """The function holds the model that it was made in; what lies before layers of zeros moves after some steps."""
    file = tmp_path / "model.py"
    file.write_text(UNUSUAL)
    report = verify(file, "Unusual", check)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report[check].outcome == "passed"


def test_a_model_that_cannot_be_set_up_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(ROWLESS + "    unit_classes = ('Block',)\n    def examples(self):\n        return [{'x': 1}] * 4\n")
    report = verify(file, "Rowless", "gradient", "sums", "resume")
    assert [result.outcome for result in report.results] == ["failed", "skipped", "skipped"]
    assert "no module of the model is a Block" in report["gradient"].text
    assert report["sums"].text == "the model cannot be set up (see gradient)"


@pytest.mark.lengthy
def test_an_assertion_for_tests_of_ones_own() -> None:
    check_adapter(f"{HEALTHY}:Regressor", only=["encode", "sums"])
    check_adapter(f"{HEALTHY}:Regressor", "actor.model.options.width=3", only=["build"])
    with pytest.raises(AssertionError, match=r"does not conform[\s\S]*sums: the term 'loss' is[\s\S]*remedy:"):
        check_adapter(f"{BROKEN}:SumsMean", only=["encode", "sums"])


def test_the_checks_are_tests_for_pytest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "shardtune.verify.pytest", "-p", "no:cacheprovider"]
    arguments = ["--adapter", f"{BROKEN}:SumsMean", "-k", "encode or sums or padding"]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 skipped, 13 deselected" in done.stdout
    assert "remedy: this looks like a mean" in done.stdout
