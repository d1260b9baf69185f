"""Models as people bring them, without any change for Phaze, train in processes as they do in one.

Kinds whose names end in `-cached` collect keys and values for generation, as Hugging Face makes them.
"""

import pytest
from oracles.traffic_count import planned_exchanges
from torch_plans import described, planned
from torch_rank_cases import Answers, Strategy, check_equality, run_strategies

CASES: dict[str, Strategy] = {
    "llama-cached tp2": {"tp": 2},
    "llama-cached tp2 recompute": {"tp": 2, "recompute": "full"},
    "llama-cached pp2": {"pp": 2, "schedule": "1f1b"},
    "gpt2-cached tp2": {"tp": 2},
    "neox-cached tp2": {"tp": 2},
    "qwen3-cached tp2": {"tp": 2},
    "t5-cached tp2": {"tp": 2},
    "nanogpt dp2": {"dp": 2},
    "nanogpt tp2": {"tp": 2},
    "nanogpt pp2": {"pp": 2},
    "nanogpt-indexed tp2": {"tp": 2},
    "nanogpt-indexed pp2": {"pp": 2},
    "encoder pp2": {"pp": 2},
    "gemma3 dp2 zero3": {"dp": 2, "zero": 3},
    "gemma3 tp2": {"tp": 2},
    "mamba dp2 zero3": {"dp": 2, "zero": 3},
    "mixtral dp2": {"dp": 2},
    "mixtral tp2": {"tp": 2},
    "qwen2-moe dp2": {"dp": 2},
    "deepseek-v3 dp2": {"dp": 2},
    "gpt-oss dp2": {"dp": 2},
    "mixtral ep2": {"dp": 2, "ep": 2},
    "mixtral-balanced cp2 ep2": {"cp": 2, "ep": 2, "micro_batch_size": 8},
    "qwen2-moe ep2 zero3": {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"},
    "qwen2-moe cp2": {"cp": 2},
    "deepseek-v3 ep2": {"dp": 2, "ep": 2},
    "gpt-oss ep2": {"dp": 2, "ep": 2},
    "spare dp2 zero3": {"dp": 2, "zero": 3},
    "spare pp2": {"pp": 2},
    "batch-normed dp2": {"dp": 2, "micro_batch_size": 4},
    "batch-normed dp2 zero3": {"dp": 2, "micro_batch_size": 4, "zero": 3},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run_strategies(tmp_path_factory.mktemp("ranks"), 2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_model_as_it_comes_trains_as_in_one_process(answers: Answers, name: str) -> None:
    check_equality(answers(name), most=2e-6)


def test_experts_exchange_the_planned_bytes(answers: Answers) -> None:
    expected = planned_exchanges(planned("mixtral", 2, CASES["mixtral ep2"]), described("mixtral"))
    sent = [live["exchanged"] for live in answers("mixtral ep2")["live"]]  # more where more tokens go
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.05)
