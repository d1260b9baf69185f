"""Boxes of accelerators: the distance of their best case, and how they are cut."""

import numpy as np
import pytest
from designs import small_question, some_points, tiny_model

from phaze.explore.design_bounds import SweepTask, SweptSlicing, sweep_slicing
from phaze.explore.search_state import DesignBox, best_case_distance, cut_box


@pytest.fixture(scope="module")
def swept() -> SweptSlicing:
    """A small model over twelve accelerators."""
    question = small_question([tiny_model()], some_points(12, seed=3), micro_batch_size=(2,))
    return sweep_slicing(SweepTask(question=question, model=0, micro_batch_size=2, tp=1))


def box_of(*points: int) -> DesignBox:
    return DesignBox(name="box", points=np.array(points), bounds_s=np.zeros(1))


def test_the_best_case_of_one_accelerator_is_its_own(swept: SweptSlicing) -> None:
    assert best_case_distance(box_of(4), 4, [swept], [True]) == 0.0
    assert best_case_distance(box_of(*range(12)), 4, [swept], [False]) == 0.0


def test_the_best_case_of_more_accelerators_is_no_nearer(swept: SweptSlicing) -> None:
    distances = [best_case_distance(box_of(*range(count)), 0, [swept], [True]) for count in range(1, 13)]
    assert distances == sorted(distances)
    assert 0.0 < distances[-1] < 1.0


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_a_cut_leaves_two_parts_that_make_up_the_box(swept: SweptSlicing, count: int, is_open: bool) -> None:
    box = box_of(*range(count))
    low, high = cut_box(box, 0, [swept], [is_open])
    assert len(low)
    assert len(high)
    assert sorted([*low, *high]) == list(range(count))


def test_a_cut_brings_a_part_nearer_to_its_best_case(swept: SweptSlicing) -> None:
    box = box_of(*range(12))
    whole = best_case_distance(box, 0, [swept], [True])
    (part,) = (part for part in cut_box(box, 0, [swept], [True]) if 0 in part)
    assert best_case_distance(box_of(*part), 0, [swept], [True]) <= whole


def test_accelerators_with_equal_bounds_are_cut_by_their_order(swept: SweptSlicing) -> None:
    bounds = swept.bounds
    equal = type(bounds)(
        pass_s=np.repeat(bounds.pass_s[:1], 12, axis=0), step_s=bounds.step_s[:1].repeat(12), step_j=bounds.step_j
    )
    low, high = cut_box(box_of(*range(5)), 0, [SweptSlicing(swept.slicing, equal)], [True])
    assert (low.tolist(), high.tolist()) == ([0, 1], [2, 3, 4])
