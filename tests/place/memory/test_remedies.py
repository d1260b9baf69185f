"""What does not fit is explained, and every remedy fits."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_problems import changed, random_problem, with_memory
from property_examples import examples

from phaze.hardware import Cluster, InterconnectLevel, precision_recipe, preset
from phaze.parallelism import Choices, PipelineSchedule
from phaze.place import (
    Bounded,
    LayerProfile,
    PlacementGraph,
    PlacementProblem,
    PlacementStatus,
    PreparedProblem,
    RecomputeMode,
    RemedyKind,
    find_placement,
)
from phaze.place.memory.least_memory_plan import least_memory
from phaze.targets import Capabilities

seeds = st.integers(0, 2**32 - 1)


@examples(25)
@given(seeds)
@example(500)  # chunks that fit only with the leanest mode
def test_every_remedy_of_what_does_not_fit_makes_it_fit(seed: int) -> None:
    problem = random_problem(seed)
    least = least_memory(PreparedProblem.of(problem))
    if least is None:
        return
    tight = with_memory(problem, max(1, int(0.9 * least.peak_bytes)))
    result = find_placement(tight)
    assert result.status is PlacementStatus.INFEASIBLE
    assert result.best is None
    reason = result.infeasibility
    assert reason is not None
    assert reason.least is not None
    assert reason.over
    assert all(stage.over_bytes > 0 for stage in reason.over)
    kinds = {remedy.kind for remedy in reason.remedies}
    assert RemedyKind.HBM in kinds
    for remedy in reason.remedies:
        assert find_placement(remedy.problem).best is not None, remedy.text


def two_layers(**changes: object) -> PlacementProblem:
    """A problem on one device in which parameters and stash are round numbers."""

    def profile(tp: int, mode: RecomputeMode) -> LayerProfile:
        return LayerProfile(
            forward_s=Bounded.exact(1.0 / tp),
            backward_input_s=Bounded.exact(1.0 / tp),
            backward_weight_s=Bounded.exact(1.0 / tp),
            recompute_s=Bounded.exact(1.0 / tp if mode is RecomputeMode.FULL else 0.0),
            parameter_bytes={"bfloat16": 2e6 / tp},
            stashed_bytes=(1e6 if mode is RecomputeMode.FULL else 100e6) / tp,
            peak_working_bytes=0.0,
            outputs=(),
            is_tensor_parallel=tp > 1,
        )

    accelerator = replace(preset("a100-80gb").accelerator, hbm_bytes=int(100e6))
    fields = {
        "graph": PlacementGraph(layers=PlacementGraph.chain(("a", "a")).layers),
        "profiles": {("a", tp, mode): profile(tp, mode) for tp in (1, 4) for mode in RecomputeMode},
        "cluster": Cluster(accelerator, 4, (InterconnectLevel(4, 1e9),)),
        "micro_batches": 4,
        "recipe": precision_recipe("bf16-adam"),
        "choices": Choices(recompute=(RecomputeMode.NONE,), tp=(1,), pp=(1,)),
        "memory_margin": 0.0,
    }
    return changed(PlacementProblem(**fields), **changes)  # type: ignore[arg-type]


def test_each_kind_of_remedy_is_found_where_it_helps() -> None:
    smaller = two_layers(recompute=(RecomputeMode.FULL,))
    result = find_placement(two_layers(), smaller_micro_batches=[(1, smaller)])
    assert result.infeasibility is not None
    texts = {remedy.kind: remedy.text for remedy in result.infeasibility.remedies}
    assert texts[RemedyKind.RECOMPUTE] == "recompute mode full"
    assert texts[RemedyKind.TP] == "tp 4"
    assert texts[RemedyKind.MICRO_BATCH] == "microbatches of 1"
    assert "GiB of memory per device" in texts[RemedyKind.HBM]
    assert "would fit: recompute mode full" in str(result.infeasibility)
    assert "device 0 by" in str(result.infeasibility)


def test_a_zero_stage_and_more_stages_are_remedies_for_parameters() -> None:
    heavy = two_layers(zero=(0,), recompute=(RecomputeMode.FULL,))
    result = find_placement(with_memory(heavy, int(25e6)))
    assert result.infeasibility is not None
    texts = {remedy.kind: remedy.text for remedy in result.infeasibility.remedies}
    assert texts[RemedyKind.ZERO] == "ZeRO stage 1"
    assert texts[RemedyKind.STAGES] == "2 pipeline stages"


def test_a_margin_that_is_kept_free_is_a_remedy() -> None:
    problem = two_layers(zero=(0,), recompute=(RecomputeMode.FULL,), memory_margin=0.5)
    result = find_placement(with_memory(problem, int(50e6)))
    assert result.infeasibility is not None
    assert RemedyKind.MARGIN in {remedy.kind for remedy in result.infeasibility.remedies}


def test_memory_smaller_than_one_layer_is_infeasible_with_remedies() -> None:
    result = find_placement(with_memory(two_layers(pp=None, tp=None), 1000))
    assert result.status is PlacementStatus.INFEASIBLE
    assert result.infeasibility is not None
    assert RemedyKind.HBM in {remedy.kind for remedy in result.infeasibility.remedies}


def test_devices_that_cannot_be_divided_are_infeasible_without_a_plan() -> None:
    cluster = replace(two_layers().cluster, device_count=3)
    result = find_placement(two_layers(capabilities=Capabilities(), cluster=cluster))
    assert result.status is PlacementStatus.INFEASIBLE
    assert result.infeasibility is not None
    assert result.infeasibility.least is None
    assert "no allowed dp, tp and pp" in str(result.infeasibility)


INTERLEAVED = {"schedule": (PipelineSchedule.INTERLEAVED,), "pp": (2,), "chunks": (2,)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp": (3,)}, "3 stages need a layer each; the model has 2."),
        ({"dp": (3,), "dp_divides_batch": True}, "dp 3 does not divide 4 microbatches"),
        (INTERLEAVED, "2 layers cannot be cut into 2 x 2 nearly equal chunks"),
        ({**INTERLEAVED, "dp": (4,)}, "2 devices need a multiple of 2 microbatches each; there are 1."),
    ],
)
def test_choices_that_contradict_the_model_or_the_batch_are_named(changes: dict[str, object], reason: str) -> None:
    result = find_placement(two_layers(**changes))
    assert result.status is PlacementStatus.INFEASIBLE
    assert reason in str(result.infeasibility)


@pytest.mark.parametrize("seed", range(5))
def test_a_remedy_of_more_devices_is_the_least_number_that_fits(seed: int) -> None:
    problem = replace(random_problem(seed), capabilities=Capabilities.everything(), dp_divides_batch=False)
    least = least_memory(PreparedProblem.of(problem))
    if least is None:
        return
    result = find_placement(with_memory(problem, max(1, int(0.9 * least.peak_bytes))))
    assert result.infeasibility is not None
    for remedy in result.infeasibility.remedies:
        if remedy.kind is RemedyKind.DEVICES:
            fewer = remedy.problem.cluster.device_count - 1
            cluster = remedy.problem.cluster
            assert (
                find_placement(
                    replace(remedy.problem, cluster=Cluster(cluster.accelerator, fewer, cluster.levels))
                ).best
                is None
            )
