"""What is pruned before it is scheduled has no better plan, and list schedules serve again where they suffice."""

import itertools
import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import FITTED_CHIP, IDEAL_CHIP, small_cluster, small_graph
from property_examples import examples

import phaze
from phaze.hardware import Cluster, parse_cluster
from phaze.installed import installed_plugins
from phaze.ir import Graph
from phaze.place import Bounded, find_placement
from phaze.place.model.network_prices import Network
from phaze.planner.candidate_slicings import CandidateSlicing, has_fewer_sequences, most_promising
from phaze.planner.strategy_search import graph_at, narrowed_problem
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import ModelProfiles, profile_model, profile_options, profiled_modes, slicings
from phaze.question import Question, QuestionOptions, ask


def small_question(graph: Graph, cluster: Cluster, **options: Any) -> Question:
    """A question about a small model, for analysis: every schedule and ZeRO stage may be chosen."""
    asked = QuestionOptions(cluster=cluster, global_batch_size=16, target=None, **options)
    return ask(graph, None, asked, installed_plugins())


def candidates(question: Question, size: int, tp: int, options: ProfileOptions) -> list[CandidateSlicing]:
    network = Network(question.cluster, question.calibration)
    models = slicings(question, graph_at(question, size), tp)
    micro_batches, problem_of = question.global_batch_size // size, partial(narrowed_problem, question)
    return [CandidateSlicing(model, options, micro_batches, network, problem_of) for model in models]


@examples(6)
@given(
    st.sampled_from(["small a100", "fitted a100", "tpuv4:8", "tpuv4-paper:8"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1.0, 0.02]),
)
def test_no_plan_takes_less_than_the_time_that_prunes_its_slicing(
    chip: str, layers: int, size: int, tp: int, ample: float
) -> None:
    graph = small_graph(num_layers=layers)
    if chip in ("small a100", "fitted a100"):
        cluster = small_cluster(8, 8, FITTED_CHIP if chip == "fitted a100" else IDEAL_CHIP)
    else:
        cluster = parse_cluster(chip)
    memory = int((18.0 * graph.parameter_count + 2**28) * ample)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=memory))
    question = small_question(graph, cluster)
    options = profile_options(question, profiled_modes(question))
    for slicing in candidates(question, size, tp, options):
        slices = slicing.scheduled(options)
        best = find_placement(narrowed_problem(question, slices), top=1).best
        if best is None:
            continue
        assert slicing.least_s <= best.time_s
        assert slicing.least_s <= slicing.strategies.bound_s.min() * (1 + 1e-9), "the first bound is the weakest"
        assert len(slicing.bounded_below(best.time_s * (1 + 1e-6)).promising)
        assert not len(slicing.bounded_below(best.time_s / 50).promising), (
            "a bound that is far away would hold and be of no use"
        )
        if ample == 1.0:
            assert slicing.estimate_s < math.inf


def test_slicings_come_by_their_estimates_and_those_ruled_out_are_never_estimated() -> None:
    question = small_question(small_graph(num_layers=2), parse_cluster("a100-80gb:8"))
    options = profile_options(question, profiled_modes(question))

    def listed() -> list[CandidateSlicing]:
        return [slicing for size in (1, 4) for tp in (1, 2, 8) for slicing in candidates(question, size, tp, options)]

    every = [slicing.estimate_s for slicing, is_ruled_out in most_promising(listed(), lambda: math.inf)]
    assert every == sorted(slicing.estimate_s for slicing in listed())
    target_s = every[0]
    answers = list(most_promising(listed(), lambda: target_s))
    assert {is_ruled_out for _, is_ruled_out in answers} == {True, False}
    for slicing, is_ruled_out in answers:
        assert is_ruled_out == (slicing.least_s >= target_s)
        assert not is_ruled_out or {"slices", "estimate_s"}.isdisjoint(vars(slicing))


