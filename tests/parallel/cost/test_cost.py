"""The formulas of `shardtune.parallel.cost` agree with what is counted; `bench/scaling.py` is the long form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardtune.config.rank_layout import Layout
from shardtune.parallel.cost.choose import Plan, fastest, fits, layouts
from shardtune.parallel.cost.memory import memory, waiting_gradients
from shardtune.parallel.cost.shape import ModelShape, Setting, Work
from shardtune.parallel.cost.time import Machine, time
from shardtune.parallel.cost.traffic import RING, Exchange, traffic
from tests.support.chosen import chosen, slow_except
from tests.support.dist.traffic import CASES, Counts, Ratio

CLOSE = 0.005
KEPT = 0.05
"""Of activations: the formula leaves out what all layers share, and copies that attention makes on a CPU."""
LLAMA_8B = ModelShape(4096, 32, 32, 8, 128, 14336, 128256)
QWEN_HALF_B = ModelShape(896, 24, 14, 2, 64, 4864, 151936, tied=True)
MACHINE = Machine()
SHORT = {
    "FSDP2": "bf16",
    "FSDP2, precision: pure_bf16": "bf16",
    "SP 2": "fp32",
}
COUNTED = [(case, SHORT[case.name]) for case in CASES if case.ranks == 2 and case.name in SHORT]


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ratio]]:
    counts = Counts(tmp_path_factory.mktemp("scaling"))
    cases = [(case, precision) for case, precision in COUNTED if case.name in chosen(request, "name")]
    return dict(zip([case.name for case, _ in cases], counts.of(cases), strict=True))


@pytest.mark.parametrize("name", slow_except(SHORT, "FSDP2, precision: pure_bf16", "SP 2"))
def test_a_layout_costs_what_the_formulas_say(counted: dict[str, list[Ratio]], name: str) -> None:
    wrong = [line for line in counted[name] if abs(line.ratio - 1) > (KEPT if "kept" in line.what else CLOSE)]
    assert not wrong
    assert len(counted[name]) > 5
    assert all(line.counted for line in counted[name] if "wait" not in line.what)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (ModelShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True), 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (ModelShape(8192, 80, 64, 8, 128, 28672, 128256), 70_553_706_496),
        (ModelShape(16384, 126, 128, 8, 128, 53248, 128256), 405_853_388_800),
        (ModelShape(4096, 32, 32, 8, 128, 14336, 32000, experts=8, experts_per_token=2), 46_702_792_704),
    ],
)
def test_published_models_have_their_parameters(shape: ModelShape, published: int) -> None:
    assert shape.parameters == published


def test_a_shape_is_read_from_a_config() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    assert ModelShape.of(config) == LLAMA_8B


def work(layout: Layout, tokens: int = 2**22) -> Work:
    return Work.of(tokens, layout, 8192, 4096)


def total(exchanges: list[Exchange], what: str) -> float:
    return sum(exchange.sent for exchange in exchanges if exchange.what == what)


def test_lasting_memory_falls_with_shards_alone() -> None:
    shards = Setting(Layout(1, 64), reduce="every")
    copies = Setting(Layout(8, 8), reduce="every")
    assert memory(LLAMA_8B, shards, work(shards.layout)).lasting == pytest.approx(16 * LLAMA_8B.parameters / 64)
    assert memory(LLAMA_8B, copies, work(copies.layout)).lasting == pytest.approx(16 * LLAMA_8B.parameters / 8)


def test_gradients_wait_only_for_a_later_micro_batch() -> None:
    setting = Setting(Layout(1, 64))
    assert waiting_gradients(LLAMA_8B, setting, Work(8192, 1, 8192, 4096)) == 0
    assert waiting_gradients(LLAMA_8B, setting, Work(8192, 2, 8192, 4096)) == 4 * LLAMA_8B.parameters
    assert waiting_gradients(LLAMA_8B, replace(setting, reduce="every"), Work(8192, 2, 8192, 4096)) == 0


def test_tensor_ranks_gather_less_and_sum_activations() -> None:
    plain, tensor = Setting(Layout(1, 64)), Setting(Layout(1, 8, 1, 8))
    moved = [traffic(LLAMA_8B, setting, Work(8192, 1, 8192, 4096)) for setting in (plain, tensor)]
    assert total(moved[1], "weights") < total(moved[0], "weights") / 7
    assert not total(moved[0], "activations")
    assert total(moved[1], "activations") == pytest.approx(2 * 7 / 8 * (1 + 7 * 32) * 8192 * 4096 * 2)


def test_a_group_within_a_node_is_faster_than_one_across() -> None:
    moved = {"calls": 1, "payload": 1e9}
    inside = Exchange("weights", "all_gather", "shard", 8, 1, **moved)
    whole_nodes = Exchange("weights", "all_gather", "shard", 16, 1, **moved)
    one_of_each = Exchange("weights", "all_gather", "replicate", 2, 8, **moved)
    seconds = [MACHINE.seconds(exchange) for exchange in (inside, whole_nodes, one_of_each)]
    assert seconds == sorted(seconds)
    assert seconds[2] == pytest.approx(1e9 / 2 / (0.8 * 50e9) + MACHINE.hop)


def test_time_is_arithmetic_where_traffic_hides_behind_it() -> None:
    setting = Setting(Layout(1, 8))
    found = time(LLAMA_8B, setting, work(setting.layout), MACHINE)
    per_token = 6 * (LLAMA_8B.multiplied + LLAMA_8B.layers * LLAMA_8B.width * 4096)
    assert found.compute == pytest.approx(2**22 / 8 * per_token / (0.5 * 989e12))
    assert found.step == pytest.approx(found.compute + found.update)
    slow = replace(MACHINE, inside=1e9)
    assert time(LLAMA_8B, setting, work(setting.layout), slow).step > found.step


@pytest.mark.lengthy
def test_the_fastest_plan_fits_where_one_does() -> None:
    options = {"step_tokens": 2**22, "length": 4096, "most": 32768}
    roomy = fastest(LLAMA_8B, 8, MACHINE, **options)
    assert fits(roomy, MACHINE)
    assert not roomy.setting.cpu_offload
    tight = replace(MACHINE, memory=30e9)
    assert fits(fastest(LLAMA_8B, 8, tight, **options), tight)
    assert fastest(LLAMA_8B, 8, tight, **options).time.step >= roomy.time.step
    tiny = replace(MACHINE, memory=1e9, host_size=1e9)
    assert not fits(fastest(LLAMA_8B, 8, tiny, **options), tiny)


@pytest.mark.parametrize("ranks", [6, 8, 12, 16])
def test_layouts_are_of_these_ranks_and_the_heads_are_those_of_tensor_ranks(ranks: int) -> None:
    found = list(layouts(QWEN_HALF_B, ranks, MACHINE))
    assert {layout.num_ranks for layout in found} == {ranks}
    assert {layout.tensor for layout in found} == {1, 2}  # the divisors of 14 and of 2 heads
    rings = [layout for layout in found if layout.rings(QWEN_HALF_B.heads, QWEN_HALF_B.kv_heads)]
    assert all(layout.sequence > 2 or layout.model_ranks > 2 for layout in rings)
    assert rings


@pytest.mark.lengthy
def test_a_row_that_only_a_ring_fits_is_planned_by_one() -> None:
    """A step of one row has to be shared by all 8 ranks, which do not divide 14 heads."""
    plan = fastest(QWEN_HALF_B, 8, MACHINE, 131072, 131072, 131072)
    assert fits(plan, MACHINE)
    assert plan.setting.layout.rings(QWEN_HALF_B.heads, QWEN_HALF_B.kv_heads)
    assert total(list(plan.exchanges), RING) > 0


def test_a_plan_adds_up_what_is_sent() -> None:
    setting = Setting(Layout(2, 8))
    plan = Plan.of(LLAMA_8B, setting, work(setting.layout), MACHINE)
    assert plan.sent == sum(exchange.sent for exchange in plan.exchanges) > 0
