"""A strategy has the fields that users type, refuses what cannot be, and narrows what may be chosen."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phaze
from phaze.errors import QuestionError
from phaze.ir import RecomputeMode
from phaze.json_documents import from_document, to_document
from phaze.parallelism import (
    PIPELINE_SCHEDULES,
    STRATEGY_KEYS,
    Choices,
    Offload,
    Parallelism,
    PipelineSchedule,
    read_strategy,
)

INTERLEAVED = PipelineSchedule.INTERLEAVED


def test_its_fields_are_the_keys_of_a_strategy() -> None:
    names = [field.name for field in fields(phaze.Parallelism)]
    assert names[:6] == ["dp", "shard", "zero", "cp", "ep", "tp"]
    assert tuple(names) == STRATEGY_KEYS[:-1]
    assert STRATEGY_KEYS[-1] == "stages"


def test_nothing_given_is_one_device_without_a_pipeline() -> None:
    alone = Parallelism()
    assert (alone.stages, alone.schedule, alone.shard, alone.cp, alone.ep) == (1, "none", "all", 1, 1)


@pytest.mark.parametrize("name", ["dp", "cp", "ep", "tp", "pp", "chunks", "micro_batch_size"])
def test_a_degree_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; expected at least 1"):
        Parallelism(**{name: 0})


def test_experts_are_cut_over_all_tp_devices_or_none() -> None:
    assert {Parallelism(tp=4, expert_tp=each).expert_tp for each in (None, 1, 4)} == {None, 1, 4}
    with pytest.raises(ValueError, match="expert_tp is 2; expected 1 or tp, 4"):
        Parallelism(tp=4, expert_tp=2)


def test_experts_that_are_cut_say_over_how_many_devices_layers_are_split() -> None:
    assert [Choices(tp=(1, 2, 4)).within({"expert_tp": each}).tp for each in (1, 4)] == [(1, 2, 4), (4,)]


def test_a_zero_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zero is 4; expected one of 0, 1, 2, 3"):
        Parallelism(zero=4)


@pytest.mark.parametrize("changes", [{"shard": 5}, {"shard": 0}, {"shard": "some"}, {"ep": 5}])
def test_groups_that_do_not_divide_the_devices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a divisor of dp x cp, 12"):
        Parallelism(dp=4, cp=3, **changes)


def test_devices_are_divided_into_groups_that_hold_copies_of_each_other() -> None:
    strategy = Parallelism(dp=8, cp=2, tp=4, pp=3, zero=1, shard=4)
    assert (strategy.replicas, strategy.shard_devices, strategy.shard_groups, strategy.device_count) == (16, 4, 4, 192)
    assert replace(strategy, shard="all").shard_groups == 1


@given(st.integers(1, 64), st.integers(1, 1000))
def test_the_fullest_pipeline_has_the_most_microbatches_and_no_more_than_needed(dp: int, micro_batches: int) -> None:
    each = Parallelism(dp=dp).micro_batches_per_pipeline(micro_batches)
    assert (each - 1) * dp < micro_batches <= each * dp


counts = st.integers(1, 8)
strategies = st.builds(
    Parallelism,
    dp=counts,
    shard=st.sampled_from([1, "all"]),
    zero=st.integers(0, 3),
    cp=counts,
    tp=counts,
    sequence_parallel=st.booleans(),
    pp=counts,
    schedule=st.sampled_from(PipelineSchedule),
    chunks=counts,
    micro_batch_size=counts,
    recompute=st.lists(st.sampled_from(RecomputeMode), max_size=3).map(tuple),
)


@given(strategies)
def test_a_strategy_is_read_back_from_its_document(strategy: Parallelism) -> None:
    assert from_document(Parallelism, to_document(strategy), "strategy") == strategy


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ([("dp", 1)], "strategy is .*; expected a mapping"),
        ({"ddp": 2}, "the key 'ddp'. Did you mean dp"),
        ({"dp": 0}, "dp 0; expected a whole number of at least 1"),
        ({"dp": True}, "dp True; expected a whole number"),
        ({"zero": 1.0}, "zero 1.0; expected one of"),
        ({"zero": 4}, "zero 4; expected one of"),
        ({"cp": 0}, "cp 0; expected a whole number of at least 1"),
        ({"ep": 2.0}, "ep 2.0; expected a whole number of at least 1"),
        ({"dp": 2, "cp": 3, "ep": 4}, "ep 4, which does not divide dp x cp, 2 x 3. The nearest that do: 3, 6"),
        ({"dp": 4, "tp": 2, "ep": 8}, "over 8 of the dp x cp x tp devices are ep 4 with expert_tp 1"),
        ({"tp": 4, "expert_tp": 2}, "expert_tp 2 and tp 4; expected 1 .* or the same as tp"),
        ({"tp": 1, "expert_tp": 1}, "expert_tp 1 and tp 1; expected .* beside a tp above 1"),
        ({"shard": 1}, "shard 1; expected a whole number of at least 2 that divides dp x cp, or 'all'"),
        ({"shard": "some"}, "shard 'some'; expected a whole number"),
        ({"shard": 8, "zero": 0}, "shard 8 and zero 0, which shards nothing"),
        ({"dp": 12, "shard": 8}, "shard 8, which does not divide dp x cp, 12 x 1. The nearest that do: 6, 12"),
        ({"shard": 6, "ep": 4}, "shard 6 and ep 4; expected one of them to divide the other"),
        ({"schedule": "2f2b"}, "schedule '2f2b'; expected one of none, gpipe"),
        ({"sequence_parallel": 1}, "sequence_parallel 1; expected True or False"),
        ({"recompute": "some"}, "recompute 'some'; expected one of"),
        ({"stages": "4"}, "stages '4'; expected how many layers"),
        ({"pp": 1, "schedule": "1f1b"}, "a single stage has schedule 'none'"),
        ({"pp": 2, "schedule": "none"}, "several stages need a schedule"),
        ({"chunks": 2, "schedule": "gpipe"}, "chunks 2 with schedule 'gpipe'; expected 'interleaved-1f1b'"),
        ({"pp": 2, "stages": [1, 2, 3]}, "3 stages; expected pp x chunks, 2 x 1"),
        ({"recompute": ["none", "full"]}, "say with `stages`"),
        ({"stages": [1, 2, 3], "recompute": ["none", "full"]}, "2 recompute modes for 3 stages"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_by_its_key(strategy: object, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        read_strategy(strategy)


def test_a_key_that_is_none_is_left_open() -> None:
    assert read_strategy({"dp": 4, "tp": None}) == {"dp": 4}


@pytest.mark.parametrize(
    ("asked", "offload"),
    [(None, Offload.ACTIVATIONS), ("activations", Offload.ACTIVATIONS), ("optimizer", Offload.BOTH)],
)
def test_a_policy_that_offloads_is_a_mode_and_activations_on_the_host(asked: str | None, offload: Offload) -> None:
    settled = read_strategy({"recompute": "qkv_proj_offloaded", "offload": asked})
    assert settled == {"recompute": (RecomputeMode.QKV,), "offload": offload}


def test_a_policy_that_offloads_contradicts_nothing_on_the_host() -> None:
    with pytest.raises(QuestionError, match="offload 'none' and recompute 'minimal_offloaded'"):
        read_strategy({"recompute": "minimal_offloaded", "offload": "none"})


def test_what_a_strategy_fixes_is_all_that_may_be_chosen() -> None:
    fixed = read_strategy({"dp": 4, "tp": 2, "pp": 2, "micro_batch_size": 8, "zero": 1, "recompute": "full"})
    choices = Choices(tp=(1, 2, 4), micro_batch_size=(1, 2)).within(fixed)
    assert (choices.dp, choices.tp, choices.pp, choices.micro_batch_size) == ((4,), (2,), (2,), (8,))
    assert (choices.zero, choices.recompute) == ((1,), (RecomputeMode.FULL,))
    assert choices.schedule == PIPELINE_SCHEDULES


@pytest.mark.parametrize(
    ("strategy", "schedules", "depths"),
    [
        ({"schedule": "none"}, PIPELINE_SCHEDULES, (1,)),
        ({"schedule": "gpipe"}, (PipelineSchedule.GPIPE,), None),
        ({"chunks": 1}, tuple(kind for kind in PIPELINE_SCHEDULES if not kind.has_chunks), None),
        ({"chunks": 3}, (INTERLEAVED,), None),
        ({"schedule": "zb-v"}, (PipelineSchedule.ZERO_BUBBLE_V,), None),
        ({"schedule": "dualpipe-v", "chunks": 2}, (PipelineSchedule.DUAL_PIPE_V,), None),
    ],
)
def test_schedules_and_chunks_narrow_each_other(
    strategy: dict[str, object], schedules: tuple[PipelineSchedule, ...], depths: tuple[int, ...] | None
) -> None:
    choices = Choices().within(read_strategy(strategy))
    assert choices.schedule == schedules
    assert choices.pp == depths


def test_one_pipeline_shards_nothing_whatever_is_asked() -> None:
    assert Choices().within(read_strategy({"dp": 1, "zero": 3})).zero == (0,)
