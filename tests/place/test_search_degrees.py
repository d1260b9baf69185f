"""The default program against trying everything."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import brute_force
from placement_problems import random_problem

from phaze.place.ground import Ground
from phaze.place.search_degrees import search_degrees


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_the_program_finds_what_trying_everything_finds(seed: int) -> None:
    problem = random_problem(seed)
    expected = brute_force(problem)
    answer = search_degrees(Ground.of(problem), top=4)
    times = sorted(expected.values())[:4]
    assert [found.time_s for found in answer.found] == pytest.approx(times, rel=1e-9)
    for found in answer.found:
        degrees = found.degrees
        key = (degrees.width, degrees.pipelines, degrees.devices, degrees.chunks, degrees.schedule, degrees.zero_stage)
        assert found.time_s == pytest.approx(expected[key], rel=1e-9)
    assert answer.bound_s == pytest.approx(min(expected.values(), default=math.inf), rel=1e-9)
