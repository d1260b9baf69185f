"""Plans in precisions of few bits, with other optimizers, and on tori: derived again, faster, and honest."""

import pytest
from plans import QUESTION, checked, small_graph

import phaze
from phaze.errors import PlanError
from phaze.plan.handover import obstacles
from phaze.plan.plan import Plan
from phaze.targets import ANALYSIS


def planned(cluster: str = "h100:8", **question: object) -> Plan:
    return checked(phaze.optimize(small_graph(), cluster=cluster, **(QUESTION | question)))


@pytest.mark.slow
def test_products_in_fp8_make_a_plan_faster_and_it_says_what_is_not_priced() -> None:
    bf16, fp8 = planned("h20:8"), planned("h20:8", precision="fp8")
    assert fp8.step_time_s < bf16.step_time_s
    assert "fp8-adam without casts and scales" in str(fp8)
    assert "casts" not in str(bf16)
    assert any("casts, scales" in note for note in fp8.provenance.notes)
    assert any("products in fp8 (fp8-adam)" in reason for reason in obstacles(fp8, ANALYSIS.capabilities))
    with pytest.raises(PlanError, match="products in fp8"):
        fp8.export("fsdp")


def test_a_chip_without_fp8_is_named_and_no_faster() -> None:
    bf16, fp8 = planned("a100-80gb:8"), planned("a100-80gb:8", precision="mxfp8")
    assert fp8.step_time_s == pytest.approx(bf16.step_time_s, rel=0.02)
    assert "a100-80gb runs fp8 no faster than bfloat16" in fp8.provenance.notes


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adafactor", "adam8bit", "muon"])
def test_optimizers_with_less_state_hold_less(optimizer: str) -> None:
    strategy = {"dp": 8, "tp": 1, "pp": 1, "zero": 0, "micro_batch_size": 1}
    adam, other = (
        phaze.evaluate(
            small_graph(), cluster="h100:8", strategy=strategy, optimizer=name, global_batch_size=32, compares=False
        ).plan
        for name in ("adamw", optimizer)
    )
    assert other.stages[0].memory_bytes["optimizer"] < adam.stages[0].memory_bytes["optimizer"]


TORI = [pytest.param(cluster, marks=pytest.mark.exhaustive) for cluster in ("tpuv5e:8", "tpu7x:16")]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["tpuv5p:16@2x2x4", "trn2:32", "gb200:8", *TORI])
def test_plans_on_tori_and_racks_are_derived_again(cluster: str) -> None:
    assert planned(cluster, tp=(1, 2)).is_feasible


@pytest.mark.slow
def test_more_oversubscription_never_makes_a_plan_faster() -> None:
    steps = [planned(f"h100:16@nvlink8+ib100/{factor}").step_time_s for factor in (1, 4, 16)]
    assert steps == sorted(steps)
