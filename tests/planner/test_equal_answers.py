"""Equal questions have byte-equal answers, whatever seeds hashes have and how many threads and workers there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.planner import candidate_slicings

PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
import json
from designs import SMALL, some_points, tiny_model
from graphs import TINY_CONFIGS
from plans import QUESTION, small_cluster, small_graph
import phaze
from phaze.frontends.transformer_config import graph_from_config

def timeless(value):
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in ("run", "seconds", "digest")}
    return [timeless(item) for item in value] if isinstance(value, list) else value

experts = graph_from_config(TINY_CONFIGS["mixtral"], name="experts", sequence_length=8)
options = {"global_batch_size": 4, "micro_batch_size": (1, 2), "tp": (1, 2), "cp": (1, 2), "ep": (1, 2)}
plans = [
    phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION),
    phaze.optimize(experts, cluster=small_cluster(devices=4), **options),
]
for plan in plans:
    document = json.loads(plan.to_json())
    print(json.dumps({name: value for name, value in document.items() if name != "run"}))
result = phaze.search(tiny_model(), space=some_points(6), executor=sys.argv[1], **SMALL)
print(json.dumps(timeless(json.loads(result.to_json()))))
"""
"""Prints two plans, one of them over all axes, and a search. What a run took is left out, as are digests over it."""

RUNS = [("1", "1", "serial"), ("2", "3", "serial")]
MORE_RUNS = [(str(seed), str(threads), f"processes:{seed - 2}") for seed, threads in ((3, 1), (4, 2), (5, 4), (6, 8))]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [RUNS, pytest.param(RUNS[:1] + MORE_RUNS, marks=pytest.mark.exhaustive)])
def test_answers_are_byte_equal_over_hash_seeds_threads_and_workers(runs: list[tuple[str, str, str]]) -> None:
    tests = Path(__file__).parents[1]
    answers = set()
    for seed, threads, executor in runs:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        program = [sys.executable, "-c", PROGRAM, executor, str(tests / "support"), str(tests)]
        answers.add(subprocess.run(program, capture_output=True, env=environment, check=True).stdout)
    assert len(answers) == 1
    assert len(answers.pop().splitlines()) == 3


def test_a_plan_is_the_same_where_strategies_are_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for most in (candidate_slicings.MOST_KEPT_STRATEGIES, 0):
        monkeypatch.setattr(candidate_slicings, "MOST_KEPT_STRATEGIES", most)
        document = json.loads(phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION).to_json())
        plans.append({name: value for name, value in document.items() if name != "run"})
    assert plans[0] == plans[1]