@pytest.mark.parametrize("chip", ["a100-80gb:8", "tpuv4-paper:8"])
def test_quick_profiles_bound_the_scheduled_ones_from_both_sides(chip: str) -> None:
    question = small_question(small_graph(num_layers=1), parse_cluster(chip))
    options = profile_options(question, profiled_modes(question))
    (slicing, *_) = candidates(question, 2, 2, options)
    scheduled = slicing.scheduled(replace(options, gap=0.0))
    for key, profile in scheduled.profiles.items():
        quick = slicing.slices.profiles[key]
        assert quick.forward_s.bound <= profile.forward_s.value <= quick.forward_s.value
        whole, quick_whole = (each.backward_input_s.value + each.backward_weight_s.value for each in (profile, quick))
        assert whole <= quick_whole
        assert quick.backward_input_s.bound <= profile.backward_input_s.value
        assert quick.backward_weight_s.bound <= profile.backward_weight_s.value


def test_schedules_that_lists_prove_are_not_made_again() -> None:
    question = small_question(small_graph(num_layers=1), parse_cluster("a100-80gb:8"))
    options = profile_options(question, profiled_modes(question))
    (slicing,) = candidates(question, 1, 1, options)
    assert slicing.scheduled(options) is slicing.slices
    assert slicing.scheduled(replace(options, gap=0.0)) is not slicing.slices or all(
        report.gap == 0.0 for report in slicing.slices.reports.values()
    )


def numbers(slices: ModelProfiles) -> dict[object, list[object]]:
    """Every field of every profile, seconds as plain numbers."""

    def plain(value: object) -> object:
        return (value.value.tolist(), value.bound.tolist()) if isinstance(value, Bounded) else value

    return {
        key: [plain(getattr(profile, field.name)) for field in fields(profile)]
        for key, profile in slices.profiles.items()
    }


def test_profiles_kept_from_other_slicings_are_those_that_would_be_made_anew() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 64}
    graph = phaze.import_graph({"model_type": "mixtral", **sizes, **experts}, sequence_length=32)
    question = small_question(graph, parse_cluster("a100-80gb:8"))
    shared = replace(profile_options(question, profiled_modes(question)), is_quick=True)
    graphs, layers = LocalGraphs(question), 0
    for size, tp, ep in itertools.product((1, 2), (1, 2), (1, 2, 4)):
        for model in slicings(question, graphs.at(size, tp=tp, ep=ep), tp, ep=ep):
            fresh = replace(shared, profiles={})
            kept, anew = profile_model(model, shared), profile_model(model, fresh)
            assert numbers(kept) == numbers(anew)
            assert {key: report.gap for key, report in kept.reports.items()} == {
                key: report.gap for key, report in anew.reports.items()
            }
            layers += len(fresh.profiles)
    assert len(shared.profiles) < 0.8 * layers


@pytest.mark.parametrize(
    ("cp", "sizes", "left_out"),
    [
        ((1, 2), (1, 2), {(2, 2)}),
        ((1, 2, 4), (1, 2, 4), {(2, 2), (2, 4), (4, 2), (4, 4)}),
        ((2,), (1, 2), set()),
        ((1, 2), (2,), set()),
        ((1, 3), (1, 2), set()),
        ((2, 6), (1, 3), {(6, 3)}),
    ],
)
def test_split_sequences_come_several_in_a_microbatch_where_no_offer_stands_for_them(
    cp: tuple[int, ...], sizes: tuple[int, ...], left_out: set[tuple[int, int]]
) -> None:
    question = small_question(small_graph(), small_cluster(devices=8), cp=cp)
    question = replace(question, choices=replace(question.choices, micro_batch_size=sizes))
    pairs = list(itertools.product(cp, sizes))
    assert {pair for pair in pairs if has_fewer_sequences(question, pair[1], pair[0])} == left_out
    of_two_copies = replace(question, choices=replace(question.choices, dp=(2,)))
    assert not any(has_fewer_sequences(of_two_copies, size, degree) for degree, size in pairs)
