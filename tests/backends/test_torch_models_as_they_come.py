"""Models as people bring them, without any change for Phaze, train in processes as they do in one.

Kinds whose names end in `-cached` collect keys and values for generation, as Hugging Face makes them.
"""

from pathlib import Path
from typing import Any

import pytest
from oracles.traffic_count import planned_exchanges, planned_traffic
from torch_plans import imported, planned
from torch_rank_cases import Answers, Strategy, check_equality, run_strategies

CASES: dict[str, Strategy] = {
    "llama-cached tp2": {"tp": 2},
    "llama-cached pp2": {"pp": 2, "schedule": "1f1b"},
    "qwen3-cached tp2": {"tp": 2},
    "t5-cached tp2": {"tp": 2},
    "nanogpt tp2": {"tp": 2},
    "nanogpt pp2": {"pp": 2},
    "nanogpt-indexed tp2": {"tp": 2},
    "encoder pp2": {"pp": 2},
    "captioned pp2": {"pp": 2},
    "gemma3 dp2 zero3": {"dp": 2, "zero": 3},
    "gemma3 tp2": {"tp": 2},
    "mamba dp2 zero3": {"dp": 2, "zero": 3},
    "mixtral tp2": {"tp": 2},
    "qwen2-moe dp2": {"dp": 2},
    "mixtral ep2": {"dp": 2, "ep": 2},
    "mixtral-balanced cp2 ep2": {"cp": 2, "ep": 2, "micro_batch_size": 8},
    "qwen2-moe ep2 zero3": {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"},
    "deepseek-v3 ep2": {"dp": 2, "ep": 2},
    "gpt-oss ep2": {"dp": 2, "ep": 2},
    "spare dp2 zero3": {"dp": 2, "zero": 3},
    "checkpointed tp2": {"tp": 2},
    "checkpointed pp2": {"pp": 2},
    "batch-normed dp2 zero3": {"dp": 2, "micro_batch_size": 4, "zero": 3},
}
CASES_IN_FULL: dict[str, Strategy] = {
    "llama-cached tp2 recompute": {"tp": 2, "recompute": "full"},
    "gpt2-cached tp2": {"tp": 2},
    "neox-cached tp2": {"tp": 2},
    "nanogpt-indexed pp2": {"pp": 2},
    "nanogpt dp2": {"dp": 2},
    "mixtral dp2": {"dp": 2},
    "deepseek-v3 dp2": {"dp": 2},
    "gpt-oss dp2": {"dp": 2},
    "qwen2-moe cp2": {"cp": 2},
    "spare pp2": {"pp": 2},
    "captioned tp2": {"tp": 2},
    "captioned cp2": {"cp": 2},
    "captioned dp2 zero3": {"dp": 2, "zero": 3},
    "batch-normed dp2": {"dp": 2, "micro_batch_size": 4},
}
"""Cases beside those of the default run, whose models and degrees that one has in other combinations."""
LOOPS: dict[str, Strategy] = {
    "llama loop dp2 zero3": {"dp": 2, "zero": 3},
    "llama loop tp2": {"tp": 2, "sequence_parallel": True},
    "llama loop pp2": {"pp": 2},
    "lora loop pp2": {"pp": 2},
}
"""Training loops with batches that are not the planned ones, which `torch_loops` has."""
DROPOUT: dict[str, Strategy] = {"nanogpt dropout dp2": {"dp": 2}, "nanogpt dropout tp2": {"tp": 2}}
LOOPS_IN_FULL: dict[int, dict[str, Strategy]] = {
    2: {
        "llama loop cp2": {"cp": 2},
        "llama loop dp2 zero1": {"dp": 2, "zero": 1},
        "llama loop pp2 gpipe": {"pp": 2, "schedule": "gpipe"},
        "lora loop dp2 zero3": {"dp": 2, "zero": 3},
        "lora loop tp2": {"tp": 2},
        "lora loop cp2": {"cp": 2},
    },
    4: {
        "llama loop dp2 pp2 zero2": {"dp": 2, "pp": 2, "zero": 2},
        "gpt2 loop dp2 pp2 interleaved": {"dp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved-1f1b"},
        "llama loop dp4 hybrid zero3": {"dp": 4, "shard": 2, "zero": 3, "micro_batch_size": 1},
        "llama loop dp2 tp2": {"dp": 2, "tp": 2, "zero": 3},
        "llama loop cp2 pp2": {"cp": 2, "pp": 2},
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run_strategies(tmp_path_factory.mktemp("ranks"), 2, CASES | LOOPS | DROPOUT)


@pytest.mark.parametrize("name", CASES)
def test_a_model_as_it_comes_trains_as_in_one_process(answers: Answers, name: str) -> None:
    check_equality(answers(name), most=2e-6)


@pytest.mark.parametrize("name", LOOPS)
def test_a_training_loop_with_other_batches_trains_as_in_one_process(answers: Answers, name: str) -> None:
    check_loop(answers(name))


@pytest.mark.parametrize("name", ["llama loop dp2 zero3", "llama loop pp2"])
def test_a_measured_step_sends_the_planned_bytes(answers: Answers, name: str) -> None:
    stage = planned_traffic(planned("llama", 2, LOOPS[name]), imported("llama"))[0]
    expected = stage.dp_bytes + stage.pp_bytes / 2  # the other half is what comes back
    assert answers(name)["sent"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["llama loop dp2 zero3", "llama loop tp2"])
def test_an_arranged_model_generates_what_it_generates_in_one_process(answers: Answers, name: str) -> None:
    assert answers(name)["generated"] == 0.0
    assert "do not generate" in answers("llama loop pp2")["refusal"]


def test_dropout_differs_between_copies_and_agrees_on_devices_that_share_samples(answers: Answers) -> None:
    first, second = answers("nanogpt dropout dp2")["dropped"]
    assert first != pytest.approx(second, rel=1e-3)
    first, second = answers("nanogpt dropout tp2")["dropped"]
    assert first == second


def check_loop(answer: dict[str, Any]) -> None:
    assert "error" not in answer, answer.get("trace")
    assert answer["loop"] < 1e-5
    assert answer["parameter"] < 1e-5


@pytest.mark.exhaustive
def test_every_model_as_it_comes_trains_as_in_one_process(tmp_path: Path) -> None:
    answer_of = run_strategies(tmp_path, 2, CASES_IN_FULL)
    for name in CASES_IN_FULL:
        check_equality(answer_of(name), most=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", LOOPS_IN_FULL)
def test_every_training_loop_trains_as_in_one_process(tmp_path: Path, world: int) -> None:
    answer_of = run_strategies(tmp_path, world, LOOPS_IN_FULL[world])
    for name in LOOPS_IN_FULL[world]:
        check_loop(answer_of(name))


def test_experts_exchange_the_planned_bytes(answers: Answers) -> None:
    expected = planned_exchanges(planned("mixtral", 2, CASES["mixtral ep2"]), imported("mixtral"))
    sent = [live["exchanged"] for live in answers("mixtral ep2")["live"]]  # more where more tokens go
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.05)
