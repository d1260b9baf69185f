"""Plans of torch modules run in real processes over gloo and give what one process gives."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from oracles.traffic_count import planned_context_bytes, planned_exchanges, planned_traffic
from torch_plans import described, imported, planned, unforced
from torch_rank_cases import Answers, Cases, Strategy, check_equality, run_cases, strategy_cases
from torch_training import build_model

DEFAULT: dict[int, dict[str, Strategy]] = {
    2: {
        "gpt2 dp2": {"dp": 2, "zero": 0},
        "gpt2 dp2 zero1": {"dp": 2, "zero": 1},
        "gpt2 dp2 zero2": {"dp": 2, "zero": 2, "recompute": "full"},
        "gpt2 dp2 zero3": {"dp": 2, "zero": 3, "recompute": "selective"},
        "gpt2 tp2": {"tp": 2, "sequence_parallel": True},
        "gpt2 pp2": {"pp": 2, "schedule": "gpipe", "recompute": "full"},
        "llama dp2": {"dp": 2, "zero": 0, "recompute": "full"},
        "llama tp2": {"tp": 2, "recompute": "full"},
        "llama pp2": {"pp": 2, "schedule": "1f1b"},
        "t5 dp2": {"dp": 2, "zero": 3},
        "t5 tp2": {"tp": 2, "recompute": "full"},
        "t5 pp2": {"dp": 1, "tp": 1, "pp": 2, "zero": 0, "schedule": "1f1b", "stages": (4, 4)},
        "bert tp2": {"tp": 2},
        "hand-written pp2": {"pp": 2},
        "headless pp2": {"pp": 2},
        "llama pp2 bf16": {"pp": 2},
        "gpt2 tp2 bf16": {"tp": 2},
        "llama cp2": {"cp": 2, "recompute": "full"},
        "three-headed cp2": {"cp": 2, "exchange": "ring"},
        "grouped cp2": {"cp": 2},
        "llama cp2 ring": {"cp": 2, "exchange": "ring"},
        "llama cp2 heads": {"cp": 2, "exchange": "all_to_all"},
        "gpt2-config cp2": {"cp": 2},
        "llama-config cp2": {"cp": 2},
        "llama-mqa cp2": {"cp": 2},
        "llama-mqa-config cp2": {"cp": 2},
    },
    4: {
        "gpt2 dp2 tp2": {"dp": 2, "tp": 2, "zero": 3},
        "llama pp2 tp2": {"pp": 2, "tp": 2, "recompute": "full"},
        "llama dp2 pp2 zero1": {"dp": 2, "pp": 2, "zero": 1, "schedule": "1f1b"},
        "llama dp2 pp2 zero3": {"dp": 2, "pp": 2, "zero": 3, "schedule": "1f1b"},
        "gpt2 dp2 pp2 interleaved zero2": {"dp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved-1f1b", "zero": 2},
        "llama dp4 hybrid zero3": {"dp": 4, "shard": 2, "zero": 3, "micro_batch_size": 1},
        "llama cp2 tp2": {"cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
        "llama-config cp2 tp2": {"cp": 2, "tp": 2},
        "llama-mqa cp2 tp2": {"cp": 2, "tp": 2},
        "gpt2 dp2 cp2 zero3": {"dp": 2, "cp": 2, "zero": 3, "exchange": "all_to_all"},
        "odd tp4": {"tp": 4, "recompute": "full"},
    },
    8: {
        "llama dp2 pp2 tp2": {"dp": 2, "pp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
    },
}
BRIEF = (
    *("llama pp2 tp2", "llama dp2 pp2 zero1", "llama cp2 tp2", "gpt2 dp2 cp2 zero3", "odd tp4"),
    *(
        "grouped cp2",
        "llama cp2 ring",
        "llama cp2 heads",
        "gpt2-config cp2",
        "llama-config cp2",
        "llama-mqa cp2",
        "llama-mqa-config cp2",
    ),
    *("llama-config cp2 tp2", "llama-mqa cp2 tp2"),
    *("unforced gpt2", "unforced uncut"),
)
"""Cases of the default run in which gradients are not added up and weights are not loaded, as they are in those of two
processes and in others of four; the exhaustive run has all of it."""
DUPLICATES: dict[int, dict[str, Strategy]] = {
    2: {
        "headless tp2": {"tp": 2, "sequence_parallel": True},
        "headless dp2": {"dp": 2, "zero": 0},
        "t5 cp2": {"cp": 2},
    },
    4: {
        "llama dp2 pp2 zero2": {"dp": 2, "pp": 2, "zero": 2, "schedule": "gpipe"},
        "gpt2 dp4 hybrid zero2": {"dp": 4, "shard": 2, "zero": 2, "micro_batch_size": 1},
        "t5 pp2 tp2": {"pp": 2, "tp": 2},
        "llama cp2 tp2 zero0": {"cp": 2, "tp": 2, "sequence_parallel": True},
        "gpt2 cp2 pp2": {"cp": 2, "pp": 2},
        "gpt2 dp4 hybrid zero1": {"dp": 4, "shard": 2, "zero": 1, "micro_batch_size": 1},
        "t5 dp2 tp2": {"dp": 2, "tp": 2, "zero": 0, "recompute": "full"},
    },
    8: {"gpt2 dp2 pp2 tp2": {"dp": 2, "pp": 2, "tp": 2, "zero": 0, "recompute": "full"}},
}
"""Cases beside those of the default run, whose models and degrees that one has in other combinations."""
DEGREES: dict[int, list[Strategy]] = {
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
    4: [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}],
    8: [{"dp": 2, "pp": 2, "tp": 2}],
}


UNFORCED = {"gpt2": 300_000, "uncut": 300_000}
"""Bytes of memory of each of four devices; each of eight has those of `UNFORCED_IN_FULL`."""
UNFORCED_IN_FULL = {"gpt2": 400_000, "llama": 250_000, "bert": 300_000, "hand-written": 400_000}


def full_cases(world: int) -> dict[str, Strategy]:
    """Every model with all degrees, copies whole and sharded, with and without recompute."""
    cases: dict[str, Strategy] = DUPLICATES[world] | {
        name: DEFAULT[world][name] for name in BRIEF if name in DEFAULT[world]
    }
    for kind in ("gpt2", "llama", "t5"):
        for degrees in DEGREES[world]:
            for zero in (0, 3) if "dp" in degrees else (0,):
                for mode in ("none", "full"):
                    words = " ".join(f"{name}{size}" for name, size in degrees.items())
                    name = f"{kind} {words} zero{zero} {mode}"
                    cases[name] = {**degrees, "zero": zero, "recompute": mode}
    if world == 4:
        cases["gpt2 pp2 tp2 selective"] = {"pp": 2, "tp": 2, "recompute": "selective"}
        cases["gpt2 interleaved"] = {"pp": 2, "dp": 2, "chunks": 2, "schedule": "interleaved-1f1b", "zero": 0}
        cases["llama tp4"] = {"tp": 4}
        cases["llama cp4"] = {"cp": 4, "zero": 3}
        cases["bert cp2 tp2"] = {"cp": 2, "tp": 2}
        cases["t5 cp2 pp2"] = {"cp": 2, "pp": 2, "recompute": "full"}
        cases["hand-written pp4"] = {"pp": 4}
    if world == 8:
        cases["llama cp2 pp2 tp2"] = {"cp": 2, "pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"}
        cases["gpt2 dp2 cp2 tp2 hybrid"] = {"dp": 2, "cp": 2, "tp": 2, "zero": 3, "shard": 2}
    return cases


def unforced_cases(kinds: Mapping[str, int], devices: int, steps: int) -> Cases:
    """Cases of some steps for plans exactly as `optimize` returns them, under a limit of memory for each kind."""
    plans = {kind: unforced(kind, memory_bytes, devices) for kind, memory_bytes in kinds.items()}
    return {f"unforced {kind}": (kind, plan, steps) for kind, plan in plans.items()}


@pytest.fixture(scope="module")
def unforced_plans() -> Cases:
    return unforced_cases(UNFORCED, devices=4, steps=4)


@pytest.fixture(scope="module")
def answers(unforced_plans: Cases, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answers]:
    """All cases of the default run: one program starts every group of processes."""
    worlds = {world: strategy_cases(world, strategies) for world, strategies in DEFAULT.items()}
    with_unforced = {**worlds, 4: {**worlds[4], **unforced_plans}}
    return run_cases(tmp_path_factory.mktemp("ranks"), with_unforced, moments_in_world=2, brief=BRIEF)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in DEFAULT.items() for name in cases])
def test_a_step_in_processes_equals_one_process(answers: dict[int, Answers], world: int, name: str) -> None:
    check_equality(answers[world](name), most=0.1 if "bf16" in name else 1e-5, is_brief=name in BRIEF)


@pytest.mark.parametrize("name", ["gpt2 pp2", "t5 pp2", "llama dp2 pp2 tp2", "hand-written pp2"])
def test_stages_together_hold_every_parameter_under_its_own_name(answers: dict[int, Answers], name: str) -> None:
    held = answers[8 if "dp2" in name else 2](name)["names"]
    model = build_model(name.partition(" ")[0])
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first = {alias: names[id(parameter)] for alias, parameter in model.named_parameters(remove_duplicate=False)}
    assert set(held) <= known
    assert {first[alias] for alias in held} == set(names.values())


@pytest.mark.parametrize("name", ["gpt2 dp2", "gpt2 dp2 zero3", "gpt2 tp2", "llama tp2", "t5 tp2", "bert tp2"])
def test_live_parameters_gradients_and_moments_have_the_planned_bytes(answers: dict[int, Answers], name: str) -> None:
    answer = answers[2](name)
    plan = planned(name.partition(" ")[0], 2, DEFAULT[2][name])
    memory = plan.stages[0].memory_bytes
    for live in answer["live"]:
        assert live["parameters"] == pytest.approx(memory["parameters"], rel=0.01)
        assert live["gradients"] == pytest.approx(memory["gradients"], rel=0.01)
        assert live["optimizer"] == pytest.approx(memory["optimizer"], rel=0.01)


@pytest.mark.parametrize("name", ["gpt2 dp2 zero1", "gpt2 dp2 zero2"])
def test_gathered_parameters_and_their_master_shards_have_the_planned_bytes(
    answers: dict[int, Answers], name: str
) -> None:
    plan = planned("gpt2", 2, DEFAULT[2][name])
    memory, recipe = plan.stages[0].memory_bytes, plan.question.precision
    for live in answers[2](name)["live"]:
        assert live["gathered"] == pytest.approx(memory["parameters"], rel=0.01)
        master = memory["optimizer"] * recipe.master_bytes / recipe.optimizer_bytes
        assert live["parameters"] == pytest.approx(master, rel=0.01)
        assert live["parameters"] + live["optimizer"] == pytest.approx(memory["optimizer"], rel=0.01)
        if plan.strategy.zero == 2:
            assert live["gradients"] == pytest.approx(memory["gradients"], rel=0.01)


COPIED = [(2, name) for name in DEFAULT[2] if "dp2" in name] + [(4, name) for name in DEFAULT[4] if "pp2 zero" in name]


@pytest.mark.parametrize(("world", "name"), COPIED)
def test_copies_send_the_planned_bytes(answers: dict[int, Answers], world: int, name: str) -> None:
    kind = name.partition(" ")[0]
    plan = planned(kind, world, DEFAULT[world][name])
    stages = planned_traffic(plan, imported(kind), least_bytes=1024)
    copies = plan.strategy.dp
    for rank, live in enumerate(answers[world](name)["live"]):
        assert live["copies"] == pytest.approx(stages[rank // copies].dp_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("world", "name", "way"), [(4, "gpt2 dp2 cp2 zero3", "all_to_all"), (2, "three-headed cp2", "ring")]
)
def test_contexts_exchange_the_planned_bytes(answers: dict[int, Answers], world: int, name: str, way: str) -> None:
    kind = name.partition(" ")[0]
    plan = planned(kind, world, DEFAULT[world][name])
    assert set(plan.layouts.key_exchanges.values()) == {way}
    for live in answers[world](name)["live"]:
        assert live["exchanged"] == pytest.approx(planned_exchanges(plan, imported(kind)), rel=0.05)


GROUPED = [
    *((2, name) for name in DEFAULT[2] if name in BRIEF and "cp2" in name),
    *((4, name) for name in ("llama-config cp2 tp2", "llama-mqa cp2 tp2")),
]


@pytest.mark.parametrize(("world", "name"), GROUPED)
def test_contexts_send_the_planned_bytes_whatever_heads_share_keys(
    answers: dict[int, Answers], world: int, name: str
) -> None:
    kind = name.partition(" ")[0]
    plan = planned(kind, world, DEFAULT[world][name])
    graph = described(kind) if kind.endswith("-config") else imported(kind)
    for live in answers[world](name)["live"]:
        labels = 512 * 2  # what a shift of labels gathers for each of two microbatches
        assert live["contexts"] == pytest.approx(planned_context_bytes(plan, graph), rel=0.05, abs=labels)


@pytest.mark.parametrize("name", ["gpt2 tp2", "llama tp2", "t5 tp2", "bert tp2"])
def test_tensor_parallel_devices_send_no_more_than_planned(answers: dict[int, Answers], name: str) -> None:
    kind = name.partition(" ")[0]
    (stage,) = planned_traffic(planned(kind, 2, DEFAULT[2][name]), imported(kind))
    for live in answers[2](name)["live"]:
        assert live["tensor"] <= 1.05 * stage.tp_bytes
        assert live["tensor"] >= 0.6 * stage.tp_bytes  # plans of few words gather logits, which are never gathered


def check_unforced(answers: Answers, cases: Cases, is_brief: bool = False) -> None:
    """Some steps of plans exactly as they are returned, their losses against those of one process."""
    for name, (_, _, steps) in cases.items():
        check_equality(answers(name), is_brief=is_brief)
        assert len(answers(name)["curve"]) == steps
        assert answers(name)["curve_error"] < 1e-4


def test_plans_under_limits_of_memory_train_as_one_process_does(
    answers: dict[int, Answers], unforced_plans: Cases
) -> None:
    check_unforced(answers[4], unforced_plans, is_brief=True)
    plans = {kind: plan for kind, plan, _ in unforced_plans.values()}
    strategies = [plan.strategy for plan in plans.values()]
    assert all(plan.provenance.target == "torch" for plan in plans.values())
    assert any(strategy.tp > 1 for strategy in strategies)
    assert any(strategy.pp > 1 for strategy in strategies)
    assert any(strategy.zero > 0 for strategy in strategies)
    assert any(set(strategy.recompute) != {"none"} for strategy in strategies)
    assert plans["uncut"].strategy.pp == 1
    assert any("one pipeline stage only" in note for note in plans["uncut"].provenance.notes)


@pytest.mark.exhaustive
def test_plans_of_more_models_train_as_one_process_does(tmp_path: Path) -> None:
    cases = unforced_cases(UNFORCED_IN_FULL, devices=8, steps=20)
    check_unforced(run_cases(tmp_path, {8: cases})[8], cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_combination_in_processes_equals_one_process(tmp_path: Path, world: int) -> None:
    cases = strategy_cases(world, full_cases(world))
    answer_of = run_cases(tmp_path, {world: cases})[world]
    for name in cases:
        check_equality(answer_of(name))
