"""What layers keep within a budget of memory, against trying every choice of kept tensors."""

import random
from itertools import combinations

import pytest
from graphs import tiny_graph

from phaze.ir import BUDGET_MODES, Graph, Layer, OpKind, RecomputeMode, kept_tensors, stashed_tensors
from phaze.ir.kept_activations import made_again
from phaze.ir.recompute_budget import FrontPoint, point_within, recompute_front, within_budget

FAMILIES = ("gpt2", "llama", "bert", "t5", "mixtral")


def random_seconds(layer: Layer, seed: int) -> dict[str, float]:
    """Seconds of ops, some of which are equal and some nothing."""
    chance = random.Random(seed)
    return {
        op.id: 0.0 if op.kind is OpKind.VIEW else chance.choice((0.0, 0.5, 1.0, chance.random()))
        for op in layer.forward
    }


def kept_bytes(graph: Graph, kept: tuple[str, ...]) -> int:
    return sum(graph.tensors[name].size_bytes for name in kept)


def every_choice(graph: Graph, layer: Layer, seconds: dict[str, float]) -> list[tuple[int, float]]:
    """Bytes and seconds of every set of results that could be kept."""
    made = [name for op in layer.forward if op.kind is not OpKind.VIEW for name in op.outputs]
    always = set(kept_tensors(graph, layer, RecomputeMode.FULL)) | (set(stashed_tensors(graph, layer)) - set(made))
    listed = []
    for count in range(len(made) + 1):
        for chosen in combinations(made, count):
            again = made_again(graph, layer, always | set(chosen))
            listed.append((kept_bytes(graph, again.kept), sum(seconds[op.id] for op in again.again)))
    return listed


def blocks(most: int) -> list[tuple[str, int]]:
    """Layers with at most so many ops that make something."""
    return [
        (family, layer.index)
        for family in FAMILIES
        for layer in tiny_graph(family).distinct_layers
        if sum(op.kind is not OpKind.VIEW for op in layer.forward) <= most
    ]


def assert_front_is_that_of_every_choice(family: str, index: int, seed: int) -> None:
    graph = tiny_graph(family)
    layer = graph.layers[index]
    seconds = random_seconds(layer, seed)
    front = recompute_front(graph, layer, seconds)
    choices = every_choice(graph, layer, seconds)
    for budget in sorted({size for size, _ in choices}):
        least_s = min(again_s for size, again_s in choices if size <= budget)
        fitting = [point for point in front if point.kept_bytes <= budget]
        assert fitting[-1].again_s == pytest.approx(least_s, abs=1e-12)
    assert min(size for size, _ in choices) == front[0].kept_bytes


@pytest.mark.parametrize(("family", "index"), blocks(11))
def test_no_choice_of_kept_tensors_beats_the_front(family: str, index: int) -> None:
    assert_front_is_that_of_every_choice(family, index, seed=index)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("family", "index"), blocks(14))
def test_no_choice_of_kept_tensors_beats_the_front_whatever_ops_take(family: str, index: int, seed: int) -> None:
    assert_front_is_that_of_every_choice(family, index, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_points_of_the_front_are_what_their_choices_keep_and_run_again(family: str) -> None:
    graph = tiny_graph(family)
    for layer in graph.distinct_layers:
        seconds = random_seconds(layer, 1)
        front = recompute_front(graph, layer, seconds)
        assert [point.kept_bytes for point in front] == sorted({point.kept_bytes for point in front})
        for point in front:
            again = made_again(graph, layer, point.kept)
            assert kept_bytes(graph, again.kept) == point.kept_bytes
            assert sum(seconds[op.id] for op in again.again) == pytest.approx(point.again_s)


@pytest.mark.parametrize("family", FAMILIES)
def test_smaller_budgets_keep_fewer_bytes_and_run_more_again(family: str) -> None:
    graph = tiny_graph(family)
    layer = max(graph.distinct_layers, key=lambda layer: len(layer.forward))
    seconds = random_seconds(layer, 2)
    front = recompute_front(graph, layer, seconds)
    ends = tuple(
        kept_bytes(graph, kept_tensors(graph, layer, mode)) for mode in (RecomputeMode.FULL, RecomputeMode.NONE)
    )
    least, most = ends
    taken: list[FrontPoint] = [point_within(mode, front, (least, most)) for mode in BUDGET_MODES]
    for mode, point in zip(BUDGET_MODES, taken, strict=True):
        assert mode.budget is not None
        assert point.kept_bytes <= least + mode.budget * (most - least)
        again = within_budget(graph, layer, mode, front, (least, most))
        assert kept_bytes(graph, again.kept) == point.kept_bytes
        there = set(again.kept)
        for op in again.again:
            there.update(op.outputs)
        assert set(stashed_tensors(graph, layer)) <= there
    assert [point.again_s for point in taken] == sorted(point.again_s for point in taken)


def test_layers_with_very_many_choices_are_thinned_and_never_better_than_the_front() -> None:
    graph = tiny_graph("mixtral")
    layer = max(graph.distinct_layers, key=lambda layer: len(layer.forward))
    seconds = random_seconds(layer, 3)
    front = recompute_front(graph, layer, seconds)
    thinned = recompute_front(graph, layer, seconds, most_labels=10)
    assert thinned[0].kept_bytes >= front[0].kept_bytes
    for point in thinned:
        exact = [other for other in front if other.kept_bytes <= point.kept_bytes][-1]
        assert exact.again_s <= point.again_s + 1e-12


def test_a_budget_asks_for_the_seconds_of_ops() -> None:
    graph = tiny_graph("gpt2")
    with pytest.raises(ValueError, match="depends on the seconds of ops"):
        kept_tensors(graph, graph.layers[1], RecomputeMode.BUDGET_50)
