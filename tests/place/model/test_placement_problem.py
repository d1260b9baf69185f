"""Problems that cannot be are refused with the value, what was expected, and what to do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from placement_problems import changed, random_problem

from phaze.errors import GraphError, HardwareError, PlacementError
from phaze.hardware import Cluster
from phaze.place import Bounded, Flow, PlacementGraph, PlacementProblem, RecomputeMode, find_placement


def problem() -> PlacementProblem:
    """The first random problem on several devices in which something fits."""
    return next(
        candidate
        for candidate in (random_problem(seed, largest=6, most_devices=8) for seed in range(100))
        if candidate.cluster.device_count > 3
        and RecomputeMode.FULL in candidate.choices.recompute
        and find_placement(candidate).best
    )


def test_an_empty_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="layer graph is empty; expected at least one layer"):
        PlacementGraph(layers=())


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(HardwareError, match="device_count is 0"):
        Cluster(problem().cluster.accelerator, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_times_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(PlacementError, match="expected finite numbers of at least 0"):
        Bounded.exact(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["stashed_bytes", "peak_working_bytes"])
def test_sizes_that_cannot_be_are_refused(field: str, value: float) -> None:
    profile = next(iter(problem().profiles.values()))
    with pytest.raises(PlacementError, match=f"{field} is .*; expected a finite number of at least 0"):
        replace(profile, **{field: value})


def test_a_bound_above_its_value_is_refused() -> None:
    with pytest.raises(PlacementError, match="do not lie under"):
        Bounded(np.array([1.0]), np.array([2.0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batches": 0}, "micro_batches is 0; expected at least 1"),
        ({"memory_margin": 1.0}, "memory_margin is 1.0; expected a part from 0 to below 1"),
        ({"zero": ()}, "choices.zero is empty"),
        ({"zero": (4,)}, "ZeRO stage 4; expected some of"),
        ({"recompute": ()}, "choices.recompute is empty"),
        ({"chunks": (1,)}, "choices.chunks is .1,.; expected whole numbers of at least 2"),
        ({"pp": (0,)}, "choices.pp is .0,.; expected whole numbers of at least 1"),
        ({"recompute": (RecomputeMode.SELECTIVE,)}, "has no profile at tp .* with recompute selective"),
        ({"tp": (64,)}, r"no layer is sliced at any tp of \[64\]; allow or profile tp 1"),
        ({"accelerator": 5}, "accelerator 5 is not among the 2 that were profiled"),
    ],
)
def test_choices_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        changed(problem(), **changes)


def test_fewer_microbatches_than_pipelines_are_refused() -> None:
    with pytest.raises(PlacementError, match="8 pipelines share 4 microbatches; expected at least one each"):
        changed(problem(), dp=(8,), micro_batches=4)


def test_pipelines_never_outnumber_microbatches() -> None:
    result = find_placement(replace(problem(), micro_batches=2, dp_divides_batch=False), top=50)
    assert result.best is not None
    assert all(other.placement.parallelism.dp <= 2 for other in result.alternatives)


def test_a_flow_that_goes_backward_or_nowhere_is_refused() -> None:
    layers = PlacementGraph.chain(("a", "b", "c")).layers
    with pytest.raises(GraphError, match="topological order"):
        PlacementGraph(layers=layers, flows=(Flow(1, (0,)),))
    with pytest.raises(GraphError, match="does not exist"):
        PlacementGraph(layers=layers, flows=(Flow(1, (3,)),))
    with pytest.raises(GraphError, match="expected two or more"):
        PlacementGraph(layers=layers, ties={"w": (1,)})


def test_a_tie_that_the_graph_does_not_know_is_refused() -> None:
    base = problem()
    profiles = {key: replace(profile, tied_parameters={"w": 1.0}) for key, profile in base.profiles.items()}
    with pytest.raises(PlacementError, match="ties 'w', but the graph does not"):
        replace(base, profiles=profiles, graph=replace(base.graph, ties={}))
