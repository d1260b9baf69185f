"""A problem of the default mode as the paper's program reads it."""

from dataclasses import replace

import pytest
from placement_problems import chain_problem, changed

from phaze.errors import GraphError, PlacementError
from phaze.place import RecomputeMode, paper_instance, place_as_paper, place_paper


def test_the_papers_program_counts_the_same_problem() -> None:
    problem = chain_problem()
    instance = paper_instance(problem)
    plan = place_as_paper(problem)
    assert plan is not None
    assert plan.time_s == place_paper(instance).time_s[problem.accelerator]
    assert [name for stage in plan.stages for name in stage] == [layer.name for layer in problem.graph.layers]
    assert instance.recompute == (False, True)


def test_the_papers_program_refuses_branches_and_missing_profiles() -> None:
    chain = chain_problem()
    with pytest.raises(GraphError, match="branches"):
        place_as_paper(replace(chain, graph=replace(chain.graph, flows=chain.graph.flows[1:])))
    with pytest.raises(PlacementError, match="needs profiles without recompute"):
        paper_instance(changed(chain, recompute=(RecomputeMode.FULL,)))
