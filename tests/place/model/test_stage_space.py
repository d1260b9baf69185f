"""Sums, maxima and exposed reductions of stages, against loops; chains and branches use different code."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import random_graph
from property_examples import examples

from phaze.errors import PlacementError
from phaze.place import Flow, PlacementGraph
from phaze.place.model.stage_space import build_stage_space

seeds = st.integers(0, 2**32 - 1)


@examples(60)
@given(seeds)
def test_quantities_of_stages_equal_loops_over_their_layers(seed: int) -> None:
    random = Random(seed)
    space = build_stage_space(random_graph(random, random.randrange(1, 7)))
    generator = np.random.default_rng(seed)
    values, overlap = generator.uniform(0, 1, (2, 3, space.layers))
    reduction = generator.uniform(0, 1, space.layers)
    sums, maxima, exposed = space.sums(values), space.maxima(values), space.exposed(reduction, overlap)
    above = space.largest_above(values, overlap)
    for stage in range(len(space.source)):
        members = list(space.members(stage))
        assert space.sizes[stage] == len(members)
        assert sums[:, stage] == pytest.approx(values[:, members].sum(axis=1))
        assert maxima[:, stage] == pytest.approx(values[:, members].max(axis=1))
        for mode in range(3):
            free = ready = 0.0
            for layer in reversed(members):
                ready += overlap[mode, layer]
                free = max(free, ready) + reduction[layer]
            assert exposed[mode, stage] == pytest.approx(free - ready)
            later = [overlap[mode, members[place + 1 :]].sum() for place in range(len(members))]
            assert above[mode, stage] == pytest.approx(max(values[mode, members] - later))


def test_the_states_of_a_chain_are_its_prefixes() -> None:
    graph = random_graph(Random(1), 1)
    assert build_stage_space(graph).is_chain


def test_a_graph_that_branches_too_much_is_refused_with_advice() -> None:
    layers = PlacementGraph.chain(tuple("abcdefghijkl")).layers
    with pytest.raises(PlacementError, match="merge parallel layers"):
        build_stage_space(PlacementGraph(layers=layers))


def test_parallel_branches_are_states_of_their_own() -> None:
    layers = PlacementGraph.chain(("in", "left", "right", "out")).layers
    graph = PlacementGraph(layers=layers, flows=(Flow(0, (1, 2)), Flow(1, (3,)), Flow(2, (3,))))
    space = build_stage_space(graph)
    assert space.states == 6
    assert not space.is_chain
    assert {space.members(stage) for stage in range(len(space.source)) if space.sizes[stage] == 1} == {
        (0,),
        (1,),
        (2,),
        (3,),
    }
